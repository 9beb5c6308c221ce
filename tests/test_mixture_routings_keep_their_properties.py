"""Variational Bayes routing, and a user's routing, have all properties of the reference on every backend."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import strategies as st

from tritoncaps import (
    Components,
    EMRouting,
    MixtureRouting,
    RoutingMap,
    TemperedEMRouting,
    VBRouting,
    functional,
    testing,
)
from tritoncaps.testing import Problem, assert_close, gradients

# number of problems for each check, and largest number of types in them
BACKENDS = {"reference": (6, 5), "cpu": (15, 11), "triton": (4, 5)}


@dataclass(frozen=True)
class FarRouting(MixtureRouting):
    """A routing whose components are up to hundreds of standard deviations away from their votes."""

    parameter_names = ("height", "slope")
    distance: float = 100.0

    def fit(self, moments, parameters, iteration):
        support, mean, variance, data_per_parent = moments
        height, slope = (x.reshape(-1, *[1] * (support.ndim - 2)) for x in parameters.values())
        spread = 1 + variance
        log_weight = height + support / data_per_parent - 0.1 * variance.sum((-1, -2))
        logit = slope * support - 0.1 * mean.sum((-1, -2)) + iteration
        return Components(mean + self.distance * (1 + 0.3 * torch.sin(mean)), 1e-3 / spread, log_weight, logit)


ROUTINGS = {
    "VBRouting": testing.vb_routings(),
    "TemperedEMRouting": st.builds(
        TemperedEMRouting,
        iterations=st.integers(1, 4),
        sharpness=st.sampled_from([1 / 16, 0.5]),
        **testing.mixture_options(),
    ),
    "FarRouting": st.builds(FarRouting, iterations=st.integers(1, 4), **testing.mixture_options()),
}
INTERPRETED = Problem(
    RoutingMap.from_edges([0, 1, 1], [0, 0, 1], 3, 2, weight_of=[0, 1], offset=[[0.5, 1.0], [0.0, -1.0]]),
    images=2,
    in_caps=2,
    out_caps=5,
)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", testing.MIXTURE_CHECKS, ids=lambda check: check.__name__)
def test_property(check, backend, routing):
    # kernels compute e = V - centre as d + shift, which loses precision if the shift is much larger than e
    distance = 1.0 if check is testing.checks.is_as_exact_as_plain_torch else 100.0
    drawn = (testing.checks.equals_the_reference, testing.checks.breaks_where_the_reference_does)
    if backend == "triton" and routing == "TemperedEMRouting" and check is not testing.checks.equals_the_reference:
        pytest.skip("it has the kernels of VBRouting, and the interpreter is slow")
    if backend == "triton" and check not in drawn:
        chosen = VBRouting(2) if routing == "VBRouting" else FarRouting(2, distance=distance)
        tiny = check is testing.checks.passes_gradcheck
        problem = INTERPRETED.but(routing=chosen)
        check(
            testing.route_on(backend),
            problem.but(routing_map=RoutingMap.full((2,)), out_caps=2) if tiny else problem,
        )
    else:
        routings = ROUTINGS[routing]
        if routing == "FarRouting":
            routings = routings.map(lambda far: replace(far, distance=distance))
        strategy = partial(testing.problems, routings=routings)
        testing.verify(
            check, testing.route_on(backend), *BACKENDS[backend], small=backend == "triton", strategy=strategy
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", ["treats_a_split_child_as_one", "follows_signed_permutations_of_rows"])
def test_variational_bayes_keeps_symmetries_of_the_moments(check, backend):
    getattr(testing.checks, check)(testing.route_on(backend), INTERPRETED.but(routing=VBRouting(2)))


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_the_fused_m_step_is_the_fit(backend):
    """EMRouting's own kernels, and its `fit` on the kernels of any fit."""

    def by_fit(poses, activations, weight, beta_u, beta_a, *, routing_map, routing):
        betas = {"beta_u": beta_u, "beta_a": beta_a}
        return functional.mixture_routing(poses, activations, weight, betas, routing_map, routing, backend)

    def check(route, problem):
        fused = gradients(problem, route)
        for name, value in gradients(problem, by_fit).items():
            assert_close(name, value, fused[name])

    if backend == "triton":
        check(testing.route_on(backend), INTERPRETED.but(routing=EMRouting(3)))
    else:
        testing.verify(check, testing.route_on(backend), 15, 11)


def test_variational_bayes_by_hand():
    """One child, one parent: the posterior after one vote."""
    routing = VBRouting(iterations=1)
    pose = torch.arange(16, dtype=torch.float64).reshape(1, 1, 4, 4)
    weight, beta_a = torch.eye(4, dtype=torch.float64)[None, None, None], torch.zeros(1, dtype=torch.float64)
    active = torch.ones(1, 1, dtype=torch.float64)
    capsules = functional.mixture_routing(
        pose, active, weight, {"beta_a": beta_a}, RoutingMap.full(()), routing, "reference"
    )
    # S = 1: the mean moves half of the way from 0 to the vote
    assert_close("poses", capsules.poses, pose / 2, 1e-14)
    inverse_scale = 1 + 0.5 * pose.flatten() ** 2
    halves = (18 - torch.arange(16, dtype=torch.float64)) / 2
    log_det = torch.digamma(halves).sum() + 16 * torch.log(torch.tensor(2.0).double()) - inverse_scale.log().sum()
    entropy = 8 * torch.log(torch.tensor(2 * torch.pi * torch.e).double()) - 0.5 * log_det
    # there is only one parent: E ln pi = 0
    assert_close("activations", capsules.activations, torch.sigmoid(-entropy).reshape(1, 1), 1e-12)
