"""Micro-kernels: what is computed for one vote vector, that is for one child and a block of parent types.

A pose entry h = 4 x + q stands in row x and column q of the 4x4 matrix. Register pressure decides the order of
the loops: two rows of a vote at a time need eight accumulators, and every loaded weight is used twice.

Arguments: `poses` are the child's 16 numbers; `weight`, `d` and `dv` have 16 rows for each child, one per entry;
`parent` and `slopes` are the statistics and the slopes of a parent's block (`layout.Statistic`, `layout.Slope`);
`offset` holds 4 numbers; all others have one row or one number for each child. Micro-kernels whose names end in a
number serve so many children of consecutive types at once, which share the loads of what belongs to the parent and
hide each other's latencies.
"""

from __future__ import annotations

from collections.abc import Iterator

from tritoncaps.kernels.cpu.layout import Moment, Slope, Statistic
from tritoncaps.kernels.cpu.simd import (
    Rows,
    Vector,
    across,
    exp,
    fma,
    log,
    maximum,
    microkernel,
    minimum,
    reduce_each,
    sum_each,
    where,
)

FAR = 4.0  # standard deviations: the square is what a variance about a wrong centre loses in precision


def _deviations(poses: Rows, weight: Rows, offset: Rows, parent: Rows) -> Iterator[tuple[int, Vector]]:
    """Yield h and d_h = sum_k M_xk W_kq + offset_h - mean_h."""
    for x in (0, 2):
        weight.barrier()
        d = {}
        for i in (0, 1):
            for q in range(4):
                d[i, q] = parent[Statistic.MINUS_MEAN + 4 * (x + i) + q]
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


class _Quadratic:
    """sum_h precision_h d_h^2, row by row, because the rows' chains do not wait for each other.

    All micro-kernels add in this order. l must come out with the same bits wherever it is computed, or else
    exp(l - log_sum) would carry the rounding error of an l that may be large; and so must G, for G - da.
    """

    def __init__(self) -> None:
        self.sums: dict[int, Vector] = {}

    def add(self, h: int, d: Vector, precision: Vector) -> None:
        chain = h // 4
        self.sums[chain] = fma(d * d, precision, self.sums[chain]) if chain in self.sums else d * d * precision

    def value(self) -> Vector:
        return self.sums[0] + self.sums[1] + self.sums[2] + self.sums[3]


class _Polynomial:
    """2 sum_h (B_h + C_h e_h) e_h with e = d + shift, in the same order."""

    def __init__(self) -> None:
        self.sums: dict[int, Vector] = {}

    def add(self, h: int, d: Vector, shift: Vector, twice_linear: Vector, twice_square: Vector) -> None:
        deviation = d + shift
        chain, factor = h // 4, fma(twice_square, deviation, twice_linear)
        self.sums[chain] = fma(factor, deviation, self.sums[chain]) if chain in self.sums else factor * deviation

    def value(self) -> Vector:
        return self.sums[0] + self.sums[1] + self.sums[2] + self.sums[3]


def _deviations_kernel(d: Rows, poses: Rows, weight: Rows, offset: Rows, parent: Rows) -> None:
    """d = V - mean."""
    for h, x in _deviations(poses, weight, offset, parent):
        d[h] = x


def _likelihood(l: Rows, poses: Rows, weight: Rows, offset: Rows, parent: Rows) -> None:  # noqa: E741
    """l = constant - sum_h precision_h d_h^2."""
    quadratic = _Quadratic()
    for h, x in _deviations(poses, weight, offset, parent):
        quadratic.add(h, x, parent[Statistic.PRECISION + h])
    l[0] = parent[Statistic.CONSTANT] - quadratic.value()


def _likelihood_and_deviations(
    l: Rows,  # noqa: E741
    d: Rows,
    poses: Rows,
    weight: Rows,
    offset: Rows,
    parent: Rows,
) -> None:
    """l, and d = V - mean."""
    quadratic = _Quadratic()
    for h, x in _deviations(poses, weight, offset, parent):
        d[h] = x
        quadratic.add(h, x, parent[Statistic.PRECISION + h])
    l[0] = parent[Statistic.CONSTANT] - quadratic.value()


def _likelihood_and_gradient(
    l: Rows,  # noqa: E741
    G: Rows,
    poses: Rows,
    weight: Rows,
    offset: Rows,
    parent: Rows,
    slopes: Rows,
) -> None:
    """l, and G = A + sum_h (B_h + C_h e_h) e_h."""
    quadratic, polynomial = _Quadratic(), _Polynomial()
    for h, x in _deviations(poses, weight, offset, parent):
        quadratic.add(h, x, parent[Statistic.PRECISION + h])
        polynomial.add(h, x, slopes[Slope.SHIFT + h], slopes[Slope.TWICE_LINEAR + h], slopes[Slope.TWICE_SQUARE + h])
    l[0] = parent[Statistic.CONSTANT] - quadratic.value()
    G[0] = fma(polynomial.value(), 0.5, slopes[Slope.OFFSET])


def _likelihood_gradient_and_deviations(
    l: Rows,  # noqa: E741
    G: Rows,
    d: Rows,
    poses: Rows,
    weight: Rows,
    offset: Rows,
    parent: Rows,
    slopes: Rows,
) -> None:
    """l, G, and d = V - mean."""
    quadratic, polynomial = _Quadratic(), _Polynomial()
    for h, x in _deviations(poses, weight, offset, parent):
        d[h] = x
        quadratic.add(h, x, parent[Statistic.PRECISION + h])
        polynomial.add(h, x, slopes[Slope.SHIFT + h], slopes[Slope.TWICE_LINEAR + h], slopes[Slope.TWICE_SQUARE + h])
    l[0] = parent[Statistic.CONSTANT] - quadratic.value()
    G[0] = fma(polynomial.value(), 0.5, slopes[Slope.OFFSET])


def _assignments(count: int, l: Rows, log_sum: Rows) -> list[Vector]:  # noqa: E741
    """R = exp(l - log_sum)."""
    return exp([minimum(l[j] - log_sum.broadcast(j), 0.0) for j in range(count)])


def _weights(count: int, r: Rows, l: Rows, log_sum: Rows, activation: Rows) -> None:  # noqa: E741
    """r = R a."""
    for j, R in enumerate(_assignments(count, l, log_sum)):
        r[j] = R * activation.broadcast(j)


def _uniform_weights(count: int, r: Rows, share: Rows, activation: Rows) -> None:
    """r = share a; all children have the same share."""
    for j in range(count):
        r[j] = share.broadcast(0) * activation.broadcast(j)


def _gradient_weights(
    count: int,
    dl: Rows,
    l: Rows,  # noqa: E741
    G: Rows,
    log_sum: Rows,
    activation: Rows,
    da: Rows,
) -> None:
    """dl = R a (G - da)."""
    for j, R in enumerate(_assignments(count, l, log_sum)):
        dl[j] = R * activation.broadcast(j) * (G[j] - da.broadcast(j))


def _add_moments(count: int, moments: Rows, d: Rows, r: Rows) -> None:
    """moments += (sum r, sum r d, sum r d^2)."""
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


def _check_centre(excess: Rows, shift: Rows, moments: Rows) -> None:
    """shift = mean of d, with its sign changed; excess, a number, is positive where the variance has cancelled.

    That is where the mean is FAR standard deviations from the centre.
    """
    total = moments[Moment.TOTAL]
    scale = where(total > 0.0, total, 1.0)
    scale = scale.like(1.0) / scale
    worst = None
    for h in range(16):
        mean = moments[Moment.FIRST + h] * scale
        variance = fma(moments[Moment.SECOND + h], scale, -(mean * mean))
        over = fma(variance, -(FAR**2), mean * mean)
        worst = over if worst is None else maximum(worst, over)
        shift[h] = -mean
    assert worst is not None
    excess.set_element(0, across(maximum, worst))


def _add_shift(d: Rows, shift: Rows) -> None:
    for h in range(16):
        d[h] = d[h] + shift[h]


def _clear_moments(moments: Rows) -> None:
    for row in range(Moment.ROWS):
        moments[row] = 0.0


def _move_moments(total: Rows, moments: Rows) -> None:
    """total += moments; moments = 0."""
    for row in range(Moment.ROWS):
        total[row] = total[row] + moments[row]
        moments[row] = 0.0


def _add_exponentials(count: int, greatest: Rows, total: Rows, l: Rows) -> None:  # noqa: E741
    """Keep total = sum exp(l - greatest) while the greatest l grows: one exp for every vote."""
    new, old, sums = ([rows[j] for j in range(count)] for rows in (l, greatest, total))
    greatest.barrier()  # without it, LLVM makes the stores below masked ones, which are slow
    rises = [x > y for x, y in zip(new, old, strict=True)]
    es = exp([where(rise, y - x, x - y) for rise, x, y in zip(rises, new, old, strict=True)])
    for j, (rise, e) in enumerate(zip(rises, es, strict=True)):
        total[j] = where(rise, fma(sums[j], e, 1.0), sums[j] + e)
        greatest[j] = maximum(old[j], new[j])


def _join_exponentials(log_sum: Rows, greatest: Rows, total: Rows) -> None:
    """log_sum = greatest + log(total) of as many children as there are lanes; zero where nothing was added."""
    count = log_sum.form.lanes
    highest = reduce_each(maximum, [greatest[j] for j in range(count)], log_sum.form.lowest)
    log_sum[0] = highest
    log_sum.barrier()
    factors = exp([greatest[j] - log_sum.broadcast(j) for j in range(count)])
    joined = sum_each([total[j] * factor for j, factor in enumerate(factors)])
    log_sum[0] = where(joined > 0.0, highest + log(joined), 0.0)


def _add_assignment_gradient(count: int, da: Rows, l: Rows, G: Rows, log_sum: Rows) -> None:  # noqa: E741
    """da += R G."""
    for j, R in enumerate(_assignments(count, l, log_sum)):
        da[j] = fma(R, G[j], da[j])


def _sum_lanes(sums: Rows, rows: Rows) -> None:
    """Element j of `sums` is the sum of the lanes of row j, for as many rows as there are lanes."""
    sums[0] = sum_each([rows[j] for j in range(sums.form.lanes)])


def _sum_four(sums: Rows, rows: Rows) -> None:
    """The first four elements of `sums` are the sums of the lanes of four rows."""
    sums[0] = sum_each([rows[j] for j in range(4)])


def _clear(count: int, rows: Rows) -> None:
    for j in range(count):
        rows[j] = 0.0


def _add_likelihood_and_gradient(
    count: int, quadratic: Rows, polynomial: Rows, d: Rows, parent: Rows, slopes: Rows
) -> None:
    """Add a row of four entries to sum_h precision_h d_h^2 and 2 sum_h (B_h + C_h e_h) e_h."""
    quadratics, polynomials = [_Quadratic() for _ in range(count)], [_Polynomial() for _ in range(count)]
    for h in range(4):
        precision, shift = parent[Statistic.PRECISION + h], slopes[Slope.SHIFT + h]
        twice_linear, twice_square = slopes[Slope.TWICE_LINEAR + h], slopes[Slope.TWICE_SQUARE + h]
        for j in range(count):
            x = d[16 * j + h]
            quadratics[j].add(h, x, precision)
            polynomials[j].add(h, x, shift, twice_linear, twice_square)
    for j in range(count):
        quadratic[j] = quadratic[j] + quadratics[j].sums[0]
        polynomial[j] = polynomial[j] + polynomials[j].sums[0]


def _assign(
    count: int,
    r: Rows,
    g: Rows,
    da: Rows,
    quadratic: Rows,
    polynomial: Rows,
    parent: Rows,
    slopes: Rows,
    log_sum: Rows,
    mean_slope: Rows,
    activation: Rows,
    variable: Rows,
) -> None:
    """r = R a. Variable assignments (2, 0): g = 2 (G - mean_slope). Constant ones (0, 1): g = 0, da += R G."""
    likelihoods = [parent[Statistic.CONSTANT] - quadratic[j] for j in range(count)]
    exponents = [minimum(x - log_sum.broadcast(j), 0.0) for j, x in enumerate(likelihoods)]
    for j, R in enumerate(exp(exponents)):
        G = fma(polynomial[j], 0.5, slopes[Slope.OFFSET])
        r[j] = R * activation.broadcast(j)
        g[j] = (G - mean_slope.broadcast(j)) * variable.broadcast(0)
        da[j] = fma(R * G, variable.broadcast(1), da[j])


def _add_vote_gradient(count: int, dv: Rows, d: Rows, r: Rows, g: Rows, parent: Rows, slopes: Rows) -> None:
    """dV += r (B + 2 C e - g precision d) for a row of four entries, with g of `_assign`."""
    weights, factors = [r[j] for j in range(count)], [-g[j] for j in range(count)]
    for h in range(4):
        precision, shift = parent[Statistic.PRECISION + h], slopes[Slope.SHIFT + h]
        linear, twice_square = slopes[Slope.TWICE_LINEAR + h] * 0.5, slopes[Slope.TWICE_SQUARE + h]
        for j in range(count):
            x = d[16 * j + h]
            gradient = fma(twice_square, x + shift, linear)
            gradient = fma(factors[j] * precision, x, gradient)
            dv[16 * j + h] = fma(weights[j], gradient, dv[16 * j + h])


def _set_uniform_vote_gradient(
    count: int, dv: Rows, polynomial: Rows, d: Rows, slopes: Rows, share: Rows, activation: Rows
) -> None:
    """dV = r (B + 2 C e) for a row of four entries, with r = share a; their part of the polynomial."""
    weights = [share.broadcast(0) * activation.broadcast(j) for j in range(count)]
    polynomials = [polynomial[j] for j in range(count)]
    for h in range(4):
        shift, linear = slopes[Slope.SHIFT + h], slopes[Slope.TWICE_LINEAR + h] * 0.5
        twice_square = slopes[Slope.TWICE_SQUARE + h]
        for j in range(count):
            x = d[16 * j + h] + shift
            gradient = fma(twice_square, x, linear)
            dv[16 * j + h] = weights[j] * gradient
            polynomials[j] = fma(linear + gradient, x, polynomials[j])
    for j in range(count):
        polynomial[j] = polynomials[j]


def _add_uniform_assignment_gradient(count: int, da: Rows, polynomial: Rows, slopes: Rows, share: Rows) -> None:
    """da += R G with R = share."""
    for j in range(count):
        da[j] = fma(share.broadcast(0), fma(polynomial[j], 0.5, slopes[Slope.OFFSET]), da[j])


def _add_pose_gradient(dM: Rows, dv: Rows, weight: Rows) -> None:
    """dM_xk += sum over lanes of sum_q dV_xq W_kq; dM holds 16 numbers."""
    lanes = dM.form.lanes
    for x in (0, 2):
        sums: dict[tuple[int, int], Vector] = {}
        for q in range(4):
            gradients = [dv[4 * (x + i) + q] for i in (0, 1)]
            for k in range(4):
                w = weight[4 * k + q]
                for i in (0, 1):
                    sums[i, k] = fma(gradients[i], w, sums[i, k]) if q else gradients[i] * w
        entries = [sums[i, k] for i in (0, 1) for k in range(4)]
        for start in range(0, 8, lanes):
            row = (4 * x + start) // lanes
            dM[row] = dM[row] + sum_each(entries[start : start + lanes])


def _add_weight_gradient(dw: Rows, dv: Rows, poses: Rows) -> None:
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


deviations = microkernel(_deviations_kernel)
likelihood = microkernel(_likelihood)
likelihood_and_deviations = microkernel(_likelihood_and_deviations)
likelihood_and_gradient = microkernel(_likelihood_and_gradient)
likelihood_gradient_and_deviations = microkernel(_likelihood_gradient_and_deviations)

weights_1, weights_4 = microkernel(_weights, 1), microkernel(_weights, 4)
uniform_weights_1, uniform_weights_4 = microkernel(_uniform_weights, 1), microkernel(_uniform_weights, 4)
gradient_weights_1, gradient_weights_4 = microkernel(_gradient_weights, 1), microkernel(_gradient_weights, 4)
add_moments_1, add_moments_4 = microkernel(_add_moments, 1), microkernel(_add_moments, 4)
check_centre = microkernel(_check_centre)
add_shift = microkernel(_add_shift)
clear_moments = microkernel(_clear_moments)
move_moments = microkernel(_move_moments)

add_exponentials_1, add_exponentials_4 = microkernel(_add_exponentials, 1), microkernel(_add_exponentials, 4)
join_exponentials = microkernel(_join_exponentials)
add_assignment_gradient_1 = microkernel(_add_assignment_gradient, 1)
add_assignment_gradient_4 = microkernel(_add_assignment_gradient, 4)
sum_lanes, sum_four = microkernel(_sum_lanes), microkernel(_sum_four)
clear_1, clear_4, clear_16 = (microkernel(_clear, count) for count in (1, 4, 16))

add_likelihood_and_gradient_1 = microkernel(_add_likelihood_and_gradient, 1)
add_likelihood_and_gradient_4 = microkernel(_add_likelihood_and_gradient, 4)
assign_1, assign_4 = microkernel(_assign, 1), microkernel(_assign, 4)
add_vote_gradient_1, add_vote_gradient_4 = microkernel(_add_vote_gradient, 1), microkernel(_add_vote_gradient, 4)
set_uniform_vote_gradient_1 = microkernel(_set_uniform_vote_gradient, 1)
set_uniform_vote_gradient_4 = microkernel(_set_uniform_vote_gradient, 4)
add_uniform_assignment_gradient_1 = microkernel(_add_uniform_assignment_gradient, 1)
add_pose_gradient = microkernel(_add_pose_gradient)
add_weight_gradient = microkernel(_add_weight_gradient)
