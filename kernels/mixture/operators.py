"""EM routing as PyTorch operators: one opaque forward, one opaque backward, and the autograd Function over them.

The operators are the same for all devices: `backend` is the name of the kernels. Tensors of capsules have the shape
[N, types, locations, ...] here; the caller flattens the spatial axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from tritoncaps.kernels.common.numerics import POSE, widen
from tritoncaps.kernels.common.operators import differentiable_again, fake, operator, surrounded
from tritoncaps.kernels.mixture import iteration as em_routing
from tritoncaps.kernels.mixture.backend import (
    MixtureBackend,
    VoteSource,
    backend_of,
    given_source,
    image_chunks,
    vote_source,
)


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
    """Poses [N, P, 16, C] and activations [N, P, C] of the parents; and for the backward pass, statistics [T, ...] and
    log_sums [T - 1, ...], in the backend's own layout (with T = 0 unless `save`).

    poses [N, B, L, 4, 4], activations [N, B, L], weight [K, B, C, 4, 4], betas [C], tables: the fields of `Tables`.
    """
    kernels, source = backend_of(backend), vote_source(poses, activations, weight, tables, competition)
    fits = _fits(beta_u, beta_a, lambdas, variance_floor, mean_data)
    found = kernels.kept_forward(source, fits, save) or _forward_of_chunks(kernels, source, fits, save)
    out_poses, out_activations, statistics, log_sums = found
    return out_poses.to(poses.dtype), out_activations.to(poses.dtype), statistics, log_sums


@fake(em_routing_forward)
def _(given):
    kernels, source = backend_of(given.backend), given_source(given)
    return *kernels.empty_outputs(source), *source.empty(
        kernels.saved_shapes(source, len(given.lambdas) if given.save else 0)
    )


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
    """Gradients of poses, activations, weight, beta_u, beta_a, in the shapes of these inputs; those that are not
    needed are empty tensors of size 0."""
    kernels, source = backend_of(backend), vote_source(poses, activations, weight, tables, competition)
    fits = _fits(beta_u, beta_a, lambdas, variance_floor, mean_data)
    given, needs = (statistics, log_sums, grad_poses, grad_activations), (needs_children, needs_weight)
    found = kernels.kept_backward(source, fits, given, gradient, needs)
    found = found or _backward_of_chunks(kernels, source, fits, given, gradient, needs)
    grad_children, grad_child_activations, grad_weight, grad_beta_u, grad_beta_a = found
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
def _(given):
    none = given.poses.new_empty(0)
    grad_children, grad_child_activations = backend_of(given.backend).empty_child_gradients(given_source(given))
    return (
        grad_children if given.needs_children else none,
        grad_child_activations if given.needs_children else none.clone(),
        torch.empty_like(given.weight, memory_format=torch.contiguous_format) if given.needs_weight else none.clone(),
        torch.empty_like(given.beta_u),
        torch.empty_like(given.beta_u),
    )


class EMRoutingFunction(torch.autograd.Function):
    """Poses [N, P, 16, C], activations [N, P, C], statistics and log_sums. Arguments: those of the forward operator,
    with `gradient` instead of `save`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *given, _, backend = args  # the forward pass does not use `gradient`
        return em_routing_forward(*given, True, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *parameters, tables, lambdas, floor, mean_data, competition, gradient, backend = inputs
        ctx.options = lambdas, floor, mean_data, competition, gradient, backend
        _, _, statistics, log_sums = output
        ctx.mark_non_differentiable(statistics, log_sums)
        ctx.set_materialize_grads(False)  # statistics and log_sums have no gradients
        ctx.save_for_backward(*parameters, statistics, log_sums, *tables)

    @staticmethod
    def backward(ctx: Any, grad_poses: Tensor | None, grad_activations: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad_poses is not None and grad_activations is None:
            grad_activations = torch.zeros_like(grad_poses[:, :, 0])
        elif grad_activations is not None and grad_poses is None:
            grad_poses = torch.zeros_like(grad_activations)[:, :, None].repeat(1, 1, POSE, 1)
        elif grad_poses is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors  # read only once: checkpointing does not allow more
        *tensors, statistics, log_sums = saved[:7]
        needs = ctx.needs_input_grad
        arguments = (grad_poses, grad_activations, *tensors, saved[7:], statistics, log_sums, *ctx.options[:-1])
        arguments += (needs[0] or needs[1], needs[2], ctx.options[-1])
        grad = _backward(*arguments)
        wanted = tuple(g if need else None for g, need in zip(grad, needs, strict=False))
        return wanted + (None,) * (len(needs) - len(wanted))


# torch asks for it in every call, and computing it takes longer than a launch
EMRoutingFunction.forward.__signature__ = signature(EMRoutingFunction.forward)  # type: ignore[attr-defined]

_backward = differentiable_again(em_routing_backward)


def _fits(
    beta_u: Tensor, beta_a: Tensor, lambdas: Sequence[float], variance_floor: float, mean_data: float
) -> list[em_routing.Fit]:
    """The parameters of the M-step of each iteration."""
    beta_u, beta_a = widen(beta_u).contiguous(), widen(beta_a).contiguous()
    return [em_routing.Fit(beta_u, beta_a, x, variance_floor, mean_data) for x in lambdas]


def _forward_of_chunks(
    kernels: MixtureBackend, source: VoteSource, fits: Sequence[em_routing.Fit], save: bool
) -> tuple[Tensor, ...]:
    """Poses, activations, statistics and log_sums, computed chunk by chunk."""
    saved = source.empty(kernels.saved_shapes(source, len(fits) if save else 0))

    def route(chunk: slice) -> tuple[Tensor, Tensor]:
        part = source.of_images(chunk)
        kept = _saved_of(kernels, part, chunk, saved) if save else part.empty(kernels.saved_shapes(part, len(fits)))
        return em_routing.forward(kernels.em_passes(part), fits, *map(kernels.by_iteration, kept))

    chunks = image_chunks(source, len(fits))
    if len(chunks) == 1:
        return *route(chunks[0]), *saved
    outputs = kernels.empty_outputs(source)
    for chunk in chunks:
        _copy(outputs, chunk, route(chunk))
    return *outputs, *saved


def _backward_of_chunks(
    kernels: MixtureBackend,
    source: VoteSource,
    fits: Sequence[em_routing.Fit],
    given: Sequence[Tensor],
    gradient: str,
    needs: tuple[bool, bool],
) -> em_routing.Gradients:
    """The gradients of `iteration.backward`, chunk by chunk: concatenated for children, summed for parameters."""
    statistics, log_sums, grad_poses, grad_activations = given

    def pull_back(chunk: slice) -> em_routing.Gradients:
        part = source.of_images(chunk)
        history = kernels.empty_history(part, *_saved_of(kernels, part, chunk, (statistics, log_sums)))
        grads = widen(grad_poses[chunk]), widen(grad_activations[chunk])
        return em_routing.backward(kernels.em_passes(part), fits, history, gradient, *grads, *needs)

    first, *others = image_chunks(source, len(fits))
    found = pull_back(first)
    if not others:
        return found
    children = kernels.empty_child_gradients(source) if needs[0] else (None, None)
    _copy(children, first, found[:2])
    weight, *betas = found[2:]
    for chunk in others:
        del found  # free the memory for the next chunk
        found = pull_back(chunk)
        _copy(children, chunk, found[:2])
        weight = None if weight is None or found[2] is None else weight + found[2]
        betas = [x + y for x, y in zip(betas, found[3:], strict=True)]
    return *children, weight, *betas


def _saved_of(kernels: MixtureBackend, part: VoteSource, chunk: slice, saved: Sequence[Tensor]) -> Sequence[Tensor]:
    """The statistics and log_sums of a chunk. Each chunk has consecutive memory, for all its iterations."""
    images, found = len(part.poses), []
    for x, shape in zip(saved, kernels.saved_shapes(part, len(saved[0])), strict=True):
        size = math.prod(shape) // max(images, 1)  # of one image
        found.append(x.view(-1)[chunk.start * size : chunk.stop * size].view(shape))
    return found


def _copy(batch: Sequence[Tensor | None], chunk: slice, parts: Sequence[Tensor | None]) -> None:
    for whole, part in zip(batch, parts, strict=True):
        if whole is not None and part is not None:
            whole[chunk] = part
