"""Estimates of the cost of EM routing on a GPU, by counting. The program needs no GPU and measures no times.

    python bench/gpu_estimate.py               the layers of the paper's two networks, at batch 64
    python bench/gpu_estimate.py --resources   registers, shared memory and occupancy of all compiled kernels, or of
                                               the named ones
    python bench/gpu_estimate.py --smoke       one layer

Operations and bytes of our kernels come from `kernels/mixture/triton/costs.py`, which profilers also use. For the eager
reference, the operators are counted on meta tensors. Instructions are those of the loops around a vote in the machine
code for NVIDIA GPUs; `resources.json` has their numbers, and --compile counts them again with the installed Triton. A
time is a roofline: the largest of operations at the peak rate, bytes at the peak bandwidth, and instructions at the
rate at which schedulers issue them. It is an estimate and a lower bound, for our kernels and for the reference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import aligned, cells, lines_of, save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tritoncaps import EMRouting, RoutingMap, reference
from tritoncaps.kernels.common.triton import resources as of_kernels
from tritoncaps.kernels.common.triton.launching import REFERENCE_BATCH, WARP
from tritoncaps.kernels.mixture.triton.costs import Cost, em_routing_costs

BATCH = 64
PROVIDERS = ("tritoncaps", "eager reference")
ITERATIONS = 3


class Gpu(NamedTuple):
    """Peak rates that the manufacturers publish, and the target of the compiler."""

    target: str
    flops: float  # float32, without tensor cores
    bandwidth: float  # bytes per second
    issue: float = float("inf")  # instructions of a warp per second: multiprocessors, four schedulers, clock

    def seconds(self, cost: Cost) -> float:
        issued = (per_vote(cost, self.target) or 0) * cost.votes / WARP
        return max(cost.flops / self.flops, cost.bytes / self.bandwidth, issued / self.issue)


GPUS = {
    "A100": Gpu("sm_80", 19.5e12, 2.039e12, 108 * 4 * 1.41e9),
    "H100": Gpu("sm_90", 66.9e12, 3.35e12, 132 * 4 * 1.98e9),
    "MI300X": Gpu("gfx942", 163.4e12, 5.3e12),
}  # 80 GB SXM, SXM


class Layer(NamedTuple):
    routing_map: RoutingMap
    in_caps: int
    out_caps: int

    def costs(self, images: int) -> tuple[list[Cost], list[Cost]]:
        """The launches of our kernels, forward and backward."""
        m = self.routing_map
        sizes = (images, m.num_children, m.num_parents, m.num_slots, self.in_caps, self.out_caps)
        return em_routing_costs(*sizes, m.num_weights, m.num_edges, ITERATIONS)


def layers(first: int, later: int) -> dict[str, Layer]:
    """The capsule layers of the paper's network with these numbers of types, on smallNORB: 14x14 primary capsules."""
    return {
        f"ConvCaps1 {first}->{later}": Layer(RoutingMap.conv((14, 14), 3, stride=2), first, later),
        f"ConvCaps2 {later}->{later}": Layer(RoutingMap.conv((6, 6), 3), later, later),
        f"ClassCaps {later}->5": Layer(RoutingMap.full((4, 4)), later, 5),
    }


NETWORKS = {"MatrixCapsNet": layers(32, 32), "MatrixCapsNet.small": layers(8, 16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=BATCH, help=f"images [{BATCH}]")
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS), help="GPUs of the rooflines [all]")
    parser.add_argument("--resources", nargs="*", metavar="NAME", help="print a table of compiled kernels, as Markdown")
    parser.add_argument("--compile", action="store_true", help="count instructions again; needs no GPU")
    parser.add_argument("--smoke", action="store_true", help="one layer")
    parser.add_argument("--json", type=Path, help="also write the rows to this file, one JSON object in each line")
    args = parser.parse_args()
    if args.resources is not None:
        rows = resources(args.resources)
    else:
        gpus = {name: GPUS[name] for name in args.gpus}
        if args.compile:
            count_instructions({gpu.target for gpu in gpus.values()})
        print("ESTIMATES BY COUNTING, float32: roofline times are lower bounds, nothing was measured on a GPU")
        if args.smoke:
            rows = estimate(*next(iter(NETWORKS["MatrixCapsNet"].items())), args.batch, gpus)
        else:
            rows = [row for name in NETWORKS for row in estimate_network(name, args.batch, gpus)]
    if args.json:
        save(args.json, lines_of(rows))


def estimate_network(name: str, batch: int, gpus: dict[str, Gpu]) -> list[dict]:
    """Print and return the rows of each routed layer, and their sums."""
    found = [row for layer in NETWORKS[name].items() for row in estimate(*layer, batch, gpus)]
    sums = []
    for provider in PROVIDERS:
        parts = [row for row in found if row["kernel"] == provider]
        counted = {key: sum(row[key] for row in parts) for key in ("launches", "flops", "bytes", *gpus)}
        sums.append({"layer": name, "kernel": provider, **counted})
    print(f"\n{name}: the routed layers together, batch {batch}, {ITERATIONS} iterations, forward and backward")
    print_rows(sums, gpus)
    return found + sums


def estimate(name: str, layer: Layer, batch: int, gpus: dict[str, Gpu]) -> list[dict]:
    """Print and return a row for each kind of launch, for our whole step, and for the step of the eager reference."""
    launches = [x for part in layer.costs(batch) for x in part]
    few = [x.programs for part in layer.costs(REFERENCE_BATCH) for x in part]
    both = dict(zip(PROVIDERS, (launches, eager_operators(layer, batch)), strict=True))
    sums = [row(name, provider, costs, gpus) for provider, costs in both.items()]
    rows = []
    for x, n in zip(launches, few, strict=True):
        used = {gpu: compiled(x, GPUS[gpu].target) for gpu in gpus}
        held = {f"{gpu} registers": needs["registers"] for gpu, needs in used.items()}
        held |= {f"{gpu} occupancy": occupancy(GPUS[gpu].target, needs) for gpu, needs in used.items()}
        rows.append({**row(name, x.name, [x], gpus), "programs": x.programs, "programs_at_16": n, **held})
    print(f"\n{name}: {layer.routing_map}, batch {batch}, {ITERATIONS} iterations, forward and backward")
    print_rows([*rows, *sums], gpus)
    return [*rows, *sums]


def print_rows(rows: list[dict], gpus: dict[str, Gpu]) -> None:
    """Print a table whose last rows are both providers, and the ratio of their traffic."""
    columns: dict[str, Callable[[dict], str]] = {
        "kernel": lambda r: r["kernel"],
        "launches": lambda r: str(r["launches"]),
        "programs": lambda r: str(r.get("programs", "")),
        "at batch 16": lambda r: str(r.get("programs_at_16", "")),
        "GFLOP": lambda r: f"{r['flops'] / 1e9:.2f}",
        "MB": lambda r: f"{r['bytes'] / 1e6:.1f}",
        "FLOP/byte": lambda r: f"{r['flops'] / r['bytes']:.1f}",
        "instructions a vote": lambda r: " / ".join(f"{r[key]:.0f}" for key in r if key.endswith("instructions")),
        **{f"{gpu} us": lambda r, gpu=gpu: f"{r[gpu] * 1e6:.1f}" for gpu in gpus},
        "registers": lambda r: " / ".join(str(r[key]) for key in r if key.endswith("registers")),
        "occupancy": lambda r: " / ".join(f"{r[key]:.0%}" for key in r if key.endswith("occupancy")),
    }
    print(aligned(cells(rows, columns)))
    ours, eager = rows[-2:]
    print(f"our traffic is {ours['bytes'] / eager['bytes']:.2%} of the traffic of the eager reference")


def row(layer: str, name: str, costs: list[Cost], gpus: dict[str, Gpu]) -> dict[str, Any]:
    """The sums of all costs and times: launches run one after the other."""
    sums = {key: sum(getattr(x, key) for x in costs) for key in ("launches", "flops", "bytes")}
    times = {name: sum(gpu.seconds(x) for x in costs) for name, gpu in gpus.items()}
    counted = {f"{name} instructions": instructions(costs, gpu.target) for name, gpu in gpus.items()}
    return {"layer": layer, "kernel": name, **sums, **times, **{key: n for key, n in counted.items() if n}}


def instructions(costs: list[Cost], target: str) -> float:
    """Of a thread, for each vote of the layer: all launches together."""
    return sum((per_vote(x, target) or 0) * x.launches for x in costs)


def per_vote(cost: Cost, target: str) -> float | None:
    """Instructions of a thread for a vote, in one launch; None if they are not counted."""
    loops = compiled(cost, target).get("loops") if cost.votes else None
    if not loops:
        return None
    return sum(size * times for size, times in zip(loops, cost.trips, strict=False)) / cost.per_thread


def count_instructions(targets: set[str]) -> None:
    """Compile the kernels of EM routing, and take the counts of their loops."""
    counted = {
        x.name for layer in NETWORKS["MatrixCapsNet"].values() for part in layer.costs(1) for x in part if x.votes
    }
    for target in targets:
        for variant in of_kernels.variants(target):
            if variant.name in counted:
                budgets()[target][variant.name] = of_kernels.measure(variant, target)


class Counter(TorchDispatchMode):
    """Lists the operators that compute, with their operations and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[Cost] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs, outputs = tensors((args, kwargs)), tensors(result)
        known = {storage(x) for x in inputs}
        is_view = all(storage(x) in known for x in outputs) and not function._schema.is_mutable
        if inputs and outputs and not is_view:
            formula = flop_registry.get(function.overloadpacket)
            flops = formula(*args, **(kwargs or {}), out_val=result) if formula else sum(x.numel() for x in outputs)
            self.costs.append(Cost(str(function), 1, 0, flops, sum(touched(x) for x in (*inputs, *outputs))))
        return result


def eager_operators(layer: Layer, images: int) -> list[Cost]:
    """The operators of a training step of the einops reference, on meta tensors."""
    m, B, C = layer
    shapes = ((images, B, *m.in_size, 4, 4), (images, B, *m.in_size), (m.num_weights, B, C, 4, 4), (C,), (C,))
    inputs = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    with Counter() as counter:
        capsules = reference.em_routing(*inputs, m, EMRouting(ITERATIONS))
        torch.autograd.grad([x.sum() for x in capsules], inputs)
    return counter.costs


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def touched(x: Tensor) -> int:
    """Bytes of memory of a tensor; an expanded tensor is read once."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def compiled(cost: Cost, target: str) -> dict[str, Any]:
    """The resources of the kernel."""
    return budgets()[target][cost.name]


@cache
def budgets() -> dict[str, dict[str, dict[str, Any]]]:
    return of_kernels.budget()


def resources(names: list[str]) -> list[dict]:
    """Print the resources of compiled kernels as Markdown, and return them. Without names: of all kernels."""
    targets = budgets()
    print("| kernel | " + " | ".join(targets) + " |\n| --- |" + " --- |" * len(targets))
    rows = []
    for name in next(iter(targets.values())):
        is_wanted = not names or name.split()[0] in names
        if not is_wanted or not all(name in kernels for kernels in targets.values()):
            continue
        used = {
            target: {**kernels[name], "occupancy": occupancy(target, kernels[name])}
            for target, kernels in targets.items()
        }
        cells = (f"{x['registers']} / {x['shared']} B / {x['occupancy']:.0%}" for x in used.values())
        print(f"| {name} | " + " | ".join(cells) + " |")
        rows += [{"kernel": name, "target": target, **x} for target, x in used.items()]
    print("\nRegisters of a thread / shared memory of a program / occupancy: warps that fit, as a part of the maximum.")
    return rows


def occupancy(target: str, used: dict[str, Any]) -> float:
    """Warps that fit into the registers of a multiprocessor, as a part of the maximum. Shared memory is no limit."""
    given = 8 * -(-used["registers"] // 8)  # registers are allocated in multiples of eight
    if target.startswith("gfx"):  # four SIMDs of eight waves, with 512 registers for each of 64 lanes
        most, fit = 32, 4 * min(8, 512 // given)
    else:
        most, fit = 64, min(64, 65536 // (32 * given))
    return fit // used["warps"] * used["warps"] / most


if __name__ == "__main__":
    main()
