"""The weight view: sums over images and over the pairs of locations that share a weight block.

A program owns BB child types and a block of 16 parent types of one weight block, and one split: a part of the images
and of the pairs. `add_splits_kernel` adds the splits.
"""

import triton
import triton.language as tl

from tritoncaps.kernels.common.triton.launching import UNALIGNED
from tritoncaps.kernels.mixture.triton.costs import launch_metadata, sum_metadata
from tritoncaps.kernels.mixture.triton.rows import ENTRIES, TYPES
from tritoncaps.kernels.mixture.triton.votes import (
    WEIGHTS,
    child_types_from,
    edge_votes,
    images_from,
    load_entries,
    load_offset,
    load_poses,
    load_weight,
    of_group,
    parent_types,
    uniform_share,
    vote_gradient,
    zero_entries,
)


@triton.jit(
    launch_metadata=launch_metadata,
    do_not_specialize=["N", "L", "P", "S", "G", "K", "T", "B", "C", "pair_splits", "image_splits"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def weight_view_kernel(
    p_poses,
    p_weight,
    p_activations,
    p_dV,
    p_offset,
    p_parents_start,
    p_weight_start,
    p_pair_child,
    p_pair_parent,
    p_pair_slot,
    p_statistics,
    p_slopes,
    p_log_sums,
    p_da,
    p_out,
    N,
    L,
    P,
    S,
    B,
    C,
    G,
    K,
    T,
    pair_splits,
    image_splits,
    ALL: tl.constexpr,
    ANY_FIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BY_TYPE: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """dW_k = sum M^T dV, over all images and all pairs (child location, parent location) that use weight block k.

    dV is the result of `vote_gradient`: the sum over all T iterations, or only the last iteration if not ALL. If p_dV
    [N, P, S, B, 16, C] is given, the kernel loads dV from it.

    p_poses [N, L, B, 16], p_weight [K, B, blocks, 16, 16], p_activations [N, L, B], p_offset [S, 4], p_parents_start
    [L + 1]; p_weight_start [K + 1], p_pair_child, p_pair_parent and p_pair_slot [pairs]; p_statistics
    [T - 1, N, P, blocks, 36, 16] and p_slopes [T, N, P, blocks, 51, 16], rows as in `rows.py`; p_log_sums and p_da
    [T - 1, N, G, B], see `of_group`; p_out [splits, K, B, blocks, 16, 16].

    Program (child type block, parent type block, weight block k, split) owns p_out[split, k, child types, type block].
    It sums over every pair_splits-th pair of weight block k and every image_splits-th block of BN images.
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    n_child_types = tl.cdiv(B, BB)
    n_blocks = tl.cdiv(C, TYPES)
    sizes = (N.to(tl.int64) * P * n_blocks, n_blocks, N.to(tl.int64) * G * B, T)
    i_program = tl.program_id(0)
    i_rest = i_program // n_child_types // n_blocks
    i_k = i_rest % K
    i_split = i_rest // K
    o_b, m_b = child_types_from((i_program % n_child_types) * BB, B, BB)
    i_c = (i_program // n_child_types) % n_blocks
    o_weight = (i_k.to(tl.int64) * B + o_b) * n_blocks + i_c
    if p_dV is None and tl.float64 == DTYPE:
        b_weight = load_weight(p_weight, o_weight, None, DTYPE)
    i_begin = tl.load(p_weight_start + i_k)
    i_end = tl.load(p_weight_start + i_k + 1)
    i_first = i_split // pair_splits * BN

    b_dW = zero_entries(BN, BB, ENTRIES, DTYPE)
    for i_pair in range(i_begin + i_split % pair_splits, i_end, pair_splits):
        i_l = tl.load(p_pair_child + i_pair)
        i_p = tl.load(p_pair_parent + i_pair)
        i_s = tl.load(p_pair_slot + i_pair)
        b_offset = load_offset(p_offset, i_s, DTYPE)
        if p_dV is None:
            b_share = uniform_share(p_parents_start, i_l, C, LOCAL, BY_TYPE, DTYPE)
        for i_n in range(i_first, N, image_splits * BN):
            o_n, m_n = images_from(i_n, N, BN)
            o_child = (o_n * L + i_l) * B + o_b
            o_parent = o_n * P + i_p
            if p_dV is None:
                o_group = (o_n * G + (i_p * S + i_s if LOCAL else i_l)) * B + o_b
                b_a = tl.load(p_activations + o_child, mask=m_n, other=0.0).to(DTYPE)
                m_loud = b_a != 0  # the pose of a child with activation zero may be inf or nan
                b_pose = load_poses(p_poses, o_child, m_loud, DTYPE)
                if tl.float64 != DTYPE:  # with a mask, the compiler does not keep it in registers, which are few
                    b_weight = load_weight(p_weight, o_weight, o_b + i_n >= 0, DTYPE)
                b_dV, _ = vote_gradient(
                    edge_votes(b_pose, b_weight, b_offset, None, C, None, ENTRIES, DTYPE),
                    b_a,
                    b_share,
                    (p_statistics, p_slopes, p_log_sums, p_da),
                    (o_parent, i_c, of_group(o_group, i_c, C, BY_TYPE)),
                    sizes,
                    ALL,
                    ANY_FIT,
                    BY_TYPE,
                )
                if tl.float64 == DTYPE:  # load it again: with another mask, the compiler does not keep it in registers
                    b_pose = load_poses(p_poses, o_child, m_loud & (i_p >= 0), DTYPE)
            else:
                b_pose = load_poses(p_poses, o_child, m_n, DTYPE)
                o_c = i_c * TYPES + parent_types()
                p_edge = p_dV + ((o_parent * S + i_s) * B + o_b) * ENTRIES * C + o_c
                b_dV = load_entries(p_edge, C, o_c < C, ENTRIES, DTYPE)
            b_dW = add_transposed_product(b_dW, b_pose, b_dV)

    p_block = p_out + (i_split.to(tl.int64) * K * B * n_blocks + o_weight) * WEIGHTS + parent_types()
    for h in tl.static_range(ENTRIES):
        tl.store(p_block + h * TYPES, tl.sum(b_dW[h], axis=0, keep_dims=True), mask=m_b)


@triton.jit
def add_transposed_product(b_sum, b_left, b_right):
    """sum + left^T right of 4x4 matrices: entry yq is sum_yq + sum_x left_xy right_xq."""
    b_new = ()
    for h in tl.static_range(ENTRIES):
        b_entry = b_sum[h]
        for x in tl.static_range(4):
            b_entry = tl.fma(b_left[4 * x + h // 4], b_right[4 * x + h % 4], b_entry)
        b_new = b_new + (b_entry,)
    return b_new


@triton.jit(launch_metadata=sum_metadata, do_not_specialize=["size", "splits", "C"])
def add_splits_kernel(p_partial, p_out, size, splits, C, BLOCK_SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """dW = sum of partial over the splits, always in the same order; dW has the layout of the weight.

    p_partial [splits, K B, blocks, 16, 16], rows as in `rows.py`: `size` numbers in each split; p_out [K B, C, 16].

    A program owns BLOCK of the `size` numbers. It loads BLOCK_SPLITS splits of them at a time.
    """
    o_k = tl.arange(0, BLOCK_SPLITS)[:, None]
    o_i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_i = o_i < size
    b_sums = tl.zeros((BLOCK_SPLITS, BLOCK), p_out.dtype.element_ty)
    for i_k in range(0, splits, BLOCK_SPLITS):
        p_split = p_partial + (i_k + o_k) * size.to(tl.int64) + o_i
        b_sums += tl.load(p_split, mask=(i_k + o_k < splits) & m_i, other=0.0)
    n_blocks = tl.cdiv(C, TYPES)
    o_block = o_i // WEIGHTS
    o_c = o_block % n_blocks * TYPES + o_i % TYPES
    o_out = (o_block // n_blocks * C + o_c) * ENTRIES + o_i // TYPES % ENTRIES
    tl.store(p_out + o_out, tl.sum(b_sums, axis=0, keep_dims=True), mask=m_i & (o_c < C))
