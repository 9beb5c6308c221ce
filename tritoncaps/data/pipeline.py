"""From bytes to what a network sees: random crops, brightness, contrast and standardisation, on tensors of any device.

The random numbers come from outside, so that an image is treated alike on one device or on many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# for each image: vertical and horizontal place of the crop, brightness, contrast, rotation, scale
RANDOM_NUMBERS = 6
CROPS = {1: 1, 5: 3, 13: 5}  # number of crops: the fields of one colour of a chessboard with that many rows


@dataclass(frozen=True)
class Jitter:
    """Random brightness and contrast of a training image; all its channels change alike.

    brightness  what is added: up to plus or minus this.
    contrast    the factor of the distance from a channel's mean: between these.
    last        False: on pixels of 0 to 1, before standardisation, which cancels brightness exactly and contrast
                nearly. True: on what the network sees, in units of its standard deviation.
    """

    brightness: float
    contrast: tuple[float, float]
    last: bool

    def __call__(self, pixels: Tensor, random: Tensor) -> Tensor:
        """``random`` [N, 2], uniform."""
        brightness, contrast = random[:, :, None, None, None].unbind(dim=1)
        pixels = pixels + (2 * brightness - 1) * self.brightness
        low, high = self.contrast
        mean = pixels.mean(dim=(2, 3), keepdim=True)
        return mean + (pixels - mean) * (low + (high - low) * contrast)


# "last" is the order of the papers, with Gritzman's (2019) figures. "first" is that of the authors' own code.
JITTERS = {
    "last": Jitter(brightness=2.0, contrast=(0.5, 1.5), last=True),
    "first": Jitter(brightness=63 / 255, contrast=(0.2, 1.8), last=False),
}


@dataclass(frozen=True)
class Pipeline:
    """How images of a data set are treated.

    crop         side of the square that is cut out: at random in training, from the middle in tests; None: all of it.
    pad          pixels around the image before it is cropped in training; with ``crop`` None, it is a shift by up to
                 ``pad``.
    edges        what those pixels are: "zero", or "repeat" for the value of the nearest pixel of the image.
    rotation     up to plus or minus this many degrees, in training.
    scaling      factor of the size, in training: between 1 - ``scaling`` and 1 + ``scaling``.
    jitter       brightness and contrast, in training; None: none.
    standardise  "crop": mean 0 and variance 1 of what the network sees; "image": of the image before it is cropped;
                 None: pixels of 0 to 1.
    per_channel  standardise each channel (each eye of a stereo pair) by itself.
    """

    crop: int | None = None
    pad: int = 0
    edges: str = "zero"
    rotation: float = 0.0
    scaling: float = 0.0
    jitter: Jitter | None = None
    standardise: str | None = None
    per_channel: bool = False

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Of the images that a network gets."""
        return (self.crop, self.crop) if self.crop else (height, width)

    def train(self, images: Tensor, random: Tensor) -> Tensor:
        """Bytes [N, C, H, W] and uniform numbers [N, 6] of the same device -> floats [N, C, *size]."""
        pixels = images.float() / 255
        if self.rotation or self.scaling:
            pixels = self._turn(pixels, random[:, 4:])
        if self.jitter is not None and not self.jitter.last:
            pixels = self.jitter(pixels, random[:, 2:4])
        pixels = self._standardise("image", pixels)
        size = self.size(*images.shape[2:])
        if self.pad:
            pixels = F.pad(pixels, (self.pad,) * 4, mode="replicate" if self.edges == "repeat" else "constant")
        places = [p - s + 1 for p, s in zip(pixels.shape[2:], size, strict=True)]
        corners = torch.stack([(random[:, i] * n).long().clamp(max=n - 1) for i, n in enumerate(places)], dim=1)
        pixels = self._standardise("crop", _cut(pixels, corners, size))
        if self.jitter is not None and self.jitter.last:
            pixels = self.jitter(pixels, random[:, 2:4])
        return pixels

    def test(self, images: Tensor, crops: int = 1) -> list[Tensor]:
        """The middle of each image; with ``crops`` 5 or 13, as many places of it, whose predictions are averaged."""
        if crops not in CROPS:
            raise ValueError(f"crops must be one of {', '.join(map(str, CROPS))}, but it is {crops}")
        pixels = self._standardise("image", images.float() / 255)
        height, width = self.size(*images.shape[2:])
        spare_y, spare_x = images.shape[2] - height, images.shape[3] - width
        rows = CROPS[crops]
        steps = [(i, j) for i in range(rows) for j in range(rows) if (i + j) % 2 == 0]
        corners = [(_place(i, rows, spare_y), _place(j, rows, spare_x)) for i, j in steps]
        return [self._standardise("crop", pixels[:, :, y : y + height, x : x + width]) for y, x in corners]

    def _standardise(self, what: str, pixels: Tensor) -> Tensor:
        return standardise(pixels, self.per_channel) if self.standardise == what else pixels

    def _turn(self, pixels: Tensor, random: Tensor) -> Tensor:
        """Rotated and scaled about the middle; what comes from outside the image is like its edge."""
        angle, scale = (2 * random - 1).unbind(dim=1)
        angle, scale = torch.deg2rad(angle * self.rotation), 1 + scale * self.scaling
        height, width = pixels.shape[2:]
        cos, sin, zero = angle.cos() / scale, angle.sin() / scale, torch.zeros_like(angle)
        # from places of the result to places of the image, both from -1 to 1
        rows = [[cos, -sin * height / width, zero], [sin * width / height, cos, zero]]
        matrix = torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)
        grid = F.affine_grid(matrix, list(pixels.shape), align_corners=False)
        return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def standardise(pixels: Tensor, per_channel: bool = False) -> Tensor:
    """Mean 0 and variance 1 of each image, over all channels or of each; what has no contrast becomes 0."""
    if not len(pixels):
        return pixels
    axes = (2, 3) if per_channel else (1, 2, 3)
    least = (pixels[0, 0] if per_channel else pixels[0]).numel() ** -0.5
    mean = pixels.mean(dim=axes, keepdim=True)
    deviation = pixels.std(dim=axes, keepdim=True, correction=0).clamp(min=least)
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
