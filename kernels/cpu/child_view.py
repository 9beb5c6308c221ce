"""The child view: how the parents of a child share it, for all children of one type in one image.

    l_ij = log-likelihood        R_ij = exp(l_ij - greatest_i) / sum_i        da_i = sum_j R_ij G_ij

A child competes only within its own type, so everything that the softmax of a type needs fits into a row of `lanes`
numbers for each edge and block of parent types: rows [E, blocks, lanes], which stay in the cache until the parent view
has used them. Weights of a type stay in the first-level cache meanwhile. Sums over a group are kept by lanes, and joined
for `lanes` groups at a time.
"""

from __future__ import annotations

import numpy as np

from tritoncaps.kernels.cpu.compiling import kernel, part
from tritoncaps.kernels.cpu.layout import Edge, Slope, Statistic
from tritoncaps.kernels.cpu.votes import (
    add_products,
    assignments,
    exponentials,
    fill,
    gradient_weights,
    greatest_of_lanes,
    inverse,
    likelihood,
    likelihood_and_gradient,
    scale,
    sum_of_lanes,
)

STATISTICS, SLOPES = Statistic.ROWS, Slope.ROWS
CHILD, WEIGHT, SLOT, GROUP, NUMBERS = Edge.CHILD, Edge.WEIGHT, Edge.SLOT, Edge.GROUP, Edge.NUMBERS


@kernel
def new_sums(e):  # type: ignore[no-untyped-def]
    """Memory of a task, for as many groups as make whole vectors: sums by lanes [G, lanes], joined ones [G] and [G]."""
    groups = -(-max(e.groups, e.children_count) // e.lanes) * e.lanes
    return np.empty(groups * e.lanes, e.poses.dtype), np.empty(groups, e.poses.dtype), np.empty(groups, e.poses.dtype)


@part
def uniform_weights(e, n, b, r):  # type: ignore[no-untyped-def]
    """r [E, blocks, lanes] = share a: all parents have the same share."""
    row, children = e.blocks * e.lanes, (n * e.child_types + b) * e.children_count
    for edge in range(e.edges_count):
        at = edge * NUMBERS
        fill(r, edge * row, e.share, e.edges[at + GROUP], e.activations, children + e.edges[at + CHILD], e.blocks)


@part
def assignment_weights(e, n, b, r, sums, greatest, total, statistics, log_sum):  # type: ignore[no-untyped-def]
    """r [E, blocks, lanes] = R a, and log_sum [N, B, 2, G], from statistics [N, P, blocks, 36, lanes]."""
    row, G, lanes = e.blocks * e.lanes, e.groups, e.lanes
    child_type = n * e.child_types + b
    children = child_type * e.children_count
    sums[:] = np.finfo(e.poses.dtype).min
    for p in range(e.parents_count):
        for block in range(e.blocks):
            parent = ((n * e.parents_count + p) * e.blocks + block) * STATISTICS * lanes
            for edge in range(e.start[p], e.start[p + 1]):
                at = edge * NUMBERS
                weight = ((b * e.weights + e.edges[at + WEIGHT]) * e.blocks + block) * 16 * lanes
                likelihood(
                    r, edge * row + block * lanes, sums, e.edges[at + GROUP] * lanes,
                    e.poses, (children + e.edges[at + CHILD]) * 16, e.weight, weight,
                    e.offset, 4 * e.edges[at + SLOT], statistics, parent,
                )  # fmt: skip
    for g in range(0, G, lanes):
        greatest_of_lanes(greatest, g, sums, g * lanes)
    sums[:] = 0
    for edge in range(e.edges_count):
        g = e.edges[edge * NUMBERS + GROUP]
        exponentials(r, edge * row, sums, g * lanes, greatest, g, e.blocks)
    for g in range(0, G, lanes):
        sum_of_lanes(total, g, sums, g * lanes)
        inverse(total, g)
    for edge in range(e.edges_count):
        at = edge * NUMBERS
        scale(r, edge * row, total, e.edges[at + GROUP], e.activations, children + e.edges[at + CHILD], e.blocks)
    for g in range(G):
        log_sum[child_type * 2 * G + g] = greatest[g]
        log_sum[(child_type * 2 + 1) * G + g] = total[g]


@part
def assignments_and_gradient(e, n, b, R, G, statistics, slopes, log_sum):  # type: ignore[no-untyped-def]
    """R and G [E, blocks, lanes] of an iteration, from the statistics before it and its slopes [N, P, blocks, 51, lanes]."""
    row, lanes = e.blocks * e.lanes, e.lanes
    child_type = n * e.child_types + b
    for p in range(e.parents_count):
        for block in range(e.blocks):
            parent = (n * e.parents_count + p) * e.blocks + block
            for edge in range(e.start[p], e.start[p + 1]):
                at, out = edge * NUMBERS, edge * row + block * lanes
                weight = ((b * e.weights + e.edges[at + WEIGHT]) * e.blocks + block) * 16 * lanes
                likelihood_and_gradient(
                    R, out, G, out, e.poses, (child_type * e.children_count + e.edges[at + CHILD]) * 16, e.weight, weight,
                    e.offset, 4 * e.edges[at + SLOT], statistics, parent * STATISTICS * lanes,
                    slopes, parent * SLOPES * lanes,
                )  # fmt: skip
    for edge in range(e.edges_count):
        greatest = child_type * 2 * e.groups + e.edges[edge * NUMBERS + GROUP]
        assignments(R, edge * row, log_sum, greatest, log_sum, greatest + e.groups, e.blocks)


@part
def assignment_gradient(e, n, b, R, G, sums, joined, da):  # type: ignore[no-untyped-def]
    """da [N, B, G]: da_i = sum_j R_ij G_ij."""
    row, lanes = e.blocks * e.lanes, e.lanes
    sums[:] = 0
    for edge in range(e.edges_count):
        add_products(
            sums, e.edges[edge * NUMBERS + GROUP] * lanes, R, edge * row, G, edge * row, e.blocks
        )
    for g in range(0, e.groups, lanes):
        sum_of_lanes(joined, g, sums, g * lanes)
    for g in range(e.groups):
        da[(n * e.child_types + b) * e.groups + g] = joined[g]


@part
def weights_of_gradient(e, n, b, R, G, da):  # type: ignore[no-untyped-def]
    """In place: R becomes r = R a, and G becomes dl = r (G - da)."""
    row, child_type = e.blocks * e.lanes, n * e.child_types + b
    for edge in range(e.edges_count):
        at = edge * NUMBERS
        child, group = child_type * e.children_count + e.edges[at + CHILD], child_type * e.groups + e.edges[at + GROUP]
        gradient_weights(R, edge * row, G, edge * row, e.activations, child, da, group, e.blocks)
