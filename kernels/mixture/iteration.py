"""EM routing that never stores a vote: the iteration, forward and backward, over a backend's three views.

A backend (`kernels.cpu`, `kernels.triton`) provides, under these names:

    surroundings(tensor)                                      a context for every call
    edges(poses, activations, weight, tables, competition)    packs the inputs of a call
    statistics_shape(images, parents, types, dtype)           of what an M-step leaves behind
    slopes_shape(images, parents, types, dtype)               of what its backward pass leaves behind
    log_sums_shape(images, groups, types)                     of what an E-step leaves behind
    da_shape(images, groups, types)                           of what its backward pass leaves behind
    first_m_step(edges, fit, out)                             statistics of votes that are shared equally
    em_step(edges, fit, before, log_sum, out)                 log_sum and statistics from the statistics before
    outputs(edges, statistics)                                -> poses [N, P, 16, C], activations [N, P, C]

    output_slopes(edges, fit, history, grad_poses, grad_activations)     slopes of the last M-step
    slopes_before(edges, fit, history, t)                     da of iteration t and slopes of iteration t - 1
    child_and_weight_gradient(edges, history, since, needs_children, needs_weight)     -> dL/dM, dL/da, dL/dW
    beta_gradients(edges, history, since)                     -> dL/dbeta_u, dL/dbeta_a

A backend may put off the work until `outputs` and `beta_gradients`, to do it all at once.
Statistics and slopes belong to parents, log_sums and da to children, and each backend has its own layout of them.
docs/backward.md derives the formulas.

Letters: N images, L child and P parent locations, B child and C parent types, G groups of competing parents
(one for each child location, or for each edge if the competition is local), T iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Fit(NamedTuple):
    """What an M-step is told about the parents."""

    beta_u: Tensor  # [C]
    beta_a: Tensor  # [C]
    inverse_temperature: float
    variance_floor: float
    mean_data: float


class History(NamedTuple):
    """What the iterations t = 0, ..., T - 1 leave behind for the backward pass, and what that adds to it.

    With d = V - mean of iteration t - 1 (of 0, if t = 0), and e = d + shift about iteration t's own mean:

    R_ij  = exp(l_ij - log_sum_i)                 r_ij = R_ij a_i;  l is the log-likelihood of iteration t - 1
    G_ij  = A_j + sum_h (B_jh + C_jh e_h) e_h     dL/dr_ij
    dl_ij = r_ij (G_ij - da_i)                    dL/dl_ij; zero if the assignments are constants
    dV_ij = r_ij (B_j + 2 C_j e) - 2 dl_ij precision_j d

    One polynomial in d would cancel where a mean moved by many standard deviations between two iterations.
    """

    statistics: Tensor  # [T, ...]
    log_sums: Tensor  # [T - 1, ...], of iterations 1, ..., T - 1; in iteration 0, R is uniform
    slopes: Tensor  # [T, ...]: A, B, C and shift of every parent
    da: Tensor  # [T - 1, ...]: sum_j R_ij G_ij of every child


def forward(backend: Any, edges: Any, fits: Sequence[Fit], statistics: Tensor, log_sums: Tensor) -> None:
    """Fill statistics [T, ...] and log_sums [T - 1, ...]."""
    backend.first_m_step(edges, fits[0], statistics[0])
    for t in range(1, len(fits)):
        backend.em_step(edges, fits[t], statistics[t - 1], log_sums[t - 1], statistics[t])


def backward(
    backend: Any,
    edges: Any,
    fits: Sequence[Fit],
    history: History,
    gradient: str,
    grad_poses: Tensor,
    grad_activations: Tensor,
    needs_children: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Gradients of poses, activations, weight (None where not needed), beta_u and beta_a."""
    last = len(fits) - 1
    since = 0 if gradient == "all" else last  # the first iteration that gradients reach; its assignments are constants
    backend.output_slopes(edges, fits[last], history, grad_poses, grad_activations)
    for t in range(last, since, -1):
        backend.slopes_before(edges, fits[t - 1], history, t)
    grads = backend.child_and_weight_gradient(edges, history, since, needs_children, needs_weight)
    return *grads, *backend.beta_gradients(edges, history, since)
