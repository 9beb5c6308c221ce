"""Weights that are installed with the package: no download.

A file holds the weights, the settings that they were trained with, and a card: what they were tested on, with what
accuracy, and what to know about the data. It is read without running code, after a check of its checksum.

>>> from tritoncaps.models import MatrixCapsNet
>>> network = MatrixCapsNet.small(2, 5, pretrained="toynorb").eval()
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FORMAT = "tritoncaps weights 1"
FOLDER = Path(__file__).parent / "weights"

# name: sha256 of weights/NAME.pt
CHECKSUMS: dict[str, str] = {
    "mnist": "286af8c30048d29f73d53e520fa07e0b11e408cee3b81ee4e386358c5461ea1e",
    "toynorb": "1f3ecff58220a4bc76882d4876fbb5ad654ea929b60f237e01c5fd72fb47f116",
    "smallnorb": "5076c4d206ab357e062d4d49d89d3440792b98bfd6378c82eb6d4bcfb3e31b71",
}


class Pretrained(NamedTuple):
    """``settings`` of the run, by the names of :class:`tritoncaps.training.Config`; ``card``; ``weights`` by name."""

    settings: dict[str, Any]
    card: dict[str, Any]
    weights: dict[str, Tensor]


def load_pretrained(name: str) -> Pretrained:
    """The weights ``name`` of the package, their settings and their card; docs/models.md lists the names.

    Args:
        name: "mnist", "toynorb" or "smallnorb".

    Raises:
        ValueError: if there are no weights of this name.
        RuntimeError: if the file is missing or damaged.

    Example:
        >>> from tritoncaps.models.pretrained import load_pretrained
        >>> load_pretrained("mnist").settings["data"]
        'mnist'
    """
    if name not in CHECKSUMS:
        raise ValueError(f"pretrained must be one of {', '.join(CHECKSUMS)}, but it is {name!r}")
    path = FOLDER / f"{name}.pt"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RuntimeError(f"{path} cannot be read: {error.strerror or error}; install the package again") from None
    if hashlib.sha256(content).hexdigest() != CHECKSUMS[name]:
        raise RuntimeError(f"{path} is damaged: its checksum is not that of pretrained {name!r}; install again")
    saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return Pretrained(saved["settings"], saved["card"], saved["weights"])


def encode(pretrained: Pretrained) -> bytes:
    """The content of a file for the folder ``weights``."""
    file = io.BytesIO()
    torch.save({"format": FORMAT, **pretrained._asdict()}, file)
    return file.getvalue()
