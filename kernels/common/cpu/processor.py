"""The vectors of this processor.

A vector has 64 bytes with AVX-512, 16 bytes with NEON, and else 32 bytes, as with AVX. LLVM splits vectors that are too
wide for the processor, so any of these widths gives correct results on any processor. The environment variable
``TRITONCAPS_VECTOR_BYTES`` sets another one of them: the width determines the order of some sums, so two processors
give the same bits only with the same width.
"""

from __future__ import annotations

import os
import platform

from llvmlite import binding

WIDTHS = (16, 32, 64)


def _width() -> int:
    given = os.environ.get("TRITONCAPS_VECTOR_BYTES")
    if given is not None:
        if given not in map(str, WIDTHS):
            raise ValueError(f"TRITONCAPS_VECTOR_BYTES must be 16, 32 or 64, but it is {given!r}")
        return int(given)
    if binding.get_host_cpu_features().get("avx512vl"):
        return 64
    return 16 if platform.machine().lower() in ("aarch64", "arm64") else 32


VECTOR_BYTES = _width()
