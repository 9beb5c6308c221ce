"""Conversion of components, slopes and moments between the tensors of operators and the rows that kernels read.

Tensors are contiguous [N, P, 16, C] or [N, P, C]. Types are the fastest axis, as in rows [N, P, blocks, rows, lanes]
(see `layout`), so the copies use vectors. A task owns some parent locations of some images.
"""

from __future__ import annotations

import numpy as np

from tritoncaps.kernels.common.cpu.compiling import kernel, part
from tritoncaps.kernels.common.cpu.tasks import first_task, next_task
from tritoncaps.kernels.mixture.cpu.layout import Moment, Slope, Statistic

STATISTICS, SLOPES, MOMENTS = Statistic.ROWS, Slope.ROWS, Moment.ROWS
MINUS_MEAN, PRECISION, CONSTANT = Statistic.MINUS_MEAN, Statistic.PRECISION, Statistic.CONSTANT
VARIANCE, SUPPORT = Statistic.VARIANCE, Statistic.SUPPORT
TWICE_LINEAR, TWICE_QUADRATIC, OFFSET = Slope.TWICE_LINEAR, Slope.TWICE_QUADRATIC, Slope.OFFSET
SHIFT, MINUS_CENTRE = Slope.SHIFT, Slope.MINUS_CENTRE
TOTAL, FIRST, SECOND = Moment.TOTAL, Moment.FIRST, Moment.SECOND

# float32 factors do not change the dtype of a product
ONE, MINUS_ONE, TWO = np.float32(1), np.float32(-1), np.float32(2)
HALF, MINUS_HALF = np.float32(0.5), np.float32(-0.5)


@part
def _copy(out, at, given, start, count, factor):  # type: ignore[no-untyped-def]
    """out[at + i] = factor given[start + i] for `count` numbers."""
    for i in range(count):
        out[at + i] = factor * given[start + i]


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
                _copy(rows, row + CONSTANT * lanes, log_weight, index * C + c, count, ONE)
                for h in range(16):
                    given = (index * 16 + h) * C + c
                    _copy(rows, row + (MINUS_MEAN + h) * lanes, mean, given, count, MINUS_ONE)
                    _copy(rows, row + (PRECISION + h) * lanes, precision, given, count, HALF)
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
                rows[row : row + 16 * lanes] = 0
                for h in range(16):
                    _copy(rows, row + h * lanes, centre, (index * 16 + h) * C + c, min(lanes, C - c), MINUS_ONE)
        task = next_task(counter, tasks)


@kernel
def pack_slopes(  # type: ignore[no-untyped-def]
    counter, tasks, e, first, images, chunks, rows, before, offset, linear, quadratic, centre
):
    """rows [N, P, blocks, 67, lanes] = slopes. before: rows of the previous components; size 0 if there are none."""
    C, P, lanes = e.parent_types, e.parents_count, e.lanes
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * P * task // chunks, images * P * (task + 1) // chunks):
            for block in range(e.blocks):
                parent, c = index * e.blocks + block, block * lanes
                row, earlier, count = parent * SLOPES * lanes, parent * STATISTICS * lanes, min(lanes, C - c)
                if count < lanes:
                    rows[row : row + SLOPES * lanes] = 0
                _copy(rows, row + OFFSET * lanes, offset, index * C + c, count, ONE)
                for h in range(16):
                    given = (index * 16 + h) * C + c
                    _copy(rows, row + (TWICE_LINEAR + h) * lanes, linear, given, count, TWO)
                    _copy(rows, row + (TWICE_QUADRATIC + h) * lanes, quadratic, given, count, TWO)
                    _copy(rows, row + (MINUS_CENTRE + h) * lanes, centre, given, count, MINUS_ONE)
                    for lane in range(count if len(before) > 0 else 0):
                        mean = -before[earlier + (MINUS_MEAN + h) * lanes + lane]
                        rows[row + (SHIFT + h) * lanes + lane] = mean - centre[given + lane]
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
                _copy(support, index * C + c, rows, row + SUPPORT * lanes, count, ONE)
                for h in range(16):
                    found = (index * 16 + h) * C + c
                    _copy(mean, found, rows, row + (MINUS_MEAN + h) * lanes, count, MINUS_ONE)
                    _copy(variance, found, rows, row + (VARIANCE + h) * lanes, count, ONE)
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
                _copy(grad_log_weight, index * C + c, rows, row + TOTAL * lanes, count, ONE)
                for h in range(16):
                    found = (index * 16 + h) * C + c
                    _copy(grad_precision, found, rows, row + (SECOND + h) * lanes, count, MINUS_HALF)
                    for lane in range(count):
                        precision = TWO * components[component + (PRECISION + h) * lanes + lane]
                        grad_mean[found + lane] = precision * rows[row + (FIRST + h) * lanes + lane]
        task = next_task(counter, tasks)
