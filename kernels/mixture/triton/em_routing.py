"""The protocol of `tritoncaps.kernels.mixture.iteration`, launched on the three views."""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncaps.kernels.common.tables import Tables
from tritoncaps.kernels.mixture.iteration import Fit, History
from tritoncaps.kernels.mixture.triton import parents
from tritoncaps.kernels.mixture.triton.launch import Edges, arithmetic, make_edges
from tritoncaps.kernels.mixture.triton.rows import TYPES, slopes_rows, statistics_rows, type_blocks
from tritoncaps.kernels.mixture.triton.views import (
    ENTRIES,
    child_assignment_gradient,
    child_log_sum,
    empty_moments,
    sum_moments,
    sweep,
)


def edges(poses: Tensor, activations: Tensor, weight: Tensor, tables: Tables, competition: str) -> Edges:
    """Pack the inputs of a call: poses [N, B, L, 16], activations [N, B, L], weight [K, B, C, 4, 4]."""
    return make_edges(
        tables,
        competition,
        arithmetic(poses, activations, weight),
        (poses.shape[0], *weight.shape[1:3]),
        poses.transpose(1, 2).contiguous(),
        weight,
        None,
        activations.transpose(1, 2).contiguous(),
    )


def statistics_shape(images: int, locations: int, types: int, dtype: torch.dtype) -> tuple[int, ...]:
    return images, locations, type_blocks(types), statistics_rows(ENTRIES), TYPES.value


def slopes_shape(images: int, locations: int, types: int, dtype: torch.dtype) -> tuple[int, ...]:
    return images, locations, type_blocks(types), slopes_rows(ENTRIES), TYPES.value


def log_sums_shape(images: int, groups: int, types: int) -> tuple[int, ...]:
    return images, groups, types


da_shape = log_sums_shape


def first_m_step(edges: Edges, fit: Fit, out: Tensor) -> None:
    """Statistics of votes that are shared equally."""
    m_step(edges, fit, None, None, out)


def em_step(edges: Edges, fit: Fit, before: Tensor, log_sum: Tensor, out: Tensor) -> None:
    """log_sum [N, G, B], and statistics of the votes with the assignments that follow from it."""
    child_log_sum(edges, before, log_sum)
    m_step(edges, fit, before, log_sum, out)


def m_step(edges: Edges, fit: Fit, before: Tensor | None, log_sum: Tensor | None, out: Tensor) -> None:
    """Statistics of the votes with weights r_ij = R_ij a_i; R is uniform if nothing came before."""
    weights = "uniform" if before is None else "assignment"
    moments = empty_moments(edges)
    sum_moments(edges, weights, moments, p_statistics=before, p_log_sum=log_sum)
    parents.fit(moments, before, fit, out)


def outputs(edges: Edges, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Poses [N, P, 16, C] and activations [N, P, C]."""
    return parents.outputs(statistics, edges.sizes["C"])


def output_slopes(edges: Edges, fit: Fit, history: History, grad_poses: Tensor, grad_activations: Tensor) -> None:
    """The slopes of the last M-step."""
    grads = {"p_grad_mean": grad_poses.contiguous(), "p_grad_activation": grad_activations.contiguous()}
    parents.slopes(history.statistics[-1], _before(history, -1), fit, history.slopes[-1], **grads)


def slopes_before(edges: Edges, fit: Fit, history: History, t: int) -> None:
    """The slopes of iteration t - 1, from the moments of iteration t's votes with weights dl_ij."""
    before, log_sum = history.statistics[t - 1], history.log_sums[t - 1]
    slopes, da, moments = history.slopes[t], history.da[t - 1], empty_moments(edges)
    child_assignment_gradient(edges, before, log_sum, slopes, da)
    sum_moments(edges, "gradient", moments, p_statistics=before, p_log_sum=log_sum, p_slopes=slopes, p_da=da)
    parents.slopes(before, _before(history, t - 1), fit, history.slopes[t - 1], p_moments=moments)


def child_and_weight_gradient(
    edges: Edges, history: History, since: int, needs_children: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dL/dM [N, B, L, 4, 4], dL/da [N, B, L] and dL/dW [K, B, C, 4, 4]; None where not needed."""
    before = max(since - 1, 0)
    return sweep(
        edges,
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


def beta_gradients(edges: Edges, history: History, since: int) -> tuple[Tensor, Tensor]:
    """dL/dbeta_u and dL/dbeta_a, [C]."""
    return parents.beta_gradients(history.slopes[since:], edges.sizes["C"])


def _before(history: History, t: int) -> Tensor | None:
    """The statistics before iteration t."""
    t %= len(history.statistics)
    return history.statistics[t - 1] if t else None
