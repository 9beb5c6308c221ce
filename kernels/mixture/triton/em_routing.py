"""The protocol of `tritoncaps.kernels.mixture.iteration`, launched on the three views."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritoncaps.kernels.common.tables import Tables
from tritoncaps.kernels.common.triton.launching import ALL_REGISTERS, blocks
from tritoncaps.kernels.mixture.iteration import Fit, History
from tritoncaps.kernels.mixture.triton import child_view, parents, weight_view
from tritoncaps.kernels.mixture.triton.config import ADDED_SPLITS, NUMBERS
from tritoncaps.kernels.mixture.triton.launch import Edges, arithmetic, launch, make_edges
from tritoncaps.kernels.mixture.triton.parent_view import parent_view_kernel

ENTRIES = 16  # pose entries that one launch holds in registers


def edges(poses: Tensor, activations: Tensor, weight: Tensor, tables: Tables, competition: str) -> Edges:
    """Pack the inputs of a call: poses [N, B, L, 16], activations [N, B, L], weight [K, B, C, 4, 4]."""
    return make_edges(
        tables,
        competition,
        arithmetic(poses, activations, weight),
        (poses.shape[0], *weight.shape[1:3]),
        poses.permute(0, 2, 3, 1).contiguous(),
        weight,
        None,
        activations.transpose(1, 2).contiguous(),
    )


def statistics_shape(images: int, locations: int, types: int, dtype: torch.dtype) -> tuple[int, ...]:
    return images, locations, parents.statistics_rows(ENTRIES), types


def slopes_shape(images: int, locations: int, types: int, dtype: torch.dtype) -> tuple[int, ...]:
    return images, locations, parents.slopes_rows(ENTRIES), types


def log_sums_shape(images: int, groups: int, types: int) -> tuple[int, ...]:
    return images, groups, types


da_shape = log_sums_shape


def first_m_step(edges: Edges, fit: Fit, out: Tensor) -> None:
    """Statistics of votes that are shared equally."""
    m_step(edges, fit, None, None, out)


def em_step(edges: Edges, fit: Fit, before: Tensor, log_sum: Tensor, out: Tensor) -> None:
    """log_sum [N, G, B], and statistics of the votes with the assignments that follow from it."""
    child_log_sum(edges, before, log_sum)
    m_step(edges, fit, before, log_sum, out)


def m_step(edges: Edges, fit: Fit, before: Tensor | None, log_sum: Tensor | None, out: Tensor) -> None:
    """Statistics of the votes with weights r_ij = R_ij a_i; R is uniform if nothing came before."""
    weights = "uniform" if before is None else "assignment"
    moments = empty_moments(edges)
    sum_moments(edges, weights, moments, p_statistics=before, p_log_sum=log_sum)
    parents.fit(moments, before, fit, out)


def child_log_sum(edges: Edges, statistics: Tensor, out: Tensor) -> None:
    """out [N, G, B]: the logarithm of the E-step's denominator."""
    child_sum(edges, child_view.log_sum_kernel, out, p_statistics=statistics, H=parents.entries_of(statistics))


def outputs(edges: Edges, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Poses [N, P, 16, C] and activations [N, P, C]."""
    return parents.outputs(statistics)


def output_slopes(edges: Edges, fit: Fit, history: History, grad_poses: Tensor, grad_activations: Tensor) -> None:
    """The slopes of the last M-step."""
    grads = {"p_grad_mean": grad_poses.contiguous(), "p_grad_activation": grad_activations.contiguous()}
    parents.slopes(history.statistics[-1], _before(history, -1), fit, history.slopes[-1], **grads)


def child_assignment_gradient(edges: Edges, history: History, t: int) -> None:
    """da_i = sum_j R_ij G_ij over the parents that compete for i."""
    child_sum(
        edges, child_view.assignment_gradient_kernel, history.da[t - 1], p_slopes=history.slopes[t], **_soft(history, t)
    )


def slopes_before(edges: Edges, fit: Fit, history: History, t: int) -> None:
    """The slopes of iteration t - 1, from the moments of iteration t's votes with weights dl_ij."""
    child_assignment_gradient(edges, history, t)
    moments = empty_moments(edges)
    sum_moments(edges, "gradient", moments, p_slopes=history.slopes[t], p_da=history.da[t - 1], **_soft(history, t))
    found, before = history.statistics[t - 1], _before(history, t - 1)
    parents.slopes(found, before, fit, history.slopes[t - 1], p_moments=moments)


def child_and_weight_gradient(
    edges: Edges, history: History, since: int, needs_children: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dL/dM [N, B, L, 4, 4], dL/da [N, B, L] and dL/dW [K, B, C, 4, 4]; None where not needed."""
    iterations = {
        **{"p_dV": None, "p_statistics": history.statistics, "p_slopes": history.slopes},
        **{"p_log_sums": history.log_sums, "p_da": history.da, "T": len(history.statistics), "ALL": since == 0},
    }
    grad_poses = grad_activations = grad_weight = None
    if needs_children:
        children = child_gradient(edges, **iterations)  # types are fastest
        grad_poses, grad_activations = (x.movedim(-1, 1) for x in children)
        grad_poses = grad_poses.unflatten(3, (4, 4))
    if needs_weight:
        grad_weight = weight_gradient(edges, **iterations)
    return grad_poses, grad_activations, grad_weight


def beta_gradients(edges: Edges, history: History, since: int) -> tuple[Tensor, Tensor]:
    """dL/dbeta_u and dL/dbeta_a, [C]."""
    return parents.beta_gradients(history.slopes[since:])


def _before(history: History, t: int) -> Tensor | None:
    """The statistics before iteration t."""
    t %= len(history.statistics)
    return history.statistics[t - 1] if t else None


def _soft(history: History, t: int) -> dict[str, Any]:
    """What iteration t's assignments follow from."""
    return {"p_statistics": history.statistics[t - 1], "p_log_sum": history.log_sums[t - 1]}


def empty_moments(edges: Edges, entries: int = ENTRIES) -> Tensor:
    """What the parent view writes: [splits, N, P, 2 entries + 1, C]."""
    sizes = edges.sizes
    return edges.empty(edges.config.parent_splits, sizes["N"], sizes["P"], 2 * entries + 1, sizes["C"])


def sum_moments(edges: Edges, weights: str, out: Tensor, i_h: int = 0, **given: Tensor | None) -> None:
    """Launch the parent view: rows of at most 16 pose entries from i_h on."""
    sizes, tile, splits = edges.sizes, edges.config.parent, edges.config.parent_splits
    absent = dict.fromkeys(("p_statistics", "p_slopes", "p_log_sum", "p_da", "p_weights"))
    entries = out.shape[3] // 2
    launch(
        parent_view_kernel,
        blocks(sizes["N"], tile.BN) * blocks(sizes["C"], tile.BC) * sizes["P"] * splits,
        tile,
        edges,
        **{**absent, **given},
        p_out=out,
        H=entries,
        i_h=i_h,
        steps=blocks(sizes["S"] * blocks(sizes["B"], tile.BB), splits),
        WEIGHTS=weights,
        COUNT=min(entries - i_h, ENTRIES),
    )


def child_sum(edges: Edges, kernel: object, out: Tensor, **given: Any) -> None:
    """Launch a kernel of the child view that writes a number for each child of each group: out [N, G, B]."""
    sizes, tile = edges.sizes, edges.config.child
    child, start, parent, slot = edges.groups
    groups = {"p_group_child": child, "p_group_start": start, "p_pair_parent": parent, "p_pair_slot": slot}
    programs = blocks(sizes["N"], tile.BN) * blocks(sizes["B"], tile.BB) * sizes["G"]
    launch(kernel, programs, tile, edges, **groups, **given, p_out=out)


def child_gradient(edges: Edges, **iterations: Any) -> tuple[Tensor, Tensor]:
    """dM [N, L, 16, B] and da [N, L, B]."""
    sizes, tile = edges.sizes, edges.config.gradient
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
    """dW [K, B, C, 4, 4]."""
    assert edges.weight is not None
    sizes, tile = edges.sizes, edges.config.gradient
    K, B, _, C = edges.weight.shape
    pair_splits = edges.config.pair_splits
    image_splits = max(1, min(edges.config.image_splits, blocks(sizes["N"], tile.BN)))
    partial = edges.empty(pair_splits * image_splits, K, B, ENTRIES, C)
    _, _, start, child, parent, slot = edges.pairs
    launch(
        weight_view.weight_view_kernel,
        blocks(B, tile.BB) * blocks(C, tile.BC) * K * len(partial),
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
        options = {"BLOCK_SPLITS": ADDED_SPLITS, "BLOCK": NUMBERS, **ALL_REGISTERS}
        grid = (blocks(out.numel(), NUMBERS),)
        weight_view.add_splits_kernel[grid](partial, out, out.numel(), len(partial), C=C, **options)
    return out
