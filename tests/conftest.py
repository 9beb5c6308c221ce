"""Settings of the whole suite. Triton runs in its interpreter; tests that compile kernels start their own processes."""

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

if importlib.util.find_spec("triton"):  # it is not there on macOS, where `make test-without-triton` runs
    from triton.runtime.interpreter import (
        InterpretedFunction,
        InterpreterBuilder,
        InterpreterOptions,
        interpreter_builder,
    )

    # device_assert works, and an int32 that overflows raises
    interpreter_builder.options = InterpreterOptions(debug=True)

    # as on a GPU, the greater of nan and a number is the number, unless a kernel asks for nan
    InterpreterBuilder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    InterpreterBuilder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)

    call = InterpretedFunction.__call__
    patched = set()

    def call_patched(function, *args, **kwargs):
        """Call a device function. Triton patches its language again for each, in a third of the time: a launch has
        done so for ours, and once is enough for each file of its own."""
        names = function.fn.__globals__["__name__"]
        if names.startswith("tritoncaps") or names in patched:
            return function.rewrite()(*args, **kwargs)
        patched.add(names)
        return call(function, *args, **kwargs)

    InterpretedFunction.__call__ = call_patched

    # Python keeps frames in chunks of 16 KiB, and maps and unmaps one for every call that stands at the end of the
    # last: a third of some tests' time. This function's own frame needs a chunk of 128 KiB, which has room for those
    # of its calls.
    with_room = eval(f"lambda call, {', '.join(f'_{i}=0' for i in range(8200))}: call()")
    run = InterpretedFunction.run
    InterpretedFunction.run = lambda kernel, *args, **kwargs: with_room(lambda: run(kernel, *args, **kwargs))


def pytest_sessionstart(session):
    """Where there will be several workers, the CPU kernels are compiled before, or each of them would do so."""
    if session.config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        command = [sys.executable, Path(__file__).with_name("cpu_kernels.py")]
        running = [subprocess.Popen([*command, dtype]) for dtype in ("float32", "float64")]
        for process in running:
            if process.wait():
                raise subprocess.CalledProcessError(process.returncode, process.args)


def pytest_collection_modifyitems(items):
    """What takes longest comes first, so that no worker ends long after the other."""
    items.sort(key=lambda item: "kernels_compile" not in item.nodeid)


# unwritten outputs show: torch.empty is filled with nan
torch.use_deterministic_algorithms(True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
