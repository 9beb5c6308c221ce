"""The CPU backend of mixture routings, compiled by Numba with explicit SIMD vectors.

backend.py      the backend object: passes over the votes for any fit; a call plans its kernels and then runs them
em_routing.py   the passes of EM routing
kept.py         plans of small calls, which later calls reuse
layout.py       the arrays that kernels read
votes.py        micro-kernels for votes
parents.py      micro-kernels for parents: the M-step from moments, and its gradients
components.py   conversion of the tensors of any fit to the rows that kernels read
vb.py           the fit of variational Bayes routing, and its gradients
child_view.py   assignments and their gradient
parent_view.py  moments, M-steps and their slopes
gradient.py     the last sweep of the backward pass: gradients of poses, activations and weight
stored.py       pose votes, M-steps and E-steps on stored votes, forward and backward
stored_votes.py micro-kernels for stored votes
"""

from tritoncaps.kernels.mixture.cpu import stored
from tritoncaps.kernels.mixture.cpu.backend import BACKEND

__all__ = ["BACKEND", "stored"]
