"""Kernels over parents: Gaussians and logits from moments, the gradients of both, and the outputs of a layer.

These kernels follow the parent view. They add its splits, always in the same order. A program owns BLOCK parents and
all their H pose entries; a tile is [parents, pose entries] = [BLOCK, 16].

Shapes in this file, where rows = N P parent locations of all images, and `rows.py` names the rows of a block:

    moments    [splits, rows, blocks, 1 + 2 H, 16]
    statistics [rows, blocks, 4 + 2 H, 16]
    slopes     [rows, blocks, 3 + 3 H, 16]

docs/backward.md derives the formulas.
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
from tritoncaps.kernels.mixture.backend import MomentGradients
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
    """The M-step of EM: the statistics of every parent, from the moments of d = V - previous mean.

    Split k gives S_k = sum r, m_k = sum r d / S_k and second_k = sum r (d - m_k)^2 over its part of the children.

    S = sum_k S_k,  m = sum_k S_k m_k / S,  variance = max(sum_k [second_k + S_k (m_k - m)^2] / S, floor)
    mean = previous mean + m, or zero if S <= LEAST_SUPPORT
    logit = inverse_temperature (beta_a - S / mean_data sum_h (beta_u + 1/2 log variance_h))

    p_moments: moments; p_before: statistics with the previous mean, or None, then d = V; p_beta_u, p_beta_a [C];
    p_out: statistics.
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
        m_empty = b_support <= LEAST_SUPPORT  # false if the support is nan
        b_inverse = 1.0 / tl.where(m_empty, 1.0, b_support)
        b_variance = tl.maximum(b_second * b_inverse, b_floor, propagate_nan=tl.PropagateNan.ALL)
        b_log_variance += tl.where(m_h, tl.log(b_variance), 0.0)
        b_mean = b_m
        if p_before is not None:
            b_mean += tl.load(p_before + o_rows + (MEAN + o_h) * TYPES, mask=m_h, other=0.0).to(DTYPE)
        b_mean = tl.where(m_empty, b_m * 0.0, b_mean)  # zero, but nan stays nan
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
    """The gradient of the M-step of EM: slopes, from the gradients gmean, gvariance and glogit of its results.

    gcost     = -inverse_temperature glogit / mean_data
    gv        = gvariance + gcost S / (2 variance), or zero where the variance is at the floor
    linear    = gmean / S,  quadratic = gv / S
    offset    = gcost sum_h (beta_u + 1/2 log variance_h) - sum_h quadratic_h variance_h
    shift     = previous mean - mean
    terms of this parent in the gradients: H gcost S of beta_u, inverse_temperature glogit of beta_a

    In the last iteration the gradients are given. If p_grad_variance is None, gvariance = 0. If p_grad_logit is None,
    glogit = gactivation a (1 - a). In the other iterations p_moments is given: m0, m1 and m2 are the sums of dl, dl d
    and dl d^2 of the next iteration, and

    gmean = m1 / variance,  gvariance = 1/2 (m2 / variance - m0) / variance,  glogit = m0 (1 - a).

    p_moments: moments, or None; p_grad_mean, p_grad_variance [rows, H, C], p_grad_logit, p_grad_activation [rows, C];
    p_statistics: statistics; p_before: statistics with the previous mean, or None, then the shift is zero;
    p_beta_u [C]; p_out: slopes.
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
    """Support, mean and variance of the votes for each parent, from the moments of d = V - previous mean.

    The formulas of S, m and mean are those of `fit_kernel`. The variance has no floor: the user's fit comes next.

    p_moments: moments; p_before: statistics with the previous mean, or None, then d = V; p_support [rows, C];
    p_mean and p_variance [rows, 16, C].
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
    """Gradients of the components, from the sums m0 of dl, m1 of dl d and m2 of dl d^2 of the next iteration.

    gmean = m1 / variance,  gprecision = -1/2 m2,  glog_weight = m0

    p_moments: moments; p_statistics: statistics; p_grad_mean, p_grad_precision [rows, 16, C], p_grad_log_weight
    [rows, C].
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
    """Copies the components of a fit to statistics. The rows of precision are 1 / (2 variance): half of p_precision.

    p_mean, p_precision [rows, 16, C], p_log_weight [rows, C]; p_out: statistics. The kernel writes only the rows that
    views read: constant, mean and precision.
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
def slopes_of_moments_kernel(
    p_support,
    p_mean,
    p_variance,
    p_grad_support,
    p_grad_mean,
    p_grad_variance,
    p_out,
    rows,
    C,
    BLOCK: tl.constexpr,
    LEAST_SUPPORT: tl.constexpr,
):
    """The slopes from the moments of an iteration and their gradients. The rows of the origin are the mean.

    linear = grad_mean / S,  quadratic = grad_variance / S,  offset = grad_support - sum_h quadratic_h variance_h

    p_support, p_grad_support [rows, C], the others [rows, 16, C]; p_out: slopes. The kernel does not write the rows of
    beta_u and beta_a.
    """
    o_block, o_lane, o_c, o_j, m_j, m_real = parent_tile(rows, C, BLOCK)
    o_h, m_h = entry_tile(0, ENTRIES, m_real)
    o_entry = (o_j * ENTRIES + o_h) * C + o_c
    b_support = tl.load(p_support + o_j * C + o_c, mask=m_real, other=1.0)
    b_inverse = 1 / tl.where(b_support <= LEAST_SUPPORT, 1.0, b_support)  # nan stays nan
    b_quadratic = tl.load(p_grad_variance + o_entry, mask=m_h, other=0.0) * b_inverse
    b_variance = tl.load(p_variance + o_entry, mask=m_h, other=0.0)
    b_offset = tl.load(p_grad_support + o_j * C + o_c, mask=m_real, other=0.0)
    b_offset -= tl.sum(b_quadratic * b_variance, axis=1)[:, None]
    p_out += o_block * (LINEAR + 3 * ENTRIES) * TYPES + o_lane
    p_row = p_out + (LINEAR + o_h) * TYPES
    tl.store(p_row, tl.load(p_grad_mean + o_entry, mask=m_h, other=0.0) * b_inverse, mask=m_j)
    tl.store(p_row + ENTRIES * TYPES, b_quadratic, mask=m_j)
    tl.store(p_row + 2 * ENTRIES * TYPES, tl.load(p_mean + o_entry, mask=m_h, other=0.0), mask=m_j)
    tl.store(p_out + OFFSET * TYPES, b_offset, mask=m_j)


@triton.jit(launch_metadata=parent_metadata, do_not_specialize=["rows", "C"])
def outputs_kernel(p_statistics, p_poses, p_activations, rows, C, BLOCK: tl.constexpr):
    """The outputs of EM routing: pose = mean, a = sigmoid(logit).

    p_statistics: statistics; p_poses [rows, 16, C], p_activations [rows, C].
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
    """The parents of a program, six tiles [BLOCK, 1]: index of the block, lane in the block (0 to 15), type, row
    n P + p, mask of parents with a place in memory (padding included), mask of parents that exist."""
    n_blocks = tl.cdiv(C, TYPES)
    o_place = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
    o_block = o_place // TYPES
    o_j = o_block // n_blocks
    o_lane = o_place % TYPES
    o_c = o_block % n_blocks * TYPES + o_lane
    return o_block, o_lane, o_c, o_j, o_j < rows, (o_j < rows) & (o_c < C)


@triton.jit
def entry_tile(i_h, H, m_j):
    """The pose entries i_h to i_h + 15, [1, 16], and the mask [BLOCK, 16] of those below H of the parents m_j."""
    o_h = i_h + tl.arange(0, ENTRIES)[None, :]
    return o_h, m_j & (o_h < H)


@triton.jit
def merge_splits(p_moments, step, splits, o_h, m_j, m_h, H, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """S = sum r, m = sum r d / S and sum r (d - m)^2 of all splits; each split has the sums about its own mean.

    p_moments points to split 0, and `step` is the distance to the next split.
    """
    b_support = tl.zeros((BLOCK, 1), DTYPE)
    b_m = tl.zeros((BLOCK, ENTRIES), DTYPE)
    b_second = tl.zeros((BLOCK, ENTRIES), DTYPE)
    for k in range(splits):  # the formula is that of parent_view.add_about_mean
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
    """The sum of partial over the splits; `step` is the distance from one split to the next."""
    b_sum = tl.load(p_partial, mask=mask, other=0.0).to(DTYPE)
    for k in range(1, splits):
        b_sum += tl.load(p_partial + k * step, mask=mask, other=0.0)
    return b_sum


@triton.jit
def cost_of_datum(b_log_variance, p_beta_u, o_c, m_j, H, DTYPE: tl.constexpr):
    """sum_h (beta_u + 1/2 log variance_h), from p_beta_u [C] and b_log_variance = sum_h log variance_h."""
    return H * tl.load(p_beta_u + o_c, mask=m_j, other=0.0).to(DTYPE) + 0.5 * b_log_variance


@triton.jit
def sigmoid(b_x):
    b_e = tl.exp(-tl.abs(b_x))
    return tl.where(b_x < 0, b_e, 1.0) / (1.0 + b_e)


def entries_of(statistics: Tensor) -> int:
    """H of statistics [N, P, blocks, 4 + 2 H, 16]."""
    return (statistics.shape[-2] - MEAN.value) // 2


def fit(moments: Tensor, before: Tensor | None, fit: Fit, out: Tensor) -> None:
    """M-step: write statistics [N, P, blocks, 4 + 2 H, 16], from moments [splits, N, P, blocks, 1 + 2 H, 16]."""
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
    """Gradient of an M-step: write slopes [N, P, blocks, 3 + 3 H, 16].

    `given` has p_moments of the next iteration, or the gradients of the results (p_grad_mean, ...): see the kernel.
    """
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
    """Write support [N, P, C], mean and variance [N, P, 16, C], from the moments of all splits."""
    least = least_support(support.dtype)
    given = {"p_moments": partial, "p_before": before, "splits": len(partial), "LEAST_SUPPORT": least}
    _each_parent(moments_kernel, support.shape, **given, p_support=support, p_mean=mean, p_variance=variance)


def component_gradients(
    partial: Tensor, statistics: Tensor, grad_mean: Tensor, grad_precision: Tensor, grad_log_weight: Tensor
) -> None:
    """Write the gradients of mean and precision [N, P, 16, C] and of log_weight [N, P, C], from the moments of dl."""
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
    """Poses [N, P, 16, C] and activations [N, P, C], from statistics of C = types parent types."""
    N, P = statistics.shape[:2]
    poses, activations = statistics.new_empty(N, P, entries_of(statistics), types), statistics.new_empty(N, P, types)
    given = {"p_statistics": statistics, "p_poses": poses, "p_activations": activations}
    _each_parent(outputs_kernel, activations.shape, **given)
    return poses, activations


def components(mean: Tensor, precision: Tensor, log_weight: Tensor, out: Tensor) -> None:
    """Copy mean and precision [N, P, 16, C] and log_weight [N, P, C] to statistics."""
    given = {"p_mean": mean.contiguous(), "p_precision": precision.contiguous()}
    _each_parent(components_kernel, log_weight.shape, **given, p_log_weight=log_weight.contiguous(), p_out=out)


def slopes_of_moments(moments: MomentGradients, out: Tensor) -> None:
    """The slopes of an iteration with any fit, from its moments and their gradients."""
    given = {f"p_{name}": x.contiguous() for name, x in moments._asdict().items()}
    least = least_support(out.dtype)
    _each_parent(slopes_of_moments_kernel, moments.support.shape, **given, p_out=out, LEAST_SUPPORT=least)


def beta_gradients(slopes: Tensor, types: int) -> tuple[Tensor, Tensor]:
    """dL/dbeta_u [C] and dL/dbeta_a [C], from slopes [T, N, P, blocks, 3 + 3 H, 16]."""
    sums = slopes[..., TO_BETA_U.value : TO_BETA_A.value + 1, :].sum(dim=(0, 1, 2))
    to_beta_u, to_beta_a = unpack(sums, types)
    return to_beta_u.clone(), to_beta_a.clone()  # torch requires that the outputs of an operator share no memory


def _launch(kernel: Any, fit: Fit, **arguments: Any) -> None:
    """Launch `fit_kernel` or `slopes_kernel` with the options of the M-step."""
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
    """Launch as many programs as cover all parents; `shape` is N, P, C."""
    N, P, C = shape
    places = N * P * type_blocks(C) * TYPES.value
    if places:
        arguments |= {"rows": N * P, "C": C, "BLOCK": PARENTS}
        plans.launch(kernel, blocks(places, PARENTS), arguments, {"num_warps": PARENT_WARPS, **OPTIONS})
