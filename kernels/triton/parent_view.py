"""The parent view: sums over the children of a parent.

A program owns BN images and BC types at one parent location, and one share of its slots and child types.
"""

import triton
import triton.language as tl

from tritoncaps.kernels.triton.votes import (
    ENTRIES,
    assignment,
    load_entries,
    log_likelihood,
    pose_votes,
    start_of_votes,
    weight_slope,
    zero_entries,
)


@triton.jit(do_not_specialize=["N", "L", "P", "S", "B", "C", "G", "steps"])
def parent_view_kernel(
    p_poses,
    p_activations,
    p_weight,
    p_children,
    p_weight_of,
    p_offset,
    p_parents_start,
    p_mean,
    p_precision,
    p_constant,
    p_log_sum,
    p_A,
    p_B,
    p_C,
    p_da,
    p_out,
    N,
    L,
    P,
    S,
    B,
    C,
    G,
    steps,
    WEIGHTS: tl.constexpr,
    LOCAL: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
    BC: tl.constexpr,
):
    """sum_i w d, sum_i w d^2 and sum_i w over the children i of a parent, with d = V - mean.

    WEIGHTS   "first"        w = a_i / competitors, of the parent's first slot only, and mean = 0
              "uniform"      w = a_i / competitors
              "assignment"   w = r = R a_i,  R = exp(l - log_sum)
              "gradient"     w = r (G - da),  G = A + sum_h (B_h + C_h d_h) d_h

    p_poses [N, L, 16, B], p_activations [N, L, B], p_weight [K, B, 16, C], p_children [P, S], p_weight_of [S],
    p_offset [S, 4], p_parents_start [L + 1]; p_mean, p_precision, p_B, p_C [N, P, 16, C]; p_constant, p_A
    [N, P, C]; p_log_sum, p_da [N, G, B]; p_out [splits, N, P, 33, C].

    Program (image block, type block, p, split), images fastest: split k takes `steps` of the S * ceil(B / BB)
    pairs of a slot and a block of child types, and writes p_out[k, images, p, :, types].
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    n_images = tl.cdiv(N, BN)
    n_types = tl.cdiv(C, BC)
    i_program = tl.program_id(0)
    i_rest = i_program // n_images
    i_p = (i_rest // n_types) % P
    i_split = i_rest // n_types // P
    o_n = ((i_program % n_images) * BN + tl.arange(0, BN)).to(tl.int64)[:, None, None]
    o_c = (i_rest % n_types) * BC + tl.arange(0, BC)[None, None, :]
    m_n = o_n < N
    m_c = o_c < C
    m_parent = m_n & m_c
    o_parent = o_n * P + i_p

    b_mean = zero_entries(BN, 1, BC, DTYPE)
    if WEIGHTS != "first":
        b_mean = load_entries(p_mean + o_parent * ENTRIES * C + o_c, C, m_parent, DTYPE)
    if WEIGHTS == "assignment" or WEIGHTS == "gradient":
        b_precision = load_entries(p_precision + o_parent * ENTRIES * C + o_c, C, m_parent, DTYPE)
        b_constant = tl.load(p_constant + o_parent * C + o_c, mask=m_parent, other=0.0)
    if WEIGHTS == "gradient":
        b_B = load_entries(p_B + o_parent * ENTRIES * C + o_c, C, m_parent, DTYPE)
        b_C = load_entries(p_C + o_parent * ENTRIES * C + o_c, C, m_parent, DTYPE)
        b_A = tl.load(p_A + o_parent * C + o_c, mask=m_parent, other=0.0)

    b_first = zero_entries(BN, BB, BC, DTYPE)
    b_second = zero_entries(BN, BB, BC, DTYPE)
    b_total = tl.zeros((BN, BB, BC), DTYPE)
    n_blocks = tl.cdiv(B, BB)
    i_begin = i_split * steps
    i_end = tl.minimum(i_begin + steps, S * n_blocks)
    is_done = False
    for i_s in range(i_begin // n_blocks, tl.cdiv(i_end, n_blocks)):
        i_l = tl.load(p_children + i_p * S + i_s)
        i_first = tl.maximum(i_begin - i_s * n_blocks, 0)
        i_last = tl.minimum(i_end - i_s * n_blocks, n_blocks)
        i_last = tl.where(i_l >= 0, i_last, 0)  # nobody votes from a missing slot
        if WEIGHTS == "first":
            i_last = tl.where(is_done, 0, i_last)
            is_done = is_done | (i_l >= 0)
        i_l = tl.maximum(i_l, 0)
        b_start = start_of_votes(p_offset, i_s, b_mean, DTYPE)
        p_slot_weight = p_weight + tl.load(p_weight_of + i_s).to(tl.int64) * B * ENTRIES * C + o_c
        o_child = o_n * L + i_l
        o_group = o_n * G + (i_p * S + i_s if LOCAL else i_l)
        if WEIGHTS == "first" or WEIGHTS == "uniform":
            n_competitors = C
            if not LOCAL:
                n_competitors *= tl.load(p_parents_start + i_l + 1) - tl.load(p_parents_start + i_l)
            b_share = 1.0 / tl.cast(n_competitors, DTYPE)
        for i_b in range(i_first * BB, i_last * BB, BB):
            o_b = i_b + tl.arange(0, BB)[None, :, None]
            m_child = m_n & (o_b < B)
            b_a = tl.load(p_activations + o_child * B + o_b, mask=m_child, other=0.0).to(DTYPE)
            m_loud = m_child & (b_a != 0)  # a silent child may hold inf or nan
            b_pose = load_entries(p_poses + o_child * ENTRIES * B + o_b, B, m_loud, DTYPE)
            b_weight = load_entries(p_slot_weight + o_b * ENTRIES * C, C, (o_b < B) & m_c, DTYPE)
            b_d = pose_votes(b_pose, b_weight, b_start)
            if WEIGHTS == "first" or WEIGHTS == "uniform":
                b_w = b_share * b_a
            else:
                b_log_sum = tl.load(p_log_sum + o_group * B + o_b, mask=m_child, other=0.0)
                b_w = assignment(log_likelihood(b_d, b_precision, b_constant), b_log_sum) * b_a
            if WEIGHTS == "gradient":
                b_da = tl.load(p_da + o_group * B + o_b, mask=m_child, other=0.0)
                b_w *= weight_slope(b_d, b_A, b_B, b_C) - b_da
            b_total += b_w
            b_new_first = ()
            b_new_second = ()
            for h in tl.static_range(ENTRIES):
                b_wd = b_w * b_d[h]
                b_new_first = b_new_first + (b_first[h] + b_wd,)
                b_new_second = b_new_second + (tl.fma(b_wd, b_d[h], b_second[h]),)
            b_first = b_new_first
            b_second = b_new_second

    p_entry = p_out + (i_split.to(tl.int64) * N * P + o_parent) * (2 * ENTRIES + 1) * C + o_c
    for h in tl.static_range(ENTRIES):
        tl.store(p_entry + h * C, tl.sum(b_first[h], axis=1, keep_dims=True), mask=m_parent)
        tl.store(p_entry + (ENTRIES + h) * C, tl.sum(b_second[h], axis=1, keep_dims=True), mask=m_parent)
    tl.store(p_entry + 2 * ENTRIES * C, tl.sum(b_total, axis=1, keep_dims=True), mask=m_parent)
