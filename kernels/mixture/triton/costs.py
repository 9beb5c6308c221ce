"""Floating-point operations and bytes of a launch, as functions of the sizes.

A fused multiply-add counts as two operations, an exponential or a division as one. Each array that a kernel reads or
writes counts once: this is the traffic to memory if the caches serve all repeated reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tritoncaps.kernels.mixture.triton import config

POSE = 16
VOTE = 2 * 4 * POSE  # also M^T dV and dV W^T
LIKELIHOOD = 4 * POSE + 4  # d = V - mean, sum_h precision_h d_h^2, and R = exp(l - log_sum)
SLOPE = 5 * POSE  # e = d + shift, and G
FIRST_ITERATION = 8 * POSE + 2  # of the vote gradient
ITERATION = LIKELIHOOD + SLOPE + 5 * POSE + 8  # of the vote gradient; d is e of the previous iteration
GAUSSIAN = 2 * POSE + 1  # rows of statistics that views read
SLOPES = 3 * POSE + 1  # rows of slopes that views read


class Cost(NamedTuple):
    """All launches of one kernel, with one kind of weights, in a routing."""

    kernel: str
    launches: int
    programs: int  # of one launch
    flops: int  # of all launches
    bytes: int
    weights: str = ""  # WEIGHTS of the parent view
    votes: int = 0  # that all launches compute, including the padding of the last tiles
    per_thread: int = 1  # votes of a tile that a thread computes
    trips: tuple[float, ...] = ()  # for one tile, the iterations of each loop around a vote, the outermost first

    @property
    def name(self) -> str:
        """The name of the kernel in resources.json."""
        return " ".join((self.kernel.removesuffix("_kernel"), self.weights)).strip()

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes


def edge_flops(
    kernel: str,
    weights: str = "assignment",
    first: bool = True,
    later: int = 0,
    pose: int = POSE,
    stored: bool = False,
) -> int:
    """Operations for each vote: for one child type and one parent type of an edge.

    `weights`: of the parent view. `first`, `later`: a vote gradient includes the first iteration, and this number of
    later iterations. `pose`: number of pose entries. `stored`: votes, or their gradients, are loaded.
    """
    vote = pose if stored else VOTE
    likelihood, moments, slope = 4 * pose + 4, 6 * pose + 12, 5 * pose
    extra = {
        **{"uniform": 1, "assignment": likelihood + 1, "gradient": likelihood + slope + 3},
        **{"stored assignment": 1, "stored gradient": pose},
    }
    sweep = VOTE if stored else 2 * VOTE + first * FIRST_ITERATION + later * ITERATION
    return {
        "parent_view_kernel": vote + extra[weights] + moments,
        "log_sum_kernel": vote + likelihood + 6,
        "assignment_gradient_kernel": vote + likelihood + slope + 2,
        "edge_product_kernel": 2,
        "child_gradient_kernel": sweep,
        "weight_view_kernel": sweep,
        "pose_votes_kernel": VOTE,
        "coordinate_addition_kernel": pose,
        "assignment_kernel": vote + likelihood,
        "m_step_gradient_kernel": vote + slope + 4 * pose + 2,
        "e_step_gradient_kernel": vote + 3 * pose + 2,
    }[kernel]


def parent_flops(kernel: str, splits: int = 1, pose: int = POSE) -> int:
    """Operations for each parent."""
    return {
        "fit_kernel": splits * (7 * pose + 3) + 5 * pose + 16,
        "slopes_kernel": splits * (2 * pose + 1) + 14 * pose + 12,
        "moments_kernel": splits * (7 * pose + 3) + 2 * pose + 1,
        "component_gradients_kernel": splits * (2 * pose + 1) + 3 * pose,
        "components_kernel": pose,
        "slopes_of_moments_kernel": 4 * pose + 1,
        "outputs_kernel": 4,
    }[kernel]


def launch_metadata(grid: tuple[int, ...], kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Triton's hook: name, operations and bytes of a launch over edges, for profilers."""
    pairs = len(args["p_pair_slot"]) if "p_pair_slot" in args else args["P"] * args["S"]
    is_all = args.get("ALL", True)
    flops = edge_flops(
        kernel.name,
        args.get("WEIGHTS", "assignment"),
        is_all,
        args.get("T", 1) - 1 if is_all else 1,
        args.get("COUNT", args.get("H", POSE)),
        args.get("p_votes") is not None or args.get("p_dV") is not None,
    )
    return _metadata(kernel, args, args["N"] * pairs * args["B"] * args["C"] * flops)


def parent_metadata(grid: tuple[int, ...], kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Triton's hook for a launch over parents."""
    flops = parent_flops(kernel.name, args.get("splits", 1), args.get("H", POSE))
    return _metadata(kernel, args, args["rows"] * args["C"] * flops)


def sum_metadata(grid: tuple[int, ...], kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Triton's hook for a sum over splits."""
    return _metadata(kernel, args, args["size"] * args["splits"])


def _metadata(kernel: Any, args: dict[str, Any], flops: int) -> dict[str, Any]:
    tensors = [arg for arg in args.values() if hasattr(arg, "element_size")]
    return {
        "name": kernel.name,
        "flops": flops,
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    }


def em_routing_costs(
    N: int, L: int, P: int, S: int, B: int, C: int, K: int, pairs: int, T: int = 3, size: int = 4
) -> tuple[list[Cost], list[Cost]]:
    """The launches of EM routing with T iterations and global competition: a list for each of forward and backward.

    N images, L child locations, P parent locations with S slots, B child types, C parent types, K weight blocks,
    `pairs` edges, and `size` bytes for each number.
    """
    chosen = config.choose(P, S, B, C, K, pairs, size == 8)
    parent_tile, child_tile, gradient_tile, splits = chosen.parent, chosen.child, chosen.gradient, chosen.parent_splits
    inputs, weight, group, parent = 17 * N * L * B + POSE * K * B * C, POSE * K * B * C, N * L * B, N * P * C
    moments = (2 * POSE + 1) * parent * splits
    image_splits = min(chosen.image_splits, config.blocks(N, gradient_tile.BN))
    partial = weight * chosen.pair_splits * image_splits
    each_image = config.type_blocks(C) * P * splits
    parent_programs, forward_programs = (config.blocks(N, x.BN) * each_image for x in (parent_tile, chosen.forward))
    child_programs = config.blocks(N, child_tile.BN) * config.blocks(B, child_tile.BB) * L
    sweep_programs = config.blocks(N, gradient_tile.BN) * config.blocks(B, gradient_tile.BB) * L
    weight_programs = config.blocks(B, gradient_tile.BB) * config.type_blocks(C) * K
    weight_programs *= chosen.pair_splits * image_splits
    second_programs = config.blocks(N * P * config.type_blocks(C) * config.TYPES.value, config.PARENTS)
    later = (POSE + 1) * parent + 2 * group + POSE * parent  # precision and constant; log_sum and da; shift
    iterations = POSE * parent + (T - 1) * later + T * (2 * POSE + 1) * parent

    def edge(kernel: str, launches: int, programs: int, numbers: int, **options: Any) -> Cost:
        flops, weights = launches * N * pairs * B * C * edge_flops(kernel, **options), options.get("weights", "")
        tile, inner = chosen.child, config.type_blocks(C)  # inner loop of the child view: type blocks of a pair
        if kernel == "parent_view_kernel":  # inner loop: blocks of child types of a slot
            tile = chosen.parent if weights == "gradient" else chosen.forward
            inner = config.blocks(B, tile.BB)
        elif kernel in ("child_gradient_kernel", "weight_view_kernel"):
            tile = chosen.gradient
        if kernel == "weight_view_kernel":  # inner loop: blocks of images of a pair
            inner = config.blocks(N, tile.BN * image_splits)
        images, children = (tile_size * config.blocks(n, tile_size) for n, tile_size in ((N, tile.BN), (B, tile.BB)))
        votes = launches * images * pairs * children * config.type_blocks(C) * config.TYPES.value
        per_thread = tile.BN * tile.BB * config.TYPES.value // (tile.num_warps * config.WARP)
        trips = (1 / inner, 1, options.get("later", 0))
        return Cost(kernel, launches, programs, flops, launches * numbers * size, weights, votes, per_thread, trips)

    def each_parent(kernel: str, splits: list[int], numbers: int) -> Cost:
        """`splits`: for each launch, the number of splits that it adds."""
        flops = parent * sum(parent_flops(kernel, count) for count in splits)
        return Cost(kernel, len(splits), second_programs, flops, numbers * size)

    seen_before = GAUSSIAN * parent + group
    forward = [
        edge("parent_view_kernel", 1, forward_programs, inputs + moments, weights="uniform"),
        edge("log_sum_kernel", T - 1, child_programs, inputs + seen_before),
        edge("parent_view_kernel", T - 1, forward_programs, inputs + seen_before + moments, weights="assignment"),
        each_parent("fit_kernel", T * [splits], T * (moments + 36 * parent) + (T - 1) * POSE * parent),
        each_parent("outputs_kernel", [0], 2 * (POSE + 1) * parent),
    ]
    seen = inputs + (GAUSSIAN + SLOPES) * parent + 2 * group
    shifted = 2 * POSE * parent  # previous means, and shifts
    backward = [
        edge("assignment_gradient_kernel", T - 1, child_programs, seen),
        edge("parent_view_kernel", T - 1, parent_programs, seen + moments, weights="gradient"),
        each_parent(
            "slopes_kernel",
            [0] + (T - 1) * [splits],
            (POSE + 1 + T * (36 + 2 * POSE + 3)) * parent + (T - 1) * (moments + shifted),
        ),
        edge("child_gradient_kernel", 1, sweep_programs, inputs + iterations + 17 * N * L * B, later=T - 1),
        edge("weight_view_kernel", 1, weight_programs, inputs + iterations + partial, later=T - 1),
        Cost("add_splits_kernel", 1, config.blocks(weight, config.NUMBERS), partial, (partial + weight) * size),
    ]
    return [x for x in forward if x.launches], [x for x in backward if x.launches]
