"""Figure A.1 of Sabour 2017: the change that each routing iteration makes, during training; also for EM routing.

"logits" is the mean absolute change of a routing logit, which the paper plots. "assignments" is the part of a child
that moves to other parents: half of the sum of absolute changes of its coupling coefficients c, or of R in EM routing.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from tritoncaps import inspect
from tritoncaps.capsules import Capsules
from tritoncaps.data import ImageSet
from tritoncaps.experiments.lab import Lab, Trained
from tritoncaps.experiments.networks import capsnet_stages, matrix_capsnet_stages
from tritoncaps.experiments.style import subplots
from tritoncaps.inspect import DynamicIteration
from tritoncaps.training import ConfigError
from tritoncaps.training.pictures import pyplot

ITERATIONS = 6  # iterations in the test, independent of those in training


def run(lab: Lab) -> None:
    given = lab.given()
    if given is not None:
        networks = [(f"{given.name}", given)]
        lab.plan(1)
    else:
        dynamic = lab.choose([1, 100, 400], [1, 1000, 10_000])
        em = lab.choose([1, 60, 200], [1, 500, 3000])
        if lab.options.steps:
            dynamic = em = [1, max(lab.options.steps, 2)]
        lab.plan(2 * (len(dynamic) + len(em)))
        toys = "toynorb" if lab.options.data in (None, "mnist") else lab.options.data
        stages = capsnet_stages(lab, dynamic, lab.options.data or "mnist")
        networks = [(f"dynamic routing, {_steps(n)}", n) for n in stages]
        networks += [(f"EM routing, {_steps(n)}", n) for n in matrix_capsnet_stages(lab, em, toys)]
    count = lab.options.images or lab.choose(24, 500)
    for name, network in networks:
        data = network.test_images(count, lab.options.seed)
        key = name.replace(", ", "-").replace(" ", "-")
        found = lab.step(f"changes-{key}", lambda n=network, d=data: _changes(n, d))  # type: ignore[misc]
        for layer, quantities in found.items():
            for quantity, changes in quantities.items():
                for iteration, change in enumerate(changes, start=1):
                    lab.row(network=name, layer=layer, quantity=quantity, iteration=iteration, change=change)
    lab.numbers["images"] = count
    for panel, rows in _panels(lab.rows).items():
        last = [row["change"] for row in rows if row["network"] == rows[-1]["network"]][-ITERATIONS:]
        lab.numbers[f"{panel}: change of iteration {ITERATIONS} over that of the first"] = last[-1] / last[0]
    lab.figure(
        "changes",
        _figure(lab.rows),
        "The change in each iteration, on a logarithmic scale, after the first training step and later: logits of "
        "dynamic routing (figure A.1 of the paper), its coupling coefficients, and the assignments of EM routing. For "
        "the last training step, all three layers with EM routing are shown.",
    )
    lab.note(
        f"The networks are trained with three iterations and tested with {ITERATIONS}. Each iteration adds the "
        "agreement of a vote with its parent to the logit. The agreement does not become smaller when routing has "
        "converged; only the assignments stop changing. The paper finds that the change of a logit decreases with "
        "every iteration."
    )


def _steps(network: Trained) -> str:
    return "1 step" if network.result["step"] == 1 else f"{network.result['step']} steps"


@torch.no_grad()
def _changes(network: Trained, data: ImageSet) -> dict[str, Any]:
    """The change in each iteration, by layer."""
    found = network.network(network.pipeline.test(data.images)[0], return_intermediate=True)
    names = list(found)
    changes = {}
    for below, name in pairwise(names):
        layer = network.network.get_submodule(name)
        changes[name] = changes_of(layer, found[below], ITERATIONS)
    if not changes:
        raise ConfigError(f"{network.name} has no routed layers")
    return changes


def changes_of(layer: Any, capsules: Capsules, iterations: int) -> dict[str, list[float]]:
    """The changes in each iteration of a layer's routing. "assignments": the mean part of a child that moves to other
    parents. "logits", for dynamic routing: their mean absolute change."""
    before = layer.routing
    layer.routing = replace(before, iterations=iterations)
    try:
        found: Any = inspect.iterations(layer, capsules)
    finally:
        layer.routing = before
    shared = found[0].assignments.sum()  # the assignments of a child sum to 1, or, unless all parents compete, to more
    moved = [0.5 * (step.next_assignments - step.assignments).abs().sum() / shared for step in found]
    changes = {"assignments": [share.item() for share in moved]}
    if isinstance(found[0], DynamicIteration):
        changes = {"logits": [step.agreement.abs().mean().item() for step in found], **changes}
    return changes


def _panels(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each panel of the figure, by its title."""
    dynamic = {row["network"] for row in rows if row["quantity"] == "logits"}
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kind = "Dynamic routing" if row["network"] in dynamic else "EM routing"
        panels.setdefault(f"{kind}, {row['quantity']}", []).append(row)
    return panels


def _figure(rows: list[dict[str, Any]]) -> Any:
    panels = _panels(rows)
    figure, (axes,) = subplots(1, len(panels), (4.1 * len(panels), 3.6))
    for axis, (title, of_panel) in zip(axes, panels.items(), strict=True):
        networks = list(dict.fromkeys(row["network"] for row in of_panel))
        layers = list(dict.fromkeys(row["layer"] for row in of_panel))
        for i, network in enumerate(networks):
            for layer in layers if network == networks[-1] else layers[-1:]:
                line = [
                    (row["iteration"], row["change"])
                    for row in of_panel
                    if (row["network"], row["layer"]) == (network, layer)
                ]
                style = _style(i, len(networks), layers, layer)
                label = (network.partition(", ")[2] or network) + ("" if layer == layers[-1] else f", {layer}")
                axis.plot(*zip(*line, strict=True), marker="o", label=label, **style)
        axis.set_yscale("log")
        for which in ("major", "minor"):
            getattr(axis.yaxis, f"set_{which}_formatter")("{x:g}")
        axis.tick_params(axis="y", which="both", labelsize=7.5)
        axis.set(title=title, xlabel="iteration")
        axis.legend()
    axes[0].set_ylabel("change")
    return figure


def _style(index: int, count: int, layers: list[str], layer: str) -> dict[str, Any]:
    """The last layer in colours that darken with training, the others in grey."""
    if layer == layers[-1]:
        return {"color": pyplot().get_cmap("viridis")(0.85 * (1 - (index + 1) / count))}
    return {"color": "#98a1b0", "linestyle": ":" if layer == layers[0] else "--"}
