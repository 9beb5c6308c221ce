"""EM routing of one layer: our kernels beside the einops reference, eager and compiled, in one run.

    python bench/em_routing.py                  the paper's first ConvCaps layer, at batch 4
    python bench/em_routing.py --scaling        time per vote over image sizes, batches, types and threads
    python bench/em_routing.py --smoke          seconds: does it run?

Repetitions are interleaved, so that a noisy machine disturbs all alike; the roof is sgemm, measured among them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tritoncaps import RoutingMap, functional, reference
from tritoncaps.kernels.flops import backward_flops, forward_flops, votes
from tritoncaps.testing import Problem

PAPER = Problem(RoutingMap.conv((14, 14), 3, stride=2), images=4, in_caps=32, out_caps=32)
SMALL = PAPER.but(in_caps=8, out_caps=16)
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scaling", action="store_true", help="time per vote over sizes, batches, types and threads")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, seconds")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the rows to this file, one JSON object a line")
    args = parser.parse_args()
    print(header())
    if args.smoke:
        tiny = Problem(RoutingMap.conv((4, 4), 3), images=2, in_caps=4, out_caps=8)
        rows = compare("tiny", tiny, 2, compiled=False)
    elif args.scaling:
        rows = scaling(args.repeats)
    else:
        rows = compare("paper, 32 to 32 types", PAPER, args.repeats) + compare(
            "small, 8 to 16 types", SMALL, args.repeats
        )
        rows += [memory("paper, 32 to 32 types", PAPER), memory("64 to 64 types", PAPER.but(in_caps=64, out_caps=64))]
        rows += first_call()
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


def compare(name: str, problem: Problem, repeats: int, compiled: bool = True) -> list[dict]:
    """Forward and full step of each provider, and sgemm, in turn."""
    providers = {"tritoncaps": functional.em_routing, "reference": reference.em_routing}
    if compiled:
        providers["reference, compiled"] = torch.compile(reference.em_routing)
    calls: dict[tuple[str, str], Callable[[], object]] = {("sgemm", "roof"): sgemm}
    for provider, route in providers.items():
        calls[provider, "forward"] = forward(problem, route)
        calls[provider, "step"] = step(problem, route)
    seconds = interleaved(calls, repeats)
    roof = SGEMM_FLOPS / seconds["sgemm", "roof"]
    print(f"\n{name}: {problem.routing_map}, batch {problem.images}, {problem.routing.iterations} iterations")
    print(f"sgemm: {roof / 1e9:.0f} GFLOP/s on {torch.get_num_threads()} threads")
    print(f"{'provider':<22}{'mode':<9}{'ms':>9}{'GFLOP/s':>9}{'of sgemm':>10}{'our speed-up':>14}")
    rows = []
    for (provider, mode), time_taken in seconds.items():
        if provider == "sgemm":
            continue
        row = {"case": name, "provider": provider, "mode": mode, "ms": time_taken * 1e3}
        text = f"{provider:<22}{mode:<9}{row['ms']:>9.2f}"
        if provider == "tritoncaps":
            row["gflops"] = flops(problem, mode) / time_taken / 1e9
            row["of_sgemm"] = row["gflops"] * 1e9 / roof
            text += f"{row['gflops']:>9.1f}{row['of_sgemm']:>10.0%}"
        else:
            row["speed_up"] = time_taken / seconds["tritoncaps", mode]
            text += f"{'':>19}{row['speed_up']:>13.1f}x"
        print(text)
        rows.append(row)
    return rows


def scaling(repeats: int) -> list[dict]:
    """Time per vote of a full step, relative to the first row of each group."""
    image = {
        f"image {n}x{n}": PAPER.but(routing_map=RoutingMap.conv((n, n), 3, stride=2), images=1) for n in (32, 64, 128)
    }
    batch = {f"batch {n}": PAPER.but(images=n) for n in (1, 4, 16, 64)}
    types = {
        f"{b} to {c} types": PAPER.but(in_caps=b, out_caps=c)
        for b, c in ((32, 32), (8, 16), (16, 16), (16, 5), (64, 64))
    }
    rows = []
    for title, group in (("image size", image), ("batch", batch), ("types", types)):
        seconds = interleaved({name: step(p, functional.em_routing) for name, p in group.items()}, repeats)
        print(f"\n{title}: full step")
        first = None
        for name, problem in group.items():
            per_vote = seconds[name] / count(problem)
            first = first or per_vote
            print(f"  {name:<18}{seconds[name] * 1e3:>10.2f} ms{per_vote * 1e9:>9.1f} ns/vote{per_vote / first:>8.2f}")
            rows.append({"case": name, "ms": seconds[name] * 1e3, "ns_per_vote": per_vote * 1e9})
    return rows + threads(repeats)


def threads(repeats: int) -> list[dict]:
    available = torch.get_num_threads()

    def with_threads(n: int) -> Callable[[], object]:
        run = step(PAPER, functional.em_routing)

        def call() -> None:
            torch.set_num_threads(n)
            run()
            torch.set_num_threads(available)

        return call

    seconds = interleaved({n: with_threads(n) for n in range(1, available + 1)}, repeats)
    print("\nthreads: full step")
    for n, time_taken in seconds.items():
        print(f"  {n:<18}{time_taken * 1e3:>10.2f} ms{seconds[1] / time_taken:>8.2f}x")
    return [{"case": f"{n} threads", "ms": t * 1e3, "speed_up": seconds[1] / t} for n, t in seconds.items()]


def memory(name: str, problem: Problem) -> dict:
    """What autograd keeps for the backward pass, without parameters; the peak above the inputs, in a fresh process."""
    kept = {
        provider: kept_bytes(problem, route)
        for provider, route in (("tritoncaps", functional.em_routing), ("reference", reference.em_routing))
    }
    folder = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import em_routing as bench; "
    code += f"bench.print_peak({problem.in_caps}, {problem.out_caps})"
    peak = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    row = {"case": name, "peak_mib": peak / MIB, **{f"kept_mib_{k}": v / problem.images / MIB for k, v in kept.items()}}
    print(
        f"\nmemory, {name}: kept for backward, per image: {row['kept_mib_tritoncaps']:.2f} MiB "
        f"(reference: {row['kept_mib_reference']:.0f} MiB); "
        f"peak of a step above its inputs, batch {problem.images}: {peak / MIB:.1f} MiB"
    )
    return row


def kept_bytes(problem: Problem, route: Callable) -> int:
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if x.is_floating_point():
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    inputs = problem.inputs(torch.float32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        problem.solve(route, inputs)
    for parameter in inputs[2:]:
        seen.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(seen.values())


def print_peak(in_caps: int, out_caps: int) -> None:
    """The growth of the peak resident size during a second step (the first compiles), in bytes."""
    problem = PAPER.but(in_caps=in_caps, out_caps=out_caps)
    step(SMALL.but(images=1), functional.em_routing)()
    run = step(problem, functional.em_routing)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    run()
    print(_resident("VmHWM") - before)


def _resident(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def first_call() -> list[dict]:
    """Seconds of the first step in a fresh process, without and with compiled kernels on disk."""
    code = (
        "import time, torch, tritoncaps as t, tritoncaps.ops\n"
        "layer, c = t.ClassCaps(3, 4), t.Capsules(torch.randn(1, 3, 2, 4, 4), torch.rand(1, 3, 2))\n"
        "start = time.time(); layer(c).poses.sum().backward(); print(time.time() - start)"
    )
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "from the cache"):
            environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
            out = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
            )
            rows.append({"case": f"first call, {state}", "seconds": float(out.stdout)})
            print(f"first call, {state}: {rows[-1]['seconds']:.1f} s")
    return rows


def forward(problem: Problem, route: Callable) -> Callable[[], object]:
    inputs = problem.inputs(torch.float32)

    def call() -> object:
        with torch.no_grad():
            return problem.solve(route, inputs)

    return call


def step(problem: Problem, route: Callable) -> Callable[[], object]:
    inputs = problem.inputs(torch.float32, requires_grad=True)

    def call() -> object:
        capsules = problem.solve(route, inputs)
        return torch.autograd.grad([x.sum() for x in capsules], inputs)

    return call


SGEMM = 1024
SGEMM_FLOPS = 2 * SGEMM**3
_a, _b = torch.randn(2, SGEMM, SGEMM)


def sgemm() -> Tensor:
    return _a @ _b


def flops(problem: Problem, mode: str) -> float:
    iterations = problem.routing.iterations
    each = forward_flops(iterations) + (backward_flops(iterations) if mode == "step" else 0)
    return each * count(problem)


def count(problem: Problem) -> int:
    return votes(problem.routing_map, problem.images, problem.in_caps, problem.out_caps)


def interleaved(calls: dict, repeats: int) -> dict:
    """The median seconds of each call; one round warms up, then each round calls all in turn."""
    taken: dict = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round_ > 0:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def header() -> str:
    return (
        f"device: CPU ({processor()}), {torch.get_num_threads()} threads, float32; torch {torch.__version__}, "
        f"Python {platform.python_version()}, commit {commit()}"
    )


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
