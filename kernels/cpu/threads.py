"""Threads: a small pool that runs a kernel's tasks, next to the thread that called.

A kernel takes a shared counter and draws task numbers from it until none are left. Which thread runs a task
does not matter to the result, because every task owns what it writes. The calling thread works too, so a call
never waits for a thread that has not started, however many Python threads call at once.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from tritoncaps.kernels.cpu.compiling import ready
from tritoncaps.kernels.cpu.layout import Edges

_pool: ThreadPoolExecutor | None = None
_workers = 0
_lock = threading.Lock()


def run(kernel: Any, tasks: int, edges: Edges, *arguments: Any) -> None:
    """Call ``kernel(counter, tasks, edges, *arguments)`` in up to ``torch.get_num_threads()`` threads."""
    if tasks == 0:
        return
    call = (np.zeros(1, np.int64), tasks, edges, *arguments)
    ready(kernel, edges.poses.dtype, call)
    helpers = _submit(min(torch.get_num_threads(), tasks) - 1, kernel, call)
    kernel(*call)
    for helper in helpers:
        if not helper.cancel():  # one that has not started would find nothing to do
            helper.result()


def _submit(count: int, kernel: Any, call: tuple[Any, ...]) -> list[Future]:
    if count < 1:
        return []
    try:
        with _lock:
            return [_executor().submit(kernel, *call) for _ in range(count)]
    except RuntimeError:  # the interpreter is shutting down: the calling thread does all the work
        return []


def _executor() -> ThreadPoolExecutor:
    global _pool, _workers
    wanted = torch.get_num_threads() - 1
    if _pool is None or _workers != wanted:
        if _pool is not None:
            _pool.shutdown(wait=False)
        _pool, _workers = ThreadPoolExecutor(wanted, thread_name_prefix="tritoncaps"), wanted
    return _pool


def _forget_pool() -> None:
    """A forked process inherits the pool but not its threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
