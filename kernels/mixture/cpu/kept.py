"""Plans of small calls, which later calls reuse.

Planning a small call takes longer than its kernels. A plan depends only on sizes and options, so it is made once. A
kept plan has its own memory for all tensors: a call copies its inputs there, runs the kernels, and copies the results.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncaps.kernels.common.chunks import ALL
from tritoncaps.kernels.mixture import iteration
from tritoncaps.kernels.mixture.backend import VoteSource
from tritoncaps.kernels.mixture.cpu.em_routing import (
    CPUPasses,
    empty_history,
    empty_outputs,
    has_non_finite,
    saved_shapes,
    silent_and_not_finite,
)
from tritoncaps.kernels.mixture.cpu.layout import by_iteration, edges, is_small
from tritoncaps.kernels.mixture.iteration import Fit, Gradients

MOST = 32  # plans that a thread keeps


def kept_forward(source: VoteSource, fits: Sequence[Fit], save: bool) -> tuple[Tensor, ...] | None:
    """Poses, activations, statistics and log_sums (the last two with T = 0 unless ``save``); None if the call is not
    small."""
    plan = _plan(Forward, source, fits)
    return plan and plan(source, fits, save)


def kept_backward(
    source: VoteSource, fits: Sequence[Fit], given: Sequence[Tensor], gradient: str, needs: tuple[bool, bool]
) -> Gradients | None:
    """The gradients of `iteration.backward` from ``given`` statistics, log_sums and gradients of poses and activations;
    None if the call is not small."""
    plan = _plan(Backward, source, fits, gradient, needs)
    return plan and plan(source, fits, given)


class Kept:
    """A plan with its own memory for inputs."""

    def __init__(self, source: VoteSource, fits: Sequence[Fit]) -> None:
        poses, activations, weight = source.empty([x.shape for x in source.of_images(ALL)[:3]])
        self.source = VoteSource(poses, activations, weight, source.tables, source.competition)
        self.beta_u, self.beta_a = source.empty([x.shape for x in fits[0][:2]])
        self.fits = [fit._replace(beta_u=self.beta_u, beta_a=self.beta_a) for fit in fits]
        self.take(source, fits)
        self.passes = CPUPasses(edges(*self.source))

    def take(self, source: VoteSource, fits: Sequence[Fit]) -> None:
        """Copy the inputs of a call."""
        own = self.source
        for to, x in zip(own[:3], source.of_images(ALL)[:3], strict=True):
            to.copy_(x)
        self.beta_u.copy_(fits[0].beta_u)
        self.beta_a.copy_(fits[0].beta_a)
        if has_non_finite(own.poses.sum()):
            own.poses.masked_fill_(silent_and_not_finite(own.poses, own.activations), 0)


class Forward(Kept):
    def __init__(self, source: VoteSource, fits: Sequence[Fit]) -> None:
        super().__init__(source, fits)
        self.saved, self.nothing = (self.source.empty(saved_shapes(self.source, n)) for n in (len(fits), 0))
        self.outputs = iteration.forward(self.passes, self.fits, *map(by_iteration, self.saved))

    def __call__(self, source: VoteSource, fits: Sequence[Fit], save: bool) -> tuple[Tensor, ...]:
        self.take(source, fits)
        self.passes.finish()
        return tuple(x.clone() for x in (*self.outputs, *(self.saved if save else self.nothing)))


class Backward(Kept):
    def __init__(self, source: VoteSource, fits: Sequence[Fit], gradient: str, needs: tuple[bool, bool]) -> None:
        super().__init__(source, fits)
        self.history = empty_history(self.source, *self.source.empty(saved_shapes(self.source, len(fits))))
        self.grads = empty_outputs(*source.parents, source.dtype)
        for x in (*self.history, *self.grads):
            x.zero_()  # this run only makes the plan
        self.since = iteration.first_iteration(len(fits), gradient)
        self.found = iteration.backward(self.passes, self.fits, self.history, gradient, *self.grads, *needs)[:3]

    def __call__(self, source: VoteSource, fits: Sequence[Fit], given: Sequence[Tensor]) -> Gradients:
        self.take(source, fits)
        for to, x in zip((*self.history[:2], *self.grads), given, strict=True):
            to.copy_(x)
        self.passes.finish()
        poses, activations, weight = (None if x is None else x.clone() for x in self.found)
        return poses, activations, weight, *self.passes.beta_gradients(self.history, self.since)


class _Plans(threading.local):
    """The plans of a thread, in the order of their last use."""

    def __init__(self) -> None:
        self.of_calls: dict[Any, Any] = {}


_plans = _Plans()


def _plan(kind: type[Kept], source: VoteSource, fits: Sequence[Fit], *options: Any) -> Any:
    """The plan for calls with these sizes and options, or None if they are not small."""
    plans, numbers = _plans.of_calls, tuple(fit[2:] for fit in fits)
    # a plan keeps its tables alive, so no other tables can have the same id
    sizes = id(source.tables.children), source.poses.shape, source.weight.shape, source.poses.dtype, source.competition
    key = (kind, sizes, numbers, options)
    plan = plans.pop(key, None)
    if plan is None:
        if not is_small(source.tables, source.competition, source.poses, source.weight):
            return None
        with torch.inference_mode(False), torch.no_grad():  # a later call may write to its memory in another mode
            plan = kind(source, fits, *options)
        if len(plans) >= MOST:
            del plans[next(iter(plans))]
    plans[key] = plan
    return plan
