"""EM routing that does not store votes: the iteration, forward and backward, over the passes of a backend.

Statistics and slopes are arrays of parents, log_sums and da of children. Each backend has its own layout for them.
docs/backward.md derives the formulas.

Letters: N images, L child and P parent locations, B child and C parent types, G groups of competing parents
(one for each child location, or for each edge if the competition is local), T iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

# gradients of poses, activations and weight (each None if not needed), beta_u and beta_a
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor]


class Fit(NamedTuple):
    """Parameters of an M-step."""

    beta_u: Tensor  # [C]
    beta_a: Tensor  # [C]
    inverse_temperature: float
    variance_floor: float
    mean_data: float


class History(NamedTuple):
    """Arrays that the iterations t = 0, ..., T - 1 keep for the backward pass, and arrays that the backward pass fills.

    With d = V - mean of iteration t - 1 (of iteration 0 if t = 0), and e = d + shift = V - mean of iteration t:

    R_ij  = exp(l_ij - log_sum_i)                 r_ij = R_ij a_i;  l is the log-likelihood of iteration t - 1
    G_ij  = offset_j + sum_h (linear_jh + quadratic_jh e_h) e_h     dL/dr_ij
    dl_ij = r_ij (G_ij - da_i)                    dL/dl_ij; zero if the assignments are constants
    dV_ij = r_ij (linear_j + 2 quadratic_j e) - 2 dl_ij q_j d;  q = 1 / (2 variance) of iteration t - 1

    A single polynomial in d would lose precision if a mean moves by many standard deviations between two iterations.
    """

    statistics: Tensor  # [T, ...]
    log_sums: Tensor  # [T - 1, ...]: of iterations 1, ..., T - 1; in iteration 0, R is uniform
    slopes: Tensor  # [T, ...]: offset, linear, quadratic and shift of every parent
    da: Tensor  # [T - 1, ...]: sum_j R_ij G_ij of every child


class EMPasses(Protocol):
    """The passes of EM routing over the votes of one call. A backend may delay the work until `finish`."""

    def first_m_step(self, fit: Fit, out: Any) -> None:
        """Statistics of the first iteration, with uniform assignments."""
        ...

    def em_step(self, fit: Fit, before: Any, log_sum: Any, out: Any) -> None:
        """E-step and M-step: log_sum and statistics from the statistics of the previous iteration."""
        ...

    def outputs(self, statistics: Any) -> tuple[Tensor, Tensor]:
        """Poses [N, P, 16, C] and activations [N, P, C] of the parents."""
        ...

    def output_slopes(self, fit: Fit, history: History, grad_poses: Tensor, grad_activations: Tensor) -> None:
        """The slopes of the last M-step, from the gradients of the outputs."""
        ...

    def slopes_before(self, fit: Fit, history: History, t: int) -> None:
        """da of iteration t and the slopes of iteration t - 1."""
        ...

    def child_and_weight_gradient(
        self, history: History, since: int, needs_children: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dL/dM [N, B, L, 4, 4], dL/da [N, B, L] and dL/dW [K, B, C, 4, 4]; None if not needed."""
        ...

    def finish(self) -> None:
        """After this call, the results of all passes are in their tensors."""
        ...

    def beta_gradients(self, history: History, since: int) -> tuple[Tensor, Tensor]:
        """dL/dbeta_u and dL/dbeta_a [C], from slopes; call it after `finish`."""
        ...


def forward(passes: EMPasses, fits: Sequence[Fit], statistics: Any, log_sums: Any) -> tuple[Tensor, Tensor]:
    """Fill statistics [T, ...] and log_sums [T - 1, ...]. Returns poses [N, P, 16, C] and activations [N, P, C]."""
    passes.first_m_step(fits[0], statistics[0])
    for t in range(1, len(fits)):
        passes.em_step(fits[t], statistics[t - 1], log_sums[t - 1], statistics[t])
    found = passes.outputs(statistics[-1])
    passes.finish()
    return found


def backward(
    passes: EMPasses,
    fits: Sequence[Fit],
    history: History,
    gradient: str,
    grad_poses: Tensor,
    grad_activations: Tensor,
    needs_children: bool,
    needs_weight: bool,
) -> Gradients:
    """The gradients of the inputs, from the gradients of the parents' poses and activations."""
    last, since = len(fits) - 1, first_iteration(len(fits), gradient)
    passes.output_slopes(fits[last], history, grad_poses, grad_activations)
    for t in range(last, since, -1):
        passes.slopes_before(fits[t - 1], history, t)
    grads = passes.child_and_weight_gradient(history, since, needs_children, needs_weight)
    passes.finish()
    return *grads, *passes.beta_gradients(history, since)


def first_iteration(iterations: int, gradient: str) -> int:
    """The first iteration that gradients reach; its assignments are constants."""
    return 0 if gradient == "all" else iterations - 1
