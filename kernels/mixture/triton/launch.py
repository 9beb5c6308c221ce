"""`make_edges` arranges the inputs of a call as kernels read them; `launch` runs a kernel on them."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncaps.kernels.common.tables import Orders, Tables, offset_of
from tritoncaps.kernels.common.triton import plans
from tritoncaps.kernels.common.triton.compiling import uncoalesced
from tritoncaps.kernels.common.triton.launching import OPTIONS, lanes
from tritoncaps.kernels.common.triton.pairs import Groups, groups_of, pairs_of
from tritoncaps.kernels.mixture.triton import config
from tritoncaps.kernels.mixture.triton.rows import groups_shape


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
    by_type: bool  # only positions compete
    dtype: torch.dtype  # of the arithmetic, of intermediate results and of outputs
    config: config.Config
    sizes: dict[str, int]  # N, L, P, S, B, C and G
    arguments: dict[str, Any]  # tensors and sizes, by the argument names of the kernels

    def empty(self, *shape: int) -> Tensor:
        return self.tables.children.new_empty(shape, dtype=self.dtype)

    def empty_groups(self) -> Tensor:
        """[N, G, B], or [N, G, B, blocks, 16] if only positions compete."""
        N, G, B, C = (self.sizes[name] for name in "NGBC")
        return self.empty(*groups_shape(N, G, B, C, self.by_type))


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
    """The inputs of a call, as kernels read them; `sizes` are N, B and C. Give poses and weight, or votes."""
    N, B, C = sizes
    P, S = tables.children.shape
    K = S if weight is None else len(weight)
    pairs, groups = pairs_of(tables), groups_of(tables, competition)
    by_type = competition == "positions"
    offset = None if weight is None else offset_of(tables, dtype)
    half = poses is not None and poses.element_size() == 2
    chosen = config.choose(P, S, B, C, K, pairs.slot.shape[0], dtype == torch.float64, lanes(), half)
    L, G = tables.parents_start.shape[0] - 1, groups.child.shape[0]
    all_sizes = {"N": N, "L": L, "P": P, "S": S, "B": B, "C": C, "G": G}
    arguments = {
        **{"p_poses": poses, "p_weight": weight, "p_votes": votes, "p_offset": offset, "p_activations": activations},
        **{"p_children": tables.children, "p_weight_of": tables.weight_of, "p_parents_start": tables.parents_start},
        **{"LOCAL": competition == "local", "BY_TYPE": by_type, **all_sizes},
    }
    arrays = poses, weight, votes, activations, offset
    return Edges(*arrays, tables, pairs, groups, by_type, dtype, chosen, all_sizes, arguments)


def arithmetic(*tensors: Tensor) -> torch.dtype:
    """The type of the arithmetic: float64 if one of the tensors is float64, else float32, also for half precision."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def launch(kernel: Any, programs: int, tile: config.Tile, edges: Edges, **arguments: Any) -> None:
    """Launch a kernel with this number of programs, if there are any.

    The kernel gets `arguments`, and those entries of `edges.arguments` whose names are arguments of the kernel.
    """
    if not programs:
        return
    known = {name: edges.arguments[name] for name in _known(kernel, *edges.arguments)}
    with nullcontext() if config.needs_coalescing(kernel.fn.__name__, tile, lanes()) else uncoalesced():
        tiles = {"BN": tile.BN, "BB": tile.BB}
        plans.launch(kernel, programs, known | arguments | tiles, {"num_warps": tile.num_warps, **OPTIONS})


@cache
def _known(kernel: Any, *names: str) -> list[str]:
    """Those of the names that are arguments of the kernel."""
    return [name for name in names if name in kernel.arg_names]
