"""Squash and its gradient; both also add up the partial sums (splits) of the parent view of dynamic routing.

squash(s) = f s,   f = r / (1 + r^2),   r = |s|;   squash'(s) x = f x + f' / r (s . x) s;   zero at s = 0
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tritoncaps.kernels.common.triton.launching import OPTIONS

NUMBERS = 1024  # entries of a program


@triton.jit(do_not_specialize=["rows", "splits"])
def squash_kernel(
    p_parts, p_before, p_sums, p_out, p_agreed, rows, splits, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr
):
    """s = sum_k parts_k, v = squash(s), agreed = before + v.

    p_parts [splits, rows, E]; p_before, p_sums (s), p_out (v) and p_agreed [rows, E], each of which may be None.

    Program i owns the rows i * BM, ..., (i + 1) * BM - 1.
    """
    o_row, m_row = row_tile(rows, E, BM, BE)
    b_s = add_parts(p_parts, o_row, m_row, rows, splits, E)
    b_v = b_s * squash_factor(tl.sum(b_s * b_s, axis=1, keep_dims=True))
    if p_sums is not None:
        tl.store(p_sums + o_row, b_s, mask=m_row)
    if p_out is not None:
        tl.store(p_out + o_row, b_v, mask=m_row)
    if p_agreed is not None:
        if p_before is not None:
            b_v += tl.load(p_before + o_row, mask=m_row, other=0.0)
        tl.store(p_agreed + o_row, b_v, mask=m_row)


@triton.jit(do_not_specialize=["rows", "splits"])
def squash_gradient_kernel(
    p_s, p_grad, p_parts, p_total, p_out, rows, splits, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr
):
    """out = squash'(s) x with x = grad + sum_k parts_k.

    p_s, p_out [rows, E]; p_grad [rows, E], p_parts [splits, rows, E] and p_total (x) [rows, E], each of which may be
    None.

    Program i owns the rows i * BM, ..., (i + 1) * BM - 1.
    """
    o_row, m_row = row_tile(rows, E, BM, BE)
    b_s = tl.load(p_s + o_row, mask=m_row, other=0.0)
    b_x = tl.zeros((BM, BE), p_out.dtype.element_ty)
    if p_grad is not None:
        b_x += tl.load(p_grad + o_row, mask=m_row, other=0.0)
    if p_parts is not None:
        b_x += add_parts(p_parts, o_row, m_row, rows, splits, E)
    if p_total is not None:
        tl.store(p_total + o_row, b_x, mask=m_row)
    b_square = tl.sum(b_s * b_s, axis=1, keep_dims=True)
    b_along = squash_slope(b_square) * tl.sum(b_s * b_x, axis=1, keep_dims=True)
    tl.store(p_out + o_row, tl.fma(squash_factor(b_square), b_x, b_along * b_s), mask=m_row)


@triton.jit
def row_tile(rows, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr):
    """Offsets and mask [BM, BE] of a program's rows."""
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    o_e = tl.arange(0, BE)[None, :]
    return o_m * E + o_e, (o_m < rows) & (o_e < E)


@triton.jit
def add_parts(p_parts, o_row, m_row, rows, splits, E: tl.constexpr):
    """sum_k parts_k, always in the same order."""
    b_sum = tl.load(p_parts + o_row, mask=m_row, other=0.0)
    p_part = p_parts + o_row
    for _ in range(1, splits):
        p_part += rows.to(tl.int64) * E
        b_sum += tl.load(p_part, mask=m_row, other=0.0)
    return b_sum


@triton.jit
def squash_factor(b_square):
    """f from r^2."""
    return tl.sqrt(b_square) / (1.0 + b_square)


@triton.jit
def squash_slope(b_square):
    """f' / r from r^2; zero at zero."""
    b_safe = tl.where(b_square > 0, b_square, 1.0)
    b_slope = (1.0 - b_safe) / (tl.sqrt(b_safe) * (1.0 + b_safe) * (1.0 + b_safe))
    return tl.where(b_square > 0, b_slope, 0.0)


def tile(E: int) -> dict[str, int]:
    """Tile sizes: BM rows for each program, of E entries, which are padded to BE."""
    BE = triton.next_power_of_2(E)
    return {"E": E, "BM": max(1, NUMBERS // BE), "BE": BE}


def launch_squash(
    parts: Tensor,
    before: Tensor | None = None,
    sums: Tensor | None = None,
    out: Tensor | None = None,
    agreed: Tensor | None = None,
) -> None:
    """parts [splits, ..., E], all others [..., E]."""
    sizes = tile(parts.shape[-1])
    rows = parts[0].numel() // sizes["E"]
    if rows:
        grid = (triton.cdiv(rows, sizes["BM"]),)
        squash_kernel[grid](parts, before, sums, out, agreed, rows, len(parts), **sizes, num_warps=4, **OPTIONS)


def launch_squash_gradient(
    s: Tensor, grad: Tensor | None, parts: Tensor | None, total: Tensor | None, out: Tensor
) -> None:
    """parts [splits, ..., E], all others [..., E]."""
    sizes = tile(s.shape[-1])
    rows, splits = s.numel() // sizes["E"], 0 if parts is None else len(parts)
    if rows:
        grid = (triton.cdiv(rows, sizes["BM"]),)
        squash_gradient_kernel[grid](s, grad, parts, total, out, rows, splits, **sizes, num_warps=4, **OPTIONS)


def squash(vectors: Tensor) -> Tensor:
    """Squash the vectors along the last axis."""
    out = vectors.new_empty(vectors.shape)
    if vectors.numel():
        launch_squash(vectors[None], out=out)
    return out


def squash_gradient(grad: Tensor, vectors: Tensor) -> Tensor:
    out = vectors.new_empty(vectors.shape)
    if vectors.numel():
        launch_squash_gradient(vectors, grad, None, None, out)
    return out
