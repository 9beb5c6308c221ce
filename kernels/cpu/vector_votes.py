"""Micro-kernels of dynamic routing: what is computed for one child, or one parent, in a block of images.

A block is as many images as a vector has lanes, and all vectors run along the images of a block: a pose of E numbers is
E vectors, a logit is one. So agreements and softmax need no sums across lanes, and a number of a matrix, which is the
same for all images, is loaded once for the one or two blocks that a micro-kernel works on.

Micro-kernels loop over `count` parent types; sums stand in registers. Sizes of poses, D and E, are multiples of FOUR,
and matrices are [D, E].
"""

from __future__ import annotations

from collections.abc import Callable

from tritoncaps.kernels.cpu.loops import Number, at, for_each, looping_microkernel, number, repeat, zero
from tritoncaps.kernels.cpu.simd import Rows, Vector, exp, fma, maximum, sum_each

FOUR = 4  # as many numbers of a pose are computed at once


def _multiply(
    depth: Number, sums: list[Vector], left: Callable[[Number], list[Vector]], right: Callable[[Number], list[Vector]]
) -> list[Vector]:
    """sums_rc += sum_k left_kr right_kc."""

    def step(k: Number, sums: list[Vector]) -> list[Vector]:
        rights = right(k)
        pairs = [(x, y) for x in left(k) for y in rights]
        return [fma(x, y, total) for (x, y), total in zip(pairs, sums, strict=True)]

    return repeat(depth, sums, step)


def _four(rows: Rows, *places: Number | tuple[Number, Number]) -> Rows:
    """Rows from the first of the x-th four on, for an index x (or more) as `at` takes it."""
    *before, x = places
    return at(rows, *before, (x, number(FOUR * rows.form.lanes)))


def _fours(size: Number, rows: Rows) -> Number:
    return rows.builder.sdiv(size, number(FOUR))


def _block(size: Number, rows: Rows) -> Number:
    """Elements of `size` numbers in a block."""
    return rows.builder.mul(size, number(rows.form.lanes))


def _votes(
    blocks: int, votes: Rows, poses: Rows, weight: Rows, count: Number, D: Number, E: Number, step: Number
) -> None:
    """vote_je = sum_d W_jde u_d: votes [blocks, count, E] with a step from block to block, poses [blocks, D]."""
    matrix = weight.builder.mul(D, E)

    def of_type(j: Number) -> None:
        def of_entries(x: Number) -> None:
            sums = _multiply(
                D,
                [zero(votes)] * (FOUR * blocks),
                lambda d: [at(weight, (j, matrix), (d, E), (x, number(FOUR))).broadcast(i) for i in range(FOUR)],
                lambda d: [at(poses, (number(b), _block(D, poses)), d)[0] for b in range(blocks)],
            )
            for i in range(FOUR):
                for b in range(blocks):
                    _four(at(votes, (number(b), step), (j, _block(E, votes))), x)[i] = sums[i * blocks + b]

        for_each(votes, _fours(E, votes), of_entries)

    for_each(votes, count, of_type)


def _add_pose_gradient(
    blocks: int, du: Rows, dV: Rows, weight: Rows, count: Number, D: Number, E: Number, step: Number
) -> None:
    """du_d += sum_je W_jde dV_je: du [blocks, D], dV [blocks, count, E] with a step from block to block."""
    matrix = weight.builder.mul(D, E)

    def of_entries(x: Number) -> None:
        places = [
            (_four(at(du, (number(b), _block(D, du))), x), i) for i in range(FOUR) for b in range(blocks)
        ]

        def of_type(j: Number, sums: list[Vector]) -> list[Vector]:
            rows = at(weight, (j, matrix), (x, weight.builder.mul(E, number(FOUR))))
            return _multiply(
                E,
                sums,
                lambda k: [at(rows, (number(i), E), (k, number(1))).broadcast(0) for i in range(FOUR)],
                lambda k: [at(dV, (number(b), step), (j, _block(E, dV)), k)[0] for b in range(blocks)],
            )

        sums = repeat(count, [rows[i] for rows, i in places], of_type)
        for (rows, i), total in zip(places, sums, strict=True):
            rows[i] = total

    for_each(du, _fours(D, du), of_entries)


def _add_weight_gradient(
    dW: Rows, poses: Rows, dV: Rows, count: Number, blocks: Number, D: Number, E: Number, step: Number
) -> None:
    """dW_jde += sum over images of u_d dV_je: poses [blocks, D], dV [blocks, count, E] with a step between blocks.

    Two rows of four entries at a time: eight sums, whose lanes are added up at the end.
    """
    lanes, two = dW.form.lanes, number(2)

    def of_type(j: Number) -> None:
        def of_rows(y: Number) -> None:
            def of_entries(x: Number) -> None:
                sums = _multiply(
                    blocks,
                    [zero(dW)] * (2 * FOUR),
                    lambda n: [at(poses, (n, _block(D, poses)), (y, number(2 * lanes)))[i] for i in range(2)],
                    lambda n: [_four(at(dV, (n, step), (j, _block(E, dV))), x)[i] for i in range(FOUR)],
                )
                rows = at(dW, (j, dW.builder.mul(D, E)), (y, dW.builder.mul(E, two)), (x, number(FOUR)))
                for first in range(0, 2 * FOUR, lanes):
                    total = sum_each(sums[first : first + lanes])
                    for lane in range(0, lanes, FOUR):
                        at(rows, (number((first + lane) // FOUR), E)).add_lanes(total, range(lane, lane + FOUR))

            for_each(dW, _fours(E, dW), of_entries)

        for_each(dW, dW.builder.sdiv(D, two), of_rows)

    for_each(dW, count, of_type)


def _agreements(
    out: Rows, start: Rows, votes: Rows, parents: Rows, count: Number, start_step: Number, E: Number
) -> None:
    """out_j = start_j + vote_j . parent_j."""

    def of_type(j: Number) -> None:
        def products(x: Number, sums: list[Vector]) -> list[Vector]:
            vote, parent = (_four(at(rows, (j, _block(E, rows))), x) for rows in (votes, parents))
            return [fma(vote[i], parent[i], total) for i, total in enumerate(sums)]

        a, b, c, d = repeat(_fours(E, out), [zero(out)] * FOUR, products)
        at(out, j)[0] = at(start, (j, start_step)).broadcast(0) + ((a + b) + (c + d))

    for_each(out, count, of_type)


def _softmax(R: Rows, logits: Rows, rival: Rows, count: Number) -> None:
    """R_j = exp(l_j) / (sum_k exp(l_k) + exp(rival))."""
    start = rival.broadcast(0)
    (greatest,) = repeat(count, [start], lambda j, sums: [maximum(sums[0], at(logits, j)[0])])

    def exponentials(several: int) -> Callable[[Number, list[Vector]], list[Vector]]:
        def step(j: Number, sums: list[Vector]) -> list[Vector]:
            place = (j, number(several * R.form.lanes))
            es = exp([at(logits, place)[i] - greatest for i in range(several)])
            total = sums[0]
            for i, e in enumerate(es):
                at(R, place)[i] = e
                total = total + e
            return [total]

        return step

    fours = R.builder.ashr(count, number(2))
    sums = repeat(fours, exp([start - greatest]), exponentials(4))
    (total,) = repeat(count, sums, exponentials(1), first=R.builder.shl(fours, number(2)))
    inverse = total.like(1.0) / total

    def divide(j: Number) -> None:
        at(R, j)[0] = at(R, j)[0] * inverse

    for_each(R, count, divide)


def _softmax_gradient(dl: Rows, R: Rows, G: Rows, count: Number) -> None:
    """dl_j = R_j (G_j - sum_k R_k G_k)."""
    (mean,) = repeat(count, [zero(R)], lambda j, sums: [fma(at(R, j)[0], at(G, j)[0], sums[0])])

    def of_type(j: Number) -> None:
        at(dl, j)[0] = at(R, j)[0] * (at(G, j)[0] - mean)

    for_each(dl, count, of_type)


def _weighted(more: int, out: Rows, x: Rows, R: Rows, count: Number, E: Number) -> None:
    """out_j = (out_j if more) + R_j x_j."""

    def of_type(j: Number) -> None:
        weight = at(R, j)[0]

        def of_entries(k: Number) -> None:
            to, vector = (_four(at(rows, (j, _block(E, rows))), k) for rows in (out, x))
            for i in range(FOUR):
                to[i] = fma(weight, vector[i], to[i]) if more else weight * vector[i]

        for_each(out, _fours(E, out), of_entries)

    for_each(out, count, of_type)


def _add_vote_gradient(out: Rows, g: Rows, R: Rows, q: Rows, dl: Rows, count: Number, E: Number) -> None:
    """out_j += R_j g_j + dl_j q_j."""

    def of_type(j: Number) -> None:
        weight, gradient = at(R, j)[0], at(dl, j)[0]

        def of_entries(k: Number) -> None:
            to, slope, agreed = (_four(at(rows, (j, _block(E, rows))), k) for rows in (out, g, q))
            for i in range(FOUR):
                to[i] = fma(gradient, agreed[i], fma(weight, slope[i], to[i]))

        for_each(out, _fours(E, out), of_entries)

    for_each(out, count, of_type)


votes_1, votes_2 = (looping_microkernel(_votes, blocks) for blocks in (1, 2))
add_pose_gradient_1, add_pose_gradient_2 = (looping_microkernel(_add_pose_gradient, blocks) for blocks in (1, 2))
add_weight_gradient = looping_microkernel(_add_weight_gradient)
agreements = looping_microkernel(_agreements)
softmax = looping_microkernel(_softmax)
softmax_gradient = looping_microkernel(_softmax_gradient)
set_weighted, add_weighted = (looping_microkernel(_weighted, more) for more in (0, 1))
add_vote_gradient = looping_microkernel(_add_vote_gradient)
