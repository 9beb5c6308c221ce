"""How threads share the tasks of a kernel, and wait for each other when none are left.

    task = first_task(counter, tasks)
    while task < tasks:
        ...
        task = next_task(counter, tasks)

Every thread that calls a kernel returns when all tasks are done, whichever thread has done them. So the next kernel can
read what this one wrote. A thread that starts late finds no task, and the other threads do not wait for it.
"""

from __future__ import annotations

import os
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tritoncaps.kernels.common.cpu.compiling import kernel, part

TAKEN, DONE = 0, 1  # what a counter, int64 [2], counts: tasks
MANY = 1 << 40  # more tasks than there are

_give_way = types.ExternalFunction("SwitchToThread" if os.name == "nt" else "sched_yield", types.int32())


@intrinsic
def _add(typing_context: Any, counter: Any, index: Any, amount: Any) -> Any:
    """Add to a number that several threads share. What it was before."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, values: list[ir.Value]) -> ir.Value:
        data = context.make_array(signature.args[0])(context, builder, value=values[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [values[1]]), values[2], "seq_cst")

    return types.int64(counter, types.int64, types.int64), code


@part
def first_task(counter, tasks):
    """The next free task, or a number beyond the last task if all are taken."""
    task = _add(counter, TAKEN, 1)
    if task >= tasks:
        while _add(counter, DONE, 0) < tasks:
            _give_way()
    return task


@part
def next_task(counter, tasks):
    """The same, after a task that is done."""
    _add(counter, DONE, 1)
    return first_task(counter, tasks)


@kernel
def stop_tasks(counter, tasks):
    """Give out no more tasks, and wait for none that was not given out. How many were, or more than ``tasks``."""
    taken = _add(counter, TAKEN, MANY)
    if taken < tasks:
        _add(counter, DONE, tasks - taken)
    return taken
