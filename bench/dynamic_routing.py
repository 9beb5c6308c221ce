"""Dynamic routing of CapsNet's class capsules: our kernels beside the einops reference, eager and compiled, in one run.

    python bench/dynamic_routing.py             1152 capsules of 8 numbers to 10 of 16, at batch 128; a training step
    python bench/dynamic_routing.py --smoke     seconds: does it run?

Repetitions are interleaved, so that a noisy machine disturbs all alike; medians are shown, and minima beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from em_routing import MIB, SGEMM_FLOPS, header, sgemm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tritoncaps import RoutingMap, functional, reference, use_backend
from tritoncaps.models import CapsNet
from tritoncaps.testing import VectorProblem

CLASSES = VectorProblem(RoutingMap.full(()), images=128, in_caps=1152, out_caps=10, in_dim=8, out_dim=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, seconds")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--images", type=int, default=CLASSES.images, help="the batch")
    parser.add_argument("--json", type=Path, help="also write the rows to this file, one JSON object a line")
    args = parser.parse_args()
    print(header())
    if args.smoke:
        tiny = CLASSES.but(images=3, in_caps=20)
        rows = compare("tiny", tiny, 2, compiled=False) + [memory(tiny), traffic(tiny)]
    else:
        problem = CLASSES.but(images=args.images)
        rows = compare("class capsules", problem, args.repeats) + [memory(problem), traffic(problem)]
        rows += training_step(args.images, max(2, args.repeats // 3))
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


def compare(name: str, problem: VectorProblem, repeats: int, compiled: bool = True) -> list[dict]:
    """Forward and full step of each provider, and sgemm, in turn."""
    providers: dict[str, Callable] = {"tritoncaps": functional.dynamic_routing, "reference": reference.dynamic_routing}
    if compiled:
        providers["reference, compiled"] = torch.compile(reference.dynamic_routing)
    calls: dict[tuple[str, str], Callable[[], object]] = {("sgemm", "roof"): sgemm}
    for provider, route in providers.items():
        calls[provider, "forward"] = forward(problem, route)
        calls[provider, "step"] = step(problem, route)
    seconds = interleaved(calls, repeats)
    roof = SGEMM_FLOPS / seconds["sgemm", "roof"][0]
    print(
        f"\n{name}: {problem.in_caps} of {problem.in_dim} numbers to {problem.out_caps} of {problem.out_dim}, batch ",
        end="",
    )
    print(f"{problem.images}, {problem.routing.iterations} iterations; sgemm: {roof / 1e9:.0f} GFLOP/s")
    print(f"{'provider':<22}{'mode':<9}{'ms':>9}{'least':>9}{'our speed-up':>14}{'by least':>10}")
    rows = []
    for (provider, mode), (median, least) in seconds.items():
        if provider == "sgemm":
            continue
        row = {"case": name, "provider": provider, "mode": mode, "ms": median * 1e3, "least_ms": least * 1e3}
        text = f"{provider:<22}{mode:<9}{median * 1e3:>9.2f}{least * 1e3:>9.2f}"
        if provider != "tritoncaps":
            ours = seconds["tritoncaps", mode]
            row["speed_up"], row["speed_up_by_least"] = median / ours[0], least / ours[1]
            text += f"{row['speed_up']:>13.1f}x{row['speed_up_by_least']:>9.1f}x"
        print(text)
        rows.append(row)
    return rows


def memory(problem: VectorProblem) -> dict:
    """What autograd keeps for the backward pass beyond inputs and outputs, for each image."""
    kept = {
        provider: kept_bytes(problem, route) / problem.images / MIB
        for provider, route in (("ours", functional.dynamic_routing), ("reference", reference.dynamic_routing))
    }
    print(f"kept for backward, per image, beyond inputs and outputs: {kept['ours']:.4f} MiB ", end="")
    print(f"(reference: {kept['reference']:.1f} MiB)")
    return {"case": "memory", **{f"kept_mib_{name}": value for name, value in kept.items()}}


def kept_bytes(problem: VectorProblem, route: Callable) -> int:
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if x.is_floating_point():
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    inputs = problem.inputs(torch.float32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        parents = problem.solve(route, inputs)
    for x in (*inputs, parents, *problem.routing_map.tables()):
        seen.pop(x.untyped_storage().data_ptr(), None)
    return sum(seen.values())


def traffic(problem: VectorProblem) -> dict:
    """Bytes of every array that a Triton launch, or an operator of the eager reference, reads or writes, each once."""
    from tritoncaps.kernels.triton.dynamic_costs import routing_bytes

    table = problem.routing_map
    sizes = (problem.images, table.num_children, table.num_parents, table.num_slots, problem.in_caps, problem.out_caps)
    ours = routing_bytes(*sizes, problem.in_dim, problem.out_dim, table.num_weights, table.num_edges)
    with CountBytes() as counter:
        step(problem, reference.dynamic_routing)()
    share = ours / counter.total
    print(
        f"counted traffic of a step: Triton {ours / MIB:.0f} MiB, eager reference {counter.total / MIB:.0f} MiB", end=""
    )
    print(f" ({share:.1%})")
    return {"case": "traffic", "triton_bytes": ours, "reference_bytes": counter.total, "share": share}


class CountBytes(TorchDispatchMode):
    """Adds up the bytes of inputs and outputs of every operator that is not a view."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_flatten((args, kwargs, out))[0] if isinstance(x, Tensor)]
        if not func.is_view and len({x.untyped_storage().data_ptr() for x in tensors}) > 1:
            used = {(x.data_ptr(), x.shape): _bytes(x) for x in tensors}
            self.total += sum(used.values())
        return out


def _bytes(x: Tensor) -> int:
    """Of the elements in memory: an expanded axis counts once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.element_size()


def training_step(images: int, repeats: int) -> list[dict]:
    """Images per second of CapsNet's forward and backward pass with its decoder, with our routing and the reference."""
    model = CapsNet()
    pictures, labels = torch.rand(images, 1, 28, 28), torch.randint(10, (images,))

    def call(backend: str | None) -> Callable[[], object]:
        def run() -> None:
            with use_backend(backend):
                capsules = model(pictures)
                loss = functional.margin_loss(capsules.activations, labels)
                loss = (
                    loss + 0.0005 * F.mse_loss(model.reconstruct(capsules, labels), pictures, reduction="sum") / images
                )
                loss.backward()

        return run

    calls = {"tritoncaps": call(None), "reference": call("reference")}
    seconds = interleaved(calls, repeats)
    print(f"\nCapsNet, training step at batch {images}, 9x9 convolutions included")
    rows = []
    for provider, (median, least) in seconds.items():
        print(f"{provider:<22}{images / median:>8.1f} images/s ({images / least:.1f} at best)")
        rows.append({"case": "CapsNet step", "provider": provider, "ms": median * 1e3, "images_per_s": images / median})
    return rows


def forward(problem: VectorProblem, route: Callable) -> Callable[[], object]:
    poses, weight, _ = problem.inputs(torch.float32)

    def call() -> object:
        with torch.no_grad():
            return route(poses, weight, problem.routing_map, problem.routing)

    return call


def step(problem: VectorProblem, route: Callable) -> Callable[[], object]:
    poses, weight, _ = problem.inputs(torch.float32, requires_grad=True)

    def call() -> object:
        parents = route(poses, weight, problem.routing_map, problem.routing)
        return torch.autograd.grad(parents.sum(), [poses, weight])

    return call


def interleaved(calls: dict, repeats: int) -> dict:
    """The median and least seconds of each call; one round warms up, then each round calls all in turn."""
    taken: dict = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round_ > 0:
                taken[name].append(time.perf_counter() - start)
    return {name: (statistics.median(times), min(times)) for name, times in taken.items()}


if __name__ == "__main__":
    main()
