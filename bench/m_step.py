"""m_step: fit the Gaussian of each parent to stored votes."""

from __future__ import annotations

from command import main
from harness import Case
from problems import chosen, stored
from torch import Tensor

from tritoncaps import functional, reference
from tritoncaps.testing import Problem

INVERSE_TEMPERATURE = 0.05


def cases(level: str) -> list[Case]:
    return [case(name, problem) for name, problem in chosen(level).items()]


def case(name: str, problem: Problem) -> Case:
    routing_map = problem.routing_map
    poses, activations, weight, beta_u, beta_a = problem.inputs()
    votes = reference.pose_votes(poses, weight, routing_map)
    shares = reference.initial_assignments(activations, problem.out_caps, routing_map, "global")

    def m_step(*tensors: Tensor) -> list[Tensor]:
        return list(functional.m_step(*tensors, routing_map, inverse_temperature=INVERSE_TEMPERATURE))

    def by_reference(*tensors: Tensor) -> list[Tensor]:
        return list(reference.m_step(*tensors, routing_map, inverse_temperature=INVERSE_TEMPERATURE))

    return stored(name, problem, m_step, by_reference, [votes, shares, activations, beta_u, beta_a], data=3)


if __name__ == "__main__":
    main({"m_step": cases}, __doc__)
