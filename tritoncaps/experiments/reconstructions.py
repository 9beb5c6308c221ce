"""Figure 3 of Sabour 2017: images, their predictions and reconstructions, including wrong predictions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritoncaps.data import ImageSet
from tritoncaps.experiments.lab import Lab, Trained, pixels_of
from tritoncaps.experiments.networks import decoding_capsnet
from tritoncaps.experiments.style import bare, picture, row_label, subplots

COLUMNS = 8


def run(lab: Lab) -> None:
    lab.plan(2)
    capsnet = decoding_capsnet(lab)
    data = capsnet.test_images(lab.options.images or lab.choose(1000, 10_000), lab.options.seed)
    found = lab.step("drawings", lambda: _drawn(capsnet, data))
    lab.numbers |= {key: found[key] for key in ("accuracy", "squared_error", "squared_error_of_mean_image", "images")}
    for kind in ("right", "wrong"):
        for example in found[kind]:
            names = {key: data.classes[example[key]] for key in ("label", "prediction")}
            lab.row(kind=kind, **names, squared_error=example["squared_error"])
    lab.figure(
        "reconstructions",
        _figure(found["right"], found["wrong"], data),
        "Test images with (label, prediction), and their reconstructions. Red: wrong predictions, reconstructed from "
        "the capsule of the prediction and from the capsule of the label.",
    )
    lab.note(
        "The squared error is the mean over all pixels of all images. The error of the mean image is the error of a "
        "decoder that always returns the mean of all test images."
    )


@torch.no_grad()
def _drawn(capsnet: Trained, data: ImageSet) -> dict[str, Any]:
    pixels = pixels_of(data)
    capsules = [capsnet(part) for part in pixels.split(128)]
    scores = torch.cat([part.activations for part in capsules])
    predictions = scores.argmax(dim=1)
    draw: Any = capsnet.network.reconstruct
    # the target of the decoder is the input of the network
    seen = capsnet.seen(pixels)
    by_prediction = torch.cat([draw(part) for part in capsules])
    by_label = torch.cat([draw(part, labels) for part, labels in zip(capsules, data.labels.split(128), strict=True)])
    errors = (by_prediction - seen).square().mean(dim=(1, 2, 3))
    is_right = predictions == data.labels

    def example(index: int) -> dict[str, Any]:
        return {
            "image": seen[index].clone(),
            "drawn": by_prediction[index].clone(),
            "drawn_as_label": by_label[index].clone(),
            "label": int(data.labels[index]),
            "prediction": int(predictions[index]),
            "squared_error": errors[index].item(),
        }

    return {
        "accuracy": is_right.float().mean().item(),
        "squared_error": errors.mean().item(),
        "squared_error_of_mean_image": (seen - seen.mean(dim=0)).square().mean().item(),
        "images": len(data),
        "right": [example(i) for i in _one_of_each(data.labels, is_right)],
        "wrong": [example(i) for i in (~is_right).nonzero()[:COLUMNS, 0].tolist()],
    }


def _one_of_each(labels: Tensor, chosen: Tensor) -> list[int]:
    """The first chosen image of each class, at most one for each column."""
    first = [(chosen & (labels == k)).nonzero()[:1, 0].tolist() for k in labels.unique()]
    return [index for found in first for index in found][:COLUMNS]


def _figure(right: list[dict[str, Any]], wrong: list[dict[str, Any]], data: ImageSet) -> Any:
    keys = ["image", "drawn"] + (["image", "drawn", "drawn_as_label"] if wrong else [])
    labels = {"image": "image", "drawn": "drawn", "drawn_as_label": "drawn as\nits label"}
    figure, axes = subplots(len(keys), COLUMNS, (8.6, 1.05 * len(keys) + 0.2))
    for line, key, row in zip(axes, keys, range(len(keys)), strict=True):
        examples = right if row < 2 else wrong
        row_label(line[0], labels[key] if row != 3 else "drawn as\npredicted")
        for axis, example in zip(line, [*examples, *[None] * COLUMNS], strict=False):
            if example is None:
                bare(axis)
                continue
            names = [data.classes[example[name]] for name in ("label", "prediction")]
            picture(axis, example[key], f"({', '.join(names)})" if key == "image" else "", right=row < 2)
    return figure
