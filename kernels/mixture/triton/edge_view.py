"""Stored votes: kernels that write votes or assignments to memory, once for each edge.

A program owns BN images and BB child types of one pair of a parent location p and a slot s. Arrays of edges are
[N, P, S, B, C] or [N, P, S, B, H, C]. The kernels write zeros to missing slots and do not read them.
"""

import triton
import triton.language as tl

from tritoncaps.kernels.common.triton.launching import UNALIGNED
from tritoncaps.kernels.mixture.triton.child_view import child_tile
from tritoncaps.kernels.mixture.triton.costs import launch_metadata
from tritoncaps.kernels.mixture.triton.rows import CONSTANT, ENTRIES, LINEAR, MEAN, OFFSET, TYPES
from tritoncaps.kernels.mixture.triton.votes import (
    assignment,
    edge_votes,
    load_entries,
    load_offset,
    load_poses,
    load_weight,
    log_likelihood,
    of_group,
    parent_types,
    subtract_entries,
    weight_slope,
)


@triton.jit
def edge_tile(p_children, N, B, BN: tl.constexpr, BB: tl.constexpr):
    """Images, child types, pair p * S + s and child location of a program; the mask of its children, which is false for
    a missing slot, and the mask of its outputs."""
    o_n, o_b, i_pair, m_out = child_tile(N, B, BN, BB)
    i_l = tl.load(p_children + i_pair)
    return o_n, o_b, i_pair, tl.maximum(i_l, 0), m_out & (i_l >= 0), m_out


@triton.jit(
    launch_metadata=launch_metadata,
    do_not_specialize=["N", "L", "P", "S", "B", "C"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def pose_votes_kernel(
    p_poses,
    p_weight,
    p_children,
    p_weight_of,
    p_out,
    N,
    L,
    P,
    S,
    B,
    C,
    DTYPE: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """V_ij = M_i W_ij.

    p_poses [N, L, B, 16], p_weight as in `rows.py`, p_children [P, S], p_weight_of [S]; p_out [N, P, S, B, 16, C].

    Program (image block, child type block, pair) owns the votes of its pair.
    """
    o_n, o_b, i_pair, i_l, m_child, m_out = edge_tile(p_children, N, B, BN, BB)
    o_edge = ((o_n * P * S + i_pair) * B + o_b) * ENTRIES * C
    o_weight = tl.load(p_weight_of + i_pair % S).to(tl.int64) * B + o_b
    b_pose = load_poses(p_poses, (o_n * L + i_l) * B + o_b, m_child, DTYPE)
    n_blocks = tl.cdiv(C, TYPES)
    for i_c in range(n_blocks):
        o_c = i_c * TYPES + parent_types()
        m_c = o_c < C
        b_weight = load_weight(p_weight, o_weight * n_blocks + i_c, m_child, DTYPE)
        b_votes = edge_votes(b_pose, b_weight, (), None, C, None, ENTRIES, DTYPE)
        for h in tl.static_range(ENTRIES):
            tl.store(p_out + o_edge + h * C + o_c, b_votes[h], mask=m_out & m_c)


@triton.jit(
    launch_metadata=launch_metadata,
    do_not_specialize=["N", "P", "S", "B", "C"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def coordinate_addition_kernel(
    p_votes,
    p_offset,
    p_out,
    N,
    P,
    S,
    B,
    C,
    DTYPE: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """V_ij + offset of the slot, in the right-hand column.

    p_votes, p_out [N, P, S, B, 16, C], p_offset [S, 4].

    Program (image block, child type block, pair) owns the votes of its pair.
    """
    o_n, o_b, i_pair, m_out = child_tile(N, B, BN, BB)
    o_edge = ((o_n * P * S + i_pair) * B + o_b) * ENTRIES * C
    b_offset = load_offset(p_offset, i_pair % S, DTYPE)
    n_blocks = tl.cdiv(C, TYPES)
    for i_c in range(n_blocks):
        o_c = i_c * TYPES + parent_types()
        m_c = o_c < C
        b_votes = load_entries(p_votes + o_edge + o_c, C, m_c, ENTRIES, DTYPE)
        for h in tl.static_range(ENTRIES):
            b_vote = b_votes[h]
            if h % 4 == 3:
                b_vote += b_offset[h // 4]
            tl.store(p_out + o_edge + h * C + o_c, b_vote, mask=m_out & m_c)


@triton.jit(
    launch_metadata=launch_metadata,
    do_not_specialize=["N", "P", "S", "G", "B", "C"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def assignment_kernel(
    p_votes,
    p_children,
    p_statistics,
    p_log_sum,
    p_out,
    N,
    P,
    S,
    B,
    C,
    G,
    LOCAL: tl.constexpr,
    BY_TYPE: tl.constexpr,
    H: tl.constexpr,
    DTYPE: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """R_ij = exp(l_ij - log_sum_i).

    p_votes [N, P, S, B, H, C], p_children [P, S]; p_statistics as in `rows.py`; p_log_sum [N, G, B], see
    `of_group`; p_out [N, P, S, B, C].

    Program (image block, child type block, pair) owns the assignments of its pair.
    """
    o_n, o_b, i_pair, i_l, m_child, m_out = edge_tile(p_children, N, B, BN, BB)
    o_edge = (o_n * P * S + i_pair) * B + o_b
    o_parent = o_n * P + i_pair // S
    o_group = (o_n * G + (i_pair if LOCAL else i_l)) * B + o_b
    n_blocks = tl.cdiv(C, TYPES)
    for i_c in range(n_blocks):
        o_c = i_c * TYPES + parent_types()
        m_c = o_c < C
        p_parent = p_statistics + (o_parent * n_blocks + i_c) * (MEAN + 2 * H) * TYPES + parent_types()
        b_l = tl.load(p_parent + CONSTANT * TYPES)
        for i_h in tl.static_range(0, H, ENTRIES):
            b_mean = load_entries(p_parent + (MEAN + i_h) * TYPES, TYPES, None, H - i_h, DTYPE)
            b_precision = load_entries(p_parent + (MEAN + H + i_h) * TYPES, TYPES, None, H - i_h, DTYPE)
            p_edge_votes = p_votes + (o_edge * H + i_h) * C + o_c
            b_votes = load_entries(p_edge_votes, C, m_child & m_c, H - i_h, DTYPE)
            b_d = subtract_entries(b_votes, b_mean)
            b_l = log_likelihood(b_d, b_precision, b_l)
        b_log_sum = tl.load(p_log_sum + of_group(o_group, i_c, C, BY_TYPE), mask=m_child, other=0.0)
        b_R = tl.where(m_child, assignment(b_l, b_log_sum), 0.0)
        tl.store(p_out + o_edge * C + o_c, b_R, mask=m_out & m_c)


@triton.jit(
    launch_metadata=launch_metadata,
    do_not_specialize=["N", "L", "P", "S", "B", "C"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def m_step_gradient_kernel(
    p_votes,
    p_assignments,
    p_activations,
    p_children,
    p_statistics,
    p_slopes,
    p_grad_votes,
    p_grad_assignments,
    p_slope,
    N,
    L,
    P,
    S,
    B,
    C,
    H: tl.constexpr,
    DTYPE: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """G_ij = offset + sum_h (linear_h + quadratic_h d_h) d_h,  with d = V - mean,

    dR_ij = a_i G_ij,  dV_ij = R_ij a_i (linear + 2 quadratic d).

    p_votes [N, P, S, B, H, C], p_assignments [N, P, S, B, C], p_activations [N, L, B], p_children [P, S]; p_statistics
    and p_slopes as in `rows.py`; p_grad_votes as the votes; p_grad_assignments and p_slope (G) as the assignments.

    Program (image block, child type block, pair) owns the gradients of its pair.
    """
    o_n, o_b, i_pair, i_l, m_child, m_out = edge_tile(p_children, N, B, BN, BB)
    o_edge = (o_n * P * S + i_pair) * B + o_b
    o_parent = o_n * P + i_pair // S
    b_a = tl.load(p_activations + (o_n * L + i_l) * B + o_b, mask=m_child, other=0.0).to(DTYPE)
    n_blocks = tl.cdiv(C, TYPES)
    for i_c in range(n_blocks):
        o_c = i_c * TYPES + parent_types()
        m_c = o_c < C
        m_edge = m_child & m_c
        b_r = b_a * tl.load(p_assignments + o_edge * C + o_c, mask=m_edge, other=0.0).to(DTYPE)
        p_parent = p_statistics + (o_parent * n_blocks + i_c) * (MEAN + 2 * H) * TYPES + parent_types()
        p_parent_slopes = p_slopes + (o_parent * n_blocks + i_c) * (LINEAR + 3 * H) * TYPES + parent_types()
        b_G = tl.load(p_parent_slopes + OFFSET * TYPES)
        for i_h in tl.static_range(0, H, ENTRIES):
            b_mean = load_entries(p_parent + (MEAN + i_h) * TYPES, TYPES, None, H - i_h, DTYPE)
            b_linear = load_entries(p_parent_slopes + (LINEAR + i_h) * TYPES, TYPES, None, H - i_h, DTYPE)
            p_quadratic = p_parent_slopes + (LINEAR + H + i_h) * TYPES
            b_quadratic = load_entries(p_quadratic, TYPES, None, H - i_h, DTYPE)
            o_vote = (o_edge * H + i_h) * C + o_c
            b_d = subtract_entries(load_entries(p_votes + o_vote, C, m_edge, H - i_h, DTYPE), b_mean)
            b_G = weight_slope(b_d, b_G, b_linear, b_quadratic)
            for h in tl.static_range(len(b_d)):
                b_dV = tl.where(m_child, b_r * tl.fma(2 * b_quadratic[h], b_d[h], b_linear[h]), 0.0)
                tl.store(p_grad_votes + o_vote + h * C, b_dV, mask=m_out & m_c)
        b_G = tl.where(m_child, b_G, 0.0)
        tl.store(p_slope + o_edge * C + o_c, b_G, mask=m_out & m_c)
        tl.store(p_grad_assignments + o_edge * C + o_c, b_a * b_G, mask=m_out & m_c)


@triton.jit(
    launch_metadata=launch_metadata,
    do_not_specialize=["N", "P", "S", "G", "B", "C"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def e_step_gradient_kernel(
    p_votes,
    p_assignments,
    p_grad_assignments,
    p_children,
    p_statistics,
    p_dot,
    p_dl,
    p_grad_votes,
    N,
    P,
    S,
    B,
    C,
    G,
    LOCAL: tl.constexpr,
    BY_TYPE: tl.constexpr,
    H: tl.constexpr,
    DTYPE: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """dl_ij = R_ij (dR_ij - sum_j' R_ij' dR_ij'),  dV_ij = -2 dl_ij precision d,  with d = V - mean.

    p_votes [N, P, S, B, H, C]; p_assignments and p_grad_assignments [N, P, S, B, C], p_children [P, S]; p_statistics
    as in `rows.py`; p_dot [N, G, B], the sums over j', see `of_group`; p_dl as the assignments, p_grad_votes as the
    votes.

    Program (image block, child type block, pair) owns the gradients of its pair.
    """
    o_n, o_b, i_pair, i_l, m_child, m_out = edge_tile(p_children, N, B, BN, BB)
    o_edge = (o_n * P * S + i_pair) * B + o_b
    o_parent = o_n * P + i_pair // S
    o_group = (o_n * G + (i_pair if LOCAL else i_l)) * B + o_b
    n_blocks = tl.cdiv(C, TYPES)
    for i_c in range(n_blocks):
        o_c = i_c * TYPES + parent_types()
        m_c = o_c < C
        m_edge = m_child & m_c
        b_R = tl.load(p_assignments + o_edge * C + o_c, mask=m_edge, other=0.0).to(DTYPE)
        b_dR = tl.load(p_grad_assignments + o_edge * C + o_c, mask=m_edge, other=0.0).to(DTYPE)
        b_dot = tl.load(p_dot + of_group(o_group, i_c, C, BY_TYPE), mask=m_child, other=0.0)
        b_dl = b_R * (b_dR - b_dot)
        tl.store(p_dl + o_edge * C + o_c, b_dl, mask=m_out & m_c)
        p_parent = p_statistics + (o_parent * n_blocks + i_c) * (MEAN + 2 * H) * TYPES + parent_types()
        for i_h in tl.static_range(0, H, ENTRIES):
            b_mean = load_entries(p_parent + (MEAN + i_h) * TYPES, TYPES, None, H - i_h, DTYPE)
            b_precision = load_entries(p_parent + (MEAN + H + i_h) * TYPES, TYPES, None, H - i_h, DTYPE)
            o_vote = (o_edge * H + i_h) * C + o_c
            b_d = subtract_entries(load_entries(p_votes + o_vote, C, m_edge, H - i_h, DTYPE), b_mean)
            for h in tl.static_range(len(b_d)):
                b_dV = tl.where(m_child, -2 * b_dl * b_precision[h] * b_d[h], 0.0)
                tl.store(p_grad_votes + o_vote + h * C, b_dV, mask=m_out & m_c)
