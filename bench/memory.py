"""Memory per layer: what autograd keeps for the backward pass, and the peak of a step, in a fresh process."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import em_routing
import torch
from command import main
from harness import DEVICE, MIB, OURS, REFERENCE, Case, Row, kept_bytes
from problems import CLASSES, PAPER, SMALL, TINY

from tritoncaps import RoutingMap
from tritoncaps.testing import Problem

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def problems(level: str) -> dict[str, Problem]:
    if level == "smoke":
        return {"tiny": TINY}
    if level == "quick":
        return {"32 to 32 types": PAPER.but(images=1)}
    second = RoutingMap.conv((6, 6), 3)
    return {
        "ConvCaps1, 8 to 16": SMALL.but(images=16),
        "ConvCaps2, 16 to 16": SMALL.but(images=16, routing_map=second, in_caps=16),
        "ClassCaps, 16 to 5": CLASSES.but(images=64),
        "ConvCaps1, 32 to 32": PAPER,
        "ConvCaps2, 32 to 32": PAPER.but(routing_map=second),
    }


def cases(level: str) -> list[Memory]:
    return [Memory(name, em_routing.case("memory", name, problem)) for name, problem in problems(level).items()]


@dataclass(frozen=True)
class Memory:
    name: str
    case: Case
    subject: str = "memory"

    def rows(self, level: str, repeats: int | None = None) -> list[Row]:
        case = self.case
        known = {"subject": self.subject, "case": self.name, "mode": "step", "images": case.images}
        functions = {OURS: case.ours, REFERENCE: case.reference}
        with ThreadPoolExecutor() as pool:
            peaks = pool.map(lambda provider: peak_in_a_fresh_process(level, self.name, provider), functions)
            kept = [kept_bytes(function, case.tensors(), case.data) for function in functions.values()]
        return [
            known | {"provider": provider, "kept_mib": k / case.images / MIB, "peak_mib": p / case.images / MIB}
            for provider, k, p in zip(functions, kept, peaks, strict=True)
        ]


def peak_in_a_fresh_process(level: str, name: str, provider: str) -> float:
    code = f"import memory; memory.print_peak({level!r}, {name!r}, {provider!r})"
    command = [sys.executable, "-c", code]
    return float(subprocess.check_output(command, cwd=Path(__file__).parent, text=True))


def print_peak(level: str, name: str, provider: str) -> None:
    """How far a step, after one that compiles, grows above what the process held before, in bytes."""
    problem = problems(level)[name]
    run(em_routing.case("memory", name, problem.but(images=1, in_caps=2, out_caps=2)), provider)()
    step = run(em_routing.case("memory", name, problem), provider)
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        print(torch.cuda.max_memory_allocated() - before)
        return
    before = _reset_peak()
    step()
    print(_peak() - before)


def run(case: Case, provider: str) -> Callable[[], object]:
    function = case.ours if provider == OURS else case.reference
    return case.call(function, case.tensors, case.data, "step", torch.float32)


def _reset_peak() -> int:
    """The resident size now, from which the peak counts again, where the system can."""
    if not CLEAR.exists():
        return _peak()
    CLEAR.write_text("5")
    return _resident("VmRSS")


def _peak() -> int:
    return _resident("VmHWM") if STATUS.exists() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident(field: str) -> int:
    line = next(x for x in STATUS.read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main({"memory": cases}, __doc__)
