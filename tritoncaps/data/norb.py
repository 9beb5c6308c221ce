"""smallNORB: the official binary-matrix files (LeCun, Huang and Bottou 2004), dat, cat and info.

The format is little-endian: a magic number for the type, the number of axes, at least three sizes, the data.
"""

from __future__ import annotations

import struct
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tritoncaps.data.files import DataError, find, read, with_gz
from tritoncaps.data.images import ImageSet

CATEGORIES = ("animal", "human", "airplane", "truck", "car")
STEMS = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
# elevation 0 to 8 is 30 to 70 degrees; azimuth 0, 2, .. 34 is in tens of degrees; lighting is 0 to 5
FACTORS = ("instance", "elevation", "azimuth", "lighting")
TYPES: dict[int, np.dtype] = {0x1E3D4C55: np.dtype("<u1"), 0x1E3D4C54: np.dtype("<i4"), 0x1E3D4C56: np.dtype("<i2")}


def load_smallnorb(split: str, folder: Path, size: int = 48) -> ImageSet:
    """24,300 stereo pairs in each split: the left and the right image are the two channels. ``size`` 48 averages blocks
    of 2x2 of the 96x96 pixels."""
    paths = {kind: find(folder, "smallnorb", with_gz(f"{STEMS[split]}-{kind}.mat")) for kind in ("dat", "cat", "info")}
    pairs = read_matrix(paths["dat"], "uint8", axes=4)
    categories = read_matrix(paths["cat"], "int32", axes=1)
    info = read_matrix(paths["info"], "int32", axes=2)
    if pairs.shape[1] != 2 or pairs.shape[2] != pairs.shape[3]:
        raise DataError(f"{paths['dat']} must hold pairs of square images, but its shape is {pairs.shape}")
    if not len(pairs) == len(categories) == len(info):
        raise DataError(
            f"{paths['dat']}, -cat and -info must describe the same number of pairs, but they describe "
            f"{len(pairs)}, {len(categories)} and {len(info)}"
        )
    if info.shape[1] != len(FACTORS):
        raise DataError(f"{paths['info']} must hold {len(FACTORS)} factors of each pair, but its shape is {info.shape}")
    if len(categories) and not 0 <= categories.min() <= categories.max() < len(CATEGORIES):
        raise DataError(f"{paths['cat']} must hold categories 0 to 4, but the largest is {categories.max()}")
    factors = {name: torch.tensor(info[:, i]).long() for i, name in enumerate(FACTORS)}
    images = reduce(torch.from_numpy(pairs.copy()), size)
    return ImageSet(images, torch.tensor(categories).long(), CATEGORIES, factors)


def read_matrix(path: Path, dtype: str, axes: int) -> np.ndarray:
    content = read(path)
    if len(content) < 8:
        raise DataError(f"{path} is truncated: it has {len(content)} bytes, fewer than its header")
    magic, given_axes = struct.unpack("<II", content[:8])
    if magic not in TYPES:
        raise DataError(f"{path} is not a binary matrix file: it starts with {content[:4].hex(' ')}")
    if TYPES[magic] != np.dtype(dtype) or given_axes != axes:
        raise DataError(
            f"{path} must hold {dtype} with {axes} axes, but it holds {TYPES[magic].name} with {given_axes}: "
            "dat, cat and info may be mixed up"
        )
    start = 8 + 4 * max(axes, 3)
    if len(content) < start:
        raise DataError(f"{path} is truncated: it has {len(content)} bytes, fewer than its header of {start}")
    shape = struct.unpack(f"<{axes}I", content[8 : 8 + 4 * axes])
    expected = start + prod(shape) * TYPES[magic].itemsize
    if len(content) != expected:
        raise DataError(f"{path} must have {expected} bytes for shape {shape}, but it has {len(content)}")
    return np.frombuffer(content, TYPES[magic], offset=start).reshape(shape)


def reduce(images: Tensor, size: int) -> Tensor:
    """Reduce bytes [N, C, S, S] to [N, C, size, size] by the rounded means of square blocks."""
    if images.shape[-1] == size:
        return images
    if images.shape[-1] % size:
        raise ValueError(f"size must divide the images' {images.shape[-1]} pixels, but it is {size}")
    block = images.shape[-1] // size
    total = torch.zeros(*images.shape[:2], size, size, dtype=torch.int16)
    for y, x in product(range(block), repeat=2):
        total += images[..., y::block, x::block]
    return (total.add_(block**2 // 2) // block**2).byte()
