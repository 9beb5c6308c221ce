"""ToyNORB with other toys, to choose settings without the test toys of ToyNORB. For example, from this folder:

    tritoncaps train --config toynorb-demo.toml --data other_toys:toys_1

``toys_N`` trains on the 25 training toys that ToyNORB has with seed N; ToyNORB itself has seed 0. The "test" images are
10,000 random ones of the 50 toys of seed 101, the same for all N.
"""

from pathlib import Path

import torch
from torch import Tensor

from tritoncaps.data import DATASETS, ImageSet, Pipeline
from tritoncaps.data.toynorb import load_toynorb

JUDGES = 101


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
        parts = [load_toynorb(part, folder, JUDGES) for part in ("train", "test")]
        random = torch.Generator().manual_seed(0)
        chosen = [torch.randperm(len(part), generator=random)[:5000] for part in parts]
        toys = ImageSet(
            _pick([part.images for part in parts], chosen), _pick([p.labels for p in parts], chosen), parts[0].classes
        )
    return toys, DATASETS["toynorb"].pipeline


def _pick(parts: list[Tensor], chosen: list[Tensor]) -> Tensor:
    return torch.cat([part[index] for part, index in zip(parts, chosen, strict=True)])
