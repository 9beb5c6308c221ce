"""Settings for all tests. Triton runs in its interpreter; tests that compile kernels start their own processes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: workers share the cores

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton"):  # Triton does not exist for macOS, where `make test-without-triton` runs
    from triton.runtime.interpreter import (
        GridExecutor,
        InterpretedFunction,
        InterpreterBuilder,
        InterpreterOptions,
        interpreter_builder,
    )

    # device_assert works, and an overflow of int32 is an error
    interpreter_builder.options = InterpreterOptions(debug=True)

    # as on a GPU, the maximum of nan and a number is the number, unless a kernel propagates nan
    InterpreterBuilder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    InterpreterBuilder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)

    call = InterpretedFunction.__call__
    patched = set()

    def call_patched(function, *args, **kwargs):
        """Call a device function. Triton patches its language for each call, which takes a third of the time. A launch
        has patched it for our files, and for each of Triton's own files once is enough."""
        names = function.fn.__globals__["__name__"]
        if names.startswith("tritoncaps") or names in patched:
            return function.rewrite()(*args, **kwargs)
        patched.add(names)
        return call(function, *args, **kwargs)

    InterpretedFunction.__call__ = call_patched

    # Python stores frames in chunks of 16 KiB. If a chunk is full, every further call maps and unmaps a new one, which
    # takes a third of the time of some tests. The frame of this function needs a chunk of 128 KiB, which has room for
    # the frames of its calls.
    with_room = eval(f"lambda call, {', '.join(f'_{i}=0' for i in range(8200))}: call()")
    run = GridExecutor.__call__
    GridExecutor.__call__ = lambda grid, *args, **kwargs: with_room(lambda: run(grid, *args, **kwargs))


def pytest_sessionstart(session):
    """If there are several workers, compile the CPU kernels first, so that not every worker compiles them."""
    if session.config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        command = [sys.executable, Path(__file__).with_name("cpu_kernels.py")]
        running = [subprocess.Popen([*command, dtype]) for dtype in ("float32", "float64")]
        for process in running:
            if process.wait():
                raise subprocess.CalledProcessError(process.returncode, process.args)


def pytest_collection_modifyitems(items):
    """Run the longest tests first, so that all workers end at about the same time."""
    items.sort(key=lambda item: "kernels_compile" not in item.nodeid)


# torch.empty is filled with nan, so that outputs that no kernel has written are visible
torch.use_deterministic_algorithms(True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
