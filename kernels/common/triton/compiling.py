"""Faster compilation and launches: skip a compiler pass that some kernels do not need, and a check at each launch.

Triton's coalescing pass takes 97% of the compile time of large kernels. It chooses a layout for every load and store.
If a tile has one element for each thread, there is only one layout, and the instructions are the same without the pass;
`tests/test_triton_kernels_compile.py` compares them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

_thread = threading.local()


@contextmanager
def uncoalesced() -> Iterator[None]:
    """In this context, this thread compiles without the coalescing pass. If a version of Triton has the pass in another
    module, the context has no effect."""
    _install()
    before = getattr(_thread, "skips", False)
    _thread.skips = True
    try:
        yield
    finally:
        _thread.skips = before


def same_passes() -> AbstractContextManager[None]:
    """A context for another thread, which then compiles with the passes of this thread."""
    return uncoalesced() if getattr(_thread, "skips", False) else nullcontext()


def unwatched(kernel: Any) -> None:
    """Call it after the first launch of a kernel. At every launch, Triton checks whether the global constants that the
    kernel uses have changed. The check takes a tenth of the time of a launch, and our constants never change."""
    watched = getattr(kernel, "used_global_vals", None)
    if watched:
        watched.clear()


@cache
def _install() -> None:
    """Replace the function that adds the pass: the new one does nothing inside `uncoalesced`. Other threads and other
    kernels compile as before."""
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
