"""The convolutional networks that the papers compare with capsule networks."""

from __future__ import annotations

from torch import Tensor, nn


class _Baseline(nn.Module):
    """Images [N, C, size, size] -> class scores [N, num_classes]."""

    def __init__(self, image_size: int, in_channels: int, *modules: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*modules)
        self.image_size, self.in_channels = image_size, in_channels

    def forward(self, images: Tensor) -> Tensor:
        expected = (self.in_channels, self.image_size, self.image_size)
        if tuple(images.shape[1:]) != expected:
            given = list(images.shape)
            raise ValueError(f"images must have shape [N, {', '.join(map(str, expected))}], but they have {given}")
        return self.layers(images)


class MNISTBaseline(_Baseline):
    """The baseline for MNIST (Sabour 2017): 35.4M parameters.

    5x5 convolutions of 256, 256 and 128 channels, then 328 and 192 units with dropout.

    Args:
        in_channels: channels of the images.
        num_classes: number of classes.
        image_size: height and width of the images.

    Shape:
        - images: [N, in_channels, image_size, image_size]
        - result: class scores [N, num_classes]

    Raises:
        ValueError: if the images have another shape.

    Example:
        >>> import torch
        >>> from tritoncaps.models.baselines import MNISTBaseline
        >>> MNISTBaseline(image_size=8)(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10, image_size: int = 28) -> None:
        super().__init__(
            image_size,
            in_channels,
            *_convolution(in_channels, 256, 5),
            *_convolution(256, 256, 5),
            *_convolution(256, 128, 5),
            nn.Flatten(),
            nn.Linear(128 * image_size**2, 328),
            nn.ReLU(),
            nn.Linear(328, 192),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(192, num_classes),
        )


class MultiMNISTBaseline(_Baseline):
    """The baseline for MultiMNIST (Sabour 2017): 24.56M parameters.

    A 9x9 convolution of 512 channels and a 5x5 convolution of 256 channels, each with pooling, then 1024 units.

    Args:
        in_channels: channels of the images.
        num_classes: number of classes.
        image_size: height and width of the images.

    Shape:
        - images: [N, in_channels, image_size, image_size]
        - result: class scores [N, num_classes]

    Raises:
        ValueError: if the images have another shape.

    Example:
        >>> import torch
        >>> from tritoncaps.models.baselines import MultiMNISTBaseline
        >>> MultiMNISTBaseline(image_size=8)(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10, image_size: int = 36) -> None:
        super().__init__(
            image_size,
            in_channels,
            *_convolution(in_channels, 512, 9),
            nn.MaxPool2d(2),
            *_convolution(512, 256, 5),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256 * (image_size // 4) ** 2, 1024),
            nn.ReLU(),
            nn.Linear(1024, num_classes),
        )


class SmallNORBBaseline(_Baseline):
    """The baseline for smallNORB (Hinton 2018): 4.2M parameters.

    5x5 convolutions of 32 and 64 channels, each with pooling, then 1024 units with dropout.

    Args:
        in_channels: channels of the images.
        num_classes: number of classes.
        image_size: height and width of the images.

    Shape:
        - images: [N, in_channels, image_size, image_size]
        - result: class scores [N, num_classes]

    Raises:
        ValueError: if the images have another shape.

    Example:
        >>> import torch
        >>> from tritoncaps.models.baselines import SmallNORBBaseline
        >>> SmallNORBBaseline()(torch.rand(2, 2, 32, 32)).shape
        torch.Size([2, 5])
    """

    def __init__(self, in_channels: int = 2, num_classes: int = 5, image_size: int = 32) -> None:
        super().__init__(
            image_size,
            in_channels,
            *_convolution(in_channels, 32, 5),
            nn.MaxPool2d(2),
            *_convolution(32, 64, 5),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (image_size // 4) ** 2, 1024),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(1024, num_classes),
        )


def _convolution(in_channels: int, out_channels: int, kernel_size: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(in_channels, out_channels, kernel_size, padding="same"), nn.ReLU()
