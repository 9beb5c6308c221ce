"""Threads: a small pool that runs kernels beside the calling thread.

All threads call the same kernels in the same order, and share the tasks of each (see `tasks`). Which thread runs a task
does not matter to the result, because every task owns what it writes. The calling thread works too, so a call never
waits for a thread that has not started, however many Python threads call at once.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from tritoncaps.kernels.common.cpu.compiling import ready
from tritoncaps.kernels.common.cpu.interrupts import watched
from tritoncaps.kernels.common.cpu.surroundings import torchs_threads
from tritoncaps.kernels.common.cpu.tasks import stop_tasks

Calls = list[tuple[Any, tuple[Any, ...]]]  # of kernels, with their arguments

_pool: ThreadPoolExecutor | None = None
_workers = 0
_lock = threading.Lock()


class Plan:
    """Kernels that are called one after the other, as often as the plan runs. To wake other threads takes as long as a
    short kernel, so they are woken once for all; or not at all, if the calling thread is done ``alone`` before another
    one would start."""

    def __init__(self, alone: bool = False) -> None:
        self.calls: Calls = []  # without counters
        self.alone = alone

    def add(self, kernel: Any, tasks: int, edges: Any, *arguments: Any) -> None:
        """Call ``kernel(counter, tasks, edges, *arguments)`` after those before. The first of edges is an array of the
        call's dtype."""
        if tasks:
            call = (tasks, edges, *arguments)
            ready(kernel, edges[0].dtype, (_new_counter(), *call))
            self.calls.append((kernel, call))

    def run(self) -> None:
        """Call all kernels, in up to ``torch.get_num_threads()`` threads."""
        if self.alone:  # so soon that signals can wait, too
            for kernel, arguments in self.calls:
                kernel(_new_counter(), *arguments)
            return
        # new counters for each run, because a thread of the run before may still look at the old ones
        calls: Calls = [(kernel, (_new_counter(), *arguments)) for kernel, arguments in self.calls]
        while calls:  # a second time only after a signal whose handler did not raise
            calls = _run(calls)


def _new_counter() -> Any:
    """No task is taken, none is done; see `tasks`."""
    return np.zeros(2, np.int64)


class _Work:
    """Calls that several threads make, until they are stopped."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.left: Calls = []
        self.stopped = False
        self.helpers: list[Future] = []  # of other threads

    def __call__(self) -> None:
        for kernel, arguments in self.calls:
            if self.stopped:
                return
            kernel(*arguments)

    def cancel(self) -> list[Future]:
        """Helpers that have not started find nothing to do. The others."""
        return [helper for helper in self.helpers if not helper.cancel()]

    def stop(self) -> None:
        """Only tasks that were begun are done; the others are ``left``."""
        self.stopped = True
        for kernel, (counter, tasks, *arguments) in self.calls:
            taken = stop_tasks(counter, tasks)
            if taken < tasks:
                self.left.append((kernel, (np.full(2, taken, np.int64), tasks, *arguments)))


def _run(calls: Calls) -> Calls:
    """Make the calls, up to a signal. Those that are left."""
    work = _Work(calls)
    most = max(tasks for _, (_, tasks, *_) in calls)
    with watched(work.stop):
        try:
            _submit(min(num_threads(), most) - 1, work)
            work()
        except BaseException:
            work.stop()
            wait(work.cancel())  # they may still write what the next call would use
            raise
    helpers = work.cancel()
    work.calls = []  # the pool's queue may keep a cancelled helper, but not the arrays
    if work.stopped:
        wait(helpers)
    return work.left


def run(kernel: Any, tasks: int, edges: Any, *arguments: Any) -> None:
    """Call one kernel, in several threads."""
    plan = Plan()
    plan.add(kernel, tasks, edges, *arguments)
    plan.run()


def num_threads() -> int:
    """What `torch.set_num_threads` asked for."""
    return getattr(torchs_threads, "number", None) or torch.get_num_threads()


def _submit(count: int, work: _Work) -> None:
    if count < 1:
        return
    with _lock, suppress(RuntimeError):  # the interpreter is shutting down: the calling thread does all the work
        for _ in range(count):
            work.helpers.append(_executor().submit(work))


def _executor() -> ThreadPoolExecutor:
    global _pool, _workers
    wanted = num_threads() - 1
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
