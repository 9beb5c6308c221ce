"""The second pass of a split sum, always in the same order."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit(do_not_specialize=["size"])
def add_splits_kernel(p_partial, p_out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """out = sum_k partial_k.

    p_partial [SPLITS, size], p_out [size]. Program i writes p_out[i * BLOCK : (i + 1) * BLOCK].
    """
    o_i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < size
    b_sum = tl.zeros((BLOCK,), p_out.dtype.element_ty)
    for _ in range(SPLITS):
        b_sum += tl.load(p_partial + o_i, mask=m_i, other=0.0)
        p_partial += size
    tl.store(p_out + o_i, b_sum, mask=m_i)


@triton.jit(do_not_specialize=["size"])
def merge_moments_kernel(
    p_partial, p_out, size, SPLITS: tl.constexpr, COUNT: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    """total = sum_k total_k,  m = sum_k total_k m_k / total,  second = sum_k second_k + total_k (m_k - m)^2.

    p_partial [SPLITS, size / C, 2 COUNT + 1, C]: COUNT rows of m, COUNT of second and total; p_out the same without
    splits. Program i writes parents i * BLOCK to (i + 1) * BLOCK of the `size`.
    """
    ROWS: tl.constexpr = 2 * COUNT + 1
    o_j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_j = o_j < size
    o_first = o_j // C * ROWS * C + o_j % C
    o_total = o_first + 2 * COUNT * C
    b_total = tl.zeros((BLOCK,), p_out.dtype.element_ty)
    for i_split in range(SPLITS):
        b_total += tl.load(p_partial + i_split * size * ROWS + o_total, mask=m_j, other=0.0)
    tl.store(p_out + o_total, b_total, mask=m_j)
    b_inverse = 1.0 / tl.where(b_total > 0, b_total, 1.0)
    for h in range(COUNT):
        o_h = o_first + h * C
        b_m = tl.zeros((BLOCK,), p_out.dtype.element_ty)
        for i_split in range(SPLITS):
            b_w = tl.load(p_partial + i_split * size * ROWS + o_total, mask=m_j, other=0.0)
            b_m += b_w * b_inverse * tl.load(p_partial + i_split * size * ROWS + o_h, mask=m_j, other=0.0)
        b_second = tl.zeros((BLOCK,), p_out.dtype.element_ty)
        for i_split in range(SPLITS):
            p_split = p_partial + i_split * size * ROWS
            b_w = tl.load(p_split + o_total, mask=m_j, other=0.0)
            b_step = tl.load(p_split + o_h, mask=m_j, other=0.0) - b_m
            b_second += tl.load(p_split + o_h + COUNT * C, mask=m_j, other=0.0) + b_w * b_step * b_step
        tl.store(p_out + o_h, b_m, mask=m_j)
        tl.store(p_out + o_h + COUNT * C, b_second, mask=m_j)


def add_splits(partial: Tensor) -> Tensor:
    """[splits, ...] -> [...]."""
    if len(partial) == 1 or partial.numel() == 0:
        return partial[0]
    out = partial.new_empty(partial.shape[1:])
    add_splits_kernel[(triton.cdiv(out.numel(), BLOCK),)](partial, out, out.numel(), len(partial), BLOCK, num_warps=4)
    return out


def merge_moments(partial: Tensor) -> Tensor:
    """[splits, N, P, 2 COUNT + 1, C] -> [N, P, 2 COUNT + 1, C], of moments about their own means."""
    if len(partial) == 1 or partial.numel() == 0:
        return partial[0]
    splits, N, P, rows, C = partial.shape
    out = partial.new_empty(N, P, rows, C)
    size = N * P * C
    merge_moments_kernel[(triton.cdiv(size, BLOCK),)](partial, out, size, splits, rows // 2, C, BLOCK, num_warps=4)
    return out
