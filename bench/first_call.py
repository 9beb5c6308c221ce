"""The first call in a fresh process: the first step of a layer, with and without compiled kernels on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from command import main
from harness import OURS, REFERENCE, Row

CODE = """
import time, torch, tritoncaps as t
layer = t.ClassCaps(3, 4, backend={backend!r})
c = t.Capsules(torch.randn(1, 3, 2, 4, 4), torch.rand(1, 3, 2))
device = "cuda" if torch.cuda.is_available() else "cpu"
layer, c = layer.to(device), t.Capsules(*(x.to(device) for x in c))
start = time.perf_counter()
layer(c).poses.sum().backward()
if device == "cuda":
    torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def cases(level: str) -> list[FirstCall]:
    return [FirstCall("reference")] if level == "smoke" else [FirstCall("reference"), FirstCall(None)]


@dataclass(frozen=True)
class FirstCall:
    backend: str | None
    subject: str = "first_call"

    @property
    def name(self) -> str:
        return self.backend or OURS

    def rows(self, level: str, repeats: int | None = None) -> list[Row]:
        provider = OURS if self.backend is None else REFERENCE
        with tempfile.TemporaryDirectory() as cache:
            states = ("nothing compiled", "compiled before") if provider == OURS else ("nothing to compile",)
            return [self.row(state, provider, cache) for state in states]

    def row(self, state: str, provider: str, cache: str) -> Row:
        known = {"subject": self.subject, "case": state, "mode": "step", "provider": provider, "images": 1}
        return known | {"p50_ms": self.seconds(cache) * 1e3}

    def seconds(self, cache: str) -> float:
        caches = dict.fromkeys(("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"), cache)
        command = [sys.executable, "-c", CODE.format(backend=self.backend)]
        return float(subprocess.check_output(command, text=True, env={**os.environ, **caches}))


if __name__ == "__main__":
    main({"first_call": cases}, __doc__)
