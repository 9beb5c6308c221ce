"""Micro-kernels: what is computed for one vote vector, that is one child and a block of parent types.

A pose entry h = 4 x + q stands in row x and column q of the 4x4 matrix. Register pressure decides the order of
the loops: two rows of the vote at a time need eight accumulators, and every loaded weight is used twice.

Rows: `poses` are the child's 16 numbers (broadcast); `weight` and `deviations` have 16 rows, one per entry;
`parent` is a parent's block (`layout.Row`); `offset` holds 4 numbers; the others are one number or one row.
"""

from __future__ import annotations

from collections.abc import Iterator

from tritoncaps.kernels.cpu.layout import Moment, Row
from tritoncaps.kernels.cpu.simd import (
    Rows,
    Vector,
    across,
    add,
    exp,
    fma,
    maximum,
    microkernel,
    minimum,
    where,
)


def _deviations(poses: Rows, weight: Rows, offset: Rows, parent: Rows) -> Iterator[tuple[int, Vector]]:
    """Yield h and d_h = sum_k M_xk W_kq + offset_h - mean_h."""
    for x in (0, 2):
        weight.barrier()
        d = {}
        for i in (0, 1):
            for q in range(4):
                d[i, q] = parent[Row.MINUS_MEAN + 4 * (x + i) + q]
            d[i, 3] = d[i, 3] + offset.broadcast(x + i)
        for k in range(4):
            m = [poses.broadcast(4 * (x + i) + k) for i in (0, 1)]
            for q in range(4):
                w = weight[4 * k + q]
                for i in (0, 1):
                    d[i, q] = fma(m[i], w, d[i, q])
        for i in (0, 1):
            for q in range(4):
                yield 4 * (x + i) + q, d[i, q]


class _LogLikelihood:
    """l = constant - sum_h precision_h d_h^2, summed in two chains."""

    def __init__(self, parent: Rows) -> None:
        self.parent = parent
        self.sums: dict[int, Vector] = {}

    def add(self, h: int, d: Vector, precision: Vector | None = None) -> None:
        precision = self.parent[Row.PRECISION + h] if precision is None else precision
        chain = h % 2
        self.sums[chain] = fma(d * d, precision, self.sums[chain]) if chain in self.sums else d * d * precision

    def value(self) -> Vector:
        return self.parent[Row.CONSTANT] - (self.sums[0] + self.sums[1])


class _AssignmentGradient:
    """G = A + sum_h (B_h + C_h d_h) d_h."""

    def __init__(self, parent: Rows) -> None:
        self.parent = parent
        self.twice = parent[Row.OFFSET] * 2.0

    def add(self, d: Vector, linear: Vector, twice_square: Vector) -> None:
        slope = fma(twice_square, d, linear)  # B + 2 C d
        self.twice = fma(linear + slope, d, self.twice)

    def value(self) -> Vector:
        return self.twice * 0.5


def _assignment(log_likelihood: Vector, log_sum: Rows) -> Vector:
    """R = exp(l - log_sum)."""
    return exp(minimum(log_likelihood - log_sum.broadcast(0), 0.0))


@microkernel
def deviations(d: Rows, poses: Rows, weight: Rows, offset: Rows, parent: Rows) -> None:
    """d = V - mean."""
    for h, x in _deviations(poses, weight, offset, parent):
        d[h] = x


@microkernel
def weighted_vote(
    r: Rows,
    d: Rows,
    poses: Rows,
    weight: Rows,
    offset: Rows,
    parent: Rows,
    log_sum: Rows,
    activation: Rows,
) -> None:
    """d = V - mean and its weight r = R a."""
    log_likelihood = _LogLikelihood(parent)
    for h, x in _deviations(poses, weight, offset, parent):
        d[h] = x
        log_likelihood.add(h, x)
    r[0] = _assignment(log_likelihood.value(), log_sum) * activation.broadcast(0)


@microkernel
def gradient_weighted_vote(
    dl: Rows,
    d: Rows,
    poses: Rows,
    weight: Rows,
    offset: Rows,
    parent: Rows,
    log_sum: Rows,
    activation: Rows,
    da: Rows,
) -> None:
    """d = V - mean and its weight dl = R a (G - da)."""
    log_likelihood, G = _LogLikelihood(parent), _AssignmentGradient(parent)
    for h, x in _deviations(poses, weight, offset, parent):
        d[h] = x
        log_likelihood.add(h, x)
        G.add(x, parent[Row.LINEAR + h], parent[Row.TWICE_SQUARE + h])
    r = _assignment(log_likelihood.value(), log_sum) * activation.broadcast(0)
    dl[0] = r * (G.value() - da.broadcast(0))


def _add_moments(count: int, moments: Rows, d: Rows, r: Rows) -> None:
    weights = [r[j] for j in range(count)]
    total = moments[Moment.TOTAL]
    for weight in weights:
        total = total + weight
    moments[Moment.TOTAL] = total
    for h in range(16):
        first, second = moments[Moment.FIRST + h], moments[Moment.SECOND + h]
        for j, weight in enumerate(weights):
            x = d[16 * j + h]
            weighted = weight * x
            first = first + weighted
            second = fma(weighted, x, second)
        moments[Moment.FIRST + h] = first
        moments[Moment.SECOND + h] = second


@microkernel
def add_moments_1(moments: Rows, d: Rows, r: Rows) -> None:
    """moments += (r, r d, r d^2)."""
    _add_moments(1, moments, d, r)


@microkernel
def add_moments_4(moments: Rows, d: Rows, r: Rows) -> None:
    """The same for four children, which share the loads and stores of the moments."""
    _add_moments(4, moments, d, r)


@microkernel
def clear_moments(moments: Rows) -> None:
    for row in range(Moment.ROWS):
        moments[row] = 0.0


@microkernel
def move_moments(total: Rows, moments: Rows) -> None:
    """total += moments; moments = 0."""
    for row in range(Moment.ROWS):
        total[row] = total[row] + moments[row]
        moments[row] = 0.0


@microkernel
def add_log_likelihood(state: Rows, poses: Rows, weight: Rows, offset: Rows, parent: Rows) -> None:
    """state = (greatest l, sum of exp(l - greatest)): one exp for every vote."""
    log_likelihood = _LogLikelihood(parent)
    for h, x in _deviations(poses, weight, offset, parent):
        log_likelihood.add(h, x)
    new, greatest, total = log_likelihood.value(), state[0], state[1]
    state.barrier()  # without it, LLVM makes the stores below masked ones, which are slow
    rises = new > greatest
    e = exp(where(rises, greatest - new, new - greatest))
    state[1] = where(rises, fma(total, e, 1.0), total + e)
    state[0] = maximum(greatest, new)


@microkernel
def finish_log_sum(greatest: Rows, total: Rows, state: Rows) -> None:
    """Join the lanes: log_sum = greatest + log(total)."""
    highest = across(maximum, state[0])
    greatest.set_element(0, highest)
    total.set_element(0, across(add, state[1] * exp(state[0] - highest)))


@microkernel
def add_assignment_gradient(
    da: Rows, poses: Rows, weight: Rows, offset: Rows, parent: Rows, log_sum: Rows
) -> None:
    """da += R G."""
    log_likelihood, G = _LogLikelihood(parent), _AssignmentGradient(parent)
    for h, x in _deviations(poses, weight, offset, parent):
        log_likelihood.add(h, x)
        G.add(x, parent[Row.LINEAR + h], parent[Row.TWICE_SQUARE + h])
    da[0] = fma(_assignment(log_likelihood.value(), log_sum), G.value(), da[0])


@microkernel
def sum_lanes(number: Rows, row: Rows) -> None:
    number.set_element(0, across(add, row[0]))


@microkernel
def sum_lanes_16(numbers: Rows, rows: Rows) -> None:
    for i in range(16):
        numbers.set_element(i, across(add, rows[i]))


@microkernel
def clear_rows_16(rows: Rows) -> None:
    for h in range(16):
        rows[h] = 0.0


def _assign(
    count: int,
    r: Rows,
    g: Rows,
    da: Rows,
    d: Rows,
    parent: Rows,
    log_sum: Rows,
    slope: Rows,
    activation: Rows,
    variable: Rows,
) -> None:
    likelihoods = [_LogLikelihood(parent) for _ in range(count)]
    gradients = [_AssignmentGradient(parent) for _ in range(count)]
    for h in range(16):
        shift, precision = parent[Row.SHIFT + h], parent[Row.PRECISION + h]
        linear, twice_square = parent[Row.LINEAR + h], parent[Row.TWICE_SQUARE + h]
        for j in range(count):
            x = d[16 * j + h] + shift
            likelihoods[j].add(h, x, precision)
            gradients[j].add(x, linear, twice_square)
    for j in range(count):
        R, G = exp(minimum(likelihoods[j].value() - log_sum.broadcast(j), 0.0)), gradients[j].value()
        r[j] = R * activation.broadcast(j)
        g[j] = (G - slope.broadcast(j)) * variable.broadcast(0)
        da[j] = fma(R * G, variable.broadcast(1), da[j])


@microkernel
def assign_1(
    r: Rows,
    g: Rows,
    da: Rows,
    d: Rows,
    parent: Rows,
    log_sum: Rows,
    slope: Rows,
    activation: Rows,
    variable: Rows,
) -> None:
    """r = R a. Variable assignments (2, 0): g = 2 (G - slope). Constant ones (0, 1): g = 0, da += R G."""
    _assign(1, r, g, da, d, parent, log_sum, slope, activation, variable)


@microkernel
def assign_2(
    r: Rows,
    g: Rows,
    da: Rows,
    d: Rows,
    parent: Rows,
    log_sum: Rows,
    slope: Rows,
    activation: Rows,
    variable: Rows,
) -> None:
    """The same for two children, which share the loads of the parent."""
    _assign(2, r, g, da, d, parent, log_sum, slope, activation, variable)


def _add_vote_gradient(count: int, dv: Rows, d: Rows, r: Rows, g: Rows, parent: Rows) -> None:
    weights, slopes = [r[j] for j in range(count)], [-g[j] for j in range(count)]
    for h in range(16):
        shift, precision = parent[Row.SHIFT + h], parent[Row.PRECISION + h]
        linear, twice_square = parent[Row.LINEAR + h], parent[Row.TWICE_SQUARE + h]
        for j in range(count):
            x = d[16 * j + h] + shift
            gradient = fma(fma(slopes[j], precision, twice_square), x, linear)
            dv[16 * j + h] = fma(weights[j], gradient, dv[16 * j + h])


@microkernel
def add_vote_gradient_1(dv: Rows, d: Rows, r: Rows, g: Rows, parent: Rows) -> None:
    """dV += r (B + d (2 C - g precision)), with g of `assign_1`."""
    _add_vote_gradient(1, dv, d, r, g, parent)


@microkernel
def add_vote_gradient_2(dv: Rows, d: Rows, r: Rows, g: Rows, parent: Rows) -> None:
    """The same for two children."""
    _add_vote_gradient(2, dv, d, r, g, parent)


def _add_uniform_vote_gradient(
    count: int, dv: Rows, da: Rows, d: Rows, parent: Rows, share: Rows, activation: Rows
) -> None:
    weights = [share.broadcast(j) * activation.broadcast(j) for j in range(count)]
    twice = [parent[Row.OFFSET] * 2.0 for _ in range(count)]
    for h in range(16):
        shift, linear, twice_square = (
            parent[Row.SHIFT + h],
            parent[Row.LINEAR + h],
            parent[Row.TWICE_SQUARE + h],
        )
        for j in range(count):
            x = d[16 * j + h] + shift
            gradient = fma(twice_square, x, linear)
            dv[16 * j + h] = fma(weights[j], gradient, dv[16 * j + h])
            twice[j] = fma(linear + gradient, x, twice[j])
    for j in range(count):
        da[j] = fma(share.broadcast(j) * 0.5, twice[j], da[j])


@microkernel
def add_uniform_vote_gradient_1(
    dv: Rows, da: Rows, d: Rows, parent: Rows, share: Rows, activation: Rows
) -> None:
    """dV += r (B + 2 C d) and da += R G with R = share, r = R a."""
    _add_uniform_vote_gradient(1, dv, da, d, parent, share, activation)


@microkernel
def add_uniform_vote_gradient_2(
    dv: Rows, da: Rows, d: Rows, parent: Rows, share: Rows, activation: Rows
) -> None:
    """The same for two children."""
    _add_uniform_vote_gradient(2, dv, da, d, parent, share, activation)


@microkernel
def add_pose_gradient(dm: Rows, dv: Rows, weight: Rows) -> None:
    """dM_xk += sum_q dV_xq W_kq; dm has a row of partial sums for each entry."""
    for x in (0, 2):
        sums = {(i, k): dm[4 * (x + i) + k] for i in (0, 1) for k in range(4)}
        for q in range(4):
            gradients = [dv[4 * (x + i) + q] for i in (0, 1)]
            for k in range(4):
                w = weight[4 * k + q]
                for i in (0, 1):
                    sums[i, k] = fma(gradients[i], w, sums[i, k])
        for (i, k), value in sums.items():
            dm[4 * (x + i) + k] = value


@microkernel
def add_weight_gradient(dw: Rows, dv: Rows, poses: Rows) -> None:
    """dW_kq += sum_x M_xk dV_xq."""
    for k in (0, 2):
        sums = {(i, q): dw[4 * (k + i) + q] for i in (0, 1) for q in range(4)}
        for x in range(4):
            m = [poses.broadcast(4 * x + k + i) for i in (0, 1)]
            for q in range(4):
                gradient = dv[4 * x + q]
                for i in (0, 1):
                    sums[i, q] = fma(m[i], gradient, sums[i, q])
        for (i, q), value in sums.items():
            dw[4 * (k + i) + q] = value
