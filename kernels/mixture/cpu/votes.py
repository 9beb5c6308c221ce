"""Micro-kernels for votes: computations for one child and a block of parent types.

Pose entry h = 4 x + q is row x and column q of the 4x4 matrix. The number of registers determines the order of the
loops: two rows of a vote at a time need eight accumulators, and use every loaded weight twice.

Arguments: `poses` are the 16 numbers of a child; `weight` and `dv` have 16 rows for each vote, one for each entry;
`parent` and `slopes` are the statistics and slopes of a block of a parent (`layout.Statistic`, `layout.Slope`);
`offset` has 4 numbers; all others have one row or one number for each vote. Micro-kernels with `edges` loop over
`count` edges of a parent; an edge has the indices of the child, the weight, the slot and the group (`layout.Edge`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch

from tritoncaps.kernels.common.cpu.loops import (
    Number,
    Numbers,
    at,
    flagged_microkernel,
    for_each,
    for_rows,
    looping_microkernel,
    number,
    repeat,
    zero,
)
from tritoncaps.kernels.common.cpu.simd import (
    Rows,
    Vector,
    across,
    exp,
    fma,
    maximum,
    microkernel,
    reduce_each,
    sum_each,
    where,
)
from tritoncaps.kernels.common.numerics import least_support
from tritoncaps.kernels.mixture.cpu.layout import Coefficient, Edge, Moment, Slope, Statistic
from tritoncaps.kernels.mixture.cpu.layout import Number as FitNumber

FAR = 4.0  # standard deviations from the centre; the variance loses a factor of its square in precision


# Votes and their log-likelihoods


def _tile(
    rows: tuple[int, ...], columns: tuple[int, ...], poses: Rows, weight: Rows, offset: Rows, centre: Rows
) -> dict[int, Vector]:
    """d_h = sum_k M_xk W_kq + offset_h - centre_h for the entries h of some rows x and columns q. The argument
    `centre` is minus the centre."""
    d = {4 * x + q: centre[4 * x + q] for x in rows for q in columns}
    if 3 in columns:
        for x in rows:
            d[4 * x + 3] = d[4 * x + 3] + offset.broadcast(x)
    for k in range(4):
        m = {x: poses.broadcast(4 * x + k) for x in rows}
        for q in columns:
            w = weight[4 * k + q]
            for x in rows:
                d[4 * x + q] = fma(m[x], w, d[4 * x + q])
    return d


def _deviations(poses: Rows, weight: Rows, offset: Rows, parent: Rows) -> Iterator[tuple[int, Vector]]:
    """Yield h and d_h of all entries, two rows at a time."""
    for x in (0, 2):
        weight.barrier()  # load the weights again for the next rows, instead of keeping them in registers
        yield from _tile((x, x + 1), (0, 1, 2, 3), poses, weight, offset, parent).items()


class _Quadratic:
    """sum_h precision_h d_h^2, with one independent chain of additions for each column.

    All micro-kernels add in this order. They must compute the same bits of l, because otherwise exp(l - greatest) would
    have the rounding error of l, which may be large.
    """

    def __init__(self) -> None:
        self.sums: dict[int, Vector] = {}

    def add(self, h: int, d: Vector, precision: Vector) -> None:
        chain = h % 4
        self.sums[chain] = fma(d * d, precision, self.sums[chain]) if chain in self.sums else d * d * precision

    def value(self) -> Vector:
        return self.sums[0] + self.sums[1] + self.sums[2] + self.sums[3]


class _Polynomial:
    """2 sum_h (linear_h + quadratic_h e_h) e_h with e = d + shift, in the same order."""

    def __init__(self) -> None:
        self.sums: dict[int, Vector] = {}

    def add(self, h: int, d: Vector, shift: Vector, twice_linear: Vector, twice_quadratic: Vector) -> None:
        deviation = d + shift
        chain, factor = h % 4, fma(twice_quadratic, deviation, twice_linear)
        self.sums[chain] = fma(factor, deviation, self.sums[chain]) if chain in self.sums else factor * deviation

    def value(self) -> Vector:
        return self.sums[0] + self.sums[1] + self.sums[2] + self.sums[3]


def _each_vote(
    edges: Numbers,
    count: Number,
    poses: Rows,
    weight: Rows,
    offset: Rows,
    body: Callable[[Number, Numbers, Rows, Rows, Rows], None],
) -> None:
    """body(i, edge, poses, weight, offset) for `count` edges of a parent."""

    def one(i: Number) -> None:
        edge = edges.at(i, Edge.NUMBERS)
        body(
            i,
            edge,
            at(poses, (edge[number(Edge.CHILD)], number(16))),
            at(weight, (edge[number(Edge.WEIGHT)], number(16 * weight.form.lanes))),
            at(offset, (edge[number(Edge.SLOT)], number(4))),
        )

    for_each(poses, count, one)


def _likelihoods(
    l: Rows,  # noqa: E741
    greatest: Rows,
    poses: Rows,
    weight: Rows,
    offset: Rows,
    parent: Rows,
    edges: Numbers,
    count: Number,
) -> None:
    """l = constant - sum_h precision_h d_h^2, and greatest = max(greatest, l) of each group."""

    def one(i: Number, edge: Numbers, poses: Rows, weight: Rows, offset: Rows) -> None:
        quadratic = _Quadratic()
        for h, x in _deviations(poses, weight, offset, parent):
            quadratic.add(h, x, parent[Statistic.PRECISION + h])
        found, of_group = parent[Statistic.CONSTANT] - quadratic.value(), at(greatest, edge[number(Edge.GROUP)])
        at(l, i)[0] = found
        so_far = of_group[0]
        greatest.barrier()  # without it, LLVM uses a masked store below, which is slow
        of_group[0] = maximum(so_far, found)

    _each_vote(edges, count, poses, weight, offset, one)


def _likelihoods_and_gradients(
    l: Rows,  # noqa: E741
    G: Rows,
    poses: Rows,
    weight: Rows,
    offset: Rows,
    parent: Rows,
    slopes: Rows,
    edges: Numbers,
    count: Number,
) -> None:
    """l, and G = offset + sum_h (linear_h + quadratic_h e_h) e_h."""

    def one(i: Number, edge: Numbers, poses: Rows, weight: Rows, offset: Rows) -> None:
        quadratic, polynomial = _Quadratic(), _Polynomial()
        for h, x in _deviations(poses, weight, offset, parent):
            quadratic.add(h, x, parent[Statistic.PRECISION + h])
            rows = (slopes[row + h] for row in (Slope.SHIFT, Slope.TWICE_LINEAR, Slope.TWICE_QUADRATIC))
            polynomial.add(h, x, *rows)
        at(l, i)[0] = parent[Statistic.CONSTANT] - quadratic.value()
        at(G, i)[0] = fma(polynomial.value(), 0.5, slopes[Slope.OFFSET])

    _each_vote(edges, count, poses, weight, offset, one)


# The softmax over the parents of a child: `count` rows of one edge, `step` apart; sums of lanes, for `lanes` groups at
# a time. `greatest`, `total`, `inverse` and `da` of a group are one number (in `total`, one for each lane). If only
# positions compete, they are numbers of the types, `count` consecutive rows: then `by_type` is 1, the last argument.


def _fill(row: Rows, x: Rows, y: Rows, count: Number, step: Number) -> None:
    """row = x y, the product of two numbers."""
    value = x.broadcast(0) * y.broadcast(0)
    for_each(row, count, lambda i: at(row, (i, step)).__setitem__(0, value))


def _following(rows: Rows, first: Number, count: int, step: Number) -> list[Rows]:
    start = at(rows, (first, step))
    return [at(start, (number(j), step)) for j in range(count)]


def _of_group(by_type: int, x: Rows) -> Callable[[Number, int], list[Vector]]:
    """A function (first, count) that returns the numbers of a group for some rows, as vectors."""
    if by_type:
        return lambda first, count: [row[0] for row in _following(x, first, count, number(x.form.lanes))]
    of_all = x.broadcast(0)
    return lambda first, count: [of_all] * count


def _exp(exponents: list[Vector]) -> list[Vector]:
    """exp(x), or zero where its products may be subnormal: instructions are many times slower with such numbers."""
    least = least_support(torch.float32 if exponents[0].form.bits == 32 else torch.float64)
    return exp(exponents, zero_until=math.log(least))


def _exponentials(by_type: int, l: Rows, total: Rows, greatest: Rows, count: Number, step: Number) -> None:  # noqa: E741
    """In place: e = exp(l - greatest) replaces l; total += e."""
    highest = _of_group(by_type, greatest)

    def some(first: Number, together: int) -> None:
        rows = _following(l, first, together, step)
        exponents = [row[0] - top for row, top in zip(rows, highest(first, together), strict=True)]
        sums = _following(total, first, together, number(total.form.lanes)) if by_type else [total]
        added = [x[0] for x in sums]
        for i, (row, e) in enumerate(zip(rows, _exp(exponents), strict=True)):
            row[0] = e
            added[i % len(added)] = added[i % len(added)] + e
        for x, value in zip(sums, added, strict=True):
            x[0] = value

    for_rows(l, count, some)


def _assignments(
    by_type: int,
    l: Rows,  # noqa: E741
    greatest: Rows,
    inverse: Rows,
    count: Number,
    step: Number,
) -> None:
    """In place: R = exp(l - greatest) inverse replaces l."""
    highest, scales = _of_group(by_type, greatest), _of_group(by_type, inverse)

    def some(first: Number, together: int) -> None:
        rows = _following(l, first, together, step)
        exponents = [row[0] - top for row, top in zip(rows, highest(first, together), strict=True)]
        for row, e, scale in zip(rows, _exp(exponents), scales(first, together), strict=True):
            row[0] = e * scale

    for_rows(l, count, some)


def _add_products(by_type: int, total: Rows, R: Rows, G: Rows, count: Number, step: Number) -> None:
    """total += R G."""

    def each(i: Number) -> None:
        of_type = at(total, i)
        of_type[0] = fma(at(R, (i, step))[0], at(G, (i, step))[0], of_type[0])

    if by_type:
        for_each(R, count, each)
        return
    (total[0],) = repeat(count, [total[0]], lambda i, sums: [fma(at(R, (i, step))[0], at(G, (i, step))[0], sums[0])])


def _scale(by_type: int, row: Rows, inverse: Rows, activation: Rows, count: Number, step: Number) -> None:
    """In place: row *= inverse a."""
    a = activation.broadcast(0)
    of_all = None if by_type else inverse.broadcast(0) * a

    def each(i: Number) -> None:
        out = at(row, (i, step))
        out[0] = out[0] * (at(inverse, i)[0] * a if of_all is None else of_all)

    for_each(row, count, each)


def _gradient_weights(by_type: int, R: Rows, G: Rows, activation: Rows, da: Rows, count: Number, step: Number) -> None:
    """In place: r = R a replaces R, and dl = r (G - da) replaces G."""
    a, of_group = activation.broadcast(0), _of_group(by_type, da)

    def each(i: Number) -> None:
        of_r, of_G = at(R, (i, step)), at(G, (i, step))
        r, of_G_before = of_r[0] * a, of_G[0]
        of_r[0] = r
        of_G[0] = r * (of_G_before - of_group(i, 1)[0])

    for_each(R, count, each)


def _first_weights(r: Rows, R: Rows, activation: Rows, count: Number, step: Number) -> None:
    """r = R a."""
    a = activation.broadcast(0)
    for_each(R, count, lambda i: at(r, (i, step)).__setitem__(0, at(R, (i, step))[0] * a))


def _greatest_of_lanes(out: Rows, rows: Rows) -> None:
    """Element j of `out` is the greatest lane of row j, for `lanes` rows."""
    out[0] = reduce_each(maximum, [rows[j] for j in range(out.form.lanes)], out.form.lowest)


def _sum_of_lanes(out: Rows, rows: Rows) -> None:
    """Element j of `out` is the sum of the lanes of row j, for `lanes` rows."""
    out[0] = sum_each([rows[j] for j in range(out.form.lanes)])


def _inverse(x: Rows) -> None:
    """In place: 1 / x; zero stays zero."""
    x[0] = where(x[0] > 0.0, x[0].like(1.0) / x[0], x[0])


# Moments of the votes for a parent


def _add_moments(
    moments: Rows,
    poses: Rows,
    weight: Rows,
    offset: Rows,
    centre: Rows,
    r: Rows,
    edges: Numbers,
    count: Number,
) -> None:
    """moments += (sum r, sum r d, sum r d^2) over `count` edges of a parent.

    Four entries at a time: their eight sums stay in registers, together with d of the current vote.
    """
    (total,) = repeat(count, [zero(r)], lambda i, sums: [sums[0] + at(r, i)[0]])
    moments[Moment.TOTAL] = moments[Moment.TOTAL] + total
    for x in (0, 2):
        for q in (0, 2):
            entries = [4 * x + q, 4 * x + q + 1, 4 * x + q + 4, 4 * x + q + 5]

            def add(i: Number, sums: list[Vector], x: int = x, q: int = q) -> list[Vector]:
                edge = edges.at(i, Edge.NUMBERS)
                weight.barrier()  # without it, LLVM would keep the centre in registers, and spill others
                d = _tile(
                    (x, x + 1),
                    (q, q + 1),
                    at(poses, (edge[number(Edge.CHILD)], number(16))),
                    at(weight, (edge[number(Edge.WEIGHT)], number(16 * weight.form.lanes))),
                    at(offset, (edge[number(Edge.SLOT)], number(4))),
                    centre,
                )
                factor = at(r, i)[0]
                weighted = [factor * deviation for deviation in d.values()]
                first = [old + new for old, new in zip(sums[:4], weighted, strict=True)]
                squares = zip(weighted, d.values(), sums[4:], strict=True)
                return first + [fma(new, deviation, old) for new, deviation, old in squares]

            sums = repeat(count, [zero(r)] * 8, add)
            for j, h in enumerate(sorted(entries)):
                moments[Moment.FIRST + h] = moments[Moment.FIRST + h] + sums[j]
                moments[Moment.SECOND + h] = moments[Moment.SECOND + h] + sums[4 + j]


def _check_centre(excess: Rows, moments: Rows, numbers: Rows) -> None:
    """excess, a number, is positive if a variance has lost precision: if a mean is more than FAR standard deviations
    from the centre. The standard deviation has a lower limit, from variance_floor and scatter_floor."""
    total = moments[Moment.TOTAL]
    scale = where(total > 0.0, total, 1.0)
    scale = scale.like(1.0) / scale
    least = numbers.broadcast(FitNumber.SCATTER_FLOOR) * scale
    floor = numbers.broadcast(FitNumber.VARIANCE_FLOOR)
    worst = None
    for h in range(16):
        mean = moments[Moment.FIRST + h] * scale
        variance = fma(moments[Moment.SECOND + h], scale, -(mean * mean))
        over = fma(maximum(variance, floor) + least, -(FAR**2), mean * mean)
        worst = over if worst is None else maximum(worst, over)
    assert worst is not None
    excess.set_element(0, across(maximum, worst))


def _clear_moments(moments: Rows) -> None:
    for row in range(Moment.ROWS):
        moments[row] = 0.0


def _sum_moments(total: Rows, moments: Rows) -> None:
    """total += moments."""
    for row in range(Moment.ROWS):
        total[row] = total[row] + moments[row]


# The gradients of the votes for a parent, and of poses and weight


def _first_coefficients(coefficients: Rows, slopes: Rows) -> None:
    """`linear` and `2 quadratic` of every entry, and the offset."""
    for h in range(16):
        coefficients[2 * h] = slopes[Slope.TWICE_LINEAR + h] * 0.5
        coefficients[2 * h + 1] = slopes[Slope.TWICE_QUADRATIC + h]
    coefficients[Coefficient.OFFSET] = slopes[Slope.OFFSET]


def _later_coefficients(coefficients: Rows, before: Rows, minus_origin: Rows, slopes: Rows) -> None:
    """dV = factor d + constant with d = V - origin: the coefficients of r and dl in both, for every entry."""
    for h in range(16):
        origin = minus_origin[h]
        shift = slopes[Slope.MINUS_CENTRE + h] - origin
        shift_before = before[Statistic.MINUS_MEAN + h] - origin
        twice_quadratic, steepness = slopes[Slope.TWICE_QUADRATIC + h], before[Statistic.PRECISION + h] * -2.0
        coefficients[4 * h] = twice_quadratic
        coefficients[4 * h + 1] = fma(twice_quadratic, shift, slopes[Slope.TWICE_LINEAR + h] * 0.5)
        coefficients[4 * h + 2] = steepness
        coefficients[4 * h + 3] = steepness * shift_before


def _vote_gradients(
    later: int,
    dv: Rows,
    total: Rows,
    poses: Rows,
    weight: Rows,
    offset: Rows,
    parent: Rows,
    coefficients: Rows,
    first_rows: Rows,
    rows_1: Rows,
    rows_2: Rows,
    edges: Numbers,
    count: Number,
    rows_step: Number,
) -> None:
    """dV = r (linear + 2 quadratic e) of the first iteration, plus r (linear + 2 quadratic e) - 2 dl precision d of
    `later` others; total of the child of each edge += R G of the first iteration.

    `parent` is minus the centre of the first iteration, the origin of all polynomials. first_rows: r and R of the
    first iteration, rows_1 and rows_2: r and dl of the two others, `rows_step` apart.
    """

    def one(i: Number, edge: Numbers, poses: Rows, weight: Rows, offset: Rows) -> None:
        first, out = at(first_rows, i), at(dv, (i, number(16 * dv.form.lanes)))
        others, polynomial = [at(rows, i) for rows in (rows_1, rows_2)[:later]], None
        for x, q in itertools.product((0, 2), (0, 2)):
            weight.barrier()
            d = _tile((x, x + 1), (q, q + 1), poses, weight, offset, parent)
            r, weights = first[0], [at(rows, (number(j), rows_step))[0] for rows in others for j in (0, 1)]
            for h, deviation in d.items():
                linear = coefficients[2 * h]
                gradient = fma(coefficients[2 * h + 1], deviation, linear)
                twice = linear + gradient
                polynomial = twice * deviation if polynomial is None else fma(twice, deviation, polynomial)
                factor, constant = None, r * gradient
                for j, w in enumerate(weights):
                    row = Coefficient.LATER + Coefficient.ROWS_OF_LATER * (j // 2) + 4 * h + 2 * (j % 2)
                    factor = w * coefficients[row] if factor is None else fma(w, coefficients[row], factor)
                    constant = fma(w, coefficients[row + 1], constant)
                out[h] = constant if factor is None else fma(factor, deviation, constant)
        assert polynomial is not None
        G = fma(polynomial, 0.5, coefficients[Coefficient.OFFSET])
        of_child = at(total, edge[number(Edge.CHILD)])
        of_child[0] = fma(at(first, (number(1), rows_step))[0], G, of_child[0])

    _each_vote(edges, count, poses, weight, offset, one)


def _add_later_gradients(
    dv: Rows,
    poses: Rows,
    weight: Rows,
    offset: Rows,
    parent: Rows,
    coefficients: Rows,
    rows: Rows,
    edges: Numbers,
    count: Number,
    rows_step: Number,
) -> None:
    """dV += r (linear + 2 quadratic e) - 2 dl precision d of one more iteration, whose r and dl are in `rows`."""

    def one(i: Number, edge: Numbers, poses: Rows, weight: Rows, offset: Rows) -> None:
        here, out = at(rows, i), at(dv, (i, number(16 * dv.form.lanes)))
        r, dl = here[0], at(here, (number(1), rows_step))[0]
        for h, deviation in _deviations(poses, weight, offset, parent):
            factor = fma(dl, coefficients[4 * h + 2], r * coefficients[4 * h])
            constant = fma(dl, coefficients[4 * h + 3], fma(r, coefficients[4 * h + 1], out[h]))
            out[h] = fma(factor, deviation, constant)

    _each_vote(edges, count, poses, weight, offset, one)


def _add_pose_gradients(dm: Rows, dv: Rows, weight: Rows, edges: Numbers, count: Number) -> None:
    """dm_xk += sum_q dV_xq W_kq, separately in each lane."""

    def one(i: Number) -> None:
        vote = (i, number(16 * dv.form.lanes))
        gradients, out = at(dv, vote), at(dm, vote)
        w = at(weight, (edges.at(i, Edge.NUMBERS)[number(Edge.WEIGHT)], number(16 * dv.form.lanes)))
        for x in (0, 2):
            w.barrier()
            sums = {(y, k): out[4 * y + k] for y in (x, x + 1) for k in range(4)}
            for q in range(4):
                of_rows = {y: gradients[4 * y + q] for y in (x, x + 1)}
                for k in range(4):
                    factor = w[4 * k + q]
                    for y in (x, x + 1):
                        sums[y, k] = fma(of_rows[y], factor, sums[y, k])
            for (y, k), value in sums.items():
                out[4 * y + k] = value

    for_each(dv, count, one)


def _join_pose_gradients(dM: Rows, dm: Rows, edges: Numbers, count: Number) -> None:
    """dM, 16 numbers for each child, += the sums over the lanes of dm; then dm = 0."""
    lanes = dM.form.lanes

    def one(i: Number) -> None:
        child = at(dM, (edges.at(i, Edge.NUMBERS)[number(Edge.CHILD)], number(16)))
        rows = at(dm, (i, number(16 * lanes)))
        for row in range(16 // lanes):
            entries = range(row * lanes, (row + 1) * lanes)
            child[row] = child[row] + sum_each([rows[h] for h in entries])
            for h in entries:
                rows[h] = 0.0

    for_each(dm, count, one)


def _add_weight_gradients(dw: Rows, dv: Rows, poses: Rows, edges: Numbers, count: Number) -> None:
    """dW_kq += sum_x M_xk dV_xq."""

    def one(i: Number) -> None:
        vote, edge = number(16 * dv.form.lanes), edges.at(i, Edge.NUMBERS)
        gradients, out = at(dv, (i, vote)), at(dw, (edge[number(Edge.WEIGHT)], vote))
        child = at(poses, (edge[number(Edge.CHILD)], number(16)))
        for k in (0, 2):
            dv.barrier()
            sums = {(j, q): out[4 * j + q] for j in (k, k + 1) for q in range(4)}
            for x in range(4):
                m = {j: child.broadcast(4 * x + j) for j in (k, k + 1)}
                for q in range(4):
                    gradient = gradients[4 * x + q]
                    for j in (k, k + 1):
                        sums[j, q] = fma(m[j], gradient, sums[j, q])
            for (j, q), value in sums.items():
                out[4 * j + q] = value

    for_each(dv, count, one)


likelihoods = looping_microkernel(_likelihoods)
likelihoods_and_gradients = looping_microkernel(_likelihoods_and_gradients)

fill, first_weights = map(looping_microkernel, (_fill, _first_weights))
exponentials, assignments, scale, add_products, gradient_weights = map(
    flagged_microkernel, (_exponentials, _assignments, _scale, _add_products, _gradient_weights)
)
greatest_of_lanes, sum_of_lanes, inverse = map(microkernel, (_greatest_of_lanes, _sum_of_lanes, _inverse))

add_moments = looping_microkernel(_add_moments)
check_centre = microkernel(_check_centre)
clear_moments, sum_moments = microkernel(_clear_moments), microkernel(_sum_moments)

first_coefficients, later_coefficients = microkernel(_first_coefficients), microkernel(_later_coefficients)
vote_gradients_0, vote_gradients_1, vote_gradients_2 = (
    looping_microkernel(_vote_gradients, later) for later in range(3)
)
add_later_gradients = looping_microkernel(_add_later_gradients)
add_pose_gradients, join_pose_gradients = map(looping_microkernel, (_add_pose_gradients, _join_pose_gradients))
add_weight_gradients = looping_microkernel(_add_weight_gradients)
