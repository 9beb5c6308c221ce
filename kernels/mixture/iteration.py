"""EM routing that never stores a vote: the iteration, forward and backward, over a backend's passes.

Statistics and slopes belong to parents, log_sums and da to children, and each backend has its own layout of them.
docs/backward.md derives the formulas.

Letters: N images, L child and P parent locations, B child and C parent types, G groups of competing parents
(one for each child location, or for each edge if the competition is local), T iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

# of poses, activations and weight (None where not needed), beta_u and beta_a
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor]


class Fit(NamedTuple):
    """Parameters of an M-step."""

    beta_u: Tensor  # [C]
    beta_a: Tensor  # [C]
    inverse_temperature: float
    variance_floor: float
    mean_data: float


class History(NamedTuple):
    """What the iterations t = 0, ..., T - 1 keep for the backward pass, and what the backward pass adds.

    With d = V - mean of iteration t - 1 (of 0, if t = 0), and e = d + shift about iteration t's own mean:

    R_ij  = exp(l_ij - log_sum_i)                 r_ij = R_ij a_i;  l is the log-likelihood of iteration t - 1
    G_ij  = offset_j + sum_h (linear_jh + quadratic_jh e_h) e_h     dL/dr_ij
    dl_ij = r_ij (G_ij - da_i)                    dL/dl_ij; zero if the assignments are constants
    dV_ij = r_ij (linear_j + 2 quadratic_j e) - 2 dl_ij q_j d;  q = 1 / (2 variance) of iteration t - 1

    One polynomial in d would cancel where a mean moved by many standard deviations between two iterations.
    """

    statistics: Tensor  # [T, ...]
    log_sums: Tensor  # [T - 1, ...], of iterations 1, ..., T - 1; in iteration 0, R is uniform
    slopes: Tensor  # [T, ...]: offset, linear, quadratic and shift of every parent
    da: Tensor  # [T - 1, ...]: sum_j R_ij G_ij of every child


class EMPasses(Protocol):
    """The passes of EM routing over the votes of one call. A backend may put off the work until `finish`."""

    def first_m_step(self, fit: Fit, out: Any) -> None:
        """Statistics of votes that are shared equally."""
        ...

    def em_step(self, fit: Fit, before: Any, log_sum: Any, out: Any) -> None:
        """log_sum and statistics from the statistics before."""
        ...

    def outputs(self, statistics: Any) -> tuple[Tensor, Tensor]:
        """Poses [N, P, 16, C] and activations [N, P, C]."""
        ...

    def output_slopes(self, fit: Fit, history: History, grad_poses: Tensor, grad_activations: Tensor) -> None:
        """The slopes of the last M-step."""
        ...

    def slopes_before(self, fit: Fit, history: History, t: int) -> None:
        """da of iteration t and the slopes of iteration t - 1."""
        ...

    def child_and_weight_gradient(
        self, history: History, since: int, needs_children: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dL/dM [N, B, L, 4, 4], dL/da [N, B, L] and dL/dW [K, B, C, 4, 4]; None where not needed."""
        ...

    def finish(self) -> None:
        """Everything that was asked for is in its tensor after this call."""
        ...

    def beta_gradients(self, history: History, since: int) -> tuple[Tensor, Tensor]:
        """dL/dbeta_u and dL/dbeta_a, [C], of slopes that are finished."""
        ...


def forward(passes: EMPasses, fits: Sequence[Fit], statistics: Any, log_sums: Any) -> tuple[Tensor, Tensor]:
    """Fill statistics [T, ...] and log_sums [T - 1, ...]; -> poses [N, P, 16, C] and activations [N, P, C]."""
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
    """The backward pass, from the gradients of the parents' poses and activations."""
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
