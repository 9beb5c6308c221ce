"""Launches of a call as a plan, which later calls repeat with other tensors.

For each launch, Triton looks up the compiled kernel by the types of all arguments, in Python. A plan has the compiled
kernels and their arguments. Only the addresses of tensors are new in each call. A plan has no memory of its own: each
call allocates its tensors, as CUDA graphs and streams require.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tritoncaps.kernels.common.triton.compiling import unwatched

ALIGNMENT = 512  # bytes: that of torch's allocator on GPUs
_INTERPRETED = knobs.runtime.interpret  # Triton reads it when it is imported


class Launch(NamedTuple):
    run: Callable[..., None]
    arguments: list[Any]  # all arguments of the kernel, in its order


class _Thread(threading.local):
    """The launches that this thread records, or None if it runs them."""

    launches: list[Launch] | None = None


_thread = _Thread()


def launch(kernel: Any, programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    """Run a kernel, or record its launch inside of `recorded`."""
    if _thread.launches is None:
        kernel[(programs,)](**arguments, **options)
    else:
        in_order = [arguments[name] for name in kernel.arg_names]
        _thread.launches.append(Launch(_compiled(kernel, programs, arguments, options), in_order))
    unwatched(kernel)


def _compiled(kernel: Any, programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> Callable[..., None]:
    """The compiled kernel as a function of all its arguments."""
    found: Callable[..., None] = kernel.warmup(grid=(programs,), **arguments, **options)[(programs, 1, 1)]
    return found


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, this thread compiles kernels and does not run them. The list gets their launches."""
    launches: list[Launch] = []
    _thread.launches = launches
    try:
        yield launches
    finally:
        _thread.launches = None


def may_keep_plans() -> bool:
    """False in Triton's interpreter, in an emulator, which replaces `JITFunction.run`, and in a profiler, which needs
    the tensors of a launch."""
    hook = knobs.runtime.launch_enter_hook
    compiles = not _INTERPRETED and JITFunction.run.__module__ == "triton.runtime.jit"
    return compiles and not getattr(hook, "calls", hook)


class Plan:
    """The launches of a call: a function of its inputs that returns its results.

    ``inputs`` and ``results`` are tensors of the recorded call, each with memory of its own. Launches may have other
    tensors: ``tables``, whose addresses stay the same, and those that the call itself allocates and does not return,
    which become parts of one workspace.
    """

    def __init__(
        self, launches: Sequence[Launch], inputs: Sequence[Tensor], results: Sequence[Tensor], tables: Sequence[Tensor]
    ) -> None:
        self.results = [(x.shape, x.stride(), x.dtype) for x in results]
        self.size = 0  # of the workspace, in bytes
        starts = {_memory(x): (i, 0) for i, x in enumerate([*inputs, *results]) if x.numel()}
        fixed, workspace = {_memory(x) for x in tables}, len(inputs) + len(results)
        self.launches: list[tuple[Callable[..., None], list[Any], list[tuple[int, int, int]]]] = []
        for run, arguments in launches:
            values, places = list(arguments), []
            for position, x in enumerate(arguments):
                if not isinstance(x, Tensor):
                    continue
                values[position], memory = x.data_ptr(), _memory(x)
                if not x.numel() or memory in fixed:
                    continue
                if memory not in starts:
                    starts[memory] = workspace, self.size
                    self.size += -(-x.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
                tensor, offset = starts[memory]
                places.append((position, tensor, offset + x.data_ptr() - memory))
            self.launches.append((run, values, places))

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the launches with these inputs, of the same sizes and dtypes, all contiguous."""
        results = [inputs[0].new_empty_strided(size, stride, dtype=dtype) for size, stride, dtype in self.results]
        workspace = inputs[0].new_empty(self.size, dtype=torch.uint8)
        starts = [x.data_ptr() for x in (*inputs, *results, workspace)]
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        for run, values, places in self.launches:
            arguments = values.copy()
            for position, tensor, offset in places:
                arguments[position] = starts[tensor] + offset
            run(*arguments, stream=stream)
        return results


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
