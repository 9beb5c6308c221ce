"""Transfer learning: a capsule head on the features of a frozen backbone, with images of 224x224.

The backbone is a small residual network with random weights, so that the example needs no download. Replace it with
your own, such as torchvision's ``resnet50(weights=...)`` up to ``layer3``: any network that returns features
[N, channels, H, W].

python examples/transfer.py
"""

import torch
import toy_data
from torch import nn
from training import accuracy, fit

from tritoncaps import ClassCaps, ConvCaps2d, EMRouting, PrimaryCaps


class Residual(nn.Module):
    def __init__(self, channels, out_channels):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, out_channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut = nn.Conv2d(channels, out_channels, 1, stride=2, bias=False)

    def forward(self, features):
        return (self.layers(features) + self.shortcut(features)).relu()


def backbone():
    """A network with stride 16: images of 224x224 give 14x14 positions."""
    stem = nn.Sequential(nn.Conv2d(3, 16, 7, stride=4, padding=3, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(stem, Residual(16, 32), Residual(32, 64)).eval().requires_grad_(False)


@torch.no_grad()
def features_of(net, images, batch=16):
    """The features of the images. A frozen backbone computes the same features in each epoch: compute them once."""
    return torch.cat([net(part) for part in images.split(batch)])


def main(steps=60, count=160):
    torch.manual_seed(0)
    net = backbone()
    routing = EMRouting(iterations=2, competition="local")
    head = nn.Sequential(
        PrimaryCaps(64, 8), ConvCaps2d(8, 8, kernel_size=3, stride=2, routing=routing), ClassCaps(8, 3, routing=routing)
    )
    images, labels = toy_data.images(count, size=224)
    features = features_of(net, images)
    scale, shift = features.std(), features.mean()
    fit(head, (features - shift) / scale, labels, steps, batch=16)
    images, labels = toy_data.images(60, size=224, seed=1)
    found = accuracy(head, (features_of(net, images) - shift) / scale, labels)
    print(f"accuracy on new images: {found:.1%}")
    return found


if __name__ == "__main__":
    main()
