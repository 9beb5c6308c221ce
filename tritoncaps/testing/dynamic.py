"""Properties of dynamic routing, as checks of a route on a problem.

A route is a function ``route(poses, weight, routing_map, routing, priors)`` with the shapes of
:func:`tritoncaps.functional.dynamic_routing`. `testing.verify` runs the checks, as for EM routing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from tritoncaps import reference
from tritoncaps.routing import DynamicRouting
from tritoncaps.routing_map import RoutingMap
from tritoncaps.testing.errors import assert_as_good_as, assert_broken_alike, assert_close
from tritoncaps.testing.problems import LAYOUTS, break_a_number, lay_out
from tritoncaps.testing.strategies import routing_maps

VectorRoute = Callable[..., Tensor]


class VectorInputs(NamedTuple):
    """The inputs of dynamic routing.

    Attributes:
        poses: the children's vectors.
        weight: transformation matrices.
        priors: initial logits.

    Shape:
        - poses: [N, B, *in_size, D], weight: [K, B, C, D, E], priors: [K, B, C]
    """

    poses: Tensor
    weight: Tensor
    priors: Tensor


@dataclass(frozen=True)
class VectorProblem:
    """A problem of dynamic routing.

    Args:
        routing_map: which child feeds which parent.
        routing: the options.
        images: number of images.
        in_caps: child types.
        out_caps: parent types.
        in_dim: entries of a child's vector.
        out_dim: entries of a parent's vector.
        seed: random seed of the tensors.
        layout: memory layout of the poses.
        case: a name in :data:`VECTOR_HARD_CASES`, or None.
    """

    routing_map: RoutingMap
    routing: DynamicRouting = field(default_factory=DynamicRouting)
    images: int = 2
    in_caps: int = 3
    out_caps: int = 4
    in_dim: int = 4
    out_dim: int = 5
    seed: int = 0
    layout: str = "contiguous"
    case: str | None = None

    def but(self, **changes: Any) -> VectorProblem:
        """Copy the problem with some changes.

        Args:
            **changes: new values of fields.

        Returns:
            The changed problem.
        """
        return replace(self, **changes)

    def inputs(self, dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> VectorInputs:
        """The tensors of the problem. They are the same numbers in every dtype, up to rounding.

        Args:
            dtype: dtype of the tensors.
            requires_grad: whether the tensors need gradients.

        Returns:
            The inputs.
        """
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        pairs = (self.routing_map.num_weights, self.in_caps, self.out_caps)
        inputs = VectorInputs(
            normal(self.images, self.in_caps, *self.routing_map.in_size, self.in_dim),
            0.7 * normal(*pairs, self.in_dim, self.out_dim),
            0.5 * normal(*pairs),
        )
        if self.case is not None:
            inputs = VECTOR_HARD_CASES[self.case](inputs)
        poses, weight, priors = (x.to(dtype) for x in inputs)
        laid_out = VectorInputs(lay_out(poses, self.layout), weight, priors)
        return VectorInputs(*(x.detach().requires_grad_(requires_grad) for x in laid_out))

    def solve(self, route: VectorRoute, inputs: VectorInputs) -> Tensor:
        """Run a route.

        Args:
            route: the routing to test.
            inputs: the tensors.

        Returns:
            The parents.
        """
        poses, weight, priors = inputs
        return route(poses, weight, routing_map=self.routing_map, routing=self.routing, priors=priors)


def vector_problems(max_types: int = 9, small: bool = False) -> st.SearchStrategy[VectorProblem]:
    """A hypothesis strategy for problems of dynamic routing, with all options. Poses are smaller and larger than the
    tiles of the kernels.

    Args:
        max_types: largest number of capsule types.
        small: generate problems with few edges, for kernels that run in an interpreter.

    Returns:
        The strategy.
    """
    routings = st.builds(
        DynamicRouting,
        iterations=st.integers(1, 4),
        competition=st.sampled_from(["global", "local"]),
        none_of_the_above=st.booleans(),
        gradient=st.sampled_from(["all", "last"]),
    )
    return st.builds(
        VectorProblem,
        routing_map=routing_maps(small),
        routing=routings,
        images=st.integers(1, 3 if small else 11),
        in_caps=st.integers(1, max_types),
        out_caps=st.integers(1, max_types),
        in_dim=st.integers(1, 3 if small else 9),
        out_dim=st.integers(1, 5 if small else 20),
        seed=st.integers(0, 2**31),
        layout=st.sampled_from(LAYOUTS),
    )


def vector_gradients(
    problem: VectorProblem, route: VectorRoute, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """The parents and the gradients of all inputs, for a random cotangent.

    Args:
        problem: the problem; its seed determines the cotangent.
        route: the routing to test.
        dtype: dtype of the inputs.

    Returns:
        Tensors by name.
    """
    inputs = problem.inputs(dtype, requires_grad=True)
    parents = problem.solve(route, inputs)
    grads = torch.autograd.grad(parents, inputs, _cotangent(problem, parents))
    return {"parents": parents} | {f"gradient of {n}": g for n, g in zip(VectorInputs._fields, grads, strict=True)}


def equals_the_reference(route: VectorRoute, problem: VectorProblem) -> None:
    """The parents and all gradients equal those of the reference, in float64."""
    expected = vector_gradients(problem, reference.dynamic_routing)
    for name, value in vector_gradients(problem, route).items():
        assert_close(name, value, expected[name], 1e-10)


def is_as_exact_as_plain_torch(route: VectorRoute, problem: VectorProblem) -> None:
    """In float32, errors are at most twice those of the reference in float32. Only for one or two iterations: the third
    one multiplies the rounding errors of both by large factors."""
    problem = problem.but(routing=replace(problem.routing, iterations=min(problem.routing.iterations, 2)))
    exact = vector_gradients(problem, reference.dynamic_routing)
    plain = vector_gradients(problem, reference.dynamic_routing, torch.float32)
    for name, value in vector_gradients(problem, route, torch.float32).items():
        assert_as_good_as(name, value, plain[name], exact[name], floor=1e-5)


def ignores_the_order_of_child_types(route: VectorRoute, problem: VectorProblem) -> None:
    poses, weight, priors = problem.inputs()
    order = _order(problem, problem.in_caps)
    shuffled = VectorInputs(poses[:, order], weight[:, order], priors[:, order])
    _assert_same(problem.solve(route, shuffled), problem.solve(route, problem.inputs()))


def follows_the_order_of_parent_types(route: VectorRoute, problem: VectorProblem) -> None:
    poses, weight, priors = problem.inputs()
    order = _order(problem, problem.out_caps)
    shuffled = VectorInputs(poses, weight[:, :, order], priors[:, :, order])
    _assert_same(problem.solve(route, shuffled), problem.solve(route, problem.inputs())[:, order])


def turns_with_its_votes(route: VectorRoute, problem: VectorProblem) -> None:
    """If an orthogonal matrix rotates all votes, it rotates the parents, and changes nothing else."""
    poses, weight, priors = problem.inputs()
    generator = torch.Generator().manual_seed(problem.seed)
    turn, _ = torch.linalg.qr(torch.randn(problem.out_dim, problem.out_dim, generator=generator).double())
    turned = problem.solve(route, VectorInputs(poses, weight @ turn, priors))
    _assert_same(turned, problem.solve(route, problem.inputs()) @ turn)


def needs_differences_of_priors_only(route: VectorRoute, problem: VectorProblem) -> None:
    """Adding a number to all initial logits of a child changes nothing, without "none of the above"."""
    problem = problem.but(routing=replace(problem.routing, none_of_the_above=False))
    poses, weight, priors = problem.inputs()
    shift = torch.linspace(-2, 3, problem.in_caps).double()[:, None]
    shifted = problem.solve(route, VectorInputs(poses, weight, priors + shift))
    _assert_same(shifted, problem.solve(route, problem.inputs()))


def breaks_where_the_reference_does(route: VectorRoute, problem: VectorProblem) -> None:
    """With one nan or inf in the poses, the same outputs as in the reference are not finite, no gradient is finite
    where the reference's is not, and the other images do not change."""
    dtype = (torch.float64, torch.float32)[problem.seed % 2]
    problem = problem.but(images=problem.images + 1, layout="contiguous")
    sound = problem.inputs(dtype)
    place, broken = break_a_number(sound.poses, problem.seed)

    def run(route: VectorRoute, inputs: VectorInputs) -> list[Tensor]:
        given = VectorInputs(*(x.detach().clone().requires_grad_() for x in inputs))
        parents = problem.solve(route, given)
        return [parents, *torch.autograd.grad(parents, given, _cotangent(problem, parents))]

    before, found = run(route, sound), run(route, sound._replace(poses=broken))
    expected = run(reference.dynamic_routing, sound._replace(poses=broken))
    names = ["parents", *(f"gradient of {name}" for name in VectorInputs._fields)]
    assert_broken_alike(names, found, expected, before, int(place[0]))


def makes_parents_shorter_than_one(route: VectorRoute, problem: VectorProblem) -> None:
    lengths = problem.solve(route, problem.inputs()).norm(dim=-1)
    assert (lengths < 1).all()


def knows_edges_not_convolutions(route: VectorRoute, problem: VectorProblem) -> None:
    """A graph with the same edges gives the same result."""
    original = problem.routing_map
    if original.num_edges == 0:  # the windows of a strided kernel may contain only padding
        return
    pairs = [(int(c), p, s) for p, row in enumerate(original.children) for s, c in enumerate(row) if c >= 0]
    children, parents, slots = (list(x) for x in zip(*pairs, strict=True))
    listed = RoutingMap.from_edges(
        children, parents, original.num_children, original.num_parents, slots, original.weight_of[: max(slots) + 1]
    )
    poses, weight, priors = problem.inputs()
    flat = VectorInputs(
        poses.reshape(problem.images, problem.in_caps, original.num_children, problem.in_dim),
        weight[: listed.num_weights],
        priors[: listed.num_weights],
    )
    expected = problem.solve(route, problem.inputs())
    _assert_same(problem.but(routing_map=listed).solve(route, flat).reshape(expected.shape), expected)


def computes_only_what_is_asked(route: VectorRoute, problem: VectorProblem) -> None:
    """The gradient of one input alone is the same as with those of the other inputs."""
    everything = vector_gradients(problem, route)
    for index, name in enumerate(VectorInputs._fields):
        inputs = problem.inputs()
        inputs[index].requires_grad_()
        parents = problem.solve(route, inputs)
        (alone,) = torch.autograd.grad(parents, [inputs[index]], _cotangent(problem, parents))
        assert_close(f"gradient of {name} alone", alone, everything[f"gradient of {name}"])


def passes_gradcheck(route: VectorRoute, problem: VectorProblem) -> None:
    problem = problem.but(images=1, routing=replace(problem.routing, gradient="all"))
    torch.autograd.gradcheck(
        lambda *given: problem.solve(route, VectorInputs(*given)),
        tuple(problem.inputs(requires_grad=True)),
        fast_mode=True,
        atol=1e-4,
        rtol=1e-3,
    )


def survives_an_empty_batch(route: VectorRoute, problem: VectorProblem) -> None:
    for name, value in vector_gradients(problem.but(images=0, layout="contiguous"), route).items():
        assert not value.any(), f"{name} of an empty batch is not zero"


def gives_the_same_bits_again(route: VectorRoute, problem: VectorProblem) -> None:
    first, second = (vector_gradients(problem, route, torch.float32) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs between two runs"


def routes_every_image_alone(route: VectorRoute, problem: VectorProblem) -> None:
    """The parents and gradients of an image are the same bits, alone or in a batch, even if another image is nan."""
    problem = problem.but(images=3, layout="contiguous")
    poses, weight, priors = problem.inputs(torch.float32)
    broken = poses.clone()
    broken[1] = float("nan")
    for given in (poses, broken):
        whole = _with_pose_gradient(problem, route, VectorInputs(given, weight, priors))
        for image in (0, 2):
            part = given[image : image + 1]
            alone = _with_pose_gradient(problem, route, VectorInputs(part, weight, priors))
            for of_whole, of_part in zip(whole, alone, strict=True):
                assert torch.equal(of_whole[image : image + 1], of_part), f"image {image} depends on its batch"


VECTOR_CHECKS: tuple[Callable[[VectorRoute, VectorProblem], None], ...] = (
    equals_the_reference,
    is_as_exact_as_plain_torch,
    ignores_the_order_of_child_types,
    follows_the_order_of_parent_types,
    turns_with_its_votes,
    needs_differences_of_priors_only,
    makes_parents_shorter_than_one,
    breaks_where_the_reference_does,
    knows_edges_not_convolutions,
    computes_only_what_is_asked,
    passes_gradcheck,
    survives_an_empty_batch,
)
"""Checks for dynamic routing."""

VECTOR_KERNEL_CHECKS = (gives_the_same_bits_again, routes_every_image_alone)
"""Checks for kernels with a fixed order of summation."""


VECTOR_HARD_CASES: dict[str, Callable[[VectorInputs], VectorInputs]] = {
    "all poses zero": lambda x: x._replace(poses=torch.zeros_like(x.poses)),
    "some poses zero": lambda x: x._replace(poses=x.poses * (x.poses[..., :1] > 0)),
    "all weights zero": lambda x: x._replace(weight=torch.zeros_like(x.weight)),
    "identical votes": lambda x: x._replace(poses=torch.ones_like(x.poses), weight=torch.ones_like(x.weight)),
    "poses of 1e4": lambda x: x._replace(poses=x.poses * 1e4),
    "poses of 1e-20": lambda x: x._replace(poses=x.poses * 1e-20),
    "priors of 1e4": lambda x: x._replace(priors=x.priors * 1e4),
}
"""Inputs for which naive routings give nan or inf: results and gradients must be finite."""


DECIDED_BY_ROUNDING = ("poses of 1e4", "priors of 1e4")
"""Hard cases in which rounding errors decide which parent gets a child: two correct kernels may differ."""


def _with_pose_gradient(problem: VectorProblem, route: VectorRoute, inputs: VectorInputs) -> tuple[Tensor, Tensor]:
    poses = inputs.poses.detach().requires_grad_()
    parents = problem.solve(route, inputs._replace(poses=poses))
    return parents, torch.autograd.grad(parents.sum(), poses)[0]


def _cotangent(problem: VectorProblem, parents: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(problem.seed + 1)
    return torch.randn(parents.shape, generator=generator, dtype=torch.float64).to(parents.dtype)


def _order(problem: VectorProblem, types: int) -> Tensor:
    return torch.randperm(types, generator=torch.Generator().manual_seed(problem.seed))


def _assert_same(actual: Tensor, expected: Tensor) -> None:
    assert_close("parents", actual, expected, 1e-8)
