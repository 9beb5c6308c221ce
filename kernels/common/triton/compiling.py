"""Compiling fast: Triton's coalescing pass takes 97% of the time of large kernels, and changes nothing in some of them.

The pass chooses a layout for every load and store. Where a tile has one element for each thread there is nothing to
choose, and the instructions are the same without it; `tests/test_triton_kernels_compile.py` compares them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_thread = threading.local()


@contextmanager
def uncoalesced() -> Iterator[None]:
    """Inside, this thread compiles without the coalescing pass. Without effect if Triton keeps that pass elsewhere."""
    _install()
    before = getattr(_thread, "skips", False)
    _thread.skips = True
    try:
        yield
    finally:
        _thread.skips = before


def unwatched(kernel: Any) -> None:
    """After a first launch. At every launch Triton compares the constants of a kernel's file with those of then, which
    takes a tenth of the time. Ours never change."""
    watched = getattr(kernel, "used_global_vals", None)
    if watched:
        watched.clear()


@cache
def _install() -> None:
    """Make the pass ask before it joins a pipeline. Other threads and other kernels get it as before."""
    try:
        from triton._C.libtriton import passes
    except ImportError:
        return
    add_coalesce = getattr(passes.ttgpuir, "add_coalesce", None)
    if add_coalesce is None:
        return

    def ask(*arguments: Any) -> None:
        if not getattr(_thread, "skips", False):
            add_coalesce(*arguments)

    passes.ttgpuir.add_coalesce = ask
