"""The definition: every operation in einops, differentiable by autograd, on any device and any float dtype.

Each function reads like its formula and stores all votes; every kernel is tested against this file.

Letters: n image, p parent location, s slot, b child type, c parent type, h pose entry. Tensors of capsules are
channel-second, [N, B, *in_size, ...] and [N, C, *out_size, ...]; tensors of edges are [N, P, S, B, C, ...].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, reduce, repeat
from torch import Tensor

from tritoncaps._internal.fits import check_components
from tritoncaps.capsules import Capsules, Gaussians
from tritoncaps.kernels.common.numerics import least_support, widen
from tritoncaps.routing import Components, DynamicRouting, EMRouting, MixtureRouting, Moments
from tritoncaps.routing_map import RoutingMap


def pose_votes(poses: Tensor, weight: Tensor, routing_map: RoutingMap) -> Tensor:
    """V_ij = M_i W_ij: what every child believes each of its parents' poses to be.

    poses [N, B, *in_size, 4, 4], weight [K, B, C, 4, 4] -> votes [N, P, S, B, C, 4, 4], zero in missing slots.
    """
    children = _at_edges(poses, routing_map)
    slot_weight = weight[routing_map.tables(weight.device).weight_of.long()]
    return einsum(children, slot_weight, "n p s b i k, s b c k j -> n p s b c i j")


def coordinate_addition(votes: Tensor, routing_map: RoutingMap) -> Tensor:
    """Add the map's offset of each slot to the right-hand column of its votes [N, P, S, B, C, 4, 4]."""
    column = routing_map.tables(votes.device).offset.to(votes.dtype)  # [S, 4]
    offset = F.pad(column[..., None], (3, 0))  # [S, 4, 4]
    return votes + rearrange(offset, "s i j -> s 1 1 i j")


def initial_assignments(activations: Tensor, num_types: int, routing_map: RoutingMap, competition: str) -> Tensor:
    """R_ij = 1 / (number of parents that compete for i): [N, P, S, B, C], zero in missing slots."""
    degree = routing_map.tables(activations.device).parents_start.diff().to(activations.dtype)  # [L]
    competitors = degree * num_types if competition == "global" else torch.full_like(degree, num_types)
    shape = activations.shape[:2] + routing_map.in_size
    share = _at_edges((1 / competitors).reshape(routing_map.in_size).expand(shape), routing_map)
    return repeat(share, "n p s b -> n p s b c", c=num_types)


def m_step(
    votes: Tensor,
    assignments: Tensor,
    activations: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    routing_map: RoutingMap,
    *,
    inverse_temperature: float,
    variance_floor: float = 1e-4,
    mean_data: bool = True,
) -> Gaussians:
    """Fit every parent's Gaussian to its votes, and activate it if that describes them cheaply.

    With r_ij = R_ij a_i:   S_j = sum_i r_ij,   mean_jh = sum_i r_ij V_ijh / S_j
                            variance_jh = max(sum_i r_ij (V_ijh - mean_jh)^2 / S_j, variance_floor)
                            cost_j = sum_h (beta_u_j + 1/2 log variance_jh) S_j / mean_data
                            logit_j = inverse_temperature (beta_a_j - cost_j)

    votes [N, P, S, B, C, *pose], assignments [N, P, S, B, C], activations [N, B, *in_size], of which those below zero
    count as zero, betas [C].
    """
    support, mean, variance = moments(votes, assignments, activations, routing_map)
    variance = variance.clamp(min=variance_floor)
    over_pose = tuple(range(support.ndim, mean.ndim))
    beta_u, beta_a = (x.reshape(-1, *[1] * (support.ndim - 2)) for x in (beta_u, beta_a))
    cost_of_datum = (beta_u[(...,) + (None,) * len(over_pose)] + 0.5 * variance.log()).sum(over_pose)
    scale = mean_data_of(routing_map, activations.shape[1], votes.shape[4], mean_data)
    logits = inverse_temperature * (beta_a - cost_of_datum * support / scale)
    return Gaussians(mean, variance.clone(), logits)  # backward needs the variance; a user may change the copy


def moments(
    votes: Tensor, assignments: Tensor, activations: Tensor, routing_map: RoutingMap
) -> tuple[Tensor, Tensor, Tensor]:
    """Support, mean and variance of every parent's votes, with r_ij = R_ij a_i.

    S_j = sum_i r_ij,   mean_jh = sum_i r_ij V_ijh / S_j,   variance_jh = sum_i r_ij (V_ijh - mean_jh)^2 / S_j

    votes [N, P, S, B, C, *pose], assignments [N, P, S, B, C], activations [N, B, *in_size],
    of which those below zero count as zero -> [N, C, *out_size] and twice [N, C, *out_size, *pose].
    """
    pose, activations = votes.shape[5:], _not_negative(activations)
    votes = _ignore_missing(votes, routing_map).flatten(5)
    r = _ignore_missing(assignments * _at_edges(activations, routing_map)[..., None], routing_map)
    support = reduce(r, "n p s b c -> n p c", "sum")
    alone = support <= least_support(support.dtype)  # false for nan, which must not be hidden
    share = r / rearrange(support.masked_fill(alone, 1), "n p c -> n p 1 1 c")
    mean = einsum(share, votes, "n p s b c, n p s b c h -> n p c h")
    deviation = votes - rearrange(mean, "n p c h -> n p 1 1 c h")
    variance = einsum(share, deviation**2, "n p s b c, n p s b c h -> n p c h")
    return (
        _to_capsules(support, routing_map),
        _to_capsules(mean, routing_map, pose),
        _to_capsules(variance, routing_map, pose),
    )


def e_step(votes: Tensor, gaussians: Gaussians, routing_map: RoutingMap, *, competition: str = "global") -> Tensor:
    """Share every child among its parents, by how well their Gaussians explain its votes.

    l_ij = log a_j - 1/2 sum_h [(V_ijh - mean_jh)^2 / variance_jh + log(2 pi variance_jh)]
    R_ij = exp(l_ij) / sum over the parents j' that compete for i of exp(l_ij')

    votes [N, P, S, B, C, *pose] -> assignments [N, P, S, B, C], zero in missing slots.
    """
    votes = _ignore_missing(votes, routing_map).flatten(5)
    mean, variance = (_from_capsules(x, routing_map).flatten(3) for x in gaussians[:2])  # [N, P, C, H]
    logits = _from_capsules(gaussians.logits, routing_map)
    deviation = votes - rearrange(mean, "n p c h -> n p 1 1 c h")
    distance = einsum(deviation**2, 1 / variance, "n p s b c h, n p c h -> n p s b c")
    constant = F.logsigmoid(logits) - 0.5 * reduce((2 * math.pi * variance).log(), "n p c h -> n p c", "sum")
    log_likelihood = rearrange(constant, "n p c -> n p 1 1 c") - 0.5 * distance
    return assignments_from_logits(log_likelihood, routing_map, competition=competition)


def assignments_from_logits(
    logits: Tensor, routing_map: RoutingMap, *, competition: str = "global", rival: float = -math.inf
) -> Tensor:
    """Softmax of logits [N, P, S, B, C] over the parents that compete for each child, and a constant rival."""
    if competition == "local":
        log_sum = logits.logsumexp(dim=-1, keepdim=True)
        log_sum = log_sum.masked_fill(log_sum.isneginf(), 0)
    else:
        of_child = _pairs_of_children(logits, routing_map)  # [N, L, pairs, B, C], -inf where there is no pair
        log_sum = rearrange(of_child, "n l d b c -> n b l (d c)").logsumexp(dim=-1)
        log_sum = log_sum.reshape(log_sum.shape[:2] + routing_map.in_size)
        log_sum = _at_edges(log_sum.masked_fill(log_sum.isneginf(), 0), routing_map)[..., None]
    if rival > -math.inf:
        log_sum = torch.logaddexp(log_sum, torch.full_like(log_sum, rival))
    return _ignore_missing(logits - log_sum, routing_map, -math.inf).exp()


def em_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    routing_map: RoutingMap,
    routing: EMRouting,
) -> Capsules:
    """EM routing of matrix capsules: the means and activations of the parents after the last M-step.

    poses [N, B, *in_size, 4, 4], activations [N, B, *in_size], weight [K, B, C, 4, 4], betas [C].
    """
    betas = {"beta_u": beta_u, "beta_a": beta_a}
    return mixture_routing(poses, activations, weight, betas, routing_map, routing)


def mixture_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    routing_map: RoutingMap,
    routing: MixtureRouting,
) -> Capsules:
    """Any mixture routing: the means and activations of the parents after the last fit.

    poses [N, B, *in_size, 4, 4], activations [N, B, *in_size], weight [K, B, C, 4, 4].
    """
    mean, logit = mixture_logits(poses, activations, weight, parameters, routing_map, routing)
    return Capsules(mean, torch.sigmoid(logit).clone())  # backward needs the result; a user may change the copy


def mixture_logits(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    routing_map: RoutingMap,
    routing: MixtureRouting,
) -> Capsules:
    """The same, with the logits of the activations in their place."""
    *_, (components, _) = mixture_steps(poses, activations, weight, parameters, routing_map, routing)
    # copies: backward may need these tensors, and a user may change what is returned
    return Capsules(*(x.to(poses.dtype, copy=True) for x in (components.mean, components.logit)))


def mixture_steps(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    routing_map: RoutingMap,
    routing: MixtureRouting,
) -> Iterator[tuple[Components, Tensor]]:
    """The components of every iteration, and the assignments [N, P, S, B, C] that they were fitted with.

    R_ij = 1 / (number of parents that compete for i), then the softmax of
    l_ij = log_weight_j - 1/2 sum_h precision_jh (V_ijh - mean_jh)^2 over them
    """
    poses, activations, weight = map(widen, (poses, activations, weight))
    activations = _not_negative(activations)
    parameters = {name: widen(x) for name, x in parameters.items()}
    votes = pose_votes(_silence(poses, activations), weight, routing_map)
    votes = coordinate_addition(votes, routing_map)
    in_caps, out_caps = weight.shape[1:3]
    shares = initial_assignments(activations, out_caps, routing_map, routing.competition)
    for iteration in range(routing.iterations):
        fixed = shares.detach() if routing.gradient == "last" else shares
        found = moments(votes, fixed, activations, routing_map)
        data_per_parent = mean_data_of(routing_map, in_caps, out_caps)
        given = Moments(*found, data_per_parent)
        components = routing.fit(given, parameters, iteration)
        check_components(routing, components, given)
        yield components, fixed
        if iteration + 1 < routing.iterations:
            logits = log_likelihood(votes, components, routing_map)
            shares = assignments_from_logits(logits, routing_map, competition=routing.competition)


def log_likelihood(votes: Tensor, components: Components, routing_map: RoutingMap) -> Tensor:
    """l_ij = log_weight_j - 1/2 sum_h precision_jh (V_ijh - mean_jh)^2.

    votes [N, P, S, B, C, 4, 4] -> [N, P, S, B, C].
    """
    votes = _ignore_missing(votes, routing_map).flatten(5)
    mean, precision = (_from_capsules(x, routing_map).flatten(3) for x in components[:2])  # [N, P, C, H]
    deviation = votes - rearrange(mean, "n p c h -> n p 1 1 c h")
    distance = einsum(deviation**2, precision, "n p s b c h, n p c h -> n p s b c")
    return rearrange(_from_capsules(components.log_weight, routing_map), "n p c -> n p 1 1 c") - 0.5 * distance


def assignments(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    routing_map: RoutingMap,
    routing: MixtureRouting,
) -> Tensor:
    """The assignments [N, P, S, B, C] that the last fit of :func:`mixture_routing` uses."""
    *_, (_, shares) = mixture_steps(poses, activations, weight, parameters, routing_map, routing)
    return shares.to(poses.dtype)


def squash(vectors: Tensor, dim: int = -1) -> Tensor:
    """|x|^2 / (1 + |x|^2) x / |x|: the direction is kept, the length becomes a probability."""
    square = (vectors**2).sum(dim, keepdim=True)
    # At x = 0 the root's slope is infinite, but squash's is zero: take the root of 1 there.
    zero = square == 0
    length = square.masked_fill(zero, 1).sqrt()
    return vectors * (length / (1 + square)).masked_fill(zero, 0)


def vector_votes(poses: Tensor, weight: Tensor, routing_map: RoutingMap) -> Tensor:
    """u_hat_ij = W_ij^T u_i: poses [N, B, *in_size, D], weight [K, B, C, D, E] -> votes [N, P, S, B, C, E]."""
    children = _at_edges(poses, routing_map)
    slot_weight = weight[routing_map.tables(weight.device).weight_of.long()]
    return einsum(children, slot_weight, "n p s b d, s b c d e -> n p s b c e")


def dynamic_routing(
    poses: Tensor,
    weight: Tensor,
    routing_map: RoutingMap,
    routing: DynamicRouting,
    priors: Tensor | None = None,
) -> Tensor:
    """Routing by agreement: the squashed sum of the votes, each weighted by its coupling coefficient.

    R = softmax of b over the parents of a child;   v_j = squash(sum_i R_ij u_hat_ij);   b_ij += u_hat_ij . v_j

    poses [N, B, *in_size, D], weight [K, B, C, D, E], priors [K, B, C] (the first b; zero by default)
    -> [N, C, *out_size, E].
    """
    *_, (parents, _) = dynamic_steps(poses, weight, routing_map, routing, priors)
    return _to_capsules(parents, routing_map, parents.shape[3:]).to(poses.dtype)


def dynamic_steps(
    poses: Tensor,
    weight: Tensor,
    routing_map: RoutingMap,
    routing: DynamicRouting,
    priors: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The parents [N, P, C, E] of every iteration of :func:`dynamic_routing`, and the coupling coefficients
    [N, P, S, B, C] of their votes."""
    poses, weight = widen(poses), widen(weight)
    votes = vector_votes(poses, weight, routing_map)
    if priors is None:
        priors = weight.new_zeros(weight.shape[:3])
    b = widen(priors)[routing_map.tables(weight.device).weight_of.long()].expand(votes.shape[:-1])
    rival = 0.0 if routing.none_of_the_above else -math.inf

    for iteration in range(routing.iterations):
        coupling = assignments_from_logits(b, routing_map, competition=routing.competition, rival=rival)
        parents = squash(einsum(coupling, votes, "n p s b c, n p s b c e -> n p c e"))
        yield parents, coupling
        if iteration + 1 < routing.iterations:
            agreement = einsum(votes, parents, "n p s b c e, n p c e -> n p s b c")
            b = b + (agreement.detach() if routing.gradient == "last" else agreement)


def mean_data_of(routing_map: RoutingMap, in_caps: int, out_caps: int, mean_data: bool = True) -> float:
    """Child capsules per parent capsule: the data that a parent of the layer explains on average."""
    if not mean_data:
        return 1.0
    return routing_map.num_children * in_caps / (routing_map.num_parents * out_caps)


def _not_negative(activations: Tensor) -> Tensor:
    """Zero instead of what is below it, without a gradient there; zero itself has one, and nan stays."""
    return activations.masked_fill(activations < 0, 0)


def _silence(poses: Tensor, activations: Tensor) -> Tensor:
    """A child with activation zero is ignored, even if its pose is inf or nan."""
    silent = rearrange(activations == 0, "... -> ... 1 1")
    return poses.masked_fill(silent & ~poses.isfinite(), 0)


def _at_edges(x: Tensor, routing_map: RoutingMap) -> Tensor:
    """What the child of every edge holds: [N, B, *in_size, ...] -> [N, P, S, B, ...], zero in missing slots."""
    x = x.flatten(2, 1 + len(routing_map.in_size)) if routing_map.in_size else x.unsqueeze(2)
    children = routing_map.tables(x.device).children.long()
    edges = rearrange(x[:, :, children.clamp(min=0)], "n b p s ... -> n p s b ...")
    return _ignore_missing(edges, routing_map)


def _ignore_missing(edges: Tensor, routing_map: RoutingMap, value: float = 0.0) -> Tensor:
    """``value`` in the missing slots of [N, P, S, ...]."""
    missing = routing_map.tables(edges.device).children < 0
    return edges.masked_fill(missing.reshape(missing.shape + (1,) * (edges.ndim - 3)), value)


def _pairs_of_children(edges: Tensor, routing_map: RoutingMap) -> Tensor:
    """The edges of every child: [N, P, S, ...] -> [N, L, pairs, ...], -inf after a child's last pair."""
    tables = routing_map.tables(edges.device)
    start, degree = tables.parents_start[:-1].long(), tables.parents_start.diff().long()
    position = torch.arange(routing_map.max_degree, device=edges.device)
    index = (start[:, None] + position).clamp(max=routing_map.num_edges - 1)  # [L, pairs]
    absent = position >= degree[:, None]
    pairs = edges.flatten(1, 2)[:, tables.parents_pair.long()[index]]
    return pairs.masked_fill(absent.reshape(absent.shape + (1,) * (pairs.ndim - 3)), -math.inf)


def _to_capsules(x: Tensor, routing_map: RoutingMap, pose: tuple[int, ...] = ()) -> Tensor:
    """[N, P, C, ...] -> [N, C, *out_size, *pose]."""
    x = rearrange(x, "n p c ... -> n c p ...")
    return x.reshape(x.shape[:2] + routing_map.out_size + pose)


def _from_capsules(x: Tensor, routing_map: RoutingMap) -> Tensor:
    """[N, C, *out_size, ...] -> [N, P, C, ...]."""
    x = x.flatten(2, 1 + len(routing_map.out_size)) if routing_map.out_size else x.unsqueeze(2)
    return rearrange(x, "n c p ... -> n p c ...")
