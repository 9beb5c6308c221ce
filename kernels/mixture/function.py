"""A mixture routing with any fit: the iteration over the passes, as one autograd Function.

    for t = 0, ..., T - 1:
        support, mean, variance = moments of the votes, with assignments from the previous components
        components, logit = fit(support, mean, variance, parameters, t)

The backward pass needs only moments and log_sums. It calls `fit` again and differentiates it; the passes do all
computations for each vote. docs/backward.md derives the formulas.

A fit is a function (support [N, P, C], mean [N, P, 16, C], variance [N, P, 16, C], parameters, t) ->
(mean, precision [N, P, 16, C], log_weight, logit [N, P, C]) that consists of torch operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from tritoncaps.kernels.common.backends import BACKENDS
from tritoncaps.kernels.common.chunks import in_chunks
from tritoncaps.kernels.common.numerics import widen
from tritoncaps.kernels.common.operators import differentiable_again
from tritoncaps.kernels.mixture.backend import image_chunks, vote_source
from tritoncaps.kernels.mixture.passes import (
    mixture_component_gradients,
    mixture_gradients,
    mixture_moments,
    mixture_packed,
)

PullBack = Callable[[Sequence[Tensor | None]], Sequence[Tensor]]  # a gradient that is None is zero


class Fit(Protocol):
    """Computes the components of an iteration, and the logits, from the moments."""

    @property
    def scatter_floor(self) -> float:
        """Errors of support times variance much smaller than this number do not matter."""
        ...

    def __call__(
        self, support: Tensor, mean: Tensor, variance: Tensor, parameters: Sequence[Tensor], iteration: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean and precision [N, P, 16, C], log_weight and logit [N, P, C]."""
        ...

    def vjp(
        self, support: Tensor, mean: Tensor, variance: Tensor, parameters: Sequence[Tensor], iteration: int
    ) -> tuple[Sequence[Tensor], PullBack]:
        """The same, and the function that computes the gradients of moments and parameters from those of the result."""
        ...


def mixture_routing(
    fit: Fit,
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    parameters: Sequence[Tensor],
    tables: Sequence[Tensor],
    iterations: int,
    competition: str,
    gradient: str,
    backend: str,
) -> Sequence[Tensor]:
    """Mean [N, P, 16, C] in the dtype of the poses, logit [N, P, C] in the dtype of the arithmetic."""

    def route(poses: Tensor, activations: Tensor) -> Sequence[Tensor]:
        options = (tables, iterations, competition, gradient, backend)
        return MixtureFunction.apply(fit, poses, activations, weight, *options, *parameters)[:2]

    chunks = image_chunks(vote_source(poses, activations, weight, tables, competition), iterations, any_fit=True)
    return in_chunks(route, chunks, poses, activations)


class MixtureFunction(torch.autograd.Function):
    """Mean [N, P, 16, C]; in the dtype of the arithmetic: logit [N, P, C], moments of every iteration, and log_sums of
    all but the first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        fit: Fit,
        poses: Tensor,
        activations: Tensor,
        weight: Tensor,
        tables: Sequence[Tensor],
        iterations: int,
        competition: str,
        gradient: str,
        backend: str,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        wide = [widen(x) for x in parameters]
        moments, log_sums = [], []
        components: list[Tensor] = []
        votes, options = (poses, activations, weight), (tables, competition)
        with _surroundings(poses, backend):
            packed = mixture_packed(*votes, *options, backend)
            for t in range(iterations):
                *found, log_sum = mixture_moments(*votes, packed, components, *options, fit.scatter_floor, backend)
                moments += found
                log_sums += [log_sum] if t else []
                support, centre, variance = found
                mean, precision, log_weight, logit = fit(support, centre, variance, wide, t)
                components = [mean, precision, log_weight, centre]  # centre: the next mean of the votes is near it
        # copies: a fit may return one of its inputs
        return components[0].to(poses.dtype, copy=True), logit.clone(), *moments, *log_sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.fit, poses, activations, weight, tables, ctx.iterations, *ctx.options = inputs[:9]
        parameters, kept = inputs[9:], output[2:]
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.counts = len(parameters), len(kept)
        ctx.save_for_backward(poses, activations, weight, *parameters, *kept, *tables)

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor | None, grad_logit: Tensor | None, *_: Any) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad
        if grad_mean is None and grad_logit is None:
            return (None,) * len(needs)
        count, kept = ctx.counts
        saved = ctx.saved_tensors  # read only once: checkpointing does not allow more
        poses, activations, weight = saved[:3]
        parameters, rest = saved[3 : 3 + count], saved[3 + count :]
        moments, log_sums, tables = rest[: 3 * ctx.iterations], rest[3 * ctx.iterations : kept], rest[kept:]
        if grad_mean is None:
            grad_mean = torch.zeros_like(moments[1], dtype=poses.dtype)
        if grad_logit is None:
            grad_logit = torch.zeros_like(moments[0])
        competition, gradient, backend = ctx.options
        with _surroundings(poses, backend):
            grads = _backward(
                grad_mean, grad_logit, poses, activations, weight, list(parameters), list(moments), list(log_sums),
                list(tables), ctx.fit, competition, gradient, needs[1] or needs[2], needs[3], backend,
            )  # fmt: skip
        of_inputs = [None if g.numel() == 0 and not need else g for g, need in zip(grads[:3], needs[1:4], strict=True)]
        return None, *of_inputs, *(None,) * 5, *grads[3:]


def _surroundings(tensor: Tensor, backend: str) -> AbstractContextManager[Any]:
    """The context of all passes and of the fits between them: torch does not restart its threads for each fit."""
    return nullcontext() if torch.compiler.is_compiling() else BACKENDS[backend].surroundings(tensor)


def mixture_backward(
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
    competition: str,
    gradient: str,
    needs_children: bool,
    needs_weight: bool,
    backend: str,
) -> tuple[Tensor, ...]:
    """Gradients of poses, activations, weight (each empty if not needed) and of all parameters."""
    last = len(moments) // 3 - 1
    since = 0 if gradient == "all" else last  # the first iteration that gradients reach
    wide = [widen(x) for x in parameters]
    options = (tables, competition)
    votes = (poses, activations, weight, mixture_packed(poses, activations, weight, *options, backend))

    def fit_again(t: int) -> Any:
        """The components and logits of iteration t, and the function that computes the gradients of its fit."""
        support, mean, variance = moments[3 * t : 3 * t + 3]
        return fit.vjp(support, mean, variance, wide, t)

    grads: tuple[Tensor | None, ...] = widen(grad_mean), None, None, widen(grad_logit)
    pull_back = fit_again(last)[1]
    grads_of_parameters = [torch.zeros_like(x) for x in wide]
    components: list[Tensor] = []
    of_moments: list[Tensor] = []  # see `MomentGradients`
    da: list[Tensor] = []
    for t in range(last, since - 1, -1):
        gradients = pull_back(grads)
        now = [*moments[3 * t : 3 * t + 3], *gradients[:3]]
        grads_of_parameters = [x + y for x, y in zip(grads_of_parameters, gradients[3:], strict=True)]
        of_moments = [*now, *of_moments]
        if t == 0:
            break
        before, pull_back = fit_again(t - 1)
        components = [*before[:3], *components]
        if t > since:
            *of_components, da_now = mixture_component_gradients(
                *votes, list(before[:3]), log_sums[t - 1], now, *options, backend
            )
            da = [da_now, *da]
            grads = (*of_components, None)
    first = max(since, 1) - 1
    found = mixture_gradients(
        *votes, components, list(log_sums[first:]), of_moments, da, *options, needs_children, needs_weight, backend
    )
    return *found, *(x.to(p.dtype) for x, p in zip(grads_of_parameters, parameters, strict=True))


def vjp(function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> tuple[Sequence[Tensor], PullBack]:
    """`torch.func.vjp`; by autograd, in three quarters of the time, if torch neither compiles nor transforms."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        values, pull_back_all = torch.func.vjp(function, *inputs)[:2]
        return values, lambda grads: pull_back_all(tuple(with_zeros(grads, values)))
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = function(*leaves)

    def pull_back(grads: Sequence[Tensor | None]) -> Sequence[Tensor]:
        used = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if grad is not None and x.requires_grad]
        if not used:
            return [torch.zeros_like(x) for x in leaves]
        return torch.autograd.grad(
            [x for x, _ in used], leaves, [grad for _, grad in used], allow_unused=True, materialize_grads=True
        )

    return [x.detach() for x in outputs], pull_back


def with_zeros(grads: Sequence[Tensor | None], values: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradients of these values, with zeros for those that are None."""
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, values, strict=True)]


_backward = differentiable_again(mixture_backward)
