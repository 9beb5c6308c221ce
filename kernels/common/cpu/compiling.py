"""Compilation of the kernels: once for each dtype, kept on disk, and announced when it takes long."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit

_LOG = logging.getLogger("tritoncaps")
_PATIENCE = 2.0  # seconds of compilation before a line is logged
_SHORT = 0.5  # seconds of a kernel after these: it is compiled, not loaded

_lock = threading.Lock()
_spent = 0.0
_ready: set[Any] = set()  # kernels and the dtypes that they are compiled for
_kernels: Counter[str] = Counter()  # of each module


def kernel(function: Callable[..., None]) -> Any:
    """Compile ``function`` at its first call, without the GIL, and cache it on disk."""
    _kernels[function.__module__] += 1
    return _compiled(function)


def part(function: Callable[..., Any]) -> Any:
    """Compile a piece of kernels that allocates nothing: then Numba need not count references to the arrays that the
    piece is given, which takes longer than a short piece."""
    return _compiled(function, _nrt=False)


def inlined(function: Callable[..., Any]) -> Any:
    """A `part` that is copied into its callers: to pass on the many fields of a call's edges takes time, too."""
    return _compiled(function, _nrt=False, forceinline=True)


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    dispatcher: Any = njit(nogil=True, error_model="numpy", cache=True, **options)(function)
    # Numba looks at the age of the kernel's own file only, but micro-kernels of other files are compiled into it.
    cache_file: Any = getattr(dispatcher._cache, "_cache_file", None)
    if hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = (cache_file._source_stamp, _fingerprint(Path(function.__code__.co_filename)))
    return dispatcher


def ready(dispatcher: Any, dtype: Any, arguments: tuple[Any, ...]) -> None:
    """Compile ``dispatcher`` for ``arguments``, or load it from the cache, unless that was done for the dtype."""
    global _spent
    if (dispatcher, dtype) in _ready:
        return
    with _lock:
        timer = threading.Timer(max(_SHORT, _PATIENCE - _spent), _announce, (dispatcher.py_func, dtype))
        timer.daemon = True
        timer.start()
        start = time.monotonic()
        try:
            dispatcher.compile(tuple(map(dispatcher.typeof_pyval, arguments)))
        finally:
            timer.cancel()
            _spent += time.monotonic() - start
    _ready.add((dispatcher, dtype))


def _forget_lock() -> None:
    """A forked process may inherit a locked lock, and no thread of it will release that."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def _announce(function: Any, dtype: Any) -> None:
    """Says which kernel, and how far those of its module are."""
    module, name = function.__module__, function.__name__.strip("_").removesuffix("_kernel")
    done = sum(d.py_func.__module__ == module and t == dtype for d, t in tuple(_ready))
    _LOG.warning(
        "preparing the CPU kernels, compiled once and then loaded from disk: %s.%s, %s (%d of %d)",
        module.rsplit(".", 1)[-1],
        name,
        dtype,
        done + 1,
        _kernels[module],
    )


@cache
def _fingerprint(path: Path) -> str:
    """A hash of a kernel's file and of all files of `kernels` that it imports, directly or not."""
    root = next((folder for folder in path.parents if folder.name == "kernels"), path.parent)
    found, new = set(), {path}
    while new:
        found |= new
        names = {name for file in new for name in re.findall(r"tritoncaps\.kernels\.([\w.]+) import", file.read_text())}
        files = {root.joinpath(*name.split(".")).with_suffix(".py") for name in names}
        new = {file for file in files if file.is_file()} - found
    digest = hashlib.sha256()
    for file in sorted(found):
        digest.update(file.read_bytes())
    return digest.hexdigest()
