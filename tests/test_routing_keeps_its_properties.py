"""EM routing of every backend equals the reference and has all properties of `tritoncaps.testing`."""

from functools import partial

import pytest
import torch

from tritoncaps import EMRouting, RoutingMap, functional, reference, testing
from tritoncaps.testing import Problem, assert_as_good_as, gradients

# number of problems for each check, and largest number of types in them
BACKENDS = {"reference": (12, 5), "cpu": (25, 19), "triton": (7, 17)}
KERNELS = [name for name in BACKENDS if name != "reference"]
MAPS = {
    "conv": RoutingMap.conv((4, 5), 3, stride=2, padding=1),
    "class": RoutingMap.full((2, 3)),
    "one child, one parent": RoutingMap.full(()),
    "graph": RoutingMap.from_edges([0, 1, 2, 2, 4], [0, 0, 1, 0, 1], num_children=5, num_parents=3),
}


def route(backend):
    return partial(functional.em_routing, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", testing.EM_ROUTING_CHECKS, ids=lambda check: check.__name__)
def test_property(check, backend):
    verify(check, backend)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("check", testing.KERNEL_CHECKS, ids=lambda check: check.__name__)
def test_kernel_property(check, backend):
    verify(check, backend)


def verify(check, backend):
    """On problems that hypothesis draws; in Triton's interpreter, where each takes seconds, all but comparisons with
    the reference on one problem that has padding, offsets, a child without parents and odd numbers of types."""
    if backend == "triton" and check is testing.checks.breaks_where_the_reference_does:
        testing.verify(check, route(backend), 3, 3, small=True)
    elif backend == "triton" and check not in COMPARISONS:
        tiny = check is testing.checks.passes_gradcheck
        check(route(backend), INTERPRETED.but(routing_map=RoutingMap.full((2,)), out_caps=2) if tiny else INTERPRETED)
    else:
        testing.verify(check, route(backend), *BACKENDS[backend], small=backend == "triton")


COMPARISONS = (
    testing.checks.equals_the_reference,
    testing.checks.is_as_exact_as_plain_torch,
    testing.checks.takes_half_precision_as_storage,
)
INTERPRETED = Problem(
    RoutingMap.from_edges([0, 1, 1, 3], [0, 0, 1, 1], 4, 2, weight_of=[0, 1], offset=[[0.5, 1.0], [0.0, -1.0]]),
    EMRouting(iterations=2),
    images=2,
    in_caps=3,
    out_caps=5,
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("routing_map", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("case", testing.HARD_CASES)
def test_hard_case(case, routing_map, dtype, backend):
    """Values and gradients are finite, and equal the reference where it is finite."""
    if backend == "triton" and (dtype, routing_map) != (torch.float32, MAPS["graph"]):
        pytest.skip("one map is enough for the slow interpreter")
    problem = HardProblem(routing_map, case=case)
    result = gradients(problem, route(backend), dtype)
    for name, value in result.items():
        assert value.isfinite().all(), f"{name} is not finite"
    if case in ("all activations zero", "identical votes", "all poses zero"):
        exact, plain = gradients(problem, reference.em_routing), gradients(problem, reference.em_routing, dtype)
        for name, value in result.items():
            assert_as_good_as(name, value, plain[name], exact[name], floor=1e-5)


class HardProblem(Problem):
    """A problem whose inputs are replaced by those of a hard case."""

    def __init__(self, routing_map, case):
        super().__init__(routing_map)
        object.__setattr__(self, "case", case)

    def inputs(self, dtype=torch.float64, requires_grad=False):
        hard = testing.HARD_CASES[self.case](super().inputs(dtype))
        return type(hard)(*(x.detach().requires_grad_(requires_grad) for x in hard))
