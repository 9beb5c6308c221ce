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
    assignments,
    exponentials,
    fill,
    gradient_weights,
    greatest_of_lanes,
    inverse,
    likelihoods,
    likelihoods_and_gradients,
    scale,
    sum_of_lanes,
)

STATISTICS, SLOPES = Statistic.ROWS, Slope.ROWS
CHILD, GROUP, NUMBERS = Edge.CHILD, Edge.GROUP, Edge.NUMBERS


@kernel
def new_sums(e):  # type: ignore[no-untyped-def]
    """Memory of a task: sums [groups, lanes], and two arrays [groups, width]. Groups are padded to whole vectors."""
    groups = -(-e.together * max(e.groups, e.children_count) // e.lanes) * e.lanes
    numbers, dtype = groups * e.width, e.poses.dtype
    return np.empty(groups * e.lanes, dtype), np.empty(numbers, dtype), np.empty(numbers, dtype)


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
    _normalise(e, types, children, r, sums, greatest, total)
    for i in range(numbers):
        log_sum[kept + i] = greatest[i]
        log_sum[len(log_sum) // 2 + kept + i] = total[i]


@part
def _normalise(e, types, children, r, sums, greatest, total):  # type: ignore[no-untyped-def]
    """In place: r = R a replaces l. `sums` [groups, lanes] are the greatest l of each lane; `greatest` and `total`
    [groups, width] become the greatest l and 1 / sum exp(l - greatest)."""
    lanes, width, step, groups = e.lanes, e.width, e.together * e.edges_count * e.lanes, types * e.groups
    if width > 1:
        for i in range(groups * lanes):
            greatest[i] = sums[i]
    else:
        for g in range(0, groups, lanes):
            greatest_of_lanes(greatest, g, sums, g * lanes)
    sums[:] = 0
    for p in range(e.parents_count):
        first, last = edges_of(e, p, types)
        for edge in range(first, last):
            group = e.edges[edge * NUMBERS + GROUP]
            exponentials(r, edge * lanes, sums, group * lanes, greatest, group * width, e.blocks, step, width > 1)
    _sums_of_groups(e, groups, total, sums)
    for i in range(0, groups * width, lanes):
        inverse(total, i)
    for p in range(e.parents_count):
        first, last = edges_of(e, p, types)
        for edge in range(first, last):
            child, group = children + e.edges[edge * NUMBERS + CHILD], e.edges[edge * NUMBERS + GROUP]
            scale(r, edge * lanes, total, group * width, e.activations, child, e.blocks, step, width > 1)


@part
def _sums_of_groups(e, groups, out, sums):  # type: ignore[no-untyped-def]
    """out [groups, width] from the sums [groups, lanes] of each lane."""
    if e.width > 1:
        for i in range(groups * e.lanes):
            out[i] = sums[i]
    else:
        for g in range(0, groups, e.lanes):
            sum_of_lanes(out, g, sums, g * e.lanes)


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
            assignments(R, edge * lanes, log_sum, greatest, log_sum, total, e.blocks, step, e.width > 1)


@part
def assignment_gradient(e, n, b, types, R, G, sums, joined, da):  # type: ignore[no-untyped-def]
    """da [N, B, G, width]: da_i = sum_j R_ij G_ij."""
    lanes, step = e.lanes, e.together * e.edges_count * e.lanes
    sums[:] = 0
    for p in range(e.parents_count):
        first, last = edges_of(e, p, types)
        for edge in range(first, last):
            row = e.edges[edge * NUMBERS + GROUP] * lanes
            add_products(sums, row, R, edge * lanes, G, edge * lanes, e.blocks, step, e.width > 1)
    _sums_of_groups(e, types * e.groups, joined, sums)
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
            gradient_weights(
                R, edge * lanes, G, edge * lanes, e.activations, child, da, group, e.blocks, step, e.width > 1
            )
