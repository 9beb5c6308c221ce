"""Memory of a layer: the memory that autograd keeps for the backward pass, and the peak of a step in a new process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import em_routing
import torch
from command import main
from harness import DEVICE, MIB, OURS, REFERENCE, Case, Row, kept_bytes, reset_resident_peak, resident_peak
from problems import CLASSES, PAPER, SMALL, TINY

from tritoncaps import RoutingMap
from tritoncaps.testing import Problem


def problems(level: str) -> dict[str, Problem]:
    """The routed layers of the paper's two networks; a quick run uses one image for each."""
    if level == "smoke":
        return {"tiny": TINY}
    second = RoutingMap.conv((6, 6), 3)
    layers = {
        "ConvCaps1, 8 to 16": SMALL.but(images=16),
        "ConvCaps2, 16 to 16": SMALL.but(images=16, routing_map=second, in_caps=16),
        "ClassCaps, 16 to 5": CLASSES.but(images=64),
        "ConvCaps1, 32 to 32": PAPER,
        "ConvCaps2, 32 to 32": PAPER.but(routing_map=second),
        "ClassCaps, 32 to 5": CLASSES.but(images=64, in_caps=32),
    }
    return {name: problem.but(images=1) for name, problem in layers.items()} if level == "quick" else layers


def cases(level: str) -> list[Memory]:
    """The cases; a quick run measures the peak of only one layer."""
    return [
        Memory(name, em_routing.case("memory", name, problem), level != "quick" or name == "ConvCaps1, 32 to 32")
        for name, problem in problems(level).items()
    ]


@dataclass(frozen=True)
class Memory:
    name: str
    case: Case
    has_peak: bool
    subject: str = "memory"

    def rows(self, level: str, repeats: int | None = None) -> list[Row]:
        case = self.case
        known = {"subject": self.subject, "case": self.name, "mode": "step", "images": case.images}
        functions = {OURS: case.ours, REFERENCE: case.reference}
        rows = [known | {"provider": provider} for provider in functions]
        with ThreadPoolExecutor() as pool:
            measured = functions if self.has_peak else ()
            peaks = pool.map(lambda provider: peak_in_a_fresh_process(level, self.name, provider), measured)
            for row, function in zip(rows, functions.values(), strict=True):
                row["kept_mib"] = kept_bytes(function, case.tensors(), case.data) / case.images / MIB
            for row, peak in zip(rows, peaks, strict=False):
                row["peak_mib"] = peak / case.images / MIB
        return rows


def peak_in_a_fresh_process(level: str, name: str, provider: str) -> float:
    code = f"import memory; memory.print_peak({level!r}, {name!r}, {provider!r})"
    command = [sys.executable, "-c", code]
    return float(subprocess.check_output(command, cwd=Path(__file__).parent, text=True))


def print_peak(level: str, name: str, provider: str) -> None:
    """Print the peak memory of a step above the memory before it, in bytes, after a first step that compiles."""
    problem = problems(level)[name]
    run(em_routing.case("memory", name, problem.but(images=1, in_caps=2, out_caps=2)), provider)()
    step = run(em_routing.case("memory", name, problem), provider)
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        print(torch.cuda.max_memory_allocated() - before)
        return
    before = reset_resident_peak()
    step()
    print(resident_peak() - before)


def run(case: Case, provider: str) -> Callable[[], object]:
    function = case.ours if provider == OURS else case.reference
    return case.call(function, case.tensors, case.data, "step", torch.float32)


if __name__ == "__main__":
    main({"memory": cases}, __doc__)
