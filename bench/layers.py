"""Whole layers, compared with convolutions that have as many multiply-adds as the votes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from command import main
from harness import COMPILED, OURS, REFERENCE, Case, Rival, convolution
from torch import Tensor, nn
from torch.func import functional_call

from tritoncaps import Capsules, ClassCaps, ConvCaps2d, VectorCaps


def cases(level: str) -> list[Case]:
    if level == "smoke":
        return [case("ConvCaps2d 3 to 5", 2, (3, 5, 5, 4, 4), lambda b: ConvCaps2d(3, 5, 3, backend=b))]
    many, few = (16, 1) if level == "quick" else (64, 8)
    timed = (OURS, REFERENCE, COMPILED) if level == "full" else (OURS, REFERENCE)
    found = [
        matrix_case("ConvCaps2d 16 to 16", few * 4, 16, 16, 6, 1, timed),
        case(
            "ClassCaps 16 to 5",
            many,
            (16, 4, 4, 4, 4),
            lambda b: ClassCaps(16, 5, backend=b),
            convolution(many, (4, 4), (8 * 16, 8 * 5)),
            timed,
        ),
        case(
            "VectorCaps 1152 to 10",
            many,
            (1152, 8),
            lambda b: VectorCaps(1152, 8, 10, 16, backend=b),
            convolution(many, (1, 1), (1152 * 8, 160)),
            timed,
        ),
    ]
    if level == "full":
        found.append(matrix_case("ConvCaps2d 8 to 16", few * 4, 8, 16, 14, 2, timed))
        found.append(matrix_case("ConvCaps2d 32 to 32", 4, 32, 32, 14, 2, timed))
    return found


def matrix_case(
    name: str, images: int, types: int, parents: int, side: int, stride: int, timed: tuple[str, ...]
) -> Case:
    rival = convolution(images, (side, side), (8 * types, 8 * parents), 3, stride)
    shape = (types, side, side, 4, 4)
    return case(name, images, shape, lambda b: ConvCaps2d(types, parents, 3, stride, backend=b), rival, timed)


def case(
    name: str,
    images: int,
    shape: tuple[int, ...],
    make: Callable[[str | None], nn.Module],
    rival: Rival | None = None,
    timed: tuple[str, ...] = (OURS, REFERENCE),
) -> Case:
    """A case. ``make`` builds the layer with a backend; ``shape`` is the shape of the poses of one image."""
    torch.manual_seed(0)
    layers = {provider: make(backend) for provider, backend in ((OURS, None), (REFERENCE, "reference"))}
    parameters = dict(layers[OURS].named_parameters())
    poses = torch.randn(images, *shape, dtype=torch.float64)
    activations = torch.rand(poses.shape[:-2] if shape[-2:] == (4, 4) else poses.shape[:-1], dtype=torch.float64)

    def apply(layer: nn.Module) -> Callable[..., list[Tensor]]:
        def call(poses: Tensor, activations: Tensor, *given: Tensor) -> list[Tensor]:
            own = dict(zip(parameters, given, strict=True))
            return list(functional_call(layer, own, (Capsules(poses, activations),)))

        return call

    return Case(
        "layers",
        name,
        apply(layers[OURS]),
        apply(layers[REFERENCE]),
        lambda: [poses.clone(), activations.clone(), *(x.detach().double() for x in parameters.values())],
        images,
        data=2,
        rivals=(rival,) if rival else (),
        timed=timed,
    )


if __name__ == "__main__":
    main({"layers": cases}, __doc__)
