"""Compilation of the kernels: once for each dtype, cached on disk, with a log message if it takes long."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core.caching import IndexDataCacheFile

from tritoncaps.kernels.common.cpu.processor import VECTOR_BYTES

_LOG = logging.getLogger("tritoncaps")
_PATIENCE = 2.0  # seconds of compilation before a line is logged
_SHORT = 0.5  # seconds for each kernel after that; loading one from disk takes less

_lock = threading.Lock()
_spent = 0.0
_ready: set[Any] = set()  # pairs of a compiled kernel and a dtype
_kernels: Counter[str] = Counter()  # number of kernels in each module


def kernel(function: Callable[..., None]) -> Any:
    """Compile ``function`` at its first call, without the GIL, and cache it on disk."""
    _kernels[function.__module__] += 1
    return _compiled(function)


def part(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call and that allocates nothing. Numba then does not count references to its
    array arguments, which would take longer than a short function."""
    return _compiled(function, _nrt=False)


def inlined(function: Callable[..., Any]) -> Any:
    """A `part` that Numba inlines into its callers, because passing the many fields of `Edges` takes time."""
    return _compiled(function, _nrt=False, forceinline=True)


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    dispatcher: Any = njit(nogil=True, error_model="numpy", cache=True, **options)(function)
    stored: Any = dispatcher._cache
    stored._cache_file = _CodeFiles(stored.cache_path, function, _fingerprint(Path(function.__code__.co_filename)))
    return dispatcher


class _CodeFiles:
    """Compiled code on disk, one file for each kernel, signature, processor and version of the source.

    Numba's own files have an index. Two processes that compile one kernel for two dtypes at the same time can write an
    index that gives one of them the code of the other. Its index also ignores a change of the micro-kernels in other
    files, which the code of a kernel contains.
    """

    def __init__(self, folder: str, function: Callable[..., Any], fingerprint: str) -> None:
        self.files = IndexDataCacheFile(folder, "", None)  # writes a file atomically
        module, name = function.__module__, function.__qualname__
        self.name = f"{module.rsplit('.', 1)[-1]}.{function.__name__}"
        self.version = (numba.__version__, sys.version_info[:2], module, name, fingerprint, VECTOR_BYTES)

    def save(self, key: Any, data: Any) -> None:
        self.files._save_data(self._file(key), data)

    def load(self, key: Any) -> Any:
        try:
            return self.files._load_data(self._file(key))
        except FileNotFoundError:
            return None

    def flush(self) -> None:
        """Numba calls it before it compiles a function again; the new code replaces the old."""

    def _file(self, key: Any) -> str:
        digest = hashlib.sha256(repr((self.version, key)).encode()).hexdigest()
        return f"{self.name}.{digest[:24]}.nbc"


def ready(dispatcher: Any, dtype: Any, arguments: tuple[Any, ...]) -> None:
    """Compile ``dispatcher`` for ``arguments``, or load it from the cache, unless it is ready for the dtype."""
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
    """A forked process may inherit a locked lock, which none of its threads can release."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def _announce(function: Any, dtype: Any) -> None:
    """Log the name of the kernel and the progress within its module."""
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
