"""SVHN, the cropped digits of house numbers (Netzer et al. 2011): train_32x32.mat and test_32x32.mat."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tritoncaps.data.files import DataError, find, read
from tritoncaps.data.idx import DIGITS
from tritoncaps.data.images import ImageSet
from tritoncaps.data.matlab import read_mat


def load_svhn(split: str, folder: Path) -> ImageSet:
    """32x32 colour images, 73,257 for training and 26,032 for testing. Label 10 in the file is the digit 0."""
    path = find(folder, "svhn", [f"{split}_32x32.mat"])
    variables = read_mat(read(path), path)
    images, labels = variables.get("X"), variables.get("y")
    if images is None or labels is None:
        raise DataError(f"{path} must hold X and y, but it holds {', '.join(variables) or 'nothing'}")
    if images.ndim != 4 or images.shape[2] != 3 or images.shape[3] != labels.size:
        raise DataError(f"{path} must hold X [H, W, 3, N] and y [N, 1], but they are {images.shape} and {labels.shape}")
    if labels.size and not 1 <= labels.min() <= labels.max() <= 10:
        raise DataError(f"{path} must hold labels 1 to 10, but they range from {labels.min()} to {labels.max()}")
    channels_first = np.ascontiguousarray(images.transpose(3, 2, 0, 1), dtype=np.uint8)
    digits = labels.ravel().astype(np.int64) % 10
    return ImageSet(torch.from_numpy(channels_first), torch.from_numpy(digits), DIGITS)
