"""Ctrl-C and a scheduler's SIGTERM: the training loop finishes its step, saves the run and ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

ANSWER = b"\ninterrupted: the run ends after this step and is saved; press Ctrl-C again to end it without saving\n"


class Interrupts:
    """A context in which the first signal sets ``asked``. A second Ctrl-C raises KeyboardInterrupt as usual."""

    def __init__(self, quiet: bool = True) -> None:
        self.asked = False
        self._quiet, self._at_once = quiet, False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A context in which the first signal also raises KeyboardInterrupt, for work that can be repeated later."""
        if self.asked:
            raise KeyboardInterrupt
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if self._at_once or (again and number == signal.SIGINT):
            raise KeyboardInterrupt
        if not self._quiet and not again:
            os.write(2, ANSWER)  # not print(), which the signal may have interrupted
