"""Scratch memory that calls reuse, and memory for large results.

New memory of a few MiB costs a page fault for every 4 KiB, and threads wait for each other during page faults. So each
thread keeps the arrays that kernels use only during a call, and those that an operator returns for the next one. Large
results get new memory in huge pages, as in NumPy: if the system has them, there is only one fault for every 2 MiB.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LARGEST = 64 * 2**20  # bytes; larger arrays are not kept
LARGE = 4 * 2**20  # bytes; larger results request huge pages
HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)  # None if the system is not Linux

_kept = threading.local()


def scratch(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory; the next call in this thread for the same name may overwrite it."""
    count = math.prod(shape)
    if count * dtype.itemsize > LARGEST:
        return torch.empty(tuple(shape), dtype=dtype)
    buffers: dict[Any, Tensor] = _kept.__dict__  # keys: name and dtype
    key = (name, dtype)
    if key not in buffers or buffers[key].numel() < count:
        with torch.inference_mode(False):  # a later call may write to it outside of inference mode
            buffers[key] = torch.empty(count, dtype=dtype)
    return buffers[key][:count].view(tuple(shape))


class _Buffer:
    """Memory for one tensor at a time."""

    def __init__(self, size: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8).numpy()
        self.array: Callable[[], Any] = lambda: None  # to which the tensor and its views refer, if there is one

    def tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        array = self.memory[:size]
        self.array = weakref.ref(array)
        return torch.frombuffer(array, dtype=dtype)


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.all: list[_Buffer] = []


_buffers = _Buffers()


def short_lived(count: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory for a result; when no tensor refers to it any more, a later call in this thread gets it."""
    size = count * dtype.itemsize
    if not 0 < size <= LARGEST:
        return torch.empty(count, dtype=dtype)
    used = [x for x in _buffers.all if x.array() is not None]
    # free buffers that are too small end here, so there are never more buffers than tensors at the same time
    free = [x for x in _buffers.all if x.array() is None and len(x.memory) >= size] or [_Buffer(size)]
    _buffers.all = used + free
    return min(free, key=lambda x: len(x.memory)).tensor(size, dtype)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory for a result."""
    out = torch.empty(tuple(shape), dtype=dtype)
    if out.nbytes >= LARGE and HUGE_PAGES is not None:
        first = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = out.data_ptr() + out.nbytes - first
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), HUGE_PAGES)  # only a hint: it may fail
    return out
