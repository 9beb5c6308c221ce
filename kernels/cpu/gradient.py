"""The last sweep of the backward pass: the gradients of poses, activations and weight, of all iterations at once.

    dV_ij = sum_t r_ij (B_j + 2 C_j e) - 2 dl_ij precision_j d,   dl_ij = r_ij (G_ij - da_i), or 0 if R is a constant
    dM_i  = sum_j dV_ij W_ij^T
    da_i  = sum_t sum_j R_ij G_ij
    dW    = sum over images and locations of M_i^T dV_ij

Everything that a child type's votes add to belongs to that child type: a task owns a child type of some images, in dM, da
and in its images' part of dW. The child view finds r and dl of all iterations; then, parent by parent, the votes'
gradients are made and used at once. The parts, whose number does not depend on threads, are added at the end.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tritoncaps.kernels.cpu.child_view import assignments_and_gradient, edges_of, new_sums, weights_of_gradient
from tritoncaps.kernels.cpu.compiling import kernel, part
from tritoncaps.kernels.cpu.layout import Edge, Edges, Slope, Statistic, array
from tritoncaps.kernels.cpu.simd import next_task
from tritoncaps.kernels.cpu.threads import run
from tritoncaps.kernels.cpu.votes import (
    add_pose_gradient,
    add_products_of_polynomial,
    add_vote_gradient,
    add_weight_gradient,
    fill,
    join_pose_gradient,
    scale,
    set_deviations,
    set_vote_gradient,
    sum_of_lanes,
)
from tritoncaps.kernels.cpu.workspace import scratch
from tritoncaps.kernels.em_routing import History

PARTS_TIMES_TYPES = 128  # parts of the images times child types, about: enough tasks for many threads
PARTS_BYTES = 4 << 20  # that all parts of dW may take, if they are more than one

STATISTICS, SLOPES = Statistic.ROWS, Slope.ROWS
CHILD, WEIGHT, GROUP, NUMBERS = Edge.CHILD, Edge.WEIGHT, Edge.GROUP, Edge.NUMBERS


def child_and_weight_gradient(
    edges: Edges, history: History, since: int, needs_children: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dL/dM [N, B, L, 4, 4], dL/da [N, B, L] and dL/dW [K, B, C, 4, 4]; None where not needed."""
    dtype = history.statistics.dtype
    B, children = edges.child_types, (edges.images if needs_children else 0, edges.child_types, edges.children_count)
    dM, da = torch.zeros(*children, 16, dtype=dtype), torch.empty(children, dtype=dtype)
    parts = _parts_of_images(edges)
    dW = scratch(
        "weight gradient", (parts if needs_weight else 0, B, edges.blocks, edges.weights, 16, edges.lanes), dtype
    )
    run(
        _gradient_kernel,
        parts * B,
        edges,
        parts,
        since,
        len(history.statistics),
        array(dM),
        array(da),
        array(dW),
        *map(array, history),
        array(torch.ones(1, dtype=dtype)),
        needs_children,
        needs_weight,
    )
    grad_poses = grad_activations = grad_weight = None
    if needs_children:
        grad_poses, grad_activations = dM.unflatten(3, (4, 4)), da
    if needs_weight:
        grad_weight = torch.empty(edges.weights, B, edges.parent_types, 4, 4, dtype=dtype)
        run(_add_parts_kernel, edges.weights * B, edges, parts, array(grad_weight), array(dW))
    return grad_poses, grad_activations, grad_weight


def _parts_of_images(edges: Edges) -> int:
    """In how many parts dW is summed. Depends on sizes only, because it decides the order of the sum over images."""
    affordable = max(1, PARTS_BYTES // max(1, edges.weight.nbytes))
    return min(edges.images, affordable, -(-PARTS_TIMES_TYPES // edges.child_types))


@kernel
def _gradient_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, parts, since, T, dM, da, dW, statistics, log_sums, slopes, mean_slopes, one,
    needs_children, needs_weight,
):  # fmt: skip
    """dM [N, B, L, 16], zero at first, da [N, B, L] and dW [parts, B, blocks, K, 16, lanes], from

    statistics [T, N, P, blocks, 36, lanes], slopes [T, N, P, blocks, 51, lanes], log_sums [T - 1, 2, N, B, G],
    mean_slopes (da of an iteration) [T - 1, N, B, G], and one, the number.
    """
    B, lanes = e.child_types, e.lanes
    rows = np.empty((T - since) * 2 * e.together * e.edges_count * e.blocks * lanes, e.poses.dtype)
    work = np.empty((3 * 16 + 1) * e.degree * lanes, e.poses.dtype)
    work[:] = 0  # dM by lanes is cleared when it is joined
    sums, joined, _ = new_sums(e)
    own = e.weights * e.blocks * 16 * lanes
    task = next_task(counter)
    while task < tasks:
        b, part = task // parts, task % parts
        of_type = dW[(part * B + b) * own : (part * B + b + 1) * own]
        of_type[:] = 0
        for n in range(e.images * part // parts, e.images * (part + 1) // parts):
            _weights_of_votes(e, n, b, since, T, rows, statistics, log_sums, slopes, mean_slopes, one)
            sums[:] = 0
            for p in range(e.parents_count):
                for block in range(e.blocks):
                    _vote_gradient(e, n, b, p, block, since, T, work, sums, rows, statistics, slopes)
                    _add_to_gradients(e, n, b, p, block, work, of_type, needs_children, needs_weight)
                if needs_children:
                    _join_children(e, n, b, p, work, dM)
            if needs_children:
                _set_activations(e, n, b, since, T, sums, joined, da, mean_slopes)
        task = next_task(counter)


@part
def _weights_of_votes(  # type: ignore[no-untyped-def]
    e, n, b, since, T, rows, statistics, log_sums, slopes, mean_slopes, one
):
    """rows [T - since, 2, edges, blocks, lanes]: r and R of the first iteration, r and dl of the others."""
    size, row = e.together * e.edges_count * e.blocks * e.lanes, e.blocks * e.lanes
    parents, groups = e.images * e.parents_count * e.blocks * e.lanes, e.images * e.child_types * e.groups
    for t in range(since, T):
        first = rows[(t - since) * 2 * size : ((t - since) * 2 + 1) * size]
        second = rows[((t - since) * 2 + 1) * size : (t - since + 1) * 2 * size]
        if t > 0:
            before = statistics[(t - 1) * parents * STATISTICS : t * parents * STATISTICS]
            slope = slopes[t * parents * SLOPES : (t + 1) * parents * SLOPES]
            log_sum = log_sums[(t - 1) * 2 * groups : t * 2 * groups]
            assignments_and_gradient(e, n, b, 1, first, second, before, slope, log_sum)
        if t > since:
            weights_of_gradient(e, n, b, 1, first, second, mean_slopes[(t - 1) * groups : t * groups])
            continue
        for p in range(e.parents_count):
            begin, end = edges_of(e, p, 1)
            for edge in range(begin, end):
                child = (n * e.child_types + b) * e.children_count + e.edges[edge * NUMBERS + CHILD]
                if t == 0:
                    fill(first, edge * row, e.share, e.edges[edge * NUMBERS + GROUP], one, 0, e.blocks)
                for i in range(edge * row, (edge + 1) * row):
                    second[i] = first[i]
                scale(first, edge * row, e.activations, child, one, 0, e.blocks)


@part
def _vote_gradient(e, n, b, p, block, since, T, work, sums, rows, statistics, slopes):  # type: ignore[no-untyped-def]
    """dV of the votes of a child type for a block of types of a parent, in `work`; sums [L, lanes] += R G of `since`."""
    lanes, vote, step = e.lanes, 16 * e.lanes, e.blocks * e.lanes
    begin, end = edges_of(e, p, 1)
    d, dv, polynomial, count = 0, e.degree * vote, 3 * e.degree * vote, end - begin
    parents = e.images * e.parents_count * e.blocks
    parent = (n * e.parents_count + p) * e.blocks + block
    base = (max(since - 1, 0) * parents + parent) * STATISTICS * lanes
    set_deviations(
        work, d, e.poses, (n * e.child_types + b) * e.children_count * 16,
        e.weight, (block * e.child_types + b) * e.weights * vote, e.offset, 0, statistics, base,
        e.edges, begin * NUMBERS, count,
    )  # fmt: skip
    for t in range(since, T):
        first = ((t - since) * 2 * e.together * e.edges_count + begin) * step + block * lanes
        second = first + e.together * e.edges_count * step
        here = (t * parents + parent) * STATISTICS * lanes
        slope = (t * parents + parent) * SLOPES * lanes
        if t == since:
            set_vote_gradient(
                work, dv, work, polynomial, work, d, rows, first, statistics, here, statistics, base, slopes, slope,
                count, step,
            )  # fmt: skip
            add_products_of_polynomial(
                sums, 0, rows, second, work, polynomial, slopes, slope, e.edges, begin * NUMBERS, count, step
            )
        else:
            before = ((t - 1) * parents + parent) * STATISTICS * lanes
            add_vote_gradient(
                work, dv, work, d, rows, first, rows, second, statistics, here, statistics, before, statistics, base,
                slopes, slope, count, step,
            )  # fmt: skip


@part
def _add_to_gradients(  # type: ignore[no-untyped-def]
    e, n, b, p, block, work, dW, needs_children, needs_weight
):
    """What a parent's votes give to dM, by lanes in `work`, and to dW [blocks, K, 16, lanes]."""
    vote = 16 * e.lanes
    begin, end = edges_of(e, p, 1)
    for edge in range(begin, end):
        dv, dm = (e.degree + edge - begin) * vote, (2 * e.degree + edge - begin) * vote
        k = e.edges[edge * NUMBERS + WEIGHT]
        if needs_weight:
            child = (n * e.child_types + b) * e.children_count + e.edges[edge * NUMBERS + CHILD]
            add_weight_gradient(dW, (block * e.weights + k) * vote, work, dv, e.poses, 16 * child)
        if needs_children:
            weight = ((block * e.child_types + b) * e.weights + k) * vote
            add_pose_gradient(work, dm, work, dv, e.weight, weight)


@part
def _join_children(e, n, b, p, work, dM):  # type: ignore[no-untyped-def]
    """dM [N, B, L, 16] += what a parent's blocks gave."""
    begin, end = edges_of(e, p, 1)
    for edge in range(begin, end):
        child = (n * e.child_types + b) * e.children_count + e.edges[edge * NUMBERS + CHILD]
        join_pose_gradient(dM, 16 * child, work, (2 * e.degree + edge - begin) * 16 * e.lanes)


@part
def _set_activations(e, n, b, since, T, sums, joined, da, mean_slopes):  # type: ignore[no-untyped-def]
    """da [N, B, L] from sums [L, lanes] of the first iteration and mean_slopes of the others."""
    L, lanes, child_type = e.children_count, e.lanes, n * e.child_types + b
    for c in range(0, L, lanes):
        sum_of_lanes(joined, c, sums, c * lanes)
    own = da[child_type * L : (child_type + 1) * L]
    for c in range(L):
        own[c] = joined[c]
    for t in range(since, T - 1):
        groups = (t * e.images * e.child_types + child_type) * e.groups
        if e.groups == L:
            for c in range(L):
                own[c] += mean_slopes[groups + c]
        else:
            for p in range(e.parents_count):
                begin, end = edges_of(e, p, 1)
                for edge in range(begin, end):
                    own[e.edges[edge * NUMBERS + CHILD]] += mean_slopes[groups + e.edges[edge * NUMBERS + GROUP]]


@kernel
def _add_parts_kernel(counter, tasks, e, parts, out, dW):  # type: ignore[no-untyped-def]
    """out [K, B, C, 16] from dW [parts, B, blocks, K, 16, lanes]; a task is a child type of a weight block."""
    B, C, lanes, vote = e.child_types, e.parent_types, e.lanes, 16 * e.lanes
    total = np.empty(vote, e.poses.dtype)
    task = next_task(counter)
    while task < tasks:
        k, b = task // B, task % B
        for block in range(e.blocks):
            total[:] = 0
            for of_images in range(parts):
                row = (((of_images * B + b) * e.blocks + block) * e.weights + k) * vote
                for i in range(vote):
                    total[i] += dW[row + i]
            for lane in range(min(lanes, C - block * lanes)):
                for h in range(16):
                    out[(task * C + block * lanes + lane) * 16 + h] = total[h * lanes + lane]
        task = next_task(counter)
