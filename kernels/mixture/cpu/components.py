"""Components, slopes and moments of parents: between the tensors of operators and the rows that kernels read.

In memory the tensors are [N, C, P, 16] or [N, C, P]: types are slower than locations. Rows are [N, P, blocks, rows,
lanes], see `layout`.
"""

from __future__ import annotations

import numpy as np

from tritoncaps.kernels.common.cpu.compiling import kernel
from tritoncaps.kernels.common.cpu.tasks import first_task, next_task
from tritoncaps.kernels.mixture.cpu.layout import Moment, Slope, Statistic

STATISTICS, SLOPES, MOMENTS = Statistic.ROWS, Slope.ROWS, Moment.ROWS
MINUS_MEAN, PRECISION, CONSTANT = Statistic.MINUS_MEAN, Statistic.PRECISION, Statistic.CONSTANT
VARIANCE, SUPPORT = Statistic.VARIANCE, Statistic.SUPPORT
TWICE_LINEAR, TWICE_QUADRATIC, OFFSET = Slope.TWICE_LINEAR, Slope.TWICE_QUADRATIC, Slope.OFFSET
SHIFT, MINUS_CENTRE = Slope.SHIFT, Slope.MINUS_CENTRE
TOTAL, FIRST, SECOND = Moment.TOTAL, Moment.FIRST, Moment.SECOND


@kernel
def pack_components(  # type: ignore[no-untyped-def]
    counter, tasks, e, first, images, chunks, rows, mean, precision, log_weight
):
    """rows [N, P, blocks, 36, lanes] of components; a type that only fills up its block gets no votes."""
    C, P, lanes = e.parent_types, e.parents_count, e.lanes
    lowest = np.finfo(e.poses.dtype).min
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * P * task // chunks, images * P * (task + 1) // chunks):
            n, p = index // P, index % P
            for block in range(e.blocks):
                row = (index * e.blocks + block) * STATISTICS * lanes
                rows[row : row + STATISTICS * lanes] = 0
                rows[row + CONSTANT * lanes : row + (CONSTANT + 1) * lanes] = lowest
                for lane in range(min(lanes, C - block * lanes)):
                    capsule = (n * C + block * lanes + lane) * P + p
                    rows[row + CONSTANT * lanes + lane] = log_weight[capsule]
                    for h in range(16):
                        rows[row + (MINUS_MEAN + h) * lanes + lane] = -mean[capsule * 16 + h]
                        rows[row + (PRECISION + h) * lanes + lane] = precision[capsule * 16 + h] / 2
        task = next_task(counter, tasks)


@kernel
def pack_centre(counter, tasks, e, first, images, chunks, rows, centre):  # type: ignore[no-untyped-def]
    """The rows of means of rows [N, P, blocks, 36, lanes]."""
    C, P, lanes = e.parent_types, e.parents_count, e.lanes
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * P * task // chunks, images * P * (task + 1) // chunks):
            n, p = index // P, index % P
            for block in range(e.blocks):
                row = ((index * e.blocks + block) * STATISTICS + MINUS_MEAN) * lanes
                rows[row : row + 16 * lanes] = 0
                for lane in range(min(lanes, C - block * lanes)):
                    capsule = (n * C + block * lanes + lane) * P + p
                    for h in range(16):
                        rows[row + h * lanes + lane] = -centre[capsule * 16 + h]
        task = next_task(counter, tasks)


@kernel
def pack_slopes(  # type: ignore[no-untyped-def]
    counter, tasks, e, first, images, chunks, rows, before, offset, linear, quadratic, centre
):
    """rows [N, P, blocks, 67, lanes] of slopes; `before` are the rows of the components before, of size 0 if none."""
    C, P, lanes = e.parent_types, e.parents_count, e.lanes
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * P * task // chunks, images * P * (task + 1) // chunks):
            n, p = index // P, index % P
            for block in range(e.blocks):
                parent = index * e.blocks + block
                row, earlier = parent * SLOPES * lanes, parent * STATISTICS * lanes
                rows[row : row + SLOPES * lanes] = 0
                for lane in range(min(lanes, C - block * lanes)):
                    capsule = (n * C + block * lanes + lane) * P + p
                    rows[row + OFFSET * lanes + lane] = offset[capsule]
                    for h in range(16):
                        about = centre[capsule * 16 + h]
                        rows[row + (TWICE_LINEAR + h) * lanes + lane] = 2 * linear[capsule * 16 + h]
                        rows[row + (TWICE_QUADRATIC + h) * lanes + lane] = 2 * quadratic[capsule * 16 + h]
                        rows[row + (MINUS_CENTRE + h) * lanes + lane] = -about
                        if len(before) > 0:
                            mean = -before[earlier + (MINUS_MEAN + h) * lanes + lane]
                            rows[row + (SHIFT + h) * lanes + lane] = mean - about
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
            n, p = index // P, index % P
            for block in range(e.blocks):
                row = (index * e.blocks + block) * STATISTICS * lanes
                for lane in range(min(lanes, C - block * lanes)):
                    capsule = (n * C + block * lanes + lane) * P + p
                    support[capsule] = rows[row + SUPPORT * lanes + lane]
                    for h in range(16):
                        mean[capsule * 16 + h] = -rows[row + (MINUS_MEAN + h) * lanes + lane]
                        variance[capsule * 16 + h] = rows[row + (VARIANCE + h) * lanes + lane]
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
            n, p = index // P, index % P
            for block in range(e.blocks):
                parent = index * e.blocks + block
                row, component = parent * MOMENTS * lanes, parent * STATISTICS * lanes
                for lane in range(min(lanes, C - block * lanes)):
                    capsule = (n * C + block * lanes + lane) * P + p
                    grad_log_weight[capsule] = rows[row + TOTAL * lanes + lane]
                    for h in range(16):
                        precision = 2 * components[component + (PRECISION + h) * lanes + lane]
                        grad_mean[capsule * 16 + h] = precision * rows[row + (FIRST + h) * lanes + lane]
                        grad_precision[capsule * 16 + h] = -rows[row + (SECOND + h) * lanes + lane] / 2
        task = next_task(counter, tasks)
