"""torch.compile, torch.export, ONNX and AOTInductor work with layers and models without changes."""

import io
import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves

from tritoncaps import (
    Capsules,
    ClassCaps,
    ConvCaps1d,
    ConvCaps2d,
    ConvCaps3d,
    ConvVectorCaps2d,
    EMRouting,
    LinearMargin,
    MarginLoss,
    PrimaryCaps,
    RoutingMap,
    SpreadLoss,
    VectorCaps,
    VectorPrimaryCaps,
    functional,
)
from tritoncaps.models import CapsNet, MatrixCapsNet

DOUBLE = torch.float64
BATCH = Dim("batch", min=1, max=64)


def matrix(images, *space):
    return Capsules(torch.randn(images, 3, *space, 4, 4, dtype=DOUBLE), torch.rand(images, 3, *space, dtype=DOUBLE))


def images(n, size):
    return torch.randn(n, 1, size, size, dtype=DOUBLE)


def matrix_net(**kwargs):
    return MatrixCapsNet(1, 5, (4, 3, 2, 2), iterations=2, **kwargs)


def vector_net(**kwargs):
    return CapsNet(1, 5, 20, channels=4, primary_caps=2, **kwargs)


class Training(nn.Module):
    """A model and its loss, with the loss of the decoder if it has one."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, images):
        labels = torch.arange(len(images)) % 5
        capsules = self.model(images)
        loss = self.loss(capsules, labels)
        if getattr(self.model, "decoder", None):
            loss = loss + (self.model.reconstruct(capsules, labels) - images).square().mean()
        return loss


# a layer or a model for each backend, and its input for a number of images
LAYERS = {
    "primary": (lambda backend, **k: PrimaryCaps(1, 2, 3, **k), lambda n: images(n, 5)),
    "vector primary": (lambda **k: VectorPrimaryCaps(1, 2, 4, 3, **k), lambda n: images(n, 5)),
    "conv 1d": (lambda **k: ConvCaps1d(3, 2, 3, padding=1, **k), lambda n: matrix(n, 4)),
    "conv 2d": (lambda **k: ConvCaps2d(3, 2, 3, stride=2, **k), lambda n: matrix(n, 5, 5)),
    "conv 3d": (lambda **k: ConvCaps3d(3, 2, 2, **k), lambda n: matrix(n, 2, 3, 2)),
    "class": (lambda **k: ClassCaps(3, 2, routing=EMRouting(2), **k), lambda n: matrix(n, 2, 2)),
    "vector": (lambda **k: VectorCaps(3, 4, 2, 5, **k), lambda n: torch.randn(n, 3, 4, dtype=DOUBLE)),
    "conv vector": (
        lambda **k: ConvVectorCaps2d(3, 4, 2, 5, 3, stride=2, **k),
        lambda n: torch.randn(n, 3, 5, 5, 4, dtype=DOUBLE),
    ),
    "MatrixCapsNet": (lambda **k: Training(matrix_net(**k), SpreadLoss()), lambda n: images(n, 17)),
    "CapsNet": (lambda **k: Training(vector_net(**k), MarginLoss()), lambda n: images(n, 20)),
}


def gradients(model, given):
    outputs = tree_leaves(model(given))
    loss = sum((x * torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape).sin()).sum() for x in outputs)
    return *outputs, *torch.autograd.grad(loss, list(model.parameters()))


def assert_same(actual, expected):
    for mine, theirs in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


# the reference (torch compiles all its operations) and Triton (interpreted) are slow: one layer of each kind
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "cpu") for name in LAYERS), *itertools.product(("class", "vector"), ("reference", "triton"))],
)
def test_compiles_as_one_graph_for_all_batches(name, backend):
    make, given = LAYERS[name]
    layer = make(backend=backend, dtype=DOUBLE)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for images in (2, 3):  # the second batch size makes the program dynamic
        assert_same(gradients(compiled, x := given(images)), gradients(layer, x))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for images in (2, 4, 5, 7) if backend == "cpu" else (5,):
            assert_same(gradients(compiled, x := given(images)), gradients(layer, x))


def test_a_new_margin_is_no_new_program():
    loss, labels = SpreadLoss(LinearMargin(steps=10)), torch.tensor([1, 2])
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    compiled(activations := torch.rand(2, 3), labels)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in (3, 6, 10):
            loss.set_step(step)
            assert_same(compiled(activations, labels), functional.spread_loss(activations, labels, 0.2 + 0.07 * step))


def test_compiles_with_every_size_dynamic():
    layer = ConvCaps2d(3, 2, 3, dtype=DOUBLE)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for given in (matrix(2, 4, 5), matrix(3, 4, 5), matrix(2, 6, 5)):
        assert_same(gradients(compiled, given), gradients(layer, given))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_trains_a_model(mode):
    torch.compiler.reset()
    training = Training(matrix_net(dtype=DOUBLE), SpreadLoss())
    compiled = torch.compile(training, fullgraph=True, mode=mode)
    for _ in range(2):
        assert_same(gradients(compiled, x := images(2, 17)), gradients(training, x))


def test_a_user_graph_compiles():
    routing_map = RoutingMap.from_edges([0, 1, 2, 2], [0, 0, 1, 0], num_children=3, num_parents=2)
    given = (*matrix(2, 3), torch.randn(3, 3, 2, 4, 4, dtype=DOUBLE), *torch.randn(2, 2, dtype=DOUBLE))
    torch.compiler.reset()

    def route(*tensors):
        return functional.em_routing(*tensors, routing_map)

    assert_same(torch.compile(route, fullgraph=True, backend="aot_eager")(*given), route(*given))


def primary_and_class(**kwargs):
    return nn.Sequential(PrimaryCaps(1, 3, dtype=DOUBLE), ClassCaps(3, 2, **kwargs))


@pytest.mark.parametrize(
    ("make", "size", "backend", "strict"),
    [
        *((primary_and_class, 3, backend, False) for backend in ("reference", "cpu", "triton")),
        (primary_and_class, 3, "cpu", True),
        (matrix_net, 17, "cpu", False),
        (vector_net, 20, "cpu", False),
    ],
)
def test_exported_programs_survive_saving(make, size, backend, strict):
    model = make(backend=backend, dtype=DOUBLE)
    program = torch.export.export(model, (images(2, size),), dynamic_shapes=({0: BATCH},), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert_same(torch.export.load(file).module()(other := images(5, size)), model(other))


def test_aot_inductor(tmp_path):
    model = ClassCaps(3, 2, dtype=DOUBLE).eval().requires_grad_(False)
    example, other = matrix(2, 2), matrix(5, 2)
    program = torch.export.export(model, (example,), dynamic_shapes=(Capsules({0: BATCH}, {0: BATCH}),))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    assert_same(torch._inductor.aoti_load_package(path)(other), model(other))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "size"), [(matrix_net, 17), (vector_net, 20)])
def test_torchscript_traces_and_does_not_script(tmp_path, make, size):
    """A trace goes through the reference, with gradients, for other batches too, and needs no tritoncaps."""
    model = make()
    example, other = images(2, size).float(), images(3, size).float()
    torch.jit.trace(model, (example,)).save(str(tmp_path / "model.pt"))
    code = (
        "import sys, torch; model, other = torch.jit.load(sys.argv[1]), torch.load(sys.argv[2]);"
        "outputs = model(other); outputs[1].sum().backward(); torch.save(outputs, sys.argv[2]);"
        "assert 'tritoncaps' not in sys.modules"
    )
    torch.save(other, tmp_path / "other.pt")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt"), str(tmp_path / "other.pt")], check=True)
    outputs = torch.load(tmp_path / "other.pt")
    for theirs, mine in zip(outputs, model(other), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-4)
    for module in (model, SpreadLoss(), MarginLoss()):
        with pytest.raises(RuntimeError, match=r"torch\.jit\.script cannot compile \w+: use torch\.jit\.trace"):
            torch.jit.script(module)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "size"), [(matrix_net, 17), (vector_net, 20)])
def test_onnx(tmp_path, make, size):
    """Through the reference, for any backend of the layers: it consists of operators that ONNX supports."""
    runtime = pytest.importorskip("onnxruntime")
    model = make().eval().requires_grad_(False)
    example, other = images(2, size).float(), images(3, size).float()
    program = torch.onnx.export(model, (example,), dynamic_shapes=({0: BATCH},), dynamo=True, verbose=False)
    program.save(str(tmp_path / "model.onnx"))
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    outputs = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    for mine, theirs in zip(outputs, model(other), strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), theirs, rtol=1e-4, atol=1e-4)
