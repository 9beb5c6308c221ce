"""EM routing as PyTorch operators: one opaque forward, one opaque backward, and the autograd Function over them.

The operators are the same for all devices: `backend` names the kernels. Tensors of capsules are
[N, types, locations, ...] at this level; the spatial axes are flattened by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncaps.kernels.common.numerics import POSE, widen
from tritoncaps.kernels.common.operators import differentiable_again, fake, operator, surrounded
from tritoncaps.kernels.mixture import iteration as em_routing
from tritoncaps.kernels.mixture.backend import MixtureBackend, VoteSource, backend_of, given_source, vote_source


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
    kernels, source = backend_of(backend), vote_source(poses, activations, weight, tables, competition)
    fits = _fits(beta_u, beta_a, lambdas, variance_floor, mean_data)
    saved = _empty_saved(kernels, source, len(fits) if save else 0)

    def route(chunk: slice) -> tuple[Tensor, Tensor]:
        part = source.of_images(chunk)
        kept = _saved_of(kernels, part, chunk, saved) if save else _empty_saved(kernels, part, len(fits))
        return em_routing.forward(kernels.em_passes(part), fits, *map(kernels.by_iteration, kept))

    chunks = source.chunks(len(fits))
    if len(chunks) == 1:
        parents, parent_activations = (x.to(poses.dtype) for x in route(chunks[0]))
    else:
        parents, parent_activations = kernels.empty_outputs(source)
        for chunk in chunks:
            _copy((parents, parent_activations), chunk, route(chunk))
    statistics, log_sums = saved
    return parents, parent_activations, statistics, log_sums


@fake(em_routing_forward)
def _(given):
    kernels, source = backend_of(given.backend), given_source(given)
    return *kernels.empty_outputs(source), *_empty_saved(kernels, source, len(given.lambdas) if given.save else 0)


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
    kernels, source = backend_of(backend), vote_source(poses, activations, weight, tables, competition)
    fits = _fits(beta_u, beta_a, lambdas, variance_floor, mean_data)

    def pull_back(chunk: slice) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Gradients of the children, which may be none, and of the parameters."""
        part = source.of_images(chunk)
        of_children, of_activations, of_weight, *of_betas = em_routing.backward(
            kernels.em_passes(part),
            fits,
            kernels.empty_history(part, *_saved_of(kernels, part, chunk, (statistics, log_sums))),
            gradient,
            widen(grad_poses[chunk]),
            widen(grad_activations[chunk]),
            needs_children,
            needs_weight,
        )
        children = () if of_children is None or of_activations is None else (of_children, of_activations)
        if children:
            children[1].masked_fill_(activations[chunk] < 0, 0)
        return children, [*([] if of_weight is None else [of_weight]), *of_betas]

    first, *others = source.chunks(len(fits))
    of_children, of_parameters = pull_back(first)
    if others and of_children:
        part, of_children = of_children, kernels.empty_child_gradients(source)
        _copy(of_children, first, part)
        del part
    for chunk in others:
        part, more = pull_back(chunk)
        _copy(of_children, chunk, part)
        of_parameters = [x + y for x, y in zip(of_parameters, more, strict=True)]
        del part, more  # before the next chunk needs memory
    none = poses.new_empty(0)
    *of_weight, grad_beta_u, grad_beta_a = of_parameters
    grad_children, grad_child_activations = of_children or (none, none.clone())
    return (
        grad_children.to(poses.dtype),
        grad_child_activations.to(activations.dtype),
        of_weight[0].to(weight.dtype) if of_weight else none.clone(),
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
        saved = ctx.saved_tensors  # asked once only: checkpointing allows no more
        *tensors, statistics, log_sums = saved[:7]
        needs = ctx.needs_input_grad
        arguments = (grad_poses, grad_activations, *tensors, saved[7:], statistics, log_sums, *ctx.options[:-1])
        arguments += (needs[0] or needs[1], needs[2], ctx.options[-1])
        grad = _backward(*arguments)
        wanted = tuple(g if need else None for g, need in zip(grad, needs, strict=False))
        return wanted + (None,) * (len(needs) - len(wanted))


_backward = differentiable_again(em_routing_backward)


def _fits(
    beta_u: Tensor, beta_a: Tensor, lambdas: Sequence[float], variance_floor: float, mean_data: float
) -> list[em_routing.Fit]:
    """An M-step for each iteration."""
    return [em_routing.Fit(widen(beta_u), widen(beta_a), x, variance_floor, mean_data) for x in lambdas]


def _empty_saved(kernels: MixtureBackend, source: VoteSource, iterations: int) -> list[Tensor]:
    """Statistics [T, ...] and log_sums [T - 1, ...], in the backend's own layout."""
    shapes = kernels.saved_shapes(source, iterations)
    return [source.poses.new_empty(shape, dtype=source.dtype) for shape in shapes]


def _saved_of(kernels: MixtureBackend, part: VoteSource, chunk: slice, saved: Sequence[Tensor]) -> Sequence[Tensor]:
    """What a chunk saves: consecutive memory, chunk after chunk, each with all its iterations."""
    images, found = len(part.poses), []
    for x, shape in zip(saved, kernels.saved_shapes(part, len(saved[0])), strict=True):
        size = math.prod(shape) // max(images, 1)  # of an image
        found.append(x.view(-1)[chunk.start * size : chunk.stop * size].view(shape))
    return found


def _copy(batch: Sequence[Tensor], chunk: slice, parts: Sequence[Tensor]) -> None:
    for whole, part in zip(batch, parts, strict=True):
        whole[chunk] = part
