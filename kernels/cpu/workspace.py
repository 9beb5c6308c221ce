"""Memory that is reused from call to call.

Fresh memory of a few MiB costs a page fault for every 4 KiB, and threads wait for each other in it. So each thread
keeps the arrays that kernels only read or write during a call.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST = 64 * 2**20  # bytes; what is larger is not kept

_kept = threading.local()


def scratch(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory; the next call in this thread for the same name may overwrite it."""
    count = math.prod(shape)
    if count * dtype.itemsize > LARGEST:
        return torch.empty(tuple(shape), dtype=dtype)
    buffers: dict[tuple[str, torch.dtype], Tensor] = _kept.__dict__
    key = (name, dtype)
    if key not in buffers or buffers[key].numel() < count:
        buffers[key] = torch.empty(count, dtype=dtype)
    return buffers[key][:count].view(tuple(shape))
