"""What is per parent and not per edge: an M-step's last lines, their gradients, and the outputs.

These kernels are the second pass of the parent view: they add up its splits, always in the same order. A program owns
BLOCK parents, of whole blocks of 16 types, and all their H pose entries, in tiles [BLOCK, 16].

Rows of statistics, slopes and moments are those of `rows.py`; views read them as they are. docs/backward.md derives the
formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tritoncaps.kernels.common.numerics import least_support
from tritoncaps.kernels.common.triton import plans
from tritoncaps.kernels.common.triton.launching import OPTIONS, UNALIGNED, blocks
from tritoncaps.kernels.mixture.iteration import Fit
from tritoncaps.kernels.mixture.triton.config import PARENT_WARPS, PARENTS
from tritoncaps.kernels.mixture.triton.costs import parent_metadata
from tritoncaps.kernels.mixture.triton.rows import (
    CONSTANT,
    ENTRIES,
    FIRST,
    LINEAR,
    LOG_VARIANCE,
    LOGIT,
    MEAN,
    OFFSET,
    SUPPORT,
    TO_BETA_A,
    TO_BETA_U,
    TOTAL,
    TYPES,
    type_blocks,
    unpack,
)

LOG_2_PI = tl.constexpr(math.log(2 * math.pi))


@triton.jit(
    launch_metadata=parent_metadata,
    do_not_specialize=["rows", "splits", "C"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def fit_kernel(
    p_moments,
    p_before,
    p_beta_u,
    p_beta_a,
    p_out,
    inverse_temperature: tl.float64,
    variance_floor: tl.float64,
    mean_data: tl.float64,
    rows,
    splits,
    H: tl.constexpr,
    C,
    LEAST_SUPPORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The statistics of every parent, from the moments of d = V - mean before, taken by split k about its mean m_k.

    S = sum_k S_k,  m = sum_k S_k m_k / S,  variance = max(sum_k [second_k + S_k (m_k - m)^2] / S, floor)
    mean = mean before + m;  zero if S is too small to divide by
    logit = inverse_temperature (beta_a - S / mean_data sum_h (beta_u + 1/2 log variance_h))

    p_moments; p_before and p_out, which are statistics; p_before None: then d = V; p_beta_u, p_beta_a [C].
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    o_block, o_lane, o_c, _, m_j, m_real = parent_tile(rows, C, BLOCK)
    p_moments += o_block * (FIRST + 2 * H) * TYPES + o_lane
    o_rows = o_block * (MEAN + 2 * H) * TYPES + o_lane
    step = rows.to(tl.int64) * tl.cdiv(C, TYPES) * (FIRST + 2 * H) * TYPES  # to the next split

    b_floor = tl.full((1, 1), variance_floor, DTYPE)
    b_log_variance = tl.zeros((BLOCK, ENTRIES), DTYPE)
    for i_h in tl.static_range(0, H, ENTRIES):
        o_h, m_h = entry_tile(i_h, H, m_real)
        b_support, b_m, b_second = merge_splits(p_moments, step, splits, o_h, m_real, m_h, H, BLOCK, DTYPE)
        m_empty = b_support <= LEAST_SUPPORT  # false for nan
        b_inverse = 1.0 / tl.where(m_empty, 1.0, b_support)
        b_variance = tl.maximum(b_second * b_inverse, b_floor, propagate_nan=tl.PropagateNan.ALL)
        b_log_variance += tl.where(m_h, tl.log(b_variance), 0.0)
        b_mean = b_m
        if p_before is not None:
            b_mean += tl.load(p_before + o_rows + (MEAN + o_h) * TYPES, mask=m_h, other=0.0).to(DTYPE)
        b_mean = tl.where(m_empty, b_m * 0.0, b_mean)  # nan stays
        b_precision = tl.where(m_h, 0.5 / b_variance, 0.0)
        m_entry = m_j & (o_h < H)
        tl.store(p_out + o_rows + (MEAN + o_h) * TYPES, b_mean, mask=m_entry)
        tl.store(p_out + o_rows + (MEAN + H + o_h) * TYPES, b_precision, mask=m_entry)

    b_log_variance = tl.sum(b_log_variance, axis=1, keep_dims=True)
    b_cost = cost_of_datum(b_log_variance, p_beta_u, o_c, m_real, H, DTYPE) * b_support
    b_cost /= tl.full((1, 1), mean_data, DTYPE)
    b_beta_a = tl.load(p_beta_a + o_c, mask=m_real, other=0.0).to(DTYPE)
    b_logit = tl.full((1, 1), inverse_temperature, DTYPE) * (b_beta_a - b_cost)
    b_log_a = tl.minimum(b_logit, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(b_logit)))
    b_constant = b_log_a - 0.5 * (b_log_variance + tl.full((1, 1), H * LOG_2_PI, DTYPE))
    p_out += o_rows
    tl.store(p_out + CONSTANT * TYPES, tl.where(m_real, b_constant, float("-inf")), mask=m_j)
    tl.store(p_out + LOGIT * TYPES, b_logit, mask=m_j)
    tl.store(p_out + SUPPORT * TYPES, b_support, mask=m_j)
    tl.store(p_out + LOG_VARIANCE * TYPES, b_log_variance, mask=m_j)


@triton.jit(
    launch_metadata=parent_metadata,
    do_not_specialize=["rows", "splits", "C"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def slopes_kernel(
    p_moments,
    p_grad_mean,
    p_grad_variance,
    p_grad_logit,
    p_grad_activation,
    p_statistics,
    p_before,
    p_beta_u,
    p_out,
    inverse_temperature: tl.float64,
    variance_floor: tl.float64,
    mean_data: tl.float64,
    rows,
    splits,
    H: tl.constexpr,
    C,
    LEAST_SUPPORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The slopes of an M-step, from the gradients g of what it found, and shift = mean before - mean.

    gcost     = -inverse_temperature glogit / mean_data
    gv        = gvariance + gcost S / (2 variance), or zero where the variance is at the floor
    linear    = gmean / S,  quadratic = gv / S
    offset    = gcost sum_h (beta_u + 1/2 log variance_h) - sum_h quadratic_h variance_h
    to beta_u: H gcost S;  to beta_a: inverse_temperature glogit

    The gradients: from the moments m0, m1, m2 of dl in the iteration after,

    gmean = m1 / variance,  gvariance = 1/2 (m2 / variance - m0) / variance,  glogit = m0 (1 - a);

    or given, with zero for p_grad_variance None, and glogit = gactivation a (1 - a) if p_grad_logit is None.

    p_moments or None; p_grad_mean, p_grad_variance [rows, H, C], p_grad_logit, p_grad_activation [rows, C];
    p_statistics and p_before, which are statistics; p_before None: the shift is zero; p_beta_u [C]; p_out: slopes.
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    o_block, o_lane, o_c, o_j, m_j, m_real = parent_tile(rows, C, BLOCK)
    o_rows = o_block * (MEAN + 2 * H) * TYPES + o_lane
    p_statistics += o_rows
    p_out += o_block * (LINEAR + 3 * H) * TYPES + o_lane
    step = rows.to(tl.int64) * tl.cdiv(C, TYPES) * (FIRST + 2 * H) * TYPES  # to the next split
    b_logit = tl.load(p_statistics + LOGIT * TYPES, mask=m_real, other=0.0)
    b_support = tl.load(p_statistics + SUPPORT * TYPES, mask=m_real, other=0.0)
    b_log_variance = tl.load(p_statistics + LOG_VARIANCE * TYPES, mask=m_real, other=0.0)

    if p_moments is not None:
        p_moments += o_block * (FIRST + 2 * H) * TYPES + o_lane
        b_m0 = add_splits(p_moments + TOTAL * TYPES, step, splits, m_real, DTYPE)
        b_glogit = b_m0 * sigmoid(-b_logit)
    elif p_grad_logit is not None:
        b_glogit = tl.load(p_grad_logit + o_j * C + o_c, mask=m_real, other=0.0).to(DTYPE)
    else:
        b_glogit = tl.load(p_grad_activation + o_j * C + o_c, mask=m_real, other=0.0).to(DTYPE)
        b_glogit *= sigmoid(b_logit) * sigmoid(-b_logit)

    b_gbeta_a = tl.full((1, 1), inverse_temperature, DTYPE) * b_glogit
    b_gcost = -b_gbeta_a / tl.full((1, 1), mean_data, DTYPE)
    b_inverse = 1.0 / tl.where(b_support <= LEAST_SUPPORT, 1.0, b_support)
    b_limit = 0.5 / tl.full((1, 1), variance_floor, DTYPE)  # the precision of a variance at the floor
    b_sum = tl.zeros((BLOCK, ENTRIES), DTYPE)
    for i_h in tl.static_range(0, H, ENTRIES):
        o_h, m_h = entry_tile(i_h, H, m_real)
        m_entry = m_j & (o_h < H)
        b_precision = tl.load(p_statistics + (MEAN + H + o_h) * TYPES, mask=m_h, other=1.0)
        if p_moments is not None:
            b_m1 = add_splits(p_moments + (FIRST + o_h) * TYPES, step, splits, m_h, DTYPE)
            b_m2 = add_splits(p_moments + (FIRST + H + o_h) * TYPES, step, splits, m_h, DTYPE)
            b_gmean = 2 * b_precision * b_m1
            b_gvariance = b_precision * (2 * b_precision * b_m2 - b_m0)
        else:
            o_entry = (o_j * H + o_h) * C + o_c
            b_gmean = tl.load(p_grad_mean + o_entry, mask=m_h, other=0.0).to(DTYPE)
            b_gvariance = tl.zeros((BLOCK, ENTRIES), DTYPE)
            if p_grad_variance is not None:
                b_gvariance += tl.load(p_grad_variance + o_entry, mask=m_h, other=0.0).to(DTYPE)
        b_gvariance += b_gcost * b_support * b_precision
        b_quadratic = tl.where(b_precision < b_limit, b_gvariance * b_inverse, 0.0)
        b_sum += tl.where(m_h, b_quadratic * (0.5 / b_precision), 0.0)
        tl.store(p_out + (LINEAR + o_h) * TYPES, b_gmean * b_inverse, mask=m_entry)
        tl.store(p_out + (LINEAR + H + o_h) * TYPES, b_quadratic, mask=m_entry)
        b_shift = tl.zeros((BLOCK, ENTRIES), DTYPE)
        if p_before is not None:
            b_before = tl.load(p_before + o_rows + (MEAN + o_h) * TYPES, mask=m_h, other=0.0)
            b_shift = b_before - tl.load(p_statistics + (MEAN + o_h) * TYPES, mask=m_h, other=0.0)
        tl.store(p_out + (LINEAR + 2 * H + o_h) * TYPES, b_shift, mask=m_entry)

    b_offset = b_gcost * cost_of_datum(b_log_variance, p_beta_u, o_c, m_real, H, DTYPE)
    tl.store(p_out + OFFSET * TYPES, b_offset - tl.sum(b_sum, axis=1, keep_dims=True), mask=m_j)
    tl.store(p_out + TO_BETA_U * TYPES, H * b_gcost * b_support, mask=m_j)
    tl.store(p_out + TO_BETA_A * TYPES, b_gbeta_a, mask=m_j)


@triton.jit(launch_metadata=parent_metadata, do_not_specialize=["rows", "splits", "C"])
def moments_kernel(
    p_moments,
    p_before,
    p_support,
    p_mean,
    p_variance,
    rows,
    splits,
    C,
    LEAST_SUPPORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Support, mean and variance of every parent's votes, from what the splits found of d = V - mean before.

    As in `fit_kernel`, but nothing is clamped: an own fit follows.

    p_moments; p_before, which is statistics, or None: then d = V; p_support [rows, C]; p_mean and p_variance
    [rows, 16, C].
    """
    DTYPE: tl.constexpr = p_support.dtype.element_ty
    H: tl.constexpr = ENTRIES
    o_block, o_lane, o_c, o_j, _, m_real = parent_tile(rows, C, BLOCK)
    o_h, m_h = entry_tile(0, H, m_real)
    p_moments += o_block * (FIRST + 2 * H) * TYPES + o_lane
    step = rows.to(tl.int64) * tl.cdiv(C, TYPES) * (FIRST + 2 * H) * TYPES
    b_support, b_mean, b_second = merge_splits(p_moments, step, splits, o_h, m_real, m_h, H, BLOCK, DTYPE)
    m_empty = b_support <= LEAST_SUPPORT
    if p_before is not None:
        p_before += o_block * (MEAN + 2 * H) * TYPES + o_lane
        b_mean += tl.load(p_before + (MEAN + o_h) * TYPES, mask=m_h, other=0.0)
    o_entry = (o_j * H + o_h) * C + o_c
    tl.store(p_support + o_j * C + o_c, b_support, mask=m_real)
    tl.store(p_mean + o_entry, tl.where(m_empty, b_mean * 0.0, b_mean), mask=m_h)
    tl.store(p_variance + o_entry, b_second / tl.where(m_empty, 1.0, b_support), mask=m_h)


@triton.jit(launch_metadata=parent_metadata, do_not_specialize=["rows", "splits", "C"])
def component_gradients_kernel(
    p_moments,
    p_statistics,
    p_grad_mean,
    p_grad_precision,
    p_grad_log_weight,
    rows,
    splits,
    C,
    BLOCK: tl.constexpr,
):
    """Gradients of a parent's components, from the moments m0, m1, m2 of dl in the iteration after.

    gmean = m1 / variance,  gprecision = -1/2 m2,  glog_weight = m0

    p_moments, p_statistics; p_grad_mean, p_grad_precision [rows, 16, C], p_grad_log_weight [rows, C].
    """
    DTYPE: tl.constexpr = p_grad_mean.dtype.element_ty
    H: tl.constexpr = ENTRIES
    o_block, o_lane, o_c, o_j, _, m_real = parent_tile(rows, C, BLOCK)
    o_h, m_h = entry_tile(0, H, m_real)
    p_moments += o_block * (FIRST + 2 * H) * TYPES + o_lane
    step = rows.to(tl.int64) * tl.cdiv(C, TYPES) * (FIRST + 2 * H) * TYPES
    b_m1 = add_splits(p_moments + (FIRST + o_h) * TYPES, step, splits, m_h, DTYPE)
    b_m2 = add_splits(p_moments + (FIRST + H + o_h) * TYPES, step, splits, m_h, DTYPE)
    p_statistics += o_block * (MEAN + 2 * H) * TYPES + o_lane
    b_precision = tl.load(p_statistics + (MEAN + H + o_h) * TYPES, mask=m_h, other=0.0)
    o_entry = (o_j * H + o_h) * C + o_c
    tl.store(p_grad_mean + o_entry, 2 * b_precision * b_m1, mask=m_h)
    tl.store(p_grad_precision + o_entry, -0.5 * b_m2, mask=m_h)
    b_m0 = add_splits(p_moments + TOTAL * TYPES, step, splits, m_real, DTYPE)
    tl.store(p_grad_log_weight + o_j * C + o_c, b_m0, mask=m_real)


@triton.jit(launch_metadata=parent_metadata, do_not_specialize=["rows", "C"], do_not_specialize_on_alignment=UNALIGNED)
def components_kernel(p_mean, p_precision, p_log_weight, p_out, rows, C, BLOCK: tl.constexpr):
    """The statistics that views read, of given components; for them precision is 1 / (2 variance).

    p_mean, p_precision [rows, 16, C], p_log_weight [rows, C]; p_out: statistics.
    """
    o_block, o_lane, o_c, o_j, m_j, m_real = parent_tile(rows, C, BLOCK)
    o_h, m_h = entry_tile(0, ENTRIES, m_real)
    o_entry = (o_j * ENTRIES + o_h) * C + o_c
    p_out += o_block * (MEAN + 2 * ENTRIES) * TYPES + o_lane
    tl.store(p_out + (MEAN + o_h) * TYPES, tl.load(p_mean + o_entry, mask=m_h, other=0.0), mask=m_j)
    b_precision = 0.5 * tl.load(p_precision + o_entry, mask=m_h, other=0.0)
    tl.store(p_out + (MEAN + ENTRIES + o_h) * TYPES, b_precision, mask=m_j)
    b_constant = tl.load(p_log_weight + o_j * C + o_c, mask=m_real, other=float("-inf"))
    tl.store(p_out + CONSTANT * TYPES, b_constant, mask=m_j)


@triton.jit(launch_metadata=parent_metadata, do_not_specialize=["rows", "C"], do_not_specialize_on_alignment=UNALIGNED)
def given_slopes_kernel(p_offset, p_linear, p_quadratic, p_centre, p_out, rows, C, BLOCK: tl.constexpr):
    """The slopes that views read, of given ones; their origin is the centre.

    p_offset [rows, C], p_linear, p_quadratic, p_centre [rows, 16, C]; p_out: slopes.
    """
    o_block, o_lane, o_c, o_j, m_j, m_real = parent_tile(rows, C, BLOCK)
    o_h, m_h = entry_tile(0, ENTRIES, m_real)
    o_entry = (o_j * ENTRIES + o_h) * C + o_c
    p_out += o_block * (LINEAR + 3 * ENTRIES) * TYPES + o_lane
    p_row = p_out + (LINEAR + o_h) * TYPES
    tl.store(p_row, tl.load(p_linear + o_entry, mask=m_h, other=0.0), mask=m_j)
    tl.store(p_row + ENTRIES * TYPES, tl.load(p_quadratic + o_entry, mask=m_h, other=0.0), mask=m_j)
    tl.store(p_row + 2 * ENTRIES * TYPES, tl.load(p_centre + o_entry, mask=m_h, other=0.0), mask=m_j)
    tl.store(p_out + OFFSET * TYPES, tl.load(p_offset + o_j * C + o_c, mask=m_real, other=0.0), mask=m_j)


@triton.jit(launch_metadata=parent_metadata, do_not_specialize=["rows", "C"])
def outputs_kernel(p_statistics, p_poses, p_activations, rows, C, BLOCK: tl.constexpr):
    """The means, and a = sigmoid(logit).

    p_statistics; p_poses [rows, 16, C], p_activations [rows, C].
    """
    o_block, o_lane, o_c, o_j, _, m_real = parent_tile(rows, C, BLOCK)
    o_h, m_h = entry_tile(0, ENTRIES, m_real)
    p_statistics += o_block * (MEAN + 2 * ENTRIES) * TYPES + o_lane
    b_mean = tl.load(p_statistics + (MEAN + o_h) * TYPES, mask=m_h, other=0.0)
    b_logit = tl.load(p_statistics + LOGIT * TYPES, mask=m_real, other=0.0)
    tl.store(p_poses + (o_j * ENTRIES + o_h) * C + o_c, b_mean, mask=m_h)
    tl.store(p_activations + o_j * C + o_c, sigmoid(b_logit), mask=m_real)


@triton.jit
def parent_tile(rows, C, BLOCK: tl.constexpr):
    """Of a program's parents, [BLOCK, 1]: number of their block, lane in it, type, row n P + p, the mask of those that
    have a place in memory, and of those that exist. Lanes run along types."""
    n_blocks = tl.cdiv(C, TYPES)
    o_place = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
    o_block = o_place // TYPES
    o_j = o_block // n_blocks
    o_lane = o_place % TYPES
    o_c = o_block % n_blocks * TYPES + o_lane
    return o_block, o_lane, o_c, o_j, o_j < rows, (o_j < rows) & (o_c < C)


@triton.jit
def entry_tile(i_h, H, m_j):
    """Sixteen pose entries from i_h on, [1, 16], and the mask [BLOCK, 16]."""
    o_h = i_h + tl.arange(0, ENTRIES)[None, :]
    return o_h, m_j & (o_h < H)


@triton.jit
def merge_splits(p_moments, step, splits, o_h, m_j, m_h, H, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Support S, mean m and sum of r (d - m)^2 of all splits: each took them about its own mean."""
    b_support = tl.zeros((BLOCK, 1), DTYPE)
    b_m = tl.zeros((BLOCK, ENTRIES), DTYPE)
    b_second = tl.zeros((BLOCK, ENTRIES), DTYPE)
    for k in range(splits):  # as the parent view adds a child
        p_split = p_moments + k * step
        b_total = tl.load(p_split + TOTAL * TYPES, mask=m_j, other=0.0)
        b_sum = b_support + b_total
        b_share = b_total / tl.where(b_sum > 0, b_sum, 1.0)
        b_apart = tl.load(p_split + (FIRST + o_h) * TYPES, mask=m_h, other=0.0) - b_m
        b_more = tl.load(p_split + (FIRST + H + o_h) * TYPES, mask=m_h, other=0.0)
        b_second += b_more + b_support * b_share * b_apart * b_apart
        b_m += b_share * b_apart
        b_support = b_sum
    return b_support, b_m, b_second


@triton.jit
def add_splits(p_partial, step, splits, mask, DTYPE: tl.constexpr):
    """sum_k partial_k."""
    b_sum = tl.load(p_partial, mask=mask, other=0.0).to(DTYPE)
    for k in range(1, splits):
        b_sum += tl.load(p_partial + k * step, mask=mask, other=0.0)
    return b_sum


@triton.jit
def cost_of_datum(b_log_variance, p_beta_u, o_c, m_j, H, DTYPE: tl.constexpr):
    """sum_h (beta_u + 1/2 log variance_h)."""
    return H * tl.load(p_beta_u + o_c, mask=m_j, other=0.0).to(DTYPE) + 0.5 * b_log_variance


@triton.jit
def sigmoid(b_x):
    b_e = tl.exp(-tl.abs(b_x))
    return tl.where(b_x < 0, b_e, 1.0) / (1.0 + b_e)


def entries_of(statistics: Tensor) -> int:
    """H of statistics [N, P, blocks, 4 + 2 H, 16]."""
    return (statistics.shape[-2] - MEAN.value) // 2


def fit(moments: Tensor, before: Tensor | None, fit: Fit, out: Tensor) -> None:
    """Write the statistics of every parent, from moments that each split took about its own mean."""
    _launch(
        fit_kernel,
        fit,
        H=entries_of(out),
        p_moments=moments,
        p_before=before,
        p_beta_u=fit.beta_u,
        p_beta_a=fit.beta_a,
        p_out=out,
        splits=len(moments),
    )


def slopes(statistics: Tensor, before: Tensor | None, fit: Fit, out: Tensor, **given: Tensor) -> None:
    """Write the slopes of an M-step, from the moments or the gradients that the kernel has arguments for."""
    sources = ("p_moments", "p_grad_mean", "p_grad_variance", "p_grad_logit", "p_grad_activation")
    _launch(
        slopes_kernel,
        fit,
        H=entries_of(statistics),
        **{**dict.fromkeys(sources), **given},
        p_statistics=statistics,
        p_before=before,
        p_beta_u=fit.beta_u,
        p_out=out,
        splits=len(given.get("p_moments", ())),
    )


def moments(partial: Tensor, before: Tensor | None, support: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Write support [N, P, C], mean and variance [N, P, 16, C], from what each split found about its own mean."""
    least = least_support(support.dtype)
    given = {"p_moments": partial, "p_before": before, "splits": len(partial), "LEAST_SUPPORT": least}
    _each_parent(moments_kernel, support.shape, **given, p_support=support, p_mean=mean, p_variance=variance)


def component_gradients(
    partial: Tensor, statistics: Tensor, grad_mean: Tensor, grad_precision: Tensor, grad_log_weight: Tensor
) -> None:
    """Write the gradients of mean and precision [N, P, 16, C] and of log_weight [N, P, C]."""
    _each_parent(
        component_gradients_kernel,
        grad_log_weight.shape,
        p_moments=partial,
        p_statistics=statistics,
        p_grad_mean=grad_mean,
        p_grad_precision=grad_precision,
        p_grad_log_weight=grad_log_weight,
        splits=len(partial),
    )


def outputs(statistics: Tensor, types: int) -> tuple[Tensor, Tensor]:
    """Poses [N, P, 16, C] and activations [N, P, C]."""
    N, P = statistics.shape[:2]
    poses, activations = statistics.new_empty(N, P, entries_of(statistics), types), statistics.new_empty(N, P, types)
    given = {"p_statistics": statistics, "p_poses": poses, "p_activations": activations}
    _each_parent(outputs_kernel, activations.shape, **given)
    return poses, activations


def components(mean: Tensor, precision: Tensor, log_weight: Tensor, out: Tensor) -> None:
    """Write the statistics of given components [N, P, 16, C] and [N, P, C]."""
    given = {"p_mean": mean.contiguous(), "p_precision": precision.contiguous()}
    _each_parent(components_kernel, log_weight.shape, **given, p_log_weight=log_weight.contiguous(), p_out=out)


def given_slopes(offset: Tensor, linear: Tensor, quadratic: Tensor, centre: Tensor, out: Tensor) -> None:
    """Write the slopes of given ones, [N, P, C] and [N, P, 16, C]."""
    given = {"p_linear": linear.contiguous(), "p_quadratic": quadratic.contiguous(), "p_centre": centre.contiguous()}
    _each_parent(given_slopes_kernel, offset.shape, **given, p_offset=offset.contiguous(), p_out=out)


def beta_gradients(slopes: Tensor, types: int) -> tuple[Tensor, Tensor]:
    """dL/dbeta_u and dL/dbeta_a, [C], of slopes [T, N, P, blocks, 3 + 3 H, 16]."""
    sums = slopes[..., TO_BETA_U.value : TO_BETA_A.value + 1, :].sum(dim=(0, 1, 2))
    to_beta_u, to_beta_a = unpack(sums, types)
    return to_beta_u.clone(), to_beta_a.clone()  # an operator's outputs share no memory


def _launch(kernel: Any, fit: Fit, **arguments: Any) -> None:
    """Launch a kernel of an M-step."""
    out, (types,) = arguments["p_out"], fit.beta_u.shape
    _each_parent(
        kernel,
        (*out.shape[:2], types),
        **arguments,
        inverse_temperature=fit.inverse_temperature,
        variance_floor=fit.variance_floor,
        mean_data=fit.mean_data,
        LEAST_SUPPORT=least_support(out.dtype),
    )


def _each_parent(kernel: Any, shape: Sequence[int], **arguments: Any) -> None:
    """Programs for all parents [N, P, C]."""
    N, P, C = shape
    places = N * P * type_blocks(C) * TYPES.value
    if places:
        arguments |= {"rows": N * P, "C": C, "BLOCK": PARENTS}
        plans.launch(kernel, blocks(places, PARENTS), arguments, {"num_warps": PARENT_WARPS, **OPTIONS})
