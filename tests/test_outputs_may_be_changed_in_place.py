"""Users may change the outputs of functions and layers in place, like those of torch.nn: values and gradients equal
those of the same change out of place, on every backend."""

import pytest
import torch

from tritoncaps import (
    Capsules,
    ClassCaps,
    ConvCaps2d,
    ConvVectorCaps2d,
    EMRouting,
    Gaussians,
    RoutingMap,
    VectorCaps,
    VectorPrimaryCaps,
    functional,
)
from tritoncaps.testing import Problem, VectorProblem

MAP = RoutingMap.conv((3, 2), 2)
EDGES = (2, MAP.num_parents, MAP.num_slots, 2, 3)
PARENTS = (2, 3, *MAP.out_size)


def uniform(*shape):
    return torch.rand(shape, dtype=torch.float64) + 0.1


def em_inputs():
    return Problem(MAP, in_caps=2, out_caps=3).inputs()


def capsules(*space, pose=(4, 4)):
    return uniform(2, 2, *space, *pose), uniform(2, 2, *space)


def layer(make):
    """A call of a new layer, always with the same weights."""

    def call(backend, *given):
        torch.manual_seed(0)
        return make(backend)(Capsules(*given) if len(given) == 2 else given[0])

    return call


EM = EMRouting(iterations=2)
F64 = {"dtype": torch.float64}
CALLS = {
    "em_routing": (lambda b, *x: functional.em_routing(*x, MAP, EM, backend=b), em_inputs),
    "dynamic_routing": (
        lambda b, poses, weight, priors: functional.dynamic_routing(poses, weight, MAP, None, priors, backend=b),
        lambda: VectorProblem(MAP, in_caps=2, out_caps=3).inputs(),
    ),
    "pose_votes": (
        lambda b, poses, weight: functional.pose_votes(poses, weight, MAP, backend=b),
        lambda: (em_inputs().poses, em_inputs().weight),
    ),
    "coordinate_addition": (
        lambda b, votes: functional.coordinate_addition(votes, MAP, backend=b),
        lambda: (uniform(*EDGES, 4, 4),),
    ),
    "m_step": (
        lambda b, *x: functional.m_step(*x, MAP, inverse_temperature=0.5, backend=b),
        lambda: (uniform(*EDGES, 4, 4), uniform(*EDGES), uniform(2, 2, 3, 2), uniform(3), uniform(3)),
    ),
    "squash": (lambda b, vectors: functional.squash(vectors, backend=b), lambda: (uniform(2, 3),)),
    "squash along another axis": (lambda b, x: functional.squash(x, 0, backend=b), lambda: (uniform(2, 3),)),
    "ConvCaps2d": (layer(lambda b: ConvCaps2d(2, 3, 2, routing=EM, backend=b, **F64)), lambda: capsules(3, 2)),
    "ClassCaps": (layer(lambda b: ClassCaps(2, 3, routing=EM, backend=b, **F64)), lambda: capsules(2)),
}
# layers whose activations are the lengths of their poses: autograd needs the poses as they were
LENGTHS = {
    "VectorCaps": (layer(lambda b: VectorCaps(2, 3, 2, 5, backend=b, **F64)), lambda: capsules(pose=(3,))),
    "ConvVectorCaps2d": (
        layer(lambda b: ConvVectorCaps2d(2, 3, 2, 5, 2, backend=b, **F64)),
        lambda: capsules(3, 2, pose=(3,)),
    ),
    "VectorPrimaryCaps": (
        layer(lambda b: VectorPrimaryCaps(2, 2, 3, 1, backend=b, **F64)),
        lambda: (uniform(2, 2, 2, 2),),
    ),
}


@pytest.fixture(params=["reference", "cpu", "triton"])
def backend(request):
    return request.param


def change_in_place(x):
    x[..., 0] += 1
    x.mul_(3)
    return x


def change(x):
    first = torch.arange(x.shape[-1]) == 0
    return (x + first) * 3


def outputs(call, backend, given, changed, only_first=False):
    found = call(backend, *given)
    return [changed(x) for x in (found if isinstance(found, tuple) else (found,))[: 1 if only_first else None]]


def values_and_gradients(call, backend, given, changed, only_first=False):
    given = [x.detach().clone().requires_grad_() for x in given]
    found = outputs(call, backend, given, changed, only_first)
    torch.manual_seed(1)
    loss = sum((x * torch.randn_like(x)).sum() for x in found)
    return [*found, *torch.autograd.grad(loss, given, allow_unused=True)]


@pytest.mark.parametrize("name", [*CALLS, *LENGTHS])
def test_values_and_gradients(name, backend):
    call, inputs = (CALLS | LENGTHS)[name]
    given, only_poses = inputs(), name in LENGTHS
    expected = values_and_gradients(call, backend, given, change, only_poses)
    found = values_and_gradients(call, backend, given, change_in_place, only_poses)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", [*CALLS, *LENGTHS])
def test_without_gradients(name, backend):
    call, inputs = (CALLS | LENGTHS)[name]
    given = inputs()
    with torch.no_grad():
        torch.testing.assert_close(
            outputs(call, backend, given, change_in_place), outputs(call, backend, given, change)
        )


def test_assignments_are_kept_for_backward_as_by_softmax(backend):
    """A change in place works; the backward pass then raises an error of torch, and computes no wrong gradient."""
    gaussians = [uniform(*PARENTS, 4, 4), uniform(*PARENTS, 4, 4), uniform(*PARENTS)]
    votes = uniform(*EDGES, 4, 4).requires_grad_()
    found = functional.e_step(votes, Gaussians(*gaussians), MAP, backend=backend)
    expected = change(found.detach().clone())
    torch.testing.assert_close(change_in_place(found), expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()
