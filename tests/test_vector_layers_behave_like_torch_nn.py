"""Layers of vector capsules compose, copy, pickle, move and load like those of torch.nn, with any number of threads."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tritoncaps import (
    Capsules,
    ConvVectorCaps2d,
    DynamicRouting,
    RoutingMap,
    VectorCaps,
    VectorPrimaryCaps,
    functional,
)
from tritoncaps.testing import VectorProblem, vector_gradients


def layers(**kwargs):
    return {
        "full": (VectorCaps(12, 4, 5, 6, **kwargs), (2, 12, 4)),
        "conv": (ConvVectorCaps2d(3, 4, 5, 6, (3, 2), padding=1, **kwargs), (2, 3, 4, 5, 4)),
    }


@pytest.fixture(params=["full", "conv"])
def case(request):
    return layers()[request.param]


def test_state_dict_holds_parameters_only(case):
    layer, shape = case
    layer(torch.randn(shape))
    assert set(layer.state_dict()) == {"weight"}
    assert layer.weight.shape[-4:] == (layer.in_caps, 5, 4, 6)
    for other, _ in layers(priors=True).values():
        assert set(other.state_dict()) == {"weight", "priors"}
        assert other.priors.shape == other.weight.shape[:-2]
        assert not other.priors.any()


def test_copies_give_the_same_result(case):
    layer, shape = case
    poses = torch.randn(shape)
    expected = layer(poses)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        for mine, theirs in zip(expected, other(poses), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("priors", [False, True])
def test_layers_work_on_meta(priors):
    for name, (layer, shape) in layers(device="meta", priors=priors).items():
        result = layer(torch.randn(shape, device="meta"))
        assert result.poses.device.type == "meta", name
        layer.to_empty(device="cpu")
        layer.reset_parameters()
        real = layer(torch.randn(shape))
        assert real.poses.shape == result.poses.shape
        assert real.poses.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["reference", None])
def test_dtypes(dtype, backend):
    for layer, shape in layers(dtype=dtype, backend=backend, priors=True).values():
        result = layer(torch.randn(shape, dtype=dtype))
        assert result.poses.dtype == result.activations.dtype == dtype
        result.poses.sum().backward()
        assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in layer.parameters())


def test_layers_compose_in_sequential():
    net = nn.Sequential(
        VectorPrimaryCaps(3, 4, dim=5, kernel_size=3),
        ConvVectorCaps2d(4, 5, 6, 7, kernel_size=3, stride=2),
        VectorCaps(6 * 3 * 4, 7, 10, 16, routing=DynamicRouting(2, none_of_the_above=True)),
    )
    result = net(torch.randn(2, 3, 16, 20))
    assert result.poses.shape == (2, 10, 16)
    assert result.activations.shape == (2, 10)
    result.activations.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_activations_are_lengths(case):
    layer, shape = case
    for given in (torch.randn(shape), Capsules(torch.randn(shape), torch.rand(shape[:-1]))):
        result = layer(given)
        torch.testing.assert_close(result.activations, result.poses.norm(dim=-1))
        assert (result.activations < 1).all()


def test_primary_capsule_is_one_pixel_not_its_neighbours():
    layer = VectorPrimaryCaps(3, 4, 5, kernel_size=1, stride=1)
    images = torch.randn(1, 3, 5, 6)
    changed = images.clone()
    changed[:, :, 2, 3] += 1.0
    difference = (layer(images).poses - layer(changed).poses).abs().sum(dim=(0, 1, 4))
    assert difference[2, 3] > 0
    difference[2, 3] = 0
    assert not difference.any()


def test_convolution_over_everything_is_fully_connected():
    conv, full = ConvVectorCaps2d(3, 4, 5, 6, (2, 3), priors=True), VectorCaps(18, 4, 5, 6, priors=True)
    nn.init.normal_(conv.priors)
    with torch.no_grad():  # [2, 3, in_caps, ...] -> in_caps is first in the poses
        full.weight.copy_(conv.weight.movedim(2, 0).flatten(0, 2))
        full.priors.copy_(conv.priors.movedim(2, 0).flatten(0, 2))
    poses = torch.randn(2, 3, 2, 3, 4)
    torch.testing.assert_close(conv(poses).poses.flatten(1, 3), full(poses).poses)


def test_learned_priors_learn():
    layer = VectorCaps(12, 4, 5, 6, priors=True)
    layer(torch.randn(2, 12, 4)).activations[:, 0].sum().backward()
    assert layer.priors.grad.any()


def test_repr_tells_what_a_layer_is():
    text = repr(ConvVectorCaps2d(2, 3, 4, 5, 3, padding=1, priors=True, backend="reference"))
    assert "ConvVectorCaps2d(2, 3, 4, 5, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), routing=Dynamic" in text
    assert "priors=True" in text
    assert "backend='reference'" in text
    assert repr(VectorCaps(12, 4, 5, 6)).startswith("VectorCaps(12, 4, 5, 6, routing=DynamicRouting(")


PROBLEM = VectorProblem(RoutingMap.conv((5, 5), 3, stride=2), images=13, in_caps=9, out_caps=7, in_dim=6, out_dim=9)


def test_bits_do_not_depend_on_the_number_of_threads():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = vector_gradients(PROBLEM, functional.dynamic_routing, torch.float32)
        for count in (2, 3, 8):
            torch.set_num_threads(count)
            for name, value in vector_gradients(PROBLEM, functional.dynamic_routing, torch.float32).items():
                assert torch.equal(value, expected[name]), f"{name} differs with {count} threads"
    finally:
        torch.set_num_threads(before)


def test_many_python_threads_at_once():
    def all_bits(_=None):
        return vector_gradients(PROBLEM, functional.dynamic_routing, torch.float32)

    expected = all_bits()
    with ThreadPoolExecutor(8) as pool:
        for result in pool.map(all_bits, range(24)):
            for name, value in result.items():
                assert torch.equal(value, expected[name]), f"{name} differs among threads"


def test_operators_are_what_they_say(case):
    """The compiler sees the right shapes and strides."""
    layer, shape = case
    poses = torch.randn(shape, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    result, expected = compiled(poses).poses, layer(poses).poses
    assert torch.equal(result, expected)
    grads = [torch.autograd.grad(x.square().sum(), [poses, layer.weight]) for x in (result, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
