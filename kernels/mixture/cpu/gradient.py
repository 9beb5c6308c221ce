"""The last sweep of the backward pass: the gradients of poses, activations and weight, of all iterations at once.

    dV_ij = sum_t r_ij (linear_j + 2 quadratic_j e) - 2 dl_ij precision_j d
    dl_ij = r_ij (G_ij - da_i), or 0 if R is a constant
    dM_i  = sum_j dV_ij W_ij^T
    da_i  = sum_t sum_j R_ij G_ij
    dW    = sum over images and locations of M_i^T dV_ij

The votes of a child type contribute only to gradients of that child type. A task owns a few child types of some images:
their dM and da, and a part of dW for these images. r and dl of all iterations are those that the moments of dl used, as
far as they were kept (`layout.weights_count`); for the other images, the child view computes them again. Then, parent
by parent, the sweep computes the gradients of the votes and uses them immediately. At the end another kernel adds the
parts of dW, whose number does not depend on threads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tritoncaps.kernels.common.cpu.arrays import array, scratch_array
from tritoncaps.kernels.common.cpu.compiling import kernel, part
from tritoncaps.kernels.common.cpu.tasks import first_task, next_task
from tritoncaps.kernels.mixture.cpu.child_view import (
    assignments_and_gradient,
    edges_of,
    new_sums,
    weights_of_gradient,
    weights_of_tile,
)
from tritoncaps.kernels.mixture.cpu.layout import MOST_KEPT, Call, Coefficient, Edge, Edges, Slope, Statistic, arrays
from tritoncaps.kernels.mixture.cpu.votes import (
    add_later_gradients,
    add_pose_gradients,
    add_weight_gradients,
    fill,
    first_coefficients,
    first_weights,
    join_pose_gradients,
    later_coefficients,
    sum_of_lanes,
    vote_gradients_0,
    vote_gradients_1,
    vote_gradients_2,
)
from tritoncaps.kernels.mixture.iteration import History

PARTS_TIMES_TYPES = 128  # approximate parts of the images times child types: enough tasks for many threads
PARTS_BYTES = 4 << 20  # limit for all parts of dW, if there are more than one

STATISTICS, SLOPES, MINUS_CENTRE = Statistic.ROWS, Slope.ROWS, Slope.MINUS_CENTRE
CHILD, GROUP, NUMBERS = Edge.CHILD, Edge.GROUP, Edge.NUMBERS
LATER, ROWS_OF_LATER = Coefficient.LATER, Coefficient.ROWS_OF_LATER


def child_and_weight_gradient(
    call: Call, history: History, since: int, needs_children: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dL/dM [N, B, L, 4, 4], dL/da [N, B, L] and dL/dW [K, B, C, 4, 4], None if not needed. They are filled
    when the plan runs."""
    edges, dtype = call.edges, call.dtype
    B, children = edges.child_types, (edges.images if needs_children else 0, edges.child_types, edges.children_count)
    dM, da = torch.empty(*children, 16, dtype=dtype), torch.empty(children, dtype=dtype)
    parts = _parts_of_images(edges)
    nothing = edges.weight[:0]
    dW = scratch_array("weight gradient", parts * len(edges.weight) if needs_weight else 0, dtype)
    call.plan.add(
        _gradient_kernel,
        parts * -(-B // edges.together),
        edges,
        parts,
        since,
        len(history.slopes),
        array(dM),
        array(da),
        dW,
        *(x.ravel() for x in arrays(call, history)),
        *[*call.weights, nothing, nothing][:MOST_KEPT],
        np.ones(1, edges.poses.dtype),
        needs_children,
        needs_weight,
    )
    grad_poses = grad_activations = grad_weight = None
    if needs_children:
        grad_poses, grad_activations = dM.unflatten(3, (4, 4)), da
    if needs_weight:
        grad_weight = torch.empty(edges.weights, B, edges.parent_types, 4, 4, dtype=dtype)
        call.plan.add(_add_parts_kernel, edges.weights * B, edges, parts, array(grad_weight), dW)
    return grad_poses, grad_activations, grad_weight


def _parts_of_images(edges: Edges) -> int:
    """Number of parts of dW. It depends only on sizes, because it determines the order of the sum over images."""
    affordable = max(1, PARTS_BYTES // max(1, edges.weight.nbytes))
    return min(edges.images, affordable, -(-PARTS_TIMES_TYPES // edges.child_types))


@kernel
def _gradient_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, parts, since, T, dM, da, dW, statistics, log_sums, slopes, mean_slopes, kept_1, kept_2, one,
    needs_children, needs_weight,
):  # fmt: skip
    """dM [N, B, L, 16], da [N, B, L] and dW [parts, blocks, B, K, 16, lanes]; see the formulas above.

    statistics [T, N, P, blocks, 36, lanes], slopes [T, N, P, blocks, 67, lanes], log_sums [T - 1, 2, N, B, G],
    mean_slopes (da of each iteration) [T - 1, N, B, G], kept_1 and kept_2: r and dl of the two iterations after the
    first (`layout.weights_count`) or empty, one [1]: the number 1. A task owns `together` child types of a part of the
    images.
    """
    B, lanes, vote = e.child_types, e.lanes, 16 * e.lanes
    first_rows = np.empty(2 * e.together * e.edges_count * e.blocks * lanes, e.poses.dtype)
    memory = np.empty((T - since - 1) * len(first_rows), e.poses.dtype)
    dv = np.empty(e.together * e.degree * vote, e.poses.dtype)
    dm = np.zeros(e.together * e.degree * vote, e.poses.dtype)  # `join_pose_gradients` sums lanes, sets it to 0
    coefficients = np.empty((LATER + (T - since - 1) * ROWS_OF_LATER) * lanes, e.poses.dtype)
    sums, joined, _ = new_sums(e)
    task = first_task(counter, tasks)
    while task < tasks:
        b, part = task // parts * e.together, task % parts
        types = min(e.together, B - b)
        for block in range(e.blocks if needs_weight else 0):
            row = ((part * e.blocks + block) * B + b) * e.weights * vote
            dW[row : row + types * e.weights * vote] = 0
        for n in range(e.images * part // parts, e.images * (part + 1) // parts):
            children = (n * B + b) * e.children_count
            if needs_children:
                dM[children * 16 : (children + types * e.children_count) * 16] = 0
            start, stop = weights_of_tile(e, kept_1, n, b)
            rows_1, rows_2 = kept_1[start:stop], kept_2[start:stop]
            if start == stop:
                rows_1, rows_2 = memory[: len(first_rows)], memory[len(first_rows) :]
                _later_weights(e, n, b, types, since, T, memory, statistics, log_sums, slopes, mean_slopes)
            _first_weights(e, n, b, types, since, first_rows, statistics, log_sums, slopes, one)
            sums[:] = 0
            for p in range(e.parents_count):
                first, last = edges_of(e, p, types)
                edge, count = first * NUMBERS, last - first
                for block in range(e.blocks):
                    weight = (block * B + b) * e.weights * vote
                    _coefficients(e, n, p, block, since, T, coefficients, statistics, slopes)
                    _vote_gradients(
                        e, n, b, p, block, types, since, T, dv, sums, coefficients, first_rows, rows_1, rows_2, slopes
                    )
                    if needs_weight:
                        own = part * len(e.weight) + weight
                        add_weight_gradients(dW, own, dv, 0, e.poses, children * 16, e.edges, edge, count)
                    if needs_children:
                        add_pose_gradients(dm, 0, dv, 0, e.weight, weight, e.edges, edge, count)
                if needs_children:
                    join_pose_gradients(dM, children * 16, dm, 0, e.edges, edge, count)
            if needs_children:
                _set_activations(e, n, b, types, since, T, sums, joined, da, mean_slopes)
        task = next_task(counter, tasks)


@part
def _first_weights(e, n, b, types, since, rows, statistics, log_sums, slopes, one):  # type: ignore[no-untyped-def]
    """rows [2, blocks, edges, lanes]: r and R of the first iteration that gradients reach."""
    lanes, step = e.lanes, e.together * e.edges_count * e.lanes
    parents, groups = e.images * e.parents_count * e.blocks * lanes, 2 * e.images * e.child_types * e.groups * e.width
    r, R = rows[: e.blocks * step], rows[e.blocks * step :]
    if since > 0:
        before = statistics[(since - 1) * parents * STATISTICS : since * parents * STATISTICS]
        slope = slopes[since * parents * SLOPES : (since + 1) * parents * SLOPES]
        # R is a constant: its gradient G, which r replaces below, is not used
        assignments_and_gradient(e, n, b, types, R, r, before, slope, log_sums[(since - 1) * groups : since * groups])
    for p in range(e.parents_count):
        first, last = edges_of(e, p, types)
        for edge in range(first, last):
            child = (n * e.child_types + b) * e.children_count + e.edges[edge * NUMBERS + CHILD]
            if since == 0:
                fill(R, edge * lanes, e.share, e.edges[edge * NUMBERS + GROUP], one, 0, e.blocks, step)
            first_weights(r, edge * lanes, R, edge * lanes, e.activations, child, e.blocks, step)


@part
def _later_weights(  # type: ignore[no-untyped-def]
    e, n, b, types, since, T, rows, statistics, log_sums, slopes, mean_slopes
):
    """rows [T - since - 1, 2, blocks, edges, lanes]: r and dl of the iterations after the first."""
    size = e.blocks * e.together * e.edges_count * e.lanes
    parents, groups = e.images * e.parents_count * e.blocks * e.lanes, e.images * e.child_types * e.groups * e.width
    for t in range(since + 1, T):
        start = 2 * (t - since - 1) * size
        r, dl = rows[start : start + size], rows[start + size : start + 2 * size]
        before = statistics[(t - 1) * parents * STATISTICS : t * parents * STATISTICS]
        slope = slopes[t * parents * SLOPES : (t + 1) * parents * SLOPES]
        assignments_and_gradient(e, n, b, types, r, dl, before, slope, log_sums[(t - 1) * 2 * groups : t * 2 * groups])
        weights_of_gradient(e, n, b, types, r, dl, mean_slopes[(t - 1) * groups : t * groups])


@part
def _coefficients(e, n, p, block, since, T, coefficients, statistics, slopes):  # type: ignore[no-untyped-def]
    """The coefficients (see `Coefficient`) of a block of types of a parent."""
    parents, parent = e.images * e.parents_count * e.blocks, (n * e.parents_count + p) * e.blocks + block
    own = (since * parents + parent) * SLOPES * e.lanes
    first_coefficients(coefficients, 0, slopes, own)
    for later in range(T - since - 1):
        t = since + 1 + later
        later_coefficients(
            coefficients, (LATER + later * ROWS_OF_LATER) * e.lanes,
            statistics, ((t - 1) * parents + parent) * STATISTICS * e.lanes,
            slopes, own + MINUS_CENTRE * e.lanes, slopes, (t * parents + parent) * SLOPES * e.lanes,
        )  # fmt: skip


@part
def _vote_gradients(  # type: ignore[no-untyped-def]
    e, n, b, p, block, types, since, T, dv, sums, coefficients, first_rows, rows_1, rows_2, slopes
):
    """dv [edges, 16, lanes] of the votes of a few child types for a block of types of a parent; sums [types, L, lanes]
    += R G of the first iteration. first_rows, rows_1 and rows_2 are those of the first three iterations; those of all
    others follow rows_2."""
    lanes, step = e.lanes, e.together * e.edges_count * e.lanes
    first, last = edges_of(e, p, types)
    edge, count = first * NUMBERS, last - first
    parents = e.images * e.parents_count * e.blocks
    parent = since * parents + (n * e.parents_count + p) * e.blocks + block
    centre = (parent * SLOPES + MINUS_CENTRE) * lanes
    poses = (n * e.child_types + b) * e.children_count * 16
    weight = (block * e.child_types + b) * e.weights * 16 * lanes
    row, size = block * step + first * lanes, e.blocks * step
    if T - since == 1:
        vote_gradients_0(
            dv, 0, sums, 0, e.poses, poses, e.weight, weight, e.offset, 0, slopes, centre,
            coefficients, 0, first_rows, row, rows_1, row, rows_2, row, e.edges, edge, count, size,
        )  # fmt: skip
    elif T - since == 2:
        vote_gradients_1(
            dv, 0, sums, 0, e.poses, poses, e.weight, weight, e.offset, 0, slopes, centre,
            coefficients, 0, first_rows, row, rows_1, row, rows_2, row, e.edges, edge, count, size,
        )  # fmt: skip
    else:
        vote_gradients_2(
            dv, 0, sums, 0, e.poses, poses, e.weight, weight, e.offset, 0, slopes, centre,
            coefficients, 0, first_rows, row, rows_1, row, rows_2, row, e.edges, edge, count, size,
        )  # fmt: skip
    for later in range(2, T - since - 1):
        add_later_gradients(
            dv, 0, e.poses, poses, e.weight, weight, e.offset, 0, slopes, centre,
            coefficients, (LATER + later * ROWS_OF_LATER) * lanes, rows_2, row + 2 * (later - 1) * size,
            e.edges, edge, count, size,
        )  # fmt: skip


@part
def _set_activations(e, n, b, types, since, T, sums, joined, da, mean_slopes):  # type: ignore[no-untyped-def]
    """da [N, B, L] = sums [types, L, lanes] of the first iteration + mean_slopes of the others."""
    children, lanes, child_type = types * e.children_count, e.lanes, n * e.child_types + b
    for c in range(0, children, lanes):
        sum_of_lanes(joined, c, sums, c * lanes)
    for t in range(since, T - 1):
        groups = (t * e.images * e.child_types + child_type) * e.groups * e.width
        if e.width > 1:
            for c in range(children):
                for i in range(e.blocks * lanes):
                    joined[c] += mean_slopes[groups + c * e.blocks * lanes + i]
        elif e.groups == e.children_count:
            for c in range(children):
                joined[c] += mean_slopes[groups + c]
        else:
            for p in range(e.parents_count):
                first, last = edges_of(e, p, types)
                for edge in range(first, last):
                    at = edge * NUMBERS
                    joined[e.edges[at + CHILD]] += mean_slopes[groups + e.edges[at + GROUP]]
    for c in range(children):
        da[child_type * e.children_count + c] = joined[c]


@kernel
def _add_parts_kernel(counter, tasks, e, parts, out, dW):  # type: ignore[no-untyped-def]
    """out [K, B, C, 16] = the sum over the parts of dW [parts, blocks, B, K, 16, lanes]. A task owns a child type of a
    weight block."""
    B, C, lanes, vote = e.child_types, e.parent_types, e.lanes, 16 * e.lanes
    total = np.empty(vote, e.poses.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        k, b = task // B, task % B
        for block in range(e.blocks):
            total[:] = 0
            for of_images in range(parts):
                row = (((of_images * e.blocks + block) * B + b) * e.weights + k) * vote
                for i in range(vote):
                    total[i] += dW[row + i]
            for lane in range(min(lanes, C - block * lanes)):
                for h in range(16):
                    out[(task * C + block * lanes + lane) * 16 + h] = total[h * lanes + lane]
        task = next_task(counter, tasks)
