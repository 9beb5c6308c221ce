"""Packing what belongs to parents, [N, P, 16, C] and [N, P, C], into rows of vectors (`layout.Row`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tritoncaps.kernels.cpu.compiling import kernel
from tritoncaps.kernels.cpu.layout import Edges, Row, array
from tritoncaps.kernels.cpu.simd import next_task
from tritoncaps.kernels.cpu.threads import run
from tritoncaps.kernels.cpu.workspace import scratch
from tritoncaps.kernels.em_routing import Gaussian, Iteration

PARENTS = 64  # of a task

MINUS_MEAN, PRECISION, CONSTANT = Row.MINUS_MEAN, Row.PRECISION, Row.CONSTANT
LINEAR, TWICE_SQUARE, OFFSET, SHIFT = Row.LINEAR, Row.TWICE_SQUARE, Row.OFFSET, Row.SHIFT
GAUSSIAN, ITERATION = Row.GAUSSIAN, Row.ITERATION


def pack_gaussian(edges: Edges, gaussian: Gaussian) -> Tensor:
    """[N, P, blocks, Row.GAUSSIAN, lanes]."""
    sizes = (edges.images, edges.parents_count, edges.blocks, GAUSSIAN, edges.lanes)
    rows = scratch("gaussian", sizes, gaussian.mean.dtype)
    run(_pack_gaussian_kernel, _tasks(edges), edges, array(rows), *map(array, gaussian))
    return rows


def pack_iterations(edges: Edges, iterations: Sequence[Iteration]) -> Tensor:
    """[T, N, P, blocks, Row.ITERATION, lanes]."""
    sizes = (len(iterations), edges.images, edges.parents_count, edges.blocks, ITERATION, edges.lanes)
    rows = scratch("iterations", sizes, iterations[0].A.dtype)
    for row, (gaussian, _, A, B, C, _, shift) in zip(rows, iterations, strict=True):
        parents = map(array, (*gaussian, A, B, C, shift))
        run(_pack_iteration_kernel, _tasks(edges), edges, array(row), *parents)
    return rows


def unpack(edges: Edges, rows: Tensor) -> Tensor:
    """A copy [N, P, R, C] of [N, P, blocks, R, lanes], the inverse of packing."""
    flat = rows.transpose(2, 3).flatten(3)  # a copy, unless there is one block only
    return (flat.clone() if edges.blocks == 1 else flat)[..., : edges.parent_types]


def _tasks(edges: Edges) -> int:
    return -(-edges.images * edges.parents_count // PARENTS)


@kernel
def _pack_gaussian_kernel(counter, tasks, e, out, mean, precision, constant):  # type: ignore[no-untyped-def]
    """out [N, P, blocks, 33, lanes]; a task owns some parents."""
    # finite, so that a difference of two is no nan, and so low that exp gives zero
    lowest = np.finfo(out.dtype).min
    zero, one = out.dtype.type(0), out.dtype.type(1)
    task = next_task(counter)
    while task < tasks:
        for parent in range(task * PARENTS, min((task + 1) * PARENTS, e.images * e.parents_count)):
            _copy(e, out, parent, GAUSSIAN, MINUS_MEAN, 16, mean, -one, zero)
            _copy(e, out, parent, GAUSSIAN, PRECISION, 16, precision, one, zero)
            _copy(e, out, parent, GAUSSIAN, CONSTANT, 1, constant, one, lowest)
        task = next_task(counter)


@kernel
def _pack_iteration_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, out, mean, precision, constant, A, B, C, shift
):
    """out [N, P, blocks, 82, lanes]; a task owns some parents."""
    lowest = np.finfo(out.dtype).min
    zero, one = out.dtype.type(0), out.dtype.type(1)
    task = next_task(counter)
    while task < tasks:
        for parent in range(task * PARENTS, min((task + 1) * PARENTS, e.images * e.parents_count)):
            _copy(e, out, parent, ITERATION, MINUS_MEAN, 16, mean, -one, zero)
            _copy(e, out, parent, ITERATION, PRECISION, 16, precision, one, zero)
            _copy(e, out, parent, ITERATION, CONSTANT, 1, constant, one, lowest)
            _copy(e, out, parent, ITERATION, LINEAR, 16, B, one, zero)
            _copy(e, out, parent, ITERATION, TWICE_SQUARE, 16, C, one + one, zero)
            _copy(e, out, parent, ITERATION, OFFSET, 1, A, one, zero)
            _copy(e, out, parent, ITERATION, SHIFT, 16, shift, one, zero)
        task = next_task(counter)


@kernel
def _copy(e, out, parent, rows, first, count, values, factor, missing):  # type: ignore[no-untyped-def]
    """Rows first, ..., first + count of a parent's blocks, values [N, P, count, C] times a factor of their dtype."""
    C, lanes = e.parent_types, e.lanes
    for block in range(e.blocks):
        to = ((parent * e.blocks + block) * rows + first) * lanes
        of_block = min(lanes, C - block * lanes)
        for row in range(count):
            at = (parent * count + row) * C + block * lanes
            for lane in range(of_block):
                out[to + row * lanes + lane] = values[at + lane] * factor
            for lane in range(of_block, lanes):
                out[to + row * lanes + lane] = missing
