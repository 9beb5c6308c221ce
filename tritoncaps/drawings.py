"""Helpers to inspect capsules with a decoder: change entries of poses, and compare drawings with objects.

A drawing is the image that the decoder reconstructs from one capsule.

>>> import torch
>>> from tritoncaps import drawings
>>> drawings.perturb_poses(torch.zeros(2), [-0.1, 0.1])[1]  # the second dimension is moved
tensor([[ 0.0000, -0.1000],
        [ 0.0000,  0.1000]])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritoncaps._internal.checks import check_shape, check_tensor

NO_DRAWING = -1


def perturb_poses(poses: Tensor, offsets: Sequence[float]) -> Tensor:
    """Change each entry of the poses by each offset, one entry at a time.

    Sabour 2017, figure 4, changes each entry of a digit capsule by -0.25 to 0.25 and shows the reconstructions.

    Args:
        poses: pose vectors.
        offsets: the numbers to add.

    Shape:
        - poses: [*, D], offsets: [K]
        - result: [*, D, K, D]

    Returns:
        At [*, d, k], the pose with ``offsets[k]`` added to entry d.

    Example:
        >>> import torch
        >>> from tritoncaps import drawings
        >>> drawings.perturb_poses(torch.zeros(5, 16), [-0.25, 0.0, 0.25]).shape
        torch.Size([5, 16, 3, 16])
    """
    check_tensor("poses", poses)
    moves = torch.as_tensor(offsets, dtype=poses.dtype, device=poses.device)
    check_shape("offsets", moves, ["K"])
    size = poses.shape[-1]
    along = torch.eye(size, dtype=poses.dtype, device=poses.device)[:, None] * moves[:, None]  # [D, K, D]
    return poses[..., None, None, :] + along


def assign_pixels(drawings: Tensor, threshold: float = 0.5) -> Tensor:
    """Assign each pixel to the drawing that is brightest there. Channels are averaged.

    Args:
        drawings: m drawings of each image.
        threshold: pixels where no drawing is brighter than this are not assigned.

    Shape:
        - drawings: [N, m, C, H, W]
        - result: [N, H, W]

    Returns:
        The index of the drawing of each pixel, or -1.

    Example:
        >>> import torch
        >>> from tritoncaps import drawings
        >>> two = torch.tensor([[0.9, 0.0, 0.0], [0.6, 0.7, 0.0]]).reshape(1, 2, 1, 1, 3)
        >>> drawings.assign_pixels(two)
        tensor([[[ 0,  1, -1]]])
    """
    check_tensor("drawings", drawings)
    check_shape("drawings", drawings, ["N", "m", "C", "H", "W"])
    brightness, brightest = drawings.mean(dim=2).max(dim=1)
    return torch.where(brightness > threshold, brightest, NO_DRAWING)


def intersection_over_union(drawings: Tensor, objects: Tensor, threshold: float = 0.5) -> Tensor:
    """Intersection over union of each drawing and its object. Objects may overlap.

    Args:
        drawings: m drawings of each image.
        objects: the m objects of each image, each one alone.
        threshold: pixels that are brighter than this belong to the drawing or the object. Channels are averaged.

    Shape:
        - drawings and objects: [N, m, C, H, W]
        - result: [N, m]

    Returns:
        The intersection over union; 1 if both are empty.

    Example:
        >>> import torch
        >>> from tritoncaps import drawings
        >>> drawn, real = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 1.0])
        >>> drawings.intersection_over_union(drawn.reshape(1, 1, 1, 1, 3), real.reshape(1, 1, 1, 1, 3))
        tensor([[0.3333]])
    """
    check_tensor("drawings", drawings)
    check_shape("objects", objects, drawings.shape)
    drawn, real = drawings.mean(dim=2) > threshold, objects.mean(dim=2) > threshold
    both, either = (drawn & real).sum(dim=(-1, -2)), (drawn | real).sum(dim=(-1, -2))
    return torch.where(either == 0, 1.0, both / either.clamp(min=1))
