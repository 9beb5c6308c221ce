"""Micro-kernels of dynamic routing: what is computed for the votes of one child in a block of images.

A block is as many images as a vector has lanes. The vectors of votes run along the entries of a parent's pose: a pose
of E entries is V = ceil(E / lanes) vectors, the last one filled up with zeros. A *tile* holds the poses of one parent
type in a block of images, as V x lanes rows: vector, then image. Logits, assignments and their gradients have one row
for each parent type and one lane for each image, so that the softmax over a child's parents needs no sums across lanes.

Every micro-kernel loops over `count` parent types; sums stand in registers. A step is a distance in elements.
"""

from __future__ import annotations

from collections.abc import Callable

from tritoncaps.kernels.cpu.loops import Number, at, for_each, looping_microkernel, number, repeat, zero
from tritoncaps.kernels.cpu.simd import Rows, Vector, exp, fma, maximum, sum_each


def _multiply(
    rows: int,
    columns: int,
    more: bool,
    out: Callable[[int, int], Rows],
    left: Callable[[Number, int], Rows],
    right: Callable[[Number, int], Rows],
    depth: Number,
) -> None:
    """out_rc = (out_rc if more) + sum_k left_kr right_kc: numbers on the left, vectors on the right."""
    places = [(r, c) for r in range(rows) for c in range(columns)]

    def step(k: Number, sums: list[Vector]) -> list[Vector]:
        vectors = [right(k, c)[0] for c in range(columns)]
        numbers = [left(k, r).broadcast(0) for r in range(rows)]
        return [fma(numbers[r], vectors[c], x) for (r, c), x in zip(places, sums, strict=True)]

    starts = [out(r, c)[0] if more else zero(out(r, c)) for r, c in places]
    for (r, c), x in zip(places, repeat(depth, starts, step), strict=True):
        out(r, c)[0] = x


def _votes(
    images: int,
    columns: int,
    votes: Rows,
    poses: Rows,
    weight: Rows,
    count: Number,
    D: Number,
    pose: Number,
    tile: Number,
    tile_column: Number,
    matrix: Number,
    matrix_column: Number,
) -> None:
    """vote_jnc = sum_d u_nd W_jdc for some images n and vectors c of a pose.

    poses [images, D]; in a matrix, a row is `pose` long. Tiles and matrices have a step from type to type, and one from
    column to column.
    """

    def of_type(j: Number) -> None:
        _multiply(
            images,
            columns,
            False,
            lambda n, c: at(votes, (j, tile), (number(c), tile_column), number(n)),
            lambda d, n: at(poses, (d, number(1)), (number(n), D)),
            lambda d, c: at(weight, (j, matrix), (d, pose), (number(c), matrix_column)),
            D,
        )

    for_each(votes, count, of_type)


def _add_weight_gradient(
    entries: int,
    columns: int,
    dW: Rows,
    poses: Rows,
    dV: Rows,
    count: Number,
    images: Number,
    D: Number,
    pose: Number,
    tile: Number,
    tile_column: Number,
    matrix: Number,
    matrix_column: Number,
) -> None:
    """dW_jdc += sum_n u_nd dV_jnc for some entries d and vectors c, in the same places."""

    def of_type(j: Number) -> None:
        _multiply(
            entries,
            columns,
            True,
            lambda d, c: at(dW, (j, matrix), (number(d), pose), (number(c), matrix_column)),
            lambda n, d: at(poses, (n, D), (number(d), number(1))),
            lambda n, c: at(dV, (j, tile), (number(c), tile_column), n),
            images,
        )

    for_each(dW, count, of_type)


def _add_pose_gradient(du: Rows, dV: Rows, weight: Rows, count: Number, row: Number) -> None:
    """du_n += sum_k dV_nk W^T_k over the entries k of `count` tiles of one vector each, in a block of images.

    du [lanes, row] and weight, the transposed matrices, [count, lanes, row]: vectors run along the child's pose.
    """
    lanes = dV.form.lanes
    block = dV.builder.mul(row, number(lanes))

    def of_vector(x: Number, sums: list[Vector]) -> list[Vector]:
        tile = at(dV, (x, number(lanes**2)))
        for i in range(lanes):
            w = at(weight, (x, block), (number(i), row))[0]
            sums = [fma(tile.broadcast(n * lanes + i), w, total) for n, total in enumerate(sums)]
        return sums

    rows = [at(du, (number(n), row)) for n in range(lanes)]
    for place, x in zip(rows, repeat(count, [place[0] for place in rows], of_vector), strict=True):
        place[0] = x


def _set_logits(logits: Rows, priors: Rows, count: Number, step: Number) -> None:
    """logit_jn = prior_j."""

    def of_type(j: Number) -> None:
        at(logits, j)[0] = at(priors, (j, step)).broadcast(0)

    for_each(logits, count, of_type)


def _add_agreements(columns: int, out: Rows, votes: Rows, parents: Rows, count: Number, tile: Number) -> None:
    """out_jn += vote_jn . parent_jn over some vectors of a pose."""
    lanes = votes.form.lanes

    def of_type(j: Number) -> None:
        x, y = at(votes, (j, tile)), at(parents, (j, tile))
        sums = [x[n] * y[n] for n in range(lanes)]
        for row in range(lanes, columns * lanes):
            sums[row % lanes] = fma(x[row], y[row], sums[row % lanes])
        at(out, j)[0] = at(out, j)[0] + sum_each(sums)

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


def _add_weighted(columns: int, out: Rows, votes: Rows, R: Rows, count: Number, tile: Number) -> None:
    """out_jn += R_jn vote_jn for some vectors of a pose."""

    def of_type(j: Number) -> None:
        place, vote = at(out, (j, tile)), at(votes, (j, tile))
        for n in range(out.form.lanes):
            weight = at(R, j).broadcast(n)
            for row in range(n, columns * out.form.lanes, out.form.lanes):
                place[row] = fma(weight, vote[row], place[row])

    for_each(out, count, of_type)


def _set_weighted(columns: int, out: Rows, g: Rows, R: Rows, count: Number, tile: Number) -> None:
    """out_jn = R_jn g_jn for some vectors of a pose."""

    def of_type(j: Number) -> None:
        for n in range(out.form.lanes):
            weight = at(R, j).broadcast(n)
            for row in range(n, columns * out.form.lanes, out.form.lanes):
                at(out, (j, tile))[row] = weight * at(g, (j, tile))[row]

    for_each(out, count, of_type)


def _add_vote_gradient(
    columns: int, out: Rows, g: Rows, R: Rows, q: Rows, dl: Rows, count: Number, tile: Number
) -> None:
    """out_jn += R_jn g_jn + dl_jn q_jn for some vectors of a pose."""

    def of_type(j: Number) -> None:
        place, slope, agreed = (at(rows, (j, tile)) for rows in (out, g, q))
        for n in range(out.form.lanes):
            weight, gradient = at(R, j).broadcast(n), at(dl, j).broadcast(n)
            for row in range(n, columns * out.form.lanes, out.form.lanes):
                place[row] = fma(gradient, agreed[row], fma(weight, slope[row], place[row]))

    for_each(out, count, of_type)


votes_4x2, votes_4x1, votes_1x1 = (looping_microkernel(_votes, *sizes) for sizes in ((4, 2), (4, 1), (1, 1)))
add_weight_gradient_4x2, add_weight_gradient_4x1, add_weight_gradient_1x1 = (
    looping_microkernel(_add_weight_gradient, *sizes) for sizes in ((4, 2), (4, 1), (1, 1))
)
add_pose_gradient = looping_microkernel(_add_pose_gradient)
set_logits = looping_microkernel(_set_logits)
add_agreements_2, add_agreements_1 = (looping_microkernel(_add_agreements, columns) for columns in (2, 1))
softmax = looping_microkernel(_softmax)
softmax_gradient = looping_microkernel(_softmax_gradient)
add_weighted_2, add_weighted_1 = (looping_microkernel(_add_weighted, columns) for columns in (2, 1))
set_weighted_2, set_weighted_1 = (looping_microkernel(_set_weighted, columns) for columns in (2, 1))
add_vote_gradient_2, add_vote_gradient_1 = (looping_microkernel(_add_vote_gradient, columns) for columns in (2, 1))
