"""From bytes to what a network sees: random crops, brightness, contrast and standardisation, on tensors of any device.

The random numbers come from outside, so that an image is treated alike on one device or on many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

RANDOM_NUMBERS = 4  # for each image: vertical and horizontal place of the crop, brightness, contrast
CROPS = {1: 1, 5: 3, 13: 5}  # number of crops: the fields of one colour of a chessboard with that many rows


@dataclass(frozen=True)
class Pipeline:
    """How images of a data set are treated.

    crop         side of the square that is cut out: at random in training, from the middle in tests; None: all of it.
    pad          pixels of 0 around the image before it is cropped; with ``crop`` None, it is a shift by up to ``pad``.
    brightness   what is added to the pixels, of 0 to 1: up to plus or minus this, in training.
    contrast     the factor, in training, of the distance from a channel's mean: between these.
    standardise  "crop": mean 0 and variance 1 of what the network sees; "image": of the image before it is cropped;
                 None: pixels of 0 to 1.
    """

    crop: int | None = None
    pad: int = 0
    brightness: float = 0.0
    contrast: tuple[float, float] | None = None
    standardise: str | None = None

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Of the images that a network gets."""
        return (self.crop, self.crop) if self.crop else (height, width)

    def train(self, images: Tensor, random: Tensor) -> Tensor:
        """Bytes [N, C, H, W] and uniform numbers [N, 4] of the same device -> floats [N, C, *size]."""
        pixels = images.float() / 255
        if self.brightness:
            pixels = pixels + (2 * random[:, 2, None, None, None] - 1) * self.brightness
        if self.contrast:
            low, high = self.contrast
            mean = pixels.mean(dim=(2, 3), keepdim=True)
            pixels = mean + (pixels - mean) * (low + (high - low) * random[:, 3, None, None, None])
        if self.standardise == "image":
            pixels = standardise(pixels)
        size = self.size(*images.shape[2:])
        padded = F.pad(pixels, (self.pad,) * 4)
        places = torch.tensor([p - s + 1 for p, s in zip(padded.shape[2:], size, strict=True)], device=images.device)
        corners = (random[:, :2] * places).long().minimum(places - 1)
        return self._finish(_cut(padded, corners, size))

    def test(self, images: Tensor, crops: int = 1) -> list[Tensor]:
        """The middle of each image; with ``crops`` 5 or 13, as many places of it, whose predictions are averaged."""
        if crops not in CROPS:
            raise ValueError(f"crops must be one of {', '.join(map(str, CROPS))}, but it is {crops}")
        pixels = images.float() / 255
        if self.standardise == "image":
            pixels = standardise(pixels)
        height, width = self.size(*images.shape[2:])
        spare_y, spare_x = images.shape[2] - height, images.shape[3] - width
        rows = CROPS[crops]
        steps = [(i, j) for i in range(rows) for j in range(rows) if (i + j) % 2 == 0]
        corners = [(_place(i, rows, spare_y), _place(j, rows, spare_x)) for i, j in steps]
        return [self._finish(pixels[:, :, y : y + height, x : x + width]) for y, x in corners]

    def _finish(self, pixels: Tensor) -> Tensor:
        return standardise(pixels) if self.standardise == "crop" else pixels


def standardise(pixels: Tensor) -> Tensor:
    """Mean 0 and variance 1 of each image, over all channels; an image without contrast becomes 0."""
    if not len(pixels):
        return pixels
    least = pixels[0].numel() ** -0.5
    mean = pixels.mean(dim=(1, 2, 3), keepdim=True)
    deviation = pixels.std(dim=(1, 2, 3), keepdim=True, correction=0).clamp(min=least)
    return (pixels - mean) / deviation


def _cut(images: Tensor, corners: Tensor, size: tuple[int, int]) -> Tensor:
    """From each image the window whose upper left pixel is its corner."""
    y = corners[:, 0, None] + torch.arange(size[0], device=images.device)
    x = corners[:, 1, None] + torch.arange(size[1], device=images.device)
    image = torch.arange(len(images), device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return images[image, channel, y[:, None, :, None], x[:, None, None, :]]


def _place(step: int, rows: int, spare: int) -> int:
    """Of ``rows`` windows spread over ``spare`` pixels, where number ``step`` starts; one alone is in the middle."""
    return spare // 2 if rows == 1 else round(step * spare / (rows - 1))
