"""Features of layers, models and capsules besides their forward pass."""

import pytest
import torch
from torch import nn

from tritoncaps import (
    Capsules,
    ClassCaps,
    ConvCaps1d,
    ConvCaps2d,
    ConvCaps3d,
    ConvVectorCaps2d,
    DynamicRouting,
    EMRouting,
    GraphCaps,
    PrimaryCaps,
    PrimaryCaps1d,
    PrimaryCaps3d,
    RoutingMap,
    VectorCaps,
    functional,
    reference,
)
from tritoncaps.models import CapsNet, MatrixCapsNet

CONVOLUTIONS = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}
CONV_CAPS = {1: ConvCaps1d, 2: ConvCaps2d, 3: ConvCaps3d}
PRIMARY = {1: PrimaryCaps1d, 2: PrimaryCaps, 3: PrimaryCaps3d}


def capsules(types=3, space=(5, 4), images=2, **kwargs):
    return Capsules(torch.randn(images, types, *space, 4, 4, **kwargs), torch.rand(images, types, *space, **kwargs))


# primary capsules


@pytest.mark.parametrize("dims", PRIMARY)
def test_primary_capsules_of_every_dimension(dims):
    """Pose entry h of type c is channel 16 c + h of the convolution, and they fit the layer of that dimension."""
    layer = PRIMARY[dims](3, 2, kernel_size=3, stride=2, padding=1)
    features = torch.randn(2, 3, *(5, 4, 6)[:dims])
    found = layer(features)
    given = {"stride": 2, "padding": 1}
    channels = CONVOLUTIONS[dims](features, layer.pose.weight, layer.pose.bias, **given)
    for c in range(2):
        for h in range(16):
            assert torch.equal(found.poses[:, c, ..., h // 4, h % 4], channels[:, 16 * c + h])
    logits = CONVOLUTIONS[dims](features, layer.activation.weight, layer.activation.bias, **given)
    torch.testing.assert_close(found.activations, logits.sigmoid())
    assert CONV_CAPS[dims](2, 4, 1, backend="reference")(found).activations.shape == (2, 4, *logits.shape[2:])
    with pytest.raises(ValueError, match=r"features must have shape \[N, 3, "):
        layer(torch.randn(2, 3, *(5, 4, 6)[:dims], 7))


# padding="same"


@pytest.mark.parametrize("dims", CONV_CAPS)
@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 3), (3, 2)])
def test_same_padding_keeps_the_size_as_in_torch(dims, kernel, dilation):
    size = (5, 6, 4)[:dims]
    layer = CONV_CAPS[dims](2, 3, kernel, padding="same", dilation=dilation, device="meta")
    image, weight = torch.zeros(1, 1, *size), torch.zeros(1, 1, *[kernel] * dims)
    expected = CONVOLUTIONS[dims](image, weight, padding="same", dilation=dilation)
    assert layer.routing_map(size).out_size == tuple(expected.shape[2:]) == size
    layer.routing_map(size).check()


@pytest.mark.parametrize(("kernel", "dilation"), [(2, 1), (3, 1), (4, 1), (2, 3)])
def test_same_padding_sees_the_children_that_torch_sees(kernel, dilation):
    """An image of 1, 2, ..., and kernels with a single 1: the result of torch is the child, or 0 for padding."""
    size = (4, 5)
    table = RoutingMap.conv(size, kernel, padding="same", dilation=dilation).children
    image = torch.arange(1.0, 21.0).reshape(1, 1, *size)
    kernels = torch.eye(kernel**2).reshape(-1, 1, kernel, kernel)
    seen = nn.functional.conv2d(image, kernels, padding="same", dilation=dilation)  # [1, slots, *size]
    assert torch.equal(seen.flatten(2)[0].T.int() - 1, table)


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_same_padding_is_padding_by_hand(kernel):
    """Children with activation zero around the input equal padding, except for mean_data."""
    routing = EMRouting(2, mean_data=False, final_lambda=0.1, competition="local")
    layer = ConvCaps2d(3, 4, kernel, padding="same", routing=routing, backend="reference", dtype=torch.float64)
    plain = ConvCaps2d(3, 4, kernel, routing=routing, backend="reference", dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    given, before, after = capsules(dtype=torch.float64), (kernel - 1) // 2, kernel // 2
    padded = Capsules(
        nn.functional.pad(given.poses, (0, 0, 0, 0, before, after, before, after)),
        nn.functional.pad(given.activations, (before, after, before, after)),
    )
    torch.testing.assert_close(tuple(layer(given)), tuple(plain(padded)))


@pytest.mark.parametrize(
    "make", [lambda **k: ConvCaps2d(3, 4, 3, **k), lambda **k: ConvVectorCaps2d(3, 4, 5, 6, 3, **k)]
)
def test_same_padding_needs_stride_one(make):
    with pytest.raises(ValueError, match=r"padding='same' needs stride 1, but stride is \(2, 2\)"):
        make(stride=2, padding="same")
    assert "padding='same'" in repr(make(padding="same"))


# graphs


def test_edges_of_a_relation_share_their_matrices():
    """Each relation alone, from a layer with that relation's matrices only, gives the votes of its edges."""
    edges = [(0, 0, 0), (1, 0, 1), (2, 0, 0), (2, 1, 1), (0, 1, 1)]  # child, parent, relation
    children, parents, relations = (list(x) for x in zip(*edges, strict=True))
    graph = RoutingMap.from_edges(children, parents, 3, 2, relations=relations)
    graph.check()
    layer, given = GraphCaps(2, 4, 2, backend="reference"), capsules(2, (3,))
    votes = functional.pose_votes(given.poses, layer.weight, graph, backend="reference")
    found = []
    for child, parent, relation in edges:
        slots = [s for s in range(graph.num_slots) if graph.children[parent, s] == child]
        slots = [s for s in slots if graph.weight_of[s] == relation]
        assert len(slots) == 1
        expected = torch.einsum("nbij,bcjk->nbcik", given.poses[:, :, child], layer.weight[relation])
        torch.testing.assert_close(votes[:, parent, slots[0]], expected)
        found.append((parent, slots[0]))
    assert len(set(found)) == len(edges) == graph.num_edges


def test_the_relation_of_an_edge_does_not_depend_on_its_place_in_the_list():
    edges = torch.tensor([[0, 1, 2, 2, 1], [0, 0, 0, 1, 1], [0, 1, 1, 0, 1]])
    layer, given = GraphCaps(2, 4, 2, backend="reference", dtype=torch.float64), capsules(2, (3,), dtype=torch.float64)
    results = []
    for order in (torch.arange(5), torch.tensor([4, 2, 0, 3, 1])):
        children, parents, relations = edges[:, order]
        results.append(tuple(layer(given, RoutingMap.from_edges(children, parents, 3, 2, relations=relations))))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_graph_may_lack_the_last_relation(backend):
    layer, given = GraphCaps(2, 4, num_relations=3, backend=backend), capsules(2, (3,))
    graph = RoutingMap.from_edges([0, 1, 2], [0, 0, 1], 3, 2, relations=[0, 1, 0])
    parents = layer(given, graph)
    parents.poses.sum().backward()
    assert parents.poses.shape == (2, 4, 2, 4, 4)
    assert layer.weight.grad[:2].any()
    assert not layer.weight.grad[2].any()
    assert layer.num_relations == 3


GRAPH = RoutingMap.from_edges([0, 1, 2], [0, 0, 1], 3, 2, relations=[0, 1, 2])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: GraphCaps(2, 4, 2)(capsules(2, (3,)), GRAPH), "at most 2 relations, .* GraphCaps, but it has 3"),
        (lambda: GraphCaps(2, 4, 3)(capsules(2, (4,)), GRAPH), r"poses must have shape \[N, 2, 3, 4, 4\], but it has"),
        (lambda: GraphCaps(2, 4, 3)(capsules(3, (3,)), GRAPH), "poses must have 2 capsule types, .* this GraphCaps"),
        (lambda: GraphCaps(2, 4, 3)(capsules(2, (3,)), "graph"), "routing_map must be a RoutingMap, but it is a str"),
        (lambda: GraphCaps(2, 4, 0), "num_relations must be a whole number of at least 1, but it is 0"),
        (lambda: RoutingMap.from_edges([0], [0], 1, 1, relations=[0, 1]), "relations must name 1 edges, but it has 2"),
        (lambda: RoutingMap.from_edges([0], [0], 1, 1, relations=[-1]), "relations must not be negative"),
        (lambda: RoutingMap.from_edges([0], [0], 1, 1, [0], relations=[0]), "relations must not be given with slots"),
    ],
    ids=["relations", "nodes", "types", "no map", "no relation", "too many", "negative", "slots as well"],
)
def test_graphs_that_do_not_fit_get_a_sentence(call, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        call()


# capsules


def test_capsules_are_mapped_moved_and_detached():
    given = capsules()
    given.poses.requires_grad_()
    doubled = given.map(lambda x: 2 * x)
    assert isinstance(doubled, Capsules)
    assert torch.equal(doubled.poses, 2 * given.poses)
    assert torch.equal(doubled.activations, 2 * given.activations)
    assert [x.dtype for x in given.to(torch.float64)] == [torch.float64] * 2
    assert all(x.is_meta for x in given.to("meta"))
    assert all(x.is_meta and x.dtype == torch.float16 for x in given.to(device="meta", dtype=torch.float16))
    cut = given.detach()
    assert isinstance(cut, Capsules)
    assert not cut.poses.requires_grad
    assert cut.poses.data_ptr() == given.poses.data_ptr()


# assignments and votes


@pytest.mark.parametrize(
    "layer",
    [ConvCaps2d(3, 4, 3, stride=2, padding=1), ClassCaps(3, 4, routing=EMRouting(2, competition="local"))],
    ids=["ConvCaps2d", "ClassCaps"],
)
def test_assignments_of_a_matrix_layer(layer):
    given = capsules()
    routing_map = layer.routing_map((5, 4))
    weight = layer.weight.reshape(-1, *layer.weight.shape[-4:])
    routed, expected = functional.em_routing(
        *given, weight, layer.beta_u, layer.beta_a, routing_map, layer.routing, "reference", return_assignments=True
    )
    found = layer.assignments(given)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected)
    votes = functional.coordinate_addition(
        functional.pose_votes(given.poses, weight, routing_map, "reference"), routing_map
    )
    gaussians = functional.m_step(
        votes,
        found,
        given.activations,
        layer.beta_u,
        layer.beta_a,
        routing_map,
        inverse_temperature=layer.routing.lambdas[-1],
        backend="reference",
    )
    torch.testing.assert_close(gaussians.mean, routed.poses, rtol=1e-4, atol=1e-5)


def test_assignments_of_a_graph():
    layer, given = GraphCaps(2, 4, 3), capsules(2, (3,))
    shares = layer.assignments(given, GRAPH)
    assert shares.shape == (2, 2, 3, 2, 4)
    torch.testing.assert_close(shares.sum((1, 2, 4)), torch.ones(2, 2) * 3)  # three children of each type


@pytest.mark.parametrize(
    "layer",
    [
        VectorCaps(6, 3, 4, 5, routing=DynamicRouting(3), priors=True),
        ConvVectorCaps2d(2, 3, 4, 5, 2, routing=DynamicRouting(2, competition="local")),
        ConvVectorCaps2d(2, 3, 4, 5, 2, padding=1, routing=DynamicRouting(1, none_of_the_above=True)),
    ],
    ids=["full, with priors", "local", "with a rival"],
)
def test_assignments_of_a_vector_layer_make_its_parents(layer):
    """The squashed sum of the votes, each times its coupling coefficient, is the parent."""
    if layer.priors is not None:
        nn.init.normal_(layer.priors)
    poses = torch.randn(2, 6, 3) if isinstance(layer, VectorCaps) else torch.randn(2, 2, 3, 3, 3)
    coupling = layer.assignments(poses)
    assert not coupling.requires_grad
    full = isinstance(layer, VectorCaps)
    routing_map = RoutingMap.full((), coordinates=False) if full else layer.routing_map((3, 3))
    votes = functional.vector_votes(poses, layer.weight.reshape(-1, *layer.weight.shape[-4:]), routing_map)
    parents = functional.squash((coupling[..., None] * votes).sum((2, 3)), backend="reference").transpose(1, 2)
    layer.backend = "reference"
    torch.testing.assert_close(parents.reshape(layer(poses).poses.shape), layer(poses).poses)


def test_assignments_of_an_empty_batch_are_empty():
    assert VectorCaps(6, 3, 4, 5).assignments(torch.randn(0, 6, 3)).shape == (0, 1, 1, 6, 4)
    assert ClassCaps(3, 4).assignments(capsules(images=0)).shape == (0, 1, 20, 3, 4)


def test_first_assignments_are_shared_evenly():
    routing_map = RoutingMap.conv((3,), 2)  # children have 1, 2 and 1 parents
    shares = functional.initial_assignments(torch.rand(2, 3, 3), 5, routing_map)
    assert shares.shape == (2, 2, 2, 3, 5)
    expected = torch.tensor([[1 / 5, 1 / 10], [1 / 10, 1 / 5]])
    torch.testing.assert_close(shares[1, :, :, 2, 4], expected)
    local = functional.initial_assignments(torch.rand(2, 3, 3), 5, routing_map, "local")
    torch.testing.assert_close(local, torch.full_like(local, 1 / 5))
    padded = RoutingMap.conv((3,), 2, padding=1)
    assert not functional.initial_assignments(torch.rand(2, 3, 3), 5, padded)[:, 0, 0].any()
    with pytest.raises(ValueError, match="num_types must be a whole number of at least 1, but it is 0"):
        functional.initial_assignments(torch.rand(2, 3, 3), 0, routing_map)
    with pytest.raises(ValueError, match=r"activations must have shape \[N, B, 3\]"):
        functional.initial_assignments(torch.rand(2, 3, 4), 5, routing_map)


def test_votes_of_vector_capsules():
    routing_map = RoutingMap.conv((3,), 2, padding=1)
    poses, weight = torch.randn(2, 3, 3, 4, requires_grad=True), torch.randn(2, 3, 5, 4, 6)
    votes = functional.vector_votes(poses, weight, routing_map)
    assert votes.shape == (2, 4, 2, 3, 5, 6)
    torch.testing.assert_close(votes[1, 2, 0, 1, 3], poses[1, 1, 1] @ weight[0, 1, 3])
    assert not votes[:, 0, 0].any()  # the child before the first
    votes.sum().backward()
    assert poses.grad.any()
    with pytest.raises(ValueError, match=r"weight must have shape \[2, 3, C, 4, E\]"):
        functional.vector_votes(poses, weight[:1], routing_map)


def test_the_last_step_of_dynamic_routing_is_the_routing():
    poses, weight, routing_map = torch.randn(2, 3, 4), torch.randn(1, 3, 5, 4, 6), RoutingMap.full(())
    *before, (last, _) = reference.dynamic_steps(poses, weight, routing_map, DynamicRouting(3))
    assert len(before) == 2
    assert torch.equal(last[:, 0], reference.dynamic_routing(poses, weight, routing_map, DynamicRouting(3)))


# models

MODELS = {
    "MatrixCapsNet": (
        lambda: MatrixCapsNet(1, 5, (4, 2, 3, 3), 1, backend="reference"),
        (1, 17, 17),
        {"primary": (2, 7, 7), "conv_caps1": (3, 3, 3), "conv_caps2": (3, 1, 1), "class_caps": (5,)},
    ),
    "CapsNet": (
        lambda: CapsNet(image_size=18, channels=4, primary_caps=2, iterations=1, backend="reference"),
        (1, 18, 18),
        {"primary": (2, 1, 1), "class_caps": (10,)},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_return_intermediate_capsules_on_request(name):
    build, size, shapes = MODELS[name]
    model, images = build(), torch.rand(2, *size)
    found = model(images, return_intermediate=True)
    assert {layer: tuple(x.activations.shape[1:]) for layer, x in found.items()} == shapes
    assert list(found) == list(shapes)
    expected = model(images)
    assert isinstance(expected, Capsules)
    assert all(map(torch.equal, found["class_caps"], expected))
    found["primary"].poses.sum().backward()
    assert model.conv.weight.grad.any()
    assert isinstance(nn.Sequential(nn.Identity(), model)(images), Capsules)


def test_the_compiler_takes_the_request():
    build, size, shapes = MODELS["CapsNet"]
    model, images = build(), torch.rand(2, *size)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found, expected = (call(images, return_intermediate=True) for call in (compiled, model))
    for layer in shapes:
        torch.testing.assert_close(tuple(found[layer]), tuple(expected[layer]))
