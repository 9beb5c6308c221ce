"""Conversion of components, moments and their gradients between tensors of operators and the rows that kernels read.

Tensors are contiguous [N, P, 16, C] or [N, P, C]. Types are the fastest axis, as in rows [N, P, blocks, rows, lanes]
(see `layout`), so the copies use vectors. A task owns some parent locations of some images.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncaps.kernels.common.cpu.compiling import inlined, kernel
from tritoncaps.kernels.common.cpu.simd import Rows, microkernel
from tritoncaps.kernels.common.cpu.tasks import first_task, next_task
from tritoncaps.kernels.mixture.cpu.layout import Moment, Slope, Statistic
from tritoncaps.kernels.mixture.cpu.parents import inverse_support

STATISTICS, SLOPES, MOMENTS = Statistic.ROWS, Slope.ROWS, Moment.ROWS
MINUS_MEAN, PRECISION, CONSTANT = Statistic.MINUS_MEAN, Statistic.PRECISION, Statistic.CONSTANT
VARIANCE, SUPPORT = Statistic.VARIANCE, Statistic.SUPPORT
TWICE_LINEAR, TWICE_QUADRATIC, OFFSET = Slope.TWICE_LINEAR, Slope.TWICE_QUADRATIC, Slope.OFFSET
MINUS_CENTRE = Slope.MINUS_CENTRE
OF_SUPPORT, OF_VARIANCE = Slope.BETA_U, Slope.SHIFT  # rows that hold support and variance until slopes are computed
TOTAL, FIRST, SECOND = Moment.TOTAL, Moment.FIRST, Moment.SECOND


def _multiply_row(factor: float, out: Rows, given: Rows) -> None:
    """A row of out = factor times a row of given."""
    out[0] = given[0] * factor


def _copy_times(factor: float) -> Any:
    """A function that copies a row of numbers and multiplies them by the factor."""
    multiply_row = microkernel(_multiply_row, factor)
    number = np.float32(factor)  # float32 does not change the dtype of a product

    @inlined
    def copy(out, at, given, start, count, lanes):  # type: ignore[no-untyped-def]
        """out[at + i] = factor given[start + i] for `count` numbers: a vector, or a part of one."""
        if count == lanes:
            multiply_row(out, at, given, start)
        else:
            for i in range(count):
                out[at + i] = number * given[start + i]

    return copy


copy_row, _negate, _halve, _halve_and_negate = map(_copy_times, (1.0, -1.0, 0.5, -0.5))


def _rows_of_slopes(slopes: Rows, numbers: Rows) -> None:
    """In place, from the gradients of support, mean and variance in the rows of offset, linear and quadratic, the
    variance in the rows of the shift, and the support in the row of beta_u. See `backend.MomentGradients`."""
    scale, offset = inverse_support(slopes[OF_SUPPORT], numbers)[1], slopes[Slope.OFFSET]
    for h in range(16):
        linear, quadratic = Slope.TWICE_LINEAR + h, Slope.TWICE_QUADRATIC + h
        square = slopes[quadratic] * scale
        offset = offset - square * slopes[OF_VARIANCE + h]
        slopes[linear] = slopes[linear] * scale * 2.0
        slopes[quadratic] = square * 2.0
    slopes[Slope.OFFSET] = offset


def _shift_rows(slopes: Rows, before: Rows) -> None:
    """The rows `SHIFT`: mean of the previous components - centre."""
    for h in range(16):
        slopes[Slope.SHIFT + h] = slopes[Slope.MINUS_CENTRE + h] - before[Statistic.MINUS_MEAN + h]


def _gradient_of_mean_rows(moments: Rows, components: Rows) -> None:
    """In place: the gradient of the mean replaces the first moments of dl. The rows `PRECISION` hold a half of it."""
    for h in range(16):
        first = Moment.FIRST + h
        moments[first] = components[Statistic.PRECISION + h] * 2.0 * moments[first]


_to_slopes = microkernel(_rows_of_slopes)
_set_shift = microkernel(_shift_rows)
_to_gradient_of_mean = microkernel(_gradient_of_mean_rows)


@kernel
def pack_components(  # type: ignore[no-untyped-def]
    counter, tasks, e, first, images, chunks, rows, mean, precision, log_weight
):
    """rows [N, P, blocks, 36, lanes] = components. Padding types get the lowest log_weight, so their R is zero."""
    C, P, lanes = e.parent_types, e.parents_count, e.lanes
    lowest = np.finfo(e.poses.dtype).min
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * P * task // chunks, images * P * (task + 1) // chunks):
            for block in range(e.blocks):
                row, c = (index * e.blocks + block) * STATISTICS * lanes, block * lanes
                count = min(lanes, C - c)
                if count < lanes:
                    rows[row : row + STATISTICS * lanes] = 0
                    rows[row + CONSTANT * lanes : row + (CONSTANT + 1) * lanes] = lowest
                copy_row(rows, row + CONSTANT * lanes, log_weight, index * C + c, count, lanes)
                for h in range(16):
                    given = (index * 16 + h) * C + c
                    _negate(rows, row + (MINUS_MEAN + h) * lanes, mean, given, count, lanes)
                    _halve(rows, row + (PRECISION + h) * lanes, precision, given, count, lanes)
        task = next_task(counter, tasks)


@kernel
def pack_centre(counter, tasks, e, first, images, chunks, rows, centre):  # type: ignore[no-untyped-def]
    """The means in rows [N, P, blocks, 36, lanes] = centre [N, P, 16, C]."""
    C, P, lanes = e.parent_types, e.parents_count, e.lanes
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * P * task // chunks, images * P * (task + 1) // chunks):
            for block in range(e.blocks):
                row, c = ((index * e.blocks + block) * STATISTICS + MINUS_MEAN) * lanes, block * lanes
                count = min(lanes, C - c)
                if count < lanes:
                    rows[row : row + 16 * lanes] = 0
                for h in range(16):
                    _negate(rows, row + h * lanes, centre, (index * 16 + h) * C + c, count, lanes)
        task = next_task(counter, tasks)


@kernel
def pack_slopes(  # type: ignore[no-untyped-def]
    counter, tasks, e, first, images, chunks, rows, before,
    support, mean, variance, grad_support, grad_mean, grad_variance, numbers,
):  # fmt: skip
    """rows [N, P, blocks, 67, lanes] = slopes, from moments and their gradients. before: rows of the previous
    components; size 0 if there are none."""
    C, P, lanes = e.parent_types, e.parents_count, e.lanes
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * P * task // chunks, images * P * (task + 1) // chunks):
            for block in range(e.blocks):
                parent, c = index * e.blocks + block, block * lanes
                row, earlier, count = parent * SLOPES * lanes, parent * STATISTICS * lanes, min(lanes, C - c)
                if count < lanes:
                    rows[row : row + SLOPES * lanes] = 0
                copy_row(rows, row + OFFSET * lanes, grad_support, index * C + c, count, lanes)
                copy_row(rows, row + OF_SUPPORT * lanes, support, index * C + c, count, lanes)
                for h in range(16):
                    given = (index * 16 + h) * C + c
                    copy_row(rows, row + (TWICE_LINEAR + h) * lanes, grad_mean, given, count, lanes)
                    copy_row(rows, row + (TWICE_QUADRATIC + h) * lanes, grad_variance, given, count, lanes)
                    copy_row(rows, row + (OF_VARIANCE + h) * lanes, variance, given, count, lanes)
                    _negate(rows, row + (MINUS_CENTRE + h) * lanes, mean, given, count, lanes)
                _to_slopes(rows, row, numbers, 0)
                if len(before) > 0:
                    _set_shift(rows, row, before, earlier)
        task = next_task(counter, tasks)


@kernel
def unpack_moments(  # type: ignore[no-untyped-def]
    counter, tasks, e, first, images, chunks, support, mean, variance, rows
):
    """support, mean and variance from rows [N, P, blocks, 36, lanes]."""
    C, P, lanes = e.parent_types, e.parents_count, e.lanes
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * P * task // chunks, images * P * (task + 1) // chunks):
            for block in range(e.blocks):
                row, c = (index * e.blocks + block) * STATISTICS * lanes, block * lanes
                count = min(lanes, C - c)
                copy_row(support, index * C + c, rows, row + SUPPORT * lanes, count, lanes)
                for h in range(16):
                    found = (index * 16 + h) * C + c
                    _negate(mean, found, rows, row + (MINUS_MEAN + h) * lanes, count, lanes)
                    copy_row(variance, found, rows, row + (VARIANCE + h) * lanes, count, lanes)
        task = next_task(counter, tasks)


@kernel
def unpack_component_gradients(  # type: ignore[no-untyped-def]
    counter, tasks, e, first, images, chunks, grad_mean, grad_precision, grad_log_weight, rows, components
):
    """Gradients of components [N, P, blocks, 36, lanes], from the moments of dl, rows [N, P, blocks, 33, lanes]."""
    C, P, lanes = e.parent_types, e.parents_count, e.lanes
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * P * task // chunks, images * P * (task + 1) // chunks):
            for block in range(e.blocks):
                parent, c = index * e.blocks + block, block * lanes
                row, component, count = parent * MOMENTS * lanes, parent * STATISTICS * lanes, min(lanes, C - c)
                _to_gradient_of_mean(rows, row, components, component)
                copy_row(grad_log_weight, index * C + c, rows, row + TOTAL * lanes, count, lanes)
                for h in range(16):
                    found = (index * 16 + h) * C + c
                    _halve_and_negate(grad_precision, found, rows, row + (SECOND + h) * lanes, count, lanes)
                    copy_row(grad_mean, found, rows, row + (FIRST + h) * lanes, count, lanes)
        task = next_task(counter, tasks)
