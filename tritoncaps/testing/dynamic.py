"""What is true of dynamic routing, as checks of a route on a problem.

A route is a function ``route(poses, weight, routing_map, routing, priors)`` with the shapes of
:func:`tritoncaps.functional.dynamic_routing`. The checks are run by `testing.verify`, as those of EM routing are.
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
    """The tensors of a dynamic routing."""

    poses: Tensor
    weight: Tensor
    priors: Tensor


@dataclass(frozen=True)
class VectorProblem:
    """N ``images`` of ``in_caps`` types with ``in_dim`` numbers, routed to ``out_caps`` types with ``out_dim``."""

    routing_map: RoutingMap
    routing: DynamicRouting = field(default_factory=DynamicRouting)
    images: int = 2
    in_caps: int = 3
    out_caps: int = 4
    in_dim: int = 4
    out_dim: int = 5
    seed: int = 0
    layout: str = "contiguous"
    case: str | None = None  # of VECTOR_HARD_CASES

    def but(self, **changes: Any) -> VectorProblem:
        """The same problem, except for ``changes``."""
        return replace(self, **changes)

    def inputs(self, dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> VectorInputs:
        """The tensors: the same numbers in every dtype, rounded."""
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
        """The parents of ``inputs`` by ``route``."""
        poses, weight, priors = inputs
        return route(poses, weight, routing_map=self.routing_map, routing=self.routing, priors=priors)


def vector_problems(max_types: int = 9, small: bool = False) -> st.SearchStrategy[VectorProblem]:
    """Whole problems, with every option of DynamicRouting; sizes of poses cross every edge of a tile."""
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
    """The parents and the gradients of all inputs, by name, for a cotangent drawn from the problem's seed."""
    inputs = problem.inputs(dtype, requires_grad=True)
    parents = problem.solve(route, inputs)
    grads = torch.autograd.grad(parents, inputs, _cotangent(problem, parents))
    return {"parents": parents} | {f"gradient of {n}": g for n, g in zip(VectorInputs._fields, grads, strict=True)}


def equals_the_reference(route: VectorRoute, problem: VectorProblem) -> None:
    """The parents and all gradients, in float64."""
    expected = vector_gradients(problem, reference.dynamic_routing)
    for name, value in vector_gradients(problem, route).items():
        assert_close(name, value, expected[name], 1e-10)


def is_as_exact_as_plain_torch(route: VectorRoute, problem: VectorProblem) -> None:
    """In float32, at most twice as wrong as the reference in float32; for up to two iterations, as the third
    multiplies rounding errors of either by large factors, whichever code made them."""
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
    """Votes that are all turned by an orthogonal matrix turn the parents, and change nothing else."""
    poses, weight, priors = problem.inputs()
    generator = torch.Generator().manual_seed(problem.seed)
    turn, _ = torch.linalg.qr(torch.randn(problem.out_dim, problem.out_dim, generator=generator).double())
    turned = problem.solve(route, VectorInputs(poses, weight @ turn, priors))
    _assert_same(turned, problem.solve(route, problem.inputs()) @ turn)


def needs_differences_of_priors_only(route: VectorRoute, problem: VectorProblem) -> None:
    """A number added to all first logits of a child changes nothing (without a rival whose logit stays zero)."""
    problem = problem.but(routing=replace(problem.routing, none_of_the_above=False))
    poses, weight, priors = problem.inputs()
    shift = torch.linspace(-2, 3, problem.in_caps).double()[:, None]
    shifted = problem.solve(route, VectorInputs(poses, weight, priors + shift))
    _assert_same(shifted, problem.solve(route, problem.inputs()))


def breaks_where_the_reference_does(route: VectorRoute, problem: VectorProblem) -> None:
    """One nan or inf among the poses: the same numbers of the same capsules are not finite, no gradient is finite where
    the reference's is not, and nothing changes in other images."""
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
    """The same edges, listed one by one, give the same result."""
    original = problem.routing_map
    if original.num_edges == 0:  # a strided kernel may see padding only
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
    """Each input's gradient alone is what it is among the others."""
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
    """Splitting a batch changes no bit of an image's parents or gradients, even if another image is nan."""
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
"""True of dynamic routing."""

VECTOR_KERNEL_CHECKS = (gives_the_same_bits_again, routes_every_image_alone)
"""What a kernel that owns its order of summation promises on top."""


VECTOR_HARD_CASES: dict[str, Callable[[VectorInputs], VectorInputs]] = {
    "all poses zero": lambda x: x._replace(poses=torch.zeros_like(x.poses)),
    "some poses zero": lambda x: x._replace(poses=x.poses * (x.poses[..., :1] > 0)),
    "all weights zero": lambda x: x._replace(weight=torch.zeros_like(x.weight)),
    "identical votes": lambda x: x._replace(poses=torch.ones_like(x.poses), weight=torch.ones_like(x.weight)),
    "poses of 1e4": lambda x: x._replace(poses=x.poses * 1e4),
    "poses of 1e-20": lambda x: x._replace(poses=x.poses * 1e-20),
    "priors of 1e4": lambda x: x._replace(priors=x.priors * 1e4),
}
"""Inputs that break naive routings: results and gradients must stay finite."""


DECIDED_BY_ROUNDING = ("poses of 1e4", "priors of 1e4")
"""Of these hard cases, rounding decides which parent wins a child: two correct kernels need not agree."""


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
