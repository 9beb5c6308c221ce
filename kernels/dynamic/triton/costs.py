"""Floating-point operations and bytes of the launches of dynamic routing, as functions of the sizes.

As in `kernels.mixture.triton.costs`: a fused multiply-add counts as two operations, an exponential as one; every array
that a kernel reads or writes counts once.
"""

from __future__ import annotations

import math
from typing import Any

from tritoncaps.kernels.dynamic.triton import config


def launch_metadata(grid: tuple[int, ...], kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Name, operations and bytes of a launch for profilers; Triton calls this function."""
    tensors = [arg for arg in args.values() if hasattr(arg, "element_size")]
    pairs = len(args["p_pair_slot"]) if "p_pair_slot" in args else args["P"] * args["S"]
    flops = edge_flops(
        kernel.name, args["D"], args["E"], args.get("T", 1), args["p_q"] is not None, args["p_g"] is not None
    )
    return {
        "name": kernel.name,
        "flops": args["N"] * pairs * args["B"] * args["C"] * flops,
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    }


def edge_flops(kernel: str, D: int, E: int, T: int = 1, has_q: bool = True, has_g: bool = False) -> int:
    """Operations for each pair of a child and a parent."""
    vote, dot = 2 * D * E, 2 * E
    assignment = 3 + dot * has_q + (dot + 2) * has_g
    iteration = 2 * dot + 5 + 4 * E
    return {
        "dynamic_parent_view_kernel": vote + assignment + 2 * E,
        "dynamic_child_view_kernel": (vote if has_q or has_g else 0) + assignment + 4,
        "dynamic_child_gradient_kernel": 2 * vote + T * iteration,
        "dynamic_weight_view_kernel": 2 * vote + T * iteration,
    }[kernel]


def routing_bytes(
    N: int, L: int, P: int, S: int, B: int, C: int, D: int, E: int, K: int, pairs: int, T: int = 3, size: int = 4
) -> int:
    """Bytes of a routing with T iterations, global competition and no priors, forward and backward together."""
    chosen = config.choose(P, S, B, C, D, E, K, pairs, size == 8)
    inputs, state, group = N * B * L * D + K * B * C * D * E, N * P * C * E, N * L * B
    parts, weight_splits = chosen.parent_splits * state, chosen.pair_splits * chosen.weight_image_splits(N)
    parent, child = inputs + parts, inputs + state + group
    second_pass = parts + 4 * state
    forward = T * (parent + second_pass) + (T - 1) * (state + group + child)
    each = (child + state + group) + (parent + 2 * (state + group)) + second_pass
    last = T * 2 * (state + group) + inputs
    weight = K * B * C * D * E
    split_weight = 2 * weight * weight_splits if weight_splits > 1 else 0
    backward = (T - 1) * (each + 3 * state) + 2 * last + N * B * L * D + weight + split_weight
    return size * math.ceil(forward + backward)
