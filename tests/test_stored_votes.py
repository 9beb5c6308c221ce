"""The operations on stored votes: linearity, and equal results and gradients on every backend."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritoncaps import Gaussians, RoutingMap, functional, reference
from tritoncaps.testing import Problem, assert_as_good_as, assert_close, routing_maps
from tritoncaps.testing.problems import LAYOUTS, lay_out

BACKENDS = {"reference": 15, "cpu": 15, "triton": 4}
KERNELS = ("cpu", "triton")
MAPS = {
    "conv": RoutingMap.conv((2, 3), 2, stride=(1, 2), padding=1),
    "class": RoutingMap.full((2, 2)),
    "graph": RoutingMap.from_edges([0, 1, 2, 2], [0, 0, 1, 0], 4, 3, weight_of=[0, 1, 0], offset=[[1.0], [2.0], [3.0]]),
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(params=MAPS.values(), ids=MAPS)
def routing_map(request):
    return request.param


def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


def stored(routing_map, pose, images=2, in_caps=3, out_caps=5):
    """Votes, assignments, activations, betas and Gaussians of random numbers."""
    edges = (images, routing_map.num_parents, routing_map.num_slots, in_caps, out_caps)
    parents = (images, out_caps, *routing_map.out_size)
    return {
        "votes": random(*edges, *pose),
        "assignments": torch.rand(edges, dtype=torch.float64),
        "activations": torch.rand(images, in_caps, *routing_map.in_size, dtype=torch.float64),
        "beta_u": random(out_caps),
        "beta_a": random(out_caps),
        "gaussians": Gaussians(
            random(*parents, *pose), torch.rand(*parents, *pose, dtype=torch.float64) + 0.3, random(*parents)
        ),
    }


def values_and_gradients(call, *inputs):
    """The results of a call, and the gradients of its inputs for random gradients of the results."""
    given = [x.detach().requires_grad_() for x in inputs]
    outputs = call(*given)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    torch.manual_seed(5)
    total = sum((x * random(*x.shape)).sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(total, given, allow_unused=True)]


def compare(function, expected_function, *inputs):
    results = (values_and_gradients(call, *inputs) for call in (function, expected_function))
    for index, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert_close(f"result {index}", actual, expected, 1e-9)


def test_pose_votes_equal_the_reference(routing_map, backend):
    inputs = Problem(routing_map, in_caps=3, out_caps=5).inputs()
    compare(
        lambda poses, weight: functional.pose_votes(poses, weight, routing_map, backend=backend),
        lambda poses, weight: reference.pose_votes(poses, weight, routing_map),
        inputs.poses,
        inputs.weight,
    )


def test_coordinate_addition_equals_the_reference(routing_map, backend):
    compare(
        lambda votes: functional.coordinate_addition(votes, routing_map, backend=backend),
        lambda votes: reference.coordinate_addition(votes, routing_map),
        stored(routing_map, (4, 4))["votes"],
    )


@pytest.mark.parametrize("pose", [(4, 4), (3,), (20,)], ids=str)
@pytest.mark.parametrize("mean_data", [True, False])
def test_m_step_equals_the_reference(routing_map, backend, pose, mean_data):
    given = stored(routing_map, pose)
    options = {"inverse_temperature": 0.3, "variance_floor": 0.2, "mean_data": mean_data}
    compare(
        lambda *x: functional.m_step(*x, routing_map, **options, backend=backend),
        lambda *x: reference.m_step(*x, routing_map, **options),
        *(given[name] for name in ("votes", "assignments", "activations", "beta_u", "beta_a")),
    )


def test_the_m_step_takes_betas_that_are_views(backend):
    x = stored(MAPS["class"], (4, 4))
    betas = [torch.stack([x[name], x[name] + 1], dim=1)[:, 0] for name in ("beta_u", "beta_a")]
    given = (x["votes"], x["assignments"], x["activations"], *betas, MAPS["class"])
    found = functional.m_step(*given, inverse_temperature=0.5, backend=backend)
    expected = reference.m_step(*given, inverse_temperature=0.5)
    assert_close("logits", found[2], expected[2], 1e-9)


@pytest.mark.parametrize("pose", [(4, 4), (3,), (20,)], ids=str)
@pytest.mark.parametrize("competition", ["global", "local", "positions"])
def test_e_step_equals_the_reference(routing_map, backend, pose, competition):
    given = stored(routing_map, pose)
    compare(
        lambda votes, *g: functional.e_step(
            votes, Gaussians(*g), routing_map, competition=competition, backend=backend
        ),
        lambda votes, *g: reference.e_step(votes, Gaussians(*g), routing_map, competition=competition),
        given["votes"],
        *given["gaussians"],
    )


def test_an_empty_batch_gives_an_empty_result(backend):
    routing_map = RoutingMap.conv((3, 2), 2)
    given = stored(routing_map, (4, 4), images=0)
    route = {"routing_map": routing_map, "backend": backend}
    poses, weight = random(0, 3, 3, 2, 4, 4), random(routing_map.num_weights, 3, 5, 4, 4)
    votes = functional.pose_votes(poses, weight, **route)
    assert functional.coordinate_addition(votes, **route).shape == votes.shape == given["votes"].shape
    inputs = [given[name] for name in ("votes", "assignments", "activations", "beta_u", "beta_a")]
    for result, expected in zip(
        functional.m_step(*inputs, **route, inverse_temperature=0.3), given["gaussians"], strict=True
    ):
        assert result.shape == expected.shape
    assert functional.e_step(votes, given["gaussians"], **route).shape == given["assignments"].shape


@pytest.mark.parametrize("backend", KERNELS)
def test_drawn_votes(backend):
    """Random shapes, maps and memory layouts, from hypothesis."""

    @settings(max_examples=BACKENDS[backend], deadline=None, derandomize=True, database=None)
    @given(
        routing_map=routing_maps(small=True),
        sizes=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
        pose=st.sampled_from([(1,), (2, 3), (4, 4), (17,)]),
        competition=st.sampled_from(["global", "local", "positions"]),
        layout=st.sampled_from(LAYOUTS),
    )
    def check(routing_map, sizes, pose, competition, layout):
        torch.manual_seed(0)
        given = stored(routing_map, pose, *sizes)
        names = ("votes", "assignments", "activations")
        edges = [lay_out(given[name], layout) for name in names]
        compare(
            lambda *x: functional.m_step(*x, routing_map, inverse_temperature=0.5, backend=backend),
            lambda *x: reference.m_step(*x, routing_map, inverse_temperature=0.5),
            *edges,
            given["beta_u"],
            given["beta_a"],
        )
        compare(
            lambda v, *g: functional.e_step(v, Gaussians(*g), routing_map, competition=competition, backend=backend),
            lambda v, *g: reference.e_step(v, Gaussians(*g), routing_map, competition=competition),
            edges[0],
            *given["gaussians"],
        )

    check()


def calls(routing_map, images=2, backend=None):
    """Every operation: a function of tensors, and the tensors."""
    given, problem = (
        stored(routing_map, (4, 4), images),
        Problem(routing_map, images=images, in_caps=3, out_caps=5).inputs(),
    )
    options = {"inverse_temperature": 0.3, "variance_floor": 0.2, "backend": backend}
    return {
        "pose_votes": (lambda *x: functional.pose_votes(*x, routing_map, backend), problem.poses, problem.weight),
        "coordinate_addition": (lambda v: functional.coordinate_addition(v, routing_map, backend), given["votes"]),
        "m_step": (lambda *x: functional.m_step(*x, routing_map, **options), *list(given.values())[:5]),
        "e_step": (
            lambda v, *g: functional.e_step(v, Gaussians(*g), routing_map, backend=backend),
            given["votes"],
            *given["gaussians"],
        ),
    }


@pytest.mark.parametrize("name", ["pose_votes", "coordinate_addition", "m_step", "e_step"])
def test_gradients_and_their_gradients_are_slopes(name, backend):
    tiny = RoutingMap.from_edges([0, 1, 1], [0, 0, 1], num_children=2, num_parents=2)
    call, *inputs = calls(tiny, 1, backend)[name]
    given = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(call, given, fast_mode=True)
    if backend != "triton":  # all backends compute second derivatives with the reference
        assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@pytest.mark.parametrize("name", ["pose_votes", "m_step", "e_step"])
def test_transforms_take_them(name):
    """vmap, torch.compile as one graph, forward mode with a sentence."""
    call, *inputs = calls(MAPS["class"], 2, "cpu")[name]
    leaves = torch.utils._pytree.tree_leaves
    members = [inputs, [x.flip(0) for x in inputs]]
    stacked = leaves(torch.func.vmap(call)(*map(torch.stack, zip(*members, strict=True))))
    for parts, together in zip(zip(*(leaves(call(*x)) for x in members), strict=True), stacked, strict=True):
        assert torch.equal(torch.stack(parts), together)
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(values_and_gradients(compiled, *inputs), values_and_gradients(call, *inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    with pytest.raises(NotImplementedError, match=f"{name} has no forward-mode derivative"):
        torch.func.jvp(call, tuple(inputs), tuple(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_depend_on_neither_threads_nor_batch(dtype):
    """Results of an image do not depend on other images; no result depends on the number of threads."""
    routing_map, before = RoutingMap.conv((7, 6), 3, stride=2, padding=1), torch.get_num_threads()

    def results(call, tensors):
        given = [x.detach().requires_grad_() for x in tensors]
        outputs = torch.utils._pytree.tree_leaves(call(*given))
        return [*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), given)]

    for name in ("pose_votes", "m_step", "e_step"):
        call, *inputs = calls(routing_map, 3, "cpu")[name]
        tensors = [x.to(dtype) for x in inputs]
        whole = results(call, tensors)
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, results(call, tensors), whole))
        torch.set_num_threads(before)
        alone = results(call, [x[1:2] if len(x) == 3 else x for x in tensors])
        pairs = [(x, y[1:2]) for x, y in zip(alone, whole, strict=True) if len(y) == 3]
        assert pairs, f"no result of {name} belongs to an image"
        assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", KERNELS)
def test_narrow_types_are_for_storage_only(dtype, backend):
    """Arrays are rounded; the arithmetic is float32, as accurate as plain torch."""
    floor = max(32 * torch.finfo(torch.float32).eps, 2 * torch.finfo(dtype).eps)
    by_reference = calls(MAPS["class"], backend="reference")
    for name, (call, *inputs) in calls(MAPS["class"], backend=backend).items():
        rounded = [x.to(dtype) for x in inputs]
        results = values_and_gradients(call, *rounded)
        plain, exact = (
            values_and_gradients(by_reference[name][0], *(x.to(wide) for x in rounded))
            for wide in (torch.float32, torch.float64)
        )
        for index, (x, y, z) in enumerate(zip(results, plain, exact, strict=True)):
            assert x.dtype == dtype
            assert_as_good_as(f"result {index} of {name}", x, y.to(dtype), z, floor)


def test_missing_slots_are_ignored(backend):
    """Votes of missing slots have no effect, even if they are nan."""
    routing_map = MAPS["graph"]
    given = stored(routing_map, (4, 4))
    missing = (routing_map.children < 0)[None, :, :, None, None, None, None]
    filled = given["votes"].masked_fill(missing, float("nan"))
    names = ("assignments", "activations", "beta_u", "beta_a")
    for votes in (given["votes"], filled):
        gaussians = functional.m_step(
            votes, *(given[n] for n in names), routing_map, inverse_temperature=1.0, backend=backend
        )
        assert all(x.isfinite().all() for x in gaussians)
        assignments = functional.e_step(votes, given["gaussians"], routing_map, backend=backend)
        assert assignments.isfinite().all()
        assert not assignments.masked_select(missing[..., 0, 0].expand_as(assignments)).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_votes_are_linear_and_turn_with_the_poses(backend):
    """votes(G P) = G votes(P), votes(P + Q) = votes(P) + votes(Q), and the same for the weight."""

    @settings(max_examples=BACKENDS[backend], deadline=None, derandomize=True, database=None)
    @given(routing_map=routing_maps(small=True), seed=st.integers(0, 2**31))
    def check(routing_map, seed):
        first, second = (Problem(routing_map, images=1, in_caps=2, seed=s).inputs() for s in (seed, seed + 1))

        def votes(poses, weight):
            return functional.pose_votes(poses, weight, routing_map, backend=backend)

        turn = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        plain = votes(first.poses, first.weight)
        assert_close("turned", votes(turn @ first.poses, first.weight), turn @ plain)
        assert_close(
            "sum of poses", votes(first.poses + second.poses, first.weight), plain + votes(second.poses, first.weight)
        )
        assert_close(
            "sum of weights",
            votes(first.poses, first.weight + second.weight),
            plain + votes(first.poses, second.weight),
        )

    check()


def test_steps_compose_to_em_routing(backend):
    """M-step, E-step, M-step on stored votes is EM routing of two iterations."""
    problem = Problem(MAPS["class"], routing=reference.EMRouting(2), in_caps=3, out_caps=4)
    poses, activations, weight, *betas = problem.inputs()
    m = problem.routing_map
    votes = functional.coordinate_addition(functional.pose_votes(poses, weight, m, backend=backend), m, backend=backend)
    assignments = reference.initial_assignments(activations, 4, m, "global")
    first, second = problem.routing.lambdas
    gaussians = functional.m_step(
        votes, assignments, activations, *betas, m, inverse_temperature=first, backend=backend
    )
    assignments = functional.e_step(votes, gaussians, m, backend=backend)
    gaussians = functional.m_step(
        votes, assignments, activations, *betas, m, inverse_temperature=second, backend=backend
    )
    expected = problem.solve(functional.em_routing, problem.inputs())
    assert_close("poses", gaussians.mean, expected.poses)
    assert_close("activations", gaussians.activations, expected.activations)


@pytest.mark.parametrize("activation", [0.7, 0.0])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", KERNELS)
def test_one_broken_vote_breaks_what_it_breaks_in_the_reference(backend, number, activation):
    """Values and gradients are non-finite in the same places, even if the child of the vote has activation zero."""
    routing_map = MAPS["graph"]
    given = stored(routing_map, (4, 4), in_caps=2, out_caps=3)
    parent, slot = next(iter(routing_map.parents(0)))
    given["votes"][1, parent, slot, 0, 2, 0, 3] = number
    given["activations"].flatten(2)[1, 0, 0] = activation
    inputs = [given[name] for name in ("votes", "assignments", "activations", "beta_u", "beta_a")]

    def run(backend):
        options = {"routing_map": routing_map, "backend": backend}
        fitted = values_and_gradients(lambda *x: functional.m_step(*x, inverse_temperature=0.3, **options), *inputs)
        shared = values_and_gradients(
            lambda votes, *g: functional.e_step(votes, Gaussians(*g), **options), given["votes"], *given["gaussians"]
        )
        return fitted + shared

    found, expected = run(backend), run("reference")
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.isfinite(), y.isfinite())
    assert not all(y.isfinite().all() for y in expected)
