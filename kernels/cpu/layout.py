"""The arrays that the kernels read: how a call's tensors are packed.

Vectors run along parent types. The C parent types make `blocks` vectors of `lanes`; the last is filled up with
types that nobody votes for: weights zero and a log-likelihood that exp makes zero.

A parent's numbers for one block are consecutive rows of `lanes` (`Row` says which), so that a kernel reaches all
of them from one address.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tritoncaps.kernels.cpu.workspace import scratch
from tritoncaps.routing_map import Tables

VECTOR_BYTES = 32


class Row:
    """Rows of a parent's block. A Gaussian has the first 33, an iteration of the backward pass all 82."""

    MINUS_MEAN = 0
    PRECISION = 16
    CONSTANT = 32
    LINEAR = 33  # B of `Iteration`
    TWICE_SQUARE = 49  # 2 C of `Iteration`
    OFFSET = 65  # A of `Iteration`
    SHIFT = 66  # from d = V - mean to e, the deviation from the mean that the M-step found
    GAUSSIAN = 33
    ITERATION = 82


class Moment:
    """Rows of a parent's moments."""

    TOTAL = 0
    FIRST = 1
    SECOND = 17
    ROWS = 33


class Edges(NamedTuple):
    """The inputs of a call: flat arrays and their sizes, in the form that Numba takes."""

    poses: NDArray  # [N, L, B, 16]
    activations: NDArray  # [N, L, B]
    weight: NDArray  # [K, blocks, B, 16, lanes]
    children: NDArray  # int32 [P, S], -1 where there is none
    weight_of: NDArray  # int32 [S]
    offset: NDArray  # [S, 4]
    group_of: NDArray  # int32 [P, S]: the group of competing parents that an edge belongs to
    group_start: NDArray  # int32 [G + 1]: group g has the edges group_edge[start[g]:start[g + 1]]
    group_edge: NDArray  # int32 [E]: p * S + s
    local: bool  # is competition local?
    images: int
    children_count: int  # L
    parents_count: int  # P
    slots: int  # S
    groups: int  # G
    child_types: int  # B
    parent_types: int  # C
    weights: int  # K
    blocks: int
    lanes: int


def edges(poses: Tensor, activations: Tensor, weight: Tensor, tables: Tables, competition: str) -> Edges:
    """Pack poses [N, L, 16, B], activations [N, L, B] and weight [K, B, C, 4, 4] (of any strides)."""
    images, locations, _, child_types = poses.shape
    weights, _, parent_types = weight.shape[:3]
    parents, slots = tables.children.shape
    lanes = VECTOR_BYTES // poses.element_size()
    blocks = -(-parent_types // lanes)
    group_of, group_start, group_edge = _groups(tables, competition)
    packed = F.pad(weight.flatten(3), (0, 0, 0, blocks * lanes - parent_types))  # [K, B, blocks * lanes, 16]
    packed = packed.unflatten(2, (blocks, lanes)).permute(0, 2, 1, 4, 3)
    return Edges(
        poses=array(_copied("poses", poses.transpose(2, 3))),
        activations=array(activations),
        weight=array(_copied("weight", packed)),
        children=array(tables.children),
        weight_of=array(tables.weight_of),
        offset=array(tables.offset.to(poses.dtype)),
        group_of=array(group_of),
        group_start=array(group_start),
        group_edge=array(group_edge),
        local=competition == "local",
        images=images,
        children_count=locations,
        parents_count=parents,
        slots=slots,
        groups=len(group_start) - 1,
        child_types=child_types,
        parent_types=parent_types,
        weights=weights,
        blocks=blocks,
        lanes=lanes,
    )


def _copied(name: str, x: Tensor) -> Tensor:
    """A contiguous copy that lasts as long as the call."""
    return scratch(name, x.shape, x.dtype).copy_(x)


def _groups(tables: Tables, competition: str) -> tuple[Tensor, Tensor, Tensor]:
    """Global competition: a group is a child location. Local: it is an edge, alone with its parent's types."""
    if competition == "global":
        return tables.children.clamp(min=0), tables.parents_start, tables.parents_pair
    exists = tables.children.reshape(-1) >= 0
    group_of = torch.arange(len(exists), dtype=torch.int32)
    group_start = F.pad(exists.cumsum(0), (1, 0)).int()
    return group_of, group_start, group_of[exists]


def array(x: Tensor) -> Any:
    """The numbers of a tensor as a flat NumPy array; a copy only if x is not contiguous."""
    return x.detach().reshape(-1).numpy()
