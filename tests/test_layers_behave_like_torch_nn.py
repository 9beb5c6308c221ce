"""Layers compose, copy, pickle, move and load like those of torch.nn."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tritoncaps import (
    Capsules,
    ClassCaps,
    ConvCaps1d,
    ConvCaps2d,
    ConvCaps3d,
    EMRouting,
    GraphCaps,
    PrimaryCaps,
    RoutingMap,
)
from tritoncaps.models import MatrixCapsNet


def layers(**kwargs):
    return {
        "conv1d": (ConvCaps1d(3, 4, 3, stride=2, padding=1, **kwargs), (7,)),
        "conv2d": (ConvCaps2d(3, 4, (3, 2), dilation=(1, 2), **kwargs), (5, 6)),
        "conv3d": (ConvCaps3d(3, 4, 2, **kwargs), (3, 4, 2)),
        "class": (ClassCaps(3, 4, **kwargs), (4, 2)),
    }


def capsules(space, in_caps=3, images=2, **kwargs):
    return Capsules(torch.randn(images, in_caps, *space, 4, 4, **kwargs), torch.rand(images, in_caps, *space, **kwargs))


@pytest.fixture(params=["conv1d", "conv2d", "conv3d", "class"])
def case(request):
    return layers()[request.param]


def test_state_dict_holds_parameters_only(case):
    layer, space = case
    layer(capsules(space))
    assert set(layer.state_dict()) == {"weight", "beta_u", "beta_a"}
    assert layer.beta_u.shape == layer.beta_a.shape == (4,)
    assert layer.weight.reshape(*layer.kernel_size, 3, 4, 4, 4).shape == layer.weight.shape


def test_copies_give_the_same_result(case):
    layer, space = case
    given = capsules(space)
    expected = layer(given)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded = layers()[{1: "conv1d", 2: "conv2d", 3: "conv3d", 0: "class"}[len(layer.kernel_size)]][0]
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        for mine, theirs in zip(expected, other(given), strict=True):
            assert torch.equal(mine, theirs)


def test_layers_work_on_meta(case):
    space = case[1]
    layer = type(case[0])(3, 4, *([2] if case[0].kernel_size else []), device="meta")
    result = layer(capsules(space, device="meta"))
    assert result.poses.device.type == "meta"
    assert result.poses.shape[:2] == (2, 4)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(capsules(space)).poses.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["reference", None])
def test_dtypes(case, dtype, backend):
    layer, space = layers(dtype=dtype, backend=backend)[
        {1: "conv1d", 2: "conv2d", 3: "conv3d", 0: "class"}[len(case[0].kernel_size)]
    ]
    given = capsules(space, dtype=dtype)
    result = layer(given)
    assert result.poses.dtype == result.activations.dtype == dtype
    (result.poses.sum() + result.activations.sum()).backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in layer.parameters())


def test_non_contiguous_input_is_the_same_input(case):
    layer, space = case
    given = capsules(space)
    strided = Capsules(*(x.movedim(0, -1).contiguous().movedim(-1, 0) for x in given))
    for expected, result in zip(layer(given), layer(strided), strict=True):
        assert torch.equal(expected, result)


def test_layers_compose_in_sequential():
    net = nn.Sequential(
        PrimaryCaps(3, 4, kernel_size=3, stride=2, padding=1),
        ConvCaps2d(4, 5, 3, 2),
        ConvCaps2d(5, 6, 2),
        ClassCaps(6, 7),
    )
    result = net(torch.randn(2, 3, 16, 20))
    assert result.poses.shape == (2, 7, 4, 4)
    assert result.activations.shape == (2, 7)
    (result.poses.sum() + result.activations.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_repr_tells_what_a_layer_is():
    text = repr(ConvCaps2d(2, 3, 3, padding=1, dilation=2, backend="reference"))
    assert (
        "ConvCaps2d(2, 3, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(2, 2), routing=EMRouting("
        in text
    )
    assert "backend='reference'" in text
    assert "coordinates=True" in repr(ClassCaps(2, 3))


def test_routing_options_reach_the_routing():
    given = capsules((5, 5))
    torch.manual_seed(1)
    layer = ConvCaps2d(3, 4, 3)
    results = []
    for routing in (
        EMRouting(1),
        EMRouting(2),
        EMRouting(competition="local"),
        EMRouting(mean_data=False),
        EMRouting(variance_floor=1.0),
    ):
        layer.routing = routing
        results.append(layer(given).activations)
    for i, first in enumerate(results):
        assert all(not torch.allclose(first, other) for other in results[:i])


def test_only_what_requires_grad_gets_a_gradient():
    layer = ConvCaps2d(3, 4, 3)
    layer.weight.requires_grad_(False)
    poses, activations = capsules((5, 5))
    poses.requires_grad_()
    layer(Capsules(poses, activations)).activations.sum().backward()
    assert layer.weight.grad is None
    assert poses.grad is not None
    assert activations.grad is None
    with torch.no_grad():
        assert not layer(Capsules(poses, activations)).poses.requires_grad


def test_next_layer_gets_a_view_not_a_copy():
    """The memory layout of a layer's output is the one that the CPU kernels read: images, types, locations, entries."""
    result = ConvCaps2d(3, 8, 3)(capsules((5, 5)))
    assert result.poses.is_contiguous()
    assert result.activations.is_contiguous()


def test_model_is_an_ordinary_module():
    model = MatrixCapsNet.small(1, 3)
    clone = pickle.loads(pickle.dumps(model))
    images = torch.randn(2, 1, 20, 26)
    assert torch.equal(model(images).activations, clone(images).activations)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("size", [3, 17])  # small, whose plan is kept, and larger
def test_a_layer_may_start_in_inference_mode(backend, size):
    """What it keeps for later calls is not bound to that mode: tables, plans and memory for copies."""
    given = Capsules(torch.randn(2, 4, size + 1, size, 4, 4).transpose(2, 3), torch.rand(2, 4, size, size + 1))
    nodes = Capsules(given.poses[:, :, :, 0], given.activations[..., 0])

    conv, of_graph = ConvCaps2d(4, 4, 2, dilation=(1, 2), backend=backend), GraphCaps(4, 3, 2, backend=backend)
    with torch.inference_mode():
        graph = RoutingMap.from_edges([0, 1, 1], [0, 0, 1], size, 2, relations=[0, 1, 0])
        first = conv(given).poses, of_graph(nodes, graph).poses
    again = conv(given).poses, of_graph(nodes, graph).poses
    sum(x.sum() for x in again).backward()
    assert all(map(torch.equal, first, again))
    assert all(x.weight.grad.isfinite().all() for x in (conv, of_graph))
