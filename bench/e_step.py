"""e_step: compute the assignments from stored votes."""

from __future__ import annotations

from command import main
from harness import Case
from m_step import INVERSE_TEMPERATURE
from problems import chosen, stored
from torch import Tensor

from tritoncaps import Gaussians, functional, reference
from tritoncaps.testing import Problem


def cases(level: str) -> list[Case]:
    return [case(name, problem) for name, problem in chosen(level).items()]


def case(name: str, problem: Problem) -> Case:
    routing_map = problem.routing_map
    poses, activations, weight, *betas = problem.inputs()
    votes = reference.pose_votes(poses, weight, routing_map)
    shares = reference.initial_assignments(activations, problem.out_caps, routing_map, "global")
    gaussians = reference.m_step(
        votes, shares, activations, *betas, routing_map, inverse_temperature=INVERSE_TEMPERATURE
    )

    def e_step(votes: Tensor, *given: Tensor) -> list[Tensor]:
        return [functional.e_step(votes, Gaussians(*given), routing_map)]

    def by_reference(votes: Tensor, *given: Tensor) -> list[Tensor]:
        return [reference.e_step(votes, Gaussians(*given), routing_map)]

    return stored(name, problem, e_step, by_reference, [votes, *gaussians], data=4)


if __name__ == "__main__":
    main({"e_step": cases}, __doc__)
