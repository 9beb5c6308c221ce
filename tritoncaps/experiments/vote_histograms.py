"""Figures 2 and B.2 of Hinton 2018: distances of votes from the mean of each class capsule after every iteration.

The weight of a vote is the assignment times the activation of the child, so that the weights of a histogram sum to the
support of the class. If routing works, the votes for the true class move together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritoncaps import inspect
from tritoncaps.capsules import Capsules
from tritoncaps.data import ImageSet
from tritoncaps.experiments.lab import Lab, Trained, pixels_of
from tritoncaps.experiments.style import CAPSULES, OTHER, picture, subplots
from tritoncaps.routing import MixtureRouting
from tritoncaps.training import ConfigError

BINS = 30
SHOWN = 2  # images in the figures


def run(lab: Lab) -> None:
    lab.plan(1)
    network = lab.given() or lab.shipped(lab.options.data or "toynorb")
    layer: Any = getattr(network.network, "class_caps", None)
    if not isinstance(getattr(layer, "routing", None), MixtureRouting):
        raise ConfigError(
            f"vote-histograms needs class capsules with a mixture routing, but {network.name} is {network.config.model}"
        )
    data = network.test_images(lab.options.images or lab.choose(100, 1000), lab.options.seed)
    found = lab.step("votes", lambda: _of_images(network, data))
    for numbers in found["mean_distances"]:
        lab.row(**numbers)
    last = [row for row in found["mean_distances"] if row["iteration"] == len(found["examples"][0]["distances"])]
    for row in last:
        lab.numbers[f"mean distance, {row['class']}"] = row["mean_distance"]
    lab.numbers["images"] = found["images"]
    for example in found["examples"]:
        label = data.classes[example["label"]]
        lab.figure(
            f"votes-{label}",
            _figure(example, data.classes),
            f"Histograms of the votes for each class of this {label}, over the distance from the mean of the class "
            "capsule, weighted by assignment and activation. Each row is an iteration. Blue: the true class.",
        )
    lab.note(
        "The table has the mean distance of votes for the true class and for the other classes, with the same weights, "
        "averaged over all images with a correct prediction; and the support of the classes."
    )


def vote_distances(layer: Any, capsules: Capsules) -> list[tuple[Tensor, Tensor]]:
    """For each iteration, the distances [N, classes, votes] of votes from the mean of their class after the M-step, and
    the weights R a of the votes, which sum to the support of the class."""
    found = inspect.votes(layer, capsules, list(range(layer.out_caps)))
    steps = []
    for iteration in inspect.iterations(layer, capsules):
        mean = iteration.mean[:, :, None, None]
        distances = (found.votes - mean).flatten(-2).norm(dim=-1)  # [N, classes, S, B]
        weights = found.select(iteration.assignments) * found.activations
        steps.append((distances.flatten(2), weights.flatten(2)))
    return steps


@torch.no_grad()
def _of_images(network: Trained, data: ImageSet) -> dict[str, Any]:
    capsules = network.network(network.pipeline.test(data.images)[0], return_intermediate=True)
    is_right = capsules["class_caps"].activations.argmax(dim=1) == data.labels
    chosen = is_right.nonzero()[:, 0]
    if not len(chosen):
        raise ConfigError(f"{network.name} classifies none of {len(data)} images correctly: there is nothing to show")
    labels = data.labels[chosen]
    below = capsules["conv_caps2"].map(lambda x: x[chosen])
    steps = vote_distances(network.network.class_caps, below)
    rows = []
    for t, (distances, weights) in enumerate(steps, start=1):
        support = weights.sum(dim=2)
        mean = (distances * weights).sum(dim=2) / support.clamp(min=1e-9)  # [N, classes]
        own = torch.nn.functional.one_hot(labels, mean.shape[1]).bool()
        for kind, mask in (("right class", own), ("other classes", ~own)):
            values = {"mean_distance": mean[mask].mean().item(), "support": support[mask].mean().item()}
            rows.append({"iteration": t, "class": kind, **values})
    first = [int((labels == k).nonzero()[0]) for k in labels.unique()][-SHOWN:]
    examples = [
        {
            "image": network.seen(pixels_of(data))[chosen[i]].clone(),
            "label": int(labels[i]),
            "distances": [distances[i].clone() for distances, _ in steps],
            "weights": [weights[i].clone() for _, weights in steps],
        }
        for i in first
    ]
    return {"mean_distances": rows, "examples": examples, "images": len(chosen)}


def _figure(example: dict[str, Any], classes: tuple[str, ...]) -> Any:
    rows, label = len(example["distances"]), example["label"]
    shown = [label, *[k for k in range(len(classes)) if k != label]][:5]
    figure, axes = subplots(rows, 1 + len(shown), (2.05 * (1 + len(shown)), 1.75 * rows + 0.5))
    far = max(float(torch.cat([d.flatten() for d in example["distances"]]).quantile(0.99)), 1e-6)
    bins = torch.linspace(0, far, BINS + 1).tolist()
    for t, (distances, weights) in enumerate(zip(example["distances"], example["weights"], strict=True)):
        highest = 0.0
        for axis, k in zip(axes[t][1:], shown, strict=True):
            colour = CAPSULES if k == label else OTHER
            heights, _, _ = axis.hist(distances[k].tolist(), bins, weights=weights[k].tolist(), color=colour)
            highest = max(highest, heights.max())
            axis.set_title(f"{classes[k]}, support {weights[k].sum():.1f}", fontsize=8.5, fontweight="normal")
        for axis in axes[t][1:]:
            axis.set_ylim(0, 1.08 * highest)
            axis.tick_params(labelsize=7)
        for axis in axes[t][2:]:
            axis.set_yticklabels([])
        axes[t][1].set_ylabel(f"iteration {t + 1}", fontsize=8.5)
    picture(axes[0][0], example["image"], f"a {classes[label]}")
    for line in axes[1:]:
        line[0].axis("off")
    for axis in axes[-1][1:]:
        axis.set_xlabel("distance from the mean", fontsize=8)
    return figure
