"""Python in another process in which Triton compiles kernels; in the process of the tests it interprets them."""

import os
import subprocess
import sys

# the start of a program without a GPU: a driver for an H100 that can only be asked, not launch
DRIVER = """
import torch
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 7,
    get_active_torch_device=lambda: torch.device("cpu"),
))
"""


def run_python(*arguments, **variables):
    """Run Python with these arguments and further environment variables, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
