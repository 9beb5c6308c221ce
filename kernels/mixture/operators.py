"""EM routing as PyTorch operators: one opaque forward, one opaque backward, and the autograd Function over them.

The operators know shapes, not devices: `backend` names the kernels that do the work. Tensors of capsules are
[N, types, locations, ...] at this level; the spatial axes are flattened by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from tritoncaps.kernels.common.backends import kernels
from tritoncaps.kernels.common.numerics import widen
from tritoncaps.kernels.common.operators import differentiable_again, fake, operator, surrounded
from tritoncaps.kernels.common.tables import Tables
from tritoncaps.kernels.mixture import iteration as em_routing

POSE = 16  # entries of a 4x4 pose


@operator
@surrounded
def em_routing_forward(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    tables: Sequence[Tensor],
    lambdas: Sequence[float],
    variance_floor: float,
    mean_data: float,
    competition: str,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """poses [N, B, L, 4, 4], activations [N, B, L], weight [K, B, C, 4, 4], betas [C], tables as in `Tables` ->

    poses [N, P, 16, C], activations [N, P, C]; and, if `save`, what backward needs (else with T = 0):
    statistics [T, ...] and log_sums [T - 1, ...], in the backend's own layout.
    """
    edges = _edges(poses, activations, weight, tables, competition, backend)
    fits = _fits(beta_u, beta_a, lambdas, variance_floor, mean_data)
    statistics, log_sums = _empty_saved(poses, activations, beta_a, tables, len(lambdas), competition, backend)
    rows = _by_iteration(statistics, log_sums, backend)
    em_routing.forward(kernels("mixture", backend), edges, fits, *rows)
    mean, activation = kernels("mixture", backend).outputs(edges, rows[0][-1])
    if not save:
        statistics, log_sums = (x.new_empty(0, *x.shape[1:]) for x in (statistics, log_sums))
    return mean.to(poses.dtype), activation.to(poses.dtype), statistics, log_sums


@fake(em_routing_forward)
def _(
    poses,
    activations,
    weight,
    beta_u,
    beta_a,
    tables,
    lambdas,
    variance_floor,
    mean_data,
    competition,
    save,
    backend,
):
    images, parents, out_caps = poses.shape[0], Tables(*tables).children.shape[0], beta_a.shape[0]
    iterations = len(lambdas) if save else 0
    statistics, log_sums = _empty_saved(poses, activations, beta_a, tables, iterations, competition, backend)
    if backend == "cpu":  # types are slower than locations
        mean = rearrange(poses.new_empty(images, out_caps, parents, POSE), "n c p h -> n p h c")
        activation = rearrange(poses.new_empty(images, out_caps, parents), "n c p -> n p c")
    else:
        mean, activation = poses.new_empty(images, parents, POSE, out_caps), poses.new_empty(images, parents, out_caps)
    return mean, activation, statistics, log_sums


@operator
@surrounded
def em_routing_backward(
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
    needs_children: bool,
    needs_weight: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of poses, activations, weight, beta_u, beta_a, as the forward operator takes them; those that are
    not needed come back empty, of size 0."""
    edges = _edges(poses, activations, weight, tables, competition, backend)
    slopes_shape = kernels("mixture", backend).slopes_shape(*grad_activations.shape, statistics.dtype)
    da_shape = kernels("mixture", backend).da_shape(
        activations.shape[0], _groups(activations, tables, competition), poses.shape[1]
    )
    slopes = statistics.new_empty(len(statistics), *slopes_shape)
    grad_children, grad_child_activations, grad_weight, grad_beta_u, grad_beta_a = em_routing.backward(
        kernels("mixture", backend),
        edges,
        _fits(beta_u, beta_a, lambdas, variance_floor, mean_data),
        em_routing.History(statistics, log_sums, slopes, log_sums.new_empty(len(log_sums), *da_shape)),
        gradient,
        widen(grad_poses),
        widen(grad_activations),
        needs_children,
        needs_weight,
    )
    if grad_child_activations is not None:
        grad_child_activations.masked_fill_(activations < 0, 0)
    none = poses.new_empty(0)
    return (
        none if grad_children is None else grad_children.to(poses.dtype),
        none.clone() if grad_child_activations is None else grad_child_activations.to(activations.dtype),
        none.clone() if grad_weight is None else grad_weight.to(weight.dtype),
        grad_beta_u.to(beta_u.dtype),
        grad_beta_a.to(beta_u.dtype),
    )


@fake(em_routing_backward)
def _(
    grad_poses,
    grad_activations,
    poses,
    activations,
    weight,
    beta_u,
    beta_a,
    tables,
    statistics,
    log_sums,
    lambdas,
    variance_floor,
    mean_data,
    competition,
    gradient,
    needs_children,
    needs_weight,
    backend,
):
    images, in_caps, locations = activations.shape
    none = poses.new_empty(0)
    if backend == "cpu":
        grad_children = poses.new_empty(images, in_caps, locations, 4, 4)
        grad_child_activations = activations.new_empty(images, in_caps, locations)
    else:
        grad_children = rearrange(poses.new_empty(images, locations, 4, 4, in_caps), "n l i j b -> n b l i j")
        grad_child_activations = rearrange(activations.new_empty(images, locations, in_caps), "n l b -> n b l")
    return (
        grad_children if needs_children else none,
        grad_child_activations if needs_children else none.clone(),
        torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else none.clone(),
        torch.empty_like(beta_u),
        torch.empty_like(beta_u),
    )


class EMRoutingFunction(torch.autograd.Function):
    """(poses [N, P, 16, C], activations [N, P, C], statistics, log_sums) of the forward operator's arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *given, _, backend = args  # how gradients flow does not matter to the forward pass
        return em_routing_forward(*given, True, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *parameters, tables, lambdas, floor, mean_data, competition, gradient, backend = inputs
        ctx.options = lambdas, floor, mean_data, competition, gradient, backend
        _, _, statistics, log_sums = output
        ctx.mark_non_differentiable(statistics, log_sums)
        ctx.set_materialize_grads(False)  # of statistics and log_sums, which nobody differentiates
        ctx.save_for_backward(*parameters, statistics, log_sums, *tables)

    @staticmethod
    def backward(ctx: Any, grad_poses: Tensor | None, grad_activations: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad_poses is not None and grad_activations is None:
            grad_activations = torch.zeros_like(grad_poses[:, :, 0])
        elif grad_activations is not None and grad_poses is None:
            grad_poses = torch.zeros_like(grad_activations)[:, :, None].repeat(1, 1, POSE, 1)
        elif grad_poses is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors  # asked once only: checkpointing allows no more
        *tensors, statistics, log_sums = saved[:7]
        needs = ctx.needs_input_grad
        arguments = (grad_poses, grad_activations, *tensors, saved[7:], statistics, log_sums, *ctx.options[:-1])
        arguments += (needs[0] or needs[1], needs[2], ctx.options[-1])
        grad = _backward(*arguments)
        wanted = tuple(g if need else None for g, need in zip(grad, needs, strict=False))
        return wanted + (None,) * (len(needs) - len(wanted))


_backward = differentiable_again(em_routing_backward)


def _edges(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    tables: Sequence[Tensor],
    competition: str,
    backend: str,
) -> Any:
    """The backend's own form of the inputs, from [N, B, L, 4, 4] and [N, B, L]; a negative activation is zero."""
    poses, activations = poses.flatten(3), activations.clamp(min=0)
    if backend == "cpu":
        poses, activations, weight = widen(poses), widen(activations), widen(weight)
        # a silent child is ignored, even if its pose is inf or nan; one sum tells that there is none of these
        if not math.isfinite(poses.sum().item()):
            poses = poses.masked_fill((activations == 0)[..., None] & ~poses.isfinite(), 0)
    return kernels("mixture", backend).edges(poses, activations, weight, Tables(*tables), competition)


def _by_iteration(statistics: Tensor, log_sums: Tensor, backend: str) -> tuple[Any, Any]:
    """What an iteration fills, as the backend takes it."""
    if backend == "cpu":  # a row of an array costs less than an item of a tensor
        of_cpu = kernels("mixture", backend)
        return of_cpu.by_iteration(statistics), of_cpu.by_iteration(log_sums)
    return statistics, log_sums


def _fits(
    beta_u: Tensor, beta_a: Tensor, lambdas: Sequence[float], variance_floor: float, mean_data: float
) -> list[em_routing.Fit]:
    """An M-step for each iteration."""
    return [em_routing.Fit(widen(beta_u), widen(beta_a), x, variance_floor, mean_data) for x in lambdas]


def _empty_saved(
    poses: Tensor,
    activations: Tensor,
    beta_a: Tensor,
    tables: Sequence[Tensor],
    iterations: int,
    competition: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Statistics and log_sums of so many iterations."""
    images, in_caps, _ = activations.shape
    parents = Tables(*tables).children.shape[0]
    dtype = torch.promote_types(poses.dtype, torch.float32)
    of_parents = kernels("mixture", backend).statistics_shape(images, parents, beta_a.shape[0], dtype)
    of_children = kernels("mixture", backend).log_sums_shape(images, _groups(activations, tables, competition), in_caps)
    statistics = poses.new_empty(iterations, *of_parents, dtype=dtype)
    return statistics, poses.new_empty(max(iterations - 1, 0), *of_children, dtype=dtype)


def _groups(activations: Tensor, tables: Sequence[Tensor], competition: str) -> int:
    """Groups of competing parents: child locations, or all pairs of a parent location and a slot."""
    return activations.shape[2] if competition == "global" else Tables(*tables).children.numel()
