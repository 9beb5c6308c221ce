"""The tiles of the kernels for a layer of vector capsules: a pure function of its sizes, not of the batch.

So an image has the same result, to the last bit, in every batch, and a test can compile every kernel that is launched.
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

SIZES = (8, 16, 32, LONGEST_ON_TRITON)  # possible values of BE
POSES = 256  # BC BE: pose entries of the parents in a tile, for one image
ENTRIES = 4  # of a thread, for each image: a thread loads the entries of a matrix once for all images of the tile
IMAGES, WEIGHT_IMAGES = 4, 2  # of a tile; fewer in the weight view, which keeps ROWS tiles of sums
ROWS = 8  # rows of a matrix whose gradient a program computes
NUMBERS = 32  # entries of a child's pose whose gradient a program computes


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
        """Number of splits of the images in the weight view; each has at least one block of images."""
        return max(1, min(self.image_splits, blocks(N, self.weight_tile.BN)))


def choose(P: int, S: int, B: int, C: int, D: int, E: int, K: int, pairs: int, double: bool) -> Config:
    """The configuration of a layer: P parent locations with S slots, B child types of D entries, C parent types of E
    entries, K weight blocks, `pairs` edges; `double`: it computes in float64."""
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
