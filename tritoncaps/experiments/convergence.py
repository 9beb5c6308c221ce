"""Figure A.1 of Sabour 2017: how much each routing iteration still changes, over training; and the same of EM routing.

Dynamic routing: the mean absolute change of a routing logit. EM routing: the share of a child's vote that moves to
other parents, half of the sum of the absolute changes of its assignments R.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tritoncaps import inspect
from tritoncaps.capsules import Capsules
from tritoncaps.data import ImageSet
from tritoncaps.experiments.lab import Lab, Trained
from tritoncaps.experiments.networks import capsnet_stages, matrix_capsnet_stages
from tritoncaps.experiments.style import subplots
from tritoncaps.inspect import DynamicIteration
from tritoncaps.training import ConfigError
from tritoncaps.training.pictures import pyplot

ITERATIONS = 6  # that are looked at, whatever the network was trained with


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
        networks = [(f"dynamic routing, {n.result['step']} steps", n) for n in stages]
        networks += [(f"EM routing, {n.result['step']} steps", n) for n in matrix_capsnet_stages(lab, em, toys)]
    count = lab.options.images or lab.choose(24, 500)
    for name, network in networks:
        data = network.test_images(count, lab.options.seed)
        key = name.replace(", ", "-").replace(" ", "-")
        found = lab.step(f"changes-{key}", lambda n=network, d=data: _changes(n, d))  # type: ignore[misc]
        for layer, (kind, changes) in found.items():
            for iteration, change in enumerate(changes, start=1):
                lab.row(network=name, layer=layer, routing=kind, iteration=iteration, change=change)
    lab.numbers["images"] = count
    for routing in ("dynamic", "EM"):
        rows = [row for row in lab.rows if row["routing"] == routing]
        if rows:
            last = [row["change"] for row in rows if row["network"] == rows[-1]["network"]][-ITERATIONS:]
            lab.numbers[f"{routing} routing, change of iteration {len(last)} over that of iteration 1"] = (
                last[-1] / last[0]
            )
    lab.figure(
        "changes",
        _figure(lab.rows),
        "What each iteration changes, on a logarithmic scale, after a few steps of training and at the end: logits of "
        "dynamic routing (figure A.1 of the paper), and assignments of EM routing, layer by layer at the end.",
    )
    lab.note(
        "The networks are trained with their own number of iterations and looked at with more. In the paper the change "
        "of a logit is small from the fifth iteration on; it recommends three."
    )


@torch.no_grad()
def _changes(network: Trained, data: ImageSet) -> dict[str, Any]:
    """By layer, the kind of routing and what each iteration changes."""
    found = network.network(network.pipeline.test(data.images)[0], return_intermediate=True)
    names = list(found)
    changes = {}
    for below, name in pairwise(names):
        layer = network.network.get_submodule(name)
        changes[name] = changes_of(layer, found[below], ITERATIONS)
    if not changes:
        raise ConfigError(f"{network.name} has no routed layers")
    return changes


def changes_of(layer: Any, capsules: Capsules, iterations: int) -> tuple[str, list[float]]:
    """What each of so many iterations of a layer's routing changes: logits b of dynamic routing, by their mean absolute
    change; assignments R of a mixture, by the mean share of a child's vote that moves."""
    before = layer.routing
    layer.routing = replace(before, iterations=iterations)
    try:
        found: Any = inspect.iterations(layer, capsules)
    finally:
        layer.routing = before
    if isinstance(found[0], DynamicIteration):
        return "dynamic", [step.agreement.abs().mean().item() for step in found]
    children = capsules.activations.numel()
    per_child = 1 if before.competition == "global" else _edges(found[0].assignments) / children
    return "EM", [
        0.5 * (step.next_assignments - step.assignments).abs().sum().item() / (children * per_child) for step in found
    ]


def _edges(assignments: Tensor) -> float:
    """How often children are shared among types, where they are at every position anew: the sum of all assignments."""
    return assignments.sum().item()


def _figure(rows: list[dict[str, Any]]) -> Any:
    kinds = list(dict.fromkeys(row["routing"] for row in rows))
    titles = {
        "dynamic": ("Dynamic routing", "mean change of a logit"),
        "EM": ("EM routing", "share of a vote that moves"),
    }
    figure, (axes,) = subplots(1, len(kinds), (4.9 * len(kinds), 3.7))
    palette = pyplot().get_cmap("viridis")
    for axis, kind in zip(axes, kinds, strict=True):
        of_kind = [row for row in rows if row["routing"] == kind]
        networks = list(dict.fromkeys(row["network"] for row in of_kind))
        for i, network in enumerate(networks):
            is_last = i == len(networks) - 1
            layers = list(dict.fromkeys(row["layer"] for row in of_kind))
            for layer in layers if is_last else layers[-1:]:
                line = [
                    (r["iteration"], r["change"]) for r in of_kind if (r["network"], r["layer"]) == (network, layer)
                ]
                own = layer == layers[-1]
                label = network.partition(", ")[2] or network
                axis.plot(
                    *zip(*line, strict=True),
                    color=palette(0.85 * (1 - (i + 1) / len(networks))) if own else "#98a1b0",
                    linestyle="-" if own else {0: ":", 1: "--"}.get(layers.index(layer), "-."),
                    marker="o",
                    label=f"{layer}, {label}",
                )
        axis.set_yscale("log")
        axis.set(title=titles[kind][0], xlabel="iteration", ylabel=titles[kind][1])
        axis.legend()
    return figure
