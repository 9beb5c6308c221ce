"""The comparisons of `tritoncaps.testing` can fail, also for very small numbers."""

import pytest
import torch

from tritoncaps import DynamicRouting, EMRouting, RoutingMap, functional, testing
from tritoncaps.testing import Problem, VectorProblem, assert_as_good_as, assert_close
from tritoncaps.testing.checks import equals_the_reference, survives_an_empty_batch
from tritoncaps.testing.dynamic import survives_an_empty_batch as survives_an_empty_batch_of_vectors


class Spoiled(torch.autograd.Function):
    """The identity, with a wrong gradient."""

    @staticmethod
    def forward(ctx, x, wrong):
        ctx.wrong = wrong
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.wrong(grad), None


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-8, 1e-10])
def test_an_error_of_one_in_twenty_fails_at_every_scale(scale):
    expected = scale * torch.linspace(-1, 1, 5, dtype=torch.float64)
    assert_close("x", expected * (1 + 1e-8), expected)
    with pytest.raises(AssertionError, match="x is off by"):
        assert_close("x", expected * 1.05, expected)
    with pytest.raises(AssertionError, match="x is off by"):
        assert_close("x", torch.zeros_like(expected), expected)


def test_an_error_that_plain_torch_does_not_make_fails():
    expected = torch.linspace(-1, 1, 5, dtype=torch.float64)
    assert_as_good_as("x", expected.float(), expected.float(), expected)
    with pytest.raises(AssertionError, match="plain torch"):
        assert_as_good_as("x", expected + 1e-5, expected.float(), expected)


def test_what_should_be_zero_may_be_rounded():
    assert_close("x", torch.tensor([1e-13]).double(), torch.zeros(1).double())
    with pytest.raises(AssertionError):
        assert_close("x", torch.tensor([1e-11]).double(), torch.zeros(1).double())


def test_a_gradient_of_1e_8_that_is_lost_is_found():
    """Activations so far from one half that the gradient of beta_a is small, and a route without this gradient."""

    class Saturated(Problem):
        def inputs(self, *args, **kwargs):
            given = super().inputs(*args, **kwargs)
            beta_a = torch.full_like(given.beta_a, -350).requires_grad_(given.beta_a.requires_grad)
            return given._replace(beta_a=beta_a)

    def forgets(poses, activations, weight, beta_u, beta_a, **options):
        return functional.em_routing(poses, activations, weight, beta_u, beta_a.detach(), **options)

    problem = Saturated(RoutingMap.full((2,)), images=1, in_caps=2, out_caps=1, routing=EMRouting(1))
    size = testing.gradients(problem, testing.by_reference)["gradient of beta_a"].abs().max()
    assert 0 < size < 1e-7
    equals_the_reference(functional.em_routing, problem)
    with pytest.raises(AssertionError, match="gradient of beta_a"):
        equals_the_reference(forgets, problem)


@pytest.mark.parametrize("wrong", [torch.ones_like, lambda grad: torch.full_like(grad, 1e-30)], ids=["one", "1e-30"])
def test_gradients_of_an_empty_batch_must_be_zero(wrong):
    problem = Problem(RoutingMap.full((2,)), in_caps=2)

    def route(poses, activations, weight, *others, **options):
        return functional.em_routing(poses, activations, Spoiled.apply(weight, wrong), *others, **options)

    survives_an_empty_batch(functional.em_routing, problem)
    with pytest.raises(AssertionError, match="gradient of weight of an empty batch is not zero"):
        survives_an_empty_batch(route, problem)

    def route_vectors(poses, weight, **options):
        return functional.dynamic_routing(poses, Spoiled.apply(weight, wrong), **options)

    vectors = VectorProblem(RoutingMap.full((2,)), DynamicRouting(2))
    survives_an_empty_batch_of_vectors(functional.dynamic_routing, vectors)
    with pytest.raises(AssertionError, match="gradient of weight of an empty batch is not zero"):
        survives_an_empty_batch_of_vectors(route_vectors, vectors)
