"""The tables of a routing map, in the form that kernels read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 4  # int32 numbers, 16 bytes: all tables have this alignment, so that Triton compiles a kernel only once


class Tables(NamedTuple):
    """The routing map on one device. A pair (p, s) of a parent location and its slot has the number p * S + s.

    P parent locations have S slots each. L is the number of child locations, E the number of edges: pairs with a child.
    The host computes all tables and copies them to a device once. Kernels, CUDA graphs and streams only read them.
    """

    children: Tensor  # int32 [P, S]: child location that feeds parent location p at slot s, or -1
    weight_of: Tensor  # int32 [S]: the weight block that slot s uses
    offset: Tensor  # float64 [S, 4]: coordinate addition: slot s adds it to the right-hand column of its votes
    parents_start: Tensor  # int32 [L + 1]: the pairs of child location c are parents_pair[start[c]:start[c + 1]]
    parents_pair: Tensor  # int32 [E]: pairs p * S + s, ascending for each child
    offset32: Tensor  # float32 [S, 4]: the same
    orders: Tensor  # int32: the fields of `Orders`, concatenated


class Orders(NamedTuple):
    """The pairs in the different orders in which kernels read them: int32 views of `Tables.orders`."""

    parent: Tensor  # [E]  in the order of parents_pair
    slot: Tensor  # [E]
    weight_child: Tensor  # [E]  in the order of weight blocks
    weight_parent: Tensor  # [E]
    weight_slot: Tensor  # [E]
    edge_parent: Tensor  # [P S]  of all pairs, also of those without a child
    edge_slot: Tensor  # [P S]
    numbers: Tensor  # [max(L, P S + 1)]: 0, 1, 2, ...
    weight_start: Tensor  # [K + 1]: the pairs that use weight block k are weight_start[k]:weight_start[k + 1]


def make_tables(children: Tensor, weight_of: Tensor, offset: Tensor, start: Tensor, pair: Tensor) -> Tables:
    """Compute all tables, on the host."""
    slots = children.shape[1]
    parent, slot = pair // slots, pair % slots
    weight, order = weight_of[slot].sort(stable=True)
    edges = torch.arange(children.numel())
    orders = Orders(
        parent,
        slot,
        children.flatten()[pair][order],
        parent[order],
        slot[order],
        edges // slots,
        edges % slots,
        torch.arange(max(len(start) - 1, len(edges) + 1)),
        torch.searchsorted(weight, torch.arange(int(weight_of.max()) + 2)),
    )
    padded = [torch.cat([part, part.new_zeros(-len(part) % ALIGNMENT)]) for part in orders[:-1]]
    together = torch.cat([*padded, orders.weight_start]).int()
    return Tables(children.int(), weight_of.int(), offset.double(), start.int(), pair.int(), offset.float(), together)


def offset_of(tables: Tables, dtype: torch.dtype) -> Tensor:
    """The offset in the dtype of the arithmetic."""
    return tables.offset if dtype == torch.float64 else tables.offset32


def orders_of(tables: Tables) -> Orders:
    """Views of the tables: this copies no data and launches no kernel."""
    edges, joined, locations = tables.children.numel(), len(tables.parents_pair), len(tables.parents_start) - 1
    sizes = [*[joined] * 5, edges, edges, max(locations, edges + 1)]
    padded = [size + -size % ALIGNMENT for size in sizes]
    *parts, weight_start = tables.orders.split([*padded, len(tables.orders) - sum(padded)])
    parts = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    return Orders._make([*parts, weight_start])
