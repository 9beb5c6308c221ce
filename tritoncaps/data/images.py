"""ImageSet, a data set in memory: images as bytes, labels and, if known, factors of variation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True, repr=False)
class ImageSet(Dataset):
    """A data set in memory.

    Args:
        images: the images, as bytes.
        labels: the class of each image.
        classes: names of the classes.
        factors: factors of variation, such as azimuth: a tensor [N] for each name.

    Shape:
        - images: uint8 [N, C, H, W], labels: int64 [N]

    Example:
        >>> import torch
        >>> from tritoncaps.data import ImageSet
        >>> images = torch.zeros(6, 1, 28, 28, dtype=torch.uint8)
        >>> ImageSet(images, torch.tensor([0, 1, 0, 1, 0, 1]), classes=("cat", "dog"))
        ImageSet(6 images of 1x28x28; 2 classes)
    """

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
        """A whole batch, for a DataLoader."""
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.labels[chosen]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def select(self, chosen: Tensor) -> ImageSet:
        """Select some of the images.

        Args:
            chosen: a boolean mask, or indices.

        Shape:
            - chosen: bool [N], or int64 [M]

        Returns:
            The chosen images.
        """
        factors = {name: values[chosen] for name, values in self.factors.items()}
        return replace(self, images=self.images[chosen], labels=self.labels[chosen], factors=factors)

    def split(self, count: int, seed: int) -> tuple[ImageSet, ImageSet]:
        """Split the images at random.

        Args:
            count: number of images in the first part; all, if there are fewer.
            seed: random seed.

        Returns:
            ``count`` images, and the others.
        """
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.select(order[:count]), self.select(order[count:])

    def split_instances(self, count: int, seed: int) -> tuple[ImageSet, ImageSet]:
        """Split the objects at random, so that no object is in both parts.

        Images of the same object are similar. To measure how well a network generalises, test it on other objects.

        Args:
            count: number of objects of each class in the first part.
            seed: random seed.

        Returns:
            All images of ``count`` objects of each class, and the images of the other objects.

        Raises:
            ValueError: if the images have no factor "instance", or a class has too few objects.
        """
        if "instance" not in self.factors:
            raise ValueError("images must have the factor 'instance', but they do not have it")
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
        """The same images with only their first channel."""
        return replace(self, images=self.images[:, :1])


def degrees(factor: str, value: int) -> str:
    """A value of a factor as text. smallNORB counts steps of an angle; the text has degrees."""
    angle = {"azimuth": 10 * value, "elevation": 30 + 5 * value}.get(factor)
    return str(value) if angle is None else f"{angle}°"


def familiar_views(data: ImageSet, factor: str) -> Tensor:
    """The mask of the familiar views in the experiment with novel viewpoints (Hinton 2018): a third of all views.

    Familiar azimuths are 300 to 40 degrees (30, 32, 34, 0, 2, 4 in units of 10 degrees). Familiar elevations are the
    three lowest ones.

    Args:
        data: images with the factors azimuth and elevation.
        factor: "azimuth" or "elevation".

    Returns:
        A boolean mask [N].

    Raises:
        ValueError: if the factor is unknown, or the images do not have it.

    Example:
        >>> import torch
        >>> from tritoncaps.data import ImageSet, familiar_views
        >>> images, labels = torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
        >>> data = ImageSet(images, labels, ("toy",), {"elevation": torch.tensor([0, 2, 3])})
        >>> familiar_views(data, "elevation")
        tensor([ True,  True, False])
    """
    if factor in ("azimuth", "elevation") and factor not in data.factors:
        raise ValueError(
            f"data must have the factor {factor!r}, but its factors are {', '.join(data.factors) or 'none'}"
        )
    if factor == "azimuth":
        return torch.isin(data.factors["azimuth"], torch.tensor([30, 32, 34, 0, 2, 4]))
    if factor == "elevation":
        return data.factors["elevation"] < 3
    raise ValueError(f"factor must be 'azimuth' or 'elevation', but it is {factor!r}")
