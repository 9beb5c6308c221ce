"""Pretrained weights that are part of the package, without a download.

A file contains the weights, the settings of their training, and a card with the test data, the accuracy and remarks
about the data. Before a file is loaded, its checksum is checked. Loading does not run code from the file.

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
    "mnist": "24f77e6f31bb81e891e783535dec6de0360486b3fc3ad44e8f49dcbc9e169dce",
    "fashion-mnist": "4aa18f90eaf258c99fee58db468ee0796bc7e9ae0d59eaa2027a216196d5fed3",
    "toynorb": "1f3ecff58220a4bc76882d4876fbb5ad654ea929b60f237e01c5fd72fb47f116",
    "smallnorb": "40d367746888eccbd0134beb5450801967ef3d1eb1dd5ed6a4dc8910e445d548",
    "smallnorb-efficient": "7b011477eb6713c974e622e5e64e690a809079593b2e7aa1d2932e5475e52783",
}


class Pretrained(NamedTuple):
    """Pretrained weights.

    Attributes:
        settings: settings of the training run, by the names of :class:`tritoncaps.training.Config`.
        card: test data, accuracy and remarks.
        weights: the state_dict of the network.
    """

    settings: dict[str, Any]
    card: dict[str, Any]
    weights: dict[str, Tensor]


def load_pretrained(name: str) -> Pretrained:
    """Load weights that are part of the package; docs/models.md describes them.

    Args:
        name: "mnist", "fashion-mnist", "toynorb", "smallnorb" or "smallnorb-efficient".

    Returns:
        The weights, the settings of their training, and their card.

    Raises:
        ValueError: if there are no weights with this name.
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


def load_pretrained_of(model: str, name: str) -> Pretrained:
    """Load the weights ``name`` of the package if they are those of ``model``, a name of `tritoncaps train --model`.

    Args:
        model: name of the network.
        name: name of the weights.

    Returns:
        The weights, the settings of their training, and their card.

    Raises:
        ValueError: if there are no weights with this name, or if they are those of another network.

    Example:
        >>> from tritoncaps.models.pretrained import load_pretrained_of
        >>> load_pretrained_of("matrix-capsnet-small", "mnist").settings["data"]
        'mnist'
    """
    found = load_pretrained(name)
    if found.settings["model"] != model:
        raise ValueError(
            f"pretrained must be weights of {model}, but {name!r} are weights of {found.settings['model']}"
        )
    return found


def encode(pretrained: Pretrained) -> bytes:
    """Encode weights as the content of a file for the folder ``weights``.

    Args:
        pretrained: the weights.

    Returns:
        The content of the file.

    Example:
        >>> from tritoncaps.models.pretrained import encode, load_pretrained
        >>> isinstance(encode(load_pretrained("mnist")), bytes)
        True
    """
    file = io.BytesIO()
    torch.save({"format": FORMAT, **pretrained._asdict()}, file)
    return file.getvalue()
