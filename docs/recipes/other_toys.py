"""ToyNORB with other toys, to choose settings without the test toys of ToyNORB. For example, from this folder:

    tritoncaps train --config toynorb-demo.toml --data other_toys:toys_1

``toys_N`` trains on the 25 training toys that ToyNORB has with seed N; ToyNORB itself has seed 0. The "test" images are
10,000 random ones of the 50 toys of seed 101, the same for all N.
"""

from pathlib import Path

import torch

from tritoncaps.data import DATASETS, ImageSet, Pipeline
from tritoncaps.data.toynorb import load_toynorb

TEST_SEED = 101


def toys_1(split: str, folder: Path) -> tuple[ImageSet, Pipeline]:
    return _load(split, folder, 1)


def toys_2(split: str, folder: Path) -> tuple[ImageSet, Pipeline]:
    return _load(split, folder, 2)


def toys_3(split: str, folder: Path) -> tuple[ImageSet, Pipeline]:
    return _load(split, folder, 3)


def _load(split: str, folder: Path, seed: int) -> tuple[ImageSet, Pipeline]:
    if split == "train":
        toys = load_toynorb("train", folder, seed)
    else:
        random = torch.Generator().manual_seed(0)
        parts = [load_toynorb(part, folder, TEST_SEED) for part in ("train", "test")]
        parts = [part.select(torch.randperm(len(part), generator=random)[:5000]) for part in parts]
        images, labels = torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
        toys = ImageSet(images, labels, parts[0].classes)
    return toys, DATASETS["toynorb"].pipeline
