"""Operators on stored votes: pose votes, coordinate addition, M-step and E-step, with the autograd Functions over them.

The operators are the same for all devices: `backend` is the name of the kernels. Here, votes are [N, P, S, B, C, H] and
assignments [N, P, S, B, C], tensors of parents [N, P, C, H] or [N, P, C], of children [N, B, L, 16] or [N, B, L]; the
caller flattens pose and spatial axes. In memory, parent types are the fastest axis of votes on Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncaps.kernels.common.backends import kernels
from tritoncaps.kernels.common.numerics import widen
from tritoncaps.kernels.common.operators import differentiable_again, fake, operator, surrounded
from tritoncaps.kernels.common.tables import Tables


def _kernels(backend: str) -> Any:
    return kernels("mixture", backend).stored


@operator
@surrounded
def pose_votes_forward(poses: Tensor, weight: Tensor, tables: Sequence[Tensor], backend: str) -> Tensor:
    """Votes [N, P, S, B, C, 16] from poses [N, B, L, 16] and weight [K, B, C, 4, 4]."""
    return _kernels(backend).pose_votes_forward(poses, weight, Tables(*tables)).to(poses.dtype)


@fake(pose_votes_forward)
def _(given):
    P, S = Tables(*given.tables).children.shape
    return _kernels(given.backend).empty_votes(
        given.poses, (given.poses.shape[0], P, S, *given.weight.shape[1:3], given.poses.shape[3])
    )


@operator
@surrounded
def pose_votes_backward(
    grad_votes: Tensor, poses: Tensor, weight: Tensor, tables: Sequence[Tensor], backend: str
) -> tuple[Tensor, Tensor]:
    grads = _kernels(backend).pose_votes_backward(grad_votes, poses, weight, Tables(*tables))
    return _as(grads[0], poses), _as(grads[1], weight)


@fake(pose_votes_backward)
def _(given):
    return _like(given.poses), _like(given.weight)


class PoseVotes(torch.autograd.Function):
    """Votes from (poses, weight, tables, backend)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(poses: Tensor, weight: Tensor, tables: Sequence[Tensor], backend: str) -> Tensor:
        return pose_votes_forward(poses, weight, tables, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        poses, weight, tables, ctx.backend = inputs
        ctx.save_for_backward(poses, weight, *tables)

    @staticmethod
    def backward(ctx: Any, grad_votes: Tensor) -> tuple[Tensor | None, ...]:
        poses, weight, *tables = ctx.saved_tensors
        return *_pose_votes_backward(grad_votes, poses, weight, tables, ctx.backend), None, None


_pose_votes_backward = differentiable_again(pose_votes_backward)


@operator
@surrounded
def coordinate_addition(votes: Tensor, tables: Sequence[Tensor], backend: str) -> Tensor:
    """Votes [N, P, S, B, C, 16], with the offset of each slot added to the right-hand column."""
    return _kernels(backend).coordinate_addition_forward(votes, Tables(*tables))


@fake(coordinate_addition)
def _(given):
    return _kernels(given.backend).empty_votes(given.votes, given.votes.shape)


class CoordinateAddition(torch.autograd.Function):
    """The offsets are constants, so the gradient does not change."""

    generate_vmap_rule = True

    @staticmethod
    def forward(votes: Tensor, tables: Sequence[Tensor], backend: str) -> Tensor:
        return coordinate_addition(votes, tables, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad_votes: Tensor) -> tuple[Tensor, None, None]:
        return grad_votes, None, None


@operator
@surrounded
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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, variance [N, P, C, H] and logit [N, P, C] of every parent; and for the backward pass, the statistics of the
    backend. A negative activation counts as zero."""
    tensors = (votes, assignments, activations.clamp(min=0), beta_u, beta_a)
    options = (variance_floor, mean_data)
    *gaussians, statistics = _kernels(backend).m_step_forward(*tensors, Tables(*tables), inverse_temperature, *options)
    mean, variance, logit = (_as(x, votes) for x in gaussians)
    return mean, variance, logit, statistics


@fake(m_step_forward)
def _(given):
    N, P, _, _, C, H = given.votes.shape
    mean, logit = given.votes.new_empty(N, P, C, H), given.votes.new_empty(N, P, C)
    wide = torch.promote_types(given.votes.dtype, torch.float32)
    statistics = given.votes.new_empty(_kernels(given.backend).statistics_shape(N, P, C, H), dtype=wide)
    return mean, torch.empty_like(mean), logit, statistics


@operator
@surrounded
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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of votes, assignments, activations, beta_u and beta_a."""
    grads = (widen(x) for x in (grad_mean, grad_variance, grad_logit))
    tensors = (votes, assignments, activations.clamp(min=0), beta_u, statistics)
    options = (variance_floor, mean_data)
    found = _kernels(backend).m_step_backward(*grads, *tensors, Tables(*tables), inverse_temperature, *options)
    grad_votes, *others = found
    others[1].masked_fill_(activations < 0, 0)
    inputs = (assignments, activations, beta_u, beta_u)
    return grad_votes.to(votes.dtype), *(_as(x, given) for x, given in zip(others, inputs, strict=True))


@fake(m_step_backward)
def _(given):
    return _kernels(given.backend).empty_votes(given.votes, given.votes.shape), *map(
        _like, (given.assignments, given.activations, given.beta_u, given.beta_u)
    )


class MStep(torch.autograd.Function):
    """Mean, variance, logit and statistics, from the arguments of the forward operator."""

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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read only once: checkpointing does not allow more
        return *_m_step_backward(*grads[:3], *saved[:5], list(saved[5:]), *ctx.options), *(None,) * 5


_m_step_backward = differentiable_again(m_step_backward)


@operator
@surrounded
def e_step_forward(
    votes: Tensor,
    mean: Tensor,
    variance: Tensor,
    logit: Tensor,
    tables: Sequence[Tensor],
    competition: str,
    backend: str,
) -> Tensor:
    """Assignments [N, P, S, B, C]."""
    assignments = _kernels(backend).e_step_forward(votes, mean, variance, logit, Tables(*tables), competition)
    return assignments.to(votes.dtype)


@fake(e_step_forward)
def _(given):
    return given.votes.new_empty(given.votes.shape[:5])


@operator
@surrounded
def e_step_backward(
    grad_assignments: Tensor,
    votes: Tensor,
    mean: Tensor,
    variance: Tensor,
    logit: Tensor,
    assignments: Tensor,
    tables: Sequence[Tensor],
    competition: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of votes, mean, variance and logit."""
    tensors = (grad_assignments, votes, mean, variance, logit, assignments)
    grad_votes, *others = _kernels(backend).e_step_backward(*tensors, Tables(*tables), competition)
    inputs = (mean, variance, logit)
    return grad_votes.to(votes.dtype), *(_as(x, given) for x, given in zip(others, inputs, strict=True))


@fake(e_step_backward)
def _(given):
    return _kernels(given.backend).empty_votes(given.votes, given.votes.shape), *map(
        _like, (given.mean, given.variance, given.logit)
    )


class EStep(torch.autograd.Function):
    """Assignments, from the arguments of the forward operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return e_step_forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        votes, mean, variance, logit, tables, *ctx.options = inputs
        ctx.save_for_backward(votes, mean, variance, logit, output, *tables)

    @staticmethod
    def backward(ctx: Any, grad_assignments: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return *_e_step_backward(grad_assignments, *saved[:5], list(saved[5:]), *ctx.options), None, None, None


_e_step_backward = differentiable_again(e_step_backward)


def _as(x: Tensor, given: Tensor) -> Tensor:
    """x in the dtype of ``given``, contiguous."""
    return x.to(given.dtype).contiguous()


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
