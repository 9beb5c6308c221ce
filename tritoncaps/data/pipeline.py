"""Preprocessing of images: random crops, brightness, contrast and standardisation, on tensors of any device.

The caller passes the random numbers, so that the result does not depend on the number of devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# number of crops: rows of a square grid; the crops are every second cell of it, as the black fields of a chessboard
CROPS = {1: 1, 5: 3, 13: 5}


@dataclass(frozen=True)
class Jitter:
    """Random brightness and contrast of a training image, the same for all its channels.

    brightness  a random number between minus and plus this is added.
    contrast    smallest and largest factor of the distance from a channel's mean.
    last        False: apply it to pixels in [0, 1], before standardisation, which undoes the brightness exactly and
                the contrast nearly. True: apply it to the network's input, in units of its standard deviation.
    """

    brightness: float
    contrast: tuple[float, float]
    last: bool

    def __call__(self, pixels: Tensor, random: Tensor) -> Tensor:
        """``random``: uniform numbers [N, 2]."""
        brightness, contrast = random[:, :, None, None, None].unbind(dim=1)
        pixels = pixels + (2 * brightness - 1) * self.brightness
        low, high = self.contrast
        mean = pixels.mean(dim=(2, 3), keepdim=True)
        return mean + (pixels - mean) * (low + (high - low) * contrast)


# "last" is the order of the papers, with the numbers of Gritzman (2019). "first" is the order in the authors' code.
JITTERS = {
    "last": Jitter(brightness=2.0, contrast=(0.5, 1.5), last=True),
    "first": Jitter(brightness=63 / 255, contrast=(0.2, 1.8), last=False),
}


@dataclass(frozen=True)
class Pipeline:
    """Preprocessing of the images of a data set.

    Args:
        crop: side of a square crop: at a random position in training, from the middle in tests. None: no crop.
        pad: padding before the crop in training, in pixels. Without ``crop``, it shifts the image by up to ``pad``.
        edges: values of the padding: "zero", or "repeat" for the nearest pixel of the image.
        rotation: largest random rotation in training, in degrees.
        scaling: in training, scale by a random factor between 1 - ``scaling`` and 1 + ``scaling``.
        affine: in training, stretch, shear and rotate at random: each entry of the 2x2 matrix differs from the identity
            by up to ``affine``.
        jitter: random brightness and contrast in training; None: none.
        standardise: "crop": mean 0 and variance 1 of each crop. "image": of each image before the crop. None: pixels
            in [0, 1].
        per_channel: standardise each channel (each eye of a stereo pair) separately.

    Example:
        >>> import torch
        >>> from tritoncaps.data import Pipeline
        >>> pipeline = Pipeline(crop=24, standardise="crop")
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> pipeline.train(images, torch.rand(4, 6)).shape, pipeline.test(images)[0].shape
        (torch.Size([4, 3, 24, 24]), torch.Size([4, 3, 24, 24]))
    """

    crop: int | None = None
    pad: int = 0
    edges: str = "zero"
    rotation: float = 0.0
    scaling: float = 0.0
    affine: float = 0.0
    jitter: Jitter | None = None
    standardise: str | None = None
    per_channel: bool = False

    @property
    def random_numbers(self) -> int:
        """Number of random numbers that :meth:`train` needs for each image: two for the position of the crop, one for
        each of brightness, contrast, rotation and scale, and four for ``affine`` if it is not 0."""
        return 10 if self.affine else 6

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the preprocessed images.

        Args:
            height: height of the original images.
            width: width of the original images.

        Returns:
            Height and width.
        """
        return (self.crop, self.crop) if self.crop else (height, width)

    def train(self, images: Tensor, random: Tensor) -> Tensor:
        """Preprocess images for training.

        Args:
            images: the images, as bytes.
            random: uniform random numbers in [0, 1), on the same device.

        Shape:
            - images: uint8 [N, C, H, W], random: [N, :attr:`random_numbers`]
            - result: float32 [N, C, H', W']

        Returns:
            The input of the network.
        """
        pixels = images.float() / 255
        if self.rotation or self.scaling or self.affine:
            pixels = self._transform(pixels, random[:, 4:])
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
        """Preprocess images for a test.

        Args:
            images: the images, as bytes.
            crops: number of crops: 1 from the middle of each image, or 5 or 13 at different positions. Average the
                predictions for them.

        Shape:
            - images: uint8 [N, C, H, W]
            - each result: float32 [N, C, H', W']

        Returns:
            One input of the network for each crop.

        Raises:
            ValueError: if ``crops`` is not 1, 5 or 13.
        """
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

    def _transform(self, pixels: Tensor, random: Tensor) -> Tensor:
        """Transform about the middle. Pixels from outside of the image repeat its edge."""
        random = 2 * random - 1
        angle, scale = torch.deg2rad(random[:, 0] * self.rotation), 1 + random[:, 1] * self.scaling
        cos, sin = angle.cos() / scale, angle.sin() / scale
        # from positions in the result to positions in the image, in pixels
        matrix = torch.stack([cos, -sin, sin, cos], dim=1).view(-1, 2, 2)
        if self.affine:
            matrix = matrix @ (torch.eye(2, device=matrix.device) + self.affine * random[:, 2:].view(-1, 2, 2))
        height, width = pixels.shape[2:]
        matrix[:, 0, 1] *= height / width  # now both axes are from -1 to 1
        matrix[:, 1, 0] *= width / height
        grid = F.affine_grid(F.pad(matrix, (0, 1)), list(pixels.shape), align_corners=False)  # no translation
        return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def standardise(pixels: Tensor, per_channel: bool = False) -> Tensor:
    """Mean 0 and variance 1 of each image, over all channels or for each. Images without contrast become 0."""
    if not len(pixels):
        return pixels
    axes = (2, 3) if per_channel else (1, 2, 3)
    least = (pixels[0, 0] if per_channel else pixels[0]).numel() ** -0.5
    mean = pixels.mean(dim=axes, keepdim=True)
    deviation = pixels.std(dim=axes, keepdim=True, correction=0).clamp(min=least)
    return (pixels - mean) / deviation


def _cut(images: Tensor, corners: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut a window out of each image. ``corners`` [N, 2] are the positions of its upper left pixel."""
    y = corners[:, 0, None] + torch.arange(size[0], device=images.device)
    x = corners[:, 1, None] + torch.arange(size[1], device=images.device)
    image = torch.arange(len(images), device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return images[image, channel, y[:, None, :, None], x[:, None, None, :]]


def _place(step: int, rows: int, spare: int) -> int:
    """The start of window number ``step``, if ``rows`` windows are spread over ``spare`` pixels. A single window is in
    the middle."""
    return spare // 2 if rows == 1 else round(step * spare / (rows - 1))
