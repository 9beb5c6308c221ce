"""What every data set is in memory: images of bytes, labels, and the factors of variation where they are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True, repr=False)
class ImageSet(Dataset):
    """``images`` uint8 [N, C, H, W], ``labels`` [N], the ``classes``' names, and ``factors`` [N] such as azimuth."""

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    factors: Mapping[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        size = "x".join(map(str, self.images.shape[1:]))
        factors = f"; {', '.join(self.factors)}" if self.factors else ""
        return f"ImageSet({len(self):,} images of {size}; {len(self.classes)} classes{factors})"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A whole batch at once, for a DataLoader."""
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.labels[chosen]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def select(self, chosen: Tensor) -> ImageSet:
        """The images of a mask [N] or of indices."""
        factors = {name: values[chosen] for name, values in self.factors.items()}
        return replace(self, images=self.images[chosen], labels=self.labels[chosen], factors=factors)

    def split(self, count: int, seed: int) -> tuple[ImageSet, ImageSet]:
        """``count`` images chosen at random, and the others."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.select(order[:count]), self.select(order[count:])

    def split_instances(self, count: int, seed: int) -> tuple[ImageSet, ImageSet]:
        """All images of ``count`` objects of each class, chosen at random, and those of the others.

        Images of the same object are alike, so only other objects show how well a network classifies.
        """
        if "instance" not in self.factors:
            raise ValueError("images must have the factor 'instance', but these have none")
        generator = torch.Generator().manual_seed(seed)
        held_out = torch.zeros(len(self), dtype=torch.bool)
        for label in range(len(self.classes)):
            of_class = self.labels == label
            instances = self.factors["instance"][of_class].unique()
            if len(instances) <= count:
                raise ValueError(
                    f"count must be below the {len(instances)} instances of {self.classes[label]}, but it is {count}"
                )
            chosen = instances[torch.randperm(len(instances), generator=generator)[:count]]
            held_out |= of_class & torch.isin(self.factors["instance"], chosen)
        return self.select(held_out), self.select(~held_out)

    def mono(self) -> ImageSet:
        """The first channel alone."""
        return replace(self, images=self.images[:, :1])


def degrees(factor: str, value: int) -> str:
    """A value of a factor as people read it: angles in degrees, where smallNORB counts steps."""
    angle = {"azimuth": 10 * value, "elevation": 30 + 5 * value}.get(factor)
    return str(value) if angle is None else f"{angle}°"


def familiar_views(data: ImageSet, factor: str) -> Tensor:
    """The mask of the third of all views that networks train on when they are tested on novel ones (Hinton 2018).

    azimuth: 300 to 40 degrees (30, 32, 34, 0, 2, 4 in units of 10 degrees). elevation: the three lowest.
    """
    if factor == "azimuth":
        return torch.isin(data.factors["azimuth"], torch.tensor([30, 32, 34, 0, 2, 4]))
    if factor == "elevation":
        return data.factors["elevation"] < 3
    raise ValueError(f"factor must be 'azimuth' or 'elevation', but it is {factor!r}")
