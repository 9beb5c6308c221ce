"""Which tiles a layer of vector capsules gets: a pure function of its sizes, not of the batch.

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
from tritoncaps.kernels.dynamic.options import LONGEST_ON_TRITON

SIZES = (8, 16, 32, LONGEST_ON_TRITON)  # of a parent's pose that tiles are made for
POSES = 256  # entries of a tile's parent types
ENTRIES = 4  # of a thread, for all its images: a row of a matrix is loaded by the threads that use it
IMAGES, WEIGHT_IMAGES = 4, 2  # the weight view sums as many tiles as ROWS
ROWS = 8  # of a matrix whose gradient a program sums
NUMBERS = 32  # of a child whose gradient a program sums


class Tile(NamedTuple):
    """[images, parent types, pose entries] of a program, and its warps."""

    BN: int
    BC: int
    BE: int
    num_warps: int


class Config(NamedTuple):
    tile: Tile
    weight_tile: Tile
    parent_splits: int
    pair_splits: int
    image_splits: int

    def weight_image_splits(self, N: int) -> int:
        """A split without images would add nothing."""
        return max(1, min(self.image_splits, blocks(N, self.weight_tile.BN)))


def choose(P: int, S: int, B: int, C: int, D: int, E: int, K: int, pairs: int, double: bool) -> Config:
    """The configuration of a layer: P parent locations with S slots, B child types of D numbers, C parent types of E
    numbers, K weight blocks and the number of joined pairs of locations; `double` if it computes in float64."""
    BE = next(size for size in SIZES if size >= E)
    num_warps = POSES // (WARP * ENTRIES) * (2 if double else 1)
    tile = Tile(IMAGES, POSES // BE, BE, num_warps)
    type_blocks = blocks(C, tile.BC)
    owners = P * type_blocks * blocks(REFERENCE_BATCH, IMAGES)
    parent_splits = max(1, min(blocks(PROGRAMS, owners), S * B // FEWEST_STEPS, MOST_SPLITS))
    owners = K * B * type_blocks * blocks(D, ROWS)
    image_splits = min(REFERENCE_BATCH // WEIGHT_IMAGES, blocks(PROGRAMS, owners))
    pair_splits = max(1, min(blocks(PROGRAMS, owners * image_splits), pairs // K, MOST_SPLITS))
    return Config(tile, tile._replace(BN=WEIGHT_IMAGES), parent_splits, pair_splits, image_splits)
