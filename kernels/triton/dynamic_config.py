"""Which tiles a layer of vector capsules gets: a pure function of its sizes, not of the batch.

So the same image gives the same bits in every batch, and a test can compile every kernel that a launch can ask for.
"""

from __future__ import annotations

from typing import NamedTuple

from tritoncaps.kernels.triton.config import FEWEST_STEPS, MOST_SPLITS, PROGRAMS, REFERENCE_BATCH, WARP, blocks

POSES = 512  # entries of a tile's parent types, at most about
ENTRIES = 4  # of a thread, for all its images: a row of a matrix is loaded by the threads that use it
IMAGES, WEIGHT_IMAGES = 4, 2  # the weight view sums as many tiles as ROWS
ROWS = 8  # of a matrix whose gradient a program sums
REGISTERS = 255  # that a thread may use: otherwise NVIDIA's compiler spills a few to run more programs at once


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
    BD: int  # rows of a matrix, of the weight view

    def weight_image_splits(self, N: int) -> int:
        """A split without images would add nothing."""
        return max(1, min(self.image_splits, blocks(N, self.weight_tile.BN)))


def choose(P: int, S: int, B: int, C: int, D: int, E: int, K: int, pairs: int) -> Config:
    """The configuration of a layer: P parent locations with S slots, B child types of D numbers, C parent types of E
    numbers, K weight blocks and the number of joined pairs of locations."""
    tile, weight_tile = tiles(C, E)
    type_blocks = blocks(C, tile.BC)
    owners = P * type_blocks * blocks(REFERENCE_BATCH, tile.BN)
    parent_splits = max(1, min(blocks(PROGRAMS, owners), S * B // FEWEST_STEPS, MOST_SPLITS))
    BD = min(ROWS, power_of_2(D))
    owners = K * B * type_blocks * blocks(D, BD)
    image_splits = min(REFERENCE_BATCH // weight_tile.BN, blocks(PROGRAMS, owners))
    pair_splits = max(1, min(blocks(PROGRAMS, owners * image_splits), pairs // K, MOST_SPLITS))
    return Config(tile, weight_tile, parent_splits, pair_splits, image_splits, BD)


def tiles(C: int, E: int) -> tuple[Tile, Tile]:
    """As many parent types as fit beside each other, and as many warps as these fill."""
    BE = power_of_2(E)
    BC = max(1, min(power_of_2(C), POSES // BE))
    num_warps = max(1, min(8, BC * BE // (WARP * ENTRIES)))
    return Tile(IMAGES, BC, BE, num_warps), Tile(WEIGHT_IMAGES, BC, BE, num_warps)


def power_of_2(size: int) -> int:
    """The least one that is not smaller."""
    return 1 << max(0, size - 1).bit_length()
