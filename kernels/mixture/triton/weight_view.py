"""The weight view: sums over images and positions.

A program owns BB child types and BC parent types of one weight block, and one share of the images and positions.
"""

import triton
import triton.language as tl

from tritoncaps.kernels.mixture.triton.costs import launch_metadata, sum_metadata
from tritoncaps.kernels.mixture.triton.votes import (
    ENTRIES,
    below,
    edge_votes,
    images_from,
    load_entries,
    load_offset,
    uniform_share,
    vote_gradient,
    zero_entries,
)


@triton.jit(
    launch_metadata=launch_metadata,
    do_not_specialize=["N", "L", "P", "S", "G", "K", "T", "pair_splits", "image_splits"],
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
    B: tl.constexpr,
    C: tl.constexpr,
    G,
    K,
    T,
    pair_splits,
    image_splits,
    ALL: tl.constexpr,
    ANY_FIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
    BC: tl.constexpr,
):
    """dW = sum over images and over the pairs of locations that use W of M^T dV.

    dV is `vote_gradient` of all T iterations, or of the last if not ALL; or loaded from p_dV [N, P, S, B, 16, C].

    p_poses [N, L, 16, B], p_weight [K, B, 16, C], p_activations [N, L, B], p_offset [S, 4], p_parents_start [L + 1];
    p_weight_start [K + 1], p_pair_child, p_pair_parent and p_pair_slot [pairs]; p_statistics [T - 1, N, P, 36, C],
    p_slopes [T, N, P, 51, C], p_log_sums and p_da [T - 1, N, G, B]; p_out [splits, K, B, 16, C].

    Program (child type block, parent type block, weight block, split): a split takes every pair_splits-th pair of
    the weight block and every image_splits-th block of BN images, and writes p_out[split, k, child types, :, types].
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    n_child_types = tl.cdiv(B, BB)
    n_parent_types = tl.cdiv(C, BC)
    i_program = tl.program_id(0)
    i_rest = i_program // n_child_types // n_parent_types
    i_k = i_rest % K
    i_split = i_rest // K
    o_b = (i_program % n_child_types) * BB + tl.arange(0, BB)[None, :, None]
    o_c = ((i_program // n_child_types) % n_parent_types) * BC + tl.arange(0, BC)[None, None, :]
    m_b = below(o_b, B, BB)
    m_c = below(o_c, C, BC)
    o_weight = (i_k.to(tl.int64) * B + o_b) * ENTRIES * C + o_c
    if p_dV is None:
        b_weight = load_entries(p_weight + o_weight, C, m_b & m_c, ENTRIES, DTYPE)
    i_begin = tl.load(p_weight_start + i_k)
    i_end = tl.load(p_weight_start + i_k + 1)
    i_first = i_split // pair_splits * BN

    b_dW = zero_entries(BN, BB, BC, ENTRIES, DTYPE)
    for i_pair in range(i_begin + i_split % pair_splits, i_end, pair_splits):
        i_l = tl.load(p_pair_child + i_pair)
        i_p = tl.load(p_pair_parent + i_pair)
        i_s = tl.load(p_pair_slot + i_pair)
        b_offset = load_offset(p_offset, i_s, DTYPE)
        if p_dV is None:
            b_share = uniform_share(p_parents_start, i_l, C, LOCAL, DTYPE)
        for i_n in range(i_first, N, image_splits * BN):
            o_n, m_n = images_from(i_n, N, BN)
            m_child = m_n & m_b
            o_child = o_n * L + i_l
            p_pose = p_poses + o_child * ENTRIES * B + o_b
            if p_dV is None:
                b_a = tl.load(p_activations + o_child * B + o_b, mask=m_child, other=0.0).to(DTYPE)
                m_loud = m_child & (b_a != 0)  # a silent child may hold inf or nan
                b_pose = load_entries(p_pose, B, m_loud, ENTRIES, DTYPE)
                b_dV, _ = vote_gradient(
                    edge_votes(b_pose, b_weight, b_offset, None, C, None, ENTRIES, DTYPE),
                    b_a,
                    b_share,
                    (p_statistics, p_slopes, p_log_sums, p_da),
                    (o_n, o_b, o_c, i_p, i_p * S + i_s if LOCAL else i_l),
                    (m_b, m_c),
                    (N, P, G, T),
                    B,
                    C,
                    ALL,
                    ANY_FIT,
                )
                if tl.float64 == DTYPE:  # has no room to keep it, as the compiler would if the mask were the same
                    b_pose = load_entries(p_pose, B, m_loud & (i_p >= 0), ENTRIES, DTYPE)
            else:
                b_pose = load_entries(p_pose, B, m_child, ENTRIES, DTYPE)
                p_edge = p_dV + (((o_n * P + i_p) * S + i_s) * B + o_b) * ENTRIES * C + o_c
                b_dV = load_entries(p_edge, C, m_b & m_c, ENTRIES, DTYPE)
            b_dW = add_transposed_product(b_dW, b_pose, b_dV)

    p_block = p_out + i_split.to(tl.int64) * K * B * ENTRIES * C + o_weight
    for h in tl.static_range(ENTRIES):
        tl.store(p_block + h * C, tl.sum(b_dW[h], axis=0, keep_dims=True), mask=m_b & m_c)


@triton.jit
def add_transposed_product(b_sum, b_left, b_right):
    """sum_yq + sum_x left_xy right_xq."""
    b_new = ()
    for h in tl.static_range(ENTRIES):
        b_entry = b_sum[h]
        for x in tl.static_range(4):
            b_entry = tl.fma(b_left[4 * x + h // 4], b_right[4 * x + h % 4], b_entry)
        b_new = b_new + (b_entry,)
    return b_new


@triton.jit(launch_metadata=sum_metadata, do_not_specialize=["size", "splits"])
def add_splits_kernel(p_partial, p_out, size, splits, C: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """dW = sum_k partial_k, always in the same order, in the layout of the weight.

    p_partial [splits, size / 16 C, 16, C], p_out [size / 16 C, C, 16]. A program owns BLOCK numbers of p_out, and loads
    those of BLOCK_SPLITS splits at a time.
    """
    o_k = tl.arange(0, BLOCK_SPLITS)[:, None]
    o_i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_i = o_i < size
    b_sums = tl.zeros((BLOCK_SPLITS, BLOCK), p_out.dtype.element_ty)
    for i_k in range(0, splits, BLOCK_SPLITS):
        p_split = p_partial + (i_k + o_k) * size.to(tl.int64) + o_i
        b_sums += tl.load(p_split, mask=(i_k + o_k < splits) & m_i, other=0.0)
    o_out = (o_i // (ENTRIES * C) * C + o_i % C) * ENTRIES + o_i // C % ENTRIES
    tl.store(p_out + o_out, tl.sum(b_sums, axis=0, keep_dims=True), mask=m_i)
