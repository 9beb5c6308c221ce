"""The kernels that a launch compiles depend on options and dtypes, not on the batch or on the sizes of a layer.

Triton looks up compiled kernels by a key. These tests collect the keys in another process, because this one uses
Triton's interpreter. They compile and run no kernel.
"""

import json
import os
import subprocess
import sys

from tritoncaps.kernels.common import backends

SCRIPT = """
import json
import torch
from collections import defaultdict
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 0,
    get_active_torch_device=lambda: torch.device("cpu"),
))
asked = set()


def ask(kernel, key, *rest):
    asked.add((kernel.fn.__name__, str(key)))
    return defaultdict(lambda: lambda *arguments, stream: None)  # for each grid, a launch that runs nothing


JITFunction._do_compile = ask

from tritoncaps import Capsules, ClassCaps, ConvCaps2d, use_backend

found = []
for layer in (ConvCaps2d(8, 16, 3), ConvCaps2d(16, 33, 3), ConvCaps2d(3, 5, 2), ClassCaps(16, 5)):
    for batch in (8, 1, 2, 3, 4, 5, 6, 7, 9, 64):
        poses = torch.randn(batch, layer.in_caps, 4, 4, 4, 4, requires_grad=True)
        capsules = Capsules(poses, torch.rand(batch, layer.in_caps, 4, 4))
        with use_backend("triton"):
            out = layer(capsules)
        (out.poses.sum() + out.activations.sum()).backward()
        found.append(len(asked))
print(json.dumps([found, sorted({name for name, _ in asked})]))
"""


def test_neither_batch_nor_sizes_compile_anew():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITONCAPS_TRITON_ON_CPU": "1"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    counts, kernels = json.loads(result.stdout)
    assert "child_gradient_kernel" in kernels
    assert len(set(counts)) == 1, counts
    assert counts[0] <= 14, (counts[0], kernels)


def test_an_old_package_gets_a_sentence(monkeypatch):
    monkeypatch.setattr(backends, "_version", lambda package: (3, 3))
    assert backends._missing.__wrapped__("triton") == "its kernels need triton 3.4 or newer, but 3.3 is installed"
    monkeypatch.setattr(backends, "_version", lambda package: (3, 4))
    assert backends._missing.__wrapped__("triton") == ""
