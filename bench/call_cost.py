"""The fixed cost of a call: layers so small that most of the time is spent outside of the kernels.

The result is the smallest time of many calls: the work is always the same, and disturbances only add to the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from command import main
from harness import DEVICE, OURS, Row

from tritoncaps import Capsules, ConvCaps2d
from tritoncaps.models import MatrixCapsNet

CALLS = {"smoke": 3, "quick": 500, "full": 3000}
WARM_UP = 10  # calls that are not timed


def cases(level: str) -> list[CallCost]:
    return [
        CallCost("a 2x2 layer on a 2x2 image", "forward", layer_forward),
        CallCost("a 2x2 layer on a 2x2 image", "step", layer_step),
        CallCost("MatrixCapsNet.small, 3 iterations, one image of 32x32", "forward", network_forward),
    ]


@dataclass(frozen=True)
class CallCost:
    name: str
    mode: str
    new: Callable[[], Callable[[], object]]  # returns the function to time
    subject: str = "call_cost"

    def rows(self, level: str, repeats: int | None = None) -> list[Row]:
        torch.manual_seed(0)
        call = self.new()
        for _ in range(WARM_UP):
            call()
        least = min(seconds(call) for _ in range(repeats or CALLS[level]))
        known = {"subject": self.subject, "case": self.name, "mode": self.mode, "provider": OURS, "images": 1}
        return [known | {"least_ms": least * 1e3}]


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def layer_forward() -> Callable[[], object]:
    layer, capsules = new_layer()
    return partial(torch.no_grad()(layer), capsules)


def layer_step() -> Callable[[], object]:
    layer, capsules = new_layer()

    def step() -> None:
        poses, activations = layer(capsules)
        (poses.sum() + activations.sum()).backward()

    return step


def network_forward() -> Callable[[], object]:
    network = MatrixCapsNet.small(2, 5).to(DEVICE).eval()
    return partial(torch.no_grad()(network), torch.randn(1, 2, 32, 32, device=DEVICE))


def new_layer() -> tuple[ConvCaps2d, Capsules]:
    """A layer with 2 child types, 2 parent types and a kernel of 2x2, and its input."""
    capsules = Capsules(torch.randn(1, 2, 2, 2, 4, 4), torch.rand(1, 2, 2, 2))
    return ConvCaps2d(2, 2, 2, device=DEVICE), Capsules(*(x.to(DEVICE) for x in capsules))


if __name__ == "__main__":
    main({"call_cost": cases}, __doc__)
