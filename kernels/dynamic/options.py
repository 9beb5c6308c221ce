"""Dynamic routing that does not store votes: the functions of a backend.

    forward(poses, weight, priors, tables, options)                          -> sums of every iteration, parents
    backward(grad, poses, weight, priors, tables, sums, options, needs)      -> gradients of poses, weight and priors

The logits after t iterations are b_ij + u_hat_ij . q_j with q = v_1 + ... + v_t, so an iteration has to keep only a
sum s_j for each parent. docs/dynamic-routing.md derives the backward pass.

Letters: N images, L child and P parent locations, B child and C parent types, K weight blocks, D and E entries of a
child's and a parent's pose, T iterations. poses [N, B, L, D], weight [K, B, C, D, E], priors [K, B, C], parents
[N, P, C, E], sums [T, N, P, C, E].
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

LONGEST_ON_TRITON = 128  # largest E


class Options(NamedTuple):
    """The fields of a `DynamicRouting` that the operators pass to the kernels."""

    iterations: int
    competition: str
    none_of_the_above: bool
    gradient: str


class Gradients(NamedTuple):
    """Gradients of the inputs, in the shapes of the inputs; None if not needed."""

    poses: Tensor | None
    weight: Tensor | None
    priors: Tensor | None
