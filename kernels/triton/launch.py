"""The inputs of a call as kernels read them, and how a kernel is launched on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tritoncaps.kernels.triton import config
from tritoncaps.routing_map import Tables

LANES = 64 if torch.version.hip else config.WARP  # of a warp
ALL_REGISTERS = {} if torch.version.hip else {"maxnreg": config.REGISTERS}  # an option of launches
surroundings = torch.cuda.device_of  # launches go to the current GPU: make it that of a tensor; nothing on a CPU


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
    """The inputs of a call: poses and weight, or the votes themselves."""

    poses: Tensor | None  # [N, L, 16, B]
    weight: Tensor | None  # [K, B, 16, C]
    votes: Tensor | None  # [N, P, S, B, H, C]
    activations: Tensor | None  # [N, L, B]
    offset: Tensor | None  # [S, 4]
    tables: Tables
    pairs: Pairs
    groups: Groups
    local: bool
    dtype: torch.dtype  # of the arithmetic and of all that is not an input
    config: config.Config
    sizes: dict[str, int]  # N, L, P, S, B, C and G

    def empty(self, *shape: int) -> Tensor:
        return self.tables.children.new_empty(shape, dtype=self.dtype)


def make_edges(
    tables: Tables,
    competition: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    poses: Tensor | None = None,
    weight: Tensor | None = None,
    votes: Tensor | None = None,
    activations: Tensor | None = None,
) -> Edges:
    """Pack the inputs of a call, of `sizes` N, B and C."""
    N, B, C = sizes
    P, S = tables.children.shape
    K = S if weight is None else len(weight)
    pairs, groups = pairs_of(tables, K), groups_of(tables, competition)
    return Edges(
        poses,
        None if weight is None else weight.reshape(K, B, C, 16).transpose(2, 3).contiguous(),
        votes,
        activations,
        None if weight is None else _once(tables, dtype, lambda: tables.offset.to(dtype)),
        tables,
        pairs,
        groups,
        competition == "local",
        dtype,
        config.choose(P, S, B, C, K, len(pairs.slot), dtype == torch.float64, LANES),
        {"N": N, "L": len(tables.parents_start) - 1, "P": P, "S": S, "B": B, "C": C, "G": len(groups.child)},
    )


def arithmetic(*tensors: Tensor) -> torch.dtype:
    """float16 and bfloat16 are for storage: compute in float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def launch(kernel: Any, programs: int, tile: config.Tile, edges: Edges, **arguments: Any) -> None:
    """Run every program of a kernel; nothing if there is nothing to do.

    The kernel gets `arguments`, and those of the edges' arrays and sizes that it has an argument for.
    """
    if not programs:
        return
    tables = edges.tables
    known = {
        **{"p_poses": edges.poses, "p_weight": edges.weight, "p_votes": edges.votes, "p_offset": edges.offset},
        **{"p_activations": edges.activations, "p_children": tables.children, "p_weight_of": tables.weight_of},
        **{"p_parents_start": tables.parents_start, "LOCAL": edges.local, **edges.sizes},
    }
    known = {name: value for name, value in known.items() if name in kernel.arg_names}
    kernel[(programs,)](**{**known, **arguments}, **tile._asdict(), **ALL_REGISTERS)


_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _once(tables: Tables, name: object, make: Callable[[], Any]) -> Any:
    """What a map's tables are turned into, made at the first call and kept as long as they live."""
    known = _made.setdefault(tables.parents_pair, {})
    if name not in known:
        known[name] = make()
    return known[name]


def pairs_of(tables: Tables, num_weights: int) -> Pairs:
    return _once(tables, num_weights, lambda: _pairs(tables, num_weights))


def groups_of(tables: Tables, competition: str) -> Groups:
    make = _local_groups if competition == "local" else _global_groups
    return _once(tables, competition, lambda: make(tables))


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
