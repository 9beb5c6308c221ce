"""Properties of EM routing, as checks of a route on a problem, and `verify`, which generates the problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from tritoncaps.capsules import Capsules
from tritoncaps.routing import EMRouting
from tritoncaps.routing_map import RoutingMap
from tritoncaps.testing.errors import assert_as_good_as, assert_broken_alike, assert_close
from tritoncaps.testing.problems import Inputs, Problem, Route, break_a_number, by_reference, gradients
from tritoncaps.testing.strategies import problems

Check = Callable[[Route, Problem], None]


def verify(
    check: Callable[..., None],
    route: Callable[..., object],
    examples: int = 25,
    max_types: int = 9,
    small: bool = False,
    strategy: Callable[..., SearchStrategy] = problems,
) -> None:
    """Run a check on a route for many problems, the same ones in every run.

    Args:
        check: a function of a route and a problem that raises an AssertionError.
        route: the routing to test.
        examples: number of problems.
        max_types: largest number of capsule types.
        small: use problems with few edges, for kernels that run in an interpreter.
        strategy: generates the problems: :func:`problems` for EM routing, :func:`vector_problems` for dynamic routing.

    Example:
        >>> from tritoncaps import testing
        >>> testing.verify(testing.EM_ROUTING_CHECKS[0], testing.route_on("reference"), examples=2, small=True)
    """

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(problem=strategy(max_types, small))
    def run(problem: object) -> None:
        check(route, problem)

    run()


def equals_the_reference(route: Route, problem: Problem) -> None:
    """Outputs and all gradients equal those of the reference, in float64."""
    expected = gradients(problem, by_reference)
    for name, value in gradients(problem, route).items():
        assert_close(name, value, expected[name])


def is_as_exact_as_plain_torch(route: Route, problem: Problem) -> None:
    """In float32, errors are at most twice those of the reference in float32. Only for one or two iterations: the third
    one multiplies the rounding errors of both by large factors."""
    problem = problem.but(routing=replace(problem.routing, iterations=min(problem.routing.iterations, 2)))
    exact, plain = (
        gradients(problem, by_reference),
        gradients(problem, by_reference, torch.float32),
    )
    for name, value in gradients(problem, route, torch.float32).items():
        assert_as_good_as(name, value, plain[name], exact[name], floor=1e-5)


def takes_half_precision_as_storage(route: Route, problem: Problem) -> None:
    """float16 or bfloat16 outputs and gradients are as exact as those of float32 arithmetic, rounded at the end."""
    dtype = (torch.float16, torch.bfloat16)[problem.seed % 2]
    problem = problem.but(routing=replace(problem.routing, iterations=min(problem.routing.iterations, 2)))
    if isinstance(problem.routing, EMRouting):  # otherwise float16 gradients overflow
        floor = max(problem.routing.variance_floor, 1e-2)
        problem = problem.but(routing=replace(problem.routing, variance_floor=floor))

    def inside(wide: torch.dtype) -> Route:
        return lambda *tensors, **options: by_reference(*(x.to(wide) for x in tensors), **options).to(dtype)

    exact, plain = (gradients(problem, inside(wide), dtype) for wide in (torch.float64, torch.float32))
    for name, value in gradients(problem, route, dtype).items():
        assert value.dtype == dtype, f"{name} is {value.dtype}, not {dtype}"
        assert_as_good_as(name, value, plain[name], exact[name], floor=torch.finfo(dtype).eps)


def gives_the_same_bits_again(route: Route, problem: Problem) -> None:
    first, second = gradients(problem, route, torch.float32), gradients(problem, route, torch.float32)
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs between two runs"


def routes_every_image_alone(route: Route, problem: Problem) -> None:
    """The capsules and gradients of an image are the same bits, alone or in a batch."""
    problem = problem.but(images=3)
    inputs = problem.inputs(torch.float32, requires_grad=True)
    whole = problem.solve(route, inputs)
    grads = torch.autograd.grad([x.sum() for x in whole], inputs[:2])
    for image in range(problem.images):
        part = inputs._replace(poses=inputs.poses[image : image + 1], activations=inputs.activations[image : image + 1])
        alone = problem.solve(route, part)
        alone_grads = torch.autograd.grad([x.sum() for x in alone], part[:2])
        for of_whole, of_part in zip((*whole, *grads), (*alone, *alone_grads), strict=True):
            assert torch.equal(of_whole[image : image + 1], of_part), f"image {image} depends on its batch"


def ignores_the_order_of_child_types(route: Route, problem: Problem) -> None:
    inputs = problem.inputs()
    order = torch.randperm(problem.in_caps, generator=torch.Generator().manual_seed(problem.seed))
    shuffled = inputs._replace(
        poses=inputs.poses[:, order], activations=inputs.activations[:, order], weight=inputs.weight[:, order]
    )
    _assert_same(problem.solve(route, shuffled), problem.solve(route, inputs))


def follows_the_order_of_parent_types(route: Route, problem: Problem) -> None:
    inputs = problem.inputs()
    order = torch.randperm(problem.out_caps, generator=torch.Generator().manual_seed(problem.seed))
    parameters = {name: getattr(inputs, name)[order] for name in problem.routing.parameter_names}
    shuffled = inputs._replace(weight=inputs.weight[:, :, order], **parameters)
    before = problem.solve(route, inputs)
    expected = Capsules(before.poses[:, order], before.activations[:, order])
    _assert_same(problem.solve(route, shuffled), expected)


def ignores_silent_children(route: Route, problem: Problem) -> None:
    """Children with activation zero have no effect, even if their poses are inf or nan. Their gradients are finite."""
    silent = problem.inputs().activations < 0.5
    results = []
    for pose in (1.0, 1e4, float("inf"), float("nan")):
        inputs = problem.inputs()
        poses = inputs.poses.masked_fill(silent[..., None, None], pose).requires_grad_()
        activations = inputs.activations.masked_fill(silent, 0.0).requires_grad_()
        result = problem.solve(route, inputs._replace(poses=poses, activations=activations))
        grads = torch.autograd.grad([x.sum() for x in result], [poses, activations])
        finite = all(x.isfinite().all() for x in (*result, *grads))
        assert finite, f"results are not finite with poses of {pose} for children with activation zero"
        assert not grads[0][silent].any(), "the pose of a child with activation zero has a gradient"
        results.append(result)
    for result in results[1:]:
        _assert_same(result, results[0])


def takes_negative_activations_as_zero(route: Route, problem: Problem) -> None:
    """Negative activations count as zero and have no gradient. These are too small for an error; poses of nan would
    show if they counted."""
    inputs = problem.inputs()
    negative = inputs.activations < 0.5
    poses = inputs.poses.masked_fill(negative[..., None, None], float("nan"))
    results = []
    for value in (0.0, -1e-7):
        given = poses.clone().requires_grad_(), inputs.activations.masked_fill(negative, value).requires_grad_()
        found = problem.solve(route, inputs._replace(poses=given[0], activations=given[1]))
        results.append((found, torch.autograd.grad([x.sum() for x in found], given)))
    (expected, expected_grads), (found, grads) = results
    _assert_same(found, expected)
    assert not grads[1][negative].any(), "a negative activation has a gradient"
    assert_close("gradient of poses", grads[0], expected_grads[0])
    assert_close("gradient of activations", grads[1], expected_grads[1].masked_fill(negative, 0))


def breaks_where_the_reference_does(route: Route, problem: Problem) -> None:
    """With one nan or inf in the poses of active children, the same outputs as in the reference are not finite, no
    gradient is finite where the reference's is not, and the other images do not change."""
    dtype = (torch.float64, torch.float32)[problem.seed % 2]
    used = ((True, True), (True, False), (False, True))[problem.seed // 3 % 3]  # does the loss use poses, activations?
    problem = problem.but(images=problem.images + 1, layout="contiguous")
    sound = problem.inputs(dtype)
    place, broken = break_a_number(sound.poses, problem.seed)
    # other children of the same parents may have activation zero: nan spreads to them too
    activations = sound.activations.masked_fill(sound.activations < 0.2, 0)
    activations[place[:-2]] = 0.7
    sound = sound._replace(activations=activations)

    def run(route: Route, inputs: Any) -> list[Tensor]:
        given = [x.detach().clone().requires_grad_() for x in inputs]
        found = problem.solve(route, given)
        generator = torch.Generator().manual_seed(problem.seed + 1)
        losses = [(x * torch.randn(x.shape, generator=generator).to(dtype)).sum() for x in found]
        wanted = [loss for loss, use in zip(losses, used, strict=True) if use]
        return [*found, *torch.autograd.grad(wanted, given, materialize_grads=True)]

    names = ["poses", "activations", *(f"gradient of {name}" for name in sound._fields)]
    before, found = run(route, sound), run(route, sound._replace(poses=broken))
    expected = run(by_reference, sound._replace(poses=broken))
    assert_broken_alike(names, found, expected, before, int(place[0]))


def treats_a_split_child_as_one(route: Route, problem: Problem) -> None:
    """Two copies of every child with half of its activation give the same result. (Not with mean_data, which depends on
    the number of children.)"""
    if isinstance(problem.routing, EMRouting):
        problem = problem.but(routing=replace(problem.routing, mean_data=False, final_lambda=0.1))
    inputs = problem.inputs()
    poses, activations, weight = inputs[:3]
    twice = inputs._replace(
        poses=torch.cat([poses, poses], dim=1),
        activations=torch.cat([activations, activations], dim=1) / 2,
        weight=torch.cat([weight, weight], dim=1),
    )
    _assert_same(problem.solve(route, twice), problem.solve(route, inputs))


def shifts_with_its_votes(route: Route, problem: Problem) -> None:
    """Adding a constant to all votes adds it to the means, and changes nothing else."""
    shift = [1.5, -2.0, 0.5, 3.0]
    inputs = problem.inputs()
    before = problem.solve(route, inputs)
    after = problem.but(routing_map=_with_offset(problem.routing_map, shift)).solve(route, inputs)
    moved = before.poses.clone()
    supported = problem.but(routing_map=_with_offset(problem.routing_map, [0.0] * 4))
    moved[..., 3] += torch.tensor(shift).double() * _has_children(supported.routing_map, moved)
    _assert_same(after, Capsules(moved, before.activations))


def follows_signed_permutations_of_rows(route: Route, problem: Problem) -> None:
    """Poses G M for a signed permutation G give means G mu, without coordinate addition."""
    problem = problem.but(routing_map=_with_offset(problem.routing_map, None))
    inputs = problem.inputs()
    rows, signs = torch.tensor([2, 0, 3, 1]), torch.tensor([1.0, -1.0, -1.0, 1.0]).double()[:, None]
    before = problem.solve(route, inputs)
    after = problem.solve(route, inputs._replace(poses=inputs.poses[..., rows, :] * signs))
    _assert_same(after, Capsules(before.poses[..., rows, :] * signs, before.activations))


def follows_the_scale_of_poses(route: Route, problem: Problem) -> None:
    """Poses times s, with beta_u - log s and the floor times s^2, give means times s."""
    scale = 3.0
    problem = problem.but(routing_map=_with_offset(problem.routing_map, None))
    inputs = problem.inputs()
    before = problem.solve(route, inputs)
    floor = problem.routing.variance_floor * scale**2
    scaled = inputs._replace(poses=inputs.poses * scale, beta_u=inputs.beta_u - torch.tensor(scale).double().log())
    after = problem.but(routing=replace(problem.routing, variance_floor=floor)).solve(route, scaled)
    _assert_same(after, Capsules(before.poses * scale, before.activations))


def knows_edges_not_convolutions(route: Route, problem: Problem) -> None:
    """A graph with the same edges gives the same result."""
    original = problem.routing_map
    if original.num_edges == 0:  # the windows of a strided kernel may contain only padding
        return
    pairs = [(int(c), p, s) for p, row in enumerate(original.children) for s, c in enumerate(row) if c >= 0]
    children, parents, slots = (list(x) for x in zip(*pairs, strict=True))
    last = max(slots) + 1  # slots after the last one that is used do not exist in the copy
    listed = RoutingMap.from_edges(
        children,
        parents,
        original.num_children,
        original.num_parents,
        slots,
        original.weight_of[:last],
        original.offset[:last],
    )
    inputs = problem.inputs()
    flat = inputs._replace(
        poses=inputs.poses.reshape(problem.images, problem.in_caps, original.num_children, 4, 4),
        activations=inputs.activations.reshape(problem.images, problem.in_caps, original.num_children),
        weight=inputs.weight[: listed.num_weights],
    )
    expected = problem.solve(route, inputs)
    given = problem.but(routing_map=listed).solve(route, flat)
    _assert_same(Capsules(*(x.reshape(y.shape) for x, y in zip(given, expected, strict=True))), expected)


def computes_only_what_is_asked(route: Route, problem: Problem) -> None:
    """The gradient of one input alone is the same as with those of the other inputs."""
    everything = gradients(problem, route)
    for index, name in enumerate(problem.inputs()._fields):
        inputs = problem.inputs()
        inputs[index].requires_grad_()
        capsules = problem.solve(route, inputs)
        generator = torch.Generator().manual_seed(problem.seed + 1)
        weighted = [(x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in capsules]
        total = torch.stack(weighted).sum()
        alone = torch.zeros_like(inputs[index])
        if total.requires_grad:  # a routing may not use every parameter
            (alone,) = torch.autograd.grad(total, [inputs[index]], materialize_grads=True)
        assert_close(f"gradient of {name} alone", alone, everything[f"gradient of {name}"])


def passes_gradcheck(route: Route, problem: Problem) -> None:
    problem = problem.but(images=1, routing=replace(problem.routing, gradient="all"))
    inputs = problem.inputs(requires_grad=True)
    torch.autograd.gradcheck(
        lambda *given: tuple(problem.solve(route, given)),
        tuple(inputs),
        fast_mode=True,
        atol=1e-4,
        rtol=1e-3,
    )


def survives_an_empty_batch(route: Route, problem: Problem) -> None:
    problem = problem.but(images=0, layout="contiguous")
    for name, value in gradients(problem, route).items():
        assert not value.any(), f"{name} of an empty batch is not zero"


MIXTURE_CHECKS: tuple[Check, ...] = (
    equals_the_reference,
    is_as_exact_as_plain_torch,
    takes_half_precision_as_storage,
    ignores_the_order_of_child_types,
    follows_the_order_of_parent_types,
    ignores_silent_children,
    takes_negative_activations_as_zero,
    breaks_where_the_reference_does,
    knows_edges_not_convolutions,
    computes_only_what_is_asked,
    passes_gradcheck,
    survives_an_empty_batch,
)
"""Checks for every mixture routing, with any fit."""

EM_ROUTING_CHECKS: tuple[Check, ...] = (
    *MIXTURE_CHECKS,
    treats_a_split_child_as_one,
    shifts_with_its_votes,
    follows_signed_permutations_of_rows,
    follows_the_scale_of_poses,
)
"""Checks for EM routing."""

KERNEL_CHECKS: tuple[Check, ...] = (gives_the_same_bits_again, routes_every_image_alone)
"""Checks for kernels with a fixed order of summation. Matrix products of a library do not pass them."""


HARD_CASES: dict[str, Callable[[Inputs], Inputs]] = {
    "all activations zero": lambda x: x._replace(activations=torch.zeros_like(x.activations)),
    "activations of 1e-30": lambda x: x._replace(activations=torch.full_like(x.activations, 1e-30)),
    "identical votes": lambda x: x._replace(poses=torch.ones_like(x.poses), weight=torch.ones_like(x.weight)),
    "poses of 1e4": lambda x: x._replace(poses=x.poses * 1e4),
    "all poses zero": lambda x: x._replace(poses=torch.zeros_like(x.poses)),
    "saturated logits": lambda x: x._replace(beta_a=x.beta_a * 1e4),
}
"""Inputs for which naive routings give nan or inf. Each entry changes the inputs of a problem; results and gradients
must be finite."""


def _assert_same(actual: Capsules, expected: Capsules) -> None:
    assert_close("poses", actual.poses, expected.poses, 1e-6)
    assert_close("activations", actual.activations, expected.activations, 1e-6)


def _with_offset(routing_map: RoutingMap, offset: list[float] | None) -> RoutingMap:
    """The same map with ``offset`` added to the offsets of all slots, or without offsets."""
    column = torch.zeros_like(routing_map.offset) if offset is None else routing_map.offset + torch.tensor(offset)
    tables = routing_map.children, routing_map.weight_of, column
    return RoutingMap.from_tables(*tables, routing_map.in_size, routing_map.out_size)


def _has_children(routing_map: RoutingMap, poses: Tensor) -> Tensor:
    """1 for parent locations with children, 0 for others, as a factor of [N, C, *out_size, 4]."""
    has = (routing_map.children >= 0).any(dim=1).to(poses.dtype)
    return has.reshape(routing_map.out_size)[..., None]
