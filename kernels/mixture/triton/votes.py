"""What all views share: the tile, the vote source and the formulas of an edge, as device functions.

A tile is [images, child types, parent types] = [BN, BB, BC]. Every view holds the votes of such a tile in registers,
one tile for each pose entry (a tuple), and sums over the axes that it does not own:

    parent view  over child types      child view  over parent types      weight view  over images

Names in kernels: i_ index of a program or of a loop, o_ offsets, m_ mask, p_ pointer, b_ loaded or computed block.
"""

import triton
import triton.language as tl

ENTRIES = tl.constexpr(16)  # of a 4x4 pose; and the most that a tuple holds of a stored vote
STATISTICS = tl.constexpr(36)  # rows of a parent's statistics and slopes, as parents.py lays them out, with 16 entries
SLOPES = tl.constexpr(51)


@triton.jit
def images_from(i_n, N, BN: tl.constexpr):
    """A tile's images [BN, 1, 1], and which of them exist. Behind the last one, it stands again: so loads need no mask,
    and only what is stored or summed over images does."""
    o_n = (i_n + tl.arange(0, BN)).to(tl.int64)[:, None, None]
    return tl.minimum(o_n, N - 1), o_n < N


@triton.jit
def below(o_types, TYPES: tl.constexpr, BLOCK: tl.constexpr):
    """o_types < TYPES; a constant where blocks fill the types, so that loads need no mask."""
    m_types = o_types < TYPES
    if TYPES % BLOCK == 0:
        m_types = tl.full((1, 1, 1), True, tl.int1)
    return m_types


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
    """R = exp(l - log_sum), at most 1 whatever the rounding; nan stays."""
    return tl.exp(tl.minimum(b_likelihood - b_log_sum, 0.0, propagate_nan=tl.PropagateNan.ALL))


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
def load_gaussian(p_statistics, mask, C, DTYPE: tl.constexpr):
    """Mean and precision, sixteen tiles each, and constant of a tile's parents; -inf where there is no parent."""
    b_mean = load_entries(p_statistics, C, mask, ENTRIES, DTYPE)
    b_precision = load_entries(p_statistics + ENTRIES * C, C, mask, ENTRIES, DTYPE)
    b_constant = tl.load(p_statistics + 2 * ENTRIES * C, mask=mask, other=float("-inf")).to(DTYPE)
    return b_mean, b_precision, b_constant


@triton.jit
def load_slopes(p_slopes, mask, C, DTYPE: tl.constexpr):
    """A, and sixteen tiles each of B and C, of a tile's parents."""
    b_B = load_entries(p_slopes, C, mask, ENTRIES, DTYPE)
    b_C = load_entries(p_slopes + ENTRIES * C, C, mask, ENTRIES, DTYPE)
    return tl.load(p_slopes + 3 * ENTRIES * C, mask=mask, other=0.0).to(DTYPE), b_B, b_C


@triton.jit
def load_origin(p_slopes, mask, C, DTYPE: tl.constexpr):
    """Sixteen tiles of what `about_centre` needs: the centre for any fit, shift = mean before - mean for EM."""
    return load_entries(p_slopes + 2 * ENTRIES * C, C, mask, ENTRIES, DTYPE)


@triton.jit
def about_centre(b_votes, b_d, b_origin, ANY_FIT: tl.constexpr):
    """e = V - centre. For EM, whose centre is its mean, that is d + shift."""
    return subtract_entries(b_votes, b_origin) if ANY_FIT else add_entries(b_d, b_origin)


@triton.jit
def uniform_share(p_parents_start, i_l, C, LOCAL: tl.constexpr, DTYPE: tl.constexpr):
    """R of the first iteration, [1, 1, 1]: one over the number of parents that compete for a child at i_l."""
    b_share = tl.full((1, 1, 1), 1.0 / C, DTYPE)
    if not LOCAL:
        n_pairs = tl.load(p_parents_start + i_l + 1) - tl.load(p_parents_start + i_l)
        b_share /= tl.maximum(n_pairs, 1).to(DTYPE)
    return b_share


@triton.jit
def vote_gradient(b_votes, b_a, b_share, pointers, tile, masks, sizes, B, C, ALL: tl.constexpr, ANY_FIT: tl.constexpr):
    """dL/dV of a tile in sixteen tiles, and R G: sums over all T iterations, or of the last one if not ALL.

    dV = r (B + 2 C e) - 2 dl precision d,  dl = r (G - da),  d = V - mean before,  e = V - centre. dl = 0 in the first
    iteration, where R is b_share, and if not ALL: then the assignments are constants. The centre of EM is its mean: so
    e = d + shift, which is d of the next iteration.

    pointers  p_statistics [T - 1, N, P, 36, C], p_slopes [T, N, P, 51, C], p_log_sums and p_da [T - 1, N, G, B]; if not
              ALL, those of the last iteration alone
    tile      images, child types, parent types, parent location and group of the votes
    masks     of child types and parent types
    sizes     N, P, G, T
    """
    p_statistics, p_slopes, p_log_sums, p_da = pointers
    o_n, o_b, o_c, i_p, i_g = tile
    m_b, m_c = masks
    N, P, G, T = sizes
    DTYPE: tl.constexpr = b_votes[0].dtype
    if tl.float64 == DTYPE:  # has no room to keep terms, as the compiler would if their mask were a constant
        m_c = m_c & (o_n >= 0)
    o_parent = o_n * P + i_p
    o_child = (o_n * G + i_g) * B + o_b
    n_parents = N.to(tl.int64) * P
    n_children = N.to(tl.int64) * G * B
    p_statistics += o_parent * STATISTICS * C + o_c
    p_slopes += o_parent * SLOPES * C + o_c
    b_RG = tl.zeros_like(b_votes[0])
    b_dV = (b_RG,) * ENTRIES
    if ALL:
        p_centre = p_slopes + 2 * ENTRIES * C if ANY_FIT else p_statistics
        b_dV, b_RG, b_d = first_vote_gradient(b_votes, b_share * b_a, b_share, p_centre, p_slopes, m_c, C)
        p_slopes += n_parents * SLOPES * C
    elif not ANY_FIT:
        b_d = subtract_entries(b_votes, load_entries(p_statistics, C, m_c, ENTRIES, DTYPE))
    if ANY_FIT:
        b_d = b_votes  # of which an iteration subtracts its own mean
    for t in range(T - 1 if ALL else 1):
        p_before = p_statistics + t * n_parents * STATISTICS * C
        p_now = p_slopes + t * n_parents * SLOPES * C
        o_before = t * n_children + o_child
        b_constant = tl.load(p_before + 2 * ENTRIES * C, mask=m_c, other=0.0).to(DTYPE)
        b_log_sum = tl.load(p_log_sums + o_before, mask=m_b, other=0.0).to(DTYPE)
        b_G = tl.load(p_now + 3 * ENTRIES * C, mask=m_c, other=0.0).to(DTYPE)
        b_distance = tl.zeros_like(b_RG)
        b_left = ()
        b_right = ()
        b_next = ()
        for h in tl.static_range(ENTRIES):  # as log_likelihood and weight_slope have them
            b_h, b_pd, b_e, b_half, b_slope = entry_terms(b_d[h], p_before, p_now, h, m_c, C, ANY_FIT)
            b_distance = tl.fma(b_pd, b_h, b_distance)
            b_G = tl.fma(b_half, b_e, b_G)
            b_left = b_left + (b_slope,)
            b_right = b_right + (b_pd,)
            b_next = b_next + (b_e,)
        b_R = assignment(b_constant - b_distance, b_log_sum)
        b_RG += b_R * b_G
        b_r = b_R * b_a
        b_scale = tl.zeros_like(b_r)
        if ALL:
            b_da = tl.load(p_da + o_before, mask=m_b, other=0.0).to(DTYPE)
            b_scale = 2 * b_r * (b_da - b_G)
        b_sum = ()
        if tl.float64 == DTYPE:  # loads terms again: a mask that depends on R is known no earlier
            b_next = ()
        for h in tl.static_range(ENTRIES):
            b_slope, b_pd = b_left[h], b_right[h]
            if tl.float64 == DTYPE:
                _, b_pd, b_e, _, b_slope = entry_terms(b_d[h], p_before, p_now, h, m_c & (b_R >= 0), C, ANY_FIT)
                b_next = b_next + (b_e,)
            b_sum = b_sum + (tl.fma(b_scale, b_pd, tl.fma(b_r, b_slope, b_dV[h])),)
        b_dV = b_sum
        if not ANY_FIT:
            b_d = b_next
    return b_dV, b_RG


@triton.jit
def first_vote_gradient(b_votes, b_r, b_R, p_centre, p_slopes, m_c, C):
    """dV, R G and e of the first iteration: dV = r (B + 2 C e), with e = V - centre."""
    DTYPE: tl.constexpr = b_votes[0].dtype
    b_G = tl.load(p_slopes + 3 * ENTRIES * C, mask=m_c, other=0.0).to(DTYPE)
    b_e = subtract_entries(b_votes, load_entries(p_centre, C, m_c, ENTRIES, DTYPE))
    b_dV = ()
    for h in tl.static_range(ENTRIES):
        b_half, b_slope = entry_slopes(b_e[h], p_slopes, h, m_c, C)
        b_G = tl.fma(b_half, b_e[h], b_G)
        b_dV = b_dV + (b_r * b_slope,)
    return b_dV, b_R * b_G, b_e


@triton.jit
def entry_terms(b_d, p_statistics, p_slopes, h, m_c, C, ANY_FIT: tl.constexpr):
    """d, precision d, e, B + C e and B + 2 C e of entry h. b_d is d for EM, the vote for any fit."""
    DTYPE: tl.constexpr = b_d.dtype
    b_origin = tl.load(p_slopes + (2 * ENTRIES + h) * C, mask=m_c, other=0.0).to(DTYPE)
    if ANY_FIT:
        b_e = b_d - b_origin
        b_d -= tl.load(p_statistics + h * C, mask=m_c, other=0.0).to(DTYPE)
    else:
        b_e = b_d + b_origin
    b_pd = tl.load(p_statistics + (ENTRIES + h) * C, mask=m_c, other=0.0).to(DTYPE) * b_d
    b_half, b_slope = entry_slopes(b_e, p_slopes, h, m_c, C)
    return b_d, b_pd, b_e, b_half, b_slope


@triton.jit
def entry_slopes(b_e, p_slopes, h, m_c, C):
    """B + C e and B + 2 C e of entry h."""
    DTYPE: tl.constexpr = b_e.dtype
    b_C = tl.load(p_slopes + (ENTRIES + h) * C, mask=m_c, other=0.0).to(DTYPE)
    b_half = tl.fma(b_C, b_e, tl.load(p_slopes + h * C, mask=m_c, other=0.0).to(DTYPE))
    return b_half, tl.fma(b_C, b_e, b_half)
