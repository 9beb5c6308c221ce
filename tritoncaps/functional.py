"""The operations of the layers, as functions.

Letters: N images, B child types, C parent types, P parent locations with S slots each, K weight blocks. Tensors
of capsules have the types in their second axis: [N, B, *in_size, ...] and [N, C, *out_size, ...]. Tensors of edges,
such as votes and assignments, are [N, P, S, B, C, ...].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, overload

import torch
from einops import rearrange
from torch import Tensor

from tritoncaps import reference
from tritoncaps._internal import second_derivatives  # noqa: F401, registers them
from tritoncaps._internal.checks import (
    Form,
    check_activations,
    check_alike,
    check_labels,
    check_map,
    check_number,
    check_positive,
    check_reverse_mode,
    check_routing,
    check_shape,
    check_tensor,
    check_tensors,
    form,
    once,
    under_autocast,
)
from tritoncaps._internal.fits import fit_of
from tritoncaps.capsules import Capsules, Gaussians
from tritoncaps.kernels.common import backends
from tritoncaps.kernels.dynamic import operators as dynamic_ops
from tritoncaps.kernels.dynamic.options import LONGEST_ON_TRITON
from tritoncaps.kernels.mixture import operators as ops
from tritoncaps.kernels.mixture import stored_operators as vote_ops
from tritoncaps.kernels.mixture.function import mixture_routing as fused_mixture_routing
from tritoncaps.routing import DynamicRouting, EMRouting, MatrixRouting, MixtureRouting
from tritoncaps.routing.base import check_choice
from tritoncaps.routing.mixture import COMPETITIONS
from tritoncaps.routing_map import RoutingMap

__all__ = [
    "coordinate_addition",
    "dynamic_assignments",
    "dynamic_routing",
    "e_step",
    "em_routing",
    "initial_assignments",
    "m_step",
    "margin_loss",
    "mixture_assignments",
    "mixture_logits",
    "mixture_routing",
    "pose_votes",
    "spread_loss",
    "squash",
    "vector_votes",
    "with_lengths",
]


@overload
def em_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    routing_map: RoutingMap,
    routing: EMRouting | None = None,
    backend: str | None = None,
    return_assignments: Literal[False] = False,
) -> Capsules: ...


@overload
def em_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    routing_map: RoutingMap,
    routing: EMRouting | None = None,
    backend: str | None = None,
    *,
    return_assignments: Literal[True],
) -> tuple[Capsules, Tensor]: ...


def em_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    routing_map: RoutingMap,
    routing: EMRouting | None = None,
    backend: str | None = None,
    return_assignments: bool = False,
) -> Capsules | tuple[Capsules, Tensor]:
    """EM routing: compute the parents from the children, without storing a vote (except on ``reference``).

    Under autocast it computes in float32. It ignores a child with activation zero, even if its pose is inf or nan.

    Args:
        poses: the children's poses.
        activations: the children's activations, at least zero. In an eager call on the CPU, a negative one is an error:
            it is probably a logit without its sigmoid. Elsewhere it counts as zero and has no gradient.
        weight: transformation matrices; slot s of the map uses block ``routing_map.weight_of[s]``.
        beta_u: cost of describing a vote, for each parent type.
        beta_a: cost of not activating a parent, for each parent type.
        routing_map: which child feeds which parent.
        routing: the options; default ``EMRouting()``.
        backend: "reference", "cpu" or "triton"; default: chosen by device.
        return_assignments: also return the last assignments.

    Shape:
        - poses: [N, B, *in_size, 4, 4], activations: [N, B, *in_size]
        - weight: [K, B, C, 4, 4], beta_u and beta_a: [C]
        - result: poses [N, C, *out_size, 4, 4], activations [N, C, *out_size]
        - assignments: [N, P, S, B, C], zero in missing slots

    Returns:
        The parents. With ``return_assignments``, a pair of the parents and the assignments R of the last M-step, which
            have no gradient. The reference computes R image by image.

    Raises:
        ValueError: if a shape does not fit the map, or an activation is negative.
        TypeError: if an argument is not a tensor, or dtypes differ.

    Example:
        >>> import torch
        >>> from tritoncaps import RoutingMap, functional
        >>> routing_map = RoutingMap.conv((5, 5), kernel=3)
        >>> weight = torch.randn(routing_map.num_weights, 2, 6, 4, 4)
        >>> poses, activations, beta = torch.randn(1, 2, 5, 5, 4, 4), torch.rand(1, 2, 5, 5), torch.zeros(6)
        >>> parents = functional.em_routing(poses, activations, weight, beta, beta, routing_map)
        >>> parents.poses.shape
        torch.Size([1, 6, 3, 3, 4, 4])
    """
    routing = EMRouting() if routing is None else routing
    check_routing(routing, EMRouting)
    betas = {"beta_u": beta_u, "beta_a": beta_a}
    fused = _fused_em_routing if type(routing).fit is EMRouting.fit else _fused_mixture_routing
    capsules = _routed(poses, activations, weight, betas, routing_map, routing, backend, fused)
    if not return_assignments:
        return capsules
    return capsules, mixture_assignments(poses, activations, weight, betas, routing_map, routing)


def mixture_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    routing_map: RoutingMap,
    routing: MixtureRouting,
    backend: str | None = None,
) -> Capsules:
    """Any mixture routing: compute the parents from the children, without storing a vote (except on ``reference``).

    Under autocast it computes in float32.

    Args:
        poses: the children's poses.
        activations: the children's activations, at least zero, as in :func:`em_routing`.
        weight: transformation matrices; slot s of the map uses block ``routing_map.weight_of[s]``.
        parameters: the parameters of the routing, by name.
        routing_map: which child feeds which parent.
        routing: the routing, whose ``fit`` computes the parents from the moments of their votes.
        backend: "reference", "cpu" or "triton"; default: chosen by device.

    Shape:
        - poses: [N, B, *in_size, 4, 4], activations: [N, B, *in_size], weight: [K, B, C, 4, 4]
        - result: poses [N, C, *out_size, 4, 4], activations [N, C, *out_size]

    Returns:
        The parents.

    Raises:
        ValueError: if a shape does not fit the map, a parameter is missing, or an activation is negative.
        TypeError: if an argument is not a tensor, or dtypes differ.

    Example:
        >>> import torch
        >>> from tritoncaps import RoutingMap, VBRouting, functional
        >>> parents = functional.mixture_routing(
        ...     torch.randn(1, 2, 9, 4, 4), torch.rand(1, 2, 9), torch.randn(1, 2, 5, 4, 4), {"beta_a": torch.zeros(5)},
        ...     RoutingMap.full((9,)), VBRouting(iterations=2)
        ... )
        >>> parents.activations.shape
        torch.Size([1, 5])
    """
    check_routing(routing, MixtureRouting)
    return _routed(poses, activations, weight, parameters, routing_map, routing, backend, _fused_mixture_routing)


def mixture_logits(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    routing_map: RoutingMap,
    routing: MixtureRouting,
    backend: str | None = None,
) -> Capsules:
    """Like :func:`mixture_routing`, but return logits instead of activations. Logits do not saturate in a loss.

    Args:
        poses: the children's poses.
        activations: the children's activations, at least zero, as in :func:`em_routing`.
        weight: transformation matrices; slot s of the map uses block ``routing_map.weight_of[s]``.
        parameters: the parameters of the routing, by name.
        routing_map: which child feeds which parent.
        routing: the routing, whose ``fit`` computes the parents from the moments of their votes.
        backend: "reference", "cpu" or "triton"; default: chosen by device.

    Shape:
        - poses: [N, B, *in_size, 4, 4], activations: [N, B, *in_size], weight: [K, B, C, 4, 4]
        - result: poses [N, C, *out_size, 4, 4], logits [N, C, *out_size]

    Returns:
        A pair of the parents' poses and logits; ``logits.sigmoid()`` are the activations.

    Raises:
        ValueError: if a shape does not fit the map, a parameter is missing, or an activation is negative.
        TypeError: if an argument is not a tensor, or dtypes differ.

    Example:
        >>> import torch
        >>> from tritoncaps import RoutingMap, VBRouting, functional
        >>> poses, activations, weight = torch.randn(1, 2, 9, 4, 4), torch.rand(1, 2, 9), torch.randn(1, 2, 5, 4, 4)
        >>> given = (poses, activations, weight, {"beta_a": torch.zeros(5)}, RoutingMap.full((9,)), VBRouting())
        >>> _, logits = functional.mixture_logits(*given)
        >>> torch.allclose(logits.sigmoid(), functional.mixture_routing(*given).activations)
        True
    """
    check_routing(routing, MixtureRouting)
    return _routed(poses, activations, weight, parameters, routing_map, routing, backend, _fused_mixture_logits, True)


@torch.no_grad()
def mixture_assignments(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    routing_map: RoutingMap,
    routing: MixtureRouting,
) -> Tensor:
    """The last assignments R of a mixture routing, for inspection: they have no gradient.

    The reference computes them image by image, so that it stores only the votes of one image.

    Args:
        poses: the children's poses.
        activations: the children's activations.
        weight: transformation matrices; slot s of the map uses block ``routing_map.weight_of[s]``.
        parameters: the parameters of the routing, by name.
        routing_map: which child feeds which parent.
        routing: the routing.

    Shape:
        - poses: [N, B, *in_size, 4, 4], activations: [N, B, *in_size], weight: [K, B, C, 4, 4]
        - result: [N, P, S, B, C]

    Returns:
        The assignments, zero in missing slots. They sum to one over the parents that compete for a child.

    Raises:
        TypeError: if ``routing`` is not a mixture routing, or an argument is not a tensor.
        ValueError: if a shape does not fit the map, or a parameter is missing.

    Example:
        >>> import torch
        >>> from tritoncaps import RoutingMap, VBRouting, functional
        >>> shares = functional.mixture_assignments(
        ...     torch.randn(1, 2, 9, 4, 4), torch.rand(1, 2, 9), torch.randn(1, 2, 5, 4, 4), {"beta_a": torch.zeros(5)},
        ...     RoutingMap.full((9,)), VBRouting()
        ... )
        >>> shares.shape, torch.allclose(shares.sum(-1), torch.tensor(1.0))
        (torch.Size([1, 1, 9, 2, 5]), True)
    """
    check_routing(routing, MixtureRouting)
    check_map(routing_map)
    given = {"poses": poses, "activations": activations, "weight": weight, **parameters}
    check_tensors(**given)
    _check_forms(routing_map, type(routing), routing.parameter_names, tuple(given), *map(form, given.values()))
    images = zip(poses.split(1), activations.split(1), strict=True)
    return torch.cat([reference.assignments(*image, weight, parameters, routing_map, routing) for image in images])


def _routed(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    routing_map: RoutingMap,
    routing: MixtureRouting,
    backend: str | None,
    fused: Callable[..., Capsules],
    logits: bool = False,
) -> Capsules:
    """Check the arguments, then call the reference or ``fused``, which takes the same arguments up to the backend."""
    check_map(routing_map)
    given = {"poses": poses, "activations": activations, "weight": weight, **parameters}
    check_tensors(**given)
    if under_autocast(poses):
        with torch.autocast(poses.device.type, enabled=False):
            of_routing = {name: x.float() for name, x in parameters.items()}
            tensors = poses.float(), activations.float(), weight.float()
            return _routed(*tensors, of_routing, routing_map, routing, backend, fused, logits)
    _check_forms(routing_map, type(routing), routing.parameter_names, tuple(given), *map(form, given.values()))
    check_activations(activations)
    chosen = backends.choose(backend, poses.device)
    tensors, (images, in_caps) = (poses, activations, weight), poses.shape[:2]
    if chosen == "reference":
        route = reference.mixture_logits if logits else reference.mixture_routing
        return route(*tensors, parameters, routing_map, routing)
    flat = (
        poses.reshape(images, in_caps, routing_map.num_children, 4, 4),
        activations.reshape(images, in_caps, routing_map.num_children),
        weight,
    )
    check_reverse_mode("routing", *flat, *parameters.values())
    return fused(*flat, parameters, routing_map, routing, chosen)


@once
def _check_forms(
    routing_map: RoutingMap,
    routing: type[MixtureRouting],
    needed: tuple[str, ...],
    names: tuple[str, ...],
    *forms: Form,
) -> None:
    """``names`` and ``forms`` of poses, activations, weight and parameters, of which the routing needs some."""
    given = dict(zip(names, forms, strict=True))
    check_alike(**given)
    poses, activations, weight = forms[:3]
    check_shape("poses", poses, ["N", "B", *routing_map.in_size, 4, 4])
    images, in_caps = poses.shape[:2]
    check_shape("activations", activations, [images, in_caps, *routing_map.in_size])
    check_shape("weight", weight, [routing_map.num_weights, in_caps, "C", 4, 4])
    check_names(routing, needed, names[3:])
    if routing.new_parameters in (MatrixRouting.new_parameters, EMRouting.new_parameters):
        for name in needed:
            check_shape(name, given[name], [weight.shape[2]])


def check_names(routing: type[MixtureRouting], needed: Iterable[str], parameters: Iterable[str]) -> None:
    """A routing that names its parameters gets these."""
    missing = [name for name in needed if name not in parameters]
    if missing:
        given = ", ".join(parameters) or "none"
        raise ValueError(f"parameters must hold {missing[0]!r} for {routing.__name__}, but they hold {given}")


def _fused_em_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    routing_map: RoutingMap,
    routing: EMRouting,
    backend: str,
) -> Capsules:
    in_caps, out_caps = weight.shape[1:3]
    tensors = (poses, activations, weight, parameters["beta_u"], parameters["beta_a"])
    tables = list(routing_map.tables(poses.device))
    lambdas, floor = list(routing.lambdas), routing.variance_floor
    mean_data = reference.mean_data_of(routing_map, in_caps, out_caps, routing.competition, routing.mean_data)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        mean, activation, _, _ = ops.EMRoutingFunction.apply(
            *tensors, tables, lambdas, floor, mean_data, routing.competition, routing.gradient, backend
        )
    else:
        mean, activation, _, _ = ops.em_routing_forward(
            *tensors, tables, lambdas, floor, mean_data, routing.competition, False, backend
        )
    return _parents(mean, activation, routing_map)


def _fused_mixture(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    routing_map: RoutingMap,
    routing: MixtureRouting,
    backend: str,
) -> Capsules:
    in_caps, out_caps = weight.shape[1:3]
    data_per_parent = reference.mean_data_of(routing_map, in_caps, out_caps, routing.competition)
    fit = fit_of(routing, backend, tuple(parameters), routing_map.out_size, data_per_parent)
    tables, options = list(routing_map.tables(poses.device)), (routing.iterations, routing.competition)
    given = (poses, activations, weight, list(parameters.values()), tables, *options, routing.gradient, backend)
    mean, logit = fused_mixture_routing(fit, *given)
    return _parents(mean, logit, routing_map)  # the logits in the dtype of the arithmetic


def _fused_mixture_logits(*given: Any) -> Capsules:
    mean, logit = _fused_mixture(*given)
    return Capsules(mean, logit.to(mean.dtype))


def _fused_mixture_routing(*given: Any) -> Capsules:
    mean, logit = _fused_mixture(*given)
    activations = torch.sigmoid(logit)  # rounded after the sigmoid, which would enlarge errors of a logit
    return Capsules(mean, activations.to(mean.dtype, copy=True))  # a copy: backward needs the original unchanged


def _parents(mean: Tensor, activation: Tensor, routing_map: RoutingMap) -> Capsules:
    """[N, P, 16, C] and [N, P, C] as capsules: permuted views, which keep the layout that the next kernels read."""
    images, _, _, out_caps = mean.shape
    out_poses = mean.permute(0, 3, 1, 2).reshape(images, out_caps, *routing_map.out_size, 4, 4)
    out_activations = activation.transpose(1, 2).reshape(images, out_caps, *routing_map.out_size)
    return Capsules(out_poses, out_activations)


def pose_votes(poses: Tensor, weight: Tensor, routing_map: RoutingMap, backend: str | None = None) -> Tensor:
    """The votes of matrix capsules, V_ij = M_i W_ij. :func:`em_routing` does not store them; this function does.

    Args:
        poses: the children's poses M.
        weight: transformation matrices W; slot s of the map uses block ``routing_map.weight_of[s]``.
        routing_map: which child feeds which parent.
        backend: "reference", "cpu" or "triton"; default: chosen by device.

    Shape:
        - poses: [N, B, *in_size, 4, 4], weight: [K, B, C, 4, 4]
        - result: [N, P, S, B, C, 4, 4]

    Returns:
        The votes, zero in missing slots.

    Raises:
        ValueError: if a shape does not fit the map.

    Example:
        >>> import torch
        >>> from tritoncaps import RoutingMap, functional
        >>> functional.pose_votes(torch.randn(1, 2, 9, 4, 4), torch.randn(1, 2, 5, 4, 4), RoutingMap.full((9,))).shape
        torch.Size([1, 1, 9, 2, 5, 4, 4])
    """
    check_map(routing_map)
    check_tensor("poses", poses)
    check_tensor("weight", weight)
    check_alike(poses=poses, weight=weight)
    check_shape("poses", poses, ["N", "B", *routing_map.in_size, 4, 4])
    check_shape("weight", weight, [routing_map.num_weights, poses.shape[1], "C", 4, 4])
    chosen = backends.choose(backend, poses.device)
    if chosen == "reference":
        return reference.pose_votes(poses, weight, routing_map)
    check_reverse_mode("pose_votes", poses, weight)
    children = poses.reshape(*poses.shape[:2], routing_map.num_children, 16)
    votes = vote_ops.PoseVotes.apply(children, weight, list(routing_map.tables(poses.device)), chosen)
    return votes.unflatten(5, (4, 4))


def coordinate_addition(votes: Tensor, routing_map: RoutingMap, backend: str | None = None) -> Tensor:
    """Coordinate addition: add the offset of each slot to the right-hand column of its votes.

    So votes depend on positions, although positions share the matrices.

    Args:
        votes: votes, such as those of :func:`pose_votes`.
        routing_map: the map; its ``offset`` [S, 4] is added.
        backend: "reference", "cpu" or "triton"; default: chosen by device.

    Shape:
        - votes and result: [N, P, S, B, C, 4, 4]

    Returns:
        New votes.

    Raises:
        ValueError: if the shape of the votes does not fit the map.

    Example:
        >>> import torch
        >>> from tritoncaps import RoutingMap, functional
        >>> votes = functional.coordinate_addition(torch.zeros(1, 1, 2, 1, 1, 4, 4), RoutingMap.full((2,)))
        >>> votes[0, 0, :, 0, 0, 0, 3]  # (index + 1/2) / size
        tensor([0.2500, 0.7500])
    """
    check_map(routing_map)
    check_tensor("votes", votes)
    check_shape("votes", votes, ["N", routing_map.num_parents, routing_map.num_slots, "B", "C", 4, 4])
    chosen = backends.choose(backend, votes.device)
    if chosen != "triton":
        return reference.coordinate_addition(votes, routing_map)
    check_reverse_mode("coordinate_addition", votes)
    tables = list(routing_map.tables(votes.device))
    return vote_ops.CoordinateAddition.apply(votes.flatten(5), tables, chosen).unflatten(5, (4, 4))


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
    backend: str | None = None,
) -> Gaussians:
    """Fit every parent's Gaussian to stored votes of any pose shape: the M-step of EM routing.

    Args:
        votes: votes, such as those of :func:`pose_votes`.
        assignments: R, the share of each child that belongs to each parent.
        activations: the children's activations, at least zero, as in :func:`em_routing`.
        beta_u: cost of describing a vote, for each parent type.
        beta_a: cost of not activating a parent, for each parent type.
        routing_map: which child feeds which parent.
        inverse_temperature: lambda, the factor of the logits.
        variance_floor: smaller variances are replaced by this number.
        mean_data: divide the support by its mean over the layer, children / parents.
        competition: that of the assignments. It changes only ``mean_data``: with "positions", each parent type gets
            whole children, so the mean is larger.
        backend: "reference", "cpu" or "triton"; default: chosen by device.

    Shape:
        - votes: [N, P, S, B, C, *pose], assignments: [N, P, S, B, C], activations: [N, B, *in_size], betas: [C]
        - result: mean and variance [N, C, *out_size, *pose], logits [N, C, *out_size]

    Returns:
        The parents' Gaussians; ``gaussians.activations`` is the sigmoid of their logits.

    Raises:
        ValueError: if a shape does not fit the map, an activation is negative, or ``competition`` is unknown.

    Example:
        One step of EM routing; docs/em-by-hand.md shows the whole loop.

        >>> import torch
        >>> from tritoncaps import RoutingMap, functional
        >>> routing_map, activations = RoutingMap.full((9,)), torch.rand(1, 2, 9)
        >>> votes = functional.pose_votes(torch.randn(1, 2, 9, 4, 4), torch.randn(1, 2, 5, 4, 4), routing_map)
        >>> shares = functional.initial_assignments(activations, 5, routing_map)
        >>> zeros = torch.zeros(5)
        >>> gaussians = functional.m_step(
        ...     votes, shares, activations, zeros, zeros, routing_map, inverse_temperature=0.05
        ... )
        >>> gaussians.mean.shape, functional.e_step(votes, gaussians, routing_map).shape
        (torch.Size([1, 5, 4, 4]), torch.Size([1, 1, 9, 2, 5]))
    """
    check_map(routing_map)
    given = {
        "votes": votes,
        "assignments": assignments,
        "activations": activations,
        "beta_u": beta_u,
        "beta_a": beta_a,
    }
    check_tensors(**given)
    check_number("inverse_temperature", inverse_temperature, 0.0)
    check_number("variance_floor", variance_floor, 0.0)
    check_choice("competition", competition, COMPETITIONS)
    check_alike(**given)
    _check_votes(votes, routing_map)
    images, _, _, in_caps, out_caps = votes.shape[:5]
    check_shape("assignments", assignments, votes.shape[:5])
    check_shape("activations", activations, [images, in_caps, *routing_map.in_size])
    check_activations(activations)
    check_shape("beta_u", beta_u, [out_caps])
    check_shape("beta_a", beta_a, [out_caps])
    chosen = backends.choose(backend, votes.device)
    if chosen == "reference":
        return reference.m_step(
            votes,
            assignments,
            activations,
            beta_u,
            beta_a,
            routing_map,
            inverse_temperature=inverse_temperature,
            variance_floor=variance_floor,
            mean_data=mean_data,
            competition=competition,
        )
    check_reverse_mode("m_step", *given.values())
    mean, variance, logits, _ = vote_ops.MStep.apply(
        votes.flatten(5),
        assignments,
        activations.reshape(images, in_caps, routing_map.num_children),
        beta_u,
        beta_a,
        list(routing_map.tables(votes.device)),
        inverse_temperature,
        variance_floor,
        reference.mean_data_of(routing_map, in_caps, out_caps, competition, mean_data),
        chosen,
    )
    parents = (images, out_caps, *routing_map.out_size)
    mean, variance = (x.transpose(1, 2).reshape(*parents, *votes.shape[5:]) for x in (mean, variance))
    return Gaussians(mean, variance, logits.transpose(1, 2).reshape(parents))


def e_step(
    votes: Tensor,
    gaussians: Gaussians,
    routing_map: RoutingMap,
    *,
    competition: str = "global",
    backend: str | None = None,
) -> Tensor:
    """Compute the assignments from the likelihoods of the votes: the E-step of EM routing.

    Args:
        votes: votes, such as those of :func:`pose_votes`.
        gaussians: the parents' Gaussians, the result of :func:`m_step`.
        routing_map: which child feeds which parent.
        competition: "global": all parents of a child compete for it. "local": only the types at one position.
            "positions": only the positions of one type.
        backend: "reference", "cpu" or "triton"; default: chosen by device.

    Shape:
        - votes: [N, P, S, B, C, *pose]; mean and variance: [N, C, *out_size, *pose]; logits: [N, C, *out_size]
        - result: [N, P, S, B, C]

    Returns:
        The assignments R, zero in missing slots. They sum to one over the parents that compete for a child.

    Raises:
        ValueError: if a shape does not fit the map, or ``competition`` is unknown.

    Example:
        Two parents with the same Gaussian share a child equally.

        >>> import torch
        >>> from tritoncaps import Gaussians, RoutingMap, functional
        >>> parents = Gaussians(torch.zeros(1, 2, 4, 4), torch.ones(1, 2, 4, 4), torch.zeros(1, 2))
        >>> votes = torch.randn(1, 1, 1, 1, 1, 4, 4).expand(1, 1, 1, 1, 2, 4, 4)
        >>> functional.e_step(votes, parents, RoutingMap.full((1,)))
        tensor([[[[[0.5000, 0.5000]]]]])
    """
    check_map(routing_map)
    given = {"votes": votes, **dict(zip(Gaussians._fields, gaussians, strict=True))}
    check_tensors(**given)
    check_alike(**given)
    _check_votes(votes, routing_map)
    parents = [votes.shape[0], votes.shape[4], *routing_map.out_size]
    check_shape("mean", gaussians.mean, [*parents, *votes.shape[5:]])
    check_shape("variance", gaussians.variance, [*parents, *votes.shape[5:]])
    check_shape("logits", gaussians.logits, parents)
    check_choice("competition", competition, COMPETITIONS)
    chosen = backends.choose(backend, votes.device)
    if chosen == "reference":
        return reference.e_step(votes, gaussians, routing_map, competition=competition)
    check_reverse_mode("e_step", *given.values())
    flat = (votes.shape[0], votes.shape[4], routing_map.num_parents)
    pose = math.prod(votes.shape[5:])  # reshape cannot infer it for an empty batch
    mean, variance = (x.reshape(*flat, pose).transpose(1, 2) for x in (gaussians.mean, gaussians.variance))
    logits = gaussians.logits.reshape(flat).transpose(1, 2)
    tables = list(routing_map.tables(votes.device))
    return vote_ops.EStep.apply(votes.flatten(5), mean, variance, logits, tables, competition, chosen)


def _check_votes(votes: Tensor, routing_map: RoutingMap) -> None:
    pose = [f"H{axis}" for axis in range(max(votes.ndim - 5, 1))]
    check_shape("votes", votes, ["N", routing_map.num_parents, routing_map.num_slots, "B", "C", *pose])


def squash(vectors: Tensor, dim: int = -1, backend: str | None = None) -> Tensor:
    """Shorten vectors to a length below one: |x|^2 / (1 + |x|^2) x / |x|. Its gradient at zero is zero.

    Args:
        vectors: vectors along the axis ``dim``.
        dim: the axis of the entries of a vector.
        backend: "reference", "cpu" or "triton"; default: chosen by device.

    Shape:
        - vectors and result: any shape

    Returns:
        Vectors of the same shape and directions.

    Raises:
        ValueError: if the vectors have no axis ``dim``.

    Example:
        >>> import torch
        >>> from tritoncaps import functional
        >>> functional.squash(torch.tensor([3.0, 4.0])).norm()  # 25 / 26
        tensor(0.9615)
    """
    check_tensor("vectors", vectors)
    if not -vectors.ndim <= dim < vectors.ndim:
        raise ValueError(f"dim must name an axis of vectors {list(vectors.shape)}, but it is {dim}")
    chosen = backends.choose(backend, vectors.device)
    if chosen == "reference":
        return reference.squash(vectors, dim)
    check_reverse_mode("squash", vectors)
    return dynamic_ops.SquashFunction.apply(vectors.movedim(dim, -1), chosen).movedim(-1, dim)


def dynamic_routing(
    poses: Tensor,
    weight: Tensor,
    routing_map: RoutingMap,
    routing: DynamicRouting | None = None,
    priors: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Dynamic routing: compute the parents from the children, without storing a vote (except on ``reference``).

    It does not use the offsets of the map, which are for matrix capsules. Under autocast it computes in float32.

    Args:
        poses: the children's vectors.
        weight: transformation matrices; slot s of the map uses block ``routing_map.weight_of[s]``.
        routing_map: which child feeds which parent.
        routing: the options; default ``DynamicRouting()``.
        priors: the initial logits; default: zero.
        backend: "reference", "cpu" or "triton"; default: chosen by device.

    Shape:
        - poses: [N, B, *in_size, D], weight: [K, B, C, D, E], priors: [K, B, C]
        - result: [N, C, *out_size, E]

    Returns:
        The parents' vectors, squashed.

    Raises:
        ValueError: if a shape does not fit the map.
        TypeError: if an argument is not a tensor, or dtypes differ.

    Example:
        >>> import torch
        >>> from tritoncaps import RoutingMap, functional
        >>> weight = torch.randn(1, 12, 10, 8, 16)  # a matrix for each pair of 12 children and 10 parents
        >>> functional.dynamic_routing(torch.randn(2, 12, 8), weight, RoutingMap.full((), coordinates=False)).shape
        torch.Size([2, 10, 16])
    """
    routing = DynamicRouting() if routing is None else routing
    check_routing(routing, DynamicRouting)
    given = {"poses": poses, "weight": weight} | ({} if priors is None else {"priors": priors})
    if isinstance(poses, Tensor) and under_autocast(poses):
        check_tensors(**given)
        with torch.autocast(poses.device.type, enabled=False):
            wide = {name: value.float() for name, value in given.items()}
            return dynamic_routing(**wide, routing_map=routing_map, routing=routing, backend=backend)
    _check_vectors(poses, weight, priors, routing_map)
    chosen = backends.choose(backend, poses.device, _too_long_for_triton(weight))
    if chosen == "reference":
        return reference.dynamic_routing(poses, weight, routing_map, routing, priors)
    return _fused_dynamic_routing(poses, weight, priors, routing_map, routing, chosen)


def _check_vectors(poses: Tensor, weight: Tensor, priors: Tensor | None, routing_map: RoutingMap) -> None:
    check_map(routing_map)
    given = {"poses": poses, "weight": weight} | ({} if priors is None else {"priors": priors})
    check_tensors(**given)
    check_alike(**given)
    check_shape("poses", poses, ["N", "B", *routing_map.in_size, "D"])
    check_shape("weight", weight, [routing_map.num_weights, poses.shape[1], "C", poses.shape[-1], "E"])
    if priors is not None:
        check_shape("priors", priors, weight.shape[:3])


def _too_long_for_triton(weight: Tensor) -> str:
    """Why Triton's kernels cannot use this weight, or an empty string."""
    if weight.shape[-1] <= LONGEST_ON_TRITON:
        return ""
    return (
        f"weight [K, B, C, D, E] must have E of at most {LONGEST_ON_TRITON} on triton, but its shape is "
        f"{list(weight.shape)}"
    )


def _fused_dynamic_routing(
    poses: Tensor,
    weight: Tensor,
    priors: Tensor | None,
    routing_map: RoutingMap,
    routing: DynamicRouting,
    backend: str,
) -> Tensor:
    images, in_caps, dim = *poses.shape[:2], poses.shape[-1]
    tensors = (poses.reshape(images, in_caps, routing_map.num_children, dim), weight, priors)
    tables = list(routing_map.tables(poses.device))
    options = (routing.iterations, routing.competition, routing.none_of_the_above)
    check_reverse_mode("dynamic_routing", *(x for x in tensors if x is not None))
    parents = dynamic_ops.dynamic_routing(*tensors, tables, *options, routing.gradient, backend)
    shape = (images, weight.shape[2], *routing_map.out_size, weight.shape[4])
    return rearrange(parents, "n p c e -> n c p e").reshape(shape)


@torch.no_grad()
def dynamic_assignments(
    poses: Tensor,
    weight: Tensor,
    routing_map: RoutingMap,
    routing: DynamicRouting | None = None,
    priors: Tensor | None = None,
) -> Tensor:
    """The last coupling coefficients of :func:`dynamic_routing`, for inspection: they have no gradient.

    The reference computes them image by image, so that it stores only the votes of one image.

    Args:
        poses: the children's vectors.
        weight: transformation matrices; slot s of the map uses block ``routing_map.weight_of[s]``.
        routing_map: which child feeds which parent.
        routing: the options; default ``DynamicRouting()``.
        priors: the initial logits; default: zero.

    Shape:
        - poses: [N, B, *in_size, D], weight: [K, B, C, D, E], priors: [K, B, C]
        - result: [N, P, S, B, C]

    Returns:
        The coupling coefficients, zero in missing slots.

    Raises:
        ValueError: if a shape does not fit the map.

    Example:
        >>> import torch
        >>> from tritoncaps import RoutingMap, functional
        >>> poses, weight = torch.randn(2, 12, 8), torch.randn(1, 12, 10, 8, 16)
        >>> functional.dynamic_assignments(poses, weight, RoutingMap.full((), coordinates=False)).shape
        torch.Size([2, 1, 1, 12, 10])
    """
    routing = DynamicRouting() if routing is None else routing
    check_routing(routing, DynamicRouting)
    _check_vectors(poses, weight, priors, routing_map)
    found = []
    for image in poses.split(1):
        *_, (_, coupling) = reference.dynamic_steps(image, weight, routing_map, routing, priors)
        found.append(coupling.to(poses.dtype))
    return torch.cat(found)


def with_lengths(poses: Tensor) -> Capsules:
    """Make vector capsules: the activations are the lengths of the poses.

    Args:
        poses: the pose vectors.

    Shape:
        - poses: [N, C, *space, D]
        - result: poses [N, C, *space, D], activations [N, C, *space]

    Returns:
        The capsules.

    Example:
        >>> import torch
        >>> from tritoncaps import functional
        >>> functional.with_lengths(torch.tensor([[[0.6, 0.8]]])).activations
        tensor([[1.]])
    """
    return Capsules(poses, torch.linalg.vector_norm(poses, dim=-1))


def vector_votes(poses: Tensor, weight: Tensor, routing_map: RoutingMap) -> Tensor:
    """The votes of vector capsules, u_hat_ij = W_ij^T u_i, for inspection or for a routing of your own.

    Args:
        poses: the children's vectors u.
        weight: transformation matrices W; slot s of the map uses block ``routing_map.weight_of[s]``.
        routing_map: which child feeds which parent.

    Shape:
        - poses: [N, B, *in_size, D], weight: [K, B, C, D, E]
        - result: [N, P, S, B, C, E]

    Returns:
        The votes, zero in missing slots.

    Raises:
        ValueError: if a shape does not fit the map.

    Example:
        >>> import torch
        >>> from tritoncaps import RoutingMap, functional
        >>> functional.vector_votes(torch.randn(2, 4, 9, 8), torch.randn(1, 4, 5, 8, 16), RoutingMap.full((9,))).shape
        torch.Size([2, 1, 9, 4, 5, 16])
    """
    _check_vectors(poses, weight, None, routing_map)
    return reference.vector_votes(poses, weight, routing_map)


def initial_assignments(
    activations: Tensor, num_types: int, routing_map: RoutingMap, competition: str = "global"
) -> Tensor:
    """The assignments before the first M-step: all parents that compete for a child have the same share.

    Args:
        activations: the children's activations; only their shape, dtype and device are used.
        num_types: parent types C.
        routing_map: which child feeds which parent.
        competition: "global": all parents of a child compete for it. "local": only the types at one position.
            "positions": only the positions of one type.

    Shape:
        - activations: [N, B, *in_size]
        - result: [N, P, S, B, num_types]

    Returns:
        The assignments R, zero in missing slots.

    Raises:
        ValueError: if the shape does not fit the map, or an option is unknown.

    Example:
        >>> import torch
        >>> from tritoncaps import RoutingMap, functional
        >>> functional.initial_assignments(torch.rand(1, 1, 1), 4, RoutingMap.full((1,))).flatten()
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    check_map(routing_map)
    check_tensor("activations", activations)
    check_shape("activations", activations, ["N", "B", *routing_map.in_size])
    check_positive(num_types=num_types)
    check_choice("competition", competition, COMPETITIONS)
    return reference.initial_assignments(activations, num_types, routing_map, competition)


def spread_loss(activations: Tensor, labels: Tensor, margin: float | Tensor) -> Tensor:
    """Spread loss: the sum over the wrong classes i of max(0, margin - (a_t - a_i))^2, averaged over the batch.

    Args:
        activations: activations of the class capsules.
        labels: the true classes t.
        margin: the loss is zero if the true class exceeds every other class by this margin.

    Shape:
        - activations: [N, classes], labels: [N]
        - result: a scalar, zero for an empty batch

    Returns:
        The loss.

    Raises:
        ValueError: if a label is not the index of a class.

    Example:
        >>> import torch
        >>> from tritoncaps import functional
        >>> functional.spread_loss(torch.tensor([[0.9, 0.6]]), torch.tensor([0]), margin=0.5)  # (0.5 - 0.3)^2
        tensor(0.0400)
    """
    _check_scores(activations)
    check_labels(labels, activations)
    check_shape("labels", labels, [len(activations)])
    right = activations.gather(1, labels[:, None])
    wrong = torch.ones_like(activations).scatter(1, labels[:, None], 0)
    violation = (margin - (right - activations)).clamp(min=0) * wrong
    return _mean((violation**2).sum(dim=1))


def margin_loss(
    activations: Tensor, labels: Tensor, upper: float = 0.9, lower: float = 0.1, down_weight: float = 0.5
) -> Tensor:
    """Margin loss: the sum over the classes of T max(0, upper - a)^2 + down_weight (1 - T) max(0, a - lower)^2.

    T is 1 for the classes that are present, and 0 for the others. The loss is averaged over the batch.

    Args:
        activations: activations of the class capsules.
        labels: the classes that are present.
        upper: present classes have no loss from this activation on.
        lower: absent classes have no loss up to this activation.
        down_weight: weight of the absent classes.

    Shape:
        - activations: [N, classes]
        - labels: [N], or multi-hot [N, classes] if several classes may be present
        - result: a scalar, zero for an empty batch

    Returns:
        The loss.

    Raises:
        ValueError: if a label is not the index of a class.

    Example:
        >>> import torch
        >>> from tritoncaps import functional
        >>> functional.margin_loss(torch.tensor([[0.8, 0.3]]), torch.tensor([0]))  # 0.1^2 + 0.5 * 0.2^2
        tensor(0.0300)
    """
    _check_scores(activations)
    check_labels(labels, activations)
    if labels.ndim == 1:
        present = torch.zeros_like(activations).scatter(1, labels[:, None], 1)
    else:
        present = labels.to(activations.dtype)
    missed = (upper - activations).clamp(min=0) ** 2
    imagined = (activations - lower).clamp(min=0) ** 2
    return _mean((present * missed + down_weight * (1 - present) * imagined).sum(dim=1))


def _check_scores(activations: Tensor) -> None:
    check_tensor("activations", activations)
    check_shape("activations", activations, ["N", "classes"])


def _mean(losses: Tensor) -> Tensor:
    """The mean over the batch; zero for an empty batch."""
    return losses.sum() / max(len(losses), 1)
