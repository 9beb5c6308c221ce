"""Layers and torch's tools: mixed precision, checkpointing, utilities, optimisers, hooks, processes, operators."""

import copy
import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, parametrizations, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime.interpreter import InterpretedFunction

import tritoncaps.flops  # noqa: F401, registers the formulas
from tritoncaps import (
    Capsules,
    ClassCaps,
    ConvCaps2d,
    PrimaryCaps,
    RoutingMap,
    SpreadLoss,
    VectorCaps,
    functional,
    reference,
)
from tritoncaps.convert import convert_weight, load_weight
from tritoncaps.kernels.common import backends
from tritoncaps.kernels.common.cpu import simd
from tritoncaps.kernels.common.flops import EXP, backward_flops, forward_flops
from tritoncaps.kernels.mixture.backend import backend_of
from tritoncaps.kernels.mixture.cpu import kept
from tritoncaps.models import CapsNet, MatrixCapsNet
from tritoncaps.testing import Problem

BACKENDS = ["reference", "cpu", "triton"]
KERNELS = ["cpu", "triton"]
TINY = Problem(RoutingMap.from_edges([0, 1, 1], [0, 0, 1], 2, 2), images=2, in_caps=2, out_caps=3)


def small_net(**kwargs):
    return MatrixCapsNet(1, 5, (4, 3, 2, 2), iterations=2, **kwargs)


def step(model, images):
    return SpreadLoss()(model(images).activations, torch.arange(len(images)) % 5)


IMAGES = (2, 1, 17, 17)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_routes_in_float32(backend, dtype):
    layer = ClassCaps(2, 3, backend=backend)
    given = Capsules(torch.randn(2, 2, 2, 4, 4), torch.rand(2, 2, 2))
    with torch.autocast("cpu", dtype):
        out = layer(Capsules(*(x.to(dtype) for x in given)))
        out.poses.sum().backward()
    assert out.poses.dtype == out.activations.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    exact = layer(Capsules(*(x.to(dtype).float() for x in given)))
    torch.testing.assert_close(out.poses, exact.poses)


def test_autocast_trains_a_model_with_a_scaler():
    model, scaler = small_net(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = copy.deepcopy(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        loss = step(model, torch.randn(IMAGES))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(p.isfinite().all() for p in model.parameters())
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scaler_sees_gradients_that_overflow(backend):
    """It skips the step and reduces its scale."""
    layer, scaler = ClassCaps(2, 3, backend=backend), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer, before = torch.optim.SGD(layer.parameters(), lr=1.0), copy.deepcopy(layer.state_dict())
    with torch.autocast("cpu", torch.float16):
        out = layer(Capsules(torch.randn(2, 2, 2, 4, 4), torch.rand(2, 2, 2)))
    scaler.scale(out.poses.square().sum() + out.activations.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**126
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    model, images = small_net(), torch.randn(IMAGES)
    step(model, images).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    first = model.primary(model.conv(images).relu())
    second = checkpoint(lambda *x: tuple(model.conv_caps1(Capsules(*x))), *first, use_reentrant=reentrant)
    last = model.class_caps(model.conv_caps2(Capsules(*second)))
    SpreadLoss()(last.activations, torch.arange(2)).backward()
    for (name, parameter), grad in zip(model.named_parameters(), expected, strict=True):
        if name.startswith("primary") and name.endswith("bias"):
            # reentrant, torch's convolution gets its gradient in another layout, and adds it up in another order
            torch.testing.assert_close(parameter.grad, grad)
        else:
            assert torch.equal(parameter.grad, grad), name


def test_selective_checkpointing_may_keep_the_routing(monkeypatch):
    layer, given = ClassCaps(3, 2), Capsules(torch.randn(2, 3, 2, 4, 4), torch.rand(2, 3, 2))
    (expected,) = torch.autograd.grad(layer(given).poses.sum(), layer.weight)
    routed, forward = [], kept.Forward.__call__  # the layer is small
    monkeypatch.setattr(kept.Forward, "__call__", lambda *x: routed.append(1) or forward(*x))

    def gradient(kept):
        def policy(ctx, op, *args, **kwargs):
            return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        out = checkpoint(lambda *x: layer(Capsules(*x)).poses, *given, use_reentrant=False, context_fn=contexts)
        return torch.autograd.grad(out.sum(), layer.weight)[0]

    assert torch.equal(gradient([torch.ops.tritoncaps.em_routing_forward.default]), expected)
    assert len(routed) == 1
    assert torch.equal(gradient([]), expected)
    assert len(routed) == 3


def test_parametrizations_and_pruning():
    given = Capsules(torch.randn(2, 3, 2, 4, 4), torch.rand(2, 3, 2))
    layer = parametrizations.weight_norm(ClassCaps(3, 2), "weight")
    layer(given).poses.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    layer = prune.l1_unstructured(ClassCaps(3, 2), "weight", amount=0.5)
    layer(given).poses.sum().backward()
    assert (layer.weight_orig.grad[layer.weight_mask == 0] == 0).all()
    prune.remove(layer, "weight")
    assert layer(given).poses.isfinite().all()


@pytest.mark.parametrize("kwargs", [{"foreach": True}, {"fused": True}])
def test_optimisers_clipping_and_averages(kwargs):
    model, average = small_net(), None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, **kwargs)
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        optimizer.zero_grad()
        step(model, torch.randn(IMAGES)).backward()
        assert clip_grad_norm_(model.parameters(), 1.0).isfinite()
        optimizer.step()
        average.update_parameters(model)
    assert average(torch.randn(IMAGES)).poses.isfinite().all()


def test_hooks_data_parallel_and_shared_memory():
    model, seen = small_net(), []
    model.conv_caps1.register_forward_hook(lambda module, given, out: seen.append(type(out)))
    model.conv_caps1.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(len(grad_out)))
    step(nn.DataParallel(model), torch.randn(IMAGES)).backward()
    assert seen == [Capsules, 2]
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters())
    assert copy.deepcopy(model)(torch.randn(IMAGES)).poses.shape == (2, 5, 4, 4)


def test_tables_follow_their_layer():
    """A layer has no buffers; the tables of its map are on the device of its input."""
    layer = ConvCaps2d(2, 3, 2, device="meta")
    out = layer(Capsules(torch.empty(1, 2, 3, 3, 4, 4, device="meta"), torch.empty(1, 2, 3, 3, device="meta")))
    assert out.poses.device.type == "meta"
    assert not list(layer.buffers())
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(Capsules(torch.randn(1, 2, 3, 3, 4, 4), torch.rand(1, 2, 3, 3))).poses.device.type == "cpu"
    assert RoutingMap.conv((3, 3), 2).tables("cpu").children.device.type == "cpu"


@pytest.mark.parametrize(
    ("make", "size"),
    [(small_net, 17), (lambda: CapsNet(1, 5, 20, channels=4, primary_caps=2), 20)],
    ids=["MatrixCapsNet", "CapsNet"],
)
def test_models_are_made_on_meta_and_loaded(make, size):
    model, images = make(), torch.randn(2, 1, size, size)
    for fill in (lambda empty: empty.load_state_dict(model.state_dict(), assign=True), materialise):
        with torch.device("meta"):
            empty = make()
        fill(empty)
        assert all(p.device.type == "cpu" for p in empty.parameters())
        assert torch.equal(empty(images).poses, model(images).poses) == (fill is not materialise)
        assert empty(images).poses.isfinite().all()


def materialise(model):
    model.to_empty(device="cpu").reset_parameters()


def opcheck_arguments(backend):
    """Arguments of our operators: EM routing, with the tensors that its forward pass saves."""
    poses, activations, weight, beta_u, beta_a = TINY.inputs(torch.float32)
    tables = list(TINY.routing_map.tables())
    options = (list(TINY.routing.lambdas)[:2], 1e-4, 0.7, "global")
    forward = (poses, activations, weight, beta_u, beta_a, tables, *options, True, backend)
    mean, activation, statistics, log_sums = torch.ops.tritoncaps.em_routing_forward(*forward)
    backward = (mean, activation, *forward[:5], tables, statistics, log_sums, *options, "all", True, True, backend)
    routing = {"em_routing_forward": forward, "em_routing_backward": backward} | dynamic_arguments(backend)
    return routing | stored_vote_arguments(backend) | mixture_arguments(backend) | vb_arguments(backend)


def vb_arguments(backend):
    """Arguments of the fit of variational Bayes, which only some backends have."""
    if backend_of(backend).vb is None:
        return {}
    support, mean = torch.rand(2, 3, 5), torch.randn(2, 3, 16, 5)
    moments, options = (support, mean, mean**2), ([1.0, 0.0, 1.0, 17.0, 1.0], backend)
    return {
        "vb_fit": (*moments, torch.zeros(5), *options),
        "vb_fit_gradients": (*moments, mean, mean, support, support, *options),
    }


def mixture_arguments(backend):
    """Arguments of the passes for any fit, in the second of two iterations."""
    inputs, tables = TINY.inputs(torch.float32)[:3], list(TINY.routing_map.tables())
    ops, pack = torch.ops.tritoncaps, (*inputs, tables, "global", backend)
    votes = (*inputs, list(ops.mixture_packed(*pack)))
    support, mean, variance, _ = ops.mixture_moments(*votes, [], tables, "global", 0.0, backend)
    components = [mean, 1 / (variance + 1), support]
    moments = (*votes, [*components, mean], tables, "global", 0.0, backend)
    log_sum = ops.mixture_moments(*moments)[3]
    with_gradients = [support, mean, variance, support, mean, variance]
    before = (*votes, components, log_sum, with_gradients, tables, "global", backend)
    da = ops.mixture_component_gradients(*before)[3]
    gradients = (*votes, components, [log_sum], 2 * with_gradients, [da], tables, "global", True, True, backend)
    return {
        "mixture_packed": pack,
        "mixture_moments": moments,
        "mixture_component_gradients": before,
        "mixture_gradients": gradients,
    }


def dynamic_arguments(backend):
    routing_map = TINY.routing_map
    poses, weight = torch.randn(2, 2, 2, 4), torch.randn(routing_map.num_weights, 2, 3, 4, 5)
    tables, options = list(routing_map.tables()), (2, "global", False)
    forward = (poses, weight, None, tables, *options, backend)
    parents, sums = torch.ops.tritoncaps.dynamic_routing_forward(*forward)
    backward = (parents, poses, weight, None, sums, tables, *options, "all", True, True, False, backend)
    vectors = torch.randn(3, 4)
    return {
        "dynamic_routing_forward": forward,
        "dynamic_routing_backward": backward,
        "squash_forward": (vectors, backend),
        "squash_backward": (vectors, vectors, backend),
    }


def stored_vote_arguments(backend):
    """Arguments of the operators on stored votes [N, P, S, B, C, H]; one of them exists only on Triton."""
    poses, activations, weight, beta_u, beta_a = TINY.inputs(torch.float32)
    poses, tables, fit = poses.flatten(-2), list(TINY.routing_map.tables()), (0.5, 1e-4, 1.0, backend)
    votes = torch.ops.tritoncaps.pose_votes_forward(poses, weight, tables, backend)
    shares = torch.rand_like(votes[..., 0])
    m_step = (votes, shares, activations, beta_u, beta_a, tables, *fit)
    mean, variance, logit, statistics = torch.ops.tritoncaps.m_step_forward(*m_step)
    e_step = (votes, mean, variance, logit, tables, "global", backend)
    fitted = (mean, variance, logit, votes, shares, activations, beta_u, statistics, tables, *fit)
    shared = (shares, *e_step[:4], torch.ops.tritoncaps.e_step_forward(*e_step), *e_step[4:])
    arguments = {
        "pose_votes_forward": (poses, weight, tables, backend),
        "pose_votes_backward": (votes, poses, weight, tables, backend),
        "m_step_forward": m_step,
        "m_step_backward": fitted,
        "e_step_forward": e_step,
        "e_step_backward": shared,
    }
    return arguments | ({"coordinate_addition": (votes, tables, backend)} if backend == "triton" else {})


def test_no_operator_is_forgotten():
    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if "tritoncaps::" in name}
    assert names == {name for backend in KERNELS for name in opcheck_arguments(backend)}


@pytest.mark.parametrize("backend", KERNELS)
def test_operators_keep_the_rules(backend):
    """Schema, fake tensors with the right shapes and strides, and compilation, for every operator."""
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for name, arguments in opcheck_arguments(backend).items():
        torch.library.opcheck(getattr(torch.ops.tritoncaps, name).default, arguments, test_utils=utilities)


def test_flops_are_counted():
    inputs = TINY.inputs(torch.float32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        capsules = TINY.solve(functional.em_routing, inputs)
        capsules.poses.sum().backward()
    votes, iterations = 2 * 3 * 2 * 3, TINY.routing.iterations
    assert counter.get_total_flops() == votes * (forward_flops(iterations) + backward_flops(iterations))
    with FlopCounterMode(display=False) as counter:
        VectorCaps(3, 4, 2, 5)(torch.randn(2, 3, 4)).poses.sum().backward()
    assert counter.get_total_flops() > 0
    with FlopCounterMode(display=False) as counter:
        functional.squash(torch.randn(3, 5, requires_grad=True)).sum().backward()
    assert counter.get_total_flops() == 3 * 5 * (4 + 8)


def test_flops_of_the_exponential_are_those_of_its_polynomial():
    """Three fused operations for the power of two and the rest, one for each degree; a difference and a product."""
    _, degree, *_ = simd._EXP[32]
    assert degree == 7
    assert 2 * (3 + degree) + 1 + 1 == EXP


def test_flops_of_stored_votes_are_counted():
    """Each operator of stored votes, forward and backward, once."""
    poses, activations, weight, beta_u, beta_a = TINY.inputs(torch.float32, requires_grad=True)
    route = {"routing_map": TINY.routing_map, "backend": "triton"}
    with FlopCounterMode(display=False) as counter:
        votes = functional.pose_votes(poses, weight, **route)
        votes = functional.coordinate_addition(votes, **route)
        shares = reference.initial_assignments(activations, 3, TINY.routing_map, "global").detach()
        betas = {"beta_u": beta_u, "beta_a": beta_a, "inverse_temperature": 0.1}
        gaussians = functional.m_step(votes, shares, activations, **betas, **route)
        functional.e_step(votes, gaussians, **route).square().sum().backward()
    forward, backward = 128 + 4 + 4 * 16 + (3 * 16 + EXP), 6 * 16 + 8 * 16 + 2 * 128
    assert counter.get_total_flops() == 2 * 3 * 2 * 3 * (forward + backward)


def test_launches_go_to_the_gpu_of_their_tensors(monkeypatch):
    """Triton launches on the current GPU, so every operator makes that of its first tensor current."""
    inside, launched = [], []

    @contextmanager
    def surroundings(tensor):
        inside.append(tensor.device)
        yield
        inside.pop()

    monkeypatch.setattr(backends, "_surroundings", lambda name: surroundings)
    record = lambda kernel, *args, **kwargs: launched.append((kernel.fn.__name__, len(inside)))  # noqa: E731
    monkeypatch.setattr(InterpretedFunction, "run", record)
    poses, activations, weight, beta_u, beta_a = inputs = TINY.inputs(torch.float32, requires_grad=True)
    route = {"routing_map": TINY.routing_map, "backend": "triton"}
    votes = functional.coordinate_addition(functional.pose_votes(poses, weight, **route), **route)
    betas = {"beta_u": beta_u, "beta_a": beta_a, "inverse_temperature": 0.1}
    gaussians = functional.m_step(votes, torch.rand(votes.shape[:5]), activations, **betas, **route)
    results = [functional.e_step(votes, gaussians, **route), *functional.em_routing(*inputs, **route)]
    results += [VectorCaps(3, 4, 2, 5, backend="triton")(torch.randn(2, 3, 4, requires_grad=True)).poses]
    torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    assert len({name for name, _ in launched}) == 21
    assert all(depth == 1 for _, depth in launched)


@pytest.mark.parametrize("backend", BACKENDS)
def test_assignments_on_request(backend):
    inputs = TINY.inputs(torch.float32)
    route = {"routing_map": TINY.routing_map, "backend": backend}
    capsules, assignments = functional.em_routing(*inputs, **route, return_assignments=True)
    assert torch.equal(capsules.poses, functional.em_routing(*inputs, **route).poses)
    assert assignments.shape == (2, 2, 2, 2, 3)
    torch.testing.assert_close(assignments[:, 0, 0].sum(dim=-1), torch.ones(2, 2))  # child 0 has one parent location
    second = assignments[:, 0, 1].sum(dim=-1) + assignments[:, 1, 0].sum(dim=-1)  # child 1 has two
    torch.testing.assert_close(second, torch.ones(2, 2))
    assert not assignments[:, 1, 1].any()  # missing slot


def test_matrices_of_other_libraries():
    conv, classes = ConvCaps2d(3, 5, 2), ClassCaps(3, 5)
    flat = torch.randn(2 * 2 * 3, 5, 4, 4)
    load_weight(conv, flat)
    assert torch.equal(conv.weight[1, 0, 2, 4], flat[(1 * 2 + 0) * 3 + 2, 4])
    assert torch.equal(convert_weight(conv, flat[None]), conv.weight)
    side_by_side = torch.randn(3, 2, 2, 4, 5 * 4)
    load_weight(conv, side_by_side)
    assert torch.equal(conv.weight[1, 0, 2, 4], side_by_side[2, 1, 0, :, 16:20])
    load_weight(classes, torch.ones(1, 3, 5, 4, 4))
    assert (classes.weight == 1).all()
    with pytest.raises(ValueError, match=r"weight must have shape \[12, 5, 4, 4\] or .* but it has \[7\]"):
        load_weight(conv, torch.randn(7))


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.Sequential(PrimaryCaps(2, 3), ClassCaps(3, 2))(torch.randn(1, 2, 2, 2)).poses.sum().backward()
