"""Micro-kernels of dynamic routing: computations for one child, or one parent, in a block of images.

The lanes of all vectors are the images of a block: a pose of E entries is E vectors, a logit is one vector. So
agreements and softmax need no sums across lanes. A vector has 32 bytes on every processor, because a small batch does
not fill a wider one. A micro-kernel works on one or two blocks, and loads each entry of a matrix, which is the same for
all images, once for both.

Micro-kernels loop over `count` parent types and keep the sums in registers. The sizes D and E of poses are multiples of
FOUR, and matrices are [D, E]. `rows` is the size of an array with one vector for each parent of a child, in a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tritoncaps.kernels.common.cpu.loops import Number, at, for_each, looping_microkernel, number, repeat, zero
from tritoncaps.kernels.common.cpu.simd import Rows, Vector, exp, fma, maximum, sum_each

VECTOR_BYTES = 32
FOUR = 4  # entries of a pose that are computed at once


def _multiply(
    depth: Number,
    sums: list[Vector],
    left: Callable[[Number], list[Vector]],
    right: Callable[[Number], list[Vector]],
    together: int = FOUR,
) -> list[Vector]:
    """sums_rc += sum_k left_kr right_kc; depth is a multiple of `together`, the number of steps in a loop body."""
    builder = sums[0].builder

    def step(x: Number, sums: list[Vector]) -> list[Vector]:
        for i in range(together):
            k = builder.add(builder.mul(x, number(together)), number(i))
            rights = right(k)
            pairs = [(x, y) for x in left(k) for y in rights]
            sums = [fma(x, y, total) for (x, y), total in zip(pairs, sums, strict=True)]
        return sums

    return repeat(builder.sdiv(depth, number(together)), sums, step)


def _four(rows: Rows, *places: Number | tuple[Number, Number]) -> Rows:
    """Rows from the x-th group of four on, where x is the last of the places (see `at`)."""
    *before, x = places
    return at(rows, *before, (x, number(FOUR * rows.form.lanes)))


def _fours(size: Number, rows: Rows) -> Number:
    return rows.builder.sdiv(size, number(FOUR))


def _block(size: Number, rows: Rows) -> Number:
    """Number of elements of `size` vectors."""
    return rows.builder.mul(size, number(rows.form.lanes))


def _votes(
    blocks: int,
    votes: Rows,
    products: Rows,
    poses: Rows,
    weight: Rows,
    states: Rows,
    several: Number,
    count: Number,
    D: Number,
    E: Number,
    rows: Number,
    pose_step: Number,
    state_step: Number,
    state_block: Number,
) -> None:
    """vote_je = sum_d W_jde u_d, and products_sj += vote_j . state_sj while the votes are in registers.

    votes [blocks, rows, E] and products [several, 2, rows]; poses [blocks, D] and states [several, blocks, count, E]:
    pose_step and state_block are the distances of blocks, state_step of states, in elements.
    """
    matrix, tile = weight.builder.mul(D, E), votes.builder.mul(rows, E)
    places = [(i, b) for i in range(FOUR) for b in range(blocks)]

    def of_type(j: Number) -> None:
        pose = (j, _block(E, votes))

        def of_entries(x: Number) -> None:
            sums = _multiply(
                D,
                [zero(votes)] * len(places),
                lambda d: [at(weight, (j, matrix), (d, E), (x, number(FOUR))).broadcast(i) for i in range(FOUR)],
                lambda d: [at(poses, (number(b), pose_step), d)[0] for b in range(blocks)],
            )
            for (i, b), vote in zip(places, sums, strict=True):
                _four(at(votes, (number(b), tile), pose), x)[i] = vote

            def of_state(k: Number) -> None:
                for b in range(blocks):
                    state = _four(at(states, (k, state_step), (number(b), state_block), pose), x)
                    to = at(products, (products.builder.add(k, k), rows), (number(b), rows), j)
                    total = to[0]
                    for i in range(FOUR):
                        total = fma(sums[i * blocks + b], state[i], total)
                    to[0] = total

            for_each(votes, several, of_state)

        for_each(votes, _fours(E, votes), of_entries)

    for_each(votes, count, of_type)


def _add_pose_gradient(
    blocks: int,
    du: Rows,
    dV: Rows,
    weight: Rows,
    count: Number,
    D: Number,
    E: Number,
    rows: Number,
    pose_step: Number,
) -> None:
    """du_d += sum_je W_jde dV_je: du [blocks, D], whose blocks are pose_step apart; dV [blocks, rows, E]."""
    matrix, tile = weight.builder.mul(D, E), dV.builder.mul(rows, E)
    places = [(i, b) for i in range(FOUR) for b in range(blocks)]

    def of_entries(x: Number) -> None:
        out = [_four(at(du, (number(b), pose_step)), x) for b in range(blocks)]

        def of_type(j: Number, sums: list[Vector]) -> list[Vector]:
            four = at(weight, (j, matrix), (x, weight.builder.mul(E, number(FOUR))))
            return _multiply(
                E,
                sums,
                lambda k: [at(four, (number(i), E), (k, number(1))).broadcast(0) for i in range(FOUR)],
                lambda k: [at(dV, (number(b), tile), (j, _block(E, dV)), k)[0] for b in range(blocks)],
            )

        sums = repeat(count, [out[b][i] for i, b in places], of_type)
        for (i, b), total in zip(places, sums, strict=True):
            out[b][i] = total

    for_each(du, _fours(D, du), of_entries)


def _add_weight_gradient(
    dW: Rows,
    poses: Rows,
    dV: Rows,
    blocks: Number,
    count: Number,
    D: Number,
    E: Number,
    rows: Number,
    pose_step: Number,
) -> None:
    """dW_jde += sum over images of u_d dV_je: poses [blocks, D], with blocks pose_step apart; dV [blocks, rows, E].

    Two rows of four entries at a time: eight vectors of sums, whose lanes are added at the end.
    """
    lanes, two, tile = dW.form.lanes, number(2), dV.builder.mul(rows, E)

    def of_type(j: Number) -> None:
        def of_rows(y: Number) -> None:
            def of_entries(x: Number) -> None:
                sums = _multiply(
                    blocks,
                    [zero(dW)] * (2 * FOUR),
                    lambda n: [at(poses, (n, pose_step), (y, number(2 * lanes)))[i] for i in range(2)],
                    lambda n: [_four(at(dV, (n, tile), (j, _block(E, dV))), x)[i] for i in range(FOUR)],
                    together=1,
                )
                rows = at(dW, (j, dW.builder.mul(D, E)), (y, dW.builder.mul(E, two)), (x, number(FOUR)))
                for first in range(0, 2 * FOUR, lanes):
                    total = sum_each(sums[first : first + lanes])
                    for lane in range(0, lanes, FOUR):
                        at(rows, (number((first + lane) // FOUR), E)).add_lanes(total, range(lane, lane + FOUR))

            for_each(dW, _fours(E, dW), of_entries)

        for_each(dW, dW.builder.sdiv(D, two), of_rows)

    for_each(dW, count, of_type)


def _set_rows(out: Rows, start: Rows, count: Number, step: Number) -> None:
    """out_j = start_j in all lanes; the start_j are `step` apart."""

    def of_type(j: Number) -> None:
        at(out, j)[0] = at(start, (j, step)).broadcast(0)

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


def _add_weighted(out: Rows, x: Rows, R: Rows, count: Number, E: Number) -> None:
    """out_j += R_j x_j."""

    def of_type(j: Number) -> None:
        weight = at(R, j)[0]

        def of_entries(k: Number) -> None:
            to, vector = (_four(at(rows, (j, _block(E, rows))), k) for rows in (out, x))
            for i in range(FOUR):
                to[i] = fma(weight, vector[i], to[i])

        for_each(out, _fours(E, out), of_entries)

    for_each(out, count, of_type)


def _vote_gradient(
    dV: Rows, pairs: Rows, states: Rows, iterations: Number, count: Number, E: Number, rows: Number, state_step: Number
) -> None:
    """dV_j = R_j g_j of the first iteration, and R_j g_j + dl_j q_j of all others.

    pairs [iterations, (R, dl), 2, rows], and states [iterations, (q, g), count, E], which are state_step apart.
    """
    builder, two = dV.builder, number(2)
    pair_step, states_step = builder.mul(rows, number(4)), builder.mul(state_step, two)

    def of_type(j: Number) -> None:
        pose = (j, _block(E, dV))

        def of_entries(x: Number) -> None:
            def of_iteration(t: Number, sums: list[Vector]) -> list[Vector]:
                R = at(pairs, (t, pair_step), j)
                q = _four(at(states, (t, states_step), pose), x)
                dl, g = at(R, (two, rows))[0], at(q, (number(1), state_step))
                return [fma(R[0], g[i], fma(dl, q[i], total)) for i, total in enumerate(sums)]

            R, g = at(pairs, j)[0], _four(at(states, (number(1), state_step), pose), x)
            sums = repeat(iterations, [R * g[i] for i in range(FOUR)], of_iteration, first=1)
            for i, total in enumerate(sums):
                _four(at(dV, pose), x)[i] = total

        for_each(dV, _fours(E, dV), of_entries)

    for_each(dV, count, of_type)


_microkernel = partial(looping_microkernel, vector_bytes=VECTOR_BYTES)

votes_1, votes_2 = (_microkernel(_votes, blocks) for blocks in (1, 2))
add_pose_gradient_1, add_pose_gradient_2 = (_microkernel(_add_pose_gradient, blocks) for blocks in (1, 2))
add_weight_gradient = _microkernel(_add_weight_gradient)
set_rows = _microkernel(_set_rows)
softmax = _microkernel(_softmax)
softmax_gradient = _microkernel(_softmax_gradient)
add_weighted = _microkernel(_add_weighted)
vote_gradient = _microkernel(_vote_gradient)
