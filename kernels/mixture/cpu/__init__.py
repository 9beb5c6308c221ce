"""The CPU backend of mixture routings, compiled by Numba with explicit SIMD vectors.

backend.py      the passes over votes that a routing calls, as kernels that run all at once
em_routing.py   the passes of EM routing
kept.py         plans of small calls, which later calls run again
layout.py       the arrays that kernels read
votes.py        the micro-kernels: what is computed for one vote
parents.py      the micro-kernels of parents: what an M-step makes of moments, and its gradients
components.py   the rows of a routing's own fit
child_view.py   how the parents of a child share it: assignments and their gradient
parent_view.py  moments, M-steps and their slopes
gradient.py     the last sweep of the backward pass: gradients of poses, activations and weight
stored.py       votes, M-steps and E-steps on arrays in memory, forward and backward
stored_votes.py their micro-kernels
"""

from tritoncaps.kernels.mixture.cpu import stored
from tritoncaps.kernels.mixture.cpu.backend import BACKEND

__all__ = ["BACKEND", "stored"]
