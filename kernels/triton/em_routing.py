"""The protocol of `tritoncaps.kernels.em_routing`, launched on the three views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tritoncaps.kernels.em_routing import Gaussian, Iteration, Moments
from tritoncaps.kernels.triton import child_view, config
from tritoncaps.kernels.triton.parent_view import parent_view_kernel
from tritoncaps.kernels.triton.splits import add_splits
from tritoncaps.kernels.triton.weight_view import weight_view_kernel
from tritoncaps.routing_map import Tables


class Pairs(NamedTuple):
    """The joined pairs of a map, in two orders. All are int32."""

    parent: Tensor  # [pairs]  in the order of Tables.parents_pair
    slot: Tensor  # [pairs]
    weight_start: Tensor  # [K + 1]  the pairs that use weight block k, in the arrays below
    weight_child: Tensor  # [pairs]
    weight_parent: Tensor  # [pairs]
    weight_slot: Tensor  # [pairs]


class Groups(NamedTuple):
    """The parents that compete for a child: group g owns pairs start[g] to start[g + 1]. All are int32."""

    child: Tensor  # [G]  child location, or -1
    start: Tensor  # [G + 1]
    parent: Tensor  # [pairs]
    slot: Tensor  # [pairs]


class Edges(NamedTuple):
    """The inputs of a call, as kernels read them."""

    poses: Tensor  # [N, L, 16, B]
    activations: Tensor  # [N, L, B]
    weight: Tensor  # [K, B, 16, C]
    offset: Tensor  # [S, 4]
    tables: Tables
    pairs: Pairs
    groups: Groups
    local: bool
    dtype: torch.dtype  # of the arithmetic and of all that is not an input
    config: config.Config

    @property
    def sizes(self) -> dict[str, int]:
        N, L, _, B = self.poses.shape
        P, S = self.tables.children.shape
        return {
            "N": N,
            "L": L,
            "P": P,
            "S": S,
            "B": B,
            "C": self.weight.shape[3],
            "G": len(self.groups.child),
        }

    def empty(self, *shape: int) -> Tensor:
        return self.poses.new_empty(shape, dtype=self.dtype)


def edges(poses: Tensor, activations: Tensor, weight: Tensor, tables: Tables, competition: str) -> Edges:
    """Pack the inputs of a call: poses [N, L, 16, B], activations [N, L, B], weight [K, B, C, 4, 4]."""
    K, B, C, _, _ = weight.shape
    P, S = tables.children.shape
    dtype = torch.float64 if poses.dtype == torch.float64 else torch.float32
    pairs = _pairs(tables, K)
    return Edges(
        poses.contiguous(),
        activations.contiguous(),
        weight.reshape(K, B, C, 16).transpose(2, 3).contiguous(),
        tables.offset.to(dtype),
        tables,
        pairs,
        _local_groups(tables) if competition == "local" else _global_groups(tables, pairs),
        competition == "local",
        dtype,
        config.choose(P, S, B, C, K, len(pairs.slot)),
    )


def parent_moments(edges: Edges, gaussian: Gaussian | None, log_sum: Tensor | None) -> Moments:
    """Moments with weights r_ij = R_ij a_i; without a Gaussian R is uniform."""
    if gaussian is not None:
        return _moments(edges, "assignment", gaussian.mean, gaussian.precision, gaussian.constant, log_sum)
    # any centre near the mean keeps the variance from cancelling: the mean of the first slot's votes
    rough = _moments(edges, "first", None)
    centre = rough.first / rough.total.where(rough.total > 0, 1)[:, :, None]
    return _moments(edges, "uniform", centre)


def parent_gradient_moments(edges: Edges, iteration: Iteration) -> Moments:
    """Moments with weights dl_ij = r_ij (G_ij - da_i)."""
    (mean, precision, constant), log_sum, A, B, C, da = iteration
    return _moments(edges, "gradient", mean, precision, constant, log_sum, A, B, C, da)


def child_log_sum(edges: Edges, gaussian: Gaussian) -> Tensor:
    """[N, G, B]: the logarithm of the E-step's denominator."""
    return _child_sum(edges, child_view.log_sum_kernel, *gaussian)


def child_assignment_gradient(edges: Edges, iteration: Iteration) -> Tensor:
    """[N, G, B]: da_i = sum_j R_ij G_ij over the parents that compete for i."""
    gaussian, log_sum, A, B, C, _ = iteration
    return _child_sum(edges, child_view.assignment_gradient_kernel, *gaussian, log_sum, A, B, C)


def child_gradient(edges: Edges, iterations: Sequence[Iteration]) -> tuple[Tensor, Tensor]:
    """dL/dM [N, L, 16, B] and dL/da [N, L, B]."""
    sizes, tile = edges.sizes, edges.config.child_gradient
    grad_poses = edges.empty(*edges.poses.shape)
    grad_activations = edges.empty(*edges.activations.shape)
    _launch(
        child_view.child_gradient_kernel,
        _blocks(sizes["N"], tile.BN) * _blocks(sizes["B"], tile.BB) * sizes["L"],
        tile,
        *(edges.poses, edges.activations, edges.weight, edges.tables.weight_of, edges.offset),
        *(edges.tables.parents_start, edges.pairs.parent, edges.pairs.slot),
        *_stack(iterations),
        *(grad_poses, grad_activations),
        **sizes,
        T=len(iterations),
        n_soft=_soft(iterations),
        LOCAL=edges.local,
    )
    return grad_poses, grad_activations


def weight_gradient(edges: Edges, iterations: Sequence[Iteration]) -> Tensor:
    """dL/dW [K, B, C, 4, 4]."""
    sizes, tile = edges.sizes, edges.config.weight
    K, B, _, C = edges.weight.shape
    pair_splits = edges.config.pair_splits
    image_splits = max(1, min(edges.config.image_splits, _blocks(sizes["N"], tile.BN)))
    splits = pair_splits * image_splits
    partial = edges.empty(splits, K, B, 16, C)
    _launch(
        weight_view_kernel,
        _blocks(B, tile.BB) * _blocks(C, tile.BC) * K * splits,
        tile,
        *(edges.poses, edges.activations, edges.weight, edges.offset),
        *edges.pairs[2:],
        *_stack(iterations),
        partial,
        **sizes,
        K=K,
        T=len(iterations),
        n_soft=_soft(iterations),
        LOCAL=edges.local,
        pair_splits=pair_splits,
        image_splits=image_splits,
    )
    return add_splits(partial).transpose(2, 3).reshape(K, B, C, 4, 4)


def _moments(
    edges: Edges,
    weights: str,
    mean: Tensor | None,
    precision: Tensor | None = None,
    constant: Tensor | None = None,
    log_sum: Tensor | None = None,
    A: Tensor | None = None,
    B: Tensor | None = None,
    C: Tensor | None = None,
    da: Tensor | None = None,
) -> Moments:
    sizes, tile = edges.sizes, edges.config.parent
    N, P, types = sizes["N"], sizes["P"], sizes["C"]
    splits = 1 if weights == "first" else edges.config.parent_splits
    partial = edges.empty(splits, N, P, 33, types)
    _launch(
        parent_view_kernel,
        _blocks(N, tile.BN) * _blocks(types, tile.BC) * P * splits,
        tile,
        *(edges.poses, edges.activations, edges.weight),
        *(edges.tables.children, edges.tables.weight_of, edges.offset, edges.tables.parents_start),
        *_contiguous(mean, precision, constant, log_sum, A, B, C, da),
        partial,
        **sizes,
        steps=_blocks(sizes["S"] * _blocks(sizes["B"], tile.BB), splits),
        WEIGHTS=weights,
        LOCAL=edges.local,
    )
    moments = add_splits(partial)
    centre = torch.zeros_like(moments[:, :, :16]) if mean is None else mean
    return Moments(moments[:, :, 32], moments[:, :, :16], moments[:, :, 16:32], centre)


def _child_sum(edges: Edges, kernel: object, *parents_and_children: Tensor) -> Tensor:
    sizes, tile = edges.sizes, edges.config.child
    out = edges.empty(sizes["N"], sizes["G"], sizes["B"])
    _launch(
        kernel,
        _blocks(sizes["N"], tile.BN) * _blocks(sizes["B"], tile.BB) * sizes["G"],
        tile,
        *(edges.poses, edges.activations, edges.weight, edges.tables.weight_of, edges.offset),
        *edges.groups,
        *_contiguous(*parents_and_children),
        out,
        **{name: size for name, size in sizes.items() if name != "S"},
    )
    return out


def _launch(
    kernel: object, programs: int, tile: config.Tile, *pointers: Tensor | None, **numbers: object
) -> None:
    """Every program of a kernel; nothing if there is nothing to do."""
    if programs:
        kernel[(programs,)](*pointers, **numbers, **tile._asdict())  # type: ignore[index]


def _stack(iterations: Sequence[Iteration]) -> tuple[Tensor, ...]:
    """[T, ...] of every array of the iterations, in the order of the kernels' arguments."""
    rows = []
    for (mean, precision, constant), log_sum, A, B, C, da in iterations:
        da = torch.zeros_like(log_sum) if da is None else da
        rows.append((mean, precision, constant, log_sum, A, B, C, da))
    return tuple(torch.stack(column).contiguous() for column in zip(*rows, strict=True))


def _soft(iterations: Sequence[Iteration]) -> int:
    """How many iterations pass a gradient on to their assignments: the first ones."""
    return sum(iteration.da is not None for iteration in iterations)


def _contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _pairs(tables: Tables, num_weights: int) -> Pairs:
    """The pairs of a map, made once."""
    if tables.parents_pair not in _cache:
        num_slots = tables.children.shape[1]
        parent, slot = tables.parents_pair // num_slots, tables.parents_pair % num_slots
        weight, order = tables.weight_of[slot.long()].sort(stable=True)
        blocks = torch.arange(num_weights + 1, dtype=torch.int32, device=weight.device)
        child = tables.children.reshape(-1)[tables.parents_pair.long()]
        start = torch.searchsorted(weight, blocks).int()
        _cache[tables.parents_pair] = Pairs(parent, slot, start, child[order], parent[order], slot[order])
    return _cache[tables.parents_pair]


def _global_groups(tables: Tables, pairs: Pairs) -> Groups:
    """A group for each child location."""
    child = torch.arange(len(tables.parents_start) - 1, dtype=torch.int32, device=pairs.slot.device)
    return Groups(child, tables.parents_start, pairs.parent, pairs.slot)


def _local_groups(tables: Tables) -> Groups:
    """A group for each slot of each parent location, with one pair."""
    P, S = tables.children.shape
    pair = torch.arange(P * S + 1, dtype=torch.int32, device=tables.children.device)
    return Groups(tables.children.reshape(-1), pair, pair // S, pair % S)


def _blocks(size: int, block: int) -> int:
    return -(-size // block)
