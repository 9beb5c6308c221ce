"""Settings of the whole suite. Triton runs in its interpreter; tests that compile kernels start their own processes."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: workers share the cores

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction, InterpreterOptions, interpreter_builder

# device_assert works, and an int32 that overflows raises
interpreter_builder.options = InterpreterOptions(debug=True)

call = InterpretedFunction.__call__


def call_patched(function, *args, **kwargs):
    """Call a device function. That Triton patches its language again for each of ours takes a quarter of the time."""
    ours = function.fn.__module__.startswith("tritoncaps")
    return function.rewrite()(*args, **kwargs) if ours else call(function, *args, **kwargs)


InterpretedFunction.__call__ = call_patched

# unwritten outputs show: torch.empty is filled with nan
torch.use_deterministic_algorithms(True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
