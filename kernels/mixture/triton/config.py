"""Which tiles a layer gets: a pure function of its sizes, not of the batch.

So the same image gives the same bits in every batch, and a test can compile every kernel that a launch can ask for.
"""

from __future__ import annotations

from typing import NamedTuple

from tritoncaps.kernels.common.triton.launching import (
    FEWEST_STEPS,
    MOST_SPLITS,
    PROGRAMS,
    REFERENCE_BATCH,
    WARP,
    blocks,
)
from tritoncaps.kernels.mixture.triton.rows import TYPES, type_blocks

WEIGHT_PROGRAMS = 2048  # of the weight view: a multiprocessor holds four at a time, and a last round leaves some idle
PARENTS, PARENT_WARPS = 32, 8  # of a program of parents.py
ADDED_SPLITS, NUMBERS = 16, 64  # of the weight's gradient, that a program adds up at a time


class Tile(NamedTuple):
    """[images, child types, 16 parent types] of a program, and its warps."""

    BN: int
    BB: int
    num_warps: int


PARENT = Tile(2, 4, 4)  # one element for each thread, of two images: they share the weight
FORWARD = Tile(1, 4, 1)  # the parent view of the forward pass: two parent types for each thread share the pose
CHILD = Tile(1, 8, 2)  # two parent types for each thread
GRADIENT = Tile(1, 8, 2)  # two child types for each thread: they share what is known of the parents
STORED = Tile(2, 8, 8)  # one element for each thread, where votes or their gradients are loaded
TILES = PARENT, FORWARD, CHILD, GRADIENT, STORED
COALESCED = ("log_sum_kernel", "assignment_gradient_kernel", "edge_product_kernel")  # of the child view


class Config(NamedTuple):
    parent: Tile
    forward: Tile  # of the parent view, where votes are computed and weights are shares or assignments
    parent_splits: int
    child: Tile
    gradient: Tile  # of children and of the weight
    stored: Tile  # the same, from stored gradients of votes; and of the edge view
    pair_splits: int
    image_splits: int


def choose(
    P: int, S: int, B: int, C: int, K: int, pairs: int, double: bool, lanes: int = WARP, half: bool = False
) -> Config:
    """The configuration of a layer: P parent locations with S slots, B child and C parent types, K weight blocks and
    the number of joined pairs of locations; `double` if it computes in float64, on a GPU with `lanes` in a warp; `half`
    if its inputs are float16 or bfloat16, whose conversion takes registers."""
    owners = P * type_blocks(C) * blocks(REFERENCE_BATCH, PARENT.BN)
    steps = S * blocks(B, PARENT.BB)
    parent_splits = max(1, min(blocks(PROGRAMS, owners), steps // FEWEST_STEPS, MOST_SPLITS))
    owners = K * blocks(B, GRADIENT.BB) * type_blocks(C)
    image_splits = min(REFERENCE_BATCH // GRADIENT.BN, blocks(WEIGHT_PROGRAMS, owners))
    pair_splits = max(1, min(blocks(WEIGHT_PROGRAMS, owners * image_splits), pairs // K, MOST_SPLITS))
    tiles: tuple[Tile, ...] = TILES
    if double:  # one element for each thread: numbers take twice the registers
        tiles = tuple(one_element_each(tile, lanes) for tile in (PARENT, PARENT, CHILD, STORED, STORED))
    parent, forward, child, gradient, stored = tiles
    gradient = stored if half else gradient
    return Config(parent, forward, parent_splits, child, gradient, stored, pair_splits, image_splits)


def one_element_each(tile: Tile, lanes: int) -> Tile:
    """With as many warps as give every thread one element, and as few, so that it gets all the registers it can."""
    return tile._replace(num_warps=tile.BN * tile.BB * TYPES.value // lanes)


def needs_coalescing(kernel: str, tile: Tile, lanes: int) -> bool:
    """Whether Triton's coalescing pass makes a better kernel: it gives a thread parent types that are neighbours. Where
    a thread has one element it changes nothing; where it should have two child types, it would give it others."""
    return kernel in COALESCED or (kernel == "parent_view_kernel" and tile != one_element_each(tile, lanes))
