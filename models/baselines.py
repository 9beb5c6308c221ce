"""The convolutional networks that the papers compare capsules with."""

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
    """256, 256, 128 channels of 5x5, then 328 and 192 units with dropout: 35.4M parameters (Sabour 2017)."""

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
    """512 channels of 9x9 and 256 of 5x5, each pooled, then 1024 units: 24.56M parameters (Sabour 2017)."""

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
    """32 and 64 channels of 5x5, each pooled, then 1024 units with dropout: 4.2M parameters (Hinton 2018)."""

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
