"""The layers of the benchmarks, and functions for routing problems."""

from __future__ import annotations

import torch
from harness import IS_GPU, Case, Function, Rival, convolution
from torch import Tensor

from tritoncaps import RoutingMap
from tritoncaps.testing import Problem, VectorProblem

# The first routed layer of the paper's two networks, on smallNORB.
PAPER = Problem(RoutingMap.conv((14, 14), 3, stride=2), images=4, in_caps=32, out_caps=32)
SMALL = PAPER.but(in_caps=8, out_caps=16)
CLASSES = SMALL.but(routing_map=RoutingMap.full((4, 4)), in_caps=16, out_caps=5)
TINY = Problem(RoutingMap.conv((4, 4), 3), images=2, in_caps=4, out_caps=8)

# The class capsules of CapsNet: 1152 children of 8 entries, 10 parents of 16 entries.
DIGITS = VectorProblem(RoutingMap.full(()), images=128, in_caps=1152, out_caps=10, in_dim=8, out_dim=16)


def conv_problem(side: int, kernel: int = 3, stride: int = 2) -> RoutingMap:
    return RoutingMap.conv((side, side), kernel, stride=stride)


def chosen(level: str) -> dict[str, Problem]:
    """The layers of a level, by name."""
    if level == "smoke":
        return {"tiny": TINY}
    if IS_GPU:  # batches that fill a device
        layers = {"8 to 16 types": SMALL, "32 to 32 types": PAPER, "classes, 16 to 5": CLASSES}
        batches = (64,) if level == "quick" else (64, 256)
        return {f"{name}, batch {n}": layer.but(images=n) for name, layer in layers.items() for n in batches}
    if level == "quick":
        return {"8 to 16 types": SMALL}
    return {"8 to 16 types": SMALL.but(images=16), "32 to 32 types": PAPER, "classes, 16 to 5": CLASSES.but(images=64)}


def count(problem: Problem | VectorProblem) -> int:
    return problem.images * problem.routing_map.num_edges * problem.in_caps * problem.out_caps


def rival(problem: Problem) -> Rival:
    """The convolution with as many multiply-adds as the votes."""
    channels = (8 * problem.in_caps, 8 * problem.out_caps)
    kind, size, *rest = problem.routing_map.key
    if kind == "full":
        return convolution(problem.images, size, channels)
    (kernel, *_), (stride, *_) = rest[:2]
    return convolution(problem.images, size, channels, kernel, stride)


def stored(name: str, problem: Problem, ours: Function, reference: Function, tensors: list[Tensor], data: int) -> Case:
    """A case of a function that takes or returns votes and is limited by memory. Its name is the subject."""
    outputs = reference(*tensors)
    numbers = sum(x.numel() for x in (*tensors, *outputs))
    return Case(
        ours.__name__,
        name,
        ours,
        reference,
        lambda: [x.clone(memory_format=torch.contiguous_format) for x in tensors],  # the layout of pose_votes
        problem.images,
        data,
        bytes=4.0 * numbers,
        votes=count(problem),
    )
