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

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tritoncaps.kernels.cpu.compiling import kernel
from tritoncaps.kernels.cpu.layout import Edges, Row, array
from tritoncaps.kernels.cpu.packing import pack_iterations
from tritoncaps.kernels.cpu.simd import next_task
from tritoncaps.kernels.cpu.threads import num_threads, run
from tritoncaps.kernels.cpu.votes import (
    add_lanes_1,
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
)
from tritoncaps.kernels.cpu.workspace import scratch
from tritoncaps.kernels.em_routing import Iteration

TYPES = 16  # child types of a task, at most: the more, the less often parents are read
PARTS_TIMES_TYPES = 128  # parts of the images times child types, about: enough tasks for many threads
PARTS_BYTES = 4 << 20  # that all parts of dW may take, if they are more than one

ITERATION = Row.ITERATION

# What the assignments of an iteration are: all equal, constants, or functions of the iteration before.
UNIFORM, CONSTANT, VARIABLE = 0, 1, 2
_VARIABLE = {UNIFORM: (0.0, 1.0), CONSTANT: (0.0, 1.0), VARIABLE: (2.0, 0.0)}  # for `votes.assign_1`


def child_and_weight_gradient(
    edges: Edges, iterations: Sequence[Iteration], needs_children: bool = True, needs_weight: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dL/dM [N, L, 16, B], dL/da [N, L, B] and dL/dW [K, B, C, 4, 4]; None where not needed."""
    dtype = iterations[0].A.dtype
    N, L, B = edges.images, edges.children_count, edges.child_types
    children = (N, L, B) if needs_children else (0, 0, 0)
    dM, da = torch.zeros(*children, 16, dtype=dtype), torch.zeros(children, dtype=dtype)
    kinds = [_kind(i) for i in iterations]
    parts = _parts_of_images(edges) if needs_weight else N
    types = TYPES
    while types > 4 and parts * -(-B // types) < 2 * num_threads():
        types //= 2
    sizes = (parts if needs_weight else 0, edges.weights, edges.blocks, B, 16, edges.lanes)
    dW = scratch("weight gradient", sizes, dtype).zero_()
    run(
        _gradient_kernel,
        parts * -(-B // types),
        edges,
        parts,
        types,
        array(dM),
        array(da),
        array(dW),
        array(pack_iterations(edges, iterations)),
        array(torch.stack([i.log_sum if k else _share(i.log_sum) for i, k in zip(iterations, kinds, strict=True)])),
        array(torch.stack([i.log_sum if i.da is None else i.da for i in iterations])),
        np.array(kinds),
        np.array(_same_mean(iterations)),
        array(torch.tensor([_VARIABLE[k] for k in kinds], dtype=dtype)),
        needs_children,
        needs_weight,
    )
    grad_poses = grad_activations = grad_weight = None
    if needs_children:
        grad_poses = dM.transpose(2, 3)
        grad_activations = da
        for iteration in iterations:
            if iteration.da is not None:
                grad_activations = grad_activations + _of_children(edges, iteration.da)
    if needs_weight:
        grad_weight = dW.sum(dim=0).permute(0, 2, 1, 4, 3).flatten(2, 3)[:, :, : edges.parent_types]
        grad_weight = grad_weight.unflatten(3, (4, 4)).contiguous()
    return grad_poses, grad_activations, grad_weight


def child_gradient(edges: Edges, iterations: Sequence[Iteration]) -> tuple[Tensor | None, Tensor | None]:
    """dL/dM [N, L, 16, B] and dL/da [N, L, B]."""
    return child_and_weight_gradient(edges, iterations, needs_weight=False)[:2]


def weight_gradient(edges: Edges, iterations: Sequence[Iteration]) -> Tensor | None:
    """dL/dW [K, B, C, 4, 4]."""
    return child_and_weight_gradient(edges, iterations, needs_children=False)[2]


def _parts_of_images(edges: Edges) -> int:
    """In how many parts dW is summed. Depends on sizes only, because it decides the order of the sum over images."""
    affordable = max(1, PARTS_BYTES // max(1, edges.weight.nbytes))
    return min(edges.images, affordable, -(-PARTS_TIMES_TYPES // edges.child_types))


def _same_mean(iterations: Sequence[Iteration]) -> list[bool]:
    """Has the next iteration (the one before in time) the same mean? The first two in time have."""
    following = [*iterations[1:], None]
    return [x is not None and i.gaussian.mean is x.gaussian.mean for i, x in zip(iterations, following, strict=True)]


def _share(log_sum: Tensor) -> Tensor:
    """exp(-log_sum), by NumPy: torch's exp depends on where in an array a number stands."""
    return torch.from_numpy(np.exp(-log_sum.numpy()))


def _kind(iteration: Iteration) -> int:
    if iteration.da is not None:
        return VARIABLE
    gaussian = iteration.gaussian
    return CONSTANT if gaussian.precision.any() or gaussian.constant.any() else UNIFORM


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
    counter, tasks, e, parts, types, dM, da, dW, iterations, log_sum, slope, kinds, same_mean, variable,
    needs_children, needs_weight,
):  # fmt: skip
    """dM [N, L, B, 16], da [N, L, B], dW [parts, K, blocks, B, 16, lanes], all zero at first, from

    iterations [T, N, P, blocks, 82, lanes], log_sum (or the share, for uniform assignments) and slope (da of the
    iteration) [T, N, G, B], kinds [T], same_mean [T] and variable [T, 2].
    """
    B, S, P, lanes, vote = e.child_types, e.slots, e.parents_count, e.lanes, 16 * e.lanes
    d = np.empty(4 * vote, e.poses.dtype)
    dv = np.empty(4 * vote, e.poses.dtype)
    quadratic = np.empty(4 * lanes, e.poses.dtype)
    polynomial = np.empty(4 * lanes, e.poses.dtype)
    r = np.empty(4 * lanes, e.poses.dtype)
    g = np.empty(4 * lanes, e.poses.dtype)
    sum_da = np.empty(4 * lanes, e.poses.dtype)
    task = next_task(counter)
    while task < tasks:
        first, part = task // parts * types, task % parts
        last = min(first + types, B)
        images = e.images * part // parts, e.images * (part + 1) // parts
        for parent in range(images[0] * P * e.blocks, images[1] * P * e.blocks):
            n, p, block = parent // (P * e.blocks), parent // e.blocks % P, parent % e.blocks
            for s in range(S):
                c = e.children[p * S + s]
                if c < 0:
                    continue
                for b in range(first, last, 4):
                    count = min(4, last - b)
                    child = (n * e.children_count + c) * B + b
                    weight = ((e.weight_of[s] * e.blocks + block) * B + b) * vote
                    for j in range(count):
                        clear_1(sum_da, j * lanes)
                        if kinds[-1] != UNIFORM:
                            clear_16(dv, j * vote)
                    for t in range(len(kinds) - 1, -1, -1):
                        rows = (t * e.images * P * e.blocks + parent) * ITERATION * lanes
                        group = ((t * e.images + n) * e.groups + e.group_of[p * S + s]) * B + b
                        if not same_mean[t]:
                            for j in range(count):
                                deviations(
                                    d, j * vote, e.poses, (child + j) * 16, e.weight, weight + j * vote,
                                    e.offset, 4 * s, iterations, rows,
                                )  # fmt: skip
                        clear_4(quadratic, 0)
                        clear_4(polynomial, 0)
                        if kinds[t] == UNIFORM:
                            for h in range(0, vote, 4 * lanes):
                                if count == 4:
                                    set_uniform_vote_gradient_4(
                                        dv, h, polynomial, 0, d, h, iterations, rows + h,
                                        log_sum, group, e.activations, child,
                                    )  # fmt: skip
                                else:
                                    for j in range(count):
                                        set_uniform_vote_gradient_1(
                                            dv, j * vote + h, polynomial, j * lanes, d, j * vote + h,
                                            iterations, rows + h, log_sum, group + j, e.activations, child + j,
                                        )  # fmt: skip
                            for j in range(count):
                                add_uniform_assignment_gradient_1(
                                    sum_da, j * lanes, polynomial, j * lanes, iterations, rows, log_sum, group + j
                                )
                        elif count == 4:
                            for h in range(0, vote, 4 * lanes):
                                add_likelihood_and_gradient_4(quadratic, 0, polynomial, 0, d, h, iterations, rows + h)
                            assign_4(
                                r, 0, g, 0, sum_da, 0, quadratic, 0, polynomial, 0, iterations, rows,
                                log_sum, group, slope, group, e.activations, child, variable, 2 * t,
                            )  # fmt: skip
                            for h in range(0, vote, 4 * lanes):
                                add_vote_gradient_4(dv, h, d, h, r, 0, g, 0, iterations, rows + h)
                        else:
                            for j in range(count):
                                row = j * lanes
                                for h in range(0, vote, 4 * lanes):
                                    add_likelihood_and_gradient_1(
                                        quadratic, row, polynomial, row, d, j * vote + h, iterations, rows + h
                                    )
                                assign_1(
                                    r, row, g, row, sum_da, row, quadratic, row, polynomial, row, iterations, rows,
                                    log_sum, group + j, slope, group + j, e.activations, child + j, variable, 2 * t,
                                )  # fmt: skip
                                for h in range(0, vote, 4 * lanes):
                                    at = j * vote + h
                                    add_vote_gradient_1(dv, at, d, at, r, row, g, row, iterations, rows + h)
                    if needs_children:
                        for j in range(count):
                            add_pose_gradient(dM, (child + j) * 16, dv, j * vote, e.weight, weight + j * vote)
                            add_lanes_1(da, child + j, sum_da, j * lanes)
                    if needs_weight:
                        at = part * e.weights * e.blocks * B * vote + weight
                        for j in range(count):
                            add_weight_gradient(dW, at + j * vote, dv, j * vote, e.poses, (child + j) * 16)
        task = next_task(counter)
