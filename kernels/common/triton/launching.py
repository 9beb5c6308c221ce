"""Options of every launch."""

from __future__ import annotations

import torch

WARP = 32  # threads
REGISTERS = 255  # that a thread may use: by default NVIDIA's compiler may spill a few to run more programs at once
REFERENCE_BATCH = 16  # at which the splits of a sum fill a GPU
PROGRAMS = 256  # that fill a large GPU
FEWEST_STEPS = 2  # of a split's loop
MOST_SPLITS = 16  # so that the partial sums stay small beside the votes, which are not stored
LANES = 64 if torch.version.hip else WARP  # of a warp
ALL_REGISTERS = {} if torch.version.hip else {"maxnreg": REGISTERS}


def blocks(size: int, block: int) -> int:
    """How many blocks cover ``size``."""
    return -(-size // block)
