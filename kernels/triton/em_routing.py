"""The protocol of `tritoncaps.kernels.em_routing`, launched on the three views."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritoncaps.kernels.em_routing import Gaussian, Iteration, Moments
from tritoncaps.kernels.triton import child_view
from tritoncaps.kernels.triton.config import blocks
from tritoncaps.kernels.triton.launch import Edges, arithmetic, contiguous, launch, make_edges
from tritoncaps.kernels.triton.parent_view import parent_view_kernel
from tritoncaps.kernels.triton.splits import add_splits, merge_moments
from tritoncaps.kernels.triton.weight_view import weight_view_kernel
from tritoncaps.routing_map import Tables

ENTRIES = 16  # pose entries that one launch holds in registers


def edges(poses: Tensor, activations: Tensor, weight: Tensor, tables: Tables, competition: str) -> Edges:
    """Pack the inputs of a call: poses [N, L, 16, B], activations [N, L, B], weight [K, B, C, 4, 4]."""
    return make_edges(
        tables,
        competition,
        arithmetic(poses, activations, weight),
        (poses.shape[0], *weight.shape[1:3]),
        poses.contiguous(),
        weight,
        None,
        activations.contiguous(),
    )


def parent_moments(edges: Edges, gaussian: Gaussian | None, log_sum: Tensor | None) -> Moments:
    """Moments with weights r_ij = R_ij a_i; without a Gaussian R is uniform."""
    if gaussian is None:
        return moments(edges, "uniform")
    return moments(edges, "assignment", gaussian.mean, gaussian.precision, gaussian.constant, log_sum)


def parent_gradient_moments(edges: Edges, iteration: Iteration) -> Moments:
    """Moments with weights dl_ij = r_ij (G_ij - da_i)."""
    (mean, precision, constant), log_sum, A, B, C, da, shift = iteration
    return moments(edges, "gradient", mean, precision, constant, log_sum, A, B, C, shift, da, about_mean=False)


def child_log_sum(edges: Edges, gaussian: Gaussian) -> Tensor:
    """[N, G, B]: the logarithm of the E-step's denominator."""
    return child_sum(
        edges,
        child_view.log_sum_kernel,
        *(edges.poses, edges.weight, edges.votes, edges.activations, edges.tables.weight_of, edges.offset),
        *edges.groups,
        *contiguous(*gaussian),
        H=gaussian.mean.shape[2],
    )


def child_assignment_gradient(edges: Edges, iteration: Iteration) -> Tensor:
    """[N, G, B]: da_i = sum_j R_ij G_ij over the parents that compete for i."""
    gaussian, log_sum, A, B, C, _, shift = iteration
    return child_sum(
        edges,
        child_view.assignment_gradient_kernel,
        *(edges.poses, edges.weight, edges.activations, edges.tables.weight_of, edges.offset),
        *edges.groups,
        *contiguous(*gaussian, log_sum, A, B, C, shift),
    )


def child_gradient(edges: Edges, iterations: Sequence[Iteration]) -> tuple[Tensor, Tensor]:
    """dL/dM [N, L, 16, B] and dL/da [N, L, B]."""
    return children_from_votes(edges, None, _stack(iterations), len(iterations), _soft(iterations))


def weight_gradient(edges: Edges, iterations: Sequence[Iteration]) -> Tensor:
    """dL/dW [K, B, C, 4, 4]."""
    return weight_from_votes(edges, None, _stack(iterations), len(iterations), _soft(iterations))


def child_and_weight_gradient(edges: Edges, iterations: Sequence[Iteration]) -> tuple[Tensor, Tensor, Tensor]:
    """All three, packing the iterations once."""
    packed = _stack(iterations), len(iterations), _soft(iterations)
    return *children_from_votes(edges, None, *packed), weight_from_votes(edges, None, *packed)


def moments(
    edges: Edges,
    weights: str,
    mean: Tensor | None = None,
    precision: Tensor | None = None,
    constant: Tensor | None = None,
    log_sum: Tensor | None = None,
    A: Tensor | None = None,
    B: Tensor | None = None,
    C: Tensor | None = None,
    shift: Tensor | None = None,
    da: Tensor | None = None,
    stored: Tensor | None = None,
    i_h: int = 0,
    count: int = ENTRIES,
    about_mean: bool = True,
) -> Moments:
    """What the parent view sums, of `count` pose entries from i_h on."""
    sizes, tile, splits = edges.sizes, edges.config.parent, edges.config.parent_splits
    partial = edges.empty(splits, sizes["N"], sizes["P"], 2 * count + 1, sizes["C"])
    launch(
        parent_view_kernel,
        blocks(sizes["N"], tile.BN) * blocks(sizes["C"], tile.BC) * sizes["P"] * splits,
        tile,
        *(edges.poses, edges.weight, edges.votes, edges.activations),
        *(edges.tables.children, edges.tables.weight_of, edges.offset, edges.tables.parents_start),
        *contiguous(mean, precision, constant, log_sum, A, B, C, shift, da, stored),
        partial,
        **sizes,
        H=count if edges.votes is None else edges.votes.shape[4],
        i_h=i_h,
        steps=blocks(sizes["S"] * blocks(sizes["B"], tile.BB), splits),
        WEIGHTS=weights,
        LOCAL=edges.local,
        COUNT=count,
        ABOUT_MEAN=about_mean,
    )
    sums = merge_moments(partial) if about_mean else add_splits(partial)
    first, second, total = sums.split((count, count, 1), dim=2)
    if not about_mean:
        return Moments(total[:, :, 0], first, second, mean)
    centre = first if mean is None else mean + first
    return Moments(
        total[:, :, 0], torch.zeros((), dtype=first.dtype, device=first.device).expand_as(first), second, centre
    )


def child_sum(edges: Edges, kernel: object, *pointers: Tensor | None, **numbers: object) -> Tensor:
    """[N, G, B]: what a kernel of the child view sums in each group."""
    sizes, tile = edges.sizes, edges.config.child
    out = edges.empty(sizes["N"], sizes["G"], sizes["B"])
    programs = blocks(sizes["N"], tile.BN) * blocks(sizes["B"], tile.BB) * sizes["G"]
    launch(kernel, programs, tile, *pointers, out, **sizes, **numbers)
    return out


def children_from_votes(
    edges: Edges, grad_votes: Tensor | None, packed: Sequence[Tensor | None], T: int, n_soft: int
) -> tuple[Tensor, Tensor]:
    """dM [N, L, 16, B] and da [N, L, B] from stored dV, or from packed iterations."""
    sizes, tile = edges.sizes, edges.config.gradient
    N, L, B = sizes["N"], sizes["L"], sizes["B"]
    grad_poses, grad_activations = edges.empty(N, L, ENTRIES, B), edges.empty(N, L, B)
    launch(
        child_view.child_gradient_kernel,
        blocks(N, tile.BN) * blocks(B, tile.BB) * L,
        tile,
        *(edges.poses, edges.weight, edges.activations, grad_votes, edges.tables.weight_of, edges.offset),
        *(edges.tables.parents_start, edges.pairs.parent, edges.pairs.slot),
        *packed,
        *(grad_poses, grad_activations),
        **sizes,
        T=T,
        n_soft=n_soft,
        LOCAL=edges.local,
    )
    return grad_poses, grad_activations


def weight_from_votes(
    edges: Edges, grad_votes: Tensor | None, packed: Sequence[Tensor | None], T: int, n_soft: int
) -> Tensor:
    """dW [K, B, C, 4, 4] from stored dV, or from packed iterations."""
    assert edges.weight is not None
    sizes, tile = edges.sizes, edges.config.gradient
    K, B, _, C = edges.weight.shape
    pair_splits = edges.config.pair_splits
    image_splits = max(1, min(edges.config.image_splits, blocks(sizes["N"], tile.BN)))
    partial = edges.empty(pair_splits * image_splits, K, B, ENTRIES, C)
    launch(
        weight_view_kernel,
        blocks(B, tile.BB) * blocks(C, tile.BC) * K * len(partial),
        tile,
        *(edges.poses, edges.weight, edges.activations, grad_votes, edges.offset),
        *edges.pairs[2:],
        *packed,
        partial,
        **sizes,
        K=K,
        T=T,
        n_soft=n_soft,
        pair_splits=pair_splits,
        image_splits=image_splits,
        LOCAL=edges.local,
    )
    return add_splits(partial).transpose(2, 3).reshape(K, B, C, 4, 4)


def _stack(iterations: Sequence[Iteration]) -> tuple[Tensor, ...]:
    """[T, ...] of every array of the iterations, in the order of the kernels' arguments."""
    rows = []
    for gaussian, log_sum, A, B, C, da, shift in iterations:
        rows.append((*gaussian, log_sum, A, B, C, shift, torch.zeros_like(log_sum) if da is None else da))
    return tuple(torch.stack(column).contiguous() for column in zip(*rows, strict=True))


def _soft(iterations: Sequence[Iteration]) -> int:
    """How many iterations pass a gradient on to their assignments: the first ones."""
    return sum(iteration.da is not None for iteration in iterations)
