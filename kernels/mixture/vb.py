"""The fit of variational Bayes routing and its gradients, as opaque operators for backends that have kernels for it.

`VBRouting.fit` has the same formulas in torch, which takes some 160 operations for a fit and its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tritoncaps.kernels.common.operators import Given, fake, operator, surrounded
from tritoncaps.kernels.mixture.backend import backend_of, contiguous_like


@operator
@surrounded
def vb_fit(
    support: Tensor, mean: Tensor, variance: Tensor, beta_a: Tensor, priors: Sequence[float], backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, precision [N, P, 16, C], log_weight and logit [N, P, C], from moments [N, P, C] and [N, P, 16, C].

    beta_a: [C]. priors: alpha0, mean0, kappa0, nu0, psi0.
    """
    kernels = backend_of(backend).vb
    assert kernels is not None
    return kernels.fit(support, mean, variance, beta_a, priors)


@fake(vb_fit)
def _(given: Given) -> list[Tensor]:
    return [contiguous_like(x) for x in (given.mean, given.mean, given.support, given.support)]


@operator
@surrounded
def vb_fit_gradients(
    support: Tensor,
    mean: Tensor,
    variance: Tensor,
    grad_mean: Tensor,
    grad_precision: Tensor,
    grad_log_weight: Tensor,
    grad_logit: Tensor,
    priors: Sequence[float],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of support, mean and variance, from the gradients of the results of `vb_fit`. The gradient of beta_a is
    the sum of grad_logit."""
    kernels = backend_of(backend).vb
    assert kernels is not None
    grads = grad_mean, grad_precision, grad_log_weight, grad_logit
    return kernels.gradients((support, mean, variance), grads, priors)


@fake(vb_fit_gradients)
def _(given: Given) -> list[Tensor]:
    return [contiguous_like(x) for x in (given.support, given.mean, given.mean)]
