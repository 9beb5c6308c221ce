"""The last sweep of the backward pass: the gradients of poses, activations and weight, of all iterations at once.

    dV_ij = sum_t r_ij (B_j + 2 C_j e - 2 g_ij precision_j d),   g_ij = G_ij - da_i, or 0 if R is a constant
    dM_i  = sum_j dV_ij W_ij^T
    da_i  = sum_t sum_j R_ij G_ij
    dW    = sum over images and locations of M_i^T dV_ij

dV is needed twice, and it costs four times as much as either product, so one sweep makes both. Everything that a
child type's votes add to belongs to that child type: a task owns some child types of some images, in dM, da and
in its images' part of dW. The parts, whose number does not depend on threads, are added at the end.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tritoncaps.kernels.cpu.compiling import kernel, part
from tritoncaps.kernels.cpu.layout import Edges, Slope, Statistic, array
from tritoncaps.kernels.cpu.simd import next_task
from tritoncaps.kernels.cpu.threads import num_threads, run
from tritoncaps.kernels.cpu.votes import (
    add_likelihood_and_gradient_1,
    add_likelihood_and_gradient_4,
    add_pose_gradient,
    add_uniform_assignment_gradient_1,
    add_vote_gradient_1,
    add_vote_gradient_4,
    add_weight_gradient,
    assign_1,
    assign_4,
    clear_1,
    clear_4,
    clear_16,
    deviations,
    set_uniform_vote_gradient_1,
    set_uniform_vote_gradient_4,
    sum_four,
)
from tritoncaps.kernels.cpu.workspace import scratch
from tritoncaps.kernels.em_routing import History

TYPES = 16  # child types of a task, at most: the more, the less often parents are read
PARTS_TIMES_TYPES = 128  # parts of the images times child types, about: enough tasks for many threads
PARTS_BYTES = 4 << 20  # that all parts of dW may take, if they are more than one

STATISTICS, SLOPES = Statistic.ROWS, Slope.ROWS

# Rows of a task's memory, for four votes: d, dV, sum_j R G, and of one iteration quadratic form, polynomial, r and g.
D, DV, SUMS, QUADRATIC, POLYNOMIAL, R, G, WORK = 0, 64, 128, 132, 136, 140, 144, 148

# Assignments that are constants, or functions of the iteration before; for `votes.assign_1`.
CONSTANT, VARIABLE = (0.0, 1.0), (2.0, 0.0)


def child_and_weight_gradient(
    edges: Edges, history: History, since: int, needs_children: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dL/dM [N, B, L, 4, 4], dL/da [N, B, L] and dL/dW [K, B, C, 4, 4]; None where not needed."""
    dtype = history.statistics.dtype
    N, L, B = edges.images, edges.children_count, edges.child_types
    children = (N, L, B) if needs_children else (0, 0, 0)
    dM, da = torch.zeros(*children, 16, dtype=dtype), torch.zeros(children, dtype=dtype)
    parts = _parts_of_images(edges) if needs_weight else N
    types = TYPES
    while types > 4 and parts * -(-B // types) < 2 * num_threads():
        types //= 2
    sizes = (parts if needs_weight else 0, edges.weights, edges.blocks, B, 16, edges.lanes)
    dW = scratch("weight gradient", sizes, dtype)
    history.da[:since].zero_()  # not computed where assignments are constants
    run(
        _gradient_kernel,
        parts * -(-B // types),
        edges,
        parts,
        types,
        since,
        len(history.statistics),
        array(dM),
        array(da),
        array(dW),
        *map(array, history),
        array(torch.tensor([*CONSTANT, *VARIABLE], dtype=dtype)),
        needs_children,
        needs_weight,
    )
    grad_poses = grad_activations = grad_weight = None
    if needs_children:
        for of_groups in history.da[since:]:
            da += _of_children(edges, of_groups)
        grad_poses, grad_activations = dM.unflatten(3, (4, 4)).transpose(1, 2), da.transpose(1, 2)
    if needs_weight:
        grad_weight = torch.empty(edges.weights, B, edges.parent_types, 4, 4, dtype=dtype)
        run(_add_parts_kernel, edges.weights * B, edges, parts, array(grad_weight), array(dW))
    return grad_poses, grad_activations, grad_weight


def _parts_of_images(edges: Edges) -> int:
    """In how many parts dW is summed. Depends on sizes only, because it decides the order of the sum over images."""
    affordable = max(1, PARTS_BYTES // max(1, edges.weight.nbytes))
    return min(edges.images, affordable, -(-PARTS_TIMES_TYPES // edges.child_types))


def _of_children(edges: Edges, of_groups: Tensor) -> Tensor:
    """Sum over the groups of every child: [N, G, B] -> [N, L, B]."""
    if not edges.local:
        return of_groups
    children = torch.from_numpy(edges.children)
    exists = children >= 0
    of_children = of_groups.new_zeros(edges.images, edges.children_count, edges.child_types)
    return of_children.index_add_(1, children[exists], of_groups[:, exists])


@kernel
def _gradient_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, parts, types, since, T, dM, da, dW, statistics, log_sums, slopes, mean_slopes, variable,
    needs_children, needs_weight,
):  # fmt: skip
    """dM [N, L, B, 16] and da [N, L, B], zero at first, and dW [parts, K, blocks, B, 16, lanes], from

    statistics [T, N, P, blocks, 36, lanes], slopes [T, N, P, blocks, 51, lanes], log_sums and mean_slopes (da of an
    iteration) [T - 1, N, G, B], and variable [2, 2].
    """
    work = np.empty(WORK * e.lanes, e.poses.dtype)
    task = next_task(counter)
    while task < tasks:
        first, part = task // parts * types, task % parts
        last = min(first + types, e.child_types)
        begin = e.images * part // parts * e.parents_count
        end = e.images * (part + 1) // parts * e.parents_count
        for block in range(e.blocks):
            if needs_weight:
                _clear_part(e, part, block, first, last, dW)
            for parent in range(begin, end):
                for s in range(e.slots):
                    c = e.children[parent % e.parents_count * e.slots + s]
                    for b in range(first, last if c >= 0 else first, 4):
                        count = min(4, last - b)
                        child = (parent // e.parents_count * e.children_count + c) * e.child_types + b
                        _vote_gradient(
                            e, since, T, parent, s, block, b, count, child, work,
                            statistics, log_sums, slopes, mean_slopes, variable,
                        )  # fmt: skip
                        if needs_children:
                            _add_to_children(e, s, block, b, count, child, work, dM, da)
                        if needs_weight:
                            _add_to_weight(e, part, s, block, b, count, child, work, dW)
        task = next_task(counter)


@part
def _vote_gradient(  # type: ignore[no-untyped-def]
    e, since, T, parent, s, block, b, count, child, work, statistics, log_sums, slopes, mean_slopes, variable
):
    """dV and sum R G, in `work`, of the votes of up to four child types for a block of parent types."""
    B, lanes, vote = e.child_types, e.lanes, 16 * e.lanes
    d, dv, sums = D * lanes, DV * lanes, SUMS * lanes
    quadratic, polynomial, r, g = QUADRATIC * lanes, POLYNOMIAL * lanes, R * lanes, G * lanes
    n, p = parent // e.parents_count, parent % e.parents_count
    group = e.group_of[p * e.slots + s]
    weight = ((e.weight_of[s] * e.blocks + block) * B + b) * vote
    parents = e.images * e.parents_count
    for j in range(count):
        clear_1(work, sums + j * lanes)
        if since > 0:
            clear_16(work, dv + j * vote)
    for t in range(since, T):
        before = ((max(t - 1, 0) * parents + parent) * e.blocks + block) * STATISTICS * lanes
        slope = ((t * parents + parent) * e.blocks + block) * SLOPES * lanes
        if t != 1 or since == 1:  # the first two iterations have the same d
            for j in range(count):
                deviations(
                    work, d + j * vote, e.poses, (child + j) * 16, e.weight, weight + j * vote, e.offset, 4 * s,
                    statistics, before,
                )  # fmt: skip
        clear_4(work, quadratic)
        clear_4(work, polynomial)
        if t == 0:
            for h in range(0, vote, 4 * lanes):
                if count == 4:
                    set_uniform_vote_gradient_4(
                        work, dv + h, work, polynomial, work, d + h, slopes, slope + h,
                        e.share, group, e.activations, child,
                    )  # fmt: skip
                else:
                    for j in range(count):
                        set_uniform_vote_gradient_1(
                            work, dv + j * vote + h, work, polynomial + j * lanes, work, d + j * vote + h,
                            slopes, slope + h, e.share, group, e.activations, child + j,
                        )  # fmt: skip
            for j in range(count):
                row = j * lanes
                add_uniform_assignment_gradient_1(
                    work, sums + row, work, polynomial + row, slopes, slope, e.share, group
                )
            continue
        i = (((t - 1) * e.images + n) * e.groups + group) * B + b
        kind = 2 if t > since else 0  # of `variable`
        if count == 4:
            for h in range(0, vote, 4 * lanes):
                add_likelihood_and_gradient_4(
                    work, quadratic, work, polynomial, work, d + h, statistics, before + h, slopes, slope + h
                )
            assign_4(
                work, r, work, g, work, sums, work, quadratic, work, polynomial, statistics, before, slopes, slope,
                log_sums, i, mean_slopes, i, e.activations, child, variable, kind,
            )  # fmt: skip
            for h in range(0, vote, 4 * lanes):
                add_vote_gradient_4(
                    work, dv + h, work, d + h, work, r, work, g, statistics, before + h, slopes, slope + h
                )
            continue
        for j in range(count):
            row = j * lanes
            for h in range(0, vote, 4 * lanes):
                add_likelihood_and_gradient_1(
                    work, quadratic + row, work, polynomial + row, work, d + j * vote + h,
                    statistics, before + h, slopes, slope + h,
                )  # fmt: skip
            assign_1(
                work, r + row, work, g + row, work, sums + row, work, quadratic + row, work, polynomial + row,
                statistics, before, slopes, slope,
                log_sums, i + j, mean_slopes, i + j, e.activations, child + j, variable, kind,
            )  # fmt: skip
            for h in range(0, vote, 4 * lanes):
                at = j * vote + h
                add_vote_gradient_1(
                    work, dv + at, work, d + at, work, r + row, work, g + row, statistics, before + h, slopes, slope + h
                )


@part
def _add_to_children(e, s, block, b, count, child, work, dM, da):  # type: ignore[no-untyped-def]
    lanes, vote = e.lanes, 16 * e.lanes
    weight = ((e.weight_of[s] * e.blocks + block) * e.child_types + b) * vote
    for j in range(count):
        add_pose_gradient(dM, (child + j) * 16, work, DV * lanes + j * vote, e.weight, weight + j * vote)
    sum_four(work, R * lanes, work, SUMS * lanes)
    for j in range(count):
        da[child + j] += work[R * lanes + j]


@part
def _add_to_weight(e, part, s, block, b, count, child, work, dW):  # type: ignore[no-untyped-def]
    lanes, vote = e.lanes, 16 * e.lanes
    weight = (((part * e.weights + e.weight_of[s]) * e.blocks + block) * e.child_types + b) * vote
    for j in range(count):
        add_weight_gradient(dW, weight + j * vote, work, DV * lanes + j * vote, e.poses, (child + j) * 16)


@part
def _clear_part(e, part, block, first, last, dW):  # type: ignore[no-untyped-def]
    vote = 16 * e.lanes
    for k in range(e.weights):
        row = ((part * e.weights + k) * e.blocks + block) * e.child_types
        dW[(row + first) * vote : (row + last) * vote] = 0


@kernel
def _add_parts_kernel(counter, tasks, e, parts, out, dW):  # type: ignore[no-untyped-def]
    """out [K, B, C, 16] from dW [parts, K, blocks, B, 16, lanes]; a task is a child type of a weight block."""
    B, C, lanes, vote = e.child_types, e.parent_types, e.lanes, 16 * e.lanes
    total = np.empty(vote, e.poses.dtype)
    task = next_task(counter)
    while task < tasks:
        k, b = task // B, task % B
        for block in range(e.blocks):
            total[:] = 0
            for of_images in range(parts):
                row = (((of_images * e.weights + k) * e.blocks + block) * B + b) * vote
                for i in range(vote):
                    total[i] += dW[row + i]
            for lane in range(min(lanes, C - block * lanes)):
                for h in range(16):
                    out[(task * C + block * lanes + lane) * 16 + h] = total[h * lanes + lane]
        task = next_task(counter)
