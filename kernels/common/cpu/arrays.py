"""Tensors as flat NumPy arrays, the form that kernels read."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritoncaps.kernels.common.cpu.workspace import LARGEST, scratch

DTYPES = {torch.float32: "=f4", torch.float64: "=f8", torch.int32: "=i4", torch.int64: "=i8"}


def array(x: Tensor) -> Any:
    """The numbers of a tensor as a flat NumPy array; a copy only if x is not contiguous."""
    return np.asarray(_Memory(x.contiguous())) if x.numel() else np.empty(0, DTYPES[x.dtype])


class _Memory:
    """A tensor's memory for NumPy. After `Tensor.numpy`, FSDP could not resize the tensor any more."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, x: Tensor) -> None:
        self.tensor = x  # keeps the memory alive as long as the array
        self.__array_interface__ = {
            "data": (x.data_ptr(), False),
            "shape": (x.numel(),),
            "typestr": DTYPES[x.dtype],
            "version": 3,
        }


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[tuple[str, torch.dtype], Any] = {}


_scratch = _Scratch()


def scratch_array(name: str, count: int, dtype: torch.dtype) -> Any:
    """Like `scratch`, but a flat array: the next call in this thread with the same name may overwrite it."""
    kept = _scratch.arrays.get((name, dtype))
    if kept is None or len(kept) < count:
        kept = array(torch.empty(count, dtype=dtype))
        if kept.nbytes <= LARGEST:
            _scratch.arrays[name, dtype] = kept
    return kept[:count]


def contiguous(name: str, x: Tensor) -> Tensor:
    """x, or a contiguous copy in scratch memory, valid until the next call with the same name."""
    return x if x.is_contiguous() else scratch(name, x.shape, x.dtype).copy_(x)
