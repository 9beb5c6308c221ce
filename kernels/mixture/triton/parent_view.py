"""The parent view: sums over the children of a parent.

A program owns BN images and a block of 16 types at one parent location, and a split of its slots and child types.
"""

import triton
import triton.language as tl

from tritoncaps.kernels.common.triton.launching import UNALIGNED
from tritoncaps.kernels.mixture.triton.costs import launch_metadata
from tritoncaps.kernels.mixture.triton.rows import FIRST, MEAN, TOTAL, TYPES
from tritoncaps.kernels.mixture.triton.votes import (
    SLOPES,
    about_centre,
    assignment,
    child_types_from,
    edge_votes,
    images_from,
    load_entries,
    load_gaussian,
    load_offset,
    load_poses,
    load_slopes,
    load_weight,
    log_likelihood,
    of_group,
    parent_types,
    subtract_entries,
    uniform_share,
    weight_slope,
    zero_entries,
)


@triton.jit(
    launch_metadata=launch_metadata,
    do_not_specialize=["N", "L", "P", "S", "B", "C", "G", "i_h", "steps"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def parent_view_kernel(
    p_poses,
    p_weight,
    p_votes,
    p_activations,
    p_children,
    p_weight_of,
    p_offset,
    p_parents_start,
    p_statistics,
    p_slopes,
    p_log_sum,
    p_da,
    p_weights,
    p_out,
    N,
    L,
    P,
    S,
    B,
    C,
    G,
    H: tl.constexpr,
    i_h,
    steps,
    WEIGHTS: tl.constexpr,
    LOCAL: tl.constexpr,
    BY_TYPE: tl.constexpr,
    COUNT: tl.constexpr,
    ANY_FIT: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """The moments of the votes for a parent, over its children i, with d = V - mean (d = V without p_statistics).

    WEIGHTS   "uniform"             w = a_i / competitors
              "assignment"          w = r = R a_i,  R = exp(l - log_sum)
              "stored assignment"   w = weights a_i
              "gradient"            w = dl = r (G - da),  G = offset + sum_h (linear_h + quadratic_h e_h) e_h
              "stored gradient"     w = weights

    For assignments: m = sum_i w d / sum_i w, sum_i w (d - m)^2 and sum_i w, updated child by child (West 1979), so that
    a small variance does not cancel. For gradients, which have both signs: sum_i w d, sum_i w d^2 and sum_i w.

    Votes are computed from p_poses [N, L, B, 16] and p_weight, then H = COUNT = 16; or loaded from p_votes
    [N, P, S, B, H, C], the entries i_h, ..., i_h + COUNT - 1.

    p_activations [N, L, B], p_children [P, S], p_weight_of [S], p_offset [S, 4], p_parents_start [L + 1]; p_log_sum and
    p_da [N, G, B], see `of_group`; p_weights [N, P, S, B, C]; p_weight, p_statistics, p_slopes and p_out (moments) as
    in `rows.py`.

    Program (image block, type block, p, split), images fastest: split k takes `steps` of the S * ceil(B / BB)
    pairs of a slot and a block of child types, and owns p_out[k, images, p, type block].
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    ABOUT_MEAN: tl.constexpr = WEIGHTS != "gradient" and WEIGHTS != "stored gradient"
    STORED: tl.constexpr = p_votes is not None
    # In float64, registers cannot hold the rows of the parents: they are loaded again for every child.
    RELOADED: tl.constexpr = tl.float64 == DTYPE and not STORED and WEIGHTS != "uniform"
    n_images = tl.cdiv(N, BN)
    n_types = tl.cdiv(C, TYPES)
    i_program = tl.program_id(0)
    i_rest = i_program // n_images
    i_c = i_rest % n_types
    i_p = (i_rest // n_types) % P
    i_split = i_rest // n_types // P
    o_n, m_n = images_from((i_program % n_images) * BN, N, BN)
    o_c = i_c * TYPES + parent_types()
    o_parent = o_n * P + i_p
    o_block = o_parent * n_types + i_c
    p_parent_statistics = p_statistics
    if p_statistics is not None:
        p_parent_statistics += o_block * (MEAN + 2 * H) * TYPES + parent_types()
    if not RELOADED and (WEIGHTS == "gradient" or WEIGHTS == "assignment"):
        b_mean, b_precision, b_constant = load_gaussian(p_parent_statistics, None, DTYPE)
    elif STORED and p_statistics is not None:
        b_mean = load_entries(p_parent_statistics + (MEAN + i_h) * TYPES, TYPES, None, COUNT, DTYPE)
    if WEIGHTS == "gradient":
        p_parent_slopes = p_slopes + o_block * SLOPES + parent_types()
        if not RELOADED:
            b_G0, b_linear, b_quadratic, b_origin = load_slopes(p_parent_slopes, None, DTYPE)

    b_first = zero_entries(BN, BB, COUNT, DTYPE)
    b_second = zero_entries(BN, BB, COUNT, DTYPE)
    b_total = tl.zeros((BN, BB, TYPES), DTYPE)
    n_blocks = tl.cdiv(B, BB)
    i_begin = i_split * steps
    i_end = tl.minimum(i_begin + steps, S * n_blocks)
    for i_s in range(i_begin // n_blocks, tl.cdiv(i_end, n_blocks)):
        i_l = tl.load(p_children + i_p * S + i_s)
        i_first = tl.maximum(i_begin - i_s * n_blocks, 0)
        i_last = tl.minimum(i_end - i_s * n_blocks, n_blocks)
        i_last = tl.where(i_l >= 0, i_last, 0)  # a missing slot has no votes
        i_l = tl.maximum(i_l, 0)
        b_offset = load_offset(p_offset, i_s, DTYPE)
        o_child = (o_n * L + i_l) * B
        o_group = (o_n * G + (i_p * S + i_s if LOCAL else i_l)) * B
        if p_weight is not None:
            o_weight = tl.load(p_weight_of + i_s).to(tl.int64) * B
        if WEIGHTS == "uniform":
            b_share = uniform_share(p_parents_start, i_l, C, LOCAL, BY_TYPE, DTYPE)
        for i_b in range(i_first * BB, i_last * BB, BB):
            o_b, m_b = child_types_from(i_b, B, BB)
            m_loud = m_b
            if WEIGHTS != "stored gradient":
                b_a = tl.load(p_activations + o_child + o_b, mask=m_b, other=0.0).to(DTYPE)
                m_loud = m_b & (b_a != 0)  # the pose of a child with activation zero may be inf or nan
            o_edge = ((o_parent * S + i_s) * B + o_b) * C
            if not STORED:
                b_pose = load_poses(p_poses, o_child + o_b, m_loud, DTYPE)
                b_weight = load_weight(p_weight, (o_weight + o_b) * n_types + i_c, None, DTYPE)
                b_votes = edge_votes(b_pose, b_weight, b_offset, None, C, None, COUNT, DTYPE)
            else:
                p_edge_votes = p_votes + o_edge * H + i_h * C + o_c
                b_votes = edge_votes(None, None, b_offset, p_edge_votes, C, m_b & (o_c < C), COUNT, DTYPE)
            if RELOADED:
                b_mean, b_precision, b_constant = load_gaussian(p_parent_statistics, m_b, DTYPE)
            b_d = b_votes
            if p_statistics is not None:
                b_d = subtract_entries(b_votes, b_mean)
            if WEIGHTS == "uniform":
                b_w = b_share * b_a
            elif STORED:
                b_w = tl.load(p_weights + o_edge + o_c, mask=m_b & (o_c < C), other=0.0).to(DTYPE)
                if WEIGHTS == "stored assignment":
                    b_w *= b_a
            else:
                b_log_sum = tl.load(p_log_sum + of_group(o_group + o_b, i_c, C, BY_TYPE)).to(DTYPE)
                b_R = assignment(log_likelihood(b_d, b_precision, b_constant), b_log_sum)
                b_w = b_R * b_a
            if WEIGHTS == "gradient":
                if RELOADED:  # a mask that depends on R: the compiler cannot move the loads to an earlier place
                    b_G0, b_linear, b_quadratic, b_origin = load_slopes(p_parent_slopes, m_b & (b_R >= 0), DTYPE)
                b_da = tl.load(p_da + of_group(o_group + o_b, i_c, C, BY_TYPE)).to(DTYPE)
                b_e = about_centre(b_votes, b_d, b_origin, ANY_FIT)
                b_w *= weight_slope(b_e, b_G0, b_linear, b_quadratic) - b_da
            if ABOUT_MEAN:
                b_first, b_second, b_total = add_about_mean(b_first, b_second, b_total, b_w, b_d)
            else:
                b_first, b_second, b_total = add(b_first, b_second, b_total, b_w, b_d)

    if ABOUT_MEAN:
        b_sum = tl.sum(b_total, axis=1, keep_dims=True)
        b_share = b_total / tl.where(b_sum > 0, b_sum, 1.0)
    o_out = i_split.to(tl.int64) * N * P * n_types + o_block
    p_moments = p_out + o_out * (FIRST + 2 * H) * TYPES + parent_types()
    for h in tl.static_range(COUNT):
        b_f = b_first[h]
        b_s = b_second[h]
        if ABOUT_MEAN:
            b_m = tl.sum(b_share * b_f, axis=1, keep_dims=True)
            b_s += b_total * (b_f - b_m) * (b_f - b_m)
            b_f *= b_share
        tl.store(p_moments + (FIRST + i_h + h) * TYPES, tl.sum(b_f, axis=1, keep_dims=True), mask=m_n)
        tl.store(p_moments + (FIRST + H + i_h + h) * TYPES, tl.sum(b_s, axis=1, keep_dims=True), mask=m_n)
    tl.store(p_moments + TOTAL * TYPES, tl.sum(b_total, axis=1, keep_dims=True), mask=m_n)


@triton.jit
def add(b_first, b_second, b_total, b_w, b_d):
    """Add one child to the moments: sums of w d, w d^2 and w."""
    b_new_first = ()
    b_new_second = ()
    for h in tl.static_range(len(b_d)):
        b_wd = b_w * b_d[h]
        b_new_first = b_new_first + (b_first[h] + b_wd,)
        b_new_second = b_new_second + (tl.fma(b_wd, b_d[h], b_second[h]),)
    return b_new_first, b_new_second, b_total + b_w


@triton.jit
def add_about_mean(b_mean, b_second, b_total, b_w, b_d):
    """Add one child to the moments: mean of d, sum of w (d - mean)^2, sum of w."""
    b_sum = b_total + b_w
    b_share = b_w / tl.where(b_sum > 0, b_sum, 1.0)
    b_weight = b_total * b_share
    b_new_mean = ()
    b_new_second = ()
    for h in tl.static_range(len(b_d)):
        b_step = b_d[h] - b_mean[h]
        b_new_mean = b_new_mean + (tl.fma(b_share, b_step, b_mean[h]),)
        b_new_second = b_new_second + (tl.fma(b_weight * b_step, b_step, b_second[h]),)
    return b_new_mean, b_new_second, b_sum
