"""What a launch costs: floating-point operations and bytes, as functions of the sizes.

A fused multiply-add counts as two operations, an exponential as one. Bytes are those of every array that a kernel
reads or writes, once: what reaches memory if the caches hold the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tritoncaps.kernels.triton import config

POSE = 16
VOTE = 2 * 4 * POSE  # also M^T dV and dV W^T
LIKELIHOOD = 3 * POSE + 3
SLOPE = 4 * POSE
ITERATION = 2 * POSE + LIKELIHOOD + SLOPE + 8 * POSE + 7  # of the vote gradient


class Cost(NamedTuple):
    """One kind of launch of a routing."""

    kernel: str
    launches: int
    flops: int  # of all launches
    bytes: int


def edge_flops(kernel: str, weights: str = "assignment", T: int = 1, pose: int = POSE, stored: bool = False) -> int:
    """Operations for each edge, that is for each child type and parent type of a joined pair of locations."""
    vote = pose if stored else VOTE
    likelihood, moments, slope = 3 * pose + 3, 6 * pose + 12, 5 * pose
    extra = {"uniform": 1, "stored": 1, "assignment": likelihood + 1, "gradient": likelihood + slope + 3}
    return {
        "parent_view_kernel": vote + extra[weights] + moments,
        "log_sum_kernel": vote + likelihood + 6,
        "assignment_gradient_kernel": vote + likelihood + slope + 2,
        "edge_product_kernel": 2,
        "child_gradient_kernel": VOTE if stored else 2 * VOTE + T * ITERATION,
        "weight_view_kernel": VOTE if stored else 2 * VOTE + T * ITERATION,
        "pose_votes_kernel": VOTE,
        "coordinate_addition_kernel": pose,
        "assignment_kernel": vote + likelihood,
        "m_step_gradient_kernel": vote + slope + 4 * pose + 2,
        "e_step_gradient_kernel": vote + 3 * pose + 2,
    }[kernel]


def launch_metadata(grid: tuple[int, ...], kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Triton's hook: name, operations and bytes of a launch, for profilers."""
    tensors = [arg for arg in args.values() if hasattr(arg, "element_size")]
    pairs = len(args["p_pair_slot"]) if "p_pair_slot" in args else args["P"] * args["S"]
    flops = edge_flops(
        kernel.name,
        args.get("WEIGHTS", "assignment"),
        args.get("T", 1),
        args.get("COUNT", args.get("H", POSE)),
        args.get("p_votes") is not None or args.get("p_dV") is not None,
    )
    return {
        "name": kernel.name,
        "flops": args["N"] * pairs * args["B"] * args["C"] * flops,
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    }


def em_routing_costs(
    N: int, L: int, P: int, S: int, B: int, C: int, K: int, pairs: int, T: int = 3, backward: bool = True, size: int = 4
) -> list[Cost]:
    """The launches of a routing with T iterations and global competition, forward and backward, of N images: L child
    and P parent locations with S slots, B child and C parent types, K weight blocks, `pairs` joined pairs of locations,
    and `size` bytes for a number."""
    chosen = config.choose(P, S, B, C, K, pairs)
    child, weight, group, parent = 17 * N * L * B, POSE * K * B * C, N * L * B, N * P * C
    moments = 33 * parent * chosen.parent_splits
    second_pass = (33 * parent + moments) if chosen.parent_splits > 1 else 0
    inputs = child + weight
    edges = N * pairs * B * C
    image_splits = min(chosen.image_splits, config.blocks(N, chosen.gradient.BN))
    partial = weight * chosen.pair_splits * image_splits

    def cost(kernel: str, launches: int, numbers: int, **options: Any) -> Cost:
        return Cost(kernel, launches, launches * edges * edge_flops(kernel, **options), launches * numbers * size)

    costs = [
        cost("parent_view_kernel", 1, inputs + moments, weights="uniform"),
        cost("parent_view_kernel", T - 1, inputs + 33 * parent + group + moments, weights="assignment"),
        cost("log_sum_kernel", T - 1, inputs + 33 * parent + group),
        Cost("merge_moments_kernel", T, 0, T * second_pass * size),
    ]
    if backward:
        iterations = T * (82 * parent + 2 * group)
        costs += [
            cost("assignment_gradient_kernel", T - 1, inputs + 82 * parent + 2 * group),
            cost("parent_view_kernel", T - 1, inputs + 82 * parent + 2 * group + moments, weights="gradient"),
            cost("child_gradient_kernel", 1, inputs + iterations + child, T=T),
            cost("weight_view_kernel", 1, inputs + iterations + partial, T=T),
            Cost("add_splits_kernel", T, 0, ((T - 1) * second_pass + partial + weight) * size),
        ]
    return [each for each in costs if each.launches and each.bytes]
