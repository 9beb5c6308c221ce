"""Checkpoints: written completely or not at all, and loaded without running code from the file."""

from __future__ import annotations

import errno
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tritoncaps.data.files import write_atomically
from tritoncaps.training.config import Config, ConfigError

FORMAT = "tritoncaps checkpoint 1"
LAST, BEST = "last.pt", "best.pt"


class CheckpointError(RuntimeError):
    """A file is not a checkpoint of tritoncaps, is damaged, or cannot be written."""


def save_checkpoint(path: Path, config: Config, **state: Any) -> None:
    """Write a checkpoint. An older file stays until the new one is complete."""
    content = {"format": FORMAT, "config": asdict(config), **state}
    try:
        write_atomically(path, lambda file: torch.save(content, file))
    except (OSError, RuntimeError) as error:  # torch raises its own error instead of an OSError
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        kept = f"{path} of an earlier step is still there" if path.exists() else "there is no earlier one"
        raise CheckpointError(f"the checkpoint {path} cannot be written: {cause.strerror or cause}; {kept}") from error


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint, without running code from the file.

    Args:
        path: a checkpoint, or the folder of a run: then its best checkpoint if there is one, otherwise the last one.

    Returns:
        The content of the checkpoint by name; ``config`` is a :class:`Config`.

    Raises:
        CheckpointError: if there is no such file, or it is not a checkpoint.

    Example:
        >>> from tritoncaps.training import load_checkpoint
        >>> load_checkpoint("runs/mnist-capsnet")["config"].model  # doctest: +SKIP
        'capsnet'
    """
    path, other = Path(path), ""
    if path.is_dir():
        path = path / BEST if (path / BEST).exists() else path / LAST
        other = f"; try {path.with_name(LAST)}" if path.name == BEST and path.with_name(LAST).exists() else ""
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a position before the start of a file
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}{other}") from None
        raise CheckpointError(f"{path} is truncated, or not a checkpoint{other}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of tritoncaps")
    try:
        # older checkpoints have no counter "evaluated"; their evaluations are complete
        return {"evaluated": content.get("step"), **content, "config": Config(**content["config"])}
    except (KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{path} was written by another version of tritoncaps: {error}") from None


def first_problem(error: Exception) -> str:
    """The first problem in an error message of ``load_state_dict``, in one line."""
    lines = str(error).splitlines()
    return lines[min(1, len(lines) - 1)].strip() if lines else type(error).__name__
