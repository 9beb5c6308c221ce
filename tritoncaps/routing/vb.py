"""Variational Bayes routing (De Sousa Ribeiro, Leontidis and Kollias 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tritoncaps.routing.base import check_range
from tritoncaps.routing.mixture import Components, MixtureRouting, Moments, of_types, sum_of_entries

ENTRIES = 16  # of a pose


@dataclass(frozen=True)
class VBRouting(MixtureRouting):
    """Variational Bayes routing of matrix capsules: EM routing with priors over the mixture, with diagonal precision.

    Every parent has a Gaussian-Wishart posterior, and all parents at a position have a Dirichlet posterior. So a parent
    with few votes has a wide Gaussian, and the variances need no floor. docs/your-routing.md contains the formulas.

    Args:
        iterations: number of fits.
        competition: "global" or "local", as in :class:`~tritoncaps.routing.EMRouting`.
        gradient: "all" or "last", as in :class:`~tritoncaps.routing.EMRouting`.
        alpha0: prior number of votes for each parent (Dirichlet).
        mean0: prior mean of every pose entry.
        kappa0: prior number of votes for that mean.
        nu0: prior degrees of freedom of the precision (Wishart), above 15.
        psi0: prior inverse scale of the precision.

    Raises:
        ValueError: if an option is unknown or out of its range.

    Example:
        >>> import torch
        >>> from tritoncaps import Capsules, ClassCaps, VBRouting
        >>> layer = ClassCaps(4, 10, routing=VBRouting(iterations=2))
        >>> layer(Capsules(torch.randn(1, 4, 9, 4, 4), torch.rand(1, 4, 9))).poses.shape
        torch.Size([1, 10, 4, 4])
    """

    parameter_names: ClassVar[tuple[str, ...]] = ("beta_a",)

    alpha0: float = 1.0
    mean0: float = 0.0
    kappa0: float = 1.0
    nu0: float = 17.0
    psi0: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha0", "kappa0", "psi0"):
            check_range(name, getattr(self, name), 0.0, float("inf"))
        check_range("mean0", self.mean0, -float("inf"), float("inf"))
        check_range("nu0", self.nu0, ENTRIES - 1, float("inf"))

    @property
    def scatter_floor(self) -> float:
        """The prior inverse scale: `fit` adds it to support times variance."""
        return self.psi0

    def fit(self, moments: Moments, parameters: Mapping[str, Tensor], iteration: int) -> Components:
        """The posteriors from the moments, and their expectations, which the next E-step needs.

        logit_j = beta_a_j - exp(E ln pi_j) H_j, with the entropy H_j = 8 ln(2 pi e) - 1/2 E ln|Lambda_j|
        """
        support, mean, variance, _ = moments
        matrix = support[..., None, None]
        alpha, kappa, nu = self.alpha0 + support, self.kappa0 + matrix, self.nu0 + support
        apart = mean - self.mean0 if self.mean0 else mean
        moved = matrix / kappa * apart
        posterior_mean = self.mean0 + moved if self.mean0 else moved
        # psi0 + S variance + kappa0 S / kappa (mean - mean0)^2, with few operations on matrices
        inverse_scale = torch.addcmul(matrix * variance + self.psi0, moved, apart, value=self.kappa0)
        log_det = expected_log_det(nu, inverse_scale)
        log_share = torch.digamma(alpha) - torch.digamma(alpha.sum(1, keepdim=True))
        constant = 0.5 * ENTRIES * math.log(2 * math.pi)
        log_weight = log_share + 0.5 * log_det - constant - 0.5 * ENTRIES / kappa[..., 0, 0]
        entropy = constant + 0.5 * ENTRIES - 0.5 * log_det
        logit = of_types(parameters["beta_a"], support) - log_share.exp() * entropy
        return Components(posterior_mean, nu[..., None, None] / inverse_scale, log_weight, logit)


def expected_log_det(nu: Tensor, inverse_scale: Tensor) -> Tensor:
    """E ln|Lambda| = sum_k digamma((nu - k) / 2) + 16 ln 2 - sum_h ln inverse_scale_h, k = 0, ..., 15.

    Pairs of terms are one term: digamma(x / 2) + digamma((x - 1) / 2) = 2 digamma(x - 1) - 2 ln 2. The 16 ln 2 cancel.
    """
    least = (nu - (ENTRIES - 1)).movedim(1, -1)  # types are the last axis, as in memory
    steps = torch.arange(ENTRIES - 2, device=nu.device, dtype=nu.dtype).reshape(-1, *[1] * nu.ndim)  # 0, ..., 13
    # digamma(least + 2 j) = digamma(least) + 1 / least + ... + 1 / (least + 2 j - 1), summed over j = 0, ..., 7
    counts = ENTRIES // 2 - torch.div(steps + 2, 2, rounding_mode="floor")
    digammas = ENTRIES // 2 * torch.digamma(least) + (counts / (least + steps)).sum(0)
    return 2 * digammas.movedim(-1, 1) - sum_of_entries(inverse_scale.log())
