"""Python functions that launch the views on the edges of a call; each view is a kernel or a few."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tritoncaps.kernels.common.triton import plans
from tritoncaps.kernels.common.triton.launching import OPTIONS, blocks
from tritoncaps.kernels.mixture.triton import child_view, parents, weight_view
from tritoncaps.kernels.mixture.triton.config import ADDED_SPLITS, NUMBERS, Tile
from tritoncaps.kernels.mixture.triton.launch import Edges, launch
from tritoncaps.kernels.mixture.triton.parent_view import parent_view_kernel
from tritoncaps.kernels.mixture.triton.rows import TYPES, moments_rows, type_blocks

ENTRIES = 16  # pose entries that one launch holds in registers


def empty_moments(edges: Edges, entries: int = ENTRIES) -> Tensor:
    """Empty moments [splits, N, P, blocks, 1 + 2 entries, 16], the output of the parent view."""
    N, P, C = (edges.sizes[name] for name in "NPC")
    return edges.empty(edges.config.parent_splits, N, P, type_blocks(C), moments_rows(entries), TYPES.value)


def sum_moments(
    edges: Edges, weights: str, out: Tensor, i_h: int = 0, any_fit: bool = False, **given: Tensor | None
) -> None:
    """Launch the parent view: it writes the moments of the pose entries i_h to i_h + 15 (or fewer) to `out`.

    `weights` is the kernel's WEIGHTS, and `given` has the tensors that these weights need.
    """
    config, sizes, splits = edges.config, edges.sizes, edges.config.parent_splits
    tile = config.forward if weights in ("uniform", "assignment") else config.parent
    absent = dict.fromkeys(("p_statistics", "p_slopes", "p_log_sum", "p_da", "p_weights"))
    entries = out.shape[-2] // 2
    launch(
        parent_view_kernel,
        blocks(sizes["N"], tile.BN) * type_blocks(sizes["C"]) * sizes["P"] * splits,
        tile,
        edges,
        **{**absent, **given},
        p_out=out,
        H=entries,
        i_h=i_h,
        steps=blocks(sizes["S"] * blocks(sizes["B"], tile.BB), splits),
        WEIGHTS=weights,
        COUNT=min(entries - i_h, ENTRIES),
        ANY_FIT=any_fit,
    )


def child_sum(edges: Edges, kernel: object, out: Tensor, **given: Any) -> None:
    """Launch a kernel of the child view that writes one number for each group and child type: out [N, G, B], or
    [N, G, B, blocks, 16] if only positions compete."""
    sizes, tile = edges.sizes, edges.config.child
    child, start, parent, slot = edges.groups
    groups = {"p_group_child": child, "p_group_start": start, "p_pair_parent": parent, "p_pair_slot": slot}
    programs = blocks(sizes["N"], tile.BN) * blocks(sizes["B"], tile.BB) * sizes["G"]
    programs *= type_blocks(sizes["C"]) if edges.by_type else 1
    launch(kernel, programs, tile, edges, **groups, **given, p_out=out)


def child_log_sum(edges: Edges, statistics: Tensor, out: Tensor) -> None:
    """out [N, G, B]: log_sum_i = log sum_j exp(l_ij), the logarithm of the denominator of the E-step."""
    child_sum(edges, child_view.log_sum_kernel, out, p_statistics=statistics, H=parents.entries_of(statistics))


def child_assignment_gradient(
    edges: Edges, statistics: Tensor, log_sum: Tensor, slopes: Tensor, out: Tensor, any_fit: bool = False
) -> None:
    """out [N, G, B]: da_i = sum_j R_ij G_ij over the parents that compete for i."""
    given = {"p_statistics": statistics, "p_log_sum": log_sum, "p_slopes": slopes, "ANY_FIT": any_fit}
    child_sum(edges, child_view.assignment_gradient_kernel, out, **given)


def sweep(
    edges: Edges, needs_children: bool, needs_weight: bool, **iterations: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dL/dM [N, B, L, 4, 4], dL/da [N, B, L] and dL/dW [K, B, C, 4, 4]; None for those that are not needed."""
    grad_poses = grad_activations = grad_weight = None
    if needs_children:
        children = child_gradient(edges, p_dV=None, **iterations)  # in memory, types are the last axis
        grad_poses, grad_activations = (x.movedim(-1, 1) for x in children)
        grad_poses = grad_poses.unflatten(3, (4, 4))
    if needs_weight:
        grad_weight = weight_gradient(edges, p_dV=None, **iterations)
    return grad_poses, grad_activations, grad_weight


def _sweep_tile(edges: Edges, stored: Tensor | None) -> Tile:
    return edges.config.gradient if stored is None else edges.config.stored


def child_gradient(edges: Edges, **iterations: Any) -> tuple[Tensor, Tensor]:
    """dM [N, L, 16, B] and da [N, L, B]; da is not written if `iterations` has p_dV."""
    sizes, tile = edges.sizes, _sweep_tile(edges, iterations["p_dV"])
    N, L, B = sizes["N"], sizes["L"], sizes["B"]
    grad_poses, grad_activations = edges.empty(N, L, ENTRIES, B), edges.empty(N, L, B)
    launch(
        child_view.child_gradient_kernel,
        blocks(N, tile.BN) * blocks(B, tile.BB) * L,
        tile,
        edges,
        **iterations,
        p_pair_parent=edges.pairs.parent,
        p_pair_slot=edges.pairs.slot,
        p_grad_poses=grad_poses,
        p_grad_activations=grad_activations,
    )
    return grad_poses, grad_activations


def weight_gradient(edges: Edges, **iterations: Any) -> Tensor:
    """dW [K, B, C, 4, 4]: the weight view writes a partial sum for each split, and a second kernel adds them."""
    assert edges.weight is not None
    sizes, tile = edges.sizes, _sweep_tile(edges, iterations["p_dV"])
    (K, B, *block), C = edges.weight.shape, sizes["C"]
    pair_splits = edges.config.pair_splits
    image_splits = max(1, min(edges.config.image_splits, blocks(sizes["N"], tile.BN)))
    partial = edges.empty(pair_splits * image_splits, K, B, *block)
    pairs = edges.pairs
    start, child, parent, slot = pairs.weight_start, pairs.weight_child, pairs.weight_parent, pairs.weight_slot
    launch(
        weight_view.weight_view_kernel,
        blocks(B, tile.BB) * type_blocks(C) * K * len(partial),
        tile,
        edges,
        **iterations,
        **{"p_weight_start": start, "p_pair_child": child, "p_pair_parent": parent, "p_pair_slot": slot},
        p_out=partial,
        K=K,
        pair_splits=pair_splits,
        image_splits=image_splits,
    )
    out = edges.empty(K, B, C, 4, 4)
    if out.numel():
        size = edges.weight.numel()
        arguments = {"p_partial": partial, "p_out": out, "size": size, "splits": len(partial), "C": C}
        arguments |= {"BLOCK_SPLITS": ADDED_SPLITS, "BLOCK": NUMBERS}
        plans.launch(weight_view.add_splits_kernel, blocks(size, NUMBERS), arguments, OPTIONS)
    return out
