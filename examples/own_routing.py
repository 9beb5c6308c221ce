"""Your own routing on the fused kernels: EM with a prior on the variances, in a few lines of torch.

`fit` gets the moments of the votes for each parent and returns its Gaussian. No vote is stored. docs/your-routing.md
shows a routing that is not based on EM.

python examples/own_routing.py
"""

from dataclasses import dataclass

import torch
import toy_data
from torch import nn
from training import accuracy, fit

from tritoncaps import ClassCaps, ConvCaps2d, EMRouting, PrimaryCaps, use_backend


@dataclass(frozen=True)
class PriorRouting(EMRouting):
    """EM with a prior of ``strength`` votes of variance one, so that no variance becomes small by chance."""

    strength: float = 0.1

    def fit(self, moments, parameters, iteration):
        votes = moments.support[..., None, None]  # [N, C, *out_size, 1, 1]
        variance = (votes * moments.variance + self.strength) / (votes + self.strength)
        return super().fit(moments._replace(variance=variance), parameters, iteration)


def main(steps=50):
    torch.manual_seed(0)
    routing = PriorRouting(iterations=2, competition="local")
    model = nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=5, stride=4),
        nn.ReLU(),
        PrimaryCaps(16, 8),
        ConvCaps2d(8, 8, kernel_size=3, stride=2, routing=routing),
        ClassCaps(8, 3, routing=routing),
    )
    fit(model, *toy_data.images(1000), steps)
    images, labels = toy_data.images(300, seed=1)
    found = accuracy(model, images, labels)
    print(f"accuracy on new images: {found:.1%}")
    with torch.no_grad(), use_backend("reference"):  # the same fit on stored votes, for comparison
        expected = model(images[:4])
    with torch.no_grad():
        difference = (model(images[:4]).poses - expected.poses).abs().max().item()
    print(f"largest difference between kernels and reference: {difference:.1e}")
    return found, difference


if __name__ == "__main__":
    main()
