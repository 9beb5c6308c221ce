"""Settings of the whole suite. Triton runs in its interpreter; tests that compile kernels start their own processes."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import pytest
import torch

# unwritten outputs show: torch.empty is filled with nan
torch.use_deterministic_algorithms(True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
