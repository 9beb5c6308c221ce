"""The fit of variational Bayes routing and its gradients on the CPU: `kernels.mixture.backend.VBKernels`.

With the support S, mean mu and variance v of a parent's votes, its posteriors are

    alpha = alpha0 + S      kappa = kappa0 + S      nu = nu0 + S      rho = S / kappa
    m = mean0 + rho (mu - mean0)                    psi = psi0 + S v + kappa0 rho (mu - mean0)^2
    D = E ln|Lambda| = sum_k digamma((nu - k) / 2) + 16 ln 2 - sum_h ln psi_h            k = 0, ..., 15
    share = exp(log_share),  log_share = E ln pi = digamma(alpha) - digamma(sum of alpha over the types at a location)

and the results are

    precision = nu / psi      log_weight = log_share + D / 2 - 8 ln(2 pi) - 8 / kappa
    mean = m                  logit = beta_a - share H,   H = 8 ln(2 pi e) - D / 2

A task owns some parent locations of some images. It copies the numbers of a block of types to `rows`, [rows, lanes],
because the last block may be incomplete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tritoncaps.kernels.common.cpu.arrays import array
from tritoncaps.kernels.common.cpu.compiling import kernel, part
from tritoncaps.kernels.common.cpu.processor import VECTOR_BYTES
from tritoncaps.kernels.common.cpu.simd import Rows, Vector, exp, fma, log, microkernel
from tritoncaps.kernels.common.cpu.tasks import first_task, next_task
from tritoncaps.kernels.common.cpu.threads import run
from tritoncaps.kernels.mixture.backend import contiguous_like
from tritoncaps.kernels.mixture.cpu.components import copy_row

ENTRIES = 16
TASKS = 32  # largest number of tasks
LOCATIONS = 16  # parent locations that are enough for a task
# the asymptotic series of digamma(x) is accurate from this x on, with the terms below
SHIFT = 14
# digamma(x) = ln x - 1 / 2x - sum_n BERNOULLI[n] / (2n x^2n)
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)


class Prior:
    """The positions of the priors in an array."""

    ALPHA, MEAN, KAPPA, NU, PSI = range(5)


class Row:
    """Rows of a block of types. The gradients replace the results, and those of the moments replace the moments."""

    SUPPORT, MEAN, VARIANCE = 0, 1, 17
    LOG_WEIGHT, LOGIT, POSTERIOR_MEAN, PRECISION = 33, 34, 35, 51
    GRAD_LOG_SHARE = 67
    COUNT = 68


SUPPORT, MEAN, VARIANCE, LOG_WEIGHT, LOGIT = Row.SUPPORT, Row.MEAN, Row.VARIANCE, Row.LOG_WEIGHT, Row.LOGIT
ALPHA = Prior.ALPHA
POSTERIOR_MEAN, PRECISION, GRAD_LOG_SHARE, COUNT = Row.POSTERIOR_MEAN, Row.PRECISION, Row.GRAD_LOG_SHARE, Row.COUNT


class Sizes(NamedTuple):
    """Priors (their dtype is that of the call), the number of parent locations of all images, and of types."""

    priors: NDArray
    locations: int
    types: int
    lanes: int


def fit(
    support: Tensor, mean: Tensor, variance: Tensor, beta_a: Tensor, priors: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.mixture.vb.vb_fit`."""
    found, precision, log_weight, logit = map(contiguous_like, (mean, mean, support, support))
    _run(_fit_kernel, support, priors, found, precision, log_weight, logit, support, mean, variance, beta_a)
    return found, precision, log_weight, logit


def gradients(
    moments: tuple[Tensor, Tensor, Tensor], grads: tuple[Tensor, Tensor, Tensor, Tensor], priors: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.mixture.vb.vb_fit_gradients`."""
    support, mean, variance = map(contiguous_like, moments)
    _run(_gradients_kernel, support, priors, support, mean, variance, *moments, *grads)
    return support, mean, variance


def _run(function: Any, support: Tensor, priors: Sequence[float], *tensors: Tensor) -> None:
    images, places, types = support.shape
    given = np.array(priors, array(support[:0]).dtype)
    sizes = Sizes(given, images * places, types, VECTOR_BYTES // given.itemsize)
    tasks = min(TASKS, -(-sizes.locations // LOCATIONS))
    run(function, tasks, sizes, *map(array, tensors))


def _inverse_powers(x: Vector) -> tuple[Vector, Vector]:
    inverse = x.like(1.0) / x
    return inverse, inverse * inverse


def _digamma_of_large(x: Vector) -> Vector:
    """digamma(x) for x >= SHIFT."""
    inverse, square = _inverse_powers(x)
    y = x.like(BERNOULLI[-1] / (2 * len(BERNOULLI)))
    for n in range(len(BERNOULLI) - 1, 0, -1):
        y = fma(y, square, BERNOULLI[n - 1] / (2 * n))
    return log(x) - fma(y, square, inverse * 0.5)


def _trigamma_of_large(x: Vector) -> Vector:
    """The derivative of digamma: 1 / x + 1 / 2x^2 + sum_n BERNOULLI[n] / x^(2n + 1), for x >= SHIFT."""
    inverse, square = _inverse_powers(x)
    y = x.like(BERNOULLI[-1])
    for bernoulli in reversed(BERNOULLI[:-1]):
        y = fma(y, square, bernoulli)
    return fma(y, square * inverse, fma(square, 0.5, inverse))


def _digamma(x: Vector) -> Vector:
    """digamma(x) for x > 0: digamma(x + SHIFT) - sum_k 1 / (x + k)."""
    total = x.like(1.0) / x
    for k in range(1, SHIFT):
        total = total + x.like(1.0) / (x + float(k))
    return _digamma_of_large(x + float(SHIFT)) - total


def _trigamma(x: Vector) -> Vector:
    total = _inverse_powers(x)[1]
    for k in range(1, SHIFT):
        total = total + _inverse_powers(x + float(k))[1]
    return _trigamma_of_large(x + float(SHIFT)) + total


def _sum_of_digammas(nu: Vector) -> Vector:
    """sum_k digamma((nu - k) / 2) + 16 ln 2, k = 0, ..., 15.

    By digamma(x / 2) + digamma((x - 1) / 2) = 2 digamma(x - 1) - 2 ln 2, it is 2 sum_j digamma(least + 2 j), with
    least = nu - 15 and j = 0, ..., 7; and digamma(least + 2 j) = digamma(least + 14) - sum_(k = 2j, ..., 13) 1 / (least
    + k).
    """
    least = nu - float(ENTRIES - 1)
    total = _digamma_of_large(least + float(SHIFT)) * (ENTRIES // 2)
    for k in range(SHIFT):
        total = total - least.like(float(k // 2 + 1)) / (least + float(k))
    return total * 2.0


def _sum_of_trigammas(nu: Vector) -> Vector:
    """The derivative of `_sum_of_digammas`."""
    least = nu - float(ENTRIES - 1)
    total = _trigamma_of_large(least + float(SHIFT)) * (ENTRIES // 2)
    for k in range(SHIFT):
        total = fma(_inverse_powers(least + float(k))[1], float(k // 2 + 1), total)
    return total * 2.0


def _digamma_of_row(out: Rows, given: Rows) -> None:
    out[0] = _digamma(given[0])


def _trigamma_of_row(out: Rows, given: Rows) -> None:
    out[0] = _trigamma(given[0])


class _Posterior:
    """The posteriors of a block of types; see the formulas above."""

    def __init__(self, rows: Rows, digamma_of_sum: Rows, priors: Rows) -> None:
        self.support = rows[Row.SUPPORT]
        self.mean0, self.kappa0 = priors.broadcast(Prior.MEAN), priors.broadcast(Prior.KAPPA)
        self.alpha = self.support + priors.broadcast(Prior.ALPHA)
        self.kappa, self.nu = self.support + self.kappa0, self.support + priors.broadcast(Prior.NU)
        self.rho = self.support / self.kappa
        self.psi0, self.rows = priors.broadcast(Prior.PSI), rows
        log_psi = log(self.psi(0))
        for h in range(1, ENTRIES):
            log_psi = log_psi + log(self.psi(h))
        self.log_det = _sum_of_digammas(self.nu) - log_psi
        self.log_share = _digamma(self.alpha) - digamma_of_sum.broadcast(0)
        self.share = exp([self.log_share])[0]
        self.entropy = fma(self.log_det, -0.5, ENTRIES / 2 * (math.log(2 * math.pi) + 1))

    def apart(self, h: int) -> Vector:
        return self.rows[Row.MEAN + h] - self.mean0

    def psi(self, h: int) -> Vector:
        apart = self.apart(h)
        return fma(self.support, self.rows[Row.VARIANCE + h], fma(self.kappa0 * self.rho * apart, apart, self.psi0))


def _fit_rows(rows: Rows, digamma_of_sum: Rows, beta_a: Rows, priors: Rows) -> None:
    """The results of a block, from its moments."""
    x = _Posterior(rows, digamma_of_sum, priors)
    constant = fma(x.log_det, 0.5, -ENTRIES / 2 * math.log(2 * math.pi))
    rows[Row.LOG_WEIGHT] = x.log_share + constant - x.kappa.like(ENTRIES / 2) / x.kappa
    rows[Row.LOGIT] = beta_a[0] - x.share * x.entropy
    for h in range(ENTRIES):
        rows[Row.POSTERIOR_MEAN + h] = fma(x.rho, x.apart(h), x.mean0)
        rows[Row.PRECISION + h] = x.nu / x.psi(h)


def _gradient_rows(rows: Rows, digamma_of_sum: Rows, priors: Rows) -> None:
    """In place: the gradients of the moments, from those of the results. That of the support lacks the part through
    the sum of alpha over types, for which the gradient of log_share remains."""
    x = _Posterior(rows, digamma_of_sum, priors)
    grad_log_weight, grad_share = rows[Row.LOG_WEIGHT], -rows[Row.LOGIT] * x.share
    grad_log_share = fma(grad_share, x.entropy, grad_log_weight)
    grad_log_det = (grad_log_weight - grad_share) * 0.5
    grad_rho, grad_nu = x.rho * 0.0, grad_log_det * _sum_of_trigammas(x.nu)
    grad_support = fma(grad_log_share, _trigamma(x.alpha), grad_nu)
    for h in range(ENTRIES):
        apart, inverse = x.apart(h), x.nu.like(1.0) / x.psi(h)
        grad_mean, grad_precision = rows[Row.POSTERIOR_MEAN + h], rows[Row.PRECISION + h] * inverse
        grad_psi = -(fma(grad_precision, x.nu, grad_log_det) * inverse)
        grad_square = grad_psi * x.kappa0 * apart
        grad_rho = fma(grad_square + grad_mean, apart, grad_rho)
        grad_support = grad_support + fma(grad_psi, rows[Row.VARIANCE + h], grad_precision)
        rows[Row.MEAN + h] = x.rho * fma(grad_square, 2.0, grad_mean)
        rows[Row.VARIANCE + h] = grad_psi * x.support
    grad_kappa = fma(grad_log_weight, ENTRIES / 2, grad_rho * x.kappa0) / (x.kappa * x.kappa)
    rows[Row.SUPPORT] = grad_support + grad_kappa
    rows[Row.GRAD_LOG_SHARE] = grad_log_share


_digamma_of = microkernel(_digamma_of_row)
_trigamma_of = microkernel(_trigamma_of_row)
_fit = microkernel(_fit_rows)
_gradients = microkernel(_gradient_rows)


@part
def _sum_of_alpha(x, support, location, out):  # type: ignore[no-untyped-def]
    """All lanes of out = the sum of alpha over the types at a location."""
    total = x.types * x.priors[ALPHA]
    for c in range(x.types):
        total += support[location * x.types + c]
    out[:] = total


@part
def _load_moments(x, rows, support, mean, variance, location, c, count):  # type: ignore[no-untyped-def]
    copy_row(rows, SUPPORT * x.lanes, support, location * x.types + c, count, x.lanes)
    for h in range(16):
        given = (location * 16 + h) * x.types + c
        copy_row(rows, (MEAN + h) * x.lanes, mean, given, count, x.lanes)
        copy_row(rows, (VARIANCE + h) * x.lanes, variance, given, count, x.lanes)


@kernel
def _fit_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, x, out_mean, precision, log_weight, logit, support, mean, variance, beta_a
):
    """Results out_mean, precision [locations, 16, C], log_weight and logit [locations, C], from moments."""
    lanes, C, dtype = x.lanes, x.types, x.priors.dtype
    rows, of_location, beta = np.ones(COUNT * lanes, dtype), np.empty(lanes, dtype), np.ones(lanes, dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        for location in range(x.locations * task // tasks, x.locations * (task + 1) // tasks):
            _sum_of_alpha(x, support, location, of_location)
            _digamma_of(of_location, 0, of_location, 0)
            for c in range(0, C, lanes):
                count, found = min(lanes, C - c), location * C + c
                _load_moments(x, rows, support, mean, variance, location, c, count)
                copy_row(beta, 0, beta_a, c, count, lanes)
                _fit(rows, 0, of_location, 0, beta, 0, x.priors, 0)
                copy_row(log_weight, found, rows, LOG_WEIGHT * lanes, count, lanes)
                copy_row(logit, found, rows, LOGIT * lanes, count, lanes)
                for h in range(16):
                    found = (location * 16 + h) * C + c
                    copy_row(out_mean, found, rows, (POSTERIOR_MEAN + h) * lanes, count, lanes)
                    copy_row(precision, found, rows, (PRECISION + h) * lanes, count, lanes)
        task = next_task(counter, tasks)


@kernel
def _gradients_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, x, out_support, out_mean, out_variance, support, mean, variance,
    grad_mean, grad_precision, grad_log_weight, grad_logit,
):  # fmt: skip
    """Gradients of support [locations, C], mean and variance [locations, 16, C], from those of the results."""
    lanes, C, dtype = x.lanes, x.types, x.priors.dtype
    rows, of_location, alpha = np.ones(COUNT * lanes, dtype), np.empty(lanes, dtype), np.empty(lanes, dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        for location in range(x.locations * task // tasks, x.locations * (task + 1) // tasks):
            _sum_of_alpha(x, support, location, alpha)
            _digamma_of(of_location, 0, alpha, 0)
            grad_sum = 0 * x.priors[0]
            for c in range(0, C, lanes):
                count, given = min(lanes, C - c), location * C + c
                _load_moments(x, rows, support, mean, variance, location, c, count)
                copy_row(rows, LOG_WEIGHT * lanes, grad_log_weight, given, count, lanes)
                copy_row(rows, LOGIT * lanes, grad_logit, given, count, lanes)
                for h in range(16):
                    given = (location * 16 + h) * C + c
                    copy_row(rows, (POSTERIOR_MEAN + h) * lanes, grad_mean, given, count, lanes)
                    copy_row(rows, (PRECISION + h) * lanes, grad_precision, given, count, lanes)
                _gradients(rows, 0, of_location, 0, x.priors, 0)
                for lane in range(count):
                    grad_sum += rows[GRAD_LOG_SHARE * lanes + lane]
                copy_row(out_support, location * C + c, rows, SUPPORT * lanes, count, lanes)
                for h in range(16):
                    found = (location * 16 + h) * C + c
                    copy_row(out_mean, found, rows, (MEAN + h) * lanes, count, lanes)
                    copy_row(out_variance, found, rows, (VARIANCE + h) * lanes, count, lanes)
            _trigamma_of(of_location, 0, alpha, 0)
            for c in range(C):
                out_support[location * C + c] -= grad_sum * of_location[0]
        task = next_task(counter, tasks)
