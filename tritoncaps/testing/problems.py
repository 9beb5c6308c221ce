"""A routing problem: sizes, a map, options, a seed and a memory layout. They determine its tensors."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tritoncaps import reference
from tritoncaps.capsules import Capsules
from tritoncaps.routing import EMRouting
from tritoncaps.routing_map import RoutingMap

Route = Callable[..., Capsules]
"""A routing to test: a function with the arguments of `functional.em_routing` that returns Capsules."""
LAYOUTS = ("contiguous", "types last", "sliced", "expanded")


@cache
def inputs_of(names: tuple[str, ...]) -> Any:
    """The class of named tuples of a routing's tensors, in the order in which a route takes them: ``poses``,
    ``activations``, ``weight``, and the parameters of the routing.

    Args:
        names: names of the parameters.

    Returns:
        The class.
    """
    return namedtuple("Inputs", ("poses", "activations", "weight", *names))


Inputs = inputs_of(EMRouting.parameter_names)
"""The inputs of EM routing: poses, activations, weight, beta_u and beta_a."""


@dataclass(frozen=True)
class Problem:
    """A problem of a mixture routing.

    Args:
        routing_map: which child feeds which parent.
        routing: a MixtureRouting.
        images: number of images.
        in_caps: child types.
        out_caps: parent types.
        seed: random seed of the tensors.
        layout: memory layout of poses and activations.

    Example:
        >>> from tritoncaps import RoutingMap, testing
        >>> problem = testing.Problem(RoutingMap.full((2, 2)))
        >>> problem.solve(testing.route_on("reference"), problem.inputs()).poses.shape
        torch.Size([2, 4, 4, 4])
    """

    routing_map: RoutingMap
    routing: Any = field(default_factory=EMRouting)
    images: int = 2
    in_caps: int = 3
    out_caps: int = 4
    seed: int = 0
    layout: str = "contiguous"

    def but(self, **changes: Any) -> Problem:
        """Copy the problem with some changes.

        Args:
            **changes: new values of fields.

        Returns:
            The changed problem.
        """
        return replace(self, **changes)

    def inputs(self, dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> Any:
        """The tensors of the problem. They are the same numbers in every dtype, up to rounding.

        Args:
            dtype: dtype of the tensors.
            requires_grad: whether the tensors need gradients.

        Returns:
            The inputs.
        """
        generator = torch.Generator().manual_seed(self.seed)
        children = (self.images, self.in_caps, *self.routing_map.in_size)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        tensors = (
            normal(*children, 4, 4),
            torch.rand(children, generator=generator, dtype=torch.float64),
            0.5 * normal(self.routing_map.num_weights, self.in_caps, self.out_caps, 4, 4),
            *(normal(self.out_caps) for _ in self.routing.parameter_names),
        )
        poses, activations, *parameters = (x.to(dtype) for x in tensors)
        laid_out = (lay_out(poses, self.layout), lay_out(activations, self.layout), *parameters)
        return inputs_of(self.routing.parameter_names)(*(x.requires_grad_(requires_grad) for x in laid_out))

    def solve(self, route: Route, inputs: Any) -> Capsules:
        """Run a route.

        Args:
            route: the routing to test.
            inputs: the tensors.

        Returns:
            The parents.
        """
        return route(*inputs, routing_map=self.routing_map, routing=self.routing)


def route_on(backend: str | None) -> Route:
    """The route of this library on a backend, for any routing of matrix capsules.

    Args:
        backend: "reference", "cpu" or "triton"; None: chosen by device.

    Returns:
        The route.
    """

    def route(
        poses: Tensor, activations: Tensor, weight: Tensor, *given: Tensor, routing_map: RoutingMap, routing: Any
    ) -> Capsules:
        parameters = dict(zip(routing.parameter_names, given, strict=True))
        return routing.route(Capsules(poses, activations), weight, parameters, routing_map, backend)

    return route


def by_reference(
    poses: Tensor, activations: Tensor, weight: Tensor, *given: Tensor, routing_map: RoutingMap, routing: Any
) -> Capsules:
    """The route of the definition, :func:`tritoncaps.reference.mixture_routing`.

    Args:
        poses: the children's poses.
        activations: the children's activations.
        weight: transformation matrices.
        *given: the parameters of the routing.
        routing_map: which child feeds which parent.
        routing: the routing.

    Shape:
        - poses: [N, B, *in_size, 4, 4], activations: [N, B, *in_size], weight: [K, B, C, 4, 4]
        - result: poses [N, C, *out_size, 4, 4], activations [N, C, *out_size]

    Returns:
        The parents.
    """
    parameters = dict(zip(routing.parameter_names, given, strict=True))
    return reference.mixture_routing(poses, activations, weight, parameters, routing_map, routing)


def lay_out(x: Tensor, layout: str) -> Tensor:
    """A tensor of the same shape with another memory layout. Except for "expanded", the numbers are the same."""
    if layout == "types last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "sliced":
        padded = x.new_full([2 * size + 1 for size in x.shape], float("nan"))
        inner = padded[tuple(slice(1, 2 * size, 2) for size in x.shape)]
        return inner.copy_(x)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    return x


def break_a_number(x: Tensor, seed: int) -> tuple[tuple[int, ...], Tensor]:
    """A random position, and a copy of ``x`` with nan, inf or -inf at this position."""
    generator = torch.Generator().manual_seed(seed)
    place = tuple(int(torch.randint(size, (), generator=generator)) for size in x.shape)
    broken = x.detach().clone()
    broken[place] = (float("nan"), float("inf"), -float("inf"))[seed % 3]
    return place, broken


def gradients(problem: Problem, route: Route, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Outputs and the gradients of all inputs, for random cotangents.

    Args:
        problem: the problem; its seed determines the cotangents.
        route: the routing to test.
        dtype: dtype of the inputs.

    Returns:
        Tensors by name.
    """
    inputs = problem.inputs(dtype, requires_grad=True)
    capsules = problem.solve(route, inputs)
    generator = torch.Generator().manual_seed(problem.seed + 1)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype) for x in capsules]
    grads = torch.autograd.grad(capsules, inputs, cotangents, materialize_grads=True)
    named = {"poses": capsules.poses, "activations": capsules.activations}
    return named | {f"gradient of {name}": g for name, g in zip(inputs._fields, grads, strict=True)}
