"""The definition of every operation, in einops: differentiable by autograd, on any device and in any float dtype.

Each function follows its formula and stores all votes. Every kernel is tested against this file. The functions do not
check their arguments; those of :mod:`tritoncaps.functional` do.

Letters: n image, p parent location, s slot, b child type, c parent type, h pose entry. Tensors of capsules have the
types in their second axis: [N, B, *in_size, ...] and [N, C, *out_size, ...]. Tensors of edges are [N, P, S, B, C, ...].
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
    """The votes of matrix capsules, V_ij = M_i W_ij: each child predicts the pose of each of its parents.

    Args:
        poses: the children's poses M.
        weight: transformation matrices W.
        routing_map: which child feeds which parent.

    Shape:
        - poses: [N, B, *in_size, 4, 4], weight: [K, B, C, 4, 4]
        - result: [N, P, S, B, C, 4, 4]

    Returns:
        The votes, zero in missing slots.
    """
    children = _at_edges(poses, routing_map)
    slot_weight = weight[routing_map.tables(weight.device).weight_of.long()]
    return einsum(children, slot_weight, "n p s b i k, s b c k j -> n p s b c i j")


def coordinate_addition(votes: Tensor, routing_map: RoutingMap) -> Tensor:
    """Add the offset of each slot to the right-hand column of its votes.

    Args:
        votes: the votes.
        routing_map: the map with the offsets.

    Shape:
        - votes and result: [N, P, S, B, C, 4, 4]

    Returns:
        New votes.
    """
    column = routing_map.tables(votes.device).offset.to(votes.dtype)  # [S, 4]
    offset = F.pad(column[..., None], (3, 0))  # [S, 4, 4]
    return votes + rearrange(offset, "s i j -> s 1 1 i j")


def initial_assignments(activations: Tensor, num_types: int, routing_map: RoutingMap, competition: str) -> Tensor:
    """The assignments before the first M-step: R_ij = 1 / (number of parents that compete for i).

    Args:
        activations: the children's activations; only their shape, dtype and device are used.
        num_types: parent types C.
        routing_map: which child feeds which parent.
        competition: "global", "local" or "positions".

    Shape:
        - activations: [N, B, *in_size]
        - result: [N, P, S, B, C]

    Returns:
        The assignments R, zero in missing slots.
    """
    degree = routing_map.tables(activations.device).parents_start.diff().to(activations.dtype)  # [L]
    competitors = {"global": degree * num_types, "local": torch.full_like(degree, num_types), "positions": degree}
    shape = activations.shape[:2] + routing_map.in_size
    share = _at_edges((1 / competitors[competition]).reshape(routing_map.in_size).expand(shape), routing_map)
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
    competition: str = "global",
) -> Gaussians:
    """M-step of EM routing: fit a Gaussian to the votes for each parent, and compute the parent's activation logit.

    With r_ij = R_ij a_i:

        S_j = sum_i r_ij
        mean_jh = sum_i r_ij V_ijh / S_j
        variance_jh = max(sum_i r_ij (V_ijh - mean_jh)^2 / S_j, variance_floor)
        cost_j = sum_h (beta_u_j + 1/2 log variance_jh) S_j / mean_data
        logit_j = inverse_temperature (beta_a_j - cost_j)

    Args:
        votes: the votes V.
        assignments: the assignments R.
        activations: the children's activations a; negative ones count as zero.
        beta_u: cost of describing a vote, for each parent type.
        beta_a: cost of not activating a parent, for each parent type.
        routing_map: which child feeds which parent.
        inverse_temperature: lambda, the factor of the logits.
        variance_floor: smaller variances are replaced by this number.
        mean_data: divide the support by :func:`mean_data_of`; False: by 1.
        competition: "global", "local" or "positions"; only for ``mean_data``.

    Shape:
        - votes: [N, P, S, B, C, *pose], assignments: [N, P, S, B, C], activations: [N, B, *in_size], betas: [C]
        - result: mean and variance [N, C, *out_size, *pose], logits [N, C, *out_size]

    Returns:
        The parents' Gaussians.
    """
    scale = mean_data_of(routing_map, activations.shape[1], votes.shape[4], competition, mean_data)
    found = moments(votes, assignments, activations, routing_map)
    return _fit(found, beta_u, beta_a, inverse_temperature, variance_floor, scale)


def _fit(
    moments: tuple[Tensor, Tensor, Tensor],
    beta_u: Tensor,
    beta_a: Tensor,
    inverse_temperature: float,
    variance_floor: float,
    mean_data: float,
) -> Gaussians:
    """The Gaussians and logits of an M-step, from support, mean and variance."""
    support, mean, variance = moments
    variance = variance.clamp(min=variance_floor)
    over_pose = tuple(range(support.ndim, mean.ndim))
    beta_u, beta_a = (x.reshape(-1, *[1] * (support.ndim - 2)) for x in (beta_u, beta_a))
    cost_of_datum = (beta_u[(...,) + (None,) * len(over_pose)] + 0.5 * variance.log()).sum(over_pose)
    logits = inverse_temperature * (beta_a - cost_of_datum * support / mean_data)
    return Gaussians(mean, variance.clone(), logits)  # a copy: backward needs the original unchanged


def moments(
    votes: Tensor, assignments: Tensor, activations: Tensor, routing_map: RoutingMap
) -> tuple[Tensor, Tensor, Tensor]:
    """Support, mean and variance of the votes for each parent, with r_ij = R_ij a_i:

        S_j = sum_i r_ij
        mean_jh = sum_i r_ij V_ijh / S_j
        variance_jh = sum_i r_ij (V_ijh - mean_jh)^2 / S_j

    Args:
        votes: the votes V.
        assignments: the assignments R.
        activations: the children's activations a; negative ones count as zero.
        routing_map: which child feeds which parent.

    Shape:
        - votes: [N, P, S, B, C, *pose], assignments: [N, P, S, B, C], activations: [N, B, *in_size]
        - support: [N, C, *out_size], mean and variance: [N, C, *out_size, *pose]

    Returns:
        Support, mean and variance.
    """
    pose, activations = votes.shape[5:], _not_negative(activations)
    votes = _ignore_missing(votes, routing_map).flatten(5)
    r = _ignore_missing(assignments * _at_edges(activations, routing_map)[..., None], routing_map)
    support = reduce(r, "n p s b c -> n p c", "sum")
    alone = support <= least_support(support.dtype)  # false for nan, so that nan stays visible
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
    """E-step of EM routing: compute the assignments from the likelihoods of the votes.

        l_ij = log a_j - 1/2 sum_h [(V_ijh - mean_jh)^2 / variance_jh + log(2 pi variance_jh)]
        R_ij = exp(l_ij) / sum over the parents j' that compete for i of exp(l_ij')

    Args:
        votes: the votes V.
        gaussians: the parents' Gaussians.
        routing_map: which child feeds which parent.
        competition: "global", "local" or "positions".

    Shape:
        - votes: [N, P, S, B, C, *pose]; mean and variance: [N, C, *out_size, *pose]; logits: [N, C, *out_size]
        - result: [N, P, S, B, C]

    Returns:
        The assignments R, zero in missing slots.
    """
    votes = _ignore_missing(votes, routing_map).flatten(5)
    mean, variance = (_from_capsules(x, routing_map).flatten(3) for x in (gaussians.mean, gaussians.variance))
    logits = _from_capsules(gaussians.logits, routing_map)
    deviation = votes - rearrange(mean, "n p c h -> n p 1 1 c h")
    distance = einsum(deviation**2, 1 / variance, "n p s b c h, n p c h -> n p s b c")
    constant = F.logsigmoid(logits) - 0.5 * reduce((2 * math.pi * variance).log(), "n p c h -> n p c", "sum")
    log_likelihood = rearrange(constant, "n p c -> n p 1 1 c") - 0.5 * distance
    return assignments_from_logits(log_likelihood, routing_map, competition=competition)


def assignments_from_logits(
    logits: Tensor, routing_map: RoutingMap, *, competition: str = "global", rival: float = -math.inf
) -> Tensor:
    """Softmax of the logits over the parents that compete for each child.

    Args:
        logits: one logit for each vote.
        routing_map: which child feeds which parent.
        competition: "global", "local" or "positions".
        rival: logit of one more parent, whose share is not returned; default: there is none.

    Shape:
        - logits and result: [N, P, S, B, C]

    Returns:
        The assignments, zero in missing slots.
    """
    if competition == "local":
        log_sum = logits.logsumexp(dim=-1, keepdim=True)
        log_sum = log_sum.masked_fill(log_sum.isneginf(), 0)
    else:
        rivals = "n b l 1 (d c)" if competition == "global" else "n b l c d"
        of_child = _pairs_of_children(logits, routing_map)  # [N, L, pairs, B, C], -inf where there is no pair
        log_sum = rearrange(of_child, f"n l d b c -> {rivals}").logsumexp(dim=-1)
        log_sum = log_sum.reshape(log_sum.shape[:2] + routing_map.in_size + log_sum.shape[3:])
        log_sum = _at_edges(log_sum.masked_fill(log_sum.isneginf(), 0), routing_map)
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
    """EM routing: the means and activations of the parents after the last M-step.

    Args:
        poses: the children's poses.
        activations: the children's activations.
        weight: transformation matrices.
        beta_u: cost of describing a vote, for each parent type.
        beta_a: cost of not activating a parent, for each parent type.
        routing_map: which child feeds which parent.
        routing: the options.

    Shape:
        - poses: [N, B, *in_size, 4, 4], activations: [N, B, *in_size], weight: [K, B, C, 4, 4], betas: [C]
        - result: poses [N, C, *out_size, 4, 4], activations [N, C, *out_size]

    Returns:
        The parents.
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

    Args:
        poses: the children's poses.
        activations: the children's activations.
        weight: transformation matrices.
        parameters: the parameters of the routing, by name.
        routing_map: which child feeds which parent.
        routing: the routing.

    Shape:
        - poses: [N, B, *in_size, 4, 4], activations: [N, B, *in_size], weight: [K, B, C, 4, 4]
        - result: poses [N, C, *out_size, 4, 4], activations [N, C, *out_size]

    Returns:
        The parents.
    """
    mean, logit = mixture_logits(poses, activations, weight, parameters, routing_map, routing)
    return Capsules(mean, torch.sigmoid(logit).clone())  # a copy: backward needs the original unchanged


def mixture_logits(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    routing_map: RoutingMap,
    routing: MixtureRouting,
) -> Capsules:
    """Any mixture routing: the means and activation logits of the parents after the last fit.

    Args:
        poses: the children's poses.
        activations: the children's activations.
        weight: transformation matrices.
        parameters: the parameters of the routing, by name.
        routing_map: which child feeds which parent.
        routing: the routing.

    Shape:
        - poses: [N, B, *in_size, 4, 4], activations: [N, B, *in_size], weight: [K, B, C, 4, 4]
        - result: poses [N, C, *out_size, 4, 4], logits [N, C, *out_size]

    Returns:
        A pair of poses and logits.
    """
    *_, (components, _) = mixture_steps(poses, activations, weight, parameters, routing_map, routing)
    # copies: backward may need these tensors unchanged
    return Capsules(*(x.to(poses.dtype, copy=True) for x in (components.mean, components.logit)))


def mixture_steps(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    routing_map: RoutingMap,
    routing: MixtureRouting,
) -> Iterator[tuple[Components, Tensor]]:
    """The iterations of a mixture routing.

    At first, R_ij = 1 / (number of parents that compete for i). Then R is the softmax of l over these parents:

        l_ij = log_weight_j - 1/2 sum_h precision_jh (V_ijh - mean_jh)^2

    Args:
        poses: the children's poses.
        activations: the children's activations.
        weight: transformation matrices.
        parameters: the parameters of the routing, by name.
        routing_map: which child feeds which parent.
        routing: the routing.

    Shape:
        - poses: [N, B, *in_size, 4, 4], activations: [N, B, *in_size], weight: [K, B, C, 4, 4]
        - assignments: [N, P, S, B, C]

    Returns:
        An iterator over pairs: the components of an iteration, and the assignments with which they were fitted.
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
        data_per_parent = mean_data_of(routing_map, in_caps, out_caps, routing.competition)
        given = Moments(*found, data_per_parent)
        components = routing.fit(given, parameters, iteration)
        check_components(routing, components, given)
        yield components, fixed
        if iteration + 1 < routing.iterations:
            logits = log_likelihood(votes, components, routing_map)
            shares = assignments_from_logits(logits, routing_map, competition=routing.competition)


def log_likelihood(votes: Tensor, components: Components, routing_map: RoutingMap) -> Tensor:
    """The logits of the assignments: l_ij = log_weight_j - 1/2 sum_h precision_jh (V_ijh - mean_jh)^2.

    Args:
        votes: the votes V.
        components: the parents' components.
        routing_map: which child feeds which parent.

    Shape:
        - votes: [N, P, S, B, C, 4, 4]
        - result: [N, P, S, B, C]

    Returns:
        The logits l.
    """
    votes = _ignore_missing(votes, routing_map).flatten(5)
    mean, precision = (_from_capsules(x, routing_map).flatten(3) for x in (components.mean, components.precision))
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
    """The assignments that the last fit of :func:`mixture_routing` uses.

    Args:
        poses: the children's poses.
        activations: the children's activations.
        weight: transformation matrices.
        parameters: the parameters of the routing, by name.
        routing_map: which child feeds which parent.
        routing: the routing.

    Shape:
        - poses: [N, B, *in_size, 4, 4], activations: [N, B, *in_size], weight: [K, B, C, 4, 4]
        - result: [N, P, S, B, C]

    Returns:
        The assignments R, zero in missing slots.
    """
    *_, (_, shares) = mixture_steps(poses, activations, weight, parameters, routing_map, routing)
    return shares.to(poses.dtype)


def squash(vectors: Tensor, dim: int = -1) -> Tensor:
    """|x|^2 / (1 + |x|^2) x / |x|: keep the direction, shorten the length to below one.

    Args:
        vectors: vectors along the axis ``dim``.
        dim: the axis of the entries of a vector.

    Shape:
        - vectors and result: any shape

    Returns:
        The squashed vectors.
    """
    square = (vectors**2).sum(dim, keepdim=True)
    # At x = 0 the root has an infinite derivative, but squash has the derivative zero: take the root of 1 there.
    zero = square == 0
    length = square.masked_fill(zero, 1).sqrt()
    return vectors * (length / (1 + square)).masked_fill(zero, 0)


def vector_votes(poses: Tensor, weight: Tensor, routing_map: RoutingMap) -> Tensor:
    """The votes of vector capsules, u_hat_ij = W_ij^T u_i.

    Args:
        poses: the children's vectors u.
        weight: transformation matrices W.
        routing_map: which child feeds which parent.

    Shape:
        - poses: [N, B, *in_size, D], weight: [K, B, C, D, E]
        - result: [N, P, S, B, C, E]

    Returns:
        The votes, zero in missing slots.
    """
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
    """Dynamic routing: the squashed sum of the votes, each weighted by its coupling coefficient.

        c = softmax of b over the parents of a child
        v_j = squash(sum_i c_ij u_hat_ij)
        b_ij += u_hat_ij . v_j

    Args:
        poses: the children's vectors u.
        weight: transformation matrices W.
        routing_map: which child feeds which parent.
        routing: the options.
        priors: the initial b; default: zero.

    Shape:
        - poses: [N, B, *in_size, D], weight: [K, B, C, D, E], priors: [K, B, C]
        - result: [N, C, *out_size, E]

    Returns:
        The parents' vectors v.
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
    """The iterations of :func:`dynamic_routing`.

    Args:
        poses: the children's vectors u.
        weight: transformation matrices W.
        routing_map: which child feeds which parent.
        routing: the options.
        priors: the initial b; default: zero.

    Shape:
        - poses: [N, B, *in_size, D], weight: [K, B, C, D, E], priors: [K, B, C]
        - parents: [N, P, C, E], coupling coefficients: [N, P, S, B, C]

    Returns:
        An iterator over pairs: the parents of an iteration, and the coupling coefficients of their votes.
    """
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


def mean_data_of(
    routing_map: RoutingMap, in_caps: int, out_caps: int, competition: str = "global", mean_data: bool = True
) -> float:
    """Child capsules of a layer divided by its parent capsules; if only positions compete, divided by the positions of
    parents, because then each type gets a whole child.

    Args:
        routing_map: which child feeds which parent.
        in_caps: child types.
        out_caps: parent types.
        competition: "global", "local" or "positions".
        mean_data: False: return 1.

    Returns:
        The number by which EM routing divides the support.
    """
    if not mean_data:
        return 1.0
    rivals = 1 if competition == "positions" else out_caps
    return routing_map.num_children * in_caps / (routing_map.num_parents * rivals)


def _not_negative(activations: Tensor) -> Tensor:
    """Replace negative activations by zero, without a gradient. Zeros keep their gradient, and nan stays nan."""
    return activations.masked_fill(activations < 0, 0)


def _silence(poses: Tensor, activations: Tensor) -> Tensor:
    """Replace inf and nan by zero in the poses of children with activation zero, so that they are ignored."""
    silent = rearrange(activations == 0, "... -> ... 1 1")
    return poses.masked_fill(silent & ~poses.isfinite(), 0)


def _at_edges(x: Tensor, routing_map: RoutingMap) -> Tensor:
    """The values of the child of each edge: [N, B, *in_size, ...] -> [N, P, S, B, ...], zero in missing slots."""
    x = x.flatten(2, 1 + len(routing_map.in_size)) if routing_map.in_size else x.unsqueeze(2)
    children = routing_map.tables(x.device).children.long()
    edges = rearrange(x[:, :, children.clamp(min=0)], "n b p s ... -> n p s b ...")
    return _ignore_missing(edges, routing_map)


def _ignore_missing(edges: Tensor, routing_map: RoutingMap, value: float = 0.0) -> Tensor:
    """Write ``value`` into the missing slots of [N, P, S, ...]."""
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
