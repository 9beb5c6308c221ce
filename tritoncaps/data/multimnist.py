"""MultiMNIST (Sabour 2017): two digits of different classes, each shifted by up to 4 pixels, on top of each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tritoncaps.data.idx import load_mnist
from tritoncaps.data.images import ImageSet

SHIFT = 4


class MultiMNIST(Dataset):
    """Images of two overlapping digits, 36x36 pixels. They are computed when they are read.

    Image i shows digit i // pairs and a second digit. The second digit and the shifts depend only on (seed, i), so the
    images are the same in every run. Labels are two-hot [N, 10].

    Args:
        digits: the digits of MNIST.
        pairs: images for every digit.
        seed: random seed.

    Example:
        >>> import torch
        >>> from tritoncaps.data import ImageSet, MultiMNIST
        >>> images = torch.randint(256, (10, 1, 28, 28), dtype=torch.uint8)
        >>> digits = ImageSet(images, torch.arange(10), tuple("0123456789"))
        >>> image, label, alone = MultiMNIST(digits, pairs=3)[0]
        >>> image.shape, int(label.sum()), alone.shape
        (torch.Size([1, 36, 36]), 2, torch.Size([2, 1, 36, 36]))
    """

    def __init__(self, digits: ImageSet, pairs: int = 1000, seed: int = 0) -> None:
        self.digits, self.pairs, self.seed = digits, pairs, seed
        self.classes = digits.classes
        self.factors: dict[str, Tensor] = {}
        kinds = range(len(self.classes))
        self._others = [np.flatnonzero(digits.labels.numpy() != kind) for kind in kinds]

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"MultiMNIST({len(self):,} images of {size}; two of {len(self.classes)} classes in each)"

    def __len__(self) -> int:
        return len(self.digits) * self.pairs

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.digits.shape
        return channels, height + 2 * SHIFT, width + 2 * SHIFT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        images, labels, digits = self.__getitems__([index])
        return images[0], labels[0], digits[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Images, two-hot labels, and images of each digit alone [N, 2, 1, 36, 36], in the order of their classes."""
        index = np.asarray(indices, dtype=np.uint64)
        first = (index // np.uint64(self.pairs)).astype(np.int64)
        kind = self.digits.labels.numpy()
        random = [_random(self.seed, index, draw) for draw in range(5)]
        second = np.empty_like(first)
        for k, others in enumerate(self._others):
            chosen = kind[first] == k
            second[chosen] = others[(random[0][chosen] * len(others)).astype(np.int64)]
        shifts = (np.stack(random[1:]) * (2 * SHIFT + 1)).astype(np.int64)
        digits = torch.stack([self._shifted(first, *shifts[:2]), self._shifted(second, *shifts[2:])], dim=1)
        classes = self.digits.labels[np.stack([first, second], axis=1)]
        labels = torch.zeros(len(index), len(self.classes), dtype=torch.long).scatter(1, classes, 1)
        in_order = digits[torch.arange(len(index))[:, None], classes.argsort(dim=1)]
        return digits.int().sum(dim=1).clamp(max=255).byte(), labels, in_order

    def split(self, count: int, seed: int) -> tuple[MultiMNIST, MultiMNIST]:
        """Split the digits at random, so that no digit is the first one of images in both parts.

        Args:
            count: number of digits in the first part, at most all.
            seed: random seed.

        Returns:
            At least ``count`` images of these digits, and the images of all other digits.
        """
        chosen, others = self.digits.split(count, seed)
        pairs = -(-count // len(chosen))
        return MultiMNIST(chosen, pairs, self.seed), MultiMNIST(others, self.pairs, self.seed)

    def _shifted(self, members: np.ndarray, y: np.ndarray, x: np.ndarray) -> Tensor:
        """Digits on 36x36 pixels, each with its upper left corner at (y, x)."""
        channels, height, width = self.digits.shape
        images = torch.zeros(len(members), *self.shape, dtype=torch.uint8)
        image = np.arange(len(members))[:, None, None, None]
        rows = y[:, None, None, None] + np.arange(height)[:, None]
        columns = x[:, None, None, None] + np.arange(width)
        images[image, np.arange(channels)[:, None, None], rows, columns] = self.digits.images[members]
        return images


def _random(seed: int, index: np.ndarray, draw: int) -> np.ndarray:
    """Random numbers in [0, 1] that depend only on the seed, the index and the draw (splitmix64)."""
    with np.errstate(over="ignore"):
        z = index * np.uint64(8) + np.uint64(draw) + np.uint64(seed) * np.uint64(0xD1342543DE82EF95)
        z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).astype(np.float64) / 2.0**64


def load_multimnist(split: str, folder: Path, pairs: int = 10) -> MultiMNIST:
    """600,000 images for training and 100,000 for testing, from the files of MNIST. The paper uses 100 times more."""
    return MultiMNIST(load_mnist(split, folder), pairs, seed=0 if split == "train" else 1)
