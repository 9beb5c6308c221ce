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
from tritoncaps.kernels.cpu.layout import Edges, Row, array, pack_gaussian, pack_iteration
from tritoncaps.kernels.cpu.simd import next_task
from tritoncaps.kernels.cpu.threads import run
from tritoncaps.kernels.cpu.votes import (
    add_assignment_gradient,
    add_log_likelihood,
    finish_log_sum,
    sum_lanes,
)
from tritoncaps.kernels.em_routing import Gaussian, Iteration

CHUNKS = 16  # of groups, for each range of child types
TYPES = 8  # child types of a task

GAUSSIAN = Row.GAUSSIAN
ITERATION = Row.ITERATION


def child_log_sum(edges: Edges, gaussian: Gaussian) -> Tensor:
    """[N, G, B]: log sum_j exp(l_ij); zero for children without parents."""
    greatest, total = _new_groups(edges, gaussian.mean.dtype), _new_groups(edges, gaussian.mean.dtype)
    rows = array(pack_gaussian(edges, gaussian))
    _run(_log_sum_kernel, edges, array(greatest), array(total), rows)
    return (greatest + total.log()).where(total > 0, 0)


def child_assignment_gradient(edges: Edges, iteration: Iteration) -> Tensor:
    """[N, G, B]: da_i = sum_j R_ij G_ij."""
    da = _new_groups(edges, iteration.A.dtype)
    _run(
        _assignment_gradient_kernel,
        edges,
        array(da),
        array(pack_iteration(edges, iteration)),
        array(iteration.log_sum),
    )
    return da


def _new_groups(edges: Edges, dtype: torch.dtype) -> Tensor:
    return torch.empty(edges.images, edges.groups, edges.child_types, dtype=dtype)


def _run(function: Any, edges: Edges, *arguments: Any) -> None:
    chunks = min(CHUNKS, edges.images * edges.groups)
    ranges = -(-edges.child_types // TYPES)
    run(function, ranges * chunks, chunks, edges, *arguments)


@kernel
def _log_sum_kernel(counter, tasks, chunks, e, greatest, total, gaussian):  # type: ignore[no-untyped-def]
    """greatest and total [N, G, B], log_sum = greatest + log(total), from gaussian [N, P, blocks, 33, lanes]."""
    B, S, lanes, vote = e.child_types, e.slots, e.lanes, 16 * e.lanes
    state = np.empty(TYPES * 2 * lanes, e.poses.dtype)
    lowest = np.finfo(e.poses.dtype).min
    groups = e.images * e.groups
    task = next_task(counter)
    while task < tasks:
        first, chunk = task // chunks * TYPES, task % chunks
        last = min(first + TYPES, B)
        for group in range(groups * chunk // chunks, groups * (chunk + 1) // chunks):
            n, g = group // e.groups, group % e.groups
            for b in range(first, last):
                for lane in range(lanes):
                    state[(b - first) * 2 * lanes + lane] = lowest
                    state[((b - first) * 2 + 1) * lanes + lane] = 0
            for index in range(e.group_start[g], e.group_start[g + 1]):
                edge = e.group_edge[index]
                p, s = edge // S, edge % S
                child = (n * e.children_count + e.children[edge]) * B
                for block in range(e.blocks):
                    parent = ((n * e.parents_count + p) * e.blocks + block) * GAUSSIAN * lanes
                    weight = (e.weight_of[s] * e.blocks + block) * B
                    for b in range(first, last):
                        add_log_likelihood(
                            state, (b - first) * 2 * lanes, e.poses, (child + b) * 16, e.weight, (weight + b) * vote,
                            e.offset, s * 4, gaussian, parent,
                        )  # fmt: skip
            for b in range(first, last):
                i = group * B + b
                finish_log_sum(greatest, i, total, i, state, (b - first) * 2 * lanes)
        task = next_task(counter)


@kernel
def _assignment_gradient_kernel(counter, tasks, chunks, e, da, iteration, log_sum):  # type: ignore[no-untyped-def]
    """da [N, G, B] from iteration [N, P, blocks, 66, lanes] and log_sum [N, G, B]."""
    B, S, lanes, vote = e.child_types, e.slots, e.lanes, 16 * e.lanes
    state = np.empty(TYPES * lanes, e.poses.dtype)
    groups = e.images * e.groups
    task = next_task(counter)
    while task < tasks:
        first, chunk = task // chunks * TYPES, task % chunks
        last = min(first + TYPES, B)
        for group in range(groups * chunk // chunks, groups * (chunk + 1) // chunks):
            n, g = group // e.groups, group % e.groups
            for i in range((last - first) * lanes):
                state[i] = 0
            for index in range(e.group_start[g], e.group_start[g + 1]):
                edge = e.group_edge[index]
                p, s = edge // S, edge % S
                child = (n * e.children_count + e.children[edge]) * B
                for block in range(e.blocks):
                    parent = ((n * e.parents_count + p) * e.blocks + block) * ITERATION * lanes
                    weight = (e.weight_of[s] * e.blocks + block) * B
                    for b in range(first, last):
                        add_assignment_gradient(
                            state, (b - first) * lanes, e.poses, (child + b) * 16, e.weight, (weight + b) * vote,
                            e.offset, s * 4, iteration, parent, log_sum, group * B + b,
                        )  # fmt: skip
            for b in range(first, last):
                sum_lanes(da, group * B + b, state, (b - first) * lanes)
        task = next_task(counter)
