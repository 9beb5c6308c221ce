"""EM routing in Triton records the launches of a call; later calls of the same sizes repeat them with other tensors.

Triton's interpreter runs the recorded launches here. They have addresses instead of tensors, so a wrong address gives
wrong numbers.
"""

import ctypes
import json
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from other_process import DRIVER, run_python

from tritoncaps import EMRouting, RoutingMap, functional
from tritoncaps.kernels.common.triton import compiling, plans
from tritoncaps.kernels.mixture.triton import kept
from tritoncaps.testing import Problem, assert_close, route_on
from tritoncaps.testing.checks import equals_the_reference

SMALL = Problem(RoutingMap.conv((2,), 2), EMRouting(2), images=1, in_caps=2, out_caps=3)


def interpreted(kernel, programs, arguments, options):
    """In the place of a compiled kernel: for its grid, a function of addresses that interprets the kernel."""
    recorded = [arguments[name] for name in kernel.arg_names]

    def at(address, like):
        if not isinstance(like, torch.Tensor) or not like.numel():
            return like
        memory = (ctypes.c_char * (like.numel() * like.element_size())).from_address(address)
        return torch.frombuffer(memory, dtype=like.dtype)

    return {(programs, 1, 1): lambda *values, stream: kernel[(programs,)](*map(at, values, recorded))}


@pytest.fixture
def made(monkeypatch):
    """The functions that made a plan, one for each plan."""
    names = []
    for make in (kept._forward, kept._backward):
        counted = lambda *given, make=make: names.append(make.__name__) or make(*given)  # noqa: E731
        monkeypatch.setattr(kept, make.__name__, counted)
    monkeypatch.setattr(kept, "may_keep_plans", lambda: True)
    monkeypatch.setattr(plans, "_compiled", interpreted)
    gpu = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    monkeypatch.setattr(plans, "driver", SimpleNamespace(active=gpu))
    return names


compare = partial(equals_the_reference, route_on("triton"))


def test_a_plan_is_made_once_and_gets_new_inputs(made):
    compare(SMALL)
    assert made == ["_forward", "_backward"]
    compare(SMALL.but(seed=1))
    assert made == ["_forward", "_backward"]


@pytest.mark.parametrize(
    "other",
    [
        SMALL.but(routing=EMRouting(3)),
        SMALL.but(routing=EMRouting(2, final_lambda=2.0)),
        SMALL.but(routing=EMRouting(2, competition="local")),
        SMALL.but(routing=EMRouting(2, competition="positions")),
        SMALL.but(images=2),
    ],
    ids=["iterations", "lambda", "local", "positions", "images"],
)
def test_a_call_that_differs_has_another_plan(made, other):
    compare(SMALL)
    compare(other)
    assert made == 2 * ["_forward", "_backward"]


def test_a_forward_pass_has_one_plan_for_all_kinds_of_gradients(made):
    compare(SMALL)
    compare(SMALL.but(routing=EMRouting(2, gradient="last")))
    assert made == ["_forward", "_backward", "_backward"]


@pytest.mark.parametrize("missing", ["poses", "weight"])
def test_gradients_that_are_not_needed(made, missing):
    found = {}
    for backend in ("triton", "reference"):
        names = ("poses", "activations", "weight", "beta_u", "beta_a")
        inputs = dict(zip(names, SMALL.inputs(torch.float64, requires_grad=True), strict=True))
        inputs[missing].requires_grad_(False)
        inputs["activations"].requires_grad_(missing != "poses")
        out = functional.em_routing(*inputs.values(), SMALL.routing_map, SMALL.routing, backend)
        (out.poses.square().sum() + out.activations.sum()).backward()
        found[backend] = [x.grad for x in inputs.values() if x.requires_grad]
    for value, expected in zip(found["triton"], found["reference"], strict=True):
        assert_close(f"a gradient without that of {missing}", value, expected)
    assert made


def test_dtypes_have_their_own_plans(made):
    for dtype in (torch.float32, torch.float64, torch.float16):
        given = [x.to(dtype) for x in SMALL.inputs(torch.float64)]
        found = functional.em_routing(*given, SMALL.routing_map, SMALL.routing, "triton")
        expected = functional.em_routing(*given, SMALL.routing_map, SMALL.routing, "reference")
        assert_close("poses", found.poses, expected.poses, 2e-3 if dtype == torch.float16 else 1e-5)
    assert made == 3 * ["_forward"]


def test_inputs_may_share_memory(made):
    """The recorded call has one tensor for both betas, a later call has two."""
    poses, activations, weight, beta_u, beta_a = SMALL.inputs(torch.float64)
    for betas in ((beta_u, beta_u), (beta_u, beta_a + 1)):
        given = (poses, activations, weight, *betas, SMALL.routing_map, SMALL.routing)
        found, expected = (functional.em_routing(*given, backend) for backend in ("triton", "reference"))
        assert_close("activations", found.activations, expected.activations)
    assert made == ["_forward"]


@pytest.mark.parametrize("repeats", [False, True])
def test_betas_may_be_views(request, repeats):
    if repeats:
        request.getfixturevalue("made")
    poses, activations, weight, *betas = SMALL.inputs(torch.float64)
    beta_u, beta_a = (torch.stack([x, x + 1], dim=1)[:, 0] for x in betas)
    given = (poses, activations, weight, beta_u, beta_a, SMALL.routing_map, SMALL.routing)
    found, expected = (functional.em_routing(*given, backend) for backend in ("triton", "reference"))
    assert_close("activations", found.activations, expected.activations)


def test_a_batch_of_several_chunks_has_no_plan(made, monkeypatch):
    monkeypatch.setattr("tritoncaps.kernels.common.chunks.WORKSPACE", 1)
    compare(SMALL.but(images=2))
    assert not made


def test_interpreter_emulators_and_profilers_get_single_launches(monkeypatch):
    assert not plans.may_keep_plans()  # the interpreter
    monkeypatch.setattr(plans, "_INTERPRETED", False)
    assert plans.may_keep_plans()
    with monkeypatch.context() as emulator:
        emulator.setattr(plans.JITFunction, "run", lambda *arguments, **options: None)
        assert not plans.may_keep_plans()
    hook = lambda metadata: None  # noqa: E731
    monkeypatch.setattr(plans.knobs.runtime, "launch_enter_hook", hook)
    assert not plans.may_keep_plans()


class Recorded:
    """In the place of a kernel: `warmup` calls a function."""

    arg_names = ("x",)

    def __init__(self, warmup):
        self.work = warmup

    def warmup(self, grid, x):
        self.work()
        return {(*grid, 1, 1): self}


def test_kernels_of_a_plan_are_compiled_at_the_same_time(monkeypatch):
    monkeypatch.setattr(plans.os, "cpu_count", lambda: 2)
    both = threading.Barrier(2, timeout=60)  # breaks if one kernel waits for the other
    kernels = [Recorded(both.wait), Recorded(both.wait)]
    with plans.recorded() as launches:
        for number, kernel in enumerate(kernels):
            plans.launch(kernel, 3, {"x": number}, {})
    assert launches == [(kernel, [number]) for number, kernel in enumerate(kernels)]


def test_other_threads_compile_with_the_same_passes():
    seen = {}

    def kernel(name):
        return Recorded(lambda: seen.update({name: getattr(compiling._thread, "skips", False)}))

    with plans.recorded():
        plans.launch(kernel("before"), 1, {"x": 0}, {})
        with compiling.uncoalesced():
            plans.launch(kernel("inside"), 1, {"x": 0}, {})
        plans.launch(kernel("after"), 1, {"x": 0}, {})
    assert seen == {"before": False, "inside": True, "after": False}


def test_an_error_of_the_compiler_reaches_the_caller():
    def fail():
        raise RuntimeError("no C compiler")

    with pytest.raises(RuntimeError, match="no C compiler"), plans.recorded():
        plans.launch(Recorded(fail), 1, {"x": 0}, {})
    assert plans._thread.recording is None


SCRIPT = (
    DRIVER
    + """
import json
from triton.runtime.jit import JITFunction

launches = []


class Compiled:
    function, packed_metadata = None, None
    launch_metadata = lambda self, *given: None

    def __init__(self, kernel):
        self.name = kernel.fn.__name__

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        plain = [0 if isinstance(a, torch.Tensor) or isinstance(a, int) and a > 1 << 32 else a for a in arguments]
        launches.append((self.name, x, stream, str(plain)))

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.run(*grid, stream, None, None, None, None, None, *arguments)


JITFunction._do_compile = lambda kernel, *rest: Compiled(kernel)

from tritoncaps import Capsules, ConvCaps2d
from tritoncaps.kernels.mixture.triton import kept


def step():
    launches.clear()
    poses = torch.randn(2, 3, 4, 4, 4, 4, requires_grad=True)
    out = ConvCaps2d(3, 5, 2, backend="triton")(Capsules(poses, torch.rand(2, 3, 4, 4)))
    (out.poses.sum() + out.activations.sum()).backward()
    return list(launches)


repeated = [step(), step()]
kept.may_keep_plans = lambda: False
print(json.dumps([*repeated, step()]))
"""
)


def test_repeated_launches_are_those_of_triton():
    """Kernels, grids, streams and all arguments but addresses. In another process, without the interpreter; a stand-in
    of the compiled kernel gets the launches."""
    first, second, plain = json.loads(run_python("-c", SCRIPT, TRITONCAPS_TRITON_ON_CPU="1"))
    assert len(plain) == 9 + 10
    assert first == plain
    assert second == plain
