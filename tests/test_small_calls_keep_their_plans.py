"""A small call on the CPU reuses the plan of an earlier call, with its own inputs, options and results."""

from functools import partial

import pytest
import torch

from tritoncaps import EMRouting, RoutingMap, functional
from tritoncaps.kernels.mixture.cpu import kept
from tritoncaps.testing import Problem, assert_close, gradients, route_on
from tritoncaps.testing.checks import equals_the_reference

SMALL = Problem(RoutingMap.conv((3, 3), 2), EMRouting(2), images=2, in_caps=2, out_caps=3)


@pytest.fixture(autouse=True)
def plans():
    """The plans of this thread; none at the start."""
    kept._plans.of_calls.clear()
    return kept._plans.of_calls


compare = partial(equals_the_reference, route_on("cpu"))


def test_a_plan_is_made_once_and_gets_new_inputs(plans):
    compare(SMALL)
    made = list(plans.values())
    assert {type(plan) for plan in made} == {kept.Forward, kept.Backward}
    compare(SMALL.but(seed=1))
    assert list(plans.values()) == made


@pytest.mark.parametrize(
    "other",
    [
        SMALL.but(routing=EMRouting(3)),
        SMALL.but(routing=EMRouting(2, final_lambda=2.0)),
        SMALL.but(routing=EMRouting(2, variance_floor=0.5)),
        SMALL.but(routing=EMRouting(2, competition="local")),
        SMALL.but(routing=EMRouting(2, competition="positions")),
        SMALL.but(routing=EMRouting(2, gradient="last")),
        SMALL.but(routing=EMRouting(2, mean_data=False)),
        SMALL.but(images=1),
        SMALL.but(out_caps=4),
        SMALL.but(routing_map=RoutingMap.conv((3, 3), 2, dilation=2)),
    ],
    ids=["iterations", "lambda", "floor", "local", "positions", "gradient", "mean_data", "images", "types", "map"],
)
def test_a_call_that_differs_has_another_plan(other):
    compare(SMALL)
    compare(other)
    compare(SMALL)


def test_dtypes_have_their_own_plans(plans):
    for dtype in (torch.float32, torch.float64, torch.float16):
        poses, activations, *others = (x.to(dtype) for x in SMALL.inputs(torch.float64))
        found = functional.em_routing(poses, activations, *others, SMALL.routing_map, SMALL.routing, "cpu")
        expected = functional.em_routing(poses, activations, *others, SMALL.routing_map, SMALL.routing, "reference")
        assert_close("poses", found.poses, expected.poses, 2e-3 if dtype == torch.float16 else 1e-5)
    assert len(plans) == 3


def test_results_are_the_callers_own():
    first = gradients(SMALL, route_on("cpu"))
    copies = {name: value.clone() for name, value in first.items()}
    gradients(SMALL.but(seed=1), route_on("cpu"))
    assert all(torch.equal(first[name], copies[name]) for name in first)


def test_a_large_call_keeps_nothing(plans):
    compare(SMALL.but(routing_map=RoutingMap.conv((14, 14), 3), images=4))
    assert not plans


def test_threads_share_a_plan_that_is_not_tiny(plans):
    """More votes than one thread does alone; the second run has tasks for all threads again."""
    medium = SMALL.but(routing_map=RoutingMap.conv((12, 12), 3))
    compare(medium)
    assert not any(plan.passes.call.plan.alone for plan in plans.values())
    compare(medium.but(seed=1))
    assert len(plans) == 2


def test_the_least_recently_used_plan_goes(plans):
    sizes = [RoutingMap.conv((n,), 1) for n in range(1, kept.MOST + 2)]
    for routing_map in sizes:
        problem = SMALL.but(routing_map=routing_map, images=1, in_caps=1, out_caps=1)
        route_on("cpu")(*problem.inputs(torch.float32), routing_map=routing_map, routing=problem.routing)
        if routing_map is sizes[0]:
            oldest = next(iter(plans.values()))
    assert len(plans) == kept.MOST
    assert oldest not in plans.values()
