"""Tiles and splits of a layer, chosen from its sizes.

The choice does not depend on the batch size. Therefore an image gives the same bits in every batch, and a test can
compile every kernel that a launch can need.
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

WEIGHT_PROGRAMS = 2048  # of the weight view: many more than run at once, so that few multiprocessors wait at the end
PARENTS, PARENT_WARPS = 32, 8  # of a program in parents.py
ADDED_SPLITS, NUMBERS = 16, 64  # splits and numbers that a program of add_splits_kernel loads at a time


class Tile(NamedTuple):
    """A program computes tiles of [BN images, BB child types, 16 parent types] with num_warps warps."""

    BN: int
    BB: int
    num_warps: int


PARENT = Tile(2, 4, 4)  # one element for each thread; the two images use the same weights
FORWARD = Tile(1, 4, 1)  # two parent types for each thread, which use the same pose
CHILD = Tile(1, 8, 2)  # two parent types for each thread
GRADIENT = Tile(1, 8, 2)  # two child types for each thread, which use the same rows of parents
STORED = Tile(2, 8, 8)  # one element for each thread
TILES = PARENT, FORWARD, CHILD, GRADIENT, STORED
COALESCED = ("log_sum_kernel", "assignment_gradient_kernel", "edge_product_kernel")  # see needs_coalescing


class Config(NamedTuple):
    parent: Tile  # of the parent view in the backward pass, and for stored votes
    forward: Tile  # of the parent view in the forward pass
    parent_splits: int  # parts of the children of a parent in the parent view
    child: Tile  # of the child view
    gradient: Tile  # of the gradients of children and weight
    stored: Tile  # of the same gradients from stored gradients of votes, and of the edge view
    pair_splits: int  # parts of the pairs and of the images in the weight view
    image_splits: int


def choose(
    P: int, S: int, B: int, C: int, K: int, pairs: int, double: bool, lanes: int = WARP, half: bool = False
) -> Config:
    """Choose the configuration of a layer.

    P parent locations with S slots, B child types, C parent types, K weight blocks, and `pairs` edges. `double`: the
    layer computes in float64. `lanes`: threads of a warp. `half`: the inputs are float16 or bfloat16, and their
    conversion needs registers.
    """
    owners = P * type_blocks(C) * blocks(REFERENCE_BATCH, PARENT.BN)
    steps = S * blocks(B, PARENT.BB)
    parent_splits = max(1, min(blocks(PROGRAMS, owners), steps // FEWEST_STEPS, MOST_SPLITS))
    owners = K * blocks(B, GRADIENT.BB) * type_blocks(C)
    image_splits = min(REFERENCE_BATCH // GRADIENT.BN, blocks(WEIGHT_PROGRAMS, owners))
    pair_splits = max(1, min(blocks(WEIGHT_PROGRAMS, owners * image_splits), pairs // K, MOST_SPLITS))
    tiles: tuple[Tile, ...] = TILES
    if double:  # one element for each thread, because a float64 takes two registers
        tiles = tuple(one_element_each(tile, lanes) for tile in (PARENT, PARENT, CHILD, STORED, STORED))
    parent, forward, child, gradient, stored = tiles
    gradient = stored if half else gradient
    return Config(parent, forward, parent_splits, child, gradient, stored, pair_splits, image_splits)


def one_element_each(tile: Tile, lanes: int) -> Tile:
    """The tile with one element for each thread: more elements or more warps would leave too few registers."""
    return tile._replace(num_warps=tile.BN * tile.BB * TYPES.value // lanes)


def needs_coalescing(kernel: str, tile: Tile, lanes: int) -> bool:
    """Whether a launch needs Triton's coalescing pass.

    The pass gives neighbouring parent types to a thread. If a thread has one element, the pass changes nothing. The
    tiles of gradients have two child types for each thread, and the pass would give it two parent types instead.
    """
    return kernel in COALESCED or (kernel == "parent_view_kernel" and tile != one_element_each(tile, lanes))
