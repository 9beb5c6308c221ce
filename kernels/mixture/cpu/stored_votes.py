"""Micro-kernels for stored votes: computations for the votes [C, H] of one child at one edge, for all parent types.

The lanes of a vector are the entries of a vote; H is any number. Arrays of a parent are [C, H] or [C]. Only pose votes
are always 4x4 matrices: a vector contains one or two rows, for any processor.
"""

from __future__ import annotations

from collections.abc import Callable

from tritoncaps.kernels.common.cpu.loops import Number, at, for_each, looping_microkernel, number, over, repeat, zero
from tritoncaps.kernels.common.cpu.simd import Rows, Vector, across, add, exp, fma, log, maximum

SIDE, ENTRIES = 4, 16  # of a pose matrix
MATRIX_BYTES = 32  # of a vector of pose votes: one row of float64, or two rows of float32

Here = Callable[[Rows], Rows]  # maps an array to the part for one call of the body of `over`


def _for_votes(rows: Rows, types: Number, entries: Number, of_type: Callable[[Number, Number], None]) -> None:
    """of_type(c, entries) for each type. The code exists twice: for 16 entries with unrolled loops, and for any number
    of entries."""
    matrices = rows.builder.icmp_signed("==", entries, number(ENTRIES))
    with rows.builder.if_else(matrices) as (then, otherwise):
        with then:
            for_each(rows, types, lambda c: of_type(c, number(ENTRIES)))
        with otherwise:
            for_each(rows, types, lambda c: of_type(c, entries))


def _element(x: Rows, c: Number) -> Rows:
    """The element of type c in an array [C]."""
    return at(x, (c, number(1)))


def _weight(assignments: Rows, activation: Rows, scale: Rows, c: Number) -> Vector:
    """R a scale of type c, in all lanes."""
    R, factor = _element(assignments, c).broadcast(0), _element(scale, c).broadcast(0)
    return R * activation.broadcast(0) * factor


def _pose_votes(votes: Rows, pose: Rows, weight: Rows, types: Number) -> None:
    """V = M W."""
    factors = _entries_of(pose)

    def of_type(c: Number) -> None:
        out, rows = at(votes, (c, number(ENTRIES))), _rows_of(at(weight, (c, number(ENTRIES))))
        for i, factor in enumerate(factors):
            total = factor[0] * rows[0]
            for k in range(1, SIDE):
                total = fma(factor[k], rows[k], total)
            out[i] = total

    for_each(votes, types, of_type)


def _pose_votes_gradient(dM: Rows, dW: Rows, dV: Rows, pose: Rows, weight: Rows, types: Number) -> None:
    """dM += sum over types of dV W^T, and dW += M^T dV."""
    factors, vectors = _entries_of(pose), range(_vectors(pose))

    def of_type(c: Number, sums: list[Vector]) -> list[Vector]:
        given, out = at(dV, (c, number(ENTRIES))), at(dW, (c, number(ENTRIES)))
        rows, grads = _rows_of(at(weight, (c, number(ENTRIES)))), [given[i] for i in vectors]
        products = []
        for k in range(SIDE):
            total = factors[0][k] * grads[0]
            for i in vectors[1:]:
                total = fma(factors[i][k], grads[i], total)
            products.append(total)
        for i, part in enumerate(_folded(products)):
            out[i] = out[i] + part
        return [fma(grads[x // SIDE], rows[x % SIDE], total) for x, total in enumerate(sums)]

    # products of each row of dV with each row of W, not yet summed over the columns
    sums = repeat(types, [zero(dM)] * (len(vectors) * SIDE), of_type)
    for i in vectors:
        dM[i] = dM[i] + _sum_fours(sums[i * SIDE : (i + 1) * SIDE])


def _vectors(matrix: Rows) -> int:
    """Number of vectors of a matrix."""
    return ENTRIES // matrix.form.lanes


def _entries_of(matrix: Rows) -> list[list[Vector]]:
    """[i][k]: vector i with entry k of each of its rows in all lanes of that row."""
    lanes, found = matrix.form.lanes, []
    for i in range(_vectors(matrix)):
        x = matrix[i]
        found.append([x.shuffle(x, [lane // SIDE * SIDE + k for lane in range(lanes)]) for k in range(SIDE)])
    return found


def _rows_of(matrix: Rows) -> list[Vector]:
    """[k]: row k of a matrix, repeated to fill a vector."""
    lanes, found = matrix.form.lanes, []
    for i in range(_vectors(matrix)):
        x = matrix[i]
        for first in range(0, lanes, SIDE):
            found.append(x.shuffle(x, [first + lane % SIDE for lane in range(lanes)]))
    return found


def _folded(products: list[Vector]) -> list[Vector]:
    """The vectors of a matrix. Row k of the matrix is the sum of the rows in products[k]."""
    lanes = products[0].form.lanes
    if lanes == SIDE:
        return products
    low = [*range(SIDE), *range(lanes, lanes + SIDE)]
    pairs = zip(products[::2], products[1::2], strict=True)
    return [a.shuffle(b, low) + a.shuffle(b, [i + SIDE for i in low]) for a, b in pairs]


def _sum_fours(rows: list[Vector]) -> Vector:
    """Sums of groups of four lanes (rows) of four vectors: lane k of a row is the sum of this row of rows[k]."""
    lanes = rows[0].form.lanes

    def joined(a: Vector, b: Vector, places: tuple[int, int], step: int) -> Vector:
        starts = range(0, lanes, SIDE)
        low = [source + first + place for first in starts for source in (0, lanes) for place in places]
        return a.shuffle(b, low) + a.shuffle(b, [i + step for i in low])

    halves = [joined(a, b, (0, 1), 2) for a, b in (rows[:2], rows[2:])]
    return joined(halves[0], halves[1], (0, 2), 1)


def _add_first(
    first: Rows, votes: Rows, assignments: Rows, activation: Rows, scale: Rows, types: Number, entries: Number
) -> None:
    """first += R a scale V."""

    def of_type(c: Number, entries: Number) -> None:
        weight = _weight(assignments, activation, scale, c)
        out, vote = (at(x, (c, entries)) for x in (first, votes))

        def of_entries(here: Here, sums: list[Vector]) -> list[Vector]:
            here(out)[0] = fma(weight, here(vote)[0], here(out)[0])
            return sums

        over(first, entries, [], of_entries)

    _for_votes(first, types, entries, of_type)


def _add_second(
    second: Rows,
    votes: Rows,
    mean: Rows,
    assignments: Rows,
    activation: Rows,
    scale: Rows,
    types: Number,
    entries: Number,
) -> None:
    """second += R a scale (V - mean)^2."""

    def of_type(c: Number, entries: Number) -> None:
        weight = _weight(assignments, activation, scale, c)
        out, vote, centre = (at(x, (c, entries)) for x in (second, votes, mean))

        def of_entries(here: Here, sums: list[Vector]) -> list[Vector]:
            d = here(vote)[0] - here(centre)[0]
            here(out)[0] = fma(weight * d, d, here(out)[0])
            return sums

        over(second, entries, [], of_entries)

    _for_votes(second, types, entries, of_type)


def _logarithms(out: Rows, x: Rows, floor: Rows, count: Number) -> None:
    """out = log(max(x, floor))."""

    def of_entries(here: Here, sums: list[Vector]) -> list[Vector]:
        here(out)[0] = log(maximum(here(x)[0], floor.broadcast(0)))
        return sums

    over(out, count, [], of_entries)


def _m_step_gradient(
    dV: Rows,
    slope: Rows,
    votes: Rows,
    mean: Rows,
    linear: Rows,
    square: Rows,
    offset: Rows,
    assignments: Rows,
    activation: Rows,
    types: Number,
    entries: Number,
) -> None:
    """With e = V - mean: slope = offset + sum_h (linear + square e) e, and dV = R a (linear + 2 square e)."""

    def of_type(c: Number, entries: Number) -> None:
        r = _element(assignments, c).broadcast(0) * activation.broadcast(0)
        out, vote, centre, first, second = (at(x, (c, entries)) for x in (dV, votes, mean, linear, square))

        def of_entries(here: Here, sums: list[Vector]) -> list[Vector]:
            e, b = here(vote)[0] - here(centre)[0], here(first)[0]
            curved = here(second)[0] * e
            here(out)[0] = r * (b + curved * 2.0)
            return [fma(b + curved, e, sums[0])]

        (total,) = over(dV, entries, [zero(dV)], of_entries)
        _element(slope, c).set_element(0, _element(offset, c).broadcast(0) + across(add, total))

    _for_votes(dV, types, entries, of_type)


def _log_likelihood(
    out: Rows, votes: Rows, mean: Rows, precision: Rows, constant: Rows, types: Number, entries: Number
) -> None:
    """out = constant - sum_h precision (V - mean)^2."""

    def of_type(c: Number, entries: Number) -> None:
        vote, centre, factor = (at(x, (c, entries)) for x in (votes, mean, precision))

        def of_entries(here: Here, sums: list[Vector]) -> list[Vector]:
            d = here(vote)[0] - here(centre)[0]
            return [fma(here(factor)[0] * d, d, sums[0])]

        (distance,) = over(out, entries, [zero(out)], of_entries)
        _element(out, c).set_element(0, _element(constant, c).broadcast(0) - across(add, distance))

    _for_votes(out, types, entries, of_type)


def _softmax(logits: Rows, count: Number) -> None:
    """In place: softmax over all lanes of `count` rows; zero if all are -inf."""
    lowest = zero(logits).like(logits.form.lowest)
    (greatest,) = repeat(count, [lowest], lambda i, x: [maximum(x[0], at(logits, i)[0])])
    greatest = across(maximum, greatest)

    def of_row(i: Number, sums: list[Vector]) -> list[Vector]:
        (x,) = exp([at(logits, i)[0] - greatest])
        at(logits, i)[0] = x
        return [sums[0] + x]

    total = across(add, repeat(count, [zero(logits)], of_row)[0])  # at least 1, or 0, or nan
    inverse = total.like(1.0) / maximum(total, 0.5)

    def scale(i: Number) -> None:
        at(logits, i)[0] = at(logits, i)[0] * inverse

    for_each(logits, count, scale)


def _e_step_gradient(
    dV: Rows,
    first: Rows,
    second: Rows,
    votes: Rows,
    mean: Rows,
    inverse_variance: Rows,
    dl: Rows,
    types: Number,
    entries: Number,
) -> None:
    """With d = V - mean: first += dl d, second += dl d^2, and dV = -dl d / variance."""

    def of_type(c: Number, entries: Number) -> None:
        weight = _element(dl, c).broadcast(0)
        arrays = (dV, first, second, votes, mean, inverse_variance)
        out, m1, m2, vote, centre, inverse = (at(x, (c, entries)) for x in arrays)

        def of_entries(here: Here, sums: list[Vector]) -> list[Vector]:
            d = here(vote)[0] - here(centre)[0]
            weighted = weight * d
            here(out)[0] = -(weighted * here(inverse)[0])
            here(m1)[0] = here(m1)[0] + weighted
            here(m2)[0] = fma(weighted, d, here(m2)[0])
            return sums

        over(dV, entries, [], of_entries)

    _for_votes(dV, types, entries, of_type)


pose_votes = looping_microkernel(_pose_votes, vector_bytes=MATRIX_BYTES)
pose_votes_gradient = looping_microkernel(_pose_votes_gradient, vector_bytes=MATRIX_BYTES)
add_first = looping_microkernel(_add_first)
add_second = looping_microkernel(_add_second)
logarithms = looping_microkernel(_logarithms)
m_step_gradient = looping_microkernel(_m_step_gradient)
log_likelihood = looping_microkernel(_log_likelihood)
softmax = looping_microkernel(_softmax)
e_step_gradient = looping_microkernel(_e_step_gradient)
