"""Property tests for your own routings and kernels. This library uses them for its own.

An EM routing is a function ``route(poses, activations, weight, beta_u, beta_a, routing_map, routing)`` with the
shapes of :func:`tritoncaps.functional.em_routing`. This test runs all checks on it:

    import pytest
    from tritoncaps import testing

    @pytest.mark.parametrize("check", testing.EM_ROUTING_CHECKS, ids=lambda check: check.__name__)
    def test_my_routing(check):
        testing.verify(check, my_route)

A check is a function of a route and a :class:`Problem`. `verify` generates problems with hypothesis: shapes, maps,
options and memory layouts. Each problem has a seed for its tensors, so that a failing example can be reproduced. For a
kernel whose results are the same bits in every batch, add `KERNEL_CHECKS`. `HARD_CASES` are inputs for which naive
routings give nan or inf.

`MIXTURE_CHECKS` test a mixture routing of your own on every backend. They hold for every `fit`:

    from functools import partial

    routings = st.builds(MyRouting, iterations=st.integers(1, 3), **testing.mixture_options())

    @pytest.mark.parametrize("backend", ["cpu", "triton"])
    @pytest.mark.parametrize("check", testing.MIXTURE_CHECKS, ids=lambda check: check.__name__)
    def test_my_routing(check, backend):
        strategy = partial(testing.problems, routings=routings)
        testing.verify(check, testing.route_on(backend), small=backend == "triton", strategy=strategy)

For dynamic routing, the names start with `VECTOR_`, and `verify` needs `strategy=testing.vector_problems`.
"""

from tritoncaps.extras import require

require("hypothesis", "tritoncaps.testing", "testing")

from tritoncaps.testing.checks import EM_ROUTING_CHECKS, HARD_CASES, KERNEL_CHECKS, MIXTURE_CHECKS, verify
from tritoncaps.testing.dynamic import (
    DECIDED_BY_ROUNDING,
    VECTOR_CHECKS,
    VECTOR_HARD_CASES,
    VECTOR_KERNEL_CHECKS,
    VectorInputs,
    VectorProblem,
    vector_gradients,
    vector_problems,
)
from tritoncaps.testing.errors import assert_as_good_as, assert_close
from tritoncaps.testing.problems import Inputs, Problem, Route, by_reference, gradients, inputs_of, route_on
from tritoncaps.testing.strategies import em_routings, mixture_options, problems, routing_maps, vb_routings

__all__ = [
    "DECIDED_BY_ROUNDING",
    "EM_ROUTING_CHECKS",
    "HARD_CASES",
    "KERNEL_CHECKS",
    "MIXTURE_CHECKS",
    "VECTOR_CHECKS",
    "VECTOR_HARD_CASES",
    "VECTOR_KERNEL_CHECKS",
    "Inputs",
    "Problem",
    "Route",
    "VectorInputs",
    "VectorProblem",
    "assert_as_good_as",
    "assert_close",
    "by_reference",
    "em_routings",
    "gradients",
    "inputs_of",
    "mixture_options",
    "problems",
    "route_on",
    "routing_maps",
    "vb_routings",
    "vector_gradients",
    "vector_problems",
    "verify",
]
