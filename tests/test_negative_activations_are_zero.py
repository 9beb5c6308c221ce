"""Activations must be at least zero. Negative activations, such as logits without a sigmoid, count as zero on every
backend; in an eager call on the CPU, they are an error. (`tritoncaps.testing` has the properties.)
"""

import pytest
import torch

from tritoncaps import Capsules, ConvCaps2d, EMRouting, RoutingMap, functional
from tritoncaps.testing import Problem

MAP = RoutingMap.conv((3, 2), 2)
SENTENCE = "activations must be at least 0, such as the results of a sigmoid, but one is -0.7"


@pytest.fixture(params=["reference", "cpu", "triton"])
def backend(request):
    return request.param


def em_routing(backend):
    """A function of activations and such activations, with -0.7 for many of them."""
    inputs = Problem(MAP, in_caps=2, out_caps=3).inputs()

    def call(activations):
        given = inputs._replace(activations=activations)
        return tuple(functional.em_routing(*given, MAP, EMRouting(iterations=2), backend=backend))

    return call, inputs.activations


def m_step(backend):
    edges = (2, MAP.num_parents, MAP.num_slots, 2, 3)
    votes, assignments = torch.randn(*edges, 4, 4).double(), torch.rand(edges).double()
    betas = torch.randn(3).double(), torch.randn(3).double()

    def call(activations):
        return tuple(
            functional.m_step(votes, assignments, activations, *betas, MAP, inverse_temperature=0.5, backend=backend)
        )

    return call, torch.rand(2, 2, 3, 2).double()


@pytest.fixture(params=[em_routing, m_step], ids=lambda make: make.__name__)
def routed(request, backend):
    call, activations = request.param(backend)
    return call, activations, activations < 0.4


def test_where_they_cannot_be_read_they_count_as_zero(routed):
    """Inside a transform of torch.func, as in compiled programs and on GPUs."""
    call, activations, some = routed
    results = []
    for value in (0.0, -0.7):
        found, pull_back = torch.func.vjp(call, activations.masked_fill(some, value))
        results.append((found, pull_back(tuple(torch.ones_like(x) for x in found))[0]))
    (expected, slope), (found, negative_slope) = results
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(negative_slope, slope.masked_fill(some, 0))
    assert slope[some].any()  # zero has a gradient: a child with activation zero can still learn


def test_an_eager_call_refuses_them(routed):
    call, activations, some = routed
    with pytest.raises(ValueError, match=SENTENCE):
        call(activations.masked_fill(some, -0.7))


def test_what_rounding_makes_is_accepted(routed):
    call, activations, some = routed
    found = call(activations.masked_fill(some, -1e-7))
    torch.testing.assert_close(found, call(activations.masked_fill(some, 0)))
    call(activations.masked_fill(some, 1.0000001))


def test_a_layer_says_so_too(backend):
    layer = ConvCaps2d(2, 3, 2, backend=backend)
    with pytest.raises(ValueError, match=SENTENCE):
        layer(Capsules(torch.randn(1, 2, 3, 2, 4, 4), torch.full((1, 2, 3, 2), -0.7)))
