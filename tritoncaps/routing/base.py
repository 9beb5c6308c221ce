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
    """The sizes of a layer. A routing computes the shapes of its parameters from them.

    Attributes:
        kind: "conv", "class", "graph" or "full".
        weights: the axes of the weight blocks: the size of the kernel, or () if all positions share one block.
        in_caps: number of child types.
        out_caps: number of parent types.
        in_pose: the shape of a child's pose: (4, 4), or (D,) for vectors.
        out_pose: the shape of a parent's pose.

    Example:
        >>> from tritoncaps.routing import EMRouting, LayerSizes
        >>> layer = LayerSizes("conv", (3, 3), 8, 16, (4, 4), (4, 4))
        >>> {name: new.shape for name, new in EMRouting().new_parameters(layer).items()}
        {'weight': (3, 3, 8, 16, 4, 4), 'beta_u': (16,), 'beta_a': (16,)}
    """

    kind: str
    weights: tuple[int, ...]
    in_caps: int
    out_caps: int
    in_pose: tuple[int, ...]
    out_pose: tuple[int, ...]


class NewParameter(NamedTuple):
    """A parameter that a layer creates for its routing.

    Attributes:
        shape: the shape of the parameter.
        init: a function that fills a tensor of this shape in place. Default: zeros.

    Example:
        >>> import torch
        >>> from tritoncaps.routing import NewParameter
        >>> scale = NewParameter((16,), torch.nn.init.ones_)
    """

    shape: tuple[int, ...]
    init: Callable[[Tensor], object] = nn.init.zeros_


@dataclass(frozen=True)
class Routing(ABC):
    """The algorithm that computes parents from the votes of children.

    A routing is a small immutable object, for example a frozen dataclass. It has options, but no tensors. Derive your
    own routing from :class:`MatrixRouting` or :class:`VectorRouting`. If it fits a Gaussian to the votes for each
    parent, derive it from :class:`~tritoncaps.MixtureRouting`, which uses the fused kernels.

    Example:
        >>> from tritoncaps import ClassCaps, EMRouting, Routing
        >>> isinstance(EMRouting(), Routing)
        True
        >>> ClassCaps(4, 10, routing=EMRouting(iterations=2)).routing.iterations
        2
    """

    capsules: ClassVar[str]  # "matrix" or "vector": the kind of layers that can use it

    @abstractmethod
    def new_parameters(self, layer: LayerSizes) -> dict[str, NewParameter]:
        """The parameters that a layer creates for this routing, by name.

        One of them is ``weight``. Its first axes are ``layer.weights``; `route` gets them as one axis. In the routings
        of this library, its shape is [*layer.weights, in_caps, out_caps, ...].

        Args:
            layer: the sizes of the layer.

        Returns:
            The name, shape and initial values of each parameter. The layer has a parameter of each name.
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
            capsules: the children.
            weight: the transformation matrices; slot s of the map uses block ``routing_map.weight_of[s]``.
            parameters: the other parameters of the layer, by name, with the shapes of `new_parameters`.
            routing_map: which child feeds which parent.
            backend: the ``backend`` of the layer.

        Shape:
            - capsules: poses [N, B, *in_size, *in_pose], activations [N, B, *in_size]
            - weight: [K, B, C, ...], K weight blocks
            - result: poses [N, C, *out_size, *out_pose], activations [N, C, *out_size]

        Returns:
            The parents.
        """


@dataclass(frozen=True)
class MatrixRouting(Routing):
    """A routing of matrix capsules, for ConvCaps1d/2d/3d, ClassCaps and GraphCaps.

    ``parameter_names``: names of further parameters, with shape [out_caps] and initial value zero. Override
    `new_parameters` for other shapes or initial values. The parameter ``weight`` [*layer.weights, in_caps, out_caps,
    4, 4] starts near the identity.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from tritoncaps import Capsules, ClassCaps, MatrixRouting, functional
        >>> @dataclass(frozen=True)
        ... class MeanRouting(MatrixRouting):
        ...     "The pose of a parent is the mean of its votes, and its activation a parameter."
        ...
        ...     parameter_names = ("logit",)
        ...
        ...     def route(self, capsules, weight, parameters, routing_map, backend=None):
        ...         votes = functional.pose_votes(capsules.poses, weight, routing_map, backend)  # [N, P, S, B, C, 4, 4]
        ...         poses = votes.mean((2, 3)).transpose(1, 2)  # [N, C, P, 4, 4]
        ...         poses = poses.reshape(*poses.shape[:2], *routing_map.out_size, 4, 4)
        ...         activations = parameters["logit"].sigmoid().reshape(1, -1, *[1] * (poses.ndim - 4))
        ...         return Capsules(poses, activations.expand(poses.shape[:-2]))
        >>> layer = ClassCaps(4, 10, routing=MeanRouting())
        >>> layer(Capsules(torch.randn(2, 4, 9, 4, 4), torch.rand(2, 4, 9))).poses.shape
        torch.Size([2, 10, 4, 4])
    """

    capsules: ClassVar[str] = "matrix"
    parameter_names: ClassVar[tuple[str, ...]] = ()

    def new_parameters(self, layer: LayerSizes) -> dict[str, NewParameter]:
        weight = NewParameter((*layer.weights, layer.in_caps, layer.out_caps, 4, 4), near_identity_)
        return {"weight": weight} | {name: NewParameter((layer.out_caps,)) for name in self.parameter_names}


@dataclass(frozen=True)
class VectorRouting(Routing):
    """A routing of vector capsules, for VectorCaps and ConvVectorCaps2d.

    The parameter ``weight`` [*layer.weights, in_caps, out_caps, D, E] starts with normally distributed numbers of
    standard deviation 0.1. Override `new_parameters` for other parameters.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from tritoncaps import VectorCaps, VectorRouting, functional
        >>> @dataclass(frozen=True)
        ... class MeanRouting(VectorRouting):
        ...     "A parent is the squashed mean of its votes."
        ...
        ...     def route(self, capsules, weight, parameters, routing_map, backend=None):
        ...         votes = functional.vector_votes(capsules.poses, weight, routing_map)  # [N, P, S, B, C, E]
        ...         poses = votes.mean((2, 3)).transpose(1, 2)  # [N, C, P, E]
        ...         poses = functional.squash(poses.reshape(*poses.shape[:2], *routing_map.out_size, -1))
        ...         return functional.with_lengths(poses)
        >>> layer = VectorCaps(32, 8, 10, 16, routing=MeanRouting())
        >>> layer(torch.randn(4, 32, 8)).poses.shape
        torch.Size([4, 10, 16])
    """

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
