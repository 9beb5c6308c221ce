"""EM routing of one layer: the fused kernels, the einops reference and a convolution with as many multiply-adds."""

from __future__ import annotations

from typing import Any

from command import main
from harness import IS_GPU, OURS, REFERENCE, Case
from problems import PAPER, chosen, count, rival
from torch import Tensor

from tritoncaps import functional, reference
from tritoncaps.testing import Problem


def cases(level: str) -> list[Case]:
    found = [case("em_routing", name, problem) for name, problem in chosen(level).items()]
    if level == "quick" and not IS_GPU:
        found.append(case("em_routing", "32 to 32 types", PAPER.but(images=1), timed=(OURS, REFERENCE)))
    return found


def case(subject: str, name: str, problem: Problem, **options: Any) -> Case:
    def ours(*tensors: Tensor) -> list[Tensor]:
        return list(functional.em_routing(*tensors, problem.routing_map, problem.routing))

    def by_reference(*tensors: Tensor) -> list[Tensor]:
        return list(reference.em_routing(*tensors, problem.routing_map, problem.routing))

    options = {"rivals": (rival(problem),), **options}
    return Case(
        subject,
        name,
        ours,
        by_reference,
        lambda: list(problem.inputs()),
        problem.images,
        data=2,
        votes=count(problem),
        **options,
    )


if __name__ == "__main__":
    main({"em_routing": cases}, __doc__)
