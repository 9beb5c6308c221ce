"""What all views share: the tile, the vote source and the formulas of an edge, as device functions.

A tile is [images, child types, parent types] = [BN, BB, BC]. Every view holds the votes of such a tile in registers,
one tile for each pose entry (a tuple), and sums over the axes that it does not own:

    parent view  over child types      child view  over parent types      weight view  over images

Names in kernels: i_ index of a program or of a loop, o_ offsets, m_ mask, p_ pointer, b_ loaded or computed block.
"""

import triton
import triton.language as tl

ENTRIES = tl.constexpr(16)  # of a 4x4 pose; and the most that a tuple holds of a stored vote


@triton.jit
def load_entries(p_entry, step, mask, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """COUNT tiles, at most sixteen, one for each pose entry; the next entry is `step` further."""
    b_entries = ()
    for _ in tl.static_range(COUNT if COUNT < ENTRIES else ENTRIES):
        b_entries = b_entries + (tl.load(p_entry, mask=mask, other=0.0).to(DTYPE),)
        p_entry += step
    return b_entries


@triton.jit
def zero_entries(BN: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """COUNT tiles of zeros."""
    b_entries = ()
    for _ in tl.static_range(COUNT):
        b_entries = b_entries + (tl.zeros((BN, BB, BC), DTYPE),)
    return b_entries


@triton.jit
def load_offset(p_offset, i_s, DTYPE: tl.constexpr):
    """The four numbers that slot i_s adds to the right-hand column of its votes: p_offset [S, 4], None if stored."""
    b_offset = ()
    if p_offset is not None:
        for x in tl.static_range(4):
            b_offset = b_offset + (tl.load(p_offset + i_s * 4 + x).to(DTYPE),)
    return b_offset


@triton.jit
def edge_votes(b_pose, b_weight, b_offset, p_votes, step, mask, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """V: the vote source of every view. It loads V from p_votes, or, if that is None, computes it,

    V_xq = sum_y M_xy W_yq + [q = 3] offset_x, from sixteen tiles each of pose [BN, BB, 1] and weight [1, BB, BC].

    All views must compute the same bits: what one subtracts from V, another has found as a mean of V.
    """
    b_votes = ()
    if p_votes is not None:
        b_votes = load_entries(p_votes, step, mask, COUNT, DTYPE)
    else:
        for h in tl.static_range(ENTRIES):
            b_vote = b_pose[h // 4 * 4] * b_weight[h % 4]
            for y in tl.static_range(1, 4):
                b_vote = tl.fma(b_pose[h // 4 * 4 + y], b_weight[4 * y + h % 4], b_vote)
            if len(b_offset) > 0 and h % 4 == 3:
                b_vote += b_offset[h // 4]
            b_votes = b_votes + (b_vote,)
    return b_votes


@triton.jit
def subtract_entries(b_left, b_right):
    """Entry by entry."""
    b_difference = ()
    for h in tl.static_range(len(b_left)):
        b_difference = b_difference + (b_left[h] - b_right[h],)
    return b_difference


@triton.jit
def log_likelihood(b_d, b_precision, b_constant):
    """l = constant - sum_h precision_h d_h^2."""
    b_distance = b_precision[0] * b_d[0] * b_d[0]
    for h in tl.static_range(1, len(b_d)):
        b_distance = tl.fma(b_precision[h] * b_d[h], b_d[h], b_distance)
    return b_constant - b_distance


@triton.jit
def assignment(b_likelihood, b_log_sum):
    """R = exp(l - log_sum), at most 1 whatever the rounding."""
    return tl.exp(tl.minimum(b_likelihood - b_log_sum, 0.0))


@triton.jit
def weight_slope(b_e, b_A, b_B, b_C):
    """G = A + sum_h (B_h + C_h e_h) e_h: the loss's slope in r."""
    b_G = b_A
    for h in tl.static_range(len(b_e)):
        b_G = tl.fma(tl.fma(b_C[h], b_e[h], b_B[h]), b_e[h], b_G)
    return b_G


@triton.jit
def add_entries(b_left, b_right):
    """Entry by entry."""
    b_sum = ()
    for h in tl.static_range(len(b_left)):
        b_sum = b_sum + (b_left[h] + b_right[h],)
    return b_sum


@triton.jit
def vote_gradient(
    b_votes,
    b_a,
    p_mean,
    p_precision,
    p_B,
    p_C,
    p_shift,
    p_constant,
    p_A,
    p_log_sum,
    p_da,
    entries_step,
    parents_step,
    groups_step,
    m_parent,
    m_child,
    C,
    T,
    n_soft,
    BN: tl.constexpr,
    BB: tl.constexpr,
    BC: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """dL/dV in sixteen tiles, and R G: the sums over the T iterations of the backward pass.

    dV = r (B + 2 C e) - 2 dl precision d,  dl = r (G - da) in the first n_soft iterations, then zero;  e = d + shift.

    The pointers lead to the first iteration of a tile: p_mean, p_precision, p_B, p_C, p_shift and p_constant, p_A of
    its parents, p_log_sum, p_da of its children. The steps lead to the next iteration.
    """
    b_dV = zero_entries(BN, BB, BC, ENTRIES, DTYPE)
    b_RG = tl.zeros((BN, BB, BC), DTYPE)
    for t in range(T):
        b_mean = load_entries(p_mean + t * entries_step, C, m_parent, ENTRIES, DTYPE)
        b_precision = load_entries(p_precision + t * entries_step, C, m_parent, ENTRIES, DTYPE)
        b_B = load_entries(p_B + t * entries_step, C, m_parent, ENTRIES, DTYPE)
        b_C = load_entries(p_C + t * entries_step, C, m_parent, ENTRIES, DTYPE)
        b_shift = load_entries(p_shift + t * entries_step, C, m_parent, ENTRIES, DTYPE)
        b_constant = tl.load(p_constant + t * parents_step, mask=m_parent, other=float("-inf"))
        b_A = tl.load(p_A + t * parents_step, mask=m_parent, other=0.0)
        b_log_sum = tl.load(p_log_sum + t * groups_step, mask=m_child, other=0.0)
        b_da = tl.load(p_da + t * groups_step, mask=m_child, other=0.0)
        b_d = subtract_entries(b_votes, b_mean)
        b_R = assignment(log_likelihood(b_d, b_precision, b_constant), b_log_sum)
        b_e = add_entries(b_d, b_shift)
        b_G = weight_slope(b_e, b_A, b_B, b_C)
        b_RG += b_R * b_G
        b_r = b_R * b_a
        b_minus_2dl = tl.where(t < n_soft, 2 * b_r * (b_da - b_G), 0.0)
        b_sum = ()
        for h in tl.static_range(ENTRIES):
            b_slope = tl.fma(2 * b_C[h], b_e[h], b_B[h])
            b_sum = b_sum + (tl.fma(b_r, b_slope, tl.fma(b_minus_2dl * b_precision[h], b_d[h], b_dV[h])),)
        b_dV = b_sum
    return b_dV, b_RG
