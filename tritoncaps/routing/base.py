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
    """The sizes of a layer. A routing computes the shapes of its parameters from them."""

    kind: str  # "conv", "class", "graph" or "full"
    weights: tuple[int, ...]  # the axes of its weight blocks: the size of the kernel; () if positions share one
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
    """The algorithm that computes parents from the votes of children.

    A routing is a small immutable object, for example a frozen dataclass. It has options, but no tensors. Derive your
    own routing from :class:`MatrixRouting` or :class:`VectorRouting`. If it fits a Gaussian to the votes for each
    parent, derive it from :class:`~tritoncaps.MixtureRouting`, which uses the fused kernels.
    """

    capsules: ClassVar[str]  # "matrix" or "vector": the kind of layers that can use it

    @abstractmethod
    def new_parameters(self, layer: LayerSizes) -> dict[str, NewParameter]:
        """The parameters that a layer creates for this routing, by name.

        One of them is ``weight``. Its first axes are ``layer.weights``; `route` gets them as one axis. In the routings
        of this library, its shape is [*layer.weights, in_caps, out_caps, ...].
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
        """Compute the parents of ``capsules``, which are the output of a layer.

        Args:
            capsules: poses [N, B, *in_size, *in_pose] and activations [N, B, *in_size].
            weight: [K, B, C, ...]; slot s of the map uses block ``routing_map.weight_of[s]``.
            parameters: the other parameters of the layer, by name.
            routing_map: which child feeds which parent.
            backend: the ``backend`` of the layer.

        Returns:
            poses [N, C, *out_size, *out_pose] and activations [N, C, *out_size].
        """


@dataclass(frozen=True)
class MatrixRouting(Routing):
    """A routing of matrix capsules, for ConvCaps1d/2d/3d, ClassCaps and GraphCaps.

    ``parameter_names``: names of further parameters, with shape [out_caps] and initial value zero. Override
    `new_parameters` for other shapes or initial values.
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
    """Initialize matrices near the identity: children with similar poses then have similar votes from the start."""
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
