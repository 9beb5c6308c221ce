"""Second derivatives: what every backward operator computes, by the reference, which autograd differentiates again."""

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
from tritoncaps.kernels.common.operators import reference_of
from tritoncaps.kernels.dynamic.operators import dynamic_routing_backward, squash_backward
from tritoncaps.kernels.mixture.function import mixture_backward
from tritoncaps.kernels.mixture.operators import em_routing_backward
from tritoncaps.kernels.mixture.stored_operators import e_step_backward, m_step_backward, pose_votes_backward
from tritoncaps.routing import DynamicRouting, EMRouting
from tritoncaps.routing_map import RoutingMap


@dataclass(frozen=True)
class _EMRouting(EMRouting):
    """With the inverse temperatures that an operator was given."""

    given_lambdas: tuple[float, ...] = ()

    @property
    def lambdas(self) -> tuple[float, ...]:
        return self.given_lambdas


@reference_of(em_routing_backward)
def _(
    grad_poses: Tensor,
    grad_activations: Tensor,
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    tables: Sequence[Tensor],
    statistics: Tensor,
    log_sums: Tensor,
    lambdas: Sequence[float],
    variance_floor: float,
    mean_data: float,
    competition: str,
    gradient: str,
    *unused: Any,
) -> tuple[Tensor, ...]:
    """What the backward operator computes, by the reference."""
    children, weight_of, offset, *_ = tables
    routing_map = RoutingMap.from_tables(children, weight_of, offset, activations.shape[2:], children.shape[:1])
    options: Any = {"competition": competition, "gradient": gradient, "variance_floor": variance_floor}
    routing = _EMRouting(len(lambdas), **options, mean_data=mean_data != 1.0, given_lambdas=tuple(lambdas))

    def route(
        poses: Tensor, activations: Tensor, weight: Tensor, beta_u: Tensor, beta_a: Tensor
    ) -> tuple[Tensor, Tensor]:
        capsules = reference.em_routing(poses, activations, weight, beta_u, beta_a, routing_map, routing)
        return rearrange(capsules.poses, "n c p i j -> n p (i j) c"), rearrange(capsules.activations, "n c p -> n p c")

    pull_back = torch.func.vjp(route, poses, activations, weight, beta_u, beta_a)[1]
    return pull_back((grad_poses, grad_activations))


@reference_of(mixture_backward)
def _(
    grad_mean: Tensor,
    grad_logit: Tensor,
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Sequence[Tensor],
    moments: Sequence[Tensor],
    log_sums: Sequence[Tensor],
    tables: Sequence[Tensor],
    fit: Fit,
    *unused: Any,
) -> tuple[Tensor, ...]:
    children, weight_of, offset, *_ = tables
    routing_map = RoutingMap.from_tables(children, weight_of, offset, activations.shape[2:], fit.out_size)

    def route(poses: Tensor, activations: Tensor, weight: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(fit.names, given, strict=True))
        *_, (components, _) = reference.mixture_steps(poses, activations, weight, named, routing_map, fit.routing)
        parents = (*poses.shape[:1], weight.shape[2], routing_map.num_parents)
        mean = rearrange(components.mean.reshape(*parents, 16), "n c p h -> n p h c")
        return mean.to(poses.dtype), components.logit.reshape(parents).transpose(1, 2).to(poses.dtype)

    pull_back = torch.func.vjp(route, poses, activations, weight, *parameters)[1]
    return pull_back((grad_mean, grad_logit))


@reference_of(pose_votes_backward)
def _(grad_votes: Tensor, poses: Tensor, weight: Tensor, tables: Sequence[Tensor], backend: str) -> tuple[Tensor, ...]:
    routing_map = _routing_map(tables)

    def votes(poses: Tensor, weight: Tensor) -> Tensor:
        return reference.pose_votes(poses.unflatten(3, (4, 4)), weight, routing_map).flatten(5)

    return torch.func.vjp(votes, poses, weight)[1](grad_votes)


@reference_of(m_step_backward)
def _(
    grad_mean: Tensor,
    grad_variance: Tensor,
    grad_logit: Tensor,
    votes: Tensor,
    assignments: Tensor,
    activations: Tensor,
    beta_u: Tensor,
    statistics: Tensor,
    tables: Sequence[Tensor],
    inverse_temperature: float,
    variance_floor: float,
    mean_data: float,
    backend: str,
) -> tuple[Tensor, ...]:
    """What the backward operator computes, by the reference. Nothing but the logit depends on beta_a, as a sum does."""
    routing_map = _routing_map(tables)
    options: dict[str, Any] = {"inverse_temperature": inverse_temperature, "variance_floor": variance_floor}

    def fit(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = reference.m_step(*tensors, routing_map, **options, mean_data=mean_data != 1.0)  # type: ignore[call-arg, arg-type]
        return tuple(x.transpose(1, 2) for x in found)

    pull_back = torch.func.vjp(fit, votes, assignments, activations, beta_u, torch.zeros_like(beta_u))[1]
    return pull_back((grad_mean, grad_variance, grad_logit))


@reference_of(e_step_backward)
def _(
    grad_assignments: Tensor,
    votes: Tensor,
    mean: Tensor,
    variance: Tensor,
    logit: Tensor,
    assignments: Tensor,
    tables: Sequence[Tensor],
    competition: str,
    backend: str,
) -> tuple[Tensor, ...]:
    """What the backward operator computes, by the reference."""
    routing_map = _routing_map(tables)

    def share(votes: Tensor, *gaussians: Tensor) -> Tensor:
        given = Gaussians(*(x.transpose(1, 2) for x in gaussians))
        return reference.e_step(votes, given, routing_map, competition=competition)

    return torch.func.vjp(share, votes, mean, variance, logit)[1](grad_assignments)


@reference_of(dynamic_routing_backward)
def _(
    grad: Tensor,
    poses: Tensor,
    weight: Tensor,
    priors: Tensor | None,
    sums: Tensor,
    tables: Sequence[Tensor],
    iterations: int,
    competition: str,
    none_of_the_above: bool,
    gradient: str,
    *unused: Any,
) -> tuple[Tensor, ...]:
    """What the backward operator computes, by the reference."""
    children, weight_of, offset, *_ = tables
    routing_map = RoutingMap.from_tables(children, weight_of, offset, poses.shape[2:3], children.shape[:1])
    options: Any = iterations, competition, none_of_the_above, gradient
    routing = DynamicRouting(*options)

    def route(poses: Tensor, weight: Tensor, priors: Tensor) -> Tensor:
        return reference.dynamic_routing(poses, weight, routing_map, routing, priors).transpose(1, 2)

    first = weight.new_zeros(weight.shape[:3]) if priors is None else priors
    return torch.func.vjp(route, poses, weight, first)[1](grad)


@reference_of(squash_backward)
def _(grad: Tensor, vectors: Tensor, backend: str) -> tuple[Tensor, ...]:
    return torch.func.vjp(reference.squash, vectors)[1](grad)


def _routing_map(tables: Sequence[Tensor]) -> RoutingMap:
    children, weight_of, offset, start, _ = tables
    return RoutingMap.from_tables(children, weight_of, offset, (len(start) - 1,), (len(children),))
