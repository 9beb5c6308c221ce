"""The child view: sums over the parents of a child.

`child_gradient_kernel`: a program owns BN images and BB child types at one child location, and sums over all parents.
The other kernels: a program owns BN images and BB child types of one group, and sums over the parents that compete in
this group. If only positions compete (BY_TYPE), it owns one block of parent types, and sums over the positions of each
type. A program reads its pairs (parent location, slot) from two lists: p_pair_parent and p_pair_slot.
"""

import triton
import triton.language as tl

from tritoncaps.kernels.common.triton.launching import UNALIGNED
from tritoncaps.kernels.mixture.triton.costs import launch_metadata
from tritoncaps.kernels.mixture.triton.rows import CONSTANT, ENTRIES, MEAN, TYPES
from tritoncaps.kernels.mixture.triton.votes import (
    SLOPES,
    STATISTICS,
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
    vote_gradient,
    weight_slope,
    zero_entries,
)


@triton.jit
def child_tile(N, B, BN: tl.constexpr, BB: tl.constexpr):
    """Images [BN, 1, 1], child types [1, BB, 1] and owner of a program, and the mask [BN, BB, 1] of existing children.

    The owner is a child location, a group or a pair. Programs with consecutive numbers own consecutive image blocks.
    """
    n_images = tl.cdiv(N, BN)
    n_types = tl.cdiv(B, BB)
    i_program = tl.program_id(0)
    o_n, m_n = images_from((i_program % n_images) * BN, N, BN)
    o_b, m_b = child_types_from(((i_program // n_images) % n_types) * BB, B, BB)
    return o_n, o_b, i_program // n_images // n_types, m_n & m_b


@triton.jit
def load_group(p_group_child, p_group_start, i_g):
    """The child location of group i_g, and the range of its pairs, which is empty if the group is a missing slot."""
    i_l = tl.load(p_group_child + i_g)
    i_begin = tl.load(p_group_start + i_g)
    i_end = tl.where(i_l >= 0, tl.load(p_group_start + i_g + 1), i_begin)
    return tl.maximum(i_l, 0), i_begin, i_end


@triton.jit
def types_of_owner(i_owner, C, BY_TYPE: tl.constexpr):
    """The group of an owner, and its blocks of parent types: the first, and the one after the last."""
    n_blocks = tl.cdiv(C, TYPES)
    i_g, i_first, i_last = i_owner, n_blocks * 0, n_blocks
    if BY_TYPE:
        i_g, i_first = i_owner // n_blocks, i_owner % n_blocks
        i_last = i_first + 1
    return i_g, i_first, i_last


@triton.jit
def load_child(p_poses, p_activations, o_child, mask, DTYPE: tl.constexpr):
    """Activations [BN, BB, 1] and poses, sixteen tiles [BN, BB, 1], of the children o_child.

    If the activation of a child is zero, each inf or nan in its pose becomes zero.
    """
    b_a = tl.load(p_activations + o_child).to(DTYPE)
    b_loaded = load_poses(p_poses, o_child, mask, DTYPE)
    b_pose = ()
    for h in tl.static_range(ENTRIES):
        m_number = (b_a != 0) | (tl.abs(b_loaded[h]) < float("inf"))
        b_pose = b_pose + (tl.where(m_number, b_loaded[h], 0.0),)
    return b_a, b_pose


@triton.jit(
    launch_metadata=launch_metadata,
    do_not_specialize=["N", "L", "P", "S", "G", "B", "C"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def log_sum_kernel(
    p_poses,
    p_weight,
    p_votes,
    p_activations,
    p_weight_of,
    p_offset,
    p_group_child,
    p_group_start,
    p_pair_parent,
    p_pair_slot,
    p_statistics,
    p_out,
    N,
    L,
    P,
    S,
    B,
    C,
    G,
    H: tl.constexpr,
    BY_TYPE: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """log_sum_i = log sum_j exp(l_ij) over the parents j that compete for child i; zero if there are none.

    l = constant - sum_h precision_h d_h^2,  d = V - mean.

    The kernel computes the votes V from p_poses [N, L, B, 16], p_weight [K, B, blocks, 16, 16], p_weight_of [S] and
    p_offset [S, 4], then H = 16; or it loads them from p_votes [N, P, S, B, H, C].

    p_activations [N, L, B]; p_group_child [G], p_group_start [G + 1], p_pair_parent and p_pair_slot [pairs];
    p_statistics [N, P, blocks, 4 + 2 H, 16], rows as in `rows.py`; p_out [N, G, B], or with BY_TYPE
    [N, G, B, blocks, 16].

    Program (image block, child type block, group) owns p_out[images, group, child types], with BY_TYPE one block of it.
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    o_n, o_b, i_owner, m_child = child_tile(N, B, BN, BB)
    i_g, i_first, i_last = types_of_owner(i_owner, C, BY_TYPE)
    i_l, i_begin, i_end = load_group(p_group_child, p_group_start, i_g)
    if p_votes is None:
        _, b_pose = load_child(p_poses, p_activations, (o_n * L + i_l) * B + o_b, None, DTYPE)

    # Each element of the tile has its own running maximum, and its own sum of exp(l - maximum).
    b_max = tl.full((BN, BB, TYPES), float("-inf"), DTYPE)
    b_sum = tl.zeros((BN, BB, TYPES), DTYPE)
    n_blocks = tl.cdiv(C, TYPES)
    for i_pair in range(i_begin, i_end):
        i_s = tl.load(p_pair_slot + i_pair)
        b_offset = load_offset(p_offset, i_s, DTYPE)
        o_parent = o_n * P + tl.load(p_pair_parent + i_pair)
        for i_c in range(i_first, i_last):
            p_parent = p_statistics + (o_parent * n_blocks + i_c) * (MEAN + 2 * H) * TYPES + parent_types()
            b_l = tl.load(p_parent + CONSTANT * TYPES).to(DTYPE)
            for i_h in tl.static_range(0, H, ENTRIES):
                b_mean = load_entries(p_parent + (MEAN + i_h) * TYPES, TYPES, None, H - i_h, DTYPE)
                b_precision = load_entries(p_parent + (MEAN + H + i_h) * TYPES, TYPES, None, H - i_h, DTYPE)
                if p_votes is None:
                    o_weight = tl.load(p_weight_of + i_s).to(tl.int64) * B + o_b
                    b_weight = load_weight(p_weight, o_weight * n_blocks + i_c, None, DTYPE)
                    b_votes = edge_votes(b_pose, b_weight, b_offset, None, C, None, ENTRIES, DTYPE)
                else:
                    o_c = i_c * TYPES + parent_types()
                    p_edge_votes = p_votes + (((o_parent * S + i_s) * B + o_b) * H + i_h) * C + o_c
                    b_votes = edge_votes(None, None, b_offset, p_edge_votes, C, o_c < C, H - i_h, DTYPE)
                b_l = log_likelihood(subtract_entries(b_votes, b_mean), b_precision, b_l)
            b_new_max = tl.maximum(b_max, b_l)
            b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
            b_sum = b_sum * tl.exp(b_max - b_shift) + tl.exp(b_l - b_shift)
            b_max = b_new_max
    b_top = b_max
    if not BY_TYPE:
        b_top = tl.max(b_max, axis=2, keep_dims=True)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_sum *= tl.exp(b_max - b_top)
    if not BY_TYPE:
        b_sum = tl.sum(b_sum, axis=2, keep_dims=True)
    b_log_sum = b_top + tl.log(tl.where(b_sum == 0, 1.0, b_sum))
    tl.store(p_out + of_group((o_n * G + i_g) * B + o_b, i_first, C, BY_TYPE), b_log_sum, mask=m_child)


@triton.jit(
    launch_metadata=launch_metadata,
    do_not_specialize=["N", "L", "P", "G", "B", "C"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def assignment_gradient_kernel(
    p_poses,
    p_weight,
    p_activations,
    p_weight_of,
    p_offset,
    p_group_child,
    p_group_start,
    p_pair_parent,
    p_pair_slot,
    p_statistics,
    p_slopes,
    p_log_sum,
    p_out,
    N,
    L,
    P,
    B,
    C,
    G,
    ANY_FIT: tl.constexpr,
    BY_TYPE: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """da_i = sum_j R_ij G_ij over the parents j that compete for child i.

    R = exp(l - log_sum),  l = constant - sum_h precision_h d_h^2,  d = V - mean
    G = offset + sum_h (linear_h + quadratic_h e_h) e_h,  e = V - centre, from `about_centre`

    p_poses [N, L, B, 16], p_weight [K, B, blocks, 16, 16], p_activations [N, L, B], p_weight_of [S], p_offset [S, 4];
    p_group_child [G], p_group_start [G + 1], p_pair_parent and p_pair_slot [pairs]; p_statistics [N, P, blocks, 36, 16]
    and p_slopes [N, P, blocks, 51, 16], rows as in `rows.py`; p_log_sum and p_out [N, G, B], or with BY_TYPE
    [N, G, B, blocks, 16].

    Program (image block, child type block, group) owns p_out[images, group, child types], with BY_TYPE one block of it.
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    o_n, o_b, i_owner, m_child = child_tile(N, B, BN, BB)
    i_g, i_first, i_last = types_of_owner(i_owner, C, BY_TYPE)
    i_l, i_begin, i_end = load_group(p_group_child, p_group_start, i_g)
    o_group = of_group((o_n * G + i_g) * B + o_b, i_first, C, BY_TYPE)
    _, b_pose = load_child(p_poses, p_activations, (o_n * L + i_l) * B + o_b, None, DTYPE)
    b_log_sum = tl.load(p_log_sum + o_group)

    b_da = tl.zeros((BN, BB, TYPES), DTYPE)
    n_blocks = tl.cdiv(C, TYPES)
    for i_pair in range(i_begin, i_end):
        i_s = tl.load(p_pair_slot + i_pair)
        b_offset = load_offset(p_offset, i_s, DTYPE)
        o_parent = o_n * P + tl.load(p_pair_parent + i_pair)
        o_weight = tl.load(p_weight_of + i_s).to(tl.int64) * B + o_b
        for i_c in range(i_first, i_last):
            b_weight = load_weight(p_weight, o_weight * n_blocks + i_c, None, DTYPE)
            b_votes = edge_votes(b_pose, b_weight, b_offset, None, C, None, ENTRIES, DTYPE)
            o_block = o_parent * n_blocks + i_c
            p_parent = p_statistics + o_block * STATISTICS + parent_types()
            b_mean, b_precision, b_constant = load_gaussian(p_parent, None, DTYPE)
            b_d = subtract_entries(b_votes, b_mean)
            b_R = assignment(log_likelihood(b_d, b_precision, b_constant), b_log_sum)
            m_slopes = None
            if tl.float64 == DTYPE:  # registers are few: the mask depends on R, so the compiler cannot load earlier
                m_slopes = b_R >= 0
            p_parent_slopes = p_slopes + o_block * SLOPES + parent_types()
            b_G, b_linear, b_quadratic, b_origin = load_slopes(p_parent_slopes, m_slopes, DTYPE)
            b_e = about_centre(b_votes, b_d, b_origin, ANY_FIT)
            b_da += b_R * weight_slope(b_e, b_G, b_linear, b_quadratic)
    if not BY_TYPE:
        b_da = tl.sum(b_da, axis=2, keep_dims=True)
    tl.store(p_out + o_group, b_da, mask=m_child)


@triton.jit(
    launch_metadata=launch_metadata,
    do_not_specialize=["P", "S", "N", "G", "B", "C"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def edge_product_kernel(
    p_left,
    p_right,
    p_group_child,
    p_group_start,
    p_pair_parent,
    p_pair_slot,
    p_out,
    N,
    P,
    S,
    B,
    C,
    G,
    BY_TYPE: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """out_i = sum_j left_ij right_ij over the parents j that compete for child i; left and right are stored arrays.

    p_left, p_right [N, P, S, B, C]; p_group_child [G], p_group_start [G + 1], p_pair_parent and p_pair_slot
    [pairs]; p_out [N, G, B], or with BY_TYPE [N, G, B, blocks, 16].

    Program (image block, child type block, group) owns p_out[images, group, child types], with BY_TYPE one block of it.
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    o_n, o_b, i_owner, m_child = child_tile(N, B, BN, BB)
    i_g, i_first, i_last = types_of_owner(i_owner, C, BY_TYPE)
    _, i_begin, i_end = load_group(p_group_child, p_group_start, i_g)
    b_sum = tl.zeros((BN, BB, TYPES), DTYPE)
    for i_pair in range(i_begin, i_end):
        o_parent = o_n * P + tl.load(p_pair_parent + i_pair)
        o_edge = ((o_parent * S + tl.load(p_pair_slot + i_pair)) * B + o_b) * C
        for i_c in range(i_first, i_last):
            o_c = i_c * TYPES + parent_types()
            b_left = tl.load(p_left + o_edge + o_c, mask=o_c < C, other=0.0).to(DTYPE)
            b_right = tl.load(p_right + o_edge + o_c, mask=o_c < C, other=0.0).to(DTYPE)
            b_sum = tl.fma(b_left, b_right, b_sum)
    if not BY_TYPE:
        b_sum = tl.sum(b_sum, axis=2, keep_dims=True)
    tl.store(p_out + of_group((o_n * G + i_g) * B + o_b, i_first, C, BY_TYPE), b_sum, mask=m_child)


@triton.jit(
    launch_metadata=launch_metadata,
    do_not_specialize=["N", "L", "P", "S", "G", "T", "B", "C"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def child_gradient_kernel(
    p_poses,
    p_weight,
    p_activations,
    p_dV,
    p_weight_of,
    p_offset,
    p_parents_start,
    p_pair_parent,
    p_pair_slot,
    p_statistics,
    p_slopes,
    p_log_sums,
    p_da,
    p_grad_poses,
    p_grad_activations,
    N,
    L,
    P,
    S,
    B,
    C,
    G,
    T,
    ALL: tl.constexpr,
    ANY_FIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BY_TYPE: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """dM_i = sum_j dV_ij W_ij^T and da_i = sum_t sum_j R_ij G_ij over all parents j of child i.

    dV is the result of `vote_gradient`: the sum over all T iterations, or only the last iteration if not ALL. If p_dV
    [N, P, S, B, 16, C] is given, the kernel loads dV from it and does not compute da.

    p_poses [N, L, B, 16], p_weight [K, B, blocks, 16, 16], p_activations [N, L, B], p_weight_of [S], p_offset [S, 4];
    p_parents_start [L + 1], p_pair_parent and p_pair_slot [pairs]; p_statistics [T - 1, N, P, blocks, 36, 16] and
    p_slopes [T, N, P, blocks, 51, 16], rows as in `rows.py`; p_log_sums and p_da [T - 1, N, G, B], see `of_group`;
    p_grad_poses [N, L, 16, B], p_grad_activations [N, L, B].

    Program (image block, child type block, child location) owns the gradients of its children in both outputs.
    """
    DTYPE: tl.constexpr = p_grad_poses.dtype.element_ty
    o_n, o_b, i_l, m_child = child_tile(N, B, BN, BB)
    o_child = (o_n * L + i_l) * B + o_b
    n_blocks = tl.cdiv(C, TYPES)
    sizes = (N.to(tl.int64) * P * n_blocks, n_blocks, N.to(tl.int64) * G * B, T)
    if p_dV is None:
        b_share = uniform_share(p_parents_start, i_l, C, LOCAL, BY_TYPE, DTYPE)
        if tl.float64 != DTYPE:
            b_a, b_pose = load_child(p_poses, p_activations, o_child, None, DTYPE)

    b_dM = zero_entries(BN, BB, ENTRIES, DTYPE)
    b_da = tl.zeros((BN, BB, TYPES), DTYPE)
    for i_pair in range(tl.load(p_parents_start + i_l), tl.load(p_parents_start + i_l + 1)):
        i_p = tl.load(p_pair_parent + i_pair)
        i_s = tl.load(p_pair_slot + i_pair)
        b_offset = load_offset(p_offset, i_s, DTYPE)
        o_parent = o_n * P + i_p
        o_group = (o_n * G + (i_p * S + i_s if LOCAL else i_l)) * B + o_b
        o_weight = tl.load(p_weight_of + i_s).to(tl.int64) * B + o_b
        for i_c in range(n_blocks):
            b_weight = load_weight(p_weight, o_weight * n_blocks + i_c, None, DTYPE)
            if p_dV is None:
                if tl.float64 == DTYPE:  # registers are few: because of the mask, the compiler loads them here
                    b_a, b_pose = load_child(p_poses, p_activations, o_child, o_b + i_p + i_c >= 0, DTYPE)
                b_dV, b_RG = vote_gradient(
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
                b_da += b_RG
                if tl.float64 != DTYPE:  # load it again: with a mask, the compiler does not keep it in registers
                    b_weight = load_weight(p_weight, o_weight * n_blocks + i_c, o_b + i_p >= 0, DTYPE)
            else:
                o_c = i_c * TYPES + parent_types()
                p_edge = p_dV + ((o_parent * S + i_s) * B + o_b) * ENTRIES * C + o_c
                b_dV = load_entries(p_edge, C, o_c < C, ENTRIES, DTYPE)
            b_dM = add_product_transposed(b_dM, b_dV, b_weight)
    for h in tl.static_range(ENTRIES):
        p_grad = p_grad_poses + ((o_n * L + i_l) * ENTRIES + h) * B + o_b
        tl.store(p_grad, tl.sum(b_dM[h], axis=2, keep_dims=True), mask=m_child)
    if p_dV is None:
        tl.store(p_grad_activations + o_child, tl.sum(b_da, axis=2, keep_dims=True), mask=m_child)


@triton.jit
def add_product_transposed(b_sum, b_left, b_right):
    """sum + left right^T of 4x4 matrices: entry xy is sum_xy + sum_q left_xq right_yq."""
    b_new = ()
    for h in tl.static_range(ENTRIES):
        b_entry = b_sum[h]
        for q in tl.static_range(4):
            b_entry = tl.fma(b_left[h // 4 * 4 + q], b_right[h % 4 * 4 + q], b_entry)
        b_new = b_new + (b_entry,)
    return b_new
