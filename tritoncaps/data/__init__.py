"""The data sets of the papers, read from their official files, and ToyNORB, which this package renders.

>>> from tritoncaps import data
>>> data.load("toynorb", "train").images.shape  # doctest: +SKIP
torch.Size([24300, 2, 48, 48])
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tritoncaps.data.affnist import load_affnist
from tritoncaps.data.cifar import CLASSES as OBJECTS
from tritoncaps.data.cifar import load_cifar10
from tritoncaps.data.files import DataError, data_folder
from tritoncaps.data.idx import CLOTHES, DIGITS, load_fashion_mnist, load_mnist
from tritoncaps.data.images import ImageSet, familiar_views
from tritoncaps.data.multimnist import MultiMNIST, load_multimnist
from tritoncaps.data.norb import CATEGORIES, load_smallnorb
from tritoncaps.data.pipeline import JITTERS, Pipeline
from tritoncaps.data.svhn import load_svhn
from tritoncaps.data.toynorb import load_toynorb
from tritoncaps.waiting import Waiting

__all__ = [
    "DATASETS",
    "DataError",
    "Entry",
    "ImageSet",
    "MultiMNIST",
    "Pipeline",
    "data_folder",
    "familiar_views",
    "load",
]

SPLITS = ("train", "test")


class Entry(NamedTuple):
    """A data set in :data:`DATASETS`.

    Attributes:
        load: a function of the split and the data folder that returns the images.
        shape: channels, height and width of an image.
        classes: names of the classes.
        pipeline: preprocessing of the images.
        files: names of the data sets whose files it needs.
        description: a few words for the command line.
    """

    load: Callable[[str, Path], ImageSet | MultiMNIST]
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    pipeline: Pipeline
    files: tuple[str, ...]
    description: str


# Hinton 2018: 96 to 48 pixels, standardised, a crop of 32, then brightness and contrast
_NORB = Pipeline(crop=32, jitter=JITTERS["last"], standardise="image")

_DIGITS = Pipeline(pad=2, standardise="crop")
_PLAIN = Pipeline(standardise="crop")

DATASETS: dict[str, Entry] = {
    "toynorb": Entry(load_toynorb, (2, 48, 48), CATEGORIES, _NORB, (), "five kinds of toys, stereo, rendered here"),
    "smallnorb": Entry(load_smallnorb, (2, 48, 48), CATEGORIES, _NORB, ("smallnorb",), "five kinds of toys, stereo"),
    "mnist": Entry(load_mnist, (1, 28, 28), DIGITS, _DIGITS, ("mnist",), "handwritten digits"),
    "fashion-mnist": Entry(load_fashion_mnist, (1, 28, 28), CLOTHES, _DIGITS, ("fashion-mnist",), "clothes"),
    "multimnist": Entry(load_multimnist, (1, 36, 36), DIGITS, _PLAIN, ("mnist",), "two overlapping digits"),
    "affnist": Entry(
        load_affnist,
        (1, 40, 40),
        DIGITS,
        Pipeline(pad=6, standardise="crop"),
        ("mnist", "affnist"),
        "digits; the test digits are affinely transformed",
    ),
    "cifar10": Entry(
        load_cifar10, (3, 32, 32), OBJECTS, Pipeline(crop=24, standardise="crop"), ("cifar10",), "animals and vehicles"
    ),
    "svhn": Entry(load_svhn, (3, 32, 32), DIGITS, _PLAIN, ("svhn",), "house numbers"),
}
"""The data sets of `load` and `tritoncaps train --data`, by name."""


def load(name: str, split: str, data_dir: str | os.PathLike | None = None) -> ImageSet | MultiMNIST:
    """Load one split of a data set.

    Args:
        name: a name in :data:`DATASETS`.
        split: "train" or "test".
        data_dir: folder of the data files; default: see :func:`data_folder`.

    Returns:
        The images and labels.

    Raises:
        ValueError: if the name or the split is unknown.
        DataError: if a file is missing or damaged.

    Example:
        >>> from tritoncaps import data
        >>> data.load("mnist", "test")  # doctest: +SKIP
        ImageSet(10,000 images of 1x28x28; 10 classes)
    """
    if name not in DATASETS:
        raise ValueError(f"data must be one of {', '.join(DATASETS)}, but it is {name!r}")
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'test', but it is {split!r}")
    entry = DATASETS[name]
    if not entry.files:  # rendering ToyNORB shows its own progress
        return entry.load(split, data_folder(data_dir))
    with Waiting(f"reading the files of {name}, {split}"):
        return entry.load(split, data_folder(data_dir))
