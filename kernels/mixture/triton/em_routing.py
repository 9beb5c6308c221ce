"""The passes of EM routing: each launches kernels of the three views."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tritoncaps.kernels.mixture.iteration import Fit, History
from tritoncaps.kernels.mixture.triton import parents
from tritoncaps.kernels.mixture.triton.launch import Edges
from tritoncaps.kernels.mixture.triton.views import (
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

    def first_m_step(self, fit: Fit, out: Tensor) -> None:
        self._m_step(fit, None, None, out)

    def em_step(self, fit: Fit, before: Tensor, log_sum: Tensor, out: Tensor) -> None:
        child_log_sum(self.edges, before, log_sum)
        self._m_step(fit, before, log_sum, out)

    def _m_step(self, fit: Fit, before: Tensor | None, log_sum: Tensor | None, out: Tensor) -> None:
        """Statistics of the votes with weights r_ij = R_ij a_i; R is uniform if ``before`` is None."""
        weights = "uniform" if before is None else "assignment"
        moments = empty_moments(self.edges)
        sum_moments(self.edges, weights, moments, p_statistics=before, p_log_sum=log_sum)
        parents.fit(moments, before, fit, out)

    def outputs(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        return parents.outputs(statistics, self.edges.sizes["C"])

    def output_slopes(self, fit: Fit, history: History, grad_poses: Tensor, grad_activations: Tensor) -> None:
        grads = {"p_grad_mean": grad_poses.contiguous(), "p_grad_activation": grad_activations.contiguous()}
        parents.slopes(history.statistics[-1], _before(history, -1), fit, history.slopes[-1], **grads)

    def slopes_before(self, fit: Fit, history: History, t: int) -> None:
        """da of iteration t; the slopes of iteration t - 1 from the moments of the votes with weights dl_ij."""
        before, log_sum = history.statistics[t - 1], history.log_sums[t - 1]
        slopes, da, moments = history.slopes[t], history.da[t - 1], empty_moments(self.edges)
        child_assignment_gradient(self.edges, before, log_sum, slopes, da)
        given: dict[str, Any] = {"p_statistics": before, "p_log_sum": log_sum, "p_slopes": slopes, "p_da": da}
        sum_moments(self.edges, "gradient", moments, **given)
        parents.slopes(before, _before(history, t - 1), fit, history.slopes[t - 1], p_moments=moments)

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
