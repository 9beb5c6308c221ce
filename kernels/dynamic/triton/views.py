"""The three views of dynamic routing: sums over the edges, with votes in registers.

A tile [images, parent types, pose entries] = [BN, BC, BE] has the votes of one child for BC parent types at a location.
It is a sum of outer products, u_hat = sum_d u_d W_d, of pose entries [BN, 1, 1] and rows of matrices [1, BC, BE].

    parent view  sums over children          child view  sums over parents          weight view  sums over images

Names in kernels: i_ index of a program or of a loop, o_ offsets, m_ mask, p_ pointer, b_ loaded or computed block.
"""

import triton
import triton.language as tl

from tritoncaps.kernels.common.triton.device import not_unrolled
from tritoncaps.kernels.dynamic.triton.costs import launch_metadata

SIZES = ["N", "L", "P", "S", "G", "K"]  # arguments for which Triton does not specialize a kernel


@triton.jit
def parent_offsets(o_n, i_p, o_c, o_e, P, C: tl.constexpr, E: tl.constexpr):
    """Offsets into an array [N, P, C, E]."""
    return ((o_n * P + i_p) * C + o_c) * E + o_e


@triton.jit
def matrix_offsets(i_k, i_b, o_c, o_e, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """Offsets of the first rows of the matrices, in [K, B, C, D, E]."""
    return ((i_k.to(tl.int64) * B + i_b) * C + o_c) * D * E + o_e


@triton.jit
def child_votes(
    p_pose,
    p_matrix,
    m_image,
    m_pose,
    D: tl.constexpr,
    E: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """u_hat [BN, BC, BE] = sum_d u_d W_d, from pointers to u_0 [BN, 1, 1] and W_0 [1, BC, BE].

    All views must compute the same bits, because one view subtracts a log_sum that another view has computed from the
    same logits.
    """
    b_votes = tl.zeros((BN, BC, BE), DTYPE)
    for i_d in range(D):
        b_u = tl.load(p_pose + i_d, mask=m_image, other=0.0)
        b_votes = tl.fma(b_u, tl.load(p_matrix + i_d * E, mask=m_pose, other=0.0), b_votes)
    return b_votes


@triton.jit
def load_prior(p_priors, i_k, i_b, o_c, m_c, B: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr):
    """The priors b [1, BC, 1] from p_priors [K, B, C]; zero if p_priors is None."""
    b_prior = tl.zeros((1, 1, 1), DTYPE)
    if p_priors is not None:
        b_prior = tl.load(p_priors + (i_k.to(tl.int64) * B + i_b) * C + o_c, mask=m_c, other=0.0)
    return b_prior


@triton.jit
def agreement(b_votes, b_parents):
    """u_hat . v, [BN, BC, 1]."""
    return tl.sum(b_votes * b_parents, axis=2, keep_dims=True)


@triton.jit
def assignment(b_logit, b_log_sum):
    """R = exp(l - log_sum), at most 1 in spite of rounding errors; nan stays nan."""
    return tl.exp(tl.minimum(b_logit - b_log_sum, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit(launch_metadata=launch_metadata, do_not_specialize=[*SIZES, "steps"])
def dynamic_parent_view_kernel(
    p_poses,
    p_weight,
    p_priors,
    p_children,
    p_weight_of,
    p_q,
    p_g,
    p_log_sum,
    p_mean,
    p_out,
    N,
    L,
    P,
    S,
    G,
    steps,
    B: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    LOCAL: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BE: tl.constexpr,
):
    """out_j = sum_i w_ij u_hat_ij over the children i of parent j.

    w = R = exp(l - log_sum), l = b + u_hat . q;  with p_g, w = R (G - mean), G = u_hat . g. Without p_q, l = b.

    p_poses [N, B, L, D], p_weight [K, B, C, D, E], p_priors [K, B, C] or None, p_children [P, S], p_weight_of [S];
    p_q, p_g [N, P, C, E] or None; p_log_sum, p_mean [N, G, B], and log_sum [1, G, B] without p_q; p_out
    [splits, N, P, C, E].

    Program (image block, type block, p, split), images fastest: split k takes `steps` of the S * B pairs of a slot and
    a child type, and writes p_out[k, images, p, types].
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    n_images = tl.cdiv(N, BN)
    n_types = tl.cdiv(C, BC)
    i_program = tl.program_id(0)
    i_rest = i_program // n_images
    i_p = (i_rest // n_types) % P
    i_split = i_rest // n_types // P
    o_n = ((i_program % n_images) * BN + tl.arange(0, BN)).to(tl.int64)[:, None, None]
    o_c = (i_rest % n_types) * BC + tl.arange(0, BC)[None, :, None]
    o_e = tl.arange(0, BE)[None, None, :]
    m_n = o_n < N
    m_pose = (o_c < C) & (o_e < E)
    o_parent = parent_offsets(o_n, i_p, o_c, o_e, P, C, E)
    if p_q is not None:
        b_q = tl.load(p_q + o_parent, mask=m_n & m_pose, other=0.0)
    if p_g is not None:
        b_g = tl.load(p_g + o_parent, mask=m_n & m_pose, other=0.0)

    b_sum = tl.zeros((BN, BC, BE), DTYPE)
    for i_step in range(i_split * steps, tl.minimum((i_split + 1) * steps, S * B)):
        i_s = i_step // B
        i_b = i_step % B
        i_l = tl.load(p_children + i_p * S + i_s)
        m_image = m_n & (i_l >= 0)  # a missing slot (-1) has no child
        i_l = tl.maximum(i_l, 0)
        i_k = tl.load(p_weight_of + i_s)
        p_pose = p_poses + ((o_n * B + i_b) * L + i_l) * D
        p_matrix = p_weight + matrix_offsets(i_k, i_b, o_c, o_e, B, C, D, E)
        b_votes = child_votes(p_pose, p_matrix, m_image, m_pose, D, E, BN, BC, BE, DTYPE)
        b_logit = load_prior(p_priors, i_k, i_b, o_c, o_c < C, B, C, DTYPE)
        i_g = i_p * S + i_s if LOCAL else i_l
        if p_q is not None:
            b_logit += agreement(b_votes, b_q)
            b_log_sum = tl.load(p_log_sum + (o_n * G + i_g) * B + i_b, mask=m_image, other=0.0)
        else:
            b_log_sum = tl.load(p_log_sum + i_g.to(tl.int64) * B + i_b)
        b_w = assignment(b_logit, b_log_sum)
        if p_g is not None:
            b_mean = tl.load(p_mean + (o_n * G + i_g) * B + i_b, mask=m_image, other=0.0)
            b_w *= agreement(b_votes, b_g) - b_mean
        b_sum = tl.fma(b_w, b_votes, b_sum)
    o_split = i_split.to(tl.int64) * N * P * C * E
    tl.store(p_out + o_split + o_parent, b_sum, mask=m_n & m_pose)


@triton.jit(launch_metadata=launch_metadata, do_not_specialize=SIZES)
def dynamic_child_view_kernel(
    p_poses,
    p_weight,
    p_priors,
    p_weight_of,
    p_group_child,
    p_group_start,
    p_pair_parent,
    p_pair_slot,
    p_q,
    p_g,
    p_log_sum,
    p_mean,
    N,
    L,
    P,
    G,
    B: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    RIVAL: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BE: tl.constexpr,
):
    """log_sum_i = log sum_j exp(l_ij) over the parents j that compete for child i, plus exp(0) if RIVAL;
    with p_g also mean_i = sum_j R_ij G_ij. l = b + u_hat . q (l = b without p_q), G = u_hat . g. Online, in one pass.

    p_poses [N, B, L, D], p_weight [K, B, C, D, E], p_priors [K, B, C] or None, p_weight_of [S]; p_group_child [G],
    p_group_start [G + 1], p_pair_parent and p_pair_slot [pairs]; p_q, p_g [N, P, C, E] or None; p_log_sum, p_mean
    [N, G, B].

    Program (image block, child type, group), images fastest, owns p_log_sum and p_mean of its children.
    """
    DTYPE: tl.constexpr = p_log_sum.dtype.element_ty
    n_images = tl.cdiv(N, BN)
    i_program = tl.program_id(0)
    i_b = (i_program // n_images) % B
    i_g = i_program // n_images // B
    o_n = ((i_program % n_images) * BN + tl.arange(0, BN)).to(tl.int64)[:, None, None]
    o_e = tl.arange(0, BE)[None, None, :]
    m_n = o_n < N
    i_l = tl.load(p_group_child + i_g)
    i_begin = tl.load(p_group_start + i_g)
    i_end = tl.where(i_l >= 0, tl.load(p_group_start + i_g + 1), i_begin)  # a missing slot (-1) has no pairs
    p_pose = p_poses + ((o_n * B + i_b) * L + tl.maximum(i_l, 0)) * D

    # one running maximum and sums for each of the BC columns; they are combined at the end
    b_max = tl.full((BN, BC, 1), float("-inf"), DTYPE)
    b_sum = tl.zeros((BN, BC, 1), DTYPE)
    b_weighted = tl.zeros((BN, BC, 1), DTYPE)
    for i_pair in range(i_begin, i_end):
        i_p = tl.load(p_pair_parent + i_pair)
        i_k = tl.load(p_weight_of + tl.load(p_pair_slot + i_pair))
        for i_c in range(0, not_unrolled(C, N), BC):
            o_c = i_c + tl.arange(0, BC)[None, :, None]
            m_pose = (o_c < C) & (o_e < E)
            o_parent = parent_offsets(o_n, i_p, o_c, o_e, P, C, E)
            b_logit = load_prior(p_priors, i_k, i_b, o_c, o_c < C, B, C, DTYPE)
            if p_q is not None or p_g is not None:
                p_matrix = p_weight + matrix_offsets(i_k, i_b, o_c, o_e, B, C, D, E)
                b_votes = child_votes(p_pose, p_matrix, m_n, m_pose, D, E, BN, BC, BE, DTYPE)
            if p_q is not None:
                b_logit += agreement(b_votes, tl.load(p_q + o_parent, mask=m_n & m_pose, other=0.0))
            b_logit = tl.where(o_c < C, b_logit, float("-inf")) + tl.zeros((BN, BC, 1), DTYPE)
            b_new = tl.maximum(b_max, b_logit)
            b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_old = tl.exp(b_max - b_shift)
            b_e = tl.exp(b_logit - b_shift)
            b_sum = b_sum * b_old + b_e
            if p_g is not None:
                b_G = agreement(b_votes, tl.load(p_g + o_parent, mask=m_n & m_pose, other=0.0))
                b_weighted = b_weighted * b_old + b_e * b_G
            b_max = b_new
    b_top = tl.max(b_max, axis=1, keep_dims=True)
    if RIVAL:
        b_top = tl.maximum(b_top, 0.0)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_scale = tl.exp(b_max - b_top)
    b_total = tl.sum(b_sum * b_scale, axis=1, keep_dims=True)
    if RIVAL:
        b_total += tl.exp(-b_top)
    b_total = tl.where(b_total == 0, 1.0, b_total)
    o_group = (o_n * G + i_g) * B + i_b
    tl.store(p_log_sum + o_group, b_top + tl.log(b_total), mask=m_n)
    if p_g is not None:
        tl.store(p_mean + o_group, tl.sum(b_weighted * b_scale, axis=1, keep_dims=True) / b_total, mask=m_n)


@triton.jit
def vote_gradient(
    p_pose,
    p_matrix,
    b_prior,
    pointers,
    tile,
    sizes,
    B: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    VARIABLE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """dV [BN, BC, BE] = sum_t R g + dl q and sum_t dl [BN, BC, 1] of all T iterations, with dl = R (u_hat . g - mean);
    without dl q if the agreements are not VARIABLE.

    p_pose, p_matrix as in `child_votes`; b_prior [1, BC, 1]
    pointers  p_q and p_g [T, N, P, C, E], p_log_sum and p_mean [T, N, G, B]
    tile      images, parent types and pose entries; child type, parent location and group
    sizes     N, P, G, T
    """
    p_q, p_g, p_log_sum, p_mean = pointers
    o_n, o_c, o_e, i_b, i_p, i_g = tile
    N, P, G, T = sizes
    BN: tl.constexpr = o_n.shape[0]
    BC: tl.constexpr = o_c.shape[1]
    BE: tl.constexpr = o_e.shape[2]
    m_n = o_n < N
    m_pose = (o_c < C) & (o_e < E)
    o_parent = parent_offsets(o_n, i_p, o_c, o_e, P, C, E)
    o_group = (o_n * G + i_g) * B + i_b
    b_votes = child_votes(p_pose, p_matrix, m_n, m_pose, D, E, BN, BC, BE, DTYPE)
    b_dV = tl.zeros((BN, BC, BE), DTYPE)
    b_dl = tl.zeros((BN, BC, 1), DTYPE)
    for _ in range(T):
        b_q = tl.load(p_q + o_parent, mask=m_n & m_pose, other=0.0)
        b_g = tl.load(p_g + o_parent, mask=m_n & m_pose, other=0.0)
        b_R = assignment(b_prior + agreement(b_votes, b_q), tl.load(p_log_sum + o_group, mask=m_n, other=0.0))
        b_slope = b_R * (agreement(b_votes, b_g) - tl.load(p_mean + o_group, mask=m_n, other=0.0))
        b_dV = tl.fma(b_R, b_g, b_dV)
        if VARIABLE:
            b_dV = tl.fma(b_slope, b_q, b_dV)
        b_dl += b_slope
        o_parent += N.to(tl.int64) * P * C * E
        o_group += N.to(tl.int64) * G * B
    return b_dV, b_dl


@triton.jit(launch_metadata=launch_metadata, do_not_specialize=[*SIZES, "T"])
def dynamic_child_gradient_kernel(
    p_poses,
    p_weight,
    p_priors,
    p_weight_of,
    p_parents_start,
    p_pair_parent,
    p_pair_slot,
    p_q,
    p_g,
    p_log_sum,
    p_mean,
    p_out,
    N,
    L,
    P,
    S,
    G,
    T,
    B: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    LOCAL: tl.constexpr,
    VARIABLE: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BE: tl.constexpr,
    BD: tl.constexpr,
):
    """du_i = sum_j dV_ij W_ij^T over all parents j of child i, with dV of `vote_gradient`.

    p_poses [N, B, L, D], p_weight [K, B, C, D, E], p_priors [K, B, C] or None, p_weight_of [S]; p_parents_start
    [L + 1], p_pair_parent and p_pair_slot [pairs]; p_q, p_g [T, N, P, C, E]; p_log_sum, p_mean [T, N, G, B]; p_out
    [N, B, L, D].

    Program (block of D, image block, child type, child location), fastest first, owns BD entries of the gradient of
    its children.
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    n_rows = tl.cdiv(D, BD)
    n_images = tl.cdiv(N, BN)
    i_program = tl.program_id(0) // n_rows
    i_row = (tl.program_id(0) % n_rows) * BD
    i_b = (i_program // n_images) % B
    i_l = i_program // n_images // B
    o_n = ((i_program % n_images) * BN + tl.arange(0, BN)).to(tl.int64)[:, None, None]
    o_e = tl.arange(0, BE)[None, None, :]
    o_d = i_row + tl.arange(0, BD)[None, :]
    m_n = o_n < N
    o_child = ((o_n * B + i_b) * L + i_l) * D

    b_du = tl.zeros((BN, BD), DTYPE)
    for i_pair in range(tl.load(p_parents_start + i_l), tl.load(p_parents_start + i_l + 1)):
        i_p = tl.load(p_pair_parent + i_pair)
        i_s = tl.load(p_pair_slot + i_pair)
        i_k = tl.load(p_weight_of + i_s)
        for i_c in range(0, not_unrolled(C, N), BC):
            o_c = i_c + tl.arange(0, BC)[None, :, None]
            p_matrix = p_weight + matrix_offsets(i_k, i_b, o_c, o_e, B, C, D, E)
            b_dV, _ = vote_gradient(
                p_poses + o_child,
                p_matrix,
                load_prior(p_priors, i_k, i_b, o_c, o_c < C, B, C, DTYPE),
                (p_q, p_g, p_log_sum, p_mean),
                (o_n, o_c, o_e, i_b, i_p, i_p * S + i_s if LOCAL else i_l),
                (N, P, G, T),
                B,
                C,
                D,
                E,
                VARIABLE,
                DTYPE,
            )
            for i_d in range(i_row, tl.minimum(i_row + BD, D)):
                b_product = b_dV * tl.load(p_matrix + i_d * E, mask=(o_c < C) & (o_e < E), other=0.0)
                b_entry = tl.sum(tl.sum(b_product, axis=2), axis=1)[:, None]
                b_du += tl.where(o_d == i_d, b_entry, 0.0)
    o_out = tl.reshape(o_child, (BN, 1)) + o_d
    tl.store(p_out + o_out, b_du, mask=tl.reshape(m_n, (BN, 1)) & (o_d < D))


@triton.jit(launch_metadata=launch_metadata, do_not_specialize=[*SIZES, "T", "pair_splits", "image_splits"])
def dynamic_weight_view_kernel(
    p_poses,
    p_weight,
    p_priors,
    p_weight_start,
    p_pair_child,
    p_pair_parent,
    p_pair_slot,
    p_q,
    p_g,
    p_log_sum,
    p_mean,
    p_out,
    p_grad_priors,
    N,
    L,
    P,
    S,
    G,
    K,
    T,
    pair_splits,
    image_splits,
    B: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    LOCAL: tl.constexpr,
    VARIABLE: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BE: tl.constexpr,
    BD: tl.constexpr,
):
    """dW = sum of u^T dV, and dpriors = sum of sum_t dl: over the images and the edges that use this weight block.

    p_poses [N, B, L, D], p_weight [K, B, C, D, E], p_priors [K, B, C] or None; p_weight_start [K + 1], p_pair_child,
    p_pair_parent and p_pair_slot [pairs]; p_q, p_g [T, N, P, C, E]; p_log_sum, p_mean [T, N, G, B]; p_out
    [splits, K, B, C, D, E] or None, p_grad_priors [splits, K, B, C] or None.

    Program (block of D, child type, parent type block, weight block, split), fastest first, owns BD rows of the
    matrices of its types, in its split of p_out. A split takes every pair_splits-th edge of the weight block and every
    image_splits-th block of BN images.
    """
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    n_rows = tl.cdiv(D, BD)
    n_types = tl.cdiv(C, BC)
    i_program = tl.program_id(0)
    i_row = i_program % n_rows
    i_b = (i_program // n_rows) % B
    i_rest = i_program // n_rows // B
    i_k = (i_rest // n_types) % K
    i_split = i_rest // n_types // K
    o_c = (i_rest % n_types) * BC + tl.arange(0, BC)[None, :, None]
    o_e = tl.arange(0, BE)[None, None, :]
    m_pose = (o_c < C) & (o_e < E)
    o_matrix = matrix_offsets(i_k, i_b, o_c, o_e, B, C, D, E)
    b_prior = load_prior(p_priors, i_k, i_b, o_c, o_c < C, B, C, DTYPE)

    b_dW = ()
    for _ in tl.static_range(BD):
        b_dW = b_dW + (tl.zeros((BN, BC, BE), DTYPE),)
    b_db = tl.zeros((BN, BC, 1), DTYPE)
    i_first = i_split // pair_splits * BN
    i_end = tl.load(p_weight_start + i_k + 1)
    for i_pair in range(tl.load(p_weight_start + i_k) + i_split % pair_splits, i_end, pair_splits):
        i_l = tl.load(p_pair_child + i_pair)
        i_p = tl.load(p_pair_parent + i_pair)
        i_s = tl.load(p_pair_slot + i_pair)
        for i_n in range(i_first, N, image_splits * BN):
            o_n = (i_n + tl.arange(0, BN)).to(tl.int64)[:, None, None]
            m_n = o_n < N
            p_pose = p_poses + ((o_n * B + i_b) * L + i_l) * D
            b_dV, b_dl = vote_gradient(
                p_pose,
                p_weight + o_matrix,
                b_prior,
                (p_q, p_g, p_log_sum, p_mean),
                (o_n, o_c, o_e, i_b, i_p, i_p * S + i_s if LOCAL else i_l),
                (N, P, G, T),
                B,
                C,
                D,
                E,
                VARIABLE,
                DTYPE,
            )
            b_db += tl.where(m_n, b_dl, 0.0)
            b_new = ()
            for d in tl.static_range(BD):
                i_d = i_row * BD + d
                b_u = tl.load(p_pose + i_d, mask=m_n & (i_d < D), other=0.0)
                b_new = b_new + (tl.fma(b_u, b_dV, b_dW[d]),)
            b_dW = b_new

    o_split = i_split.to(tl.int64) * K * B * C
    if p_out is not None:
        for d in tl.static_range(BD):
            i_d = i_row * BD + d
            b_sum = tl.sum(b_dW[d], axis=0, keep_dims=True)
            tl.store(p_out + o_split * D * E + o_matrix + i_d * E, b_sum, mask=m_pose & (i_d < D))
    if p_grad_priors is not None:
        o_type = o_split + (i_k.to(tl.int64) * B + i_b) * C + o_c
        tl.store(p_grad_priors + o_type, tl.sum(b_db, axis=0, keep_dims=True), mask=(o_c < C) & (i_row == 0))
