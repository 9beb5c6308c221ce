"""The child view: sums over the parents that compete for a child.

    log_sum_i = log sum_j exp(l_ij)        da_i = sum_j R_ij G_ij

A task owns some child types of some groups (a group is a child location, or one edge if competition is local).
Child types change slowest, because the weights of a few child types fit into the second-level cache.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tritoncaps.kernels.cpu.compiling import kernel, part
from tritoncaps.kernels.cpu.layout import Edges, Slope, Statistic, array
from tritoncaps.kernels.cpu.simd import next_task
from tritoncaps.kernels.cpu.threads import run
from tritoncaps.kernels.cpu.votes import (
    add_assignment_gradient_1,
    add_assignment_gradient_4,
    add_exponentials_1,
    add_exponentials_4,
    join_exponentials,
    likelihood,
    likelihood_and_gradient,
    sum_lanes,
)
from tritoncaps.kernels.em_routing import History

CHUNKS = 16  # of groups, for each range of child types
TYPES = 8  # child types of a task: a multiple of the lanes

# what is summed
LOG_SUM, ASSIGNMENT_GRADIENT = 0, 1

STATISTICS, SLOPES = Statistic.ROWS, Slope.ROWS


def child_log_sum(edges: Edges, statistics: Tensor, out: Tensor) -> None:
    """out [N, G, B]: log sum_j exp(l_ij); zero for children without parents."""
    nothing = statistics.new_empty(0)
    _run(edges, LOG_SUM, out, statistics, nothing, nothing)


def child_assignment_gradient(edges: Edges, history: History, t: int) -> None:
    """da_i = sum_j R_ij G_ij of iteration t."""
    inputs = history.statistics[t - 1], history.slopes[t], history.log_sums[t - 1]
    _run(edges, ASSIGNMENT_GRADIENT, history.da[t - 1], *inputs)


def _run(edges: Edges, what: int, *arrays: Tensor) -> None:
    chunks = min(CHUNKS, edges.images * edges.groups)
    ranges = -(-edges.child_types // TYPES)
    run(_sums_kernel, ranges * chunks, edges, chunks, what, *map(array, arrays))


@kernel
def _sums_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, chunks, what, out, statistics, slopes, log_sum
):
    """out [N, G, B] from statistics [N, P, blocks, 36, lanes], slopes [N, P, blocks, 51, lanes], log_sum [N, G, B]."""
    B, lanes = e.child_types, e.lanes
    work = np.empty(2 * TYPES * lanes, e.poses.dtype)
    sums = np.empty(TYPES * lanes, e.poses.dtype)
    highest = np.empty(TYPES * lanes, e.poses.dtype)
    joined = np.empty(lanes, e.poses.dtype)
    groups = e.images * e.groups
    task = next_task(counter)
    while task < tasks:
        first, chunk = task // chunks * TYPES, task % chunks
        types = min(TYPES, B - first)
        for group in range(groups * chunk // chunks, groups * (chunk + 1) // chunks):
            n, g = group // e.groups, group % e.groups
            highest[:] = np.finfo(e.poses.dtype).min
            sums[:] = 0
            for index in range(e.group_start[g], e.group_start[g + 1]):
                for block in range(e.blocks):
                    _add_parents(
                        e, what, n, g, e.group_edge[index], block, first, types,
                        highest, sums, work, statistics, slopes, log_sum,
                    )  # fmt: skip
            for j in range(0, types, lanes):
                if what == LOG_SUM:
                    join_exponentials(joined, 0, highest, j * lanes, sums, j * lanes)
                else:
                    sum_lanes(joined, 0, sums, j * lanes)
                for i in range(min(lanes, types - j)):
                    out[group * B + first + j + i] = joined[i]
        task = next_task(counter)


@part
def _add_parents(  # type: ignore[no-untyped-def]
    e, what, n, g, edge, block, first, types, highest, sums, work, statistics, slopes, log_sum
):
    """Add what a block of parent types at one edge gives to some child types."""
    B, lanes, vote = e.child_types, e.lanes, 16 * e.lanes
    p, s = edge // e.slots, edge % e.slots
    child = (n * e.children_count + e.children[edge]) * B + first
    weight = ((e.weight_of[s] * e.blocks + block) * B + first) * vote
    parent = (n * e.parents_count + p) * e.blocks + block
    of_parent, of_slopes = parent * STATISTICS * lanes, parent * SLOPES * lanes
    i = (n * e.groups + g) * B + first
    G = TYPES * lanes  # in `work`, after the likelihoods
    for j in range(types):
        if what == LOG_SUM:
            likelihood(
                work, j * lanes, e.poses, (child + j) * 16, e.weight, weight + j * vote, e.offset, s * 4,
                statistics, of_parent,
            )  # fmt: skip
        else:
            likelihood_and_gradient(
                work, j * lanes, work, G + j * lanes, e.poses, (child + j) * 16, e.weight, weight + j * vote,
                e.offset, s * 4, statistics, of_parent, slopes, of_slopes,
            )  # fmt: skip
    for j in range(0, types - 3, 4):
        at = j * lanes
        if what == LOG_SUM:
            add_exponentials_4(highest, at, sums, at, work, at)
        else:
            add_assignment_gradient_4(sums, at, work, at, work, G + at, log_sum, i + j)
    for j in range(types - types % 4, types):
        at = j * lanes
        if what == LOG_SUM:
            add_exponentials_1(highest, at, sums, at, work, at)
        else:
            add_assignment_gradient_1(sums, at, work, at, work, G + at, log_sum, i + j)
