"""What kernels make of a map's tables: the joined pairs of locations in the orders that the views read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tritoncaps.kernels.common.tables import Tables


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


_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def once(tables: Tables, name: object, make: Callable[[], Any]) -> Any:
    """What a map's tables are turned into, made at the first call and kept as long as they live."""
    known = _made.setdefault(tables.parents_pair, {})
    if name not in known:
        known[name] = make()
    return known[name]


def pairs_of(tables: Tables, num_weights: int) -> Pairs:
    return once(tables, num_weights, lambda: _pairs(tables, num_weights))


def groups_of(tables: Tables, competition: str) -> Groups:
    make = _local_groups if competition == "local" else _global_groups
    return once(tables, competition, lambda: make(tables))


def _pairs(tables: Tables, num_weights: int) -> Pairs:
    num_slots = tables.children.shape[1]
    parent, slot = tables.parents_pair // num_slots, tables.parents_pair % num_slots
    weight, order = tables.weight_of[slot.long()].sort(stable=True)
    weights = torch.arange(num_weights + 1, dtype=torch.int32, device=weight.device)
    child = tables.children.reshape(-1)[tables.parents_pair.long()]
    start = torch.searchsorted(weight, weights).int()
    return Pairs(parent, slot, start, child[order], parent[order], slot[order])


def _global_groups(tables: Tables) -> Groups:
    """A group for each child location."""
    child = torch.arange(len(tables.parents_start) - 1, dtype=torch.int32, device=tables.children.device)
    S = tables.children.shape[1]
    return Groups(child, tables.parents_start, tables.parents_pair // S, tables.parents_pair % S)


def _local_groups(tables: Tables) -> Groups:
    """A group for each slot of each parent location, with one pair."""
    P, S = tables.children.shape
    pair = torch.arange(P * S + 1, dtype=torch.int32, device=tables.children.device)
    return Groups(tables.children.reshape(-1), pair, pair[:-1] // S, pair[:-1] % S)
