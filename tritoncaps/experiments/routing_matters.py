"""The effect of routing on accuracy, a question of later papers (Paik 2019, Gu and Tresp 2019).

The same network is trained with one, two and three iterations of EM routing. Each network is tested with all numbers of
iterations. One iteration is one M-step with uniform assignments, without routing. "uniform" is also one M-step with
uniform assignments, but with the inverse temperature of the last iteration of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from tritoncaps.data import ImageSet
from tritoncaps.experiments.lab import Lab, Trained
from tritoncaps.experiments.networks import local, train_matrix_capsnet
from tritoncaps.experiments.style import bare, subplots
from tritoncaps.routing import EMRouting
from tritoncaps.training import ConfigError

TESTED = ("uniform", 1, 2, 3, 5)


def run(lab: Lab) -> None:
    count = lab.options.images or lab.choose(500, 24_300)
    steps = lab.options.steps or lab.choose(250, 3000)
    given = lab.given()
    lab.plan(1 if given else 6)
    networks = [given] if given else [_trained(lab, iterations, steps) for iterations in (1, 2, 3)]
    for network in networks:
        data = network.test_images(count, lab.options.seed)
        found = lab.step(f"test-{network.name.replace(' ', '-')}", lambda n=network, d=data: _tested(n, d))  # type: ignore[misc]
        for tested, accuracy in found.items():
            lab.row(trained_with=_iterations(network), tested_with=tested, accuracy=accuracy, images=len(data))
    own = {row["trained_with"]: row["accuracy"] for row in lab.rows if row["tested_with"] == str(row["trained_with"])}
    uniform = {row["trained_with"]: row["accuracy"] for row in lab.rows if row["tested_with"] == "uniform"}
    for iterations, accuracy in own.items():
        lab.numbers[f"accuracy, {iterations} iterations"] = accuracy
        lab.numbers[f"accuracy without its routing, {iterations} iterations"] = uniform[iterations]
    name = networks[0].config.data
    lab.figure(
        "accuracies",
        _figure(lab.rows),
        f"Accuracy on test images of {name}. Rows: iterations in training. Columns: iterations in the test. The frames "
        "show networks that are tested with the routing of their training.",
    )
    lab.note(
        "If routing had no effect, all frames would have the same accuracy, and so would the columns of a row. A row "
        "shows whether a trained network needs its routing. The frames show whether a network that is trained without "
        "routing is worse."
    )


def _trained(lab: Lab, iterations: int, steps: int) -> Trained:
    settings = {"data": lab.options.data or "toynorb", "test_limit": 200, "options": {"routing": local(iterations)}}
    return train_matrix_capsnet(lab, f"{iterations} iterations", steps, f"local-{iterations}", **settings)


def _tested(network: Trained, data: ImageSet) -> dict[str, float]:
    found = {}
    for tested in TESTED:
        with with_routing(network.network, tested):
            found[str(tested)] = network.evaluate(data).accuracy
    return found


@contextmanager
def with_routing(network: nn.Module, iterations: int | str) -> Iterator[None]:
    """A context in which all layers with EM routing use this many iterations. "uniform": only the last M-step, with
    uniform assignments and its own inverse temperature."""
    layers = _routed(network)
    if not layers:
        raise ConfigError(f"the network must have EM routing, but it is a {type(network).__name__} without EM routing")
    before = [layer.routing for layer in layers]
    try:
        for layer, routing in zip(layers, before, strict=True):
            layer.routing = _uniform(routing) if iterations == "uniform" else replace(routing, iterations=iterations)
        yield
    finally:
        for layer, routing in zip(layers, before, strict=True):
            layer.routing = routing


def _uniform(routing: EMRouting) -> EMRouting:
    """EM routing with one iteration and the inverse temperature of the last iteration."""
    assert routing.final_lambda is not None
    scale = routing.lambdas[-1] / routing.lambdas[0]
    return replace(routing, iterations=1, final_lambda=routing.final_lambda * scale)


def _iterations(network: Trained) -> int:
    return _routed(network.network)[0].routing.iterations


def _routed(network: nn.Module) -> list[Any]:
    """The layers with EM routing."""
    return [layer for layer in network.modules() if isinstance(getattr(layer, "routing", None), EMRouting)]


def _figure(rows: list[dict[str, Any]]) -> Any:
    trained = list(dict.fromkeys(row["trained_with"] for row in rows))
    values = [[100 * row["accuracy"] for row in rows if row["trained_with"] == t] for t in trained]
    figure, ((axis,),) = subplots(1, 1, (6.4, 1.5 + 0.62 * len(trained)))
    low, high = min(map(min, values)), max(map(max, values))
    axis.imshow(values, cmap="Blues", vmin=low - 0.25 * (high - low + 1), vmax=high, aspect="auto")
    bare(axis)
    for i, t in enumerate(trained):
        for j, tested in enumerate(TESTED):
            dark = values[i][j] > low + 0.6 * (high - low)
            axis.text(j, i, f"{values[i][j]:.1f}%", ha="center", va="center", color="white" if dark else "#1c2430")
            if tested == t:
                frame = {"fill": False, "edgecolor": "#d9622b", "linewidth": 2.5}
                axis.add_patch(_rectangle(j, i, **frame))
    axis.set_xticks(range(len(TESTED)), map(str, TESTED))
    axis.set_yticks(range(len(trained)), map(str, trained))
    axis.set(xlabel="iterations in the test", ylabel="iterations in training")
    return figure


def _rectangle(x: int, y: int, **options: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, **options)
