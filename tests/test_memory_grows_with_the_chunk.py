"""A batch is routed in chunks of images: memory grows with a chunk, and results of an image do not depend on it."""

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from tritoncaps import DynamicRouting, EMRouting, RoutingMap, TemperedEMRouting, VBRouting, functional
from tritoncaps._internal.memory import peak_bytes
from tritoncaps.kernels.common import chunks
from tritoncaps.testing import Problem, VectorProblem, route_on

CONV = RoutingMap.conv((14, 14), 3, stride=2)
LAYER = Problem(CONV, in_caps=8, out_caps=16)
LAYERS = {
    "em": LAYER,
    "positions": LAYER.but(routing=EMRouting(3, competition="positions")),
    "vb": LAYER.but(routing=VBRouting()),
    "tempered": LAYER.but(routing=TemperedEMRouting(2, competition="local")),
    "dynamic": VectorProblem(CONV, in_caps=8, out_caps=16, in_dim=8, out_dim=16),
}
SMALL = RoutingMap.full((2,))
TINY = {
    "em": Problem(SMALL, EMRouting(2), images=2, in_caps=2, out_caps=2),
    "positions": Problem(SMALL, EMRouting(2, competition="positions"), images=2, in_caps=2, out_caps=2),
    "vb": Problem(SMALL, VBRouting(2), images=2, in_caps=2, out_caps=2),
    "dynamic": VectorProblem(SMALL, DynamicRouting(2), images=2, in_caps=2, out_caps=2),
}


def route(inputs, problem, backend):
    """The parents: a list of tensors."""
    if isinstance(problem, VectorProblem):
        poses, weight, priors = inputs
        return [functional.dynamic_routing(poses, weight, problem.routing_map, problem.routing, priors, backend)]
    return list(problem.solve(route_on(backend), inputs))


def gradients(inputs, problem, backend):
    """Results of single images (outputs and gradients of the children), and gradients of all other inputs."""
    outputs = route(inputs, problem, backend)
    grads = torch.autograd.grad([x.sin().sum() for x in outputs], inputs)
    return [*outputs, *grads[: len(outputs)]], grads[len(outputs) :]


def of_images(inputs, images):
    """The same inputs for some of the images."""
    children = 1 if inputs._fields[1] == "weight" else 2
    return type(inputs)(*(x[images].detach().requires_grad_() if i < children else x for i, x in enumerate(inputs)))


def check_chunks(problem, sizes, dtype, backend, monkeypatch):
    """Chunks do not change the results of an image. Gradients of weight and parameters are sums over the chunks. In a
    fit, torch may round a number differently at the end of an array."""
    fused = type(problem.routing) in (EMRouting, DynamicRouting)
    inputs = problem.inputs(dtype, requires_grad=True)
    together, _ = gradients(inputs, problem, backend)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    alone = [gradients(of_images(inputs, part), problem, backend)[1] for part in parts]
    for module in ("mixture.backend", "dynamic.operators"):
        monkeypatch.setattr(f"tritoncaps.kernels.{module}.chunks_of", lambda *_: parts)
    found, sums = gradients(inputs, problem, backend)
    for x, y in zip(found, together, strict=True):
        torch.testing.assert_close(x, y, rtol=0 if fused else 1e-4, atol=0 if fused else 1e-5)
        if type(problem.routing) is EMRouting:
            assert x.stride() == y.stride()
    if dtype == torch.float16:  # each routing rounds at another moment
        return
    for of_chunks, given in zip(zip(*alone, strict=True), sums, strict=True):
        total = sum(of_chunks[1:], of_chunks[0])
        torch.testing.assert_close(given, total, rtol=0 if fused else 1e-5, atol=0 if fused else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_chunks_do_not_change_the_results_of_an_image_on_the_cpu(name, dtype, monkeypatch):
    check_chunks(LAYERS[name].but(images=5), [2, 3], dtype, "cpu", monkeypatch)


@pytest.mark.parametrize("name", TINY)
def test_chunks_do_not_change_the_results_of_an_image_on_triton(name, monkeypatch):
    check_chunks(TINY[name], [1, 1], torch.float32, "triton", monkeypatch)


def test_chunks_depend_on_sizes_only_and_cover_the_batch(monkeypatch):
    for workspace in (1, 1 << 16, 1 << 20, 1 << 30):
        monkeypatch.setattr(chunks, "WORKSPACE", workspace)
        for images in (0, 1, 7, 64):
            found = chunks.chunks_of(images, 10_000)
            assert [n for part in found for n in range(part.start, part.stop)] == list(range(images))
            assert len({part.stop - part.start for part in found}) <= 2
            assert all(part.stop - part.start <= max(1, workspace // 10_000) for part in found)
    assert len(chunks.chunks_of(64, 10_000)) == 1
    assert len(chunks.chunks_of(7, 1 << 40)) == 7


def work(images, backend, problem):
    """Bytes of a step without inputs, outputs, their gradients and tensors for the backward pass."""
    problem = problem.but(images=images)
    inputs = problem.inputs(torch.float32, requires_grad=True)
    kept, alive = {}, []  # the profiler may be wrong about memory that was allocated before and is freed in its time

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def step():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            outputs = route(inputs, problem, backend)
        cotangents = [torch.ones_like(x) for x in outputs]
        alive.extend((*outputs, *cotangents))
        torch.autograd.backward(outputs, cotangents)

    step()  # compiles the kernels, and allocates the memory that calls reuse
    for x in inputs:
        kept.pop(x.untyped_storage().data_ptr(), None)
        alive.append(x.grad)
        x.grad = None
    expected = sum(x.nbytes for x in alive) + sum(kept.values())
    return peak_bytes(step) - expected


@pytest.fixture
def _small_workspace(monkeypatch):
    monkeypatch.setattr(chunks, "WORKSPACE", 3 << 20)  # about four images of the layer


@pytest.mark.usefixtures("_small_workspace")
@pytest.mark.parametrize("name", LAYERS)
def test_memory_for_work_is_that_of_a_chunk_on_the_cpu(name):
    few, many = work(4, "cpu", LAYERS[name]), work(24, "cpu", LAYERS[name])
    assert few > 0
    assert many < 1.3 * few
    assert name != "em" or many > 0  # other routings free the kept tensors of a chunk before they compute the next one


@pytest.mark.parametrize("name", LAYERS)
def test_it_would_grow_without_chunks(name):
    assert work(24, "cpu", LAYERS[name]) > 3 * work(4, "cpu", LAYERS[name])


@pytest.mark.usefixtures("_small_workspace")
@pytest.mark.parametrize("name", LAYERS)
def test_memory_for_work_is_that_of_a_chunk_on_triton(name, monkeypatch):
    """No kernel runs; the host allocates the memory that launches would need."""
    monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **kwargs: None)
    few, many = work(4, "triton", LAYERS[name]), work(24, "triton", LAYERS[name])
    assert few > 0
    assert many < 1.3 * few
    assert name != "em" or many > 0  # other routings free the kept tensors of a chunk before they compute the next one
