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
from tritoncaps.kernels.common.numerics import least_support, widen
from tritoncaps.kernels.common.operators import differentiable_again
from tritoncaps.kernels.mixture.backend import image_chunks, vote_source
from tritoncaps.kernels.mixture.passes import mixture_component_gradients, mixture_gradients, mixture_moments

PullBack = Callable[[Sequence[Tensor]], Sequence[Tensor]]


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
        with _surroundings(poses, backend):
            for t in range(iterations):
                *found, log_sum = mixture_moments(
                    poses, activations, weight, components, tables, competition, fit.scatter_floor, backend
                )
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
    votes = (poses, activations, weight)
    options = (tables, competition)

    def fit_again(t: int) -> Any:
        """The components and logits of iteration t, and the function that computes the gradients of its fit."""
        support, mean, variance = moments[3 * t : 3 * t + 3]
        return fit.vjp(support, mean, variance, wide, t)

    (_, precision, log_weight, _), pull_back = fit_again(last)
    grads = (widen(grad_mean), torch.zeros_like(precision), torch.zeros_like(log_weight), widen(grad_logit))
    grads_of_parameters = [torch.zeros_like(x) for x in wide]
    components: list[Tensor] = []
    slopes: list[Tensor] = []
    da: list[Tensor] = []
    for t in range(last, since - 1, -1):
        grad_support, grad_of_mean, grad_of_variance, *of_parameters = pull_back(grads)
        grads_of_parameters = [x + y for x, y in zip(grads_of_parameters, of_parameters, strict=True)]
        support, mean, variance = moments[3 * t : 3 * t + 3]
        now = slopes_of(support, mean, variance, grad_support, grad_of_mean, grad_of_variance)
        slopes = [*now, *slopes]
        if t == 0:
            break
        before, pull_back = fit_again(t - 1)
        components = [*before[:3], *components]
        if t > since:
            *of_components, da_now = mixture_component_gradients(
                *votes, list(before[:3]), log_sums[t - 1], list(now), *options, backend
            )
            da = [da_now, *da]
            grads = (*of_components, torch.zeros_like(before[3]))
    first = max(since, 1) - 1
    found = mixture_gradients(
        *votes, components, list(log_sums[first:]), slopes, da, *options, needs_children, needs_weight, backend
    )
    return *found, *(x.to(p.dtype) for x, p in zip(grads_of_parameters, parameters, strict=True))


def vjp(function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> tuple[Sequence[Tensor], PullBack]:
    """`torch.func.vjp`; by autograd, in three quarters of the time, if torch neither compiles nor transforms."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return torch.func.vjp(function, *inputs)[:2]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = function(*leaves)

    def pull_back(grads: Sequence[Tensor]) -> Sequence[Tensor]:
        used = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if x.requires_grad]
        return torch.autograd.grad(
            [x for x, _ in used], leaves, [grad for _, grad in used], allow_unused=True, materialize_grads=True
        )

    return [x.detach() for x in outputs], pull_back


def slopes_of(
    support: Tensor, mean: Tensor, variance: Tensor, grad_support: Tensor, grad_mean: Tensor, grad_variance: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """offset, linear, quadratic and centre (see `backend.Slopes`) from the gradients of a parent's moments."""
    inverse = 1 / support.masked_fill(support <= least_support(support.dtype), 1)  # nan stays nan
    linear, quadratic = grad_mean * inverse[:, :, None], grad_variance * inverse[:, :, None]
    return grad_support - (quadratic * variance).sum(2), linear, quadratic, mean


_backward = differentiable_again(mixture_backward)
