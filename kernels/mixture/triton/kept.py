"""Plans of EM routing, which later calls reuse: see `kernels.common.triton.plans`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncaps.kernels.common.chunks import ALL
from tritoncaps.kernels.common.triton.pairs import once
from tritoncaps.kernels.common.triton.plans import Plan, may_keep_plans, recorded
from tritoncaps.kernels.mixture import iteration
from tritoncaps.kernels.mixture.backend import VoteSource, image_chunks
from tritoncaps.kernels.mixture.iteration import Fit, Gradients
from tritoncaps.kernels.mixture.triton import parents
from tritoncaps.kernels.mixture.triton.em_routing import TritonPasses, edges_of, empty_history, pack, saved_shapes

MOST = 64  # plans of a routing map


def kept_forward(source: VoteSource, fits: Sequence[Fit], save: bool) -> tuple[Tensor, ...] | None:
    """Poses, activations, statistics and log_sums (the last two with T = 0 unless ``save``); None if no plan serves
    such a call."""
    plan = _plan(_forward, source, fits, save)
    if plan is None:
        return None
    found = plan([*pack(source.of_images(ALL)), *fits[0][:2]])
    return (*found,) if save else (*found, *source.empty(saved_shapes(source, 0)))


def kept_backward(
    source: VoteSource, fits: Sequence[Fit], given: Sequence[Tensor], gradient: str, needs: tuple[bool, bool]
) -> Gradients | None:
    """The gradients of `iteration.backward` from ``given`` statistics, log_sums and gradients of poses and activations;
    None if no plan serves such a call."""
    statistics, log_sums, *grads = given
    plan = None if statistics.data_ptr() % 16 else _plan(_backward, source, fits, gradient, needs)  # must be aligned
    if plan is None:
        return None
    grads = [grad.to(source.dtype).contiguous() for grad in grads]
    slopes, *found = plan([*pack(source.of_images(ALL)), *fits[0][:2], statistics, log_sums, *grads])
    children = (found[0], found[1]) if needs[0] else (None, None)
    since = iteration.first_iteration(len(fits), gradient)
    return *children, found[-1] if needs[1] else None, *parents.beta_gradients(slopes[since:], source.parents[2])


def _forward(source: VoteSource, fits: Sequence[Fit], save: bool) -> Plan:
    """Inputs: poses, weight, activations as in `pack`, beta_u, beta_a. Results: poses and activations of the parents
    and, if ``save``, statistics and log_sums."""
    inputs, passes, fits = _empty_inputs(source, fits)
    saved = source.empty(saved_shapes(source, len(fits)))
    with recorded() as launches:
        outputs = iteration.forward(passes, fits, *saved)
    return Plan(launches, inputs, [*outputs, *(saved if save else ())], source.tables)


def _backward(source: VoteSource, fits: Sequence[Fit], gradient: str, needs: tuple[bool, bool]) -> Plan:
    """Inputs: those of `_forward`, statistics, log_sums, gradients of poses and activations of the parents. Results:
    slopes, then the gradients of poses, activations and weight that are needed."""
    inputs, passes, fits = _empty_inputs(source, fits)
    history = empty_history(source, *source.empty(saved_shapes(source, len(fits))))
    N, P, C = source.parents
    grad_poses, grad_activations = source.empty([(N, P, parents.ENTRIES.value, C), (N, P, C)])
    with recorded() as launches:
        found = iteration.backward(passes, fits, history, gradient, grad_poses, grad_activations, *needs)
    results = [history.slopes, *(x for x in found[:3] if x is not None)]
    return Plan(launches, [*inputs, *history[:2], grad_poses, grad_activations], results, source.tables)


def _empty_inputs(source: VoteSource, fits: Sequence[Fit]) -> tuple[list[Tensor], TritonPasses, list[Fit]]:
    """Tensors like the inputs of a call, each with memory of its own, and the passes and fits of such a call."""
    packed = [torch.empty_like(x) for x in pack(source.of_images(ALL))]
    beta_u, beta_a = (torch.empty_like(x) for x in fits[0][:2])
    fits = [fit._replace(beta_u=beta_u, beta_a=beta_a) for fit in fits]
    return [*packed, beta_u, beta_a], TritonPasses(edges_of(source, packed)), fits


def _plan(make: Callable[..., Plan], source: VoteSource, fits: Sequence[Fit], *options: Any) -> Plan | None:
    """The plan for calls with these sizes and options; None if launches must be run one by one, or if the batch has
    several chunks."""
    if not may_keep_plans():
        return None
    plans: dict[Any, Plan] = once(source.tables, "plans", dict)  # kept as long as the tables
    shapes, dtypes = [x.shape for x in source[:3]], [x.dtype for x in (*source[:3], *fits[0][:2])]
    addresses = [x.data_ptr() for x in source.tables]  # which launches contain
    key = make, source.competition, *[fit[2:] for fit in fits], options, *shapes, *dtypes, *addresses
    plan = plans.get(key)
    if plan is None and len(image_chunks(source, len(fits))) == 1:
        if len(plans) >= MOST:
            plans.clear()
        plan = plans[key] = make(source, fits, *options)
    return plan
