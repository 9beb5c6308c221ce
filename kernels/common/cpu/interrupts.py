"""Ctrl-C while kernels run.

Python calls signal handlers in the main thread between two bytecode instructions, and a kernel call is one instruction.
But Python writes a byte to a socket immediately. A thread waits for this byte and stops the kernels: they finish only
the tasks that have started. Then the main thread continues, and Python calls the handlers.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from tritoncaps.kernels.common.cpu.compiling import ready
from tritoncaps.kernels.common.cpu.tasks import stop_tasks

NONE = -1  # no socket

_lock = threading.Lock()
_socket: socket.socket | None = None  # Python writes to it
_stop: Callable[[], None] | None = None  # called after a signal
_next = NONE  # the socket of other code that waits for signals, such as asyncio


@contextmanager
def watched(stop: Callable[[], None]) -> Iterator[None]:
    """Inside, if the main thread gets a signal, another thread calls ``stop``. No effect outside the main thread."""
    global _stop, _next
    writer = _waiting() if threading.current_thread() is threading.main_thread() else None
    if writer is None:
        yield
        return
    own = writer.fileno()
    before = signal.set_wakeup_fd(own, warn_on_full_buffer=False)
    before = NONE if before == own else before  # nested in a handler, or after a handler that raised an error here
    with _lock:
        outer, _stop, _next = (_stop, _next), stop, before
    try:
        yield
    finally:
        with _lock:  # no thread calls stop after this
            _stop, _next = outer
        signal.set_wakeup_fd(before)


def _waiting() -> socket.socket | None:
    """The socket for Python to write to. A thread reads from the other end."""
    global _socket
    if _socket is None:
        ready(stop_tasks, np.int64, (np.zeros(2, np.int64), 1))
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        try:
            threading.Thread(target=_wait, args=(reader,), name="tritoncaps-signals", daemon=True).start()
        except RuntimeError:  # the interpreter is shutting down
            return None
        _socket = writer
    return _socket


def _wait(reader: socket.socket) -> Any:
    while True:
        signals = reader.recv(64)
        with _lock:
            if _next != NONE:
                with suppress(OSError):
                    os.write(_next, signals)
            if _stop is not None:
                _stop()


def _forget() -> None:
    """A forked process inherits the socket but not the thread."""
    global _lock, _socket, _stop, _next
    _lock, _socket, _stop, _next = threading.Lock(), None, None, NONE


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
