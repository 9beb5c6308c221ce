"""Whole models: inference, and a training step without its optimizer.

They are compared with the papers' CNN baselines, and with networks that have an nn.Conv2d instead of each routed layer,
with as many multiply-adds as the votes of the layer. For one network, the part of routing in a step is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from command import main
from harness import CNN, COMPILED, CONV, DEVICE, EFFORTS, OURS, REFERENCE, Case, Rival, Row, percentiles
from torch import Tensor, nn
from torch.func import functional_call

from tritoncaps import functional
from tritoncaps.models import CapsNet, MatrixCapsNet
from tritoncaps.models.baselines import MNISTBaseline, SmallNORBBaseline

Loss = Callable[[nn.Module, dict[str, Tensor], Tensor, Tensor], Tensor]


def cases(level: str) -> list[Case | RoutingOfStep]:
    timed = (OURS, REFERENCE, COMPILED) if level == "full" else (OURS, REFERENCE)
    images = {"smoke": 1, "quick": 2, "full": 32}[level]
    if level == "smoke":
        return [
            matrix_case("MatrixCapsNet, tiny", (4, 3, 2, 2), images, timed),
            RoutingOfStep("MatrixCapsNet, tiny", (4, 3, 2, 2), images),
        ]
    small = (64, 8, 16, 16)
    found = [matrix_case("MatrixCapsNet.small", small, images, timed), vector_case(images, timed)]
    if level == "full":
        found.append(matrix_case("MatrixCapsNet", (32, 32, 32, 32), 4, timed))
    return [*found, RoutingOfStep("MatrixCapsNet.small, 2 iterations", small, 32)]


@dataclass(frozen=True)
class RoutingOfStep:
    """The time of routing in a training step: forward and backward passes of the routed layers, by torch's profiler."""

    name: str
    channels: tuple[int, int, int, int]
    images: int
    subject: str = "models"

    def rows(self, level: str, repeats: int | None = None) -> list[Row]:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no messages when the profiler starts and stops
        torch.manual_seed(0)
        step = partial(_step, MatrixCapsNet(2, 5, self.channels, iterations=2).to(DEVICE), self.images)
        step()
        times = [routing_ms(step) for _ in range(repeats or EFFORTS[level].most)]
        p20, p50, p80 = percentiles(times)
        return [
            {
                "subject": self.subject,
                "case": self.name,
                "mode": "routing of a step",
                "provider": OURS,
                "images": self.images,
                "p20_ms": p20,
                "p50_ms": p50,
                "p80_ms": p80,
                "times_ms": times,
            }
        ]


def _step(model: nn.Module, images: int) -> None:
    model.zero_grad()
    pixels, labels = torch.randn(images, 2, 32, 32, device=DEVICE), torch.arange(images, device=DEVICE) % 5
    functional.spread_loss(model(pixels).activations, labels, 0.5).backward()


def routing_ms(step: Callable[[], None]) -> float:
    """Milliseconds of EM routing in a call of ``step``, forward and backward."""
    with torch.profiler.profile() as profiler:
        step()
    return sum(x.cpu_time_total for x in profiler.key_averages() if x.key.startswith("EMRoutingFunction")) / 1e3


def matrix_case(name: str, channels: tuple[int, int, int, int], images: int, timed: tuple[str, ...]) -> Case:
    shape, (a, b, c, d) = (images, 2, 32, 32), channels
    convolutions = nn.Sequential(
        nn.Conv2d(2, a, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(a, 8 * b, 1),
        nn.ReLU(),
        nn.Conv2d(8 * b, 8 * c, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8 * c, 8 * d, 3),
        nn.ReLU(),
        nn.Conv2d(8 * d, 8 * 5, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    rivals = (rival(CONV, convolutions, shape), rival(CNN, SmallNORBBaseline(), shape))
    return case(name, lambda backend: MatrixCapsNet(2, 5, channels, backend=backend), shape, spread, rivals, timed)


def vector_case(images: int, timed: tuple[str, ...]) -> Case:
    shape = (images, 1, 28, 28)
    convolutions = nn.Sequential(
        nn.Conv2d(1, 256, 9),
        nn.ReLU(),
        nn.Conv2d(256, 256, 9, stride=2),
        nn.ReLU(),
        nn.Conv2d(256, 160, 6),
        nn.Flatten(),
    )
    rivals = (rival(CONV, convolutions, shape), rival(CNN, MNISTBaseline(), shape))
    return case("CapsNet", lambda backend: CapsNet(decoder=False, backend=backend), shape, margin, rivals, timed)


def spread(model: nn.Module, parameters: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
    return functional.spread_loss(functional_call(model, parameters, (images,)).activations, labels, 0.5)


def margin(model: nn.Module, parameters: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
    return functional.margin_loss(functional_call(model, parameters, (images,)).activations, labels)


def cross_entropy(model: nn.Module, parameters: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, parameters, (images,)), labels)


def case(
    name: str,
    make: Callable[[str | None], nn.Module],
    shape: tuple[int, ...],
    loss: Loss,
    rivals: tuple[Rival, ...],
    timed: tuple[str, ...],
) -> Case:
    torch.manual_seed(0)
    model, by_reference = make(None), make("reference")
    return Case(
        "models",
        name,
        bound(model, loss),
        bound(by_reference, loss),
        tensors_of(model, shape),
        shape[0],
        data=2,
        rivals=rivals,
        timed=timed,
        data_gradient=False,
    )


def rival(name: str, model: nn.Module, shape: tuple[int, ...]) -> Rival:
    return Rival(name, bound(model, cross_entropy), tensors_of(model, shape), data=2)


def bound(model: nn.Module, loss: Loss) -> Callable[..., list[Tensor]]:
    names = [name for name, _ in model.named_parameters()]

    def call(images: Tensor, labels: Tensor, *given: Tensor) -> list[Tensor]:
        return [loss(model, dict(zip(names, given, strict=True)), images, labels)]

    return call


def tensors_of(model: nn.Module, shape: tuple[int, ...]) -> Callable[[], list[Tensor]]:
    """Images, labels and the parameters."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(shape, generator=generator, dtype=torch.float64)
    labels = torch.arange(shape[0]) % 5
    return lambda: [images.clone(), labels, *(x.detach().double() for x in model.parameters())]


if __name__ == "__main__":
    main({"models": cases}, __doc__)
