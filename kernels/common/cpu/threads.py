"""A small pool of threads that runs kernels together with the calling thread.

All threads call the same kernels in the same order, and share the tasks of each (see `tasks`). The result does not
depend on which thread runs a task, because every task writes only its own outputs. The calling thread works too, so a
call never waits for a thread that has not started, for any number of Python threads that call at the same time.
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

Calls = list[tuple[Any, tuple[Any, ...]]]  # kernels and their arguments

_pool: ThreadPoolExecutor | None = None
_workers = 0
_lock = threading.Lock()


class Plan:
    """A list of kernels to run one after the other; it can run several times. Waking other threads takes as long as a
    short kernel, so a plan wakes them once for all its kernels. With ``alone``, the calling thread runs all of them,
    because they are so short that a second thread costs more than it gains."""

    def __init__(self, alone: bool = False) -> None:
        self.calls: Calls = []  # without counters
        self.alone = alone

    def add(self, kernel: Any, tasks: int, edges: Any, *arguments: Any) -> None:
        """Add the call ``kernel(counter, tasks, edges, *arguments)`` at the end. The first field of ``edges`` is an
        array, whose dtype is that of the call."""
        if tasks:
            call = (tasks, edges, *arguments)
            ready(kernel, edges[0].dtype, (_new_counter(), *call))
            self.calls.append((kernel, call))

    def run(self) -> None:
        """Run all kernels, in up to ``torch.get_num_threads()`` threads."""
        if self.alone:  # a signal is handled after these short kernels
            for kernel, arguments in self.calls:
                kernel(_new_counter(), *arguments)
            return
        # new counters for each run: a thread of the previous run may still read the old ones
        calls: Calls = [(kernel, (_new_counter(), *arguments)) for kernel, arguments in self.calls]
        while calls:  # a second time only after a signal whose handler did not raise
            calls = _run(calls)


def _new_counter() -> Any:
    """No task is taken, none is done; see `tasks`."""
    return np.zeros(2, np.int64)


class _Work:
    """Calls of kernels that several threads share and that `stop` ends early."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.left: Calls = []
        self.stopped = False
        self.helpers: list[Future] = []  # in other threads

    def __call__(self) -> None:
        for kernel, arguments in self.calls:
            if self.stopped:
                return
            kernel(*arguments)

    def cancel(self) -> list[Future]:
        """Cancel the helpers that have not started. Returns the others."""
        return [helper for helper in self.helpers if not helper.cancel()]

    def stop(self) -> None:
        """End after the tasks that have started, and put the other tasks into ``left``."""
        self.stopped = True
        for kernel, (counter, tasks, *arguments) in self.calls:
            taken = stop_tasks(counter, tasks)
            if taken < tasks:
                self.left.append((kernel, (np.full(2, taken, np.int64), tasks, *arguments)))


def _run(calls: Calls) -> Calls:
    """Run the calls until a signal arrives. Returns those that are left."""
    work = _Work(calls)
    most = max(tasks for _, (_, tasks, *_) in calls)
    with watched(work.stop):
        try:
            _submit(min(num_threads(), most) - 1, work)
            work()
        except BaseException:
            work.stop()
            wait(work.cancel())  # they may still write to memory that the next call uses
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
    """torch's number of threads, also inside `surroundings`, which sets it to 1."""
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
