"""torch.func: functional_call, grad, vmap over ensembles and samples, jacobians, second derivatives."""

from dataclasses import dataclass

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap
from torch.utils._pytree import tree_leaves

from tritoncaps import (
    Capsules,
    ClassCaps,
    Components,
    ConvCaps2d,
    MixtureRouting,
    RoutingMap,
    VectorCaps,
    functional,
)

DOUBLE = torch.float64


def matrix(*space):
    return Capsules(torch.randn(2, 3, *space, 4, 4, dtype=DOUBLE), torch.rand(2, 3, *space, dtype=DOUBLE))


CASES = {
    "conv": (lambda backend: ConvCaps2d(3, 2, 2, backend=backend, dtype=DOUBLE), lambda: matrix(3, 3)),
    "class": (lambda backend: ClassCaps(3, 2, backend=backend, dtype=DOUBLE), lambda: matrix(2)),
    "vector": (lambda backend: VectorCaps(3, 4, 2, 5, backend=backend, dtype=DOUBLE), lambda: vectors()),
}


def vectors():
    poses = torch.randn(2, 3, 4, dtype=DOUBLE)
    return Capsules(poses, poses.norm(dim=-1))


@pytest.fixture(params=CASES)
def case(request):
    """A layer, the same layer with the backend reference, and an input."""
    make, given = CASES[request.param]
    layer, reference = make("cpu"), make("reference")
    reference.load_state_dict(layer.state_dict())
    return layer, reference, given()


def loss(layer, given):
    def of_parameters(parameters):
        return sum(x.square().sum() for x in tree_leaves(functional_call(layer, parameters, (given,))))

    return of_parameters


def assert_same(actual, expected):
    for mine, theirs in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


def test_grad(case):
    layer, reference, given = case
    parameters = dict(layer.named_parameters())
    assert_same(grad(loss(layer, given))(parameters), grad(loss(reference, given))(parameters))


def test_vmap_over_an_ensemble(case):
    layer, _, given = case
    members = [type(layer)(**arguments(layer)) for _ in range(3)]
    parameters, _ = stack_module_state(members)
    outputs = vmap(lambda p: functional_call(layer, p, (given,)))(parameters)
    assert_same(outputs, [torch.stack(parts) for parts in zip(*(tree_leaves(m(given)) for m in members), strict=True)])
    grads = vmap(grad(loss(layer, given)))(parameters)
    alone = [grad(loss(layer, given))(dict(m.named_parameters())) for m in members]
    assert_same(grads, {name: torch.stack([g[name] for g in alone]) for name in grads})


@pytest.mark.parametrize("name", ["class", "vector"])
def test_triton_under_transforms(name):
    make, given = CASES[name]
    layer, reference, given = make("triton"), make("reference"), given()
    parameters = [{key: torch.randn_like(x) for key, x in layer.named_parameters()} for _ in range(2)]
    both = {key: torch.stack([member[key] for member in parameters]) for key in parameters[0]}
    assert_same(*(vmap(grad(loss(x, given)))(both) for x in (layer, reference)))


def arguments(layer):
    names = ("in_caps", "in_dim", "out_caps", "out_dim", "kernel_size")
    given = {name: getattr(layer, name) for name in names if getattr(layer, name, ())}
    if isinstance(layer, ClassCaps):
        given["num_classes"] = given.pop("out_caps")
    return {**given, "dtype": DOUBLE}


def test_gradients_of_every_sample(case):
    layer, reference, given = case
    parameters = dict(layer.named_parameters())

    def of_sample(layer):
        def gradient(p, *sample):
            return grad(loss(layer, Capsules(*(x[None] for x in sample))))(p)

        return vmap(gradient, in_dims=(None, 0, 0))(parameters, *given)

    assert_same(of_sample(layer), of_sample(reference))


def scalar(layer, given):
    return lambda poses: sum(x.square().sum() for x in tree_leaves(layer(Capsules(poses, given.activations))))


def test_jacobian(case):
    layer, reference, given = case

    def outputs(layer):
        return lambda poses: tree_leaves(layer(Capsules(poses, given.activations)))[0].sum(dim=1)

    assert_same(jacrev(outputs(layer))(given.poses), jacrev(outputs(reference))(given.poses))


def test_second_derivatives(case):
    layer, reference, given = case
    small = Capsules(given.poses[:1], given.activations[:1])
    assert_same(*(jacrev(jacrev(scalar(x, small)))(small.poses) for x in (layer, reference)))
    assert_same(*(double_backward(x, given) for x in (layer, reference)))


def double_backward(layer, given):
    poses = given.poses.clone().requires_grad_()
    (first,) = torch.autograd.grad(scalar(layer, given)(poses), poses, create_graph=True)
    return torch.autograd.grad(first.square().sum(), (poses, *layer.parameters()))


def test_squash_twice():
    vectors = torch.randn(3, 4, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradgradcheck(functional.squash, vectors)


def test_forward_mode_is_refused_in_a_sentence(case):
    layer, _, given = case
    function = scalar(layer, given)
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative .* backend='reference'"):
        jvp(function, (given.poses,), (given.poses,))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        hessian(function)(given.poses)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        function(forward_ad.make_dual(given.poses, given.poses))
    assert grad(function)(given.poses).isfinite().all()  # nothing is left behind


def test_tables_made_inside_a_transform_are_plain():
    """A map that is used for the first time inside a transform keeps no tensor of that transform."""
    routing_map = RoutingMap.full((3, 1, 2, 1))
    given = torch.randn(1, 2, 3, 1, 2, 1, 4, 4, dtype=DOUBLE), torch.rand(1, 2, 3, 1, 2, 1, dtype=DOUBLE)
    rest = torch.randn(1, 2, 2, 4, 4, dtype=DOUBLE), *torch.randn(2, 2, dtype=DOUBLE)

    def route(poses):
        return functional.em_routing(poses, given[1], *rest, routing_map).poses.sum()

    inside = grad(route)(given[0])
    assert_same(grad(route)(given[0]), inside)


@dataclass(frozen=True)
class ShapedRouting(MixtureRouting):
    """Its fit needs the shape of the parents, which is () for class capsules."""

    out_size: tuple[int, ...] = ()

    def fit(self, moments, parameters, iteration):
        support, mean, variance, _ = moments
        assert support.shape[2:] == self.out_size
        return Components(mean, 1 / (1 + variance), support.log1p(), support - mean.square().sum((-1, -2)))


def test_a_fit_sees_the_same_shapes_in_second_derivatives():
    layer = ClassCaps(2, 3, routing=ShapedRouting(2), dtype=torch.float64)
    poses = torch.randn(1, 2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    out = layer(Capsules(poses, torch.rand(1, 2, 2, dtype=torch.float64))).poses.square().sum()
    (first,) = torch.autograd.grad(out, poses, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), poses)[0].isfinite().all()
