"""The passes of EM routing: each adds kernels to the plan of a call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tritoncaps.kernels.common.numerics import POSE, widen
from tritoncaps.kernels.mixture.backend import VoteSource
from tritoncaps.kernels.mixture.cpu.gradient import child_and_weight_gradient
from tritoncaps.kernels.mixture.cpu.layout import (
    Call,
    Slope,
    da_shape,
    edges,
    keep_weights,
    log_sums_shape,
    slopes_shape,
    statistics_shape,
)
from tritoncaps.kernels.mixture.cpu.parent_view import (
    add_m_step,
    add_output_slopes,
    add_outputs,
    add_slopes_before,
)
from tritoncaps.kernels.mixture.iteration import Fit, History


class CPUPasses:
    """Implements `kernels.mixture.iteration.EMPasses`: the methods plan kernels, and `finish` runs them."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def first_m_step(self, fit: Fit, out: Any) -> None:
        add_m_step(self.call, fit, None, out[:0], out)

    def em_step(self, fit: Fit, before: Any, log_sum: Any, out: Any) -> None:
        add_m_step(self.call, fit, before, log_sum, out)

    def outputs(self, statistics: Any) -> tuple[Tensor, Tensor]:
        e = self.call.edges
        poses, activations = empty_outputs(e.images, e.parents_count, e.parent_types, self.call.dtype)
        add_outputs(self.call, poses, activations, statistics)
        return poses, activations

    def output_slopes(self, fit: Fit, history: History, grad_poses: Tensor, grad_activations: Tensor) -> None:
        add_output_slopes(self.call, fit, history, grad_poses, grad_activations)

    def slopes_before(self, fit: Fit, history: History, t: int) -> None:
        if not self.call.weights:
            keep_weights(self.call, len(history.da))
        add_slopes_before(self.call, fit, history, t)

    def child_and_weight_gradient(
        self, history: History, since: int, needs_children: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return child_and_weight_gradient(self.call, history, since, needs_children, needs_weight)

    def finish(self) -> None:
        self.call.plan.run()

    def beta_gradients(self, history: History, since: int) -> tuple[Tensor, Tensor]:
        rows = history.slopes[since:, ..., Slope.BETA_U : Slope.BETA_A + 1, :].sum(dim=(0, 1, 2))  # [blocks, 2, lanes]
        types = self.call.edges.parent_types
        # copies: outputs of an operator must not share memory
        return rows[:, 0].flatten()[:types].clone(), rows[:, 1].flatten()[:types].clone()


def pack(source: VoteSource) -> Call:
    """The inputs as kernels read them. A child with activation zero has no effect, even if its pose is inf or nan."""
    poses, activations, weight = widen(source.poses), widen(source.activations), widen(source.weight)
    if has_non_finite(poses.sum()):
        poses = without_silent(poses, activations)
    return edges(poses, activations, weight, source.tables, source.competition)


def has_non_finite(sum_of_poses: Tensor) -> bool:
    """True if a pose is inf or nan, or in rare cases if the sum overflows: one sum is a quick test."""
    return not math.isfinite(sum_of_poses.item())


def without_silent(poses: Tensor, activations: Tensor) -> Tensor:
    """A copy of the poses, with zeros instead of inf and nan in children whose activation is zero."""
    return poses.masked_fill(silent_and_not_finite(poses, activations), 0)


def silent_and_not_finite(poses: Tensor, activations: Tensor) -> Tensor:
    return (activations == 0)[..., None] & ~poses.isfinite()


def empty_outputs(
    N: int, P: int, C: int, dtype: torch.dtype, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Poses [N, P, 16, C] and activations [N, P, C]; in memory, types are slower than locations. They are not
    views, because users could not change a view from an operator in place."""
    poses = torch.empty_permuted((N, P, POSE, C), (0, 3, 1, 2), dtype=dtype, device=device)
    return poses, torch.empty_permuted((N, P, C), (0, 2, 1), dtype=dtype, device=device)


def saved_shapes(source: VoteSource, iterations: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of statistics [T, ...] and log_sums [T - 1, ...]."""
    statistics = iterations, *statistics_shape(*source.parents, source.dtype)
    return statistics, (max(iterations - 1, 0), *log_sums_shape(source))


def empty_history(source: VoteSource, statistics: Tensor, log_sums: Tensor) -> History:
    """A history with these tensors, and with memory for slopes and da."""
    slopes = statistics.new_empty(len(statistics), *slopes_shape(*source.parents, source.dtype))
    da = statistics.new_empty(len(log_sums), *da_shape(source))
    return History(statistics, log_sums, slopes, da)
