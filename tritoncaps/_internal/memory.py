"""How much memory a function needs, as torch's allocators see it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(function: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The most bytes that tensors take while ``function`` runs, above those before. On the CPU torch's profiler counts
    them; arrays of NumPy and Numba are not among them."""
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would print when it starts and stops
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the profiler does not see what another thread frees
    try:
        with torch.autograd.profiler.profile(use_kineto=False, profile_memory=True) as profiler:
            function()
    finally:
        torch.set_num_threads(threads)
    events = profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
