"""The passes of EM routing: each launches kernels of the three views."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tritoncaps.kernels.mixture.backend import VoteSource
from tritoncaps.kernels.mixture.iteration import Fit, History
from tritoncaps.kernels.mixture.triton import parents
from tritoncaps.kernels.mixture.triton.launch import Edges, arithmetic, make_edges
from tritoncaps.kernels.mixture.triton.rows import (
    TYPES,
    groups_shape,
    pack_weight,
    slopes_rows,
    statistics_rows,
    type_blocks,
)
from tritoncaps.kernels.mixture.triton.views import (
    ENTRIES,
    child_assignment_gradient,
    child_log_sum,
    empty_moments,
    sum_moments,
    sweep,
)


class TritonPasses:
    """Implements `kernels.mixture.iteration.EMPasses`: every method launches its kernels immediately."""

    def __init__(self, edges: Edges) -> None:
        self.edges = edges

    @cached_property
    def moments(self) -> Tensor:
        """The parent view's result, which the next launch reads: all passes use the same memory."""
        return empty_moments(self.edges)

    def first_m_step(self, fit: Fit, out: Tensor) -> None:
        self._m_step(fit, None, None, out)

    def em_step(self, fit: Fit, before: Tensor, log_sum: Tensor, out: Tensor) -> None:
        child_log_sum(self.edges, before, log_sum)
        self._m_step(fit, before, log_sum, out)

    def _m_step(self, fit: Fit, before: Tensor | None, log_sum: Tensor | None, out: Tensor) -> None:
        """Statistics of the votes with weights r_ij = R_ij a_i; R is uniform if ``before`` is None."""
        weights = "uniform" if before is None else "assignment"
        sum_moments(self.edges, weights, self.moments, p_statistics=before, p_log_sum=log_sum)
        parents.fit(self.moments, before, fit, out)

    def outputs(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        return parents.outputs(statistics, self.edges.sizes["C"])

    def output_slopes(self, fit: Fit, history: History, grad_poses: Tensor, grad_activations: Tensor) -> None:
        grads = {"p_grad_mean": grad_poses.contiguous(), "p_grad_activation": grad_activations.contiguous()}
        parents.slopes(history.statistics[-1], _before(history, -1), fit, history.slopes[-1], **grads)

    def slopes_before(self, fit: Fit, history: History, t: int) -> None:
        """da of iteration t; the slopes of iteration t - 1 from the moments of the votes with weights dl_ij."""
        before, log_sum = history.statistics[t - 1], history.log_sums[t - 1]
        slopes, da = history.slopes[t], history.da[t - 1]
        child_assignment_gradient(self.edges, before, log_sum, slopes, da)
        given: dict[str, Any] = {"p_statistics": before, "p_log_sum": log_sum, "p_slopes": slopes, "p_da": da}
        sum_moments(self.edges, "gradient", self.moments, **given)
        parents.slopes(before, _before(history, t - 1), fit, history.slopes[t - 1], p_moments=self.moments)

    def child_and_weight_gradient(
        self, history: History, since: int, needs_children: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        before = max(since - 1, 0)
        return sweep(
            self.edges,
            needs_children,
            needs_weight,
            p_statistics=history.statistics[before:],
            p_slopes=history.slopes[since:],
            p_log_sums=history.log_sums[before:],
            p_da=history.da[before:],
            T=len(history.statistics),
            ALL=since == 0,
            ANY_FIT=False,
        )

    def finish(self) -> None:
        """Nothing to do: all kernels are launched, and the device runs them in order."""

    def beta_gradients(self, history: History, since: int) -> tuple[Tensor, Tensor]:
        return parents.beta_gradients(history.slopes[since:], self.edges.sizes["C"])


def _before(history: History, t: int) -> Tensor | None:
    """The statistics of iteration t - 1, or None if t is the first iteration."""
    t %= len(history.statistics)
    return history.statistics[t - 1] if t else None


def pack(source: VoteSource) -> tuple[Tensor, Tensor, Tensor]:
    """Poses [N, L, B, 16], weight [K, B, blocks, 16, 16] and activations [N, L, B], which kernels read."""
    poses, activations = source.poses.transpose(1, 2), source.activations.transpose(1, 2)
    return poses.contiguous(), pack_weight(source.weight), activations.contiguous()


def edges_of(source: VoteSource, packed: Sequence[Tensor]) -> Edges:
    """The inputs of a call, as in `pack`."""
    poses, weight, activations = packed
    dtype, sizes = arithmetic(*source[:3]), (poses.shape[0], *source.weight.shape[1:3])
    return make_edges(source.tables, source.competition, dtype, sizes, poses, weight, None, activations)


def saved_shapes(source: VoteSource, iterations: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of statistics [T, ...] and log_sums [T - 1, ...]."""
    statistics = iterations, *statistics_shape(*source.parents)
    return statistics, (max(iterations - 1, 0), *log_sum_shape(source))


def log_sum_shape(source: VoteSource) -> tuple[int, ...]:
    N, B, _ = source.activations.shape
    return groups_shape(N, source.groups, B, source.weight.shape[2], source.competition == "positions")


def empty_history(source: VoteSource, statistics: Tensor, log_sums: Tensor) -> History:
    """A history with these tensors, and with memory for slopes and da."""
    (slopes,) = source.empty([(len(statistics), *slopes_shape(*source.parents))])
    return History(statistics, log_sums, slopes, torch.empty_like(log_sums))


def statistics_shape(images: int, locations: int, types: int) -> tuple[int, ...]:
    return images, locations, type_blocks(types), statistics_rows(ENTRIES), TYPES.value


def slopes_shape(images: int, locations: int, types: int) -> tuple[int, ...]:
    return images, locations, type_blocks(types), slopes_rows(ENTRIES), TYPES.value
