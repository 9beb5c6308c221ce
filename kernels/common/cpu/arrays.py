"""Tensors as the flat NumPy arrays that kernels read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritoncaps.kernels.common.cpu.workspace import scratch

DTYPES = {torch.float32: "=f4", torch.float64: "=f8", torch.int32: "=i4", torch.int64: "=i8"}


def array(x: Tensor) -> Any:
    """The numbers of a tensor as a flat NumPy array; a copy only if x is not contiguous."""
    return np.asarray(_Memory(x.contiguous())) if x.numel() else np.empty(0, DTYPES[x.dtype])


class _Memory:
    """A tensor's memory, as NumPy takes it. (`Tensor.numpy` would forbid for ever to resize it, as FSDP does.)"""

    def __init__(self, x: Tensor) -> None:
        self.tensor = x  # lives as long as the array
        kind = {"shape": (x.numel(),), "typestr": DTYPES[x.dtype], "version": 3}
        self.__array_interface__ = {"data": (x.data_ptr(), False), **kind}


def contiguous(name: str, x: Tensor) -> Tensor:
    """x, or a contiguous copy that lasts as long as the call."""
    return x if x.is_contiguous() else scratch(name, x.shape, x.dtype).copy_(x)
