"""Compilation of Triton's kernels: a log message if it takes long, and a lock so that one process compiles at a time.

Triton calls a hook before and after it compiles a kernel or loads it from its cache on disk. Our hooks act only on our
own kernels, and then call the hooks that were installed before.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import IO, Any

_LOG = logging.getLogger("tritoncaps")
_PATIENCE = 2.0  # seconds of compilation before a line is logged


class _Compilation(threading.local):
    """The kernel that this thread compiles."""

    timer: threading.Timer | None = None
    lock: IO[bytes] | None = None


_now = _Compilation()
_compiled: list[str] = []  # names of the kernels that this process has compiled or loaded


@cache
def install() -> None:
    """Install our hooks before those of others. No effect if this version of Triton has no such hooks."""
    try:
        from triton import knobs
    except ImportError:
        return
    runtime = knobs.runtime
    for name, ours in (("jit_cache_hook", _start), ("jit_post_compile_hook", _end)):
        if hasattr(runtime, name):
            setattr(runtime, name, _followed(ours, getattr(runtime, name)))


def _followed(ours: Any, theirs: Any) -> Any:
    def hook(*args: Any, **kwargs: Any) -> Any:
        fn: Any = kwargs.get("fn")
        if str(getattr(fn, "module", "")).startswith("tritoncaps."):
            ours(fn.name)
        return theirs(*args, **kwargs) if theirs is not None else None

    return hook


def _start(name: str) -> None:
    finish()
    _now.timer = threading.Timer(_PATIENCE, _announce, (name,))
    _now.timer.daemon = True
    _now.timer.start()
    if "LOCAL_RANK" in os.environ:  # torchrun: another process may compile the same kernel; this one then loads it
        _now.lock = _locked()


def _end(name: str) -> None:
    _compiled.append(name)
    finish()


def finish() -> None:
    """Stop the timer and release the lock after a compilation, also if it failed."""
    if _now.timer is not None:
        _now.timer.cancel()
        _now.timer = None
    if _now.lock is not None:
        _now.lock.close()
        _now.lock = None


def _announce(name: str) -> None:
    """Log the name of the kernel and the number of kernels that are done."""
    _LOG.warning(
        "preparing the GPU kernels, compiled once and then loaded from disk: %s (%d done; a network needs about 14)",
        name.removesuffix("_kernel"),
        len(_compiled),
    )


def _locked() -> IO[bytes] | None:
    """Acquire a lock of this user on this machine; None if the system has no such locks."""
    try:
        import fcntl
    except ImportError:
        return None
    file = open(Path(tempfile.gettempdir()) / f"tritoncaps-compiles-{os.getuid()}.lock", "wb")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    return file
