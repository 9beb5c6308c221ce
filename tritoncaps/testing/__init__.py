"""Property tests for routings and kernels, for your own routings and kernels.

An EM routing is a function ``route(poses, activations, weight, beta_u, beta_a, routing_map, routing)`` with the
shapes of :func:`tritoncaps.functional.em_routing`. This runs one through everything that this library asks of its own:

    import pytest
    from tritoncaps import testing

    @pytest.mark.parametrize("check", testing.EM_ROUTING_CHECKS, ids=lambda check: check.__name__)
    def test_my_routing(check):
        testing.verify(check, my_route)

A check is a function of a route and a :class:`Problem`; `verify` draws the problems with hypothesis: shapes, maps,
options and memory layouts. Tensors are filled from a seed, so that a failing example can be made again. A kernel that
promises the same bits whatever its batch adds `KERNEL_CHECKS`; `HARD_CASES` are the inputs that break naive routings.

A mixture routing of your own is tested on every backend by `MIXTURE_CHECKS`, which hold whatever its `fit` does:

    from functools import partial

    routings = st.builds(MyRouting, iterations=st.integers(1, 3), **testing.mixture_options())

    @pytest.mark.parametrize("backend", ["cpu", "triton"])
    @pytest.mark.parametrize("check", testing.MIXTURE_CHECKS, ids=lambda check: check.__name__)
    def test_my_routing(check, backend):
        strategy = partial(testing.problems, routings=routings)
        testing.verify(check, testing.route_on(backend), small=backend == "triton", strategy=strategy)

Dynamic routing has the same with `VECTOR_` before it, and `verify` takes `strategy=testing.vector_problems`.
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
