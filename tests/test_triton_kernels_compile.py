"""Every Triton kernel compiles for every target, without spills and within the budget of resources.json."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_resources(target):
    """Compiled ahead of time in a process of its own: this one has Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tritoncaps.kernels.common.triton.resources", "--targets", target]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "kernels compiled: all within the budget" in result.stdout
