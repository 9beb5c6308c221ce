"""The tables of a routing map, as kernels read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 4  # int32 numbers: 16 bytes, so that no kernel is compiled again for a table that begins elsewhere


class Tables(NamedTuple):
    """Which child feeds which parent, on one device. A pair is an edge, numbered p * S + s.

    P parent locations have S slots each; L are the child locations, E the edges. All tables are made on the host and
    copied to a device once, so that kernels, CUDA graphs and streams only read them.
    """

    children: Tensor  # int32 [P, S]: child location that feeds parent location p at slot s, or -1
    weight_of: Tensor  # int32 [S]: the weight block that slot s uses
    offset: Tensor  # float64 [S, 4]: what slot s adds to the right-hand column of its votes
    parents_start: Tensor  # int32 [L + 1]: the pairs of child location c are parents_pair[start[c]:start[c + 1]]
    parents_pair: Tensor  # int32 [E]: pairs p * S + s, ascending for each child
    offset32: Tensor  # float32 [S, 4]: the offset
    orders: Tensor  # int32: the parts of `Orders`, one after the other


class Orders(NamedTuple):
    """The pairs in the orders in which kernels read them: views of `Tables.orders`, all int32."""

    parent: Tensor  # [E]  of parents_pair
    slot: Tensor  # [E]
    weight_child: Tensor  # [E]  in the order of weight blocks
    weight_parent: Tensor  # [E]
    weight_slot: Tensor  # [E]
    edge_parent: Tensor  # [P S]  of all pairs, also where there is no child
    edge_slot: Tensor  # [P S]
    numbers: Tensor  # [max(L, P S + 1)]: 0, 1, 2, ...
    weight_start: Tensor  # [K + 1]: the pairs that use weight block k are weight_start[k]:weight_start[k + 1]


def make_tables(children: Tensor, weight_of: Tensor, offset: Tensor, start: Tensor, pair: Tensor) -> Tables:
    """On the host."""
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
    """Views: nothing is copied, and nothing is launched."""
    edges, joined, locations = tables.children.numel(), len(tables.parents_pair), len(tables.parents_start) - 1
    sizes = [*[joined] * 5, edges, edges, max(locations, edges + 1)]
    padded = [size + -size % ALIGNMENT for size in sizes]
    *parts, weight_start = tables.orders.split([*padded, len(tables.orders) - sum(padded)])
    parts = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    return Orders._make([*parts, weight_start])
