"""Dynamic routing and squash of every backend equal the reference and have all properties of `tritoncaps.testing`."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tritoncaps import DynamicRouting, RoutingMap, functional, reference, testing, use_backend
from tritoncaps.kernels.common import backends
from tritoncaps.testing import VectorInputs, VectorProblem, assert_as_good_as, assert_close, vector_gradients

# number of problems for each check, and largest number of types in them
BACKENDS = {"reference": (8, 4), "cpu": (20, 11), "triton": (3, 3)}
KERNELS = [name for name in BACKENDS if name != "reference"]
MAPS = {
    "conv": RoutingMap.conv((4, 5), 3, stride=2, padding=1),
    "full": RoutingMap.full((2, 3), coordinates=False),
    "one child, one parent": RoutingMap.full(()),
    "graph": RoutingMap.from_edges([0, 1, 2, 2, 4], [0, 0, 1, 0, 1], num_children=5, num_parents=3),
}
# padding, a child without parents, shared weights and odd sizes
INTERPRETED = VectorProblem(
    RoutingMap.from_edges([0, 1, 1], [0, 0, 1], 3, 2, weight_of=[0, 1]),
    DynamicRouting(iterations=2),
    images=2,
    in_caps=2,
    out_caps=3,
    in_dim=3,
    out_dim=5,
)


def route(backend):
    return partial(functional.dynamic_routing, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", testing.VECTOR_CHECKS, ids=lambda check: check.__name__)
def test_property(check, backend):
    verify(check, backend)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("check", testing.VECTOR_KERNEL_CHECKS, ids=lambda check: check.__name__)
def test_kernel_property(check, backend):
    verify(check, backend)


def verify(check, backend):
    """On problems that hypothesis draws; in Triton's interpreter, all but comparisons with the reference on one."""
    drawn = ("equals_the_reference", "breaks_where_the_reference_does")
    if backend == "triton" and check.__name__ not in drawn:
        several_calls = check.__name__ in (
            "passes_gradcheck",
            "routes_every_image_alone",
            "computes_only_what_is_asked",
        )
        check(route(backend), INTERPRETED.but(routing_map=RoutingMap.full(())) if several_calls else INTERPRETED)
    else:
        testing.verify(
            check, route(backend), *BACKENDS[backend], small=backend == "triton", strategy=testing.vector_problems
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("routing_map", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("case", testing.VECTOR_HARD_CASES)
def test_hard_case(case, routing_map, dtype, backend):
    """Values and gradients are finite. They equal the reference if rounding does not determine the assignments."""
    if backend == "triton" and (dtype, routing_map) != (torch.float32, MAPS["one child, one parent"]):
        pytest.skip("one map is enough for the slow interpreter")
    problem = VectorProblem(routing_map, case=case)
    result = vector_gradients(problem, route(backend), dtype)
    for name, value in result.items():
        assert value.isfinite().all(), f"{name} is not finite"
    if case not in testing.DECIDED_BY_ROUNDING:
        exact = vector_gradients(problem, reference.dynamic_routing)
        plain = vector_gradients(problem, reference.dynamic_routing, dtype)
        for name, value in result.items():
            assert_as_good_as(name, value, plain[name], exact[name], floor=1e-5)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_for_storage_only(dtype, backend):
    """Inputs and outputs are rounded; the arithmetic is float32."""
    problem = INTERPRETED.but(images=1)
    rounded = VectorInputs(*(x.float() for x in problem.inputs(dtype)))
    expected = problem.solve(reference.dynamic_routing, rounded)
    result = problem.solve(route(backend), problem.inputs(dtype))
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_none_of_the_above_takes_its_share():
    """With a rival of the same logit, one parent gets half of its only child: squash(1/2) instead of squash(1)."""
    poses, weight = torch.ones(1, 1, 1).double(), torch.ones(1, 1, 1, 1, 1).double()
    for backend in ("reference", "cpu"):
        alone, rivalled = (
            functional.dynamic_routing(
                poses,
                weight,
                RoutingMap.full(()),
                DynamicRouting(1, none_of_the_above=rival),
                backend=backend,
            )
            for rival in (False, True)
        )
        assert alone.item() == pytest.approx(1 / 2)
        assert rivalled.item() == pytest.approx(0.25 / 1.25)


def test_state_is_kept_per_parent_and_not_per_pair():
    """The size of the tensors that autograd keeps has no factor of children times parents."""
    kept = {}
    problem = VectorProblem(RoutingMap.full(()), images=4, in_caps=300, out_caps=10, in_dim=8, out_dim=16)
    inputs = problem.inputs(torch.float32, requires_grad=True)

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        parents = problem.solve(functional.dynamic_routing, inputs)
    for x in (*inputs, parents):
        kept.pop(x.untyped_storage().data_ptr(), None)
    tables = sum(t.nbytes for t in problem.routing_map.tables())
    assert sum(kept.values()) - tables <= 3 * parents.nbytes  # a sum for each of three iterations


def test_vectors_too_long_for_triton_are_routed_by_the_reference(monkeypatch):
    """If the device selects Triton; `use_backend` is a request, like `backend=`, and gets an error."""
    poses, weight, routing_map = torch.randn(1, 2, 3), torch.randn(1, 2, 3, 3, 129), RoutingMap.full(())
    monkeypatch.setattr(backends, "BACKENDS", {"triton": replace(backends.TRITON, devices=("cpu",))})
    with pytest.warns(UserWarning, match=r"uses its slow reference .* at most 128 on triton, .* \[1, 2, 3, 3, 129\]"):
        found = functional.dynamic_routing(poses, weight, routing_map)
    assert found.equal(reference.dynamic_routing(poses, weight, routing_map, DynamicRouting()))
    with use_backend("triton"), pytest.raises(ValueError, match="E of at most 128 on triton"):
        functional.dynamic_routing(poses, weight, routing_map)
    found = functional.dynamic_routing(poses, weight[..., :128], routing_map)
    assert found.equal(functional.dynamic_routing(poses, weight[..., :128], routing_map, backend="triton"))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_squash_equals_the_reference(backend, dim):
    vectors = torch.randn(5, 3, 7, dtype=torch.float64)
    vectors.select(dim, 0).zero_()
    vectors[2] = 0
    cotangent = torch.randn(5, 3, 7, dtype=torch.float64)
    results = []
    for function in (reference.squash, partial(functional.squash, backend=backend)):
        given = vectors.clone().requires_grad_()
        result = function(given, dim=dim)
        results.append((result, *torch.autograd.grad(result, given, cotangent)))
    for name, value, expected in zip(("squashed", "gradient"), results[1], results[0], strict=True):
        assert_close(name, value, expected, 1e-14)


@pytest.mark.parametrize("backend", ["reference", *KERNELS])
def test_squash_is_flat_at_zero(backend):
    zero = torch.zeros(2, 4, requires_grad=True)
    squashed = functional.squash(zero, backend=backend)
    assert not squashed.any()
    squashed.sum().backward()
    assert not zero.grad.any()


def test_counted_traffic_is_that_of_the_launches(monkeypatch):
    """The arrays that are given to the Triton launches of a step of CapsNet's class capsules, without running any."""
    from tritoncaps.kernels.dynamic.options import Options
    from tritoncaps.kernels.dynamic.triton import routing as dynamic_routing
    from tritoncaps.kernels.dynamic.triton.costs import routing_bytes

    total = 0

    def count(*arrays):
        nonlocal total
        total += sum(x.nbytes for x in arrays if x is not None)

    def launch(kernel, programs, e, tile, **arguments):
        votes = arguments["p_q"] is not None or "p_out" in arguments
        arrays = [x for name, x in arguments.items() if name in ("p_q", "p_g", "p_log_sum", "p_mean", "p_out")]
        count(*arrays, *((e.poses, e.weight) if votes else ()))

    def squash(parts, before=None, sums=None, out=None, agreed=None):
        count(parts, before, sums, out, agreed)

    monkeypatch.setattr(dynamic_routing, "_launch", launch)
    monkeypatch.setattr(dynamic_routing, "launch_squash", squash)
    monkeypatch.setattr(dynamic_routing, "launch_squash_gradient", lambda *arrays: count(*arrays))
    poses, weight = torch.empty(128, 1152, 1, 8, device="meta"), torch.empty(1, 1152, 10, 8, 16, device="meta")
    tables, options = RoutingMap.full(()).tables(), Options(3, "global", False, "all")
    sums, parents = dynamic_routing.forward(poses, weight, None, tables, options)
    dynamic_routing.backward(parents, poses, weight, None, tables, sums, options, (True, True, False))
    assert routing_bytes(128, 1, 1, 1, 1152, 10, 8, 16, 1, 1) == pytest.approx(total, rel=0.02)
