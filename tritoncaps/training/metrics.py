"""Metrics of a run: JSON lines in metrics.jsonl and, if TensorBoard is installed, its own files beside them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tritoncaps.data.files import DataError, write_atomically
from tritoncaps.training.board import Board

METRICS = "metrics.jsonl"


class Metrics:
    """Rows of numbers by step. A run that goes on from ``step`` removes the rows after it."""

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
            raise DataError(f"{self._path} cannot be written: {error.strerror or error}; checkpoints stay") from error
        self.board.add_scalars(kind, step, numbers)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written, again
            self._file.close()
        self.board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows so far; a last line that a killed run did not finish is left out."""
    path = folder / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
