"""`tritoncaps doctor --gpu-report FILE`: tests and times of all kernels on a device, as a text for a bug report.

The parts are independent. If a part fails, the report contains its error.
"""

from __future__ import annotations

import math
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tritoncaps
from tritoncaps import Capsules, ClassCaps, ConvCaps2d, Gaussians, RoutingMap, VBRouting, VectorCaps, functional
from tritoncaps.data.files import write_atomically
from tritoncaps.models import MatrixCapsNet
from tritoncaps.waiting import waiting

ROUNDS = 20  # measurements; the smallest one counts
LAST_LINES = 12  # lines of a traceback in the report


def write_report(
    path: Path,
    device: torch.device,
    backend: str,
    versions: dict[str, str | None],
    *,
    examples: int = 25,
    images: int = 64,
    types: int = 32,
) -> bool:
    """Write the report, with ``examples`` problems for each check. Layers of ``types`` types are timed. Return True if
    all checks passed."""
    lines = [f"tritoncaps {tritoncaps.__version__} on {device}, backend {backend}", *_machine(device, versions), ""]
    lines += ["first call", *_guarded(partial(_first_call, device, backend)), ""]
    checks = list(_checks(device, backend, examples))
    found = [(name, _failure(check)) for name, check in waiting("checking", checks, len(checks))]
    failed = [name for name, text in found if text]
    lines += [f"checks against the reference in float64: {len(found) - len(failed)} of {len(found)} passed"]
    lines += [f"  {'FAILED' if text else 'passed'}  {name}" for name, text in found] + [""]
    for name, text in found:
        lines += [f"--- {name}", text, ""] if text else []
    lines += [f"times: the smallest of {ROUNDS} rounds, TF32 off", f"  {'what':40} forward ms    step ms"]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    cases = _cases(backend, images, types)
    for name, (module, given) in waiting("measuring", cases.items(), len(cases)):
        lines += _guarded(partial(_time, f"{name}, {images} images", module, given, device))
    write_atomically(path, lambda file: file.write(("\n".join(lines) + "\n").encode()))
    return not failed


def _machine(device: torch.device, versions: dict[str, str | None]) -> Iterator[str]:
    yield f"Python {platform.python_version()}, {platform.platform()}"
    yield ", ".join(f"{name} {version or 'is not installed'}" for name, version in versions.items())
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        yield f"{p.name}, {p.multi_processor_count} multiprocessors, {p.total_memory / 2**30:.1f} GiB"
        yield f"CUDA {torch.version.cuda}, ROCm {torch.version.hip}, driver of {torch.cuda.device_count()} devices"
    yield f"Triton's cache: {os.environ.get('TRITON_CACHE_DIR') or '~/.triton/cache'}"


def _guarded(part: Callable[[], Iterator[str]]) -> list[str]:
    """The lines of a part, or its error."""
    try:
        return list(part())
    except Exception:
        return [_error()]


def _error() -> str:
    """The last lines of the current traceback."""
    return "\n".join(f"    {line}" for line in traceback.format_exc().splitlines()[-LAST_LINES:])


def _first_call(device: torch.device, backend: str) -> Iterator[str]:
    """The time of the first training step of a network. It compiles the kernels, unless Triton has them on disk."""
    network = MatrixCapsNet.small(2, 5, backend=backend).to(device)
    images, labels = torch.randn(2, 2, 32, 32, device=device), torch.arange(2, device=device)
    for which in ("first", "second"):
        _synchronize(device)
        start = time.perf_counter()
        functional.spread_loss(network(images).activations, labels, 0.5).backward()
        _synchronize(device)
        yield f"  {which} training step of MatrixCapsNet.small: {time.perf_counter() - start:.2f} s"


def _checks(device: torch.device, backend: str, examples: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """The properties of `tritoncaps.testing`, and the operations on stored votes."""
    from tritoncaps import testing

    on_device = partial(_route_there, testing.route_on(backend), device)
    verify = partial(testing.verify, examples=examples, small=backend == "triton" and device.type == "cpu")
    for check in (*testing.EM_ROUTING_CHECKS, *testing.KERNEL_CHECKS):
        yield f"EM routing {check.__name__}", partial(verify, check, on_device)
    with_vb = partial(testing.problems, routings=testing.vb_routings())
    for check in testing.MIXTURE_CHECKS:
        yield f"any fit (VBRouting) {check.__name__}", partial(verify, check, on_device, strategy=with_vb)
    on_device = partial(_route_there, partial(functional.dynamic_routing, backend=backend), device)
    for vector_check in (*testing.VECTOR_CHECKS, *testing.VECTOR_KERNEL_CHECKS):
        given = partial(verify, vector_check, on_device, strategy=testing.vector_problems)
        yield f"dynamic routing {vector_check.__name__}", given
    for name in ("pose_votes", "coordinate_addition", "m_step", "e_step"):
        yield f"stored votes {name}", partial(_compare_stored, name, device, backend)


def _failure(check: Callable[[], None]) -> str:
    """The error of a check, or an empty string."""
    try:
        check()
    except Exception:
        return _error()
    return ""


def _route_there(route: Callable[..., Any], device: torch.device, *tensors: Tensor, **options: Any) -> Any:
    """Run a route on the device, with CPU tensors as arguments and result."""
    options = {name: _moved(x, device) if isinstance(x, Tensor) else x for name, x in options.items()}
    return route(*(_moved(x, device) for x in tensors), **options).to("cpu")


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device, with the same strides."""
    if x.ndim and len(x) > 1 and x.stride(0) == 0:
        return x[:1].to(device).expand(x.shape)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def _compare_stored(name: str, device: torch.device, backend: str) -> None:
    """Compare an operation on stored votes with the reference: values and gradients, in float64."""
    from tritoncaps.testing import assert_close

    found, expected = (_stored(name, *where) for where in ((device, backend), (torch.device("cpu"), "reference")))
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_close(f"result {i}", mine.cpu(), theirs)


def _stored(name: str, device: torch.device, backend: str) -> list[Tensor]:
    routing_map, generator = RoutingMap.conv((3, 4), 3, stride=2, padding=1), torch.Generator().manual_seed(0)
    edges = (2, routing_map.num_parents, routing_map.num_slots, 3, 5)
    parents, children = (2, 5, *routing_map.out_size), (2, 3, *routing_map.in_size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()

    options: dict[str, Any] = {"routing_map": routing_map, "backend": backend}
    calls: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
        "pose_votes": (
            partial(functional.pose_votes, **options),
            [normal(*children, 4, 4), normal(routing_map.num_weights, 3, 5, 4, 4)],
        ),
        "coordinate_addition": (partial(functional.coordinate_addition, **options), [normal(*edges, 4, 4)]),
        "m_step": (
            lambda v, r, a, *betas: functional.m_step(
                v, r.sigmoid(), a.sigmoid(), *betas, inverse_temperature=0.3, **options
            ),
            [normal(*edges, 4, 4), normal(*edges), normal(*children), normal(5), normal(5)],
        ),
        "e_step": (
            lambda v, m, s, a: functional.e_step(v, Gaussians(m, s.exp(), a), **options),
            [normal(*edges, 4, 4), normal(*parents, 4, 4), normal(*parents, 4, 4), normal(*parents)],
        ),
    }
    call, inputs = calls[name]
    outputs = call(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    total = torch.stack([(x * torch.cos(3 * x.detach())).sum() for x in outputs]).sum()
    return [*outputs, *torch.autograd.grad(total, inputs, materialize_grads=True)]


def _cases(backend: str, images: int, types: int) -> dict[str, tuple[nn.Module, Any]]:
    """Modules to time, and their inputs."""
    wide = (images, types, 14, 14)
    capsules = Capsules(torch.randn(*wide, 4, 4), torch.rand(wide))
    vectors = torch.randn(images, 36 * types, 8)
    features, pictures = torch.randn(images, 17 * types, 14, 14), torch.randn(images, 2, 32, 32)
    return {
        f"ConvCaps2d {types} to {types}, EM": (ConvCaps2d(types, types, 3, stride=2, backend=backend), capsules),
        f"ConvCaps2d {types} to {types}, VB": (
            ConvCaps2d(types, types, 3, stride=2, routing=VBRouting(), backend=backend),
            capsules,
        ),
        f"ClassCaps {types} to 5, EM": (ClassCaps(types, 5, backend=backend), capsules),
        f"VectorCaps {36 * types} to 10": (VectorCaps(36 * types, 8, 10, 16, backend=backend), vectors),
        f"nn.Conv2d of {17 * types} channels": (nn.Conv2d(17 * types, 17 * types, 3, stride=2), features),
        "MatrixCapsNet.small": (MatrixCapsNet.small(2, 5, backend=backend), pictures),
    }


def _time(name: str, module: nn.Module, given: Any, device: torch.device) -> Iterator[str]:
    module, inputs = module.to(device), given.to(device)

    def forward() -> None:
        with torch.no_grad():
            module(inputs)

    def step() -> None:
        outputs = module(inputs)
        total = outputs.sum() if isinstance(outputs, Tensor) else outputs[0].sum() + outputs[1].sum()
        total.backward()

    yield f"  {name:40} {_least_ms(forward, device):9.3f}  {_least_ms(step, device):9.3f}"


def _least_ms(call: Callable[[], None], device: torch.device) -> float:
    """The smallest time, by CUDA events on a GPU. The first call, which may compile, does not count."""
    call()
    least = math.inf
    for _ in range(ROUNDS):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            least = min(least, start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            call()
            least = min(least, (time.perf_counter() - begun) * 1e3)
    return least


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
