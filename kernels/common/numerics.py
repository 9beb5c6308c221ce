"""Numerical rules that the reference and all kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

POSE = 16  # entries of a 4x4 pose


def widen(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32: the kernels store them, but do not compute in them."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic for tensors of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def least_support(dtype: torch.dtype) -> float:
    """A parent with this support or less has no mean: the inverse of the support would overflow."""
    return 1e4 * torch.finfo(dtype).tiny
