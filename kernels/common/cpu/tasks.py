"""Distribution of the tasks of a kernel to threads, and a barrier at the end.

    task = first_task(counter, tasks)
    while task < tasks:
        ...
        task = next_task(counter, tasks)

A kernel returns in each thread when all tasks are done, also those of other threads. So the next kernel can read the
results of this one. A thread that starts late gets no task, and the other threads do not wait for it.
"""

from __future__ import annotations

import os
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tritoncaps.kernels.common.cpu.compiling import kernel, part

TAKEN, DONE = 0, 1  # entries of a counter, int64 [2]: the number of tasks that are taken, and done
MANY = 1 << 40  # more than the tasks of any kernel

_give_way = types.ExternalFunction("SwitchToThread" if os.name == "nt" else "sched_yield", types.int32())


@intrinsic
def _add(typing_context: Any, counter: Any, index: Any, amount: Any) -> Any:
    """Add to a number that several threads share (atomic). Returns its value before the addition."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, values: list[ir.Value]) -> ir.Value:
        data = context.make_array(signature.args[0])(context, builder, value=values[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [values[1]]), values[2], "seq_cst")

    return types.int64(counter, types.int64, types.int64), code


@part
def first_task(counter, tasks):
    """The next free task. If all are taken, wait until all are done and return a number of at least ``tasks``."""
    task = _add(counter, TAKEN, 1)
    if task >= tasks:
        while _add(counter, DONE, 0) < tasks:
            _give_way()
    return task


@part
def next_task(counter, tasks):
    """Count a task as done, then the same as `first_task`."""
    _add(counter, DONE, 1)
    return first_task(counter, tasks)


@kernel
def stop_tasks(counter, tasks):
    """Start no more tasks, and do not wait for those that have not started. Returns the number of tasks that threads
    have taken, or a number of at least ``tasks`` if they have taken all."""
    taken = _add(counter, TAKEN, MANY)
    if taken < tasks:
        _add(counter, DONE, tasks - taken)
    return taken
