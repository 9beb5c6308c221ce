"""1-D signals: convolutional capsules classify waves.

python examples/signals.py
"""

import torch
import toy_data
from torch import nn
from training import accuracy, fit

from tritoncaps import ClassCaps, ConvCaps1d, EMRouting, PrimaryCaps1d


def main(steps=40):
    torch.manual_seed(0)
    routing = EMRouting(iterations=2, competition="local")
    model = nn.Sequential(
        nn.Conv1d(1, 16, kernel_size=9, stride=4),
        nn.ReLU(),
        PrimaryCaps1d(16, 8, kernel_size=3, stride=2),
        ConvCaps1d(8, 8, kernel_size=5, stride=2, routing=routing),
        ClassCaps(8, 3, routing=routing),
    )
    fit(model, *toy_data.signals(1000), steps)
    found = accuracy(model, *toy_data.signals(300, seed=1))
    print(f"accuracy on new signals: {found:.1%}")
    return found


if __name__ == "__main__":
    main()
