"""Settings for all tests. Triton runs in its interpreter; tests that compile kernels start their own processes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: workers share the cores

import pytest
import torch

if importlib.util.find_spec("triton"):  # Triton does not exist for macOS, where `make test-without-triton` runs
    import interpreter  # noqa: F401


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
