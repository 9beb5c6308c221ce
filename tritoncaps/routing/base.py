"""The protocol between layers and routings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from tritoncaps.capsules import Capsules
from tritoncaps.routing_map import RoutingMap


class LayerSizes(NamedTuple):
    """The sizes of a layer, from which a routing derives its parameters."""

    kind: str  # "conv", "class", "graph" or "full"
    weights: tuple[int, ...]  # the axes of its weight blocks: the kernel's size; () if one block serves all positions
    in_caps: int
    out_caps: int
    in_pose: tuple[int, ...]  # the shape of a child's pose, (4, 4) or (D,)
    out_pose: tuple[int, ...]  # the shape of a parent's pose


class NewParameter(NamedTuple):
    """A parameter that a layer creates: its shape, and a function that fills it in place."""

    shape: tuple[int, ...]
    init: Callable[[Tensor], object] = nn.init.zeros_


@dataclass(frozen=True)
class Routing(ABC):
    """How the votes of children become parents.

    A routing is a small immutable value, best a frozen dataclass: it holds options, never tensors. Derive yours from
    :class:`MatrixRouting` or :class:`VectorRouting`, or, if it fits a Gaussian to each parent's votes, from
    :class:`~tritoncaps.MixtureRouting`, which runs on the fused kernels.
    """

    capsules: ClassVar[str]  # "matrix" or "vector": which layers it fits

    @abstractmethod
    def new_parameters(self, layer: LayerSizes) -> dict[str, NewParameter]:
        """The parameters that a layer creates for this routing, by name.

        One is ``weight``. Its shape begins with ``layer.weights``, which `route` gets as one axis: [*layer.weights,
        in_caps, out_caps, ...] in the routings of this library.
        """

    @abstractmethod
    def route(
        self,
        capsules: Capsules,
        weight: Tensor,
        parameters: Mapping[str, Tensor],
        routing_map: RoutingMap,
        backend: str | None = None,
    ) -> Capsules:
        """The parents of ``capsules``: what a layer computes.

        Args:
            capsules: poses [N, B, *in_size, *in_pose] and activations [N, B, *in_size].
            weight: [K, B, C, ...], where slot s of the map uses block ``routing_map.weight_of[s]``.
            parameters: the layer's other parameters, by name.
            routing_map: which child feeds which parent.
            backend: the layer's ``backend``.

        Returns:
            poses [N, C, *out_size, *out_pose] and activations [N, C, *out_size].
        """


@dataclass(frozen=True)
class MatrixRouting(Routing):
    """A routing of matrix capsules, for ConvCaps1d/2d/3d, ClassCaps and GraphCaps.

    ``parameter_names`` names further parameters, [out_caps] each, that start at zero; override `new_parameters` for
    other shapes or starts.
    """

    capsules: ClassVar[str] = "matrix"
    parameter_names: ClassVar[tuple[str, ...]] = ()

    def new_parameters(self, layer: LayerSizes) -> dict[str, NewParameter]:
        weight = NewParameter((*layer.weights, layer.in_caps, layer.out_caps, 4, 4), near_identity_)
        return {"weight": weight} | {name: NewParameter((layer.out_caps,)) for name in self.parameter_names}


@dataclass(frozen=True)
class VectorRouting(Routing):
    """A routing of vector capsules, for VectorCaps and ConvVectorCaps2d."""

    capsules: ClassVar[str] = "vector"

    def new_parameters(self, layer: LayerSizes) -> dict[str, NewParameter]:
        shape = (*layer.weights, layer.in_caps, layer.out_caps, *layer.in_pose, *layer.out_pose)
        return {"weight": NewParameter(shape, lambda weight: nn.init.normal_(weight, std=0.1))}


def near_identity_(weight: Tensor) -> Tensor:
    """So that children that agree make parents that agree, from the first step on."""
    with torch.no_grad():
        nn.init.normal_(weight, std=0.2)
        return weight.add_(torch.eye(4, device=weight.device, dtype=weight.dtype))


def check_iterations(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"iterations must be a whole number of at least 1, but it is {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, but it is {value!r}")


def check_range(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low < value < high:
        raise ValueError(f"{name} must be a number above {low:g} and below {high:g}, but it is {value!r}")
