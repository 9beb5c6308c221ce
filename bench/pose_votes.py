"""pose_votes: compute votes and store them, for your own routings."""

from __future__ import annotations

from command import main
from harness import Case
from problems import chosen, stored
from torch import Tensor

from tritoncaps import functional, reference
from tritoncaps.testing import Problem


def cases(level: str) -> list[Case]:
    return [case(name, problem) for name, problem in chosen(level).items()]


def case(name: str, problem: Problem) -> Case:
    inputs = problem.inputs()

    def pose_votes(poses: Tensor, weight: Tensor) -> list[Tensor]:
        return [functional.pose_votes(poses, weight, problem.routing_map)]

    def by_reference(poses: Tensor, weight: Tensor) -> list[Tensor]:
        return [reference.pose_votes(poses, weight, problem.routing_map)]

    return stored(name, problem, pose_votes, by_reference, [inputs.poses, inputs.weight], data=1)


if __name__ == "__main__":
    main({"pose_votes": cases}, __doc__)
