"""torch.compile, torch.export, ONNX and AOTInductor take layers and models as they are."""

import io

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
    MarginLoss,
    PrimaryCaps,
    RoutingMap,
    SpreadLoss,
    VectorCaps,
    functional,
)
from tritoncaps.models import CapsNet, MatrixCapsNet

BACKENDS = ["reference", "cpu"]
DOUBLE = torch.float64
BATCH = Dim("batch", min=1, max=64)


def matrix(images, *space):
    return Capsules(torch.randn(images, 3, *space, 4, 4, dtype=DOUBLE), torch.rand(images, 3, *space, dtype=DOUBLE))


# a layer for each backend, and its input for a number of images
LAYERS = {
    "conv 1d": (lambda **k: ConvCaps1d(3, 2, 3, padding=1, **k), lambda n: matrix(n, 4)),
    "conv 2d": (lambda **k: ConvCaps2d(3, 2, 3, stride=2, **k), lambda n: matrix(n, 5, 5)),
    "conv 3d": (lambda **k: ConvCaps3d(3, 2, 2, **k), lambda n: matrix(n, 2, 3, 2)),
    "class": (lambda **k: ClassCaps(3, 2, routing=EMRouting(2), **k), lambda n: matrix(n, 2, 2)),
    "vector": (lambda **k: VectorCaps(3, 4, 2, 5, **k), lambda n: torch.randn(n, 3, 4, dtype=DOUBLE)),
    "conv vector": (
        lambda **k: ConvVectorCaps2d(3, 4, 2, 5, 3, stride=2, **k),
        lambda n: torch.randn(n, 3, 5, 5, 4, dtype=DOUBLE),
    ),
}


def gradients(model, given):
    outputs = tree_leaves(model(given))
    loss = sum((x * torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape).sin()).sum() for x in outputs)
    return *outputs, *torch.autograd.grad(loss, list(model.parameters()))


def assert_same(actual, expected):
    for mine, theirs in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


# torch compiles every operation of the reference, which takes long: one layer of each kind
@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "cpu") for name in LAYERS), ("class", "reference"), ("vector", "reference")]
)
def test_compiles_as_one_graph_for_all_batches(name, backend):
    make, given = LAYERS[name]
    layer = make(backend=backend, dtype=DOUBLE)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for images in (2, 3):  # the second batch size makes the program dynamic
        assert_same(gradients(compiled, x := given(images)), gradients(layer, x))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for images in (2, 4, 5, 7):
            assert_same(gradients(compiled, x := given(images)), gradients(layer, x))


def test_compiles_with_every_size_dynamic():
    layer = ConvCaps2d(3, 2, 3, dtype=DOUBLE)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for given in (matrix(2, 4, 5), matrix(3, 4, 5), matrix(2, 6, 5)):
        assert_same(gradients(compiled, given), gradients(layer, given))


def small_net(**kwargs):
    return MatrixCapsNet(1, 5, (4, 3, 2, 2), iterations=2, dtype=DOUBLE, **kwargs)


IMAGES = (2, 1, 17, 17)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_trains_a_model(mode):
    torch.compiler.reset()
    model, images, labels = small_net(), torch.randn(IMAGES, dtype=DOUBLE), torch.tensor([1, 4])
    loss = SpreadLoss()

    def step(images):
        return loss(model(images).activations, labels)

    expected = torch.autograd.grad(step(images), list(model.parameters()))
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for _ in range(2):
        assert_same(torch.autograd.grad(compiled(images), list(model.parameters())), expected)


def test_a_capsnet_compiles():
    torch.compiler.reset()
    model = CapsNet(image_size=20).double()
    images, labels = torch.randn(2, 1, 20, 20, dtype=DOUBLE), torch.tensor([3, 5])
    loss = MarginLoss()

    def step(images):
        return loss(model(images).activations, labels)

    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(step(images), parameters, allow_unused=True)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same(torch.autograd.grad(compiled(images), parameters, allow_unused=True), expected)


def test_a_user_graph_compiles():
    routing_map = RoutingMap.from_edges([0, 1, 2, 2], [0, 0, 1, 0], num_children=3, num_parents=2)
    given = (*matrix(2, 3), torch.randn(3, 3, 2, 4, 4, dtype=DOUBLE), *torch.randn(2, 2, dtype=DOUBLE))
    torch.compiler.reset()

    def route(*tensors):
        return functional.em_routing(*tensors, routing_map)

    assert_same(torch.compile(route, fullgraph=True, backend="aot_eager")(*given), route(*given))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_survive_saving(backend, strict):
    model = nn.Sequential(PrimaryCaps(2, 3, dtype=DOUBLE), ClassCaps(3, 2, backend=backend, dtype=DOUBLE))
    example, other = torch.randn(2, 2, 3, 3, dtype=DOUBLE), torch.randn(5, 2, 3, 3, dtype=DOUBLE)
    program = torch.export.export(model, (example,), dynamic_shapes=({0: BATCH},), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert_same(torch.export.load(file).module()(other), model(other))


def test_aot_inductor(tmp_path):
    model = ClassCaps(3, 2, dtype=DOUBLE).eval().requires_grad_(False)
    example, other = matrix(2, 2), matrix(5, 2)
    program = torch.export.export(model, (example,), dynamic_shapes=(Capsules({0: BATCH}, {0: BATCH}),))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    assert_same(torch._inductor.aoti_load_package(path)(other), model(other))


@pytest.mark.filterwarnings("ignore")
def test_onnx(tmp_path):
    """Through the reference, whatever the layers' backend is: its operators are those that ONNX knows."""
    runtime = pytest.importorskip("onnxruntime")
    model = MatrixCapsNet(1, 5, (4, 3, 2, 2), iterations=2).eval().requires_grad_(False)
    example, other = torch.randn(IMAGES), torch.randn(3, *IMAGES[1:])
    program = torch.onnx.export(model, (example,), dynamic_shapes=({0: BATCH},), dynamo=True, verbose=False)
    program.save(str(tmp_path / "model.onnx"))
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    outputs = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    for mine, theirs in zip(outputs, model(other), strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), theirs, rtol=1e-4, atol=1e-4)
