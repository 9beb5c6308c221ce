"""Metrics of a run: JSON lines in metrics.jsonl, and files for TensorBoard if it is installed."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tritoncaps.data.files import DataError, write_atomically
from tritoncaps.training.board import Board

METRICS = "metrics.jsonl"


class Metrics:
    """Rows of numbers by step. A run that resumes from ``step`` removes the rows after it."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        self._path = path = folder / METRICS
        kept = [row for row in read_metrics(folder) if row["step"] <= step] if step else []
        write_atomically(path, lambda file: file.write("".join(json.dumps(row) + "\n" for row in kept).encode()))
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the run
        self.board = Board(folder)

    def add(self, kind: str, step: int, **numbers: Any) -> None:
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **numbers}) + "\n")
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{self._path} cannot be written: {reason}; checkpoints are not affected") from error
        self.board.add_scalars(kind, step, numbers)

    def close(self) -> None:
        with suppress(OSError):  # close() tries again to write what could not be written
            self._file.close()
        self.board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows so far, without the incomplete last line of a run that was killed."""
    path = folder / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
