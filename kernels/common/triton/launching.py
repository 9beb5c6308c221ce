"""Options and constants for all launches."""

from __future__ import annotations

from functools import cache

import torch

WARP = 32  # threads
REGISTERS = 255  # limit for a thread: by default, NVIDIA's compiler may spill some to run more programs at once
REFERENCE_BATCH = 16  # batch size for which the splits of a sum fill a GPU
PROGRAMS = 256  # number of programs that fills a large GPU
FEWEST_STEPS = 2  # in the loop of a split
MOST_SPLITS = 16  # limit, so that the partial sums need little memory
# Pointers whose alignment varies from call to call (users' tensors, slices of buffers): kernels ignore it.
UNALIGNED = ["p_poses", "p_activations", "p_votes", "p_weights", "p_assignments", "p_grad_assignments", "p_left"]
UNALIGNED += ["p_right", "p_log_sum", "p_log_sums", "p_da", "p_dV", "p_dot", "p_beta_u", "p_beta_a", "p_grad_mean"]
UNALIGNED += ["p_grad_variance", "p_grad_logit", "p_grad_activation", "p_mean", "p_precision", "p_log_weight"]
UNALIGNED += ["p_linear", "p_quadratic", "p_centre", "p_offset"]
# Fuse multiplications and additions: results depend on it, and Triton's default may change.
OPTIONS: dict[str, int | bool] = {"enable_fp_fusion": True}
OPTIONS |= {} if torch.version.hip else {"maxnreg": REGISTERS}


@cache
def lanes() -> int:
    """Threads of a warp on the current GPU: 64 (CDNA) or 32 (RDNA) on AMD, 32 on NVIDIA."""
    return torch.cuda.get_device_properties().warp_size if torch.version.hip else WARP


def blocks(size: int, block: int) -> int:
    """Number of blocks that cover ``size``."""
    return -(-size // block)
