"""Looking at capsules through a decoder: poses that are moved a little, pixels that are given to what explains them.

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
    """Poses [*, D] -> [*, D, offsets, D]: at [*, d, k], dimension d is moved by ``offsets[k]``, the others are not.

    Sabour 2017, figure 4, moves each dimension of a digit capsule by -0.25 to 0.25 and looks at the reconstructions.
    """
    check_tensor("poses", poses)
    moves = torch.as_tensor(offsets, dtype=poses.dtype, device=poses.device)
    check_shape("offsets", moves, ["K"])
    size = poses.shape[-1]
    along = torch.eye(size, dtype=poses.dtype, device=poses.device)[:, None] * moves[:, None]  # [D, K, D]
    return poses[..., None, None, :] + along


def assign_pixels(drawings: Tensor, threshold: float = 0.5) -> Tensor:
    """Which of the drawings [N, m, C, H, W] explains each pixel: [N, H, W], the number of the brightest, or -1 where
    none is brighter than ``threshold``. Channels are averaged."""
    check_tensor("drawings", drawings)
    check_shape("drawings", drawings, ["N", "m", "C", "H", "W"])
    brightness, brightest = drawings.mean(dim=2).max(dim=1)
    return torch.where(brightness > threshold, brightest, NO_DRAWING)


def intersection_over_union(drawings: Tensor, objects: Tensor, threshold: float = 0.5) -> Tensor:
    """How well each drawing covers its object: [N, m] from two tensors [N, m, C, H, W].

    Pixels that are brighter than ``threshold`` count. Objects may overlap, so a pixel may belong to several. Where both
    have no such pixel, it is 1.
    """
    check_tensor("drawings", drawings)
    check_shape("objects", objects, drawings.shape)
    drawn, real = drawings.mean(dim=2) > threshold, objects.mean(dim=2) > threshold
    both, either = (drawn & real).sum(dim=(-1, -2)), (drawn | real).sum(dim=(-1, -2))
    return torch.where(either == 0, 1.0, both / either.clamp(min=1))
