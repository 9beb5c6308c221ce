"""What is per parent and not per edge: an M-step's last lines and the likelihood, forward and backward, in torch.

Arrays of parents are [N, P, H, C] or [N, P, C]: types are fastest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritoncaps.kernels.em_routing import Fit
from tritoncaps.reference import least_support


class Moments(NamedTuple):
    """Weighted moments of the deviations d = V - centre of a parent's votes."""

    total: Tensor  # [N, P, C]      sum_i w_ij
    first: Tensor  # [N, P, 16, C]  sum_i w_ij d_ij
    second: Tensor  # [N, P, 16, C]  sum_i w_ij d_ij^2
    centre: Tensor  # [N, P, 16, C]


class Gaussian(NamedTuple):
    """A parent's log-likelihood of a vote: l = constant - sum_h precision_h (V_h - mean_h)^2."""

    mean: Tensor  # [N, P, 16, C]
    precision: Tensor  # [N, P, 16, C]  1 / (2 variance)
    constant: Tensor  # [N, P, C]      log a - 1/2 sum_h log(2 pi variance_h)


class Statistics(NamedTuple):
    """What an M-step leaves behind: all that the backward pass keeps of an iteration, with its `log_sum`."""

    mean: Tensor  # [N, P, 16, C]
    variance: Tensor  # [N, P, 16, C]
    logit: Tensor  # [N, P, C]
    support: Tensor  # [N, P, C]


class Slopes(NamedTuple):
    """The slopes of an M-step, as `kernels.em_routing.Iteration` names them, and what they give to the betas."""

    A: Tensor  # [N, P, C]
    B: Tensor  # [N, P, H, C]
    C: Tensor  # [N, P, H, C]
    shift: Tensor  # [N, P, H, C]  mean before - mean
    beta_u: Tensor  # [N, P, C]
    beta_a: Tensor  # [N, P, C]


def fit(moments: Moments, fit: Fit) -> Statistics:
    """The M-step's last lines: mean, variance and logit of every parent."""
    support = moments.total
    scale = _inverse(support)
    shift = moments.first * scale
    # a parent without support has mean zero, not the mean that it had before
    mean = (moments.centre + shift).where(_supported(support)[:, :, None], 0)
    variance = (moments.second * scale - shift**2).clamp(min=fit.variance_floor)
    cost = _cost_of_datum(variance, fit.beta_u) * support / fit.mean_data
    return Statistics(mean, variance, fit.inverse_temperature * (fit.beta_a - cost), support)


def likelihood(statistics: Statistics) -> Gaussian:
    mean, variance, logit, _ = statistics
    constant = log_sigmoid(logit) - 0.5 * log(2 * math.pi * variance).sum(dim=2)
    return Gaussian(mean, 0.5 / variance, constant)


def uniform(statistics: Statistics) -> Gaussian:
    """The first iteration's likelihood: the same for all parents."""
    mean, _, logit, _ = statistics
    return Gaussian(mean, torch.zeros_like(mean), torch.zeros_like(logit))


def fit_backward(
    grad_mean: Tensor, grad_variance: Tensor, grad_logit: Tensor, statistics: Statistics, before: Tensor, fit: Fit
) -> Slopes:
    """The slopes of an M-step from the gradients of what it found; `before` is the mean of the M-step before."""
    mean, variance, _, support = statistics
    grad_cost = -fit.inverse_temperature * grad_logit / fit.mean_data
    grad_support = grad_cost * _cost_of_datum(variance, fit.beta_u)
    grad_variance = grad_variance + (grad_cost * support)[:, :, None] / (2 * variance)
    grad_variance = grad_variance.where(variance > fit.variance_floor, 0)
    scale = _inverse(support)
    B, C = grad_mean * scale, grad_variance * scale
    A = grad_support - (C * variance).sum(dim=2)
    grad_beta_u = variance.shape[2] * grad_cost * support
    return Slopes(A, B, C, before - mean, grad_beta_u, fit.inverse_temperature * grad_logit)


def likelihood_backward(moments: Moments, statistics: Statistics) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of mean, variance and logit of the iteration before, from the moments of dl."""
    _, variance, logit, _ = statistics
    total = moments.total[:, :, None]
    grad_mean = moments.first / variance
    grad_variance = 0.5 * (moments.second / variance - total) / variance
    return grad_mean, grad_variance, moments.total * sigmoid(-logit)


def _cost_of_datum(variance: Tensor, beta_u: Tensor) -> Tensor:
    """sum_h (beta_u + 1/2 log variance_h): [N, P, C]."""
    return variance.shape[2] * beta_u + 0.5 * log(variance).sum(dim=2)


def _supported(support: Tensor) -> Tensor:
    """Does a parent explain anything? What is too small to divide by is nothing."""
    return support > least_support(support.dtype)


def _inverse(support: Tensor) -> Tensor:
    """1 / S, or 1 where there is no support: [N, P, 1, C]."""
    return 1 / support.where(_supported(support), 1)[:, :, None]


# On the CPU, torch's exp and log give a number other bits at the end of an array or of a thread's part of it than in
# the middle. NumPy's do not, so that an image's result depends on neither its batch nor the number of threads.


def log(x: Tensor) -> Tensor:
    return _numpy(np.log, x) if x.device.type == "cpu" else x.log()


def sigmoid(x: Tensor) -> Tensor:
    e = _exp(-x.abs())
    return e.where(x < 0, 1) / (1 + e)


def log_sigmoid(x: Tensor) -> Tensor:
    return x.clamp(max=0) - log(1 + _exp(-x.abs()))


def _exp(x: Tensor) -> Tensor:
    return _numpy(np.exp, x) if x.device.type == "cpu" else x.exp()


def _numpy(function: np.ufunc, x: Tensor) -> Tensor:
    with np.errstate(all="ignore"):  # inf and nan pass, as in torch
        return torch.from_numpy(np.asarray(function(x.numpy())))
