"""Checkpoints: written as a whole or not at all, read without running code."""

from __future__ import annotations

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
    """A file that is not a checkpoint of ours, or is damaged."""


def save_checkpoint(path: Path, config: Config, **state: Any) -> None:
    content = {"format": FORMAT, "config": asdict(config), **state}
    write_atomically(path, lambda file: torch.save(content, file))


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """A file, or of a run's folder the best checkpoint, otherwise the last. ``config`` becomes a Config."""
    path = Path(path)
    if path.is_dir():
        path = path / BEST if (path / BEST).exists() else path / LAST
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError):
        raise CheckpointError(f"{path} is truncated, or not a checkpoint") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of tritoncaps")
    try:
        return {**content, "config": Config(**content["config"])}
    except (KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{path} is of another version of tritoncaps: {error}") from None
