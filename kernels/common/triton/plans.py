"""Launches of a call as a plan, which later calls repeat with other tensors.

For each launch, Triton looks up the compiled kernel by the types of all arguments, in Python. A plan has the compiled
kernels and their arguments. Only the addresses of tensors are new in each call. A plan has no memory of its own: each
call allocates its tensors, as CUDA graphs and streams require. All kernels of a plan are known before the first one
runs, so several threads compile them at the same time.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tritoncaps.kernels.common.triton import announcing
from tritoncaps.kernels.common.triton.compiling import same_passes, unwatched

ALIGNMENT = 512  # bytes: that of torch's allocator on GPUs
MOST_THREADS = 8  # that compile; a call has at most six different kernels
_INTERPRETED = knobs.runtime.interpret  # Triton reads it when it is imported


class Launch(NamedTuple):
    run: Callable[..., None]
    arguments: list[Any]  # all arguments of the kernel, in its order


class _Thread(threading.local):
    """The recording of this thread, or None if it runs its launches."""

    recording: _Recording | None = None


_thread = _Thread()


def launch(kernel: Any, programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    """Run a kernel, or record its launch inside of `recorded`."""
    if _thread.recording is None:
        kernel[(programs,)](**arguments, **options)
        unwatched(kernel)
    else:
        _thread.recording.add(kernel, programs, arguments, options)


def _compiled(kernel: Any, programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """The compiled kernel. With a grid as its index, it is a function of all arguments."""
    return kernel.warmup(grid=(programs,), **arguments, **options)


class _Recording:
    """Launches whose kernels other threads compile."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool
        self.locks: dict[Any, threading.Lock] = defaultdict(threading.Lock)  # a kernel may be launched again
        self.launches: list[tuple[Future[Any], int, list[Any]]] = []

    def add(self, kernel: Any, programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        passes, gpu, lock = same_passes(), _current_gpu(), self.locks[kernel]

        def compiled() -> Any:
            with lock, gpu, passes:
                try:
                    return _compiled(kernel, programs, arguments, options)
                finally:
                    unwatched(kernel)
                    announcing.finish()

        self.launches.append((self.pool.submit(compiled), programs, [arguments[name] for name in kernel.arg_names]))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, this thread does not run kernels; other threads compile them. The list gets their launches at the end."""
    launches: list[Launch] = []
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS), "tritoncaps-compiles") as pool:
        recording = _thread.recording = _Recording(pool)
        try:
            yield launches
        finally:
            _thread.recording = None
    # this thread loads the compiled code to its GPU
    launches += [Launch(kernel.result()[(programs, 1, 1)], given) for kernel, programs, given in recording.launches]


def _current_gpu() -> AbstractContextManager[None]:
    """A context for another thread: the GPU of this thread. A new thread would use the first one."""
    return torch.cuda.device(torch.cuda.current_device()) if torch.cuda.is_initialized() else nullcontext()


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
