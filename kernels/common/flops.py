"""Floating-point operations of a routing for each vote, if every pass recomputes the votes.

A fused multiply-add counts as two. Work for each parent or each child, and not for each vote, is not counted.
"""

from __future__ import annotations

VOTE = 128  # V = M W: 64 multiply-adds
QUADRATIC_FORM = 48  # sum_h precision_h d_h^2
EXP = 22  # range reduction, a polynomial of degree 7, scaling
MOMENTS = 64  # sums of w, w d, w d^2
G = 64  # A + sum_h (B_h + C_h d_h) d_h
VOTE_GRADIENT = 96  # sum of r (B + 2 C d) - 2 dl precision d
UNIFORM_VOTE_GRADIENT = 64  # the same without dl
PRODUCT = 128  # dV W^T, and M^T dV


def forward_flops(iterations: int) -> int:
    """One M-step with uniform assignments; then an E-step and an M-step for each later iteration."""
    e_step, m_step = VOTE + QUADRATIC_FORM + EXP, VOTE + MOMENTS
    return m_step + (iterations - 1) * (e_step + m_step)


def backward_flops(iterations: int) -> int:
    """For each iteration but the first, the assignments' gradient and the moments of dl; then a sweep for dM, dW."""
    recomputed = QUADRATIC_FORM + EXP + G
    each = (VOTE + recomputed) + (VOTE + MOMENTS)
    sweep = VOTE + G + UNIFORM_VOTE_GRADIENT + (iterations - 1) * (recomputed + VOTE_GRADIENT) + 2 * PRODUCT
    return (iterations - 1) * each + sweep


# operations for each stored vote, from its number of entries: M-step, E-step and their backward passes
STORED = {
    "m_step_forward": lambda entries: 4 * entries,
    "m_step_backward": lambda entries: 8 * entries,
    "e_step_forward": lambda entries: 3 * entries + EXP,
    "e_step_backward": lambda entries: 6 * entries,
}
COORDINATES = 4  # additions for each vote
SQUASH = {"squash_forward": 4, "squash_backward": 8}  # for each number


def dynamic_forward_flops(iterations: int, in_dim: int, out_dim: int) -> int:
    """For each iteration, a vote and its term of the weighted sum; for all but the first, its agreement and softmax."""
    each = 2 * in_dim * out_dim + 2 * out_dim
    return iterations * each + (iterations - 1) * (2 * out_dim + EXP)


def dynamic_backward_flops(iterations: int, in_dim: int, out_dim: int) -> int:
    """For each iteration but the first, R, G and a term of dq; then one sweep over all iterations for du and dW."""
    recomputed = 4 * out_dim + EXP
    each = 2 * in_dim * out_dim + recomputed + 2 * out_dim
    sweep = 2 * in_dim * out_dim + 2 * out_dim + (iterations - 1) * (recomputed + 4 * out_dim) + 4 * in_dim * out_dim
    return (iterations - 1) * each + sweep
