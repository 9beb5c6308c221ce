"""A batch is routed in chunks of images: memory grows with a chunk, and results of an image do not depend on it."""

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from tritoncaps import EMRouting, RoutingMap, functional
from tritoncaps._internal.memory import peak_bytes
from tritoncaps.kernels.mixture import chunks
from tritoncaps.testing import Problem

LAYER = Problem(RoutingMap.conv((14, 14), 3, stride=2), in_caps=8, out_caps=16)
TINY = Problem(RoutingMap.full((2,)), images=2, in_caps=2, out_caps=2, routing=EMRouting(2))


def route(inputs, problem, backend):
    return functional.em_routing(*inputs, problem.routing_map, problem.routing, backend=backend)


def gradients(inputs, problem, backend):
    """Outputs, and gradients of all inputs."""
    outputs = route(inputs, problem, backend)
    return [*outputs, *torch.autograd.grad([x.sin().sum() for x in outputs], inputs)]


def of_images(inputs, images):
    """The same problem for some of its images."""
    return [x[images].detach().requires_grad_() if i < 2 else x for i, x in enumerate(inputs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_chunks_change_no_bit_on_the_cpu(dtype, monkeypatch):
    """Results of an image do not depend on the chunk; gradients of weight and betas are sums over the chunks."""
    check_chunks(LAYER.but(images=5), 2, dtype, "cpu", monkeypatch)


def test_chunks_change_no_bit_on_triton(monkeypatch):
    check_chunks(TINY, 1, torch.float32, "triton", monkeypatch)


def check_chunks(problem, images, dtype, backend, monkeypatch):
    inputs = problem.inputs(dtype, requires_grad=True)
    together = gradients(inputs, problem, backend)
    count = -(-problem.images // images)
    split = [slice(problem.images * i // count, problem.images * (i + 1) // count) for i in range(count)]
    alone = [gradients(of_images(inputs, part), problem, backend) for part in split]
    monkeypatch.setattr(chunks, "WORKSPACE", images * bytes_of_an_image(problem, dtype))
    found = gradients(inputs, problem, backend)
    for x, y in zip(found, together, strict=True):
        assert x.stride() == y.stride()
    for x, y in zip(found[:4], together[:4], strict=True):
        assert torch.equal(x, y)
    if dtype != torch.float16:  # rounded once, after the sum
        for i in (4, 5, 6):
            first, *others = (part[i] for part in alone)
            for more in others:
                first = first + more
            assert torch.equal(found[i], first)


def bytes_of_an_image(problem, dtype):
    """The bytes that `chunks_of` counts for an image, found by bisection."""
    m = problem.routing_map
    sizes = m.num_parents * problem.out_caps, m.num_children * problem.in_caps, m.num_children * problem.in_caps
    size = torch.promote_types(dtype, torch.float32).itemsize
    at_most = lambda workspace: len(chunks_with(workspace, 2, *sizes, problem.routing.iterations, size)) == 1  # noqa: E731
    low, high = 1, 1 << 40
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if at_most(middle) else (middle + 1, high)
    return -(-low // 2)


def chunks_with(workspace, *sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "WORKSPACE", workspace)
        return chunks.chunks_of(*sizes)


def test_chunks_depend_on_sizes_only_and_cover_the_batch():
    sizes = 100, 200, 200, 3, 4
    for images in (0, 1, 7, 64):
        for workspace in (1, 1 << 16, 1 << 20, 1 << 30):
            found = chunks_with(workspace, images, *sizes)
            assert [n for part in found for n in range(part.start, part.stop)] == list(range(images))
            assert len({part.stop - part.start for part in found}) <= 2
    assert len(chunks_with(1, 7, *sizes)) == 7
    assert len(chunks_with(1 << 30, 64, *sizes)) == 1


def work(images, backend, problem=LAYER):
    """Bytes of a step without outputs, their gradients, gradients of the inputs, and tensors for the backward pass."""
    problem = problem.but(images=images)
    inputs, known = problem.inputs(torch.float32, requires_grad=True), []
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def step():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            outputs = route(inputs, problem, backend)
        known[:] = [*outputs, *map(torch.ones_like, outputs)]
        torch.autograd.backward(list(outputs), known[2:])

    step()  # compiles the kernels, and allocates the memory that calls reuse
    for x in inputs:
        kept.pop(x.untyped_storage().data_ptr(), None)
        known.append(x.grad)
        x.grad = None
    kept_bytes = sum(kept.values())
    own = sum(x.nbytes for x in known)
    return peak_bytes(step) - kept_bytes - own


@pytest.fixture
def _small_workspace(monkeypatch):
    monkeypatch.setattr(chunks, "WORKSPACE", 3 << 20)  # about four images of the layer


@pytest.mark.usefixtures("_small_workspace")
def test_memory_for_work_is_that_of_a_chunk_on_the_cpu():
    few, many = work(4, "cpu"), work(24, "cpu")
    assert 0 < many < 1.3 * few


def test_it_would_grow_without_chunks():
    assert work(24, "cpu") > 3 * work(4, "cpu")


@pytest.mark.usefixtures("_small_workspace")
def test_memory_for_work_is_that_of_a_chunk_on_triton(monkeypatch):
    """No kernel runs; the host allocates the memory that launches would need."""
    monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **kwargs: None)
    few, many = work(4, "triton"), work(24, "triton")
    assert 0 < many < 1.3 * few
