"""Micro-kernels for parents: the M-step from the moments of the votes, and its gradients, for a block of parent types.

They read and write the rows of a parent (`layout.Statistic`, `layout.Slope`, `layout.Moment`). docs/backward.md derives
the formulas.
"""

from __future__ import annotations

import math

from llvmlite import ir

from tritoncaps.kernels.common.cpu.simd import Rows, Vector, exp, fma, log, maximum, microkernel, minimum, where
from tritoncaps.kernels.mixture.cpu.layout import Beta, Moment, Number, Slope, Statistic

ENTRIES = 16


def _fit(statistics: Rows, moments: Rows, minus_centre: Rows, betas: Rows, numbers: Rows) -> None:
    """Mean, variance, logit and the component of the likelihood, from the moments of d = V - centre."""
    support, floor = moments[Moment.TOTAL], numbers.broadcast(Number.VARIANCE_FLOOR)
    exists = betas[Beta.EXISTS] > 0.0
    alone, scale = inverse_support(support, numbers)
    log_variance = None
    for h in range(ENTRIES):
        shift = moments[Moment.FIRST + h] * scale
        variance = maximum(fma(moments[Moment.SECOND + h], scale, -(shift * shift)), floor)
        # a parent without support has mean zero, not its centre; nan stays nan
        mean = where(alone, shift * 0.0, minus_centre[h] - shift)
        statistics[Statistic.MINUS_MEAN + h] = where(exists, mean, 0.0)
        statistics[Statistic.PRECISION + h] = where(exists, variance.like(0.5) / variance, 1.0)
        log_variance = log(variance) if log_variance is None else log_variance + log(variance)
    assert log_variance is not None
    cost = _cost_of_datum(log_variance, betas) * support / numbers.broadcast(Number.MEAN_DATA)
    logit = (betas[Beta.A] - cost) * numbers.broadcast(Number.INVERSE_TEMPERATURE)
    constant = _log_sigmoid(logit) - (log_variance + ENTRIES * math.log(2 * math.pi)) * 0.5
    # finite, so that a difference of two is not nan, and so low that exp is zero
    statistics[Statistic.CONSTANT] = where(exists, constant, constant.form.lowest)
    statistics[Statistic.LOGIT] = logit
    statistics[Statistic.SUPPORT] = support
    statistics[Statistic.LOG_VARIANCE] = log_variance


def _collect(statistics: Rows, moments: Rows, minus_centre: Rows, numbers: Rows) -> None:
    """Support, mean and variance from the moments of d = V - centre; the variance is in the rows of the precision."""
    alone, scale = inverse_support(moments[Moment.TOTAL], numbers)
    for h in range(ENTRIES):
        shift = moments[Moment.FIRST + h] * scale
        variance = fma(moments[Moment.SECOND + h], scale, -(shift * shift))
        zero = shift * 0.0  # or nan
        variance = where(zero > variance, zero, variance)  # rounding errors may make it negative; nan stays nan
        statistics[Statistic.MINUS_MEAN + h] = where(alone, zero, minus_centre[h] - shift)
        statistics[Statistic.VARIANCE + h] = where(alone, zero, variance)
    statistics[Statistic.SUPPORT] = moments[Moment.TOTAL]


def _fit_backward(slopes: Rows, gradients: Rows, statistics: Rows, before: Rows, betas: Rows, numbers: Rows) -> None:
    """The slopes of an M-step from the gradients of its logit, mean and variance."""
    scale = inverse_support(statistics[Statistic.SUPPORT], numbers)[1]
    inverse_temperature = numbers.broadcast(Number.INVERSE_TEMPERATURE)
    grad_beta_a = gradients[Moment.TOTAL] * inverse_temperature
    grad_cost = -grad_beta_a / numbers.broadcast(Number.MEAN_DATA)
    weighted = grad_cost * statistics[Statistic.SUPPORT]
    floor = numbers.broadcast(Number.VARIANCE_FLOOR)
    limit = floor.like(0.5) / floor  # the precision of a variance at the floor
    offset = grad_cost * _cost_of_datum(statistics[Statistic.LOG_VARIANCE], betas)
    for h in range(ENTRIES):
        precision = statistics[Statistic.PRECISION + h]
        grad_variance = fma(weighted, precision, gradients[Moment.SECOND + h])
        square = where(limit > precision, grad_variance * scale, 0.0)
        offset = offset - square * (precision.like(0.5) / precision)
        slopes[Slope.TWICE_LINEAR + h] = gradients[Moment.FIRST + h] * scale * 2.0
        slopes[Slope.TWICE_QUADRATIC + h] = square * 2.0
        slopes[Slope.SHIFT + h] = statistics[Statistic.MINUS_MEAN + h] - before[Statistic.MINUS_MEAN + h]
        slopes[Slope.MINUS_CENTRE + h] = statistics[Statistic.MINUS_MEAN + h]
    slopes[Slope.OFFSET] = offset
    slopes[Slope.BETA_U] = weighted * ENTRIES
    slopes[Slope.BETA_A] = grad_beta_a


def _likelihood_backward(moments: Rows, statistics: Rows) -> None:
    """In place: the gradients of logit, mean and variance replace the moments of dl."""
    total = moments[Moment.TOTAL]
    for h in range(ENTRIES):
        precision = statistics[Statistic.PRECISION + h]
        inverse = precision * 2.0
        moments[Moment.FIRST + h] = moments[Moment.FIRST + h] * inverse
        moments[Moment.SECOND + h] = precision * fma(moments[Moment.SECOND + h], inverse, -total)
    moments[Moment.TOTAL] = total * _sigmoid(-statistics[Statistic.LOGIT])


def _activation(activation: Rows, statistics: Rows) -> None:
    """a = sigmoid(logit)."""
    activation[0] = _sigmoid(statistics[Statistic.LOGIT])


def _activation_backward(gradients: Rows, statistics: Rows) -> None:
    """In place: the gradient of the logit replaces the gradient of the activation."""
    logit = statistics[Statistic.LOGIT]
    gradients[Moment.TOTAL] = gradients[Moment.TOTAL] * _sigmoid(logit) * _sigmoid(-logit)


def _cost_of_datum(log_variance: Vector, betas: Rows) -> Vector:
    """sum_h (beta_u + 1/2 log variance_h)."""
    return fma(log_variance, 0.5, betas[Beta.U] * ENTRIES)


def inverse_support(support: Vector, numbers: Rows) -> tuple[ir.Value, Vector]:
    """Whether a parent has no support S (false for nan), and 1 / S, or 1 for a parent without support."""
    alone = support.not_above(numbers.broadcast(Number.LEAST_SUPPORT))
    return alone, support.like(1.0) / where(alone, support.like(1.0), support)


def _sigmoid(x: Vector) -> Vector:
    e = exp([minimum(x, -x)])[0]
    return where(x.like(0.0) > x, e, 1.0) / (e + 1.0)


def _log_sigmoid(x: Vector) -> Vector:
    e = exp([minimum(x, -x)])[0]
    return minimum(x, 0.0) - log(e + 1.0)


fit = microkernel(_fit)
collect = microkernel(_collect)
fit_backward = microkernel(_fit_backward)
likelihood_backward = microkernel(_likelihood_backward)
activation = microkernel(_activation)
activation_backward = microkernel(_activation_backward)
