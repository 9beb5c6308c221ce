"""affNIST (Tieleman 2013): 40x40 digits under small affine transformations, which are not in the training set."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tritoncaps.data.files import DataError, find, read
from tritoncaps.data.idx import DIGITS, load_mnist
from tritoncaps.data.images import ImageSet
from tritoncaps.data.matlab import read_mat

SIZE = 40

# ranges of affNIST: rotation in degrees, shear, factors of height and width
ROTATION, SHEAR, SCALE = 20.0, 0.2, (0.8, 1.2)


def load_affnist(split: str, folder: Path) -> ImageSet:
    """Training: MNIST in the middle of 40x40 pixels; the pipeline shifts it (Sabour 2017). Test: affNIST's test.mat."""
    if split == "train":
        mnist = load_mnist("train", folder)
        margin = (SIZE - mnist.shape[-1]) // 2
        return ImageSet(F.pad(mnist.images, (margin,) * 4), mnist.labels, DIGITS)
    path = find(folder, "affnist", ["test.mat", "test.mat.zip"])
    content = _unzip(path) if path.suffix == ".zip" else read(path)
    data = read_mat(content, path).get("affNISTdata")
    if not isinstance(data, dict) or data.get("image") is None or data.get("label_int") is None:
        raise DataError(f"{path} must hold the struct affNISTdata with image and label_int")
    images, labels = data["image"], data["label_int"].ravel()
    if images.shape != (SIZE**2, labels.size):
        raise DataError(f"{path} must hold images [{SIZE**2}, {labels.size}], but their shape is {images.shape}")
    # each column is an image, row by row
    pixels = images.T.astype(np.uint8, order="C").reshape(-1, 1, SIZE, SIZE)
    return ImageSet(torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64)), DIGITS)


def affnist_like(digits: ImageSet, seed: int = 0) -> ImageSet:
    """Digits on 40x40 pixels, each under one random affine transformation in the range of affNIST: rotated by up to 20
    degrees, sheared by up to 0.2, height and width scaled by 0.8 to 1.2, and moved to a random position in the image.

    Use it where affNIST's files are not available. Accuracies on these digits are not accuracies on affNIST.
    """
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(len(digits), 6, generator=generator)
    angle = torch.deg2rad((2 * random[:, 0] - 1) * ROTATION)
    shear = (2 * random[:, 1] - 1) * SHEAR
    height, width = (SCALE[0] + (SCALE[1] - SCALE[0]) * random[:, k] for k in (2, 3))
    pixels = affine(digits.images.float() / 255, angle, shear, height, width, SIZE)
    moved = torch.stack([_move(image, *place) for image, place in zip(pixels, random[:, 4:].tolist(), strict=True)])
    return ImageSet((moved * 255).round().byte(), digits.labels, digits.classes)


def affine(pixels: Tensor, angle: Tensor, shear: Tensor, height: Tensor, width: Tensor, size: int) -> Tensor:
    """Put images [N, C, S, S] on the middle of [N, C, size, size]. Scale their height and width, shear them to the
    right, then rotate them clockwise by ``angle`` in radians. Each argument has one number [N] for every image."""
    margin = (size - pixels.shape[-1]) // 2
    pixels = F.pad(pixels, (margin, size - pixels.shape[-1] - margin) * 2)
    zero, one = torch.zeros_like(angle), torch.ones_like(angle)
    turn = _matrices(angle.cos(), -angle.sin(), angle.sin(), angle.cos())  # of positions (x, y), y downwards
    forward = turn @ _matrices(one, -shear, zero, one) @ _matrices(width, zero, zero, height)
    backward = torch.cat([torch.linalg.inv(forward), zero[:, None, None].expand(-1, 2, 1)], dim=2)
    grid = F.affine_grid(backward, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, align_corners=False).clamp(0, 1)


def _matrices(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """[N, 2, 2]."""
    return torch.stack([torch.stack([a, b], dim=1), torch.stack([c, d], dim=1)], dim=1)


def _move(image: Tensor, y: float, x: float) -> Tensor:
    """Move the digit in an image [C, H, W]. ``y`` and ``x`` in [0, 1) choose among the positions where it fits."""
    ink = image.amax(dim=0) > 0.1
    if not ink.any():
        return image
    rows, columns = (ink.any(dim=k).nonzero()[:, 0] for k in (1, 0))
    shifts = []
    for places, share, size in ((rows, y, image.shape[1]), (columns, x, image.shape[2])):
        first, last = int(places[0]), int(places[-1])
        room = size - (last - first)  # possible positions of the first row or column
        shifts.append(int(share * room) - first)
    return torch.roll(image, shifts, dims=(1, 2))


def _unzip(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(read(path))) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".mat"))
            return archive.read(member)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise DataError(f"{path} is not a zip file with a .mat file in it ({error}); get it again") from None
