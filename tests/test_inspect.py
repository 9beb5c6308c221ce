"""The results of `tritoncaps.inspect` are the numbers that layers compute."""

import math
from dataclasses import dataclass

import pytest
import torch

from tritoncaps import (
    Capsules,
    ClassCaps,
    Components,
    ConvCaps1d,
    ConvCaps2d,
    ConvVectorCaps2d,
    DynamicRouting,
    EMRouting,
    GraphCaps,
    MixtureRouting,
    RoutingMap,
    VBRouting,
    VectorCaps,
    functional,
    inspect,
)
from tritoncaps.models import CapsNet, MatrixCapsNet, TinyCapsNet


@dataclass(frozen=True)
class OwnRouting(MixtureRouting):
    """A variance of one, and the logit is the support."""

    def fit(self, moments, parameters, iteration):
        distance = moments.mean.square().sum((-1, -2))
        return Components(moments.mean, torch.ones_like(moments.mean), -distance, moments.support)


def capsules(types=2, space=(5, 4), images=2, pose=(4, 4)):
    return Capsules(torch.randn(images, types, *space, *pose), torch.rand(images, types, *space))


MATRIX_LAYERS = {
    "em": lambda **k: ConvCaps2d(2, 3, 3, stride=2, padding=1, routing=EMRouting(3, final_lambda=0.1), **k),
    "local": lambda **k: ConvCaps2d(2, 3, 3, routing=EMRouting(2, competition="local"), **k),
    "vb": lambda **k: ConvCaps2d(2, 3, 3, routing=VBRouting(3), **k),
    "own": lambda **k: ConvCaps2d(2, 3, 2, routing=OwnRouting(2), **k),
    "class": lambda **k: ClassCaps(2, 3, **k),
}
VECTOR_LAYERS = {
    "full": lambda **k: VectorCaps(18, 6, 3, 5, **k),
    "priors": lambda **k: VectorCaps(18, 6, 3, 5, priors=True, **k),
    "conv": lambda **k: ConvVectorCaps2d(2, 6, 3, 5, 3, padding=1, routing=DynamicRouting(2), **k),
    "none of the above": lambda **k: VectorCaps(18, 6, 3, 5, routing=DynamicRouting(none_of_the_above=True), **k),
}


def with_backends(kinds, on_triton):
    """All backends; few cases for Triton, whose interpreter is slow."""
    return [(kind, backend) for kind in kinds for backend in ("reference", "cpu")] + [(k, "triton") for k in on_triton]


# iterations


@pytest.mark.parametrize(("kind", "backend"), with_backends(MATRIX_LAYERS, ("em", "class")))
def test_the_last_iteration_is_what_the_layer_returns(kind, backend):
    layer, given = MATRIX_LAYERS[kind](backend=backend), capsules(space=(3, 3), images=1)
    found = inspect.iterations(layer, given)
    assert len(found) == layer.routing.iterations
    parents = layer(given)
    torch.testing.assert_close(found[-1].mean, parents.poses, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[-1].activations, parents.activations, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[-1].assignments, layer.assignments(given))


@pytest.mark.parametrize(("kind", "backend"), with_backends(VECTOR_LAYERS, ("priors",)))
def test_the_last_iteration_of_vectors_is_what_the_layer_returns(kind, backend):
    layer, given = VECTOR_LAYERS[kind](backend=backend), capsules(space=(3, 3), images=1, pose=(6,))
    if layer.priors is not None:
        torch.nn.init.normal_(layer.priors)
    found = inspect.iterations(layer, given)
    assert len(found) == layer.routing.iterations
    torch.testing.assert_close(found[-1].parents, layer(given).poses, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found[-1].activations, layer(given).activations, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found[-1].assignments, layer.assignments(given))


def test_em_by_the_public_steps():
    """M-step and E-step by hand, from uniform assignments on: every number of every iteration."""
    layer, given = MATRIX_LAYERS["em"](), capsules()
    routing_map = layer.routing_map((5, 4))
    votes = functional.pose_votes(given.poses, layer.weight.flatten(0, 1), routing_map)
    shares = functional.initial_assignments(given.activations, 3, routing_map)
    for t, iteration in enumerate(inspect.iterations(layer, given)):
        gaussians = functional.m_step(
            votes,
            shares,
            given.activations,
            layer.beta_u,
            layer.beta_a,
            routing_map,
            inverse_temperature=layer.routing.lambdas[t],
        )
        torch.testing.assert_close(iteration.assignments, shares)
        torch.testing.assert_close(iteration.mean, gaussians.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(iteration.variance, gaussians.variance, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(iteration.logits, gaussians.logits, rtol=1e-4, atol=1e-4)
        shares = functional.e_step(votes, gaussians, routing_map)
        torch.testing.assert_close(iteration.next_assignments, shares, rtol=1e-3, atol=1e-5)


def test_support_by_hand():
    """Two children, one position, two classes: even shares at first, so that each class has half of both."""
    layer = ClassCaps(2, 2, coordinates=False)
    given = Capsules(torch.randn(1, 2, 1, 4, 4), torch.tensor([[[0.25], [1.0]]]))
    first, *_, last = inspect.iterations(layer, given)
    torch.testing.assert_close(first.support, torch.full((1, 2), 0.625))
    torch.testing.assert_close(last.support.sum(), torch.tensor(1.25))
    torch.testing.assert_close(
        first.mean[0, 0],
        (0.25 * given.poses[0, 0, 0] @ layer.weight[0, 0] + given.poses[0, 1, 0] @ layer.weight[1, 0]).detach() / 1.25,
    )


def test_dynamic_routing_by_hand():
    """One child of length one, which agrees with the first of two parents and contradicts the second."""
    layer = VectorCaps(1, 1, 2, 1, routing=DynamicRouting(2))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -2.0]).reshape(1, 2, 1, 1))
    first, second = inspect.iterations(layer, torch.ones(1, 1, 1))

    def squash(x):
        return x * abs(x) / (1 + x * x)

    v = [squash(0.5), squash(-1.0)]
    assert first.logits.flatten().tolist() == [0, 0]
    assert first.parents.flatten().tolist() == pytest.approx(v)
    b = [v[0], -2 * v[1]]
    assert second.logits.flatten().tolist() == first.agreement.flatten().tolist() == pytest.approx(b)
    share = 1 / (1 + math.exp(b[1] - b[0]))
    assert first.next_assignments.flatten().tolist() == pytest.approx([share, 1 - share])
    assert second.assignments.flatten().tolist() == pytest.approx([share, 1 - share])
    assert second.parents.flatten().tolist() == pytest.approx([squash(share), squash(-2 * (1 - share))])


def test_iterations_of_one_image_do_not_depend_on_others():
    layer, given = MATRIX_LAYERS["local"](), capsules(images=3)
    alone = inspect.iterations(layer, given.map(lambda x: x[1:2]))
    for whole, part in zip(inspect.iterations(layer, given), alone, strict=True):
        for name in whole._fields:
            torch.testing.assert_close(getattr(whole, name)[1:2], getattr(part, name), msg=name)


def test_iterations_of_a_graph():
    graph = RoutingMap.from_edges([0, 1, 2, 2], [0, 0, 0, 1], 3, 2, relations=[0, 1, 0, 1])
    layer, given = GraphCaps(2, 3, 2), capsules(space=(3,))
    torch.testing.assert_close(
        inspect.iterations(layer, given, graph)[-1].mean, layer(given, graph).poses, rtol=1e-3, atol=1e-5
    )
    with pytest.raises(TypeError, match="routing_map must be a RoutingMap, but it is a NoneType"):
        inspect.iterations(layer, given)
    with pytest.raises(ValueError, match="routing_map must not be given for ConvCaps1d"):
        inspect.iterations(ConvCaps1d(2, 3, 2), given, graph)


def test_iterations_have_no_gradient():
    layer, given = MATRIX_LAYERS["em"](), capsules()
    assert not any(x.requires_grad for iteration in inspect.iterations(layer, given) for x in iteration)


def test_layers_without_a_routing_are_refused():
    with pytest.raises(TypeError, match="layer must be a layer with a routing, such as ConvCaps2d, but it is a Linear"):
        inspect.iterations(torch.nn.Linear(2, 2), capsules())


# votes


@pytest.mark.parametrize("kind", MATRIX_LAYERS)
def test_votes_are_those_of_the_definition(kind):
    layer, given = MATRIX_LAYERS[kind](), capsules()
    routing_map = layer.routing_map((5, 4))
    weight = layer.weight.reshape(-1, 2, 3, 4, 4)
    every = functional.coordinate_addition(functional.pose_votes(given.poses, weight, routing_map), routing_map)
    missing = (routing_map.children < 0)[:, :, None, None, None, None]
    every = every.masked_fill(missing, 0)
    if kind == "class":
        parents, places = [2, (0,)], [(0, 2), (0, 0)]
    else:
        parents, width = [(2, 0, 1), (0, 1, 0)], routing_map.out_size[1]
        places = [(1, 2), (width, 0)]
    found = inspect.votes(layer, given, parents)
    last = inspect.iterations(layer, given)[-1]
    weights = found.select(last.assignments) * found.activations
    assert found.votes.shape[:2] == (2, 2)
    for m, (p, c) in enumerate(places):
        torch.testing.assert_close(found.votes[:, m], every[:, p, :, :, c])
        assert torch.equal(found.select(last.assignments)[:, m], last.assignments[:, p, :, :, c])
        assert torch.equal(found.children[m].int(), routing_map.children[p])
        support = last.support.flatten(2)[:, c, p] if last.support.ndim > 2 else last.support[:, c]
        torch.testing.assert_close(weights[:, m].sum((1, 2)), support)


def test_votes_of_vectors_make_the_parent():
    """The squashed sum of the votes, weighted by the last assignments."""
    layer, given = VECTOR_LAYERS["conv"](), capsules(pose=(6,))
    found = inspect.votes(layer, given, [(1, 4, 3), (2, 0, 0)])
    last = inspect.iterations(layer, given)[-1]
    total = (found.votes * found.select(last.assignments)[..., None]).sum((2, 3))
    expected = torch.stack([last.parents[:, 1, 4, 3], last.parents[:, 2, 0, 0]], 1)
    torch.testing.assert_close(functional.squash(total), expected)


def test_a_silent_child_may_have_any_pose():
    layer, given = MATRIX_LAYERS["local"](), capsules()
    given.activations[:, 1, 2, 2] = 0
    given.poses[:, 1, 2, 2] = float("nan")
    assert inspect.votes(layer, given, [(0, 1, 1)]).votes.isfinite().all()
    assert all(x.isfinite().all() for iteration in inspect.iterations(layer, given) for x in iteration)


@pytest.mark.parametrize("parent", [(3, 0, 0), (0, 5, 0), (0, 0), 1, (-1, 0, 0)])
def test_parents_that_are_not_there(parent):
    with pytest.raises(ValueError, match=r"parents must name capsules by indices below \(3, 3, 2\), but one is"):
        inspect.votes(MATRIX_LAYERS["local"](), capsules(), [parent])


# attribution

NETWORKS = {
    "matrix": lambda: MatrixCapsNet(1, 3, (4, 2, 3, 3)),
    "local": lambda: MatrixCapsNet(1, 3, (4, 2, 3, 3), routing=EMRouting(2, competition="local"), norm=True),
    "tiny": lambda: TinyCapsNet(1, 3, 20, (4, 2)),
    "vector": lambda: CapsNet(1, 3, 20, channels=4, primary_caps=2, primary_dim=4, class_dim=4, decoder=False),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_attribution_sums_to_the_data_of_the_class(kind):
    network, images = NETWORKS[kind]().eval(), torch.randn(3, 1, 20, 20)
    found = inspect.attribution(network, images, [0, 2, 1])
    names = list(network(images, return_intermediate=True))
    children = network(images, return_intermediate=True)[names[-2]]
    last = inspect.iterations(network.class_caps, children)[-1]
    if kind == "vector":
        length = last.activations  # |s|^2 / (1 + |s|^2)
        support = (length / (1 - length)).sqrt()
    else:
        support = last.support.reshape(3, 3)
    torch.testing.assert_close(found.support, support[[0, 1, 2], [0, 2, 1]])
    assert found.pixels.shape == (3, 20, 20)
    torch.testing.assert_close(found.pixels.sum((1, 2)), found.support)
    assert list(found.capsules) == names
    for name, held in found.capsules.items():
        torch.testing.assert_close(held.flatten(1).sum(1), found.support, msg=name)


def test_attribution_follows_the_assignments():
    """The last layer: R a of each child. The layer below: a parent's part, divided like R a of its children."""
    network, images = NETWORKS["matrix"]().eval(), torch.randn(1, 1, 20, 20)
    found, layers = inspect.attribution(network, images, 1), network(images, return_intermediate=True)
    top = network.class_caps.assignments(layers["conv_caps2"])[0, 0, :, :, 1]  # [S, B]
    expected = top.T.reshape(layers["conv_caps2"].activations[0].shape) * layers["conv_caps2"].activations[0]
    torch.testing.assert_close(found.capsules["conv_caps2"][0], expected)
    shares = network.conv_caps2.assignments(layers["conv_caps1"])[0]  # [P, S, B, C]
    table = network.conv_caps2.routing_map(layers["conv_caps1"].activations.shape[2:]).children
    below = torch.zeros_like(layers["conv_caps1"].activations[0]).flatten(1)
    activations = layers["conv_caps1"].activations[0].flatten(1)  # [B, L]
    for p, row in enumerate(table.tolist()):
        r = shares[p] * activations[:, row].T[..., None]  # [S, B, C]
        parts = (r / r.sum((0, 1)) * expected.flatten(1)[:, p]).sum(-1)
        for s, child in enumerate(row):
            below[:, child] += parts[s]
    torch.testing.assert_close(found.capsules["conv_caps1"][0].flatten(1), below)


def test_a_primary_capsule_shares_among_its_pixels():
    """Only one primary capsule is active: all comes from the 5x5 pixels that it sees. Along an axis, the first of them
    and every second are seen by three capsules, the others by two."""
    network = NETWORKS["matrix"]().eval()

    def one_only(module, given, found):
        kept = torch.zeros_like(found.activations)
        kept[:, 1, 2, 3] = 1
        return Capsules(found.poses, kept)

    network.primary.register_forward_hook(one_only)
    with torch.no_grad():  # a parent without data has activation zero
        for layer in (network.conv_caps1, network.conv_caps2):
            layer.beta_a.fill_(-1e6)
            layer.beta_u.fill_(-1e9)
    found = inspect.attribution(network, torch.randn(1, 1, 20, 20), 0)
    assert found.support > 0.01
    expected = torch.zeros(20, 20)
    part = torch.tensor([1 / 3, 1 / 2, 1 / 3, 1 / 2, 1 / 3])
    expected[4:9, 6:11] = found.support * torch.outer(part, part) / part.sum() ** 2
    torch.testing.assert_close(found.pixels[0], expected)


def test_even_capsules_give_an_even_picture():
    """Away from the edges."""
    network = NETWORKS["matrix"]()
    held = torch.ones(1, 1, 14, 14)
    found = inspect._spread(held, network.conv, (31, 31))
    torch.testing.assert_close(found[..., 8:23, 8:23], torch.full((1, 1, 15, 15), 0.25))
    torch.testing.assert_close(found.sum(), held.sum())


def test_a_parent_without_data_shares_evenly():
    """No primary capsule is active: the layer above has no data but is active, and its children share that evenly."""
    network = NETWORKS["matrix"]().eval()
    network.primary.register_forward_hook(lambda *x: Capsules(x[2].poses, torch.zeros_like(x[2].activations)))
    found = inspect.attribution(network, torch.randn(1, 1, 21, 21), 0)
    assert found.support > 0.01
    above = found.capsules["conv_caps1"].sum(1, keepdim=True)
    expected = torch.nn.functional.conv_transpose2d(above, torch.ones(1, 2, 3, 3) / 18, stride=2)
    torch.testing.assert_close(found.capsules["primary"], expected)


@pytest.mark.parametrize("classes", [3, [0, -1], [0], 1.0, [[0, 1]]])
def test_classes_that_are_not_there(classes):
    with pytest.raises(ValueError, match="classes must be"):
        inspect.attribution(NETWORKS["matrix"](), torch.randn(2, 1, 20, 20), classes)


def test_networks_without_capsules_are_refused():
    with pytest.raises(TypeError, match="network must have a convolution `conv` and primary capsules `primary`"):
        inspect.attribution(torch.nn.Linear(2, 2), torch.randn(2, 1, 20, 20), 0)
