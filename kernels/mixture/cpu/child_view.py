"""The child view: assignments and their gradient, for the children of a few types in one image.

    l_ij = log-likelihood        R_ij = exp(l_ij - greatest_i) / sum_i        da_i = sum_j R_ij G_ij

The softmax of a child does not depend on other child types. So the view computes rows [blocks, edges, lanes] for a few
child types at a time: a vector for each edge and each block of parent types. They stay in the L2 cache until the parent
view has used them. The weights of a block stay in the L1 cache, because blocks are the outer loop. Sums over a group
are first vectors, whose lanes are added for `lanes` groups at a time. If only positions compete, each lane is a sum of
its own: then a child location has a group for each block, and a group has `lanes` numbers instead of one (`e.width`).

`n` is an image, `b` the first child type and `types` their number.
"""

from __future__ import annotations

import numpy as np

from tritoncaps.kernels.common.cpu.compiling import kernel, part
from tritoncaps.kernels.mixture.cpu.layout import Edge, Slope, Statistic
from tritoncaps.kernels.mixture.cpu.votes import (
    add_products,
    add_products_of_types,
    assignments,
    assignments_of_types,
    exponentials,
    exponentials_of_types,
    fill,
    gradient_weights,
    gradient_weights_of_types,
    greatest_of_lanes,
    inverse,
    likelihoods,
    likelihoods_and_gradients,
    scale,
    scale_types,
    sum_of_lanes,
)

STATISTICS, SLOPES = Statistic.ROWS, Slope.ROWS
CHILD, GROUP, NUMBERS = Edge.CHILD, Edge.GROUP, Edge.NUMBERS


@kernel
def new_sums(e):  # type: ignore[no-untyped-def]
    """Memory of a task: sums [groups, lanes], an array [groups, width] and one [groups]. Groups are padded to whole
    vectors."""
    groups = -(-e.together * max(e.groups, e.children_count) // e.lanes) * e.lanes
    numbers = groups * e.width
    return np.empty(groups * e.lanes, e.poses.dtype), np.empty(numbers, e.poses.dtype), np.empty(groups, e.poses.dtype)


@part
def edges_of(e, p, types):  # type: ignore[no-untyped-def]
    """The edges of a parent location from `types` child types: the first, and the one after the last."""
    first = e.start[p] * e.together
    return first, first + (e.start[p + 1] - e.start[p]) * types


@part
def weights_of_tile(e, weights, n, b):  # type: ignore[no-untyped-def]
    """Where the weights of gradients (`layout.weights_count`) of an image and a tile [2, blocks, edges, lanes] are: the
    first element, and the one after the last. Both are the same if the array does not have the image."""
    tiles, size = -(-e.child_types // e.together), 2 * e.blocks * e.together * e.edges_count * e.lanes
    start = (n * tiles + b // e.together) * size
    return (start, start + size) if start + size <= len(weights) else (0, 0)


@part
def uniform_weights(e, n, b, types, r):  # type: ignore[no-untyped-def]
    """r [blocks, edges, lanes] = share a: weights for uniform assignments."""
    lanes, step, children = e.lanes, e.together * e.edges_count * e.lanes, (n * e.child_types + b) * e.children_count
    for p in range(e.parents_count):
        first, last = edges_of(e, p, types)
        for edge in range(first, last):
            child, group = children + e.edges[edge * NUMBERS + CHILD], e.edges[edge * NUMBERS + GROUP]
            fill(r, edge * lanes, e.share, group, e.activations, child, e.blocks, step)


@part
def assignment_weights(e, n, b, types, r, sums, greatest, total, statistics, log_sum):  # type: ignore[no-untyped-def]
    """r [blocks, edges, lanes] = R a, and log_sum [2, N, B, G, width]: greatest l and 1 / sum exp(l - greatest); from
    statistics [N, P, blocks, 36, lanes]."""
    lanes, step, children = e.lanes, e.together * e.edges_count * e.lanes, (n * e.child_types + b) * e.children_count
    kept, numbers = (n * e.child_types + b) * e.groups * e.width, types * e.groups * e.width
    sums[:] = np.finfo(e.poses.dtype).min
    for block in range(e.blocks):
        for p in range(e.parents_count):
            first, last = edges_of(e, p, types)
            likelihoods(
                r, block * step + first * lanes, sums, block * lanes if e.width > 1 else 0, e.poses, children * 16,
                e.weight, (block * e.child_types + b) * e.weights * 16 * lanes, e.offset, 0,
                statistics, ((n * e.parents_count + p) * e.blocks + block) * STATISTICS * lanes,
                e.edges, first * NUMBERS, last - first,
            )  # fmt: skip
    if e.width > 1:
        _normalise_types(e, types, children, r, sums, greatest)
        total = sums
    else:
        _normalise(e, types, children, r, sums, greatest, total)
    for i in range(numbers):
        log_sum[kept + i] = greatest[i]
        log_sum[len(log_sum) // 2 + kept + i] = total[i]


@part
def _normalise(e, types, children, r, sums, greatest, total):  # type: ignore[no-untyped-def]
    """In place: r = R a replaces l. `sums` [groups, lanes] are the greatest l of each lane; `greatest` and `total`
    [groups] become the greatest l and 1 / sum exp(l - greatest)."""
    lanes, step, groups = e.lanes, e.together * e.edges_count * e.lanes, types * e.groups
    for g in range(0, groups, lanes):
        greatest_of_lanes(greatest, g, sums, g * lanes)
    sums[:] = 0
    for p in range(e.parents_count):
        first, last = edges_of(e, p, types)
        for edge in range(first, last):
            g = e.edges[edge * NUMBERS + GROUP]
            exponentials(r, edge * lanes, sums, g * lanes, greatest, g, e.blocks, step)
    for g in range(0, groups, lanes):
        sum_of_lanes(total, g, sums, g * lanes)
        inverse(total, g)
    for p in range(e.parents_count):
        first, last = edges_of(e, p, types)
        for edge in range(first, last):
            child, group = children + e.edges[edge * NUMBERS + CHILD], e.edges[edge * NUMBERS + GROUP]
            scale(r, edge * lanes, total, group, e.activations, child, e.blocks, step)


@part
def _normalise_types(e, types, children, r, sums, greatest):  # type: ignore[no-untyped-def]
    """In place: r = R a replaces l; the same for each lane by itself. `sums` [groups, lanes] are the greatest l, and
    become 1 / sum exp(l - greatest), with `greatest` [groups, lanes]."""
    lanes, step = e.lanes, e.together * e.edges_count * e.lanes
    for i in range(len(sums)):
        greatest[i], sums[i] = sums[i], 0
    for p in range(e.parents_count):
        first, last = edges_of(e, p, types)
        for edge in range(first, last):
            row = e.edges[edge * NUMBERS + GROUP] * lanes
            exponentials_of_types(r, edge * lanes, sums, row, greatest, row, e.blocks, step)
    for row in range(0, types * e.groups * lanes, lanes):
        inverse(sums, row)
    for p in range(e.parents_count):
        first, last = edges_of(e, p, types)
        for edge in range(first, last):
            child, row = children + e.edges[edge * NUMBERS + CHILD], e.edges[edge * NUMBERS + GROUP] * lanes
            scale_types(r, edge * lanes, sums, row, e.activations, child, e.blocks, step)


@part
def assignments_and_gradient(e, n, b, types, R, G, statistics, slopes, log_sum):  # type: ignore[no-untyped-def]
    """R and G [blocks, edges, lanes] of an iteration, from the previous statistics and its slopes [N, P, blocks, 67,
    lanes]."""
    lanes, step = e.lanes, e.together * e.edges_count * e.lanes
    children, kept = (n * e.child_types + b) * e.children_count, (n * e.child_types + b) * e.groups
    for block in range(e.blocks):
        for p in range(e.parents_count):
            first, last = edges_of(e, p, types)
            out, parent = block * step + first * lanes, ((n * e.parents_count + p) * e.blocks + block) * lanes
            likelihoods_and_gradients(
                R, out, G, out, e.poses, children * 16,
                e.weight, (block * e.child_types + b) * e.weights * 16 * lanes, e.offset, 0,
                statistics, parent * STATISTICS, slopes, parent * SLOPES,
                e.edges, first * NUMBERS, last - first,
            )  # fmt: skip
    for p in range(e.parents_count):
        first, last = edges_of(e, p, types)
        for edge in range(first, last):
            greatest = (kept + e.edges[edge * NUMBERS + GROUP]) * e.width
            total = len(log_sum) // 2 + greatest
            if e.width > 1:
                assignments_of_types(R, edge * lanes, log_sum, greatest, log_sum, total, e.blocks, step)
            else:
                assignments(R, edge * lanes, log_sum, greatest, log_sum, total, e.blocks, step)


@part
def assignment_gradient(e, n, b, types, R, G, sums, joined, da):  # type: ignore[no-untyped-def]
    """da [N, B, G, width]: da_i = sum_j R_ij G_ij."""
    lanes, step = e.lanes, e.together * e.edges_count * e.lanes
    sums[:] = 0
    for p in range(e.parents_count):
        first, last = edges_of(e, p, types)
        for edge in range(first, last):
            row = e.edges[edge * NUMBERS + GROUP] * lanes
            if e.width > 1:
                add_products_of_types(sums, row, R, edge * lanes, G, edge * lanes, e.blocks, step)
            else:
                add_products(sums, row, R, edge * lanes, G, edge * lanes, e.blocks, step)
    if e.width > 1:
        joined = sums
    else:
        for g in range(0, types * e.groups, lanes):
            sum_of_lanes(joined, g, sums, g * lanes)
    first_number = (n * e.child_types + b) * e.groups * e.width
    for i in range(types * e.groups * e.width):
        da[first_number + i] = joined[i]


@part
def weights_of_gradient(e, n, b, types, R, G, da):  # type: ignore[no-untyped-def]
    """In place: r = R a replaces R, and dl = r (G - da) replaces G."""
    lanes, step, child_type = e.lanes, e.together * e.edges_count * e.lanes, n * e.child_types + b
    for p in range(e.parents_count):
        first, last = edges_of(e, p, types)
        for edge in range(first, last):
            child = child_type * e.children_count + e.edges[edge * NUMBERS + CHILD]
            group = (child_type * e.groups + e.edges[edge * NUMBERS + GROUP]) * e.width
            if e.width > 1:
                gradient_weights_of_types(
                    R, edge * lanes, G, edge * lanes, e.activations, child, da, group, e.blocks, step
                )
            else:
                gradient_weights(R, edge * lanes, G, edge * lanes, e.activations, child, da, group, e.blocks, step)
