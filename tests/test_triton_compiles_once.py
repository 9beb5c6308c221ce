"""The kernels that a launch compiles depend on options and dtypes, not on the batch or on the sizes of a layer.

Triton looks up compiled kernels by a key. These tests collect the keys in another process, because this one uses
Triton's interpreter. They compile and run no kernel.
"""

import json

from other_process import DRIVER, run_python

from tritoncaps.kernels.common import backends

SCRIPT = (
    DRIVER
    + """
import json
from collections import defaultdict
from triton.runtime.jit import JITFunction

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
)


def test_neither_batch_nor_sizes_compile_anew():
    counts, kernels = json.loads(run_python("-c", SCRIPT, TRITONCAPS_TRITON_ON_CPU="1"))
    assert "child_gradient_kernel" in kernels
    assert len(set(counts)) == 1, counts
    assert counts[0] <= 14, (counts[0], kernels)


def test_an_old_package_gets_a_sentence(monkeypatch):
    monkeypatch.setattr(backends, "_version", lambda package: (3, 3))
    assert backends._missing.__wrapped__("triton") == "its kernels need triton 3.4 or newer, but 3.3 is installed"
    monkeypatch.setattr(backends, "_version", lambda package: (3, 4))
    assert backends._missing.__wrapped__("triton") == ""
