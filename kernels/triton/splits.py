"""The second pass of a split sum."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit(do_not_specialize=["size"])
def add_splits_kernel(p_partial, p_out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """out = sum_k partial_k, always in the same order.

    p_partial [SPLITS, size], p_out [size]. Program i writes p_out[i * BLOCK : (i + 1) * BLOCK].
    """
    o_i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < size
    b_sum = tl.zeros((BLOCK,), p_out.dtype.element_ty)
    for _ in range(SPLITS):
        b_sum += tl.load(p_partial + o_i, mask=m_i, other=0.0)
        p_partial += size
    tl.store(p_out + o_i, b_sum, mask=m_i)


def add_splits(partial: Tensor) -> Tensor:
    """[splits, ...] -> [...]."""
    if len(partial) == 1 or partial.numel() == 0:
        return partial[0]
    out = partial.new_empty(partial.shape[1:])
    add_splits_kernel[(triton.cdiv(out.numel(), BLOCK),)](partial, out, out.numel(), len(partial), BLOCK, num_warps=4)
    return out
