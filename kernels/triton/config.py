"""Which tiles a layer gets: a pure function of its sizes, not of the batch.

So the same image gives the same bits in every batch, and a test can compile every kernel that a launch can ask for.
"""

from __future__ import annotations

from typing import NamedTuple

WARP = 32
PARENT_TYPES = (16, 32)  # of a tile
REFERENCE_BATCH = 16  # at which the splits fill
PROGRAMS = 256  # a large GPU
FEWEST_STEPS = 2  # of a split's loop
MOST_SPLITS = 16  # so that the partial sums stay small beside the votes that nobody stores
PARENTS = 32  # of a program of parents.py
NUMBERS = 256  # of a program that adds up splits of the weight's gradient


class Tile(NamedTuple):
    """[images, child types, parent types] of a program, and its warps."""

    BN: int
    BB: int
    BC: int
    num_warps: int


class Config(NamedTuple):
    parent: Tile
    parent_splits: int
    child: Tile
    gradient: Tile  # of children and of the weight
    pair_splits: int
    image_splits: int


def choose(P: int, S: int, B: int, C: int, K: int, pairs: int) -> Config:
    """The configuration of a layer: P parent locations with S slots, B child and C parent types, K weight blocks and
    the number of joined pairs of locations."""
    BC = next((block for block in PARENT_TYPES if block >= C), PARENT_TYPES[-1])
    parent = parent_tile(BC)
    child, gradient = child_tile(BC), gradient_tile(BC)
    owners = P * blocks(C, BC) * blocks(REFERENCE_BATCH, parent.BN)
    steps = S * blocks(B, parent.BB)
    parent_splits = max(1, min(blocks(PROGRAMS, owners), steps // FEWEST_STEPS, MOST_SPLITS))
    owners = K * blocks(B, gradient.BB) * blocks(C, BC)
    image_splits = min(REFERENCE_BATCH // 2, blocks(PROGRAMS, owners))
    pair_splits = max(1, min(blocks(PROGRAMS, owners * image_splits), pairs // K, MOST_SPLITS))
    return Config(parent, parent_splits, child, gradient, pair_splits, image_splits)


def parent_tile(BC: int) -> Tile:
    """One element for each thread, of two images: they share the weight."""
    return Tile(2, 2 * WARP // BC, BC, 4)


def child_tile(BC: int) -> Tile:
    """Child types share what is known of the parents, images the weight. Two elements for each thread if they are
    types of one image, which share loads; else one."""
    return Tile(WARP // BC, 8 if BC == WARP else 4, BC, 4)


def gradient_tile(BC: int) -> Tile:
    """One element for each thread: the gradients need twice the registers."""
    return Tile(WARP // BC, 8, BC, 8)


def blocks(size: int, block: int) -> int:
    return -(-size // block)
