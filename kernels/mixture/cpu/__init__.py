"""The CPU backend of mixture routings, compiled by Numba with explicit SIMD vectors.

layout.py       the arrays that kernels read
votes.py        the micro-kernels: what is computed for one vote
parents.py      the micro-kernels of parents: what an M-step makes of moments, and its gradients
child_view.py   how the parents of a child share it: assignments and their gradient
parent_view.py  moments, M-steps and their slopes
gradient.py     the last sweep of the backward pass: gradients of poses, activations and weight
stored.py       votes, M-steps and E-steps on arrays in memory, forward and backward
stored_votes.py their micro-kernels
"""

from tritoncaps.kernels.mixture.cpu import stored
from tritoncaps.kernels.mixture.cpu.backend import BACKEND
from tritoncaps.kernels.mixture.cpu.gradient import child_and_weight_gradient
from tritoncaps.kernels.mixture.cpu.layout import (
    by_iteration,
    da_shape,
    edges,
    log_sums_shape,
    slopes_shape,
    statistics_shape,
)
from tritoncaps.kernels.mixture.cpu.parent_view import (
    beta_gradients,
    em_step,
    first_m_step,
    output_slopes,
    outputs,
    slopes_before,
)

__all__ = [
    "BACKEND",
    "beta_gradients",
    "by_iteration",
    "child_and_weight_gradient",
    "da_shape",
    "edges",
    "em_step",
    "first_m_step",
    "log_sums_shape",
    "output_slopes",
    "outputs",
    "slopes_before",
    "slopes_shape",
    "statistics_shape",
    "stored",
]
