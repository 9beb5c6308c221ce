"""Second derivatives: each function computes the result of a backward operator with the reference, for autograd.

It gets the arguments of the operator by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from tritoncaps import reference
from tritoncaps._internal.fits import Fit
from tritoncaps.capsules import Gaussians
from tritoncaps.kernels.common.operators import Given, reference_of
from tritoncaps.kernels.dynamic.operators import dynamic_routing_backward, squash_backward
from tritoncaps.kernels.mixture.function import mixture_backward
from tritoncaps.kernels.mixture.operators import em_routing_backward
from tritoncaps.kernels.mixture.stored_operators import e_step_backward, m_step_backward, pose_votes_backward
from tritoncaps.routing import DynamicRouting, EMRouting
from tritoncaps.routing_map import RoutingMap


@dataclass(frozen=True)
class _EMRouting(EMRouting):
    """EM routing with the inverse temperatures from the arguments of an operator."""

    given_lambdas: tuple[float, ...] = ()

    @property
    def lambdas(self) -> tuple[float, ...]:
        return self.given_lambdas


@reference_of(em_routing_backward)
def _(given: Given) -> tuple[Tensor, ...]:
    routing_map = _routing_map(given.tables)
    options: Any = {name: getattr(given, name) for name in ("competition", "gradient", "variance_floor")}
    lambdas = tuple(given.lambdas)
    routing = _EMRouting(len(lambdas), **options, mean_data=given.mean_data != 1.0, given_lambdas=lambdas)

    def route(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        capsules = reference.em_routing(*tensors, routing_map, routing)  # type: ignore[call-arg, arg-type]
        return rearrange(capsules.poses, "n c p i j -> n p (i j) c"), rearrange(capsules.activations, "n c p -> n p c")

    tensors = (given.poses, given.activations, given.weight, given.beta_u, given.beta_a)
    return torch.func.vjp(route, *tensors)[1]((given.grad_poses, given.grad_activations))


@reference_of(mixture_backward)
def _(given: Given) -> tuple[Tensor, ...]:
    fit: Fit = given.fit
    routing_map = _routing_map(given.tables, fit.out_size)

    def route(poses: Tensor, activations: Tensor, weight: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(fit.names, parameters, strict=True))
        *_, (components, _) = reference.mixture_steps(poses, activations, weight, named, routing_map, fit.routing)
        parents = (*poses.shape[:1], weight.shape[2], routing_map.num_parents)
        mean = rearrange(components.mean.reshape(*parents, 16), "n c p h -> n p h c")
        return mean.to(poses.dtype), components.logit.reshape(parents).transpose(1, 2)

    pull_back = torch.func.vjp(route, given.poses, given.activations, given.weight, *given.parameters)[1]
    return pull_back((given.grad_mean, given.grad_logit))


@reference_of(pose_votes_backward)
def _(given: Given) -> tuple[Tensor, ...]:
    routing_map = _routing_map(given.tables)

    def votes(poses: Tensor, weight: Tensor) -> Tensor:
        return reference.pose_votes(poses.unflatten(3, (4, 4)), weight, routing_map).flatten(5)

    return torch.func.vjp(votes, given.poses, given.weight)[1](given.grad_votes)


@reference_of(m_step_backward)
def _(given: Given) -> tuple[Tensor, ...]:
    """beta_a is only a term of the logit, so the gradients do not depend on its value, and zero is used."""
    routing_map = _routing_map(given.tables)
    options = (given.inverse_temperature, given.variance_floor, given.mean_data)

    def fit(votes: Tensor, assignments: Tensor, activations: Tensor, *betas: Tensor) -> tuple[Tensor, ...]:
        moments = reference.moments(votes, assignments, activations, routing_map)
        found = reference._fit(moments, *betas, *options)  # type: ignore[call-arg, arg-type]
        return tuple(x.transpose(1, 2) for x in found)

    tensors = (given.votes, given.assignments, given.activations, given.beta_u, torch.zeros_like(given.beta_u))
    return torch.func.vjp(fit, *tensors)[1]((given.grad_mean, given.grad_variance, given.grad_logit))


@reference_of(e_step_backward)
def _(given: Given) -> tuple[Tensor, ...]:
    routing_map = _routing_map(given.tables)

    def share(votes: Tensor, *gaussians: Tensor) -> Tensor:
        of_types = Gaussians(*(x.transpose(1, 2) for x in gaussians))
        return reference.e_step(votes, of_types, routing_map, competition=given.competition)

    return torch.func.vjp(share, given.votes, given.mean, given.variance, given.logit)[1](given.grad_assignments)


@reference_of(dynamic_routing_backward)
def _(given: Given) -> tuple[Tensor, ...]:
    routing_map, weight = _routing_map(given.tables), given.weight
    routing = DynamicRouting(given.iterations, given.competition, given.none_of_the_above, given.gradient)

    def route(poses: Tensor, weight: Tensor, priors: Tensor) -> Tensor:
        return reference.dynamic_routing(poses, weight, routing_map, routing, priors).transpose(1, 2)

    priors = weight.new_zeros(weight.shape[:3]) if given.priors is None else given.priors
    return torch.func.vjp(route, given.poses, weight, priors)[1](given.grad)


@reference_of(squash_backward)
def _(given: Given) -> tuple[Tensor, ...]:
    return torch.func.vjp(reference.squash, given.vectors)[1](given.grad)


def _routing_map(tables: Sequence[Tensor], out_size: tuple[int, ...] | None = None) -> RoutingMap:
    """The map from the tables of an operator, with flat locations; ``out_size``: the shape of the parents."""
    children, weight_of, offset, start, *_ = tables
    out_size = (len(children),) if out_size is None else out_size  # class capsules have the shape ()
    return RoutingMap.from_tables(children, weight_of, offset, (len(start) - 1,), out_size)
