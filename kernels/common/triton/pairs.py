"""The groups of parents that compete for a child: views of the tables of a routing map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tritoncaps.kernels.common.tables import Orders, Tables, orders_of


class Groups(NamedTuple):
    """The parents that compete for a child: group g has the pairs start[g], ..., start[g + 1] - 1. All int32."""

    child: Tensor  # [G]  child location, or -1
    start: Tensor  # [G + 1]
    parent: Tensor  # [pairs]
    slot: Tensor  # [pairs]


_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def once(tables: Tables, name: str, make: Callable[[], Any]) -> Any:
    """The result of ``make``, which is called once and kept as long as the tables exist."""
    known = _made.setdefault(tables.orders, {})
    if name not in known:
        known[name] = make()
    return known[name]


def pairs_of(tables: Tables) -> Orders:
    return once(tables, "pairs", lambda: orders_of(tables))


def groups_of(tables: Tables, competition: str) -> Groups:
    make = _local_groups if competition == "local" else _global_groups
    return once(tables, competition, lambda: make(tables, pairs_of(tables)))


def _global_groups(tables: Tables, pairs: Orders) -> Groups:
    """A group for each child location."""
    locations = len(tables.parents_start) - 1
    return Groups(pairs.numbers[:locations], tables.parents_start, pairs.parent, pairs.slot)


def _local_groups(tables: Tables, pairs: Orders) -> Groups:
    """A group for each slot of each parent location, with one pair."""
    edges = tables.children.numel()
    return Groups(tables.children.reshape(-1), pairs.numbers[: edges + 1], pairs.edge_parent, pairs.edge_slot)
