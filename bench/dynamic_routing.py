"""Dynamic routing of CapsNet's class capsules: the fused kernels, the einops reference and a convolution.

The memory traffic of a step is also counted: the bytes of all arrays that each Triton launch, or each operator of the
eager reference, reads or writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from command import main
from gpu_estimate import Counter
from harness import COMPILED, OURS, REFERENCE, Case, Row, convolution
from problems import DIGITS, count
from torch import Tensor

from tritoncaps import functional, reference
from tritoncaps.kernels.dynamic.triton.costs import routing_bytes
from tritoncaps.testing import VectorProblem


def cases(level: str) -> list[Case | Traffic]:
    images = {"smoke": 3, "quick": 32, "full": 128}[level]
    problem = DIGITS.but(images=images, in_caps=20) if level == "smoke" else DIGITS.but(images=images)
    name = f"{problem.in_caps} of {problem.in_dim} to {problem.out_caps} of {problem.out_dim}"
    timed = (OURS, REFERENCE, COMPILED) if level == "full" else (OURS, REFERENCE)
    return [case(name, problem, timed), Traffic(name, problem)]


def case(name: str, problem: VectorProblem, timed: tuple[str, ...]) -> Case:
    table, routing = problem.routing_map, problem.routing
    # each child has its own matrix, so a 1x1 convolution of a single pixel has as many multiply-adds
    channels = (problem.in_caps * problem.in_dim, problem.out_caps * problem.out_dim)
    return Case(
        "dynamic_routing",
        name,
        lambda poses, weight: [functional.dynamic_routing(poses, weight, table, routing)],
        lambda poses, weight: [reference.dynamic_routing(poses, weight, table, routing)],
        lambda: list(problem.inputs()[:2]),
        problem.images,
        data=1,
        rivals=(convolution(problem.images, (1, 1), channels),),
        votes=count(problem),
        timed=timed,
    )


@dataclass(frozen=True)
class Traffic:
    """The memory traffic, counted on meta tensors; nothing is timed."""

    name: str
    problem: VectorProblem
    subject: str = "dynamic_routing"

    def rows(self, level: str, repeats: int | None = None) -> list[Row]:
        known = {"subject": self.subject, "case": self.name, "mode": "traffic", "images": self.problem.images}
        counted = {OURS: self.ours(), REFERENCE: self.eager()}
        return [{**known, "provider": provider, "traffic_mib": n / 2**20} for provider, n in counted.items()]

    def ours(self) -> int:
        p, table = self.problem, self.problem.routing_map
        sizes = (p.images, table.num_children, table.num_parents, table.num_slots, p.in_caps, p.out_caps)
        return routing_bytes(*sizes, p.in_dim, p.out_dim, table.num_weights, table.num_edges)

    def eager(self) -> int:
        inputs: list[Tensor] = [
            torch.empty(x.shape, device="meta", requires_grad=True) for x in self.problem.inputs()[:2]
        ]
        with Counter() as counter:
            parents = reference.dynamic_routing(*inputs, self.problem.routing_map, self.problem.routing)
            torch.autograd.grad(parents.sum(), inputs)
        return sum(cost.bytes for cost in counter.costs)


if __name__ == "__main__":
    main({"dynamic_routing": cases}, __doc__)
