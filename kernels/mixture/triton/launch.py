"""The inputs of a call as kernels read them, and how a kernel is launched on them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncaps.kernels.common.tables import Orders, Tables, offset_of
from tritoncaps.kernels.common.triton.compiling import uncoalesced
from tritoncaps.kernels.common.triton.launching import OPTIONS, lanes
from tritoncaps.kernels.common.triton.pairs import Groups, groups_of, pairs_of
from tritoncaps.kernels.mixture.triton import config
from tritoncaps.kernels.mixture.triton.rows import ENTRIES, pack


class Edges(NamedTuple):
    """The inputs of a call: poses and weight, or the votes themselves."""

    poses: Tensor | None  # [N, L, B, 16]
    weight: Tensor | None  # [K, B, blocks, 16, 16]
    votes: Tensor | None  # [N, P, S, B, H, C]
    activations: Tensor | None  # [N, L, B]
    offset: Tensor | None  # [S, 4]
    tables: Tables
    pairs: Orders
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
    pairs, groups = pairs_of(tables), groups_of(tables, competition)
    return Edges(
        poses,
        None if weight is None else pack(weight.reshape(K, B, C, ENTRIES.value).transpose(2, 3)),
        votes,
        activations,
        None if weight is None else offset_of(tables, dtype),
        tables,
        pairs,
        groups,
        competition == "local",
        dtype,
        config.choose(P, S, B, C, K, len(pairs.slot), dtype == torch.float64, lanes()),
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
    with nullcontext() if config.needs_coalescing(kernel.fn.__name__, tile, lanes()) else uncoalesced():
        kernel[(programs,)](**{**known, **arguments}, **tile._asdict(), **OPTIONS)
