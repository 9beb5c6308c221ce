"""Device functions for all views: the tile, the vote source and the formulas of an edge.

A tile is [images, child types, parent types] = [BN, BB, 16]. Every view has the votes of a tile in registers, as a
tuple with one tile for each pose entry, and sums over one of the axes:

    parent view  over child types      child view  over parent types      weight view  over images

Indices beyond the last image or the last child type are replaced by the last one, so that loads need no mask; stores
and sums have a mask. Rows are padded beyond the last parent type: see `rows.py`.

Names in kernels: i_ index of a program or of a loop, o_ offsets, m_ mask, p_ pointer, b_ loaded or computed block.
"""

import triton
import triton.language as tl

from tritoncaps.kernels.mixture.triton.rows import CONSTANT, ENTRIES, LINEAR, MEAN, OFFSET, TYPES

STATISTICS = tl.constexpr((4 + 2 * 16) * 16)  # numbers of a block of parents
SLOPES = tl.constexpr((3 + 3 * 16) * 16)
WEIGHTS = tl.constexpr(16 * 16)  # numbers of a block of weights


@triton.jit
def images_from(i_n, N, BN: tl.constexpr):
    """The images [BN, 1, 1] of a tile, and the mask of those that exist."""
    o_n = (i_n + tl.arange(0, BN)).to(tl.int64)[:, None, None]
    return tl.minimum(o_n, N - 1), o_n < N


@triton.jit
def child_types_from(i_b, B, BB: tl.constexpr):
    """The child types [1, BB, 1] of a tile, and the mask of those that exist."""
    o_b = i_b + tl.arange(0, BB)[None, :, None]
    return tl.minimum(o_b, B - 1), o_b < B


@triton.jit
def parent_types():
    """The parent types of a block, [1, 1, 16]."""
    return tl.arange(0, TYPES)[None, None, :]


@triton.jit
def load(p, mask):
    """Load, with zero where the mask is false; mask None: no mask."""
    if mask is None:
        b_x = tl.load(p)
    else:
        p, mask = tl.broadcast(p, mask)  # Triton 3.4 broadcasts the mask, but not the pointers
        b_x = tl.load(p, mask=mask, other=0.0)
    return b_x


@triton.jit
def load_entries(p_entry, step, mask, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """COUNT tiles, at most sixteen, one for each pose entry; entries are `step` apart."""
    b_entries = ()
    for h in tl.static_range(COUNT if COUNT < ENTRIES else ENTRIES):
        b_entries = b_entries + (load(p_entry + h * step, mask).to(DTYPE),)
    return b_entries


@triton.jit
def load_poses(p_poses, o_child, mask, DTYPE: tl.constexpr):
    """Sixteen tiles of poses [..., 16]; o_child is the index of a child."""
    return load_entries(p_poses + o_child * ENTRIES, 1, mask, ENTRIES, DTYPE)


@triton.jit
def load_weight(p_weight, o_block, mask, DTYPE: tl.constexpr):
    """Sixteen tiles of weights; o_block = (k B + b) blocks + i_c is the index of a block."""
    return load_entries(p_weight + o_block * WEIGHTS + parent_types(), TYPES, mask, ENTRIES, DTYPE)


@triton.jit
def zero_entries(BN: tl.constexpr, BB: tl.constexpr, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """COUNT tiles of zeros."""
    b_entries = ()
    for _ in tl.static_range(COUNT):
        b_entries = b_entries + (tl.zeros((BN, BB, TYPES), DTYPE),)
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

    V_xq = sum_y M_xy W_yq + [q = 3] offset_x, from sixteen tiles each of pose [BN, BB, 1] and weight [1, BB, 16].

    All views must compute the same bits, because one view subtracts a mean that another view has computed from V.
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
    """left - right, entry by entry."""
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
    """R = exp(l - log_sum), at most 1 in spite of rounding errors; nan stays nan."""
    return tl.exp(tl.minimum(b_likelihood - b_log_sum, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def weight_slope(b_e, b_offset, b_linear, b_quadratic):
    """G = dL/dr = offset + sum_h (linear_h + quadratic_h e_h) e_h."""
    b_G = b_offset
    for h in tl.static_range(len(b_e)):
        b_G = tl.fma(tl.fma(b_quadratic[h], b_e[h], b_linear[h]), b_e[h], b_G)
    return b_G


@triton.jit
def add_entries(b_left, b_right):
    """left + right, entry by entry."""
    b_sum = ()
    for h in tl.static_range(len(b_left)):
        b_sum = b_sum + (b_left[h] + b_right[h],)
    return b_sum


@triton.jit
def load_gaussian(p_statistics, mask, DTYPE: tl.constexpr):
    """Mean and precision, sixteen tiles each, and constant of a tile's parents."""
    b_mean = load_entries(p_statistics + MEAN * TYPES, TYPES, mask, ENTRIES, DTYPE)
    b_precision = load_entries(p_statistics + (MEAN + ENTRIES) * TYPES, TYPES, mask, ENTRIES, DTYPE)
    return b_mean, b_precision, load(p_statistics + CONSTANT * TYPES, mask).to(DTYPE)


@triton.jit
def load_slopes(p_slopes, mask, DTYPE: tl.constexpr):
    """Offset, and sixteen tiles each of linear, quadratic and origin, of a tile's parents."""
    b_linear = load_entries(p_slopes + LINEAR * TYPES, TYPES, mask, ENTRIES, DTYPE)
    b_quadratic = load_entries(p_slopes + (LINEAR + ENTRIES) * TYPES, TYPES, mask, ENTRIES, DTYPE)
    b_origin = load_entries(p_slopes + (LINEAR + 2 * ENTRIES) * TYPES, TYPES, mask, ENTRIES, DTYPE)
    return load(p_slopes + OFFSET * TYPES, mask).to(DTYPE), b_linear, b_quadratic, b_origin


@triton.jit
def about_centre(b_votes, b_d, b_origin, ANY_FIT: tl.constexpr):
    """e = V - centre. With ANY_FIT, the origin is the centre. For EM, the centre is the mean of the component: the
    origin is the shift from the previous mean, and e = d + shift."""
    return subtract_entries(b_votes, b_origin) if ANY_FIT else add_entries(b_d, b_origin)


@triton.jit
def of_group(o_group, i_c, C, BY_TYPE: tl.constexpr):
    """Offset of the number of a group and child type, o_group = (n G + g) B + b. If only positions compete (BY_TYPE), a
    group has a number for each parent type: the offsets of those of block i_c."""
    o_number = o_group
    if BY_TYPE:
        o_number = (o_group * tl.cdiv(C, TYPES) + i_c) * TYPES + parent_types()
    return o_number


@triton.jit
def uniform_share(p_parents_start, i_l, C, LOCAL: tl.constexpr, BY_TYPE: tl.constexpr, DTYPE: tl.constexpr):
    """R of the first iteration, [1, 1, 1]: one over the number of parents that compete for a child at i_l."""
    n_rivals = C
    if not LOCAL:
        n_positions = tl.maximum(tl.load(p_parents_start + i_l + 1) - tl.load(p_parents_start + i_l), 1)
        n_rivals = n_positions if BY_TYPE else n_rivals * n_positions
    return tl.full((1, 1, 1), 1.0, DTYPE) / n_rivals.to(DTYPE)


@triton.jit
def vote_gradient(
    b_votes, b_a, b_share, pointers, tile, sizes, ALL: tl.constexpr, ANY_FIT: tl.constexpr, BY_TYPE: tl.constexpr
):
    """dL/dV (sixteen tiles) and R G: sums over all T iterations, or only the last iteration if not ALL.

    dV = r (linear + 2 quadratic e) - 2 dl precision d,  dl = r (G - da),  d = V - previous mean,  e = V - centre.

    dl = 0 in the first iteration, where R is b_share, and if not ALL, because then the assignments are constants. The
    centre of EM is its mean, so e = d + shift is d of the next iteration.

    pointers  p_statistics [T - 1, ...] and p_slopes [T, ...], rows as in `rows.py`; p_log_sums and p_da
              [T - 1, N, G, B] (see `of_group`); if not ALL, only those of the last iteration
    tile      parents n P + p, block of types, and children (n G + g) B + b, as in `of_group`
    sizes     N P blocks, blocks, N G B and T
    """
    p_statistics, p_slopes, p_log_sums, p_da = pointers
    o_parent, i_c, o_child = tile
    n_parents, n_blocks, n_children, T = sizes
    if BY_TYPE:
        n_children *= n_blocks * TYPES
    DTYPE: tl.constexpr = b_votes[0].dtype
    mask = None
    if tl.float64 == DTYPE:  # without a mask, the compiler would keep terms in registers, which are too few
        mask = o_parent >= 0
    o_block = o_parent * n_blocks + i_c
    p_statistics += o_block * STATISTICS + parent_types()
    p_slopes += o_block * SLOPES + parent_types()
    b_RG = tl.zeros_like(b_votes[0])
    b_dV = (b_RG,) * ENTRIES
    if ALL:
        p_centre = p_slopes + (LINEAR + 2 * ENTRIES) * TYPES if ANY_FIT else p_statistics + MEAN * TYPES
        b_dV, b_RG, b_d = first_vote_gradient(b_votes, b_share * b_a, b_share, p_centre, p_slopes, mask)
        p_slopes += n_parents * SLOPES
    elif not ANY_FIT:
        b_d = subtract_entries(b_votes, load_entries(p_statistics + MEAN * TYPES, TYPES, mask, ENTRIES, DTYPE))
    if ANY_FIT:
        b_d = b_votes  # each iteration subtracts its own mean
    for t in range(T - 1 if ALL else 1):
        p_before = p_statistics + t * n_parents * STATISTICS
        p_now = p_slopes + t * n_parents * SLOPES
        o_before = t * n_children + o_child
        b_constant = load(p_before + CONSTANT * TYPES, mask).to(DTYPE)
        b_G = load(p_now + OFFSET * TYPES, mask).to(DTYPE)
        b_distance = tl.zeros_like(b_RG)
        b_left = ()
        b_right = ()
        b_next = ()
        for h in tl.static_range(ENTRIES):  # in the same order as log_likelihood and weight_slope
            b_h, b_pd, b_e, b_half, b_slope = entry_terms(b_d[h], p_before, p_now, h, mask, ANY_FIT)
            b_distance = tl.fma(b_pd, b_h, b_distance)
            b_G = tl.fma(b_half, b_e, b_G)
            b_left = b_left + (b_slope,)
            b_right = b_right + (b_pd,)
            b_next = b_next + (b_e,)
        b_l = b_constant - b_distance
        # registers are few: with a mask that depends on the result so far, the compiler cannot load earlier
        b_log_sum = load(p_log_sums + o_before, b_l >= float("-inf") if BY_TYPE else None).to(DTYPE)
        b_R = assignment(b_l, b_log_sum)
        b_RG += b_R * b_G
        b_r = b_R * b_a
        b_scale = tl.zeros_like(b_r)
        if ALL:
            b_scale = 2 * b_r * (load(p_da + o_before, b_R >= 0 if BY_TYPE else None).to(DTYPE) - b_G)
        b_sum = ()
        if tl.float64 == DTYPE:  # load the terms again: the mask depends on R, so the compiler cannot load them earlier
            b_next = ()
        for h in tl.static_range(ENTRIES):
            b_slope, b_pd = b_left[h], b_right[h]
            if tl.float64 == DTYPE:
                _, b_pd, b_e, _, b_slope = entry_terms(b_d[h], p_before, p_now, h, mask & (b_R >= 0), ANY_FIT)
                b_next = b_next + (b_e,)
            b_sum = b_sum + (tl.fma(b_scale, b_pd, tl.fma(b_r, b_slope, b_dV[h])),)
        b_dV = b_sum
        if not ANY_FIT:
            b_d = b_next
    return b_dV, b_RG


@triton.jit
def first_vote_gradient(b_votes, b_r, b_R, p_centre, p_slopes, mask):
    """dV, R G and e of the first iteration: dV = r (linear + 2 quadratic e), with e = V - centre."""
    DTYPE: tl.constexpr = b_votes[0].dtype
    b_G = load(p_slopes + OFFSET * TYPES, mask).to(DTYPE)
    b_e = subtract_entries(b_votes, load_entries(p_centre, TYPES, mask, ENTRIES, DTYPE))
    b_dV = ()
    for h in tl.static_range(ENTRIES):
        b_half, b_slope = entry_slopes(b_e[h], p_slopes, h, mask)
        b_G = tl.fma(b_half, b_e[h], b_G)
        b_dV = b_dV + (b_r * b_slope,)
    return b_dV, b_R * b_G, b_e


@triton.jit
def entry_terms(b_d, p_statistics, p_slopes, h, mask, ANY_FIT: tl.constexpr):
    """d, precision d, e, linear + quadratic e and linear + 2 quadratic e of entry h. b_d is d for EM, the vote for any
    fit."""
    DTYPE: tl.constexpr = b_d.dtype
    b_origin = load(p_slopes + (LINEAR + 2 * ENTRIES + h) * TYPES, mask).to(DTYPE)
    if ANY_FIT:
        b_e = b_d - b_origin
        b_d -= load(p_statistics + (MEAN + h) * TYPES, mask).to(DTYPE)
    else:
        b_e = b_d + b_origin
    b_pd = load(p_statistics + (MEAN + ENTRIES + h) * TYPES, mask).to(DTYPE) * b_d
    b_half, b_slope = entry_slopes(b_e, p_slopes, h, mask)
    return b_d, b_pd, b_e, b_half, b_slope


@triton.jit
def entry_slopes(b_e, p_slopes, h, mask):
    """linear + quadratic e and linear + 2 quadratic e of entry h."""
    DTYPE: tl.constexpr = b_e.dtype
    b_quadratic = load(p_slopes + (LINEAR + ENTRIES + h) * TYPES, mask).to(DTYPE)
    b_half = tl.fma(b_quadratic, b_e, load(p_slopes + (LINEAR + h) * TYPES, mask).to(DTYPE))
    return b_half, tl.fma(b_quadratic, b_e, b_half)
