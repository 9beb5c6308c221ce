"""Figure 5 of Sabour 2017: segmentation of two overlapping digits by reconstruction.

The decoder reconstructs each of the two longest capsules alone. Each pixel is assigned to the digit whose drawing is
brighter there. Drawings from the capsule of a digit that is not in the image should be nearly empty.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tritoncaps.data import MultiMNIST
from tritoncaps.drawings import assign_pixels, intersection_over_union
from tritoncaps.experiments.lab import Lab, Trained
from tritoncaps.experiments.networks import decoding_capsnet
from tritoncaps.experiments.style import picture, row_label, subplots
from tritoncaps.training import ConfigError
from tritoncaps.training.objective import correct
from tritoncaps.training.task import load_test

RIGHT_ONES, WRONG_ONES, ABSENT_ONES = 4, 2, 2  # columns of the figure
COLOURS = torch.tensor([[0.93, 0.35, 0.22], [0.25, 0.72, 0.95]])
INK = 0.4  # brighter pixels are part of a digit


def run(lab: Lab) -> None:
    lab.plan(2)
    capsnet = decoding_capsnet(lab, "multimnist", quick_steps=600)
    data = load_test(replace(capsnet.config, test_limit=lab.options.images or lab.choose(500, 5000)))
    if not isinstance(data, MultiMNIST):
        raise ConfigError(f"segmentation needs --data multimnist, but it is {capsnet.config.data}")
    found = lab.step("drawings", lambda: _segmented(capsnet, data))
    for name in ("both_digits_accuracy", "digit_accuracy", "pixel_accuracy", "overlap", "absent_ink", "images"):
        lab.numbers[name] = found[name]
    lab.row(network="ours", both_digits_error=1 - found["both_digits_accuracy"], overlap=found["overlap"])
    lab.row(network="CapsNet, the paper", both_digits_error=0.05, overlap=None)
    lab.row(network="CNN, the paper", both_digits_error=0.081, overlap=None)
    lab.figure(
        "segmentation",
        _figure(found["examples"]),
        "Columns: images with correct (green) and wrong (red) predictions of both digits; on the right (*), drawings "
        "from the capsules of one digit that is in the image and one that is not. Rows: the image; the drawing of each "
        "capsule, in two colours; the digit to which each pixel is assigned; the true digits.",
    )
    lab.note(
        "overlap: intersection over union of a digit and the drawing from its capsule. pixel accuracy: the fraction of "
        "pixels of only one digit that are assigned to this digit. absent ink: the number of pixels brighter than "
        f"{INK} in drawings of digits that are not in the image, divided by that in drawings of digits that are."
    )


@torch.no_grad()
def _segmented(capsnet: Trained, data: MultiMNIST) -> dict[str, Any]:
    images, labels, digits = data.__getitems__(range(len(data)))
    pixels, digits = images.float() / 255, digits.float() / 255
    capsules = capsnet(pixels)
    present = labels.nonzero()[:, 1].view(-1, 2)
    absent = _absent(present, len(data.classes))
    draw: Any = capsnet.network.reconstruct
    drawn, drawn_absent = draw(capsules, present), draw(capsules, absent)
    is_right = correct(capsules.activations, labels)
    predicted = capsules.activations.topk(2, dim=1).indices.sort(dim=1).values
    ink = [(x.mean(dim=2) > INK).float().sum().item() for x in (drawn, drawn_absent)]

    right, wrong = (mask.nonzero()[:, 0].tolist() for mask in (is_right, ~is_right))
    rest = right[RIGHT_ONES : RIGHT_ONES + ABSENT_ONES]
    chosen = [(i, predicted[i]) for i in [*right[:RIGHT_ONES], *wrong[:WRONG_ONES]]]
    chosen += [(i, torch.stack([present[i, 0], absent[i, 0]])) for i in rest]
    examples = []
    for i, classes in chosen:
        both = draw(capsules.map(lambda x, i=i: x[i : i + 1]), classes[None])[0]
        pair = {"image": pixels[i].clone(), "digits": digits[i].clone(), "drawn": both, "right": bool(is_right[i])}
        examples.append({**pair, "classes": classes.tolist(), "labels": present[i].tolist()})
    return {
        "both_digits_accuracy": is_right.float().mean().item(),
        "digit_accuracy": torch.gather(labels, 1, predicted).float().mean().item(),
        "pixel_accuracy": pixel_accuracy(drawn, digits),
        "overlap": intersection_over_union(drawn, digits, INK).mean().item(),
        "absent_ink": ink[1] / max(ink[0], 1.0),
        "images": len(data),
        "examples": examples,
    }


def pixel_accuracy(drawn: Tensor, digits: Tensor) -> float:
    """The fraction of pixels of only one of the digits [N, 2, C, H, W] that are assigned to its drawing."""
    real = digits.mean(dim=2) > INK
    alone = real.sum(dim=1) == 1
    owner = real.int().argmax(dim=1)
    given = assign_pixels(drawn, threshold=0.0)
    return (given == owner)[alone].float().mean().item()


def _absent(present: Tensor, classes: int) -> Tensor:
    """Two classes [N, 2] that are not in each image."""
    scores = torch.arange(classes, 0, -1).expand(len(present), classes).clone()
    return scores.scatter(1, present, -1).topk(2, dim=1).indices.sort(dim=1).values


def _figure(examples: list[dict[str, Any]]) -> Any:
    columns = max(len(examples), 1)
    figure, axes = subplots(4, columns, (1.05 * columns + 0.9, 4.9))
    for column, example in enumerate(examples):
        drawn, is_absent = example["drawn"], example["classes"] != example["labels"] and example["right"]
        star = "*" if is_absent else ""
        pairs = [f"({a}, {b})" for a, b in (example["labels"], example["classes"])]
        picture(axes[0][column], example["image"], f"is {pairs[0]}")
        word = "of " if is_absent else "found "
        picture(
            axes[1][column], _coloured(drawn), f"{word}{pairs[1]}{star}", right=None if is_absent else example["right"]
        )
        given = assign_pixels(drawn[None], INK)[0]
        picture(axes[2][column], _coloured(torch.stack([given == k for k in (0, 1)])[:, None].float()))
        picture(axes[3][column], _coloured(example["digits"]))
    for line, label in zip(axes, ("image", "drawn", "pixels\ngiven to", "made of"), strict=True):
        row_label(line[0], label)
    return figure


def _coloured(pair: Tensor) -> Tensor:
    """Two grey images [2, 1, H, W] in two colours in one image [3, H, W]."""
    return torch.einsum("mhw,mc->chw", pair[:, 0], COLOURS).clamp(max=1)
