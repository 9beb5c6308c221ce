"""Measures the memory of a function, as counted by the allocators of torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(function: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Largest number of bytes of new tensors while ``function`` runs. On the CPU, torch's profiler counts them, without
    arrays of NumPy and Numba."""
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no messages when the profiler starts and stops
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the profiler does not count memory that another thread frees
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
