"""Progress of long operations: a bar in a terminal, lines in a log."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

PATIENCE = 2.0  # seconds before the first line of a log
PAUSE = 30.0  # seconds between lines

_LOG = logging.getLogger("tritoncaps")
T = TypeVar("T")


class Waiting:
    """A context that shows the progress of ``what`` as a bar. Without a terminal, tqdm or a total, it logs lines; the
    first one after two seconds."""

    def __init__(self, what: str, total: int = 0, unit: str = "") -> None:
        self.done, self._what, self._total = 0, what, total
        self._bar = _bar(what, total, unit) if total else None
        self._timer: threading.Timer | None = None

    def reach(self, done: int) -> None:
        self.done = done
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def __enter__(self) -> Waiting:
        if self._bar is None:
            self._start(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._bar is not None:
            self._bar.close()

    def _start(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._say)
        self._timer.daemon = True
        self._timer.start()

    def _say(self) -> None:
        share = f": {self.done / self._total:.0%} done" if self._total else " .."
        _LOG.warning("%s%s", self._what, share)
        self._start(PAUSE)


def waiting(what: str, items: Iterable[T], total: int) -> Iterator[T]:
    """Yield the items and show how many of ``total`` are done."""
    with Waiting(what, total) as shown:
        for done, item in enumerate(items, start=1):
            yield item
            shown.reach(done)


def _bar(what: str, total: int, unit: str) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc=what, total=total, unit=unit or "it", unit_scale=bool(unit), dynamic_ncols=True, leave=False)
