"""3-D volumes, as from a scanner: classify balls, cubes and rods.

python examples/volumes.py
"""

import torch
import toy_data
from torch import nn
from training import accuracy, fit

from tritoncaps import ClassCaps, ConvCaps3d, EMRouting, PrimaryCaps3d


def main(steps=60):
    torch.manual_seed(0)
    routing = EMRouting(iterations=2, competition="local")
    model = nn.Sequential(
        nn.Conv3d(1, 8, kernel_size=4, stride=2),  # 6x6x6
        nn.ReLU(),
        PrimaryCaps3d(8, 4),
        ConvCaps3d(4, 4, kernel_size=3, stride=1, routing=routing),  # 4x4x4
        ClassCaps(4, 3, routing=routing),
    )
    fit(model, *toy_data.volumes(500), steps, batch=16)
    found = accuracy(model, *toy_data.volumes(200, seed=1))
    print(f"accuracy on new volumes: {found:.1%}")
    return found


if __name__ == "__main__":
    main()
