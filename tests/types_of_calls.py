"""The types of calls, for `make typecheck`: mypy reports every line with another type."""

import torch
from torch import Tensor
from typing_extensions import assert_type

import tritoncaps
from tritoncaps import Capsules, RoutingMap, functional, inspect
from tritoncaps.models import CapsNet, MatrixCapsNet


def layers(features: Tensor, capsules: Capsules, graph: RoutingMap) -> None:
    assert_type(tritoncaps.PrimaryCaps(1, 2)(features), Capsules)
    assert_type(tritoncaps.PrimaryCaps1d(1, 2)(features), Capsules)
    assert_type(tritoncaps.PrimaryCaps3d(1, 2)(features), Capsules)
    assert_type(tritoncaps.ConvCaps2d(1, 2, 3)(capsules), Capsules)
    assert_type(tritoncaps.ClassCaps(1, 2)(capsules), Capsules)
    assert_type(tritoncaps.GraphCaps(1, 2)(capsules, graph), Capsules)
    assert_type(tritoncaps.VectorPrimaryCaps(1, 2, 3)(features), Capsules)
    assert_type(tritoncaps.VectorCaps(1, 2, 3, 4)(capsules), Capsules)
    assert_type(tritoncaps.ConvVectorCaps2d(1, 2, 3, 4, 5)(features), Capsules)
    assert_type(tritoncaps.VectorCaps(1, 2, 3, 4).assignments(capsules), Tensor)
    assert_type(tritoncaps.ConvCaps2d(1, 2, 3).assignments(capsules), Tensor)


def models(images: Tensor) -> None:
    assert_type(MatrixCapsNet(1, 2)(images), Capsules)
    assert_type(MatrixCapsNet(1, 2)(images, return_intermediate=True), dict[str, Capsules])
    assert_type(CapsNet()(images), Capsules)
    assert_type(CapsNet()(images, return_intermediate=True), dict[str, Capsules])


def functions(capsules: Capsules, weight: Tensor, beta: Tensor, routing_map: RoutingMap) -> None:
    given = (capsules.poses, capsules.activations, weight, beta, beta, routing_map)
    assert_type(functional.em_routing(*given), Capsules)
    assert_type(functional.em_routing(*given, return_assignments=True), tuple[Capsules, Tensor])
    assert_type(functional.squash(weight), Tensor)
    assert_type(functional.dynamic_assignments(capsules.poses, weight, routing_map), Tensor)
    assert_type(capsules.map(torch.sigmoid).to("cpu").detach(), Capsules)


def inside(capsules: Capsules) -> None:
    matrix, vector = tritoncaps.ConvCaps2d(1, 2, 3), tritoncaps.VectorCaps(1, 2, 3, 4)
    assert_type(inspect.iterations(matrix, capsules), list[inspect.MixtureIteration])
    assert_type(inspect.iterations(vector, capsules), list[inspect.DynamicIteration])
    assert_type(inspect.votes(matrix, capsules, [(0, 1, 2)]), inspect.Votes)
