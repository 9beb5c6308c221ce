"""The data sets of the papers, read from their official files, and ToyNORB, which is rendered here.

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
from tritoncaps.data.cifar import load_cifar10
from tritoncaps.data.files import DataError, data_folder
from tritoncaps.data.idx import load_fashion_mnist, load_mnist
from tritoncaps.data.images import ImageSet, familiar_views
from tritoncaps.data.multimnist import MultiMNIST, load_multimnist
from tritoncaps.data.norb import load_smallnorb
from tritoncaps.data.pipeline import Pipeline
from tritoncaps.data.svhn import load_svhn
from tritoncaps.data.toynorb import load_toynorb

__all__ = ["DATASETS", "DataError", "ImageSet", "MultiMNIST", "Pipeline", "data_folder", "familiar_views", "load"]

SPLITS = ("train", "test")


class Entry(NamedTuple):
    """A data set by name: how it is loaded, how its images are treated, and which sets' files it needs."""

    load: Callable[[str, Path], ImageSet | MultiMNIST]
    pipeline: Pipeline
    files: tuple[str, ...]
    description: str


# the authors' own pipeline: 96 to 48 pixels, brightness, contrast, a crop of 32, standardised last
_NORB = Pipeline(crop=32, brightness=63 / 255, contrast=(0.2, 1.8), standardise="crop")

DATASETS: dict[str, Entry] = {
    "toynorb": Entry(load_toynorb, _NORB, (), "rendered here: five kinds of toys, stereo, 48x48"),
    "smallnorb": Entry(load_smallnorb, _NORB, ("smallnorb",), "photographs of five kinds of toys, stereo, 48x48"),
    "mnist": Entry(load_mnist, Pipeline(pad=2, standardise="crop"), ("mnist",), "digits, 28x28"),
    "fashion-mnist": Entry(
        load_fashion_mnist, Pipeline(pad=2, standardise="crop"), ("fashion-mnist",), "clothes, 28x28"
    ),
    "multimnist": Entry(
        load_multimnist, Pipeline(standardise="crop"), ("mnist",), "two overlapping digits, made of MNIST, 36x36"
    ),
    "affnist": Entry(
        load_affnist, Pipeline(pad=6, standardise="crop"), ("mnist", "affnist"), "digits, 40x40; affine ones for tests"
    ),
    "cifar10": Entry(load_cifar10, Pipeline(crop=24, standardise="crop"), ("cifar10",), "ten classes, colour, 32x32"),
    "svhn": Entry(load_svhn, Pipeline(standardise="crop"), ("svhn",), "house numbers, colour, 32x32"),
}


def load(name: str, split: str, data_dir: str | os.PathLike | None = None) -> ImageSet | MultiMNIST:
    """The "train" or "test" split of a data set, from ``data_dir`` or wherever :func:`data_folder` says."""
    if name not in DATASETS:
        raise ValueError(f"data must be one of {', '.join(DATASETS)}, but it is {name!r}")
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'test', but it is {split!r}")
    return DATASETS[name].load(split, data_folder(data_dir))
