"""The kernels for the fit of variational Bayes routing equal `VBRouting.fit` and its gradients by autograd."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from tritoncaps import VBRouting
from tritoncaps._internal.fits import Fit, VBFit, fit_of
from tritoncaps.testing import assert_as_good_as, assert_close

PRIORS = {"alpha0": (0.01, 5.0), "kappa0": (0.01, 5.0), "nu0": (16.0, 40.0), "psi0": (0.01, 5.0), "mean0": (-2.0, 2.0)}
NAMES = (
    "mean",
    "precision",
    "log_weight",
    "logit",
    *(f"gradient of {x}" for x in ("support", "mean", "variance", "beta_a")),
)


@st.composite
def problems(draw):
    """A routing, and moments: some parents without support, some with much."""
    routing = VBRouting(3, **{name: draw(st.floats(*limits)) for name, limits in PRIORS.items()})
    images, places, types = (draw(st.integers(1, most)) for most in (3, 5, 19))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = 10 ** draw(st.floats(-3, 3))
    support = scale * torch.rand(images, places, types, generator=random, dtype=torch.float64)
    support[torch.rand(support.shape, generator=random) < draw(st.sampled_from([0.0, 0.3]))] = 0
    of_entries = images, places, 16, types
    mean = torch.randn(of_entries, generator=random, dtype=torch.float64)
    variance = torch.rand(of_entries, generator=random, dtype=torch.float64) ** 4
    beta_a = torch.randn(types, generator=random, dtype=torch.float64)
    grads = [torch.randn(x.shape, generator=random, dtype=torch.float64) for x in (mean, mean, support, support)]
    return routing, (support, mean, variance), beta_a, grads


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(problem=problems())
def test_results_and_gradients(problem):
    found, wanted = results_and_gradients(problem, VBFit, "cpu"), results_and_gradients(problem, Fit)
    for name, x, y in zip(NAMES, found, wanted, strict=True):
        assert_close(name, x, y, 1e-7)  # torch's trigamma has relative errors of up to 5e-10


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(problem=problems())
def test_float32_is_as_good_as_torch(problem):
    routing, *tensors = problem
    rounded = routing, *tree_map(Tensor.float, tensors)
    exact = routing, *tree_map(Tensor.double, rounded[1:])
    found, plain = results_and_gradients(rounded, VBFit, "cpu"), results_and_gradients(rounded, Fit)
    for name, *three in zip(NAMES, found, plain, results_and_gradients(exact, Fit), strict=True):
        assert_as_good_as(name, *three, floor=3e-5)


def results_and_gradients(problem, kind, *fields):
    routing, moments, beta_a, grads = problem
    fit = kind(routing, ("beta_a",), moments[0].shape[1:2], 4.0, *fields)
    results, pull_back = fit.vjp(*moments, [beta_a], 0)
    return *results, *pull_back(grads)


def test_strides_do_not_matter():
    routing = VBRouting(2)
    support, mean = torch.rand(2, 3, 5), torch.randn(2, 3, 16, 5)
    fit = VBFit(routing, ("beta_a",), (3,), 4.0, "cpu")
    wanted = fit(support, mean, mean**2, [torch.zeros(5)], 0)
    turned = mean.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    found = fit(support.mT.contiguous().mT, turned, turned**2, [torch.zeros(5)], 0)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_nan_reaches_the_types_of_its_location_only():
    support = torch.rand(1, 2, 3)
    support[0, 1, 2] = torch.nan
    fit = VBFit(VBRouting(2), ("beta_a",), (2,), 4.0, "cpu")
    *_, log_weight, logit = fit(support, torch.zeros(1, 2, 16, 3), torch.ones(1, 2, 16, 3), [torch.zeros(3)], 0)
    for x in (log_weight, logit):
        assert x[:, 0].isfinite().all()
        assert x[:, 1].isnan().all()


def test_vmap():
    support, mean = torch.rand(4, 2, 3, 5), torch.randn(4, 2, 3, 16, 5)
    fit = VBFit(VBRouting(2), ("beta_a",), (3,), 4.0, "cpu")
    found = vmap(lambda s, m: fit(s, m, m**2, [torch.zeros(5)], 0))(support, mean)
    for i in range(4):
        wanted = fit(support[i], mean[i], mean[i] ** 2, [torch.zeros(5)], 0)
        assert all(torch.equal(x[i], y) for x, y in zip(found, wanted, strict=True))


def test_a_routing_with_its_own_fit_does_not_get_these_kernels():
    class Own(VBRouting):
        def fit(self, moments, parameters, iteration):
            return super().fit(moments, parameters, iteration)

    given = ("beta_a",), (3,), 4.0
    assert type(fit_of(VBRouting(2), "cpu", *given)) is VBFit
    assert type(fit_of(Own(2), "cpu", *given)) is Fit
    assert type(fit_of(VBRouting(2), "triton", *given)) is Fit
