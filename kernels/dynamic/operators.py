"""Dynamic routing and squash as PyTorch operators: opaque forward and backward, and the autograd Functions over them.

The operators are the same for all devices: `backend` is the name of the kernels. Tensors of capsules have the shape
[N, types, locations, ...] here; the caller flattens the spatial axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncaps.kernels.common.backends import kernels
from tritoncaps.kernels.common.chunks import chunks_of, in_chunks
from tritoncaps.kernels.common.numerics import wide_dtype, widen
from tritoncaps.kernels.common.operators import differentiable_again, fake, operator, surrounded
from tritoncaps.kernels.common.tables import Tables
from tritoncaps.kernels.dynamic.options import Options


def _kernels(backend: str) -> Any:
    return kernels("dynamic", backend)


def dynamic_routing(
    poses: Tensor,
    weight: Tensor,
    priors: Tensor | None,
    tables: Sequence[Tensor],
    iterations: int,
    competition: str,
    none_of_the_above: bool,
    gradient: str,
    backend: str,
) -> Tensor:
    """Parents [N, P, C, E], differentiable; poses [N, B, L, D], weight [K, B, C, D, E], priors [K, B, C]."""
    options = (tables, iterations, competition, none_of_the_above)
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (poses, weight, priors))

    def route(poses: Tensor) -> Sequence[Tensor]:
        if tracked:
            return DynamicRoutingFunction.apply(poses, weight, priors, *options, gradient, backend)[:1]
        return dynamic_routing_forward(poses, weight, priors, *options, backend)[:1]

    (parents,) = in_chunks(route, _chunks(poses, weight, Tables(*tables), iterations, competition), poses)
    return parents


def _chunks(poses: Tensor, weight: Tensor, tables: Tables, iterations: int, competition: str) -> list[slice]:
    """Slices of the images that are routed together; see `kernels.common.chunks`."""
    (N, B, L, D), (_, _, C, _, E), P = poses.shape, weight.shape, tables.children.shape[0]
    groups = L if competition == "global" else tables.children.numel()
    # parents: a parent and its gradient in every iteration, three sums; children: copies of pose and gradient;
    # groups: log_sum and mean gradient in every iteration
    numbers = (2 * iterations + 3) * P * C * E + 2 * B * L * D + 2 * iterations * B * groups
    return chunks_of(N, numbers * wide_dtype(poses.dtype).itemsize)


@operator
@surrounded
def dynamic_routing_forward(
    poses: Tensor,
    weight: Tensor,
    priors: Tensor | None,
    tables: Sequence[Tensor],
    iterations: int,
    competition: str,
    none_of_the_above: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Parents [N, P, C, E], and for the backward pass the sums before the squash, [T, N, P, C, E].

    poses [N, B, L, D], weight [K, B, C, D, E], priors [K, B, C], tables: the fields of `Tables`.
    """
    options = Options(iterations, competition, none_of_the_above, "all")
    sums, parents = _kernels(backend).forward(*_wide(poses, weight, priors), Tables(*tables), options)
    return parents.to(poses.dtype), sums


@fake(dynamic_routing_forward)
def _(given):
    shape = (
        given.poses.shape[0],
        Tables(*given.tables).children.shape[0],
        given.weight.shape[2],
        given.weight.shape[4],
    )
    wide = torch.promote_types(given.poses.dtype, torch.float32)
    return given.poses.new_empty(shape), given.poses.new_empty(given.iterations, *shape, dtype=wide)


@operator
@surrounded
def dynamic_routing_backward(
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
    needs_poses: bool,
    needs_weight: bool,
    needs_priors: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of poses, weight and priors; those that are not needed are empty tensors of size 0."""
    grads = _kernels(backend).backward(
        widen(grad).contiguous(),
        *_wide(poses, weight, priors),
        Tables(*tables),
        sums,
        Options(iterations, competition, none_of_the_above, gradient),
        (needs_poses, needs_weight, needs_priors),
    )
    grad_poses, grad_weight, grad_priors = (poses.new_empty(0) if x is None else x.to(poses.dtype) for x in grads)
    return grad_poses, grad_weight, grad_priors


@fake(dynamic_routing_backward)
def _(given):
    inputs = ((given.poses, given.needs_poses), (given.weight, given.needs_weight), (given.priors, given.needs_priors))
    return tuple(given.poses.new_empty(x.shape if needed else 0) for x, needed in inputs)


class DynamicRoutingFunction(torch.autograd.Function):
    """Parents [N, P, C, E] and sums. Arguments: those of the forward operator, with `gradient` before `backend`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        *given, _, backend = args
        return dynamic_routing_forward(*given, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        poses, weight, priors, tables, *ctx.options = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(poses, weight, priors, output[1], *tables)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        poses, weight, priors, sums, *tables = ctx.saved_tensors
        *options, backend = ctx.options
        needs = ctx.needs_input_grad[:3]
        arguments = (grads[0], poses, weight, priors, sums, tables, *options, *needs, backend)
        given = _backward(*arguments)
        wanted = tuple(g if need else None for g, need in zip(given, needs, strict=True))
        return wanted + (None,) * (len(ctx.needs_input_grad) - 3)


_backward = differentiable_again(dynamic_routing_backward)


@operator
@surrounded
def squash_forward(vectors: Tensor, backend: str) -> Tensor:
    """Squash the vectors along the last axis."""
    return _kernels(backend).squash(widen(vectors).contiguous()).to(vectors.dtype)


@fake(squash_forward)
def _(given):
    return given.vectors.new_empty(given.vectors.shape)


@operator
@surrounded
def squash_backward(grad: Tensor, vectors: Tensor, backend: str) -> Tensor:
    grads = _kernels(backend).squash_gradient(widen(grad).contiguous(), widen(vectors).contiguous())
    return grads.to(vectors.dtype)


@fake(squash_backward)
def _(given):
    return given.vectors.new_empty(given.vectors.shape)


class SquashFunction(torch.autograd.Function):
    """squash(vectors) along the last axis, with the kernels of `backend`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(vectors: Tensor, backend: str) -> Tensor:
        return squash_forward(vectors, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        vectors, ctx.backend = inputs
        ctx.save_for_backward(vectors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (vectors,) = ctx.saved_tensors
        return _squash_backward(grad, vectors, ctx.backend), None


_squash_backward = differentiable_again(squash_backward)


def _wide(poses: Tensor, weight: Tensor, priors: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors as kernels read them: contiguous, and float16 and bfloat16 as float32."""
    return (
        widen(poses).contiguous(),
        widen(weight).contiguous(),
        None if priors is None else widen(priors).contiguous(),
    )
