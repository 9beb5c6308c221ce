"""Whole models: inference, and a training step without its optimizer, beside the papers' CNN baselines."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from command import main
from harness import COMPILED, OURS, REFERENCE, Case, Rival
from torch import Tensor, nn
from torch.func import functional_call

from tritoncaps import functional
from tritoncaps.models import CapsNet, MatrixCapsNet
from tritoncaps.models.baselines import MNISTBaseline, SmallNORBBaseline

Loss = Callable[[nn.Module, dict[str, Tensor], Tensor, Tensor], Tensor]


def cases(level: str) -> list[Case]:
    timed = (OURS, REFERENCE, COMPILED) if level == "full" else (OURS, REFERENCE)
    images = {"smoke": 1, "quick": 4, "full": 32}[level]
    norb, digits = (images, 2, 32, 32), (images, 1, 28, 28)
    cnn = rival(SmallNORBBaseline(), norb)
    found = [case("MatrixCapsNet.small", lambda b: MatrixCapsNet.small(2, 5, backend=b), norb, spread, cnn, timed)]
    if level != "smoke":
        cnn = rival(MNISTBaseline(), digits)
        found.append(case("CapsNet", lambda b: CapsNet(decoder=False, backend=b), digits, margin, cnn, timed))
    if level == "full":
        few = (4, *norb[1:])
        cnn = rival(SmallNORBBaseline(), few)
        found.append(case("MatrixCapsNet", lambda b: MatrixCapsNet(2, 5, backend=b), few, spread, cnn, timed))
    return found


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
    cnn: Rival | None,
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
        rival=cnn,
        timed=timed,
        data_gradient=False,
    )


def rival(model: nn.Module, shape: tuple[int, ...]) -> Rival:
    return Rival("CNN baseline", bound(model, cross_entropy), tensors_of(model, shape), data=2)


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
