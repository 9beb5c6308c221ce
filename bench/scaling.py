"""Scaling of EM routing: time per vote of a step over batch, image size, types, kernel size, iterations and threads."""

from __future__ import annotations

import torch
from command import main
from em_routing import case
from harness import IS_GPU, OURS, Case
from problems import SMALL, TINY, conv_problem

from tritoncaps import EMRouting
from tritoncaps.testing import Problem


def cases(level: str) -> list[Case]:
    if level == "smoke":
        return [case_of("batch", n, TINY.but(images=n)) for n in (1, 2)]
    is_quick = level == "quick"
    batches, sides = ((1, 4, 8), (16, 32)) if is_quick else ((1, 4, 16, 64), (16, 32, 48, 64))
    batches = (16, 64, 256) if IS_GPU else batches
    types, iterations = ((8, 32), (1, 3)) if is_quick else ((8, 16, 24, 32, 64), (1, 2, 3, 4))
    one = SMALL.but(images=1)
    return [
        *(case_of("batch", n, SMALL.but(images=n)) for n in batches),
        *(case_of("image side", n, one.but(routing_map=conv_problem(n))) for n in sides),
        *(case_of("parent types", n, one.but(out_caps=n)) for n in types),
        *(case_of("kernel size", n, one.but(routing_map=conv_problem(14, n))) for n in (1, 3, 5)),
        *(case_of("iterations", n, one.but(routing=EMRouting(n))) for n in iterations),
        *(thread_case(n) for n in range(1, torch.get_num_threads() + 1) if not IS_GPU),
    ]


def case_of(group: str, x: int, problem: Problem, threads: int | None = None) -> Case:
    single = {"timed": (OURS,), "modes": ("step",), "rivals": ()}
    return case("scaling", f"{group} {x}", problem, group=group, x=x, threads=threads, **single)


def thread_case(count: int) -> Case:
    return case_of("threads", count, SMALL, threads=count)


if __name__ == "__main__":
    main({"scaling": cases}, __doc__)
