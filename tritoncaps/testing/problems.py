"""A routing problem: sizes, a map, options, a seed and a memory layout; its tensors are made from these."""

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
"""A routing to test: a function that takes what `functional.em_routing` takes, and returns Capsules."""
LAYOUTS = ("contiguous", "types last", "sliced", "expanded")


@cache
def inputs_of(names: tuple[str, ...]) -> Any:
    """A named tuple of a routing's tensors, in the order in which a route takes them: ``poses``, ``activations``,
    ``weight``, and the routing's parameters."""
    return namedtuple("Inputs", ("poses", "activations", "weight", *names))


Inputs = inputs_of(EMRouting.parameter_names)
"""The inputs of EM routing: poses, activations, weight, beta_u and beta_a."""


@dataclass(frozen=True)
class Problem:
    """N ``images`` of ``in_caps`` types, routed to ``out_caps`` types over ``routing_map``."""

    routing_map: RoutingMap
    routing: Any = field(default_factory=EMRouting)  # a MixtureRouting
    images: int = 2
    in_caps: int = 3
    out_caps: int = 4
    seed: int = 0
    layout: str = "contiguous"

    def but(self, **changes: Any) -> Problem:
        """The same problem, except for ``changes``."""
        return replace(self, **changes)

    def inputs(self, dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> Any:
        """The tensors: the same numbers in every dtype, rounded."""
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
        """The parents of ``inputs`` by ``route``."""
        return route(*inputs, routing_map=self.routing_map, routing=self.routing)


def route_on(backend: str | None) -> Route:
    """The route of a layer with that backend, for any routing of matrix capsules."""

    def route(
        poses: Tensor, activations: Tensor, weight: Tensor, *given: Tensor, routing_map: RoutingMap, routing: Any
    ) -> Capsules:
        parameters = dict(zip(routing.parameter_names, given, strict=True))
        return routing.route(Capsules(poses, activations), weight, parameters, routing_map, backend)

    return route


def by_reference(
    poses: Tensor, activations: Tensor, weight: Tensor, *given: Tensor, routing_map: RoutingMap, routing: Any
) -> Capsules:
    """The definition: `reference.mixture_routing`."""
    parameters = dict(zip(routing.parameter_names, given, strict=True))
    return reference.mixture_routing(poses, activations, weight, parameters, routing_map, routing)


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same shape (and, but for "expanded", the same numbers) in another order in memory."""
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
    """A copy with a nan, inf or -inf at some place, and the place."""
    generator = torch.Generator().manual_seed(seed)
    place = tuple(int(torch.randint(size, (), generator=generator)) for size in x.shape)
    broken = x.detach().clone()
    broken[place] = (float("nan"), float("inf"), -float("inf"))[seed % 3]
    return place, broken


def gradients(problem: Problem, route: Route, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Outputs and the gradients of all inputs, by name, for cotangents drawn from the problem's seed."""
    inputs = problem.inputs(dtype, requires_grad=True)
    capsules = problem.solve(route, inputs)
    generator = torch.Generator().manual_seed(problem.seed + 1)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype) for x in capsules]
    grads = torch.autograd.grad(capsules, inputs, cotangents, materialize_grads=True)
    named = {"poses": capsules.poses, "activations": capsules.activations}
    return named | {f"gradient of {name}": g for name, g in zip(inputs._fields, grads, strict=True)}
