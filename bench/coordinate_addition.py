"""coordinate_addition: add the position of each child to its stored votes."""

from __future__ import annotations

from command import main
from harness import Case
from problems import CLASSES, stored
from torch import Tensor

from tritoncaps import RoutingMap, functional, reference
from tritoncaps.testing import Problem


def cases(level: str) -> list[Case]:
    images = {"smoke": 2, "quick": 16, "full": 64}[level]
    return [case("classes, 16 to 5", CLASSES.but(images=images))]


def case(name: str, problem: Problem) -> Case:
    routing_map: RoutingMap = problem.routing_map
    inputs = problem.inputs()
    votes = reference.pose_votes(inputs.poses, inputs.weight, routing_map)

    def coordinate_addition(votes: Tensor) -> list[Tensor]:
        return [functional.coordinate_addition(votes, routing_map)]

    def by_reference(votes: Tensor) -> list[Tensor]:
        return [reference.coordinate_addition(votes, routing_map)]

    return stored(name, problem, coordinate_addition, by_reference, [votes], data=1)


if __name__ == "__main__":
    main({"coordinate_addition": cases}, __doc__)
