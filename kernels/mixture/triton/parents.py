"""What is per parent and not per edge: an M-step's last lines, their gradients, and the outputs.

These kernels are the second pass of the parent view: they add up its splits, always in the same order. A program owns
BLOCK parents and all their H pose entries, in tiles [BLOCK, 16].

    statistics [N, P, 2 H + 4, C]   H rows of mean, H of precision = 1 / (2 variance); constant = log a - 1/2 sum_h
                                    log(2 pi variance_h), logit, support S, and sum_h log variance_h
    slopes     [N, P, 3 H + 3, C]   H rows of B, H of C, H of shift; A, and what the parent gives to the gradients of
                                    beta_u and beta_a
    moments    [splits, N, P, 2 H + 1, C]   H rows of first, H of second moments, and the total weight

Views read their rows as they are. docs/backward.md derives the formulas.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tritoncaps.kernels.common.numerics import least_support
from tritoncaps.kernels.common.triton.launching import ALL_REGISTERS, blocks
from tritoncaps.kernels.mixture.iteration import Fit
from tritoncaps.kernels.mixture.triton.config import PARENT_WARPS, PARENTS
from tritoncaps.kernels.mixture.triton.costs import parent_metadata
from tritoncaps.kernels.mixture.triton.votes import ENTRIES

LOG_2_PI = tl.constexpr(math.log(2 * math.pi))


@triton.jit(launch_metadata=parent_metadata, do_not_specialize=["rows", "splits"])
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
    C: tl.constexpr,
    LEAST_SUPPORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The statistics of every parent, from the moments of d = V - mean before, taken by split k about its mean m_k.

    S = sum_k S_k,  m = sum_k S_k m_k / S,  variance = max(sum_k [second_k + S_k (m_k - m)^2] / S, floor)
    mean = mean before + m;  zero if S is too small to divide by
    logit = inverse_temperature (beta_a - S / mean_data sum_h (beta_u + 1/2 log variance_h))

    p_moments [splits, rows, 2 H + 1, C]; p_before [rows, 2 H + 4, C], or None: then d = V; p_beta_u, p_beta_a
    [C]; p_out [rows, 2 H + 4, C].
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    o_j, o_c, m_j = parent_tile(rows, C, BLOCK)
    p_moments += o_j * (2 * H + 1) * C + o_c
    p_out += o_j * (2 * H + 4) * C + o_c
    step = rows.to(tl.int64) * (2 * H + 1) * C  # to the next split

    b_floor = tl.full((1, 1), variance_floor, DTYPE)
    b_log_variance = tl.zeros((BLOCK, ENTRIES), DTYPE)
    for i_h in tl.static_range(0, H, ENTRIES):
        o_h, m_h = entry_tile(i_h, H, m_j)
        b_support, b_m, b_second = merge_splits(p_moments, step, splits, o_h, m_j, m_h, H, C, BLOCK, DTYPE)
        m_alone = b_support <= LEAST_SUPPORT  # false for nan
        b_inverse = 1.0 / tl.where(m_alone, 1.0, b_support)
        b_variance = tl.maximum(b_second * b_inverse, b_floor, propagate_nan=tl.PropagateNan.ALL)
        b_log_variance += tl.where(m_h, tl.log(b_variance), 0.0)
        b_mean = b_m
        if p_before is not None:
            b_mean += tl.load(p_before + (o_j * (2 * H + 4) + o_h) * C + o_c, mask=m_h, other=0.0).to(DTYPE)
        tl.store(p_out + o_h * C, tl.where(m_alone, b_m * 0.0, b_mean), mask=m_h)
        tl.store(p_out + (H + o_h) * C, 0.5 / b_variance, mask=m_h)

    b_log_variance = tl.sum(b_log_variance, axis=1, keep_dims=True)
    b_cost = cost_of_datum(b_log_variance, p_beta_u, o_c, m_j, H, DTYPE) * b_support
    b_cost /= tl.full((1, 1), mean_data, DTYPE)
    b_beta_a = tl.load(p_beta_a + o_c, mask=m_j, other=0.0).to(DTYPE)
    b_logit = tl.full((1, 1), inverse_temperature, DTYPE) * (b_beta_a - b_cost)
    b_log_a = tl.minimum(b_logit, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(b_logit)))
    tl.store(p_out + 2 * H * C, b_log_a - 0.5 * (b_log_variance + tl.full((1, 1), H * LOG_2_PI, DTYPE)), mask=m_j)
    tl.store(p_out + (2 * H + 1) * C, b_logit, mask=m_j)
    tl.store(p_out + (2 * H + 2) * C, b_support, mask=m_j)
    tl.store(p_out + (2 * H + 3) * C, b_log_variance, mask=m_j)


@triton.jit(launch_metadata=parent_metadata, do_not_specialize=["rows", "splits"])
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
    C: tl.constexpr,
    LEAST_SUPPORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The slopes of an M-step, from the gradients g of what it found, and shift = mean before - mean.

    gcost = -inverse_temperature glogit / mean_data
    gv    = gvariance + gcost S / (2 variance), or zero where the variance stands at the floor
    B = gmean / S,  C = gv / S,  A = gcost sum_h (beta_u + 1/2 log variance_h) - sum_h C_h variance_h
    to beta_u: H gcost S;  to beta_a: inverse_temperature glogit

    The gradients: from the moments m0, m1, m2 of dl in the iteration after,

    gmean = m1 / variance,  gvariance = 1/2 (m2 / variance - m0) / variance,  glogit = m0 (1 - a);

    or given, with zero for p_grad_variance None, and glogit = gactivation a (1 - a) if p_grad_logit is None.

    p_moments [splits, rows, 2 H + 1, C] or None; p_grad_mean, p_grad_variance [rows, H, C], p_grad_logit,
    p_grad_activation [rows, C]; p_statistics, p_before [rows, 2 H + 4, C], p_before None: no shift is written;
    p_beta_u [C]; p_out [rows, 3 H + 3, C].
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    o_j, o_c, m_j = parent_tile(rows, C, BLOCK)
    p_statistics += o_j * (2 * H + 4) * C + o_c
    p_out += o_j * (3 * H + 3) * C + o_c
    step = rows.to(tl.int64) * (2 * H + 1) * C  # to the next split
    b_logit = tl.load(p_statistics + (2 * H + 1) * C, mask=m_j, other=0.0)
    b_support = tl.load(p_statistics + (2 * H + 2) * C, mask=m_j, other=0.0)
    b_log_variance = tl.load(p_statistics + (2 * H + 3) * C, mask=m_j, other=0.0)

    if p_moments is not None:
        p_moments += o_j * (2 * H + 1) * C + o_c
        b_m0 = add_splits(p_moments + 2 * H * C, step, splits, m_j, DTYPE)
        b_glogit = b_m0 * sigmoid(-b_logit)
    elif p_grad_logit is not None:
        b_glogit = tl.load(p_grad_logit + o_j * C + o_c, mask=m_j, other=0.0).to(DTYPE)
    else:
        b_glogit = tl.load(p_grad_activation + o_j * C + o_c, mask=m_j, other=0.0).to(DTYPE)
        b_glogit *= sigmoid(b_logit) * sigmoid(-b_logit)

    b_gbeta_a = tl.full((1, 1), inverse_temperature, DTYPE) * b_glogit
    b_gcost = -b_gbeta_a / tl.full((1, 1), mean_data, DTYPE)
    b_inverse = 1.0 / tl.where(b_support <= LEAST_SUPPORT, 1.0, b_support)
    b_limit = 0.5 / tl.full((1, 1), variance_floor, DTYPE)  # the precision of a variance at the floor
    b_Cv = tl.zeros((BLOCK, ENTRIES), DTYPE)
    for i_h in tl.static_range(0, H, ENTRIES):
        o_h, m_h = entry_tile(i_h, H, m_j)
        b_precision = tl.load(p_statistics + (H + o_h) * C, mask=m_h, other=1.0)
        if p_moments is not None:
            b_m2 = add_splits(p_moments + (H + o_h) * C, step, splits, m_h, DTYPE)
            b_gmean = 2 * b_precision * add_splits(p_moments + o_h * C, step, splits, m_h, DTYPE)
            b_gvariance = b_precision * (2 * b_precision * b_m2 - b_m0)
        else:
            o_entry = (o_j * H + o_h) * C + o_c
            b_gmean = tl.load(p_grad_mean + o_entry, mask=m_h, other=0.0).to(DTYPE)
            b_gvariance = tl.zeros((BLOCK, ENTRIES), DTYPE)
            if p_grad_variance is not None:
                b_gvariance += tl.load(p_grad_variance + o_entry, mask=m_h, other=0.0).to(DTYPE)
        b_gvariance += b_gcost * b_support * b_precision
        b_C = tl.where(b_precision < b_limit, b_gvariance * b_inverse, 0.0)
        b_Cv += tl.where(m_h, b_C * (0.5 / b_precision), 0.0)
        tl.store(p_out + o_h * C, b_gmean * b_inverse, mask=m_h)
        tl.store(p_out + (H + o_h) * C, b_C, mask=m_h)
        if p_before is not None:
            b_before = tl.load(p_before + (o_j * (2 * H + 4) + o_h) * C + o_c, mask=m_h, other=0.0)
            b_mean = tl.load(p_statistics + o_h * C, mask=m_h, other=0.0)
            tl.store(p_out + (2 * H + o_h) * C, b_before - b_mean, mask=m_h)

    b_A = b_gcost * cost_of_datum(b_log_variance, p_beta_u, o_c, m_j, H, DTYPE)
    tl.store(p_out + 3 * H * C, b_A - tl.sum(b_Cv, axis=1, keep_dims=True), mask=m_j)
    tl.store(p_out + (3 * H + 1) * C, H * b_gcost * b_support, mask=m_j)
    tl.store(p_out + (3 * H + 2) * C, b_gbeta_a, mask=m_j)


@triton.jit(launch_metadata=parent_metadata, do_not_specialize=["rows", "splits"])
def moments_kernel(
    p_moments,
    p_before,
    p_support,
    p_mean,
    p_variance,
    rows,
    splits,
    C: tl.constexpr,
    LEAST_SUPPORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Support, mean and variance of every parent's votes, from what the splits found of d = V - mean before.

    As in `fit_kernel`, but nothing is clamped: an own fit follows.

    p_moments [splits, rows, 33, C]; p_before [rows, 36, C], or None: then d = V; p_support [rows, C]; p_mean,
    p_variance [rows, 16, C].
    """
    DTYPE: tl.constexpr = p_support.dtype.element_ty
    H: tl.constexpr = ENTRIES
    o_j, o_c, m_j = parent_tile(rows, C, BLOCK)
    o_h, m_h = entry_tile(0, H, m_j)
    p_moments += o_j * (2 * H + 1) * C + o_c
    step = rows.to(tl.int64) * (2 * H + 1) * C
    b_support, b_mean, b_second = merge_splits(p_moments, step, splits, o_h, m_j, m_h, H, C, BLOCK, DTYPE)
    m_empty = b_support <= LEAST_SUPPORT
    if p_before is not None:
        b_mean += tl.load(p_before + (o_j * (2 * H + 4) + o_h) * C + o_c, mask=m_h, other=0.0)
    o_entry = (o_j * H + o_h) * C + o_c
    tl.store(p_support + o_j * C + o_c, b_support, mask=m_j)
    tl.store(p_mean + o_entry, tl.where(m_empty, 0.0, b_mean), mask=m_h)
    tl.store(p_variance + o_entry, b_second / tl.where(m_empty, 1.0, b_support), mask=m_h)


@triton.jit(launch_metadata=parent_metadata, do_not_specialize=["rows", "splits"])
def component_gradients_kernel(
    p_moments,
    p_statistics,
    p_grad_mean,
    p_grad_precision,
    p_grad_log_weight,
    rows,
    splits,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of a parent's components, from the moments m0, m1, m2 of dl in the iteration after.

    gmean = m1 / variance,  gprecision = -1/2 m2,  glog_weight = m0

    p_moments [splits, rows, 33, C]; p_statistics [rows, 36, C]; p_grad_mean, p_grad_precision [rows, 16, C],
    p_grad_log_weight [rows, C].
    """
    DTYPE: tl.constexpr = p_grad_mean.dtype.element_ty
    H: tl.constexpr = ENTRIES
    o_j, o_c, m_j = parent_tile(rows, C, BLOCK)
    o_h, m_h = entry_tile(0, H, m_j)
    p_moments += o_j * (2 * H + 1) * C + o_c
    step = rows.to(tl.int64) * (2 * H + 1) * C
    b_m1 = add_splits(p_moments + o_h * C, step, splits, m_h, DTYPE)
    b_m2 = add_splits(p_moments + (H + o_h) * C, step, splits, m_h, DTYPE)
    b_precision = tl.load(p_statistics + (o_j * (2 * H + 4) + H + o_h) * C + o_c, mask=m_h, other=0.0)
    o_entry = (o_j * H + o_h) * C + o_c
    tl.store(p_grad_mean + o_entry, 2 * b_precision * b_m1, mask=m_h)
    tl.store(p_grad_precision + o_entry, -0.5 * b_m2, mask=m_h)
    b_m0 = add_splits(p_moments + 2 * H * C, step, splits, m_j, DTYPE)
    tl.store(p_grad_log_weight + o_j * C + o_c, b_m0, mask=m_j)


@triton.jit(launch_metadata=parent_metadata, do_not_specialize=["rows"])
def outputs_kernel(p_statistics, p_poses, p_activations, rows, C: tl.constexpr, BLOCK: tl.constexpr):
    """The means, and a = sigmoid(logit).

    p_statistics [rows, 36, C]; p_poses [rows, 16, C], p_activations [rows, C].
    """
    o_j, o_c, m_j = parent_tile(rows, C, BLOCK)
    o_h, m_h = entry_tile(0, ENTRIES, m_j)
    p_statistics += o_j * (2 * ENTRIES + 4) * C + o_c
    b_mean = tl.load(p_statistics + o_h * C, mask=m_h, other=0.0)
    b_logit = tl.load(p_statistics + (2 * ENTRIES + 1) * C, mask=m_j, other=0.0)
    tl.store(p_poses + (o_j * ENTRIES + o_h) * C + o_c, b_mean, mask=m_h)
    tl.store(p_activations + o_j * C + o_c, sigmoid(b_logit), mask=m_j)


@triton.jit
def parent_tile(rows, C, BLOCK: tl.constexpr):
    """Row n P + p, type and mask of a program's parents, [BLOCK, 1]: lanes run along types."""
    o_parent = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
    o_j = o_parent // C
    return o_j, o_parent % C, o_j < rows


@triton.jit
def entry_tile(i_h, H, m_j):
    """Sixteen pose entries from i_h on, [1, 16], and the mask [BLOCK, 16]."""
    o_h = i_h + tl.arange(0, ENTRIES)[None, :]
    return o_h, m_j & (o_h < H)


@triton.jit
def merge_splits(p_moments, step, splits, o_h, m_j, m_h, H, C, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Support S, mean m and sum of r (d - m)^2 of all splits: each took them about its own mean."""
    b_support = tl.zeros((BLOCK, 1), DTYPE)
    b_m = tl.zeros((BLOCK, ENTRIES), DTYPE)
    b_second = tl.zeros((BLOCK, ENTRIES), DTYPE)
    for k in range(splits):  # as the parent view adds a child
        p_split = p_moments + k * step
        b_total = tl.load(p_split + 2 * H * C, mask=m_j, other=0.0)
        b_sum = b_support + b_total
        b_share = b_total / tl.where(b_sum > 0, b_sum, 1.0)
        b_apart = tl.load(p_split + o_h * C, mask=m_h, other=0.0) - b_m
        b_second += tl.load(p_split + (H + o_h) * C, mask=m_h, other=0.0) + b_support * b_share * b_apart * b_apart
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


def statistics_rows(entries: int) -> int:
    return 2 * entries + 4


def slopes_rows(entries: int) -> int:
    return 3 * entries + 3


def entries_of(statistics: Tensor) -> int:
    """H of statistics [N, P, 2 H + 4, C]."""
    return statistics.shape[2] // 2 - 2


def fit(moments: Tensor, before: Tensor | None, fit: Fit, out: Tensor) -> None:
    """Write the statistics of every parent, from moments that each split took about its own mean."""
    _launch(
        fit_kernel,
        fit,
        entries_of(out),
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
        entries_of(statistics),
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
    _each_parent(moments_kernel, support, **given, p_support=support, p_mean=mean, p_variance=variance)


def component_gradients(
    partial: Tensor, statistics: Tensor, grad_mean: Tensor, grad_precision: Tensor, grad_log_weight: Tensor
) -> None:
    """Write the gradients of mean and precision [N, P, 16, C] and of log_weight [N, P, C]."""
    _each_parent(
        component_gradients_kernel,
        grad_log_weight,
        p_moments=partial,
        p_statistics=statistics,
        p_grad_mean=grad_mean,
        p_grad_precision=grad_precision,
        p_grad_log_weight=grad_log_weight,
        splits=len(partial),
    )


def outputs(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Poses [N, P, 16, C] and activations [N, P, C]."""
    N, P, _, C = statistics.shape
    poses, activations = statistics.new_empty(N, P, entries_of(statistics), C), statistics.new_empty(N, P, C)
    given = {"p_statistics": statistics, "p_poses": poses, "p_activations": activations}
    _each_parent(outputs_kernel, activations, **given)
    return poses, activations


def beta_gradients(slopes: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dbeta_u and dL/dbeta_a, [C], of slopes [T, N, P, 3 H + 3, C]."""
    return slopes[..., -2, :].sum(dim=(0, 1, 2)), slopes[..., -1, :].sum(dim=(0, 1, 2))


def _launch(kernel: Any, fit: Fit, entries: int, **arguments: Any) -> None:
    """Launch a kernel of an M-step."""
    out = arguments["p_out"]
    _each_parent(
        kernel,
        out[:, :, 0],
        **arguments,
        inverse_temperature=fit.inverse_temperature,
        variance_floor=fit.variance_floor,
        mean_data=fit.mean_data,
        H=entries,
        LEAST_SUPPORT=least_support(out.dtype),
    )


def _each_parent(kernel: Any, numbers: Tensor, **arguments: Any) -> None:
    """A program for each block of parents, of which there are as many as numbers [N, P, C]."""
    N, P, C = numbers.shape
    if numbers.numel():
        options = {"BLOCK": PARENTS, "num_warps": PARENT_WARPS, **ALL_REGISTERS}
        kernel[(blocks(N * P * C, PARENTS),)](**arguments, rows=N * P, C=C, **options)
