"""Figure 4 of Sabour 2017: the meaning of the dimensions of a digit capsule.

The experiment changes each dimension by -0.25 to 0.25 in steps of 0.05, and reconstructs images with the decoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritoncaps.capsules import Capsules
from tritoncaps.data import ImageSet
from tritoncaps.drawings import perturb_poses
from tritoncaps.experiments.lab import Lab, Trained, pixels_of
from tritoncaps.experiments.networks import decoding_capsnet
from tritoncaps.experiments.style import subplots, tiles

OFFSETS = [round(0.05 * k, 2) for k in range(-5, 6)]


def run(lab: Lab) -> None:
    lab.plan(2)
    capsnet = decoding_capsnet(lab)
    data = capsnet.test_images(lab.options.images or lab.choose(100, 1000), lab.options.seed)
    found = lab.step("drawings", lambda: _perturbed(capsnet, data))
    for dimension, (change, spread) in enumerate(zip(found["change"], found["spread"], strict=True)):
        lab.row(dimension=dimension, pixel_change=change, spread_over_images=spread)
    lab.numbers["images"] = found["images"]
    lab.numbers["mean pixel change"] = sum(found["change"]) / len(found["change"])
    drawn, names = found["examples"], [data.classes[label] for label in found["labels"]]
    middle = len(names) // 2
    lab.figure(
        "dimensions",
        _all_dimensions(drawn[middle], names[middle]),
        f"All {drawn.shape[1]} dimensions of the capsule of one {names[middle]}, each changed by -0.25 to 0.25. The "
        "middle column shows the unchanged capsule.",
    )
    lab.figure(
        "classes",
        _most_visible(drawn, names),
        "One image of each class, with the dimension that changes its reconstruction most. In figure 4 of the paper, "
        "dimensions mean scale, thickness, skew, width and details of a digit.",
    )
    lab.note(
        "For each dimension, the table has the mean absolute change of a pixel from -0.25 to 0.25, and the standard "
        "deviation of the dimension over the test images, for comparison with 0.25."
    )


@torch.no_grad()
def _perturbed(capsnet: Trained, data: ImageSet) -> dict[str, Any]:
    """For each dimension, the change of drawings and the standard deviation of poses; and drawings of the first image
    of each class."""
    poses = capsnet(pixels_of(data)).poses  # [N, classes, D]
    own = poses[torch.arange(len(data)), data.labels]
    ends = draw_moved(capsnet, own, data.labels, [OFFSETS[0], OFFSETS[-1]])
    first = torch.stack([(data.labels == k).nonzero()[0, 0] for k in data.labels.unique()])
    return {
        "change": (ends[:, :, 1] - ends[:, :, 0]).abs().mean(dim=(0, 2, 3, 4)).tolist(),
        "spread": own.std(dim=0).tolist(),
        "examples": draw_moved(capsnet, own[first], data.labels[first], OFFSETS),
        "labels": data.labels[first].tolist(),
        "images": len(data),
    }


def draw_moved(capsnet: Trained, poses: Tensor, labels: Tensor, offsets: list[float]) -> Tensor:
    """Reconstruct images from changed capsules [N, D] of classes ``labels``: [N, D, offsets, channels, H, W]."""
    moved = perturb_poses(poses, offsets)  # [N, D, K, D]
    classes = capsnet.network.num_classes
    assert isinstance(classes, int)
    repeated = labels.repeat_interleave(moved[0, :, :, 0].numel())
    all_poses = torch.zeros(len(repeated), classes, poses.shape[-1])
    all_poses[torch.arange(len(repeated)), repeated] = moved.flatten(0, 2)
    capsules = Capsules(all_poses, all_poses.norm(dim=-1))
    return capsnet.network.reconstruct(capsules, repeated).unflatten(0, moved.shape[:3])  # type: ignore[operator]


def _all_dimensions(drawn: Tensor, name: str) -> Any:
    """The figure of the drawings [D, K, C, H, W] of one capsule."""
    figure, ((axis,),) = subplots(1, 1, (6.6, 0.56 * len(drawn) + 0.6))
    tiles(axis, drawn, [str(d) for d in range(len(drawn))], _names_of_offsets())
    axis.set_ylabel(f"dimension of the capsule of a {name}")
    return figure


def _most_visible(drawn: Tensor, names: list[str]) -> Any:
    """The figure of the drawings [N, D, K, C, H, W], for the dimension of each capsule with the largest change."""
    change = (drawn[:, :, -1] - drawn[:, :, 0]).abs().mean(dim=(2, 3, 4))
    best = change.argmax(dim=1)
    figure, ((axis,),) = subplots(1, 1, (7.2, 0.56 * len(drawn) + 0.4))
    labels = [f"{name}, dimension {d}" for name, d in zip(names, best.tolist(), strict=True)]
    tiles(axis, drawn[torch.arange(len(drawn)), best], labels, _names_of_offsets())
    return figure


def _names_of_offsets() -> list[str]:
    return [f"{offset:+.2f}" if offset else "0" for offset in OFFSETS]
