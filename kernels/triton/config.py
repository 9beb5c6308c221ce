"""Which tiles a layer gets: a pure function of its sizes, never of the batch, so that results are reproducible."""

from __future__ import annotations

from typing import NamedTuple

WARP = 32
FULL = 256  # programs at a batch of REFERENCE_BATCH that keep a large GPU busy
REFERENCE_BATCH = 16
FEWEST_STEPS = 4  # of a split's loop


class Tile(NamedTuple):
    """[images, child types, parent types], and what a launch needs."""

    BN: int
    BB: int
    BC: int
    num_warps: int


class Config(NamedTuple):
    parent: Tile
    parent_splits: int
    child: Tile
    child_gradient: Tile
    weight: Tile
    pair_splits: int
    image_splits: int


def choose(P: int, S: int, B: int, C: int, K: int, pairs: int) -> Config:
    """The configuration of a layer: P parent locations with S slots, B child and C parent types, K weight blocks
    and the number of joined pairs of locations."""
    BC = min(WARP, _power_of_two(C))
    parent = _tile(4 if P >= 16 else 1, BC, 4)
    owners = P * _blocks(C, BC) * _blocks(REFERENCE_BATCH, parent.BN)
    steps = S * _blocks(B, parent.BB)
    parent_splits = max(1, min(_blocks(FULL, owners), steps // FEWEST_STEPS))
    child = _tile(2, BC, 4)
    weight = _tile(1, BC, 4)
    owners = K * _blocks(B, weight.BB) * _blocks(C, BC)
    image_splits = min(8, _blocks(FULL, owners))
    pair_splits = max(1, min(_blocks(FULL, owners * image_splits), pairs // K // 2))
    return Config(parent, parent_splits, child, child, weight, pair_splits, image_splits)


def _tile(BN: int, BC: int, num_warps: int) -> Tile:
    """A tile with one element for each thread."""
    return Tile(BN, num_warps * WARP // BC // BN, BC, num_warps)


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
