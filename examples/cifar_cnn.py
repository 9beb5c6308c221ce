"""A convolutional network for 32x32 colour images, as for CIFAR-10, with a capsule head.

python examples/cifar_cnn.py
"""

import torch
import toy_data
from torch import nn
from training import accuracy, fit

from tritoncaps import ClassCaps, ConvCaps2d, EMRouting, PrimaryCaps


def block(channels, out_channels):
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out_channels), nn.ReLU()
    )


def network(num_classes):
    routing = EMRouting(iterations=2, competition="local")
    return nn.Sequential(
        block(3, 16),  # 16x16
        block(16, 32),  # 8x8
        PrimaryCaps(32, 8),
        ConvCaps2d(8, 8, kernel_size=3, stride=2, routing=routing),  # 3x3
        ClassCaps(8, num_classes, routing=routing),
    )


def main(steps=40):
    torch.manual_seed(0)
    model = network(num_classes=3)
    fit(model, *toy_data.images(1000), steps)
    found = accuracy(model, *toy_data.images(300, seed=1))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, accuracy on new images: {found:.1%}")
    return found


if __name__ == "__main__":
    main()
