"""affNIST (Tieleman 2013): 40x40 digits under small affine transformations, to test what training did not show."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import torch

from tritoncaps.data.files import DataError, find, read
from tritoncaps.data.idx import DIGITS, load_mnist
from tritoncaps.data.images import ImageSet
from tritoncaps.data.matlab import read_mat

SIZE = 40


def load_affnist(split: str, folder: Path) -> ImageSet:
    """Training: MNIST in the middle of 40x40, which the pipeline shifts (Sabour 2017). Test: affNIST's test.mat."""
    if split == "train":
        mnist = load_mnist("train", folder)
        margin = (SIZE - mnist.shape[-1]) // 2
        return ImageSet(torch.nn.functional.pad(mnist.images, (margin,) * 4), mnist.labels, DIGITS)
    path = find(folder, "affnist", ["test.mat", "test.mat.zip"])
    content = _unzip(path) if path.suffix == ".zip" else read(path)
    data = read_mat(content, path).get("affNISTdata")
    if not isinstance(data, dict) or data.get("image") is None or data.get("label_int") is None:
        raise DataError(f"{path} must hold the struct affNISTdata with image and label_int")
    images, labels = data["image"], data["label_int"].ravel()
    if images.shape != (SIZE**2, labels.size):
        raise DataError(f"{path} must hold images [{SIZE**2}, {labels.size}], but their shape is {images.shape}")
    # a column is an image whose rows follow each other
    pixels = images.T.astype(np.uint8, order="C").reshape(-1, 1, SIZE, SIZE)
    return ImageSet(torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64)), DIGITS)


def _unzip(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(read(path))) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".mat"))
            return archive.read(member)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise DataError(f"{path} is not a zip file with a .mat file in it ({error}); get it again") from None
