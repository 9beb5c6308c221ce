"""Options of every launch."""

from __future__ import annotations

from functools import cache

import torch

WARP = 32  # threads
REGISTERS = 255  # that a thread may use: by default NVIDIA's compiler may spill a few to run more programs at once
REFERENCE_BATCH = 16  # at which the splits of a sum fill a GPU
PROGRAMS = 256  # that fill a large GPU
FEWEST_STEPS = 2  # of a split's loop
MOST_SPLITS = 16  # so that the partial sums stay small beside the votes, which are not stored
# Pointers whose alignment varies from call to call (tensors of users, slices of buffers). Kernels do not need it.
UNALIGNED = ["p_poses", "p_activations", "p_votes", "p_weights", "p_assignments", "p_grad_assignments", "p_left"]
UNALIGNED += ["p_right", "p_log_sum", "p_log_sums", "p_da", "p_dV", "p_dot", "p_beta_u", "p_beta_a", "p_grad_mean"]
UNALIGNED += ["p_grad_variance", "p_grad_logit", "p_grad_activation", "p_mean", "p_precision", "p_log_weight"]
UNALIGNED += ["p_linear", "p_quadratic", "p_centre", "p_offset"]
# Multiplications and additions are fused: results depend on it, and Triton's default may change.
OPTIONS: dict[str, int | bool] = {"enable_fp_fusion": True}
OPTIONS |= {} if torch.version.hip else {"maxnreg": REGISTERS}


@cache
def lanes() -> int:
    """Of a warp on the current GPU: AMD's have 64 (CDNA) or 32 (RDNA)."""
    return torch.cuda.get_device_properties().warp_size if torch.version.hip else WARP


def blocks(size: int, block: int) -> int:
    """How many blocks cover ``size``."""
    return -(-size // block)
