"""The child view: sums over the parents that compete for a child.

    log_sum_i = log sum_j exp(l_ij)        da_i = sum_j R_ij G_ij

A task owns some child types of some groups (a group is a child location, or one edge if competition is local).
Child types change slowest, because the weights of a few child types fit into the second-level cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritoncaps.kernels.cpu.compiling import kernel
from tritoncaps.kernels.cpu.layout import Edges, Row, array
from tritoncaps.kernels.cpu.packing import pack_gaussian, pack_iterations
from tritoncaps.kernels.cpu.simd import next_task
from tritoncaps.kernels.cpu.threads import run
from tritoncaps.kernels.cpu.votes import (
    add_assignment_gradient_1,
    add_assignment_gradient_4,
    add_exponentials_1,
    add_exponentials_4,
    clear_1,
    join_exponentials,
    likelihood,
    likelihood_and_gradient,
    sum_lanes_1,
)
from tritoncaps.kernels.em_routing import Gaussian, Iteration, log

CHUNKS = 16  # of groups, for each range of child types
TYPES = 8  # child types of a task

GAUSSIAN = Row.GAUSSIAN
ITERATION = Row.ITERATION


def child_log_sum(edges: Edges, gaussian: Gaussian) -> Tensor:
    """[N, G, B]: log sum_j exp(l_ij); zero for children without parents."""
    greatest, total = _new_groups(edges, gaussian.mean.dtype), _new_groups(edges, gaussian.mean.dtype)
    rows = array(pack_gaussian(edges, gaussian))
    _run(_log_sum_kernel, edges, array(greatest), array(total), rows)
    exists = total > 0
    return (greatest + log(total.where(exists, 1))).where(exists, 0)


def child_assignment_gradient(edges: Edges, iteration: Iteration) -> Tensor:
    """[N, G, B]: da_i = sum_j R_ij G_ij."""
    da = _new_groups(edges, iteration.A.dtype)
    _run(
        _assignment_gradient_kernel,
        edges,
        array(da),
        array(pack_iterations(edges, [iteration])),
        array(iteration.log_sum),
    )
    return da


def _new_groups(edges: Edges, dtype: torch.dtype) -> Tensor:
    return torch.empty(edges.images, edges.groups, edges.child_types, dtype=dtype)


def _run(function: Any, edges: Edges, *arguments: Any) -> None:
    chunks = min(CHUNKS, edges.images * edges.groups)
    ranges = -(-edges.child_types // TYPES)
    run(function, ranges * chunks, edges, chunks, *arguments)


@kernel
def _log_sum_kernel(counter, tasks, e, chunks, greatest, total, gaussian):  # type: ignore[no-untyped-def]
    """log_sum = greatest + log(total), both [N, G, B], from gaussian [N, P, blocks, 33, lanes]."""
    B, S, lanes, vote = e.child_types, e.slots, e.lanes, 16 * e.lanes
    l = np.empty(TYPES * lanes, e.poses.dtype)  # noqa: E741
    highest = np.empty(TYPES * lanes, e.poses.dtype)
    sums = np.empty(TYPES * lanes, e.poses.dtype)
    lowest = np.finfo(e.poses.dtype).min
    groups = e.images * e.groups
    task = next_task(counter)
    while task < tasks:
        first, chunk = task // chunks * TYPES, task % chunks
        count = min(TYPES, B - first)
        for group in range(groups * chunk // chunks, groups * (chunk + 1) // chunks):
            n, g = group // e.groups, group % e.groups
            highest[:] = lowest
            sums[:] = 0
            for index in range(e.group_start[g], e.group_start[g + 1]):
                edge = e.group_edge[index]
                p, s = edge // S, edge % S
                child = (n * e.children_count + e.children[edge]) * B + first
                for block in range(e.blocks):
                    parent = ((n * e.parents_count + p) * e.blocks + block) * GAUSSIAN * lanes
                    weight = ((e.weight_of[s] * e.blocks + block) * B + first) * vote
                    for j in range(count):
                        likelihood(
                            l, j * lanes, e.poses, (child + j) * 16, e.weight, weight + j * vote,
                            e.offset, s * 4, gaussian, parent,
                        )  # fmt: skip
                    for j in range(0, count - 3, 4):
                        add_exponentials_4(highest, j * lanes, sums, j * lanes, l, j * lanes)
                    for j in range(count - count % 4, count):
                        add_exponentials_1(highest, j * lanes, sums, j * lanes, l, j * lanes)
            for j in range(count):
                i = group * B + first + j
                join_exponentials(greatest, i, total, i, highest, j * lanes, sums, j * lanes)
        task = next_task(counter)


@kernel
def _assignment_gradient_kernel(counter, tasks, e, chunks, da, iteration, log_sum):  # type: ignore[no-untyped-def]
    """da [N, G, B] from iteration [N, P, blocks, 82, lanes] and log_sum [N, G, B]."""
    B, S, lanes, vote = e.child_types, e.slots, e.lanes, 16 * e.lanes
    l = np.empty(TYPES * lanes, e.poses.dtype)  # noqa: E741
    G = np.empty(TYPES * lanes, e.poses.dtype)
    sums = np.empty(TYPES * lanes, e.poses.dtype)
    groups = e.images * e.groups
    task = next_task(counter)
    while task < tasks:
        first, chunk = task // chunks * TYPES, task % chunks
        count = min(TYPES, B - first)
        for group in range(groups * chunk // chunks, groups * (chunk + 1) // chunks):
            n, g = group // e.groups, group % e.groups
            i = group * B + first
            for j in range(count):
                clear_1(sums, j * lanes)
            for index in range(e.group_start[g], e.group_start[g + 1]):
                edge = e.group_edge[index]
                p, s = edge // S, edge % S
                child = (n * e.children_count + e.children[edge]) * B + first
                for block in range(e.blocks):
                    parent = ((n * e.parents_count + p) * e.blocks + block) * ITERATION * lanes
                    weight = ((e.weight_of[s] * e.blocks + block) * B + first) * vote
                    for j in range(count):
                        likelihood_and_gradient(
                            l, j * lanes, G, j * lanes, e.poses, (child + j) * 16, e.weight, weight + j * vote,
                            e.offset, s * 4, iteration, parent,
                        )  # fmt: skip
                    for j in range(0, count - 3, 4):
                        add_assignment_gradient_4(sums, j * lanes, l, j * lanes, G, j * lanes, log_sum, i + j)
                    for j in range(count - count % 4, count):
                        add_assignment_gradient_1(sums, j * lanes, l, j * lanes, G, j * lanes, log_sum, i + j)
            for j in range(count):
                sum_lanes_1(da, i + j, sums, j * lanes)
        task = next_task(counter)
