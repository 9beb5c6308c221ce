"""Operators on stored votes: pose votes, coordinate addition, M-step and E-step, with the autograd Functions over them.

They exist on the Triton backend. At this level votes are [N, P, S, B, H, C], assignments [N, P, S, B, C], parents'
arrays [N, P, H, C] or [N, P, C] and children's [N, L, 16, B] or [N, L, B]: types are fastest, as kernels read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritoncaps.operators import fake, operator
from tritoncaps.reference import widen
from tritoncaps.routing_map import Tables


def _kernels() -> Any:
    from tritoncaps.kernels import triton

    return triton


@operator
def pose_votes_forward(poses: Tensor, weight: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """poses [N, L, 16, B], weight [K, B, C, 4, 4] -> votes [N, P, S, B, 16, C]."""
    return _kernels().pose_votes_forward(poses.contiguous(), weight.contiguous(), Tables(*tables))


@fake(pose_votes_forward)
def _(poses, weight, tables):
    P, S = Tables(*tables).children.shape
    return poses.new_empty(poses.shape[0], P, S, poses.shape[3], poses.shape[2], weight.shape[2])


@operator
def pose_votes_backward(
    grad_votes: Tensor, poses: Tensor, weight: Tensor, tables: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    grads = _kernels().pose_votes_backward(grad_votes, poses.contiguous(), weight.contiguous(), Tables(*tables))
    return grads[0].to(poses.dtype), grads[1].to(weight.dtype)


@fake(pose_votes_backward)
def _(grad_votes, poses, weight, tables):
    return _like(poses), _like(weight)


class PoseVotes(torch.autograd.Function):
    """votes of (poses, weight, tables)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(poses: Tensor, weight: Tensor, tables: Sequence[Tensor]) -> Tensor:
        return pose_votes_forward(poses, weight, tables)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        poses, weight, tables = inputs
        ctx.save_for_backward(poses, weight, *tables)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_votes: Tensor) -> tuple[Tensor | None, ...]:
        poses, weight, *tables = ctx.saved_tensors
        return *pose_votes_backward(grad_votes, poses, weight, tables), None


@operator
def coordinate_addition(votes: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """votes [N, P, S, B, 16, C] with each slot's offset added to the right-hand column."""
    return _kernels().coordinate_addition_forward(votes.contiguous(), Tables(*tables))


@fake(coordinate_addition)
def _(votes, tables):
    return _like(votes)


class CoordinateAddition(torch.autograd.Function):
    """The offsets are constants: the gradient passes as it is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(votes: Tensor, tables: Sequence[Tensor]) -> Tensor:
        return coordinate_addition(votes, tables)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad_votes: Tensor) -> tuple[Tensor, None]:
        return grad_votes, None


@operator
def m_step_forward(
    votes: Tensor,
    assignments: Tensor,
    activations: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    tables: Sequence[Tensor],
    inverse_temperature: float,
    variance_floor: float,
    mean_data: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mean, variance [N, P, H, C] and logit [N, P, C] of every parent; and, for backward, statistics [N, P, ..., C]."""
    statistics = _kernels().m_step_forward(
        votes.contiguous(),
        assignments.contiguous(),
        activations.contiguous(),
        widen(beta_u),
        widen(beta_a),
        Tables(*tables),
        inverse_temperature,
        variance_floor,
        mean_data,
    )
    H = votes.shape[4]
    mean, precision, logit = statistics[:, :, :H], statistics[:, :, H : 2 * H], statistics[:, :, 2 * H + 1]
    variance = (0.5 / precision).clamp(min=variance_floor)  # whatever the rounding
    return mean.clone(memory_format=torch.contiguous_format), variance, logit.clone(), statistics


@fake(m_step_forward)
def _(votes, assignments, activations, beta_u, beta_a, tables, inverse_temperature, variance_floor, mean_data):
    N, P, _, _, H, C = votes.shape
    wide = torch.promote_types(votes.dtype, torch.float32)
    mean, logit = votes.new_empty(N, P, H, C, dtype=wide), votes.new_empty(N, P, C, dtype=wide)
    return mean, torch.empty_like(mean), logit, votes.new_empty(N, P, 2 * H + 4, C, dtype=wide)


@operator
def m_step_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of votes, assignments, activations, beta_u and beta_a."""
    grads = _kernels().m_step_backward(
        grad_mean,
        grad_variance,
        grad_logit,
        votes.contiguous(),
        assignments.contiguous(),
        activations.contiguous(),
        widen(beta_u),
        statistics,
        Tables(*tables),
        inverse_temperature,
        variance_floor,
        mean_data,
    )
    inputs = (votes, assignments, activations, beta_u, beta_u)
    return tuple(grad.to(given.dtype).contiguous() for grad, given in zip(grads, inputs, strict=True))


@fake(m_step_backward)
def _(
    grad_mean,
    grad_variance,
    grad_logit,
    votes,
    assignments,
    activations,
    beta_u,
    statistics,
    tables,
    inverse_temperature,
    variance_floor,
    mean_data,
):
    return tuple(_like(x) for x in (votes, assignments, activations, beta_u, beta_u))


class MStep(torch.autograd.Function):
    """(mean, variance, logit, statistics) of the forward operator's arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return m_step_forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        votes, assignments, activations, beta_u, _, tables, *ctx.options = inputs
        ctx.mark_non_differentiable(output[3])
        ctx.save_for_backward(votes, assignments, activations, beta_u, output[3], *tables)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, tables = ctx.saved_tensors[:5], list(ctx.saved_tensors[5:])
        return *m_step_backward(*grads[:3], *inputs, tables, *ctx.options), None, None, None, None


@operator
def e_step_forward(
    votes: Tensor, mean: Tensor, variance: Tensor, logit: Tensor, tables: Sequence[Tensor], competition: str
) -> Tensor:
    """assignments [N, P, S, B, C]."""
    gaussians = (widen(x).contiguous() for x in (mean, variance, logit))
    return _kernels().e_step_forward(votes.contiguous(), *gaussians, Tables(*tables), competition)


@fake(e_step_forward)
def _(votes, mean, variance, logit, tables, competition):
    N, P, S, B, _, C = votes.shape
    return votes.new_empty(N, P, S, B, C)


@operator
def e_step_backward(
    grad_assignments: Tensor,
    votes: Tensor,
    mean: Tensor,
    variance: Tensor,
    logit: Tensor,
    assignments: Tensor,
    tables: Sequence[Tensor],
    competition: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of votes, mean, variance and logit."""
    gaussians = [widen(x).contiguous() for x in (mean, variance, logit)]
    grads = _kernels().e_step_backward(
        grad_assignments, votes.contiguous(), *gaussians, assignments, Tables(*tables), competition
    )
    inputs = (votes, mean, variance, logit)
    return tuple(grad.to(given.dtype).contiguous() for grad, given in zip(grads, inputs, strict=True))


@fake(e_step_backward)
def _(grad_assignments, votes, mean, variance, logit, assignments, tables, competition):
    return tuple(_like(x) for x in (votes, mean, variance, logit))


class EStep(torch.autograd.Function):
    """assignments of the forward operator's arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return e_step_forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        votes, mean, variance, logit, tables, ctx.competition = inputs
        ctx.save_for_backward(votes, mean, variance, logit, output, *tables)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_assignments: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, assignments = ctx.saved_tensors[:5]
        tables = list(ctx.saved_tensors[5:])
        return *e_step_backward(grad_assignments, *inputs, assignments, tables, ctx.competition), None, None


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
