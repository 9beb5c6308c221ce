"""EM routing that never stores a vote: the iteration, forward and backward, over a backend's three views.

A backend (`kernels.cpu`, `kernels.triton`) provides the sums over edges, under these names:

    edges(poses, activations, weight, tables, competition)       packs the inputs of a call
    parent_moments(edges, gaussian, log_sum)                     -> Moments with weights r_ij = R_ij a_i
    child_log_sum(edges, gaussian)                               -> log of the E-step's denominator
    child_assignment_gradient(edges, iteration)                  -> da_i = sum_j R_ij G_ij
    parent_gradient_moments(edges, iteration)                    -> Moments with weights dl_ij
    child_gradient(edges, iterations)                            -> dL/dM_i, dL/da_i
    weight_gradient(edges, iterations)                           -> dL/dW
    child_and_weight_gradient(edges, iterations)                 -> all three, in one sweep where that is faster

What is per parent and not per edge is done here, in plain torch. docs/backward.md derives the formulas.

Letters: N images, L child and P parent locations, B child and C parent types, G groups of competing parents
(one for each child location, or for each edge if the competition is local), T iterations. Arrays of parents
are [N, P, 16, C] or [N, P, C], of children [N, L, 16, B] or [N, G, B]: types are fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritoncaps.reference import least_support
from tritoncaps.routing_map import Tables


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


class Iteration(NamedTuple):
    """One iteration of the backward pass, with d = V - gaussian.mean, and e = d + shift about its own M-step's mean:

    R_ij  = exp(l_ij - log_sum_i)                 r_ij = R_ij a_i
    G_ij  = A_j + sum_h (B_jh + C_jh e_h) e_h     dL/dr_ij
    dl_ij = r_ij (G_ij - da_i)                    dL/dl_ij; zero if the assignments are constants (da is None)
    dV_ij = r_ij (B_j + 2 C_j e) - 2 dl_ij precision_j d

    One polynomial in d would cancel where a mean moved by many standard deviations between two iterations.
    """

    gaussian: Gaussian
    log_sum: Tensor  # [N, G, B]
    A: Tensor  # [N, P, C]
    B: Tensor  # [N, P, 16, C]
    C: Tensor  # [N, P, 16, C]
    da: Tensor | None  # [N, G, B]
    shift: Tensor  # [N, P, 16, C]  gaussian.mean - mean


class Options(NamedTuple):
    """The numbers of an EMRouting, as the operators pass them."""

    lambdas: Sequence[float]
    variance_floor: float
    mean_data: float
    gradient: str


def forward(
    backend: Any, edges: Any, beta_u: Tensor, beta_a: Tensor, options: Options
) -> tuple[list[Statistics], list[Tensor]]:
    """The statistics of every iteration, and the log_sum of every E-step."""
    history: list[Statistics] = []
    log_sums: list[Tensor] = []
    gaussian = log_sum = None
    for inverse_temperature in options.lambdas:
        if history:
            gaussian = likelihood(history[-1])
            log_sum = backend.child_log_sum(edges, gaussian)
            log_sums.append(log_sum)
        moments = backend.parent_moments(edges, gaussian, log_sum)
        history.append(fit(moments, beta_u, beta_a, inverse_temperature, options))
    return history, log_sums


def fit(moments: Moments, beta_u: Tensor, beta_a: Tensor, inverse_temperature: float, options: Options) -> Statistics:
    """The M-step's last lines: mean, variance and logit of every parent."""
    support = moments.total
    scale = _inverse(support)
    shift = moments.first * scale
    # a parent without support has mean zero, not the mean that it had before
    mean = (moments.centre + shift).where(_supported(support)[:, :, None], 0)
    variance = (moments.second * scale - shift**2).clamp(min=options.variance_floor)
    cost = _cost_of_datum(variance, beta_u) * support / options.mean_data
    return Statistics(mean, variance, inverse_temperature * (beta_a - cost), support)


def likelihood(statistics: Statistics) -> Gaussian:
    mean, variance, logit, _ = statistics
    constant = log_sigmoid(logit) - 0.5 * log(2 * math.pi * variance).sum(dim=2)
    return Gaussian(mean, 0.5 / variance, constant)


def backward(
    backend: Any,
    edges: Any,
    beta_u: Tensor,
    history: Sequence[Statistics],
    log_sums: Sequence[Tensor],
    uniform_log_sum: Tensor,
    options: Options,
    grad_mean: Tensor,
    grad_activation: Tensor,
    needs_children: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Gradients of poses, activations, weight (None where not needed), beta_u and beta_a."""
    activation = sigmoid(history[-1].logit)
    grad_logit = grad_activation * activation * (1 - activation)
    grad_variance = torch.zeros_like(grad_mean)
    grad_beta_u, grad_beta_a = torch.zeros_like(beta_u), torch.zeros_like(beta_u)
    iterations: list[Iteration] = []
    for t in reversed(range(len(history))):
        A, B, C, gbu, gba = fit_backward(grad_mean, grad_variance, grad_logit, history[t], beta_u, t, options)
        grad_beta_u += gbu
        grad_beta_a += gba
        if t == 0:
            gaussian = _uniform(history[0])
            iterations.append(Iteration(gaussian, uniform_log_sum, A, B, C, None, torch.zeros_like(B)))
            break
        gaussian = likelihood(history[t - 1])
        shift = gaussian.mean - history[t].mean
        iteration = Iteration(gaussian, log_sums[t - 1], A, B, C, None, shift)
        if options.gradient == "last":
            iterations.append(iteration)
            break
        iteration = iteration._replace(da=backend.child_assignment_gradient(edges, iteration))
        iterations.append(iteration)
        moments = backend.parent_gradient_moments(edges, iteration)
        grad_mean, grad_variance, grad_logit = likelihood_backward(moments, history[t - 1])
    grad_poses = grad_activations = grad_weight = None
    if needs_children and needs_weight:
        grad_poses, grad_activations, grad_weight = backend.child_and_weight_gradient(edges, iterations)
    elif needs_children:
        grad_poses, grad_activations = backend.child_gradient(edges, iterations)
    elif needs_weight:
        grad_weight = backend.weight_gradient(edges, iterations)
    return grad_poses, grad_activations, grad_weight, grad_beta_u, grad_beta_a


def uniform_log_sum(tables: Tables, competition: str, activations: Tensor, num_types: int) -> Tensor:
    """[N, G, B]: log of the number of parents that compete for each child, the first iteration's log_sum."""
    if competition == "global":
        competitors = tables.parents_start.diff() * num_types
    else:
        competitors = torch.full_like(tables.children.reshape(-1), num_types)
    images, _, types = activations.shape
    return competitors.to(activations.dtype).log()[None, :, None].repeat(images, 1, types)


def fit_backward(
    grad_mean: Tensor,
    grad_variance: Tensor,
    grad_logit: Tensor,
    statistics: Statistics,
    beta_u: Tensor,
    t: int,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A, B, C of `Iteration`, with the mean of this iteration; and the gradients of the betas."""
    _, variance, _, support = statistics
    grad_cost = -options.lambdas[t] * grad_logit / options.mean_data
    grad_support = grad_cost * _cost_of_datum(variance, beta_u)
    grad_variance = grad_variance + (grad_cost * support)[:, :, None] / (2 * variance)
    grad_variance = grad_variance.where(variance > options.variance_floor, 0)
    scale = _inverse(support)
    B, C = grad_mean * scale, grad_variance * scale
    A = grad_support - (C * variance).sum(dim=2)
    grad_beta_u = variance.shape[2] * (grad_cost * support).sum(dim=(0, 1))
    grad_beta_a = options.lambdas[t] * grad_logit.sum(dim=(0, 1))
    return A, B, C, grad_beta_u, grad_beta_a


def likelihood_backward(moments: Moments, statistics: Statistics) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of mean, variance and logit of the iteration before, from the moments of dl."""
    _, variance, logit, _ = statistics
    total = moments.total[:, :, None]
    grad_mean = moments.first / variance
    grad_variance = 0.5 * (moments.second / variance - total) / variance
    return grad_mean, grad_variance, moments.total * sigmoid(-logit)


def _uniform(statistics: Statistics) -> Gaussian:
    """The first iteration's likelihood: the same for all parents."""
    mean, _, logit, _ = statistics
    return Gaussian(mean, torch.zeros_like(mean), torch.zeros_like(logit))


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
