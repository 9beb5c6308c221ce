"""MNIST and Fashion-MNIST in the idx format: big-endian; 0, 0, type, number of axes, their sizes, the bytes."""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path

import numpy as np
import torch

from tritoncaps.data.files import DataError, find, read, with_gz
from tritoncaps.data.images import ImageSet

DIGITS = tuple("0123456789")
CLOTHES = (
    *("T-shirt or top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
PREFIX = {"train": "train", "test": "t10k"}
UNSIGNED_BYTE = 8


def load_mnist(split: str, folder: Path, dataset: str = "mnist") -> ImageSet:
    """28x28 digits, 60,000 for training and 10,000 for testing; ``dataset="fashion-mnist"`` for clothes."""
    image_file = find(folder, dataset, with_gz(f"{PREFIX[split]}-images-idx3-ubyte"))
    label_file = find(folder, dataset, with_gz(f"{PREFIX[split]}-labels-idx1-ubyte"))
    images, labels = read_idx(image_file, axes=3), read_idx(label_file, axes=1)
    if len(images) != len(labels):
        raise DataError(
            f"{image_file} holds {len(images)} images but {label_file} holds {len(labels)} labels: "
            "they do not belong together"
        )
    if len(labels) and labels.max() > 9:
        raise DataError(f"{label_file} must hold labels 0 to 9, but one is {labels.max()}")
    classes = CLOTHES if dataset == "fashion-mnist" else DIGITS
    return ImageSet(torch.tensor(images)[:, None], torch.tensor(labels).long(), classes)


def load_fashion_mnist(split: str, folder: Path) -> ImageSet:
    return load_mnist(split, folder, "fashion-mnist")


def read_idx(path: Path, axes: int) -> np.ndarray:
    """The array of unsigned bytes in an idx file."""
    content = read(path)
    expected = bytes([0, 0, UNSIGNED_BYTE, axes])
    if content[:4] != expected:
        raise DataError(f"{path} must start with {expected.hex(' ')} (idx, {axes} axes), not {content[:4].hex(' ')}")
    start = 4 + 4 * axes
    if len(content) < start:
        raise DataError(f"{path} is truncated: it has {len(content)} bytes, fewer than its header of {start}")
    shape = struct.unpack(f">{axes}I", content[4:start])
    if len(content) != start + prod(shape):
        raise DataError(f"{path} must have {start + prod(shape)} bytes for shape {shape}, but it has {len(content)}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
