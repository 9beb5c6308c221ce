"""The measurements of all benchmarks: interleaved repetitions, roofs in the same run, errors against float64, memory.

A `Case` is one calculation and its providers. Each subject is a file with a function `cases(level)` that returns a list
of cases. Run it alone (`python bench/m_step.py --quick`) or all together (`python bench/suite.py --quick`).
"""

from __future__ import annotations

import gc
import itertools
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import tritoncaps
import tritoncaps.flops

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # for the resident size, on Linux
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Our kernels do not use TF32, so rivals and the roof must not use it either.
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
IS_GPU = DEVICE.type == "cuda"
OURS, REFERENCE, COMPILED = "tritoncaps", "reference", "reference, compiled"
GRAPH = "tritoncaps, CUDA graph"  # the same launches without the overhead of the host
CONV, CNN = "nn.Conv2d", "CNN baseline"
MIB = 2**20
# An error up to this is always allowed, in units of the last place of the largest number in its tensor. Our kernels and
# torch.compile add numbers sequentially, eager torch in pairs. For the sum of 2304 parts of beta_u's gradient, the
# error of torch.compile is 40 units, that of eager torch 1.4 units.
FLOOR = 64
LEVELS = ("smoke", "quick", "full")
Function = Callable[..., Sequence[Tensor]]
Row = dict[str, Any]


class Effort(NamedTuple):
    """The number of rounds of a case: at least ``least``, at most ``most``, otherwise until ``seconds`` have passed."""

    least: int
    most: int
    seconds: float


EFFORTS = {"smoke": Effort(2, 2, 0.0), "quick": Effort(5, 30, 0.3), "full": Effort(9, 60, 10.0)}


class Rival(NamedTuple):
    """Another calculation of about the same size, with its own tensors. Its errors are not checked."""

    name: str
    function: Function
    tensors: Callable[[], list[Tensor]]
    data: int = 1


@dataclass(frozen=True)
class Case:
    """One calculation, by our library and by the reference: functions of the same tensors."""

    subject: str
    name: str
    ours: Function
    reference: Function
    tensors: Callable[[], list[Tensor]]  # float64; converted and moved to the device here
    images: int
    data: int  # number of tensors that are data; the others are parameters
    rivals: tuple[Rival, ...] = ()
    bytes: float | None = None  # bytes that any forward pass must read and write
    votes: int | None = None
    timed: tuple[str, ...] = (OURS, REFERENCE, COMPILED)
    modes: tuple[str, ...] = ("forward", "step")
    data_gradient: bool = True
    group: str | None = None  # name of a series of cases that differ only in the number `x`
    x: float | None = None
    threads: int | None = None

    def rows(self, level: str, repeats: int | None = None) -> list[Row]:
        """Time all providers in turn, check their results, and measure the memory that they keep."""
        functions = {OURS: self.ours, REFERENCE: self.reference}
        # compiling takes most of the time of a quick run, so a quick run compiles only the forward pass of EM routing
        if COMPILED in self.timed and (level == "full" or (level == "quick" and not self.bytes)):
            torch._dynamo.reset()  # otherwise it would compile for dynamic shapes
            functions[COMPILED] = torch.compile(self.reference)
        calls, rows = {}, {}
        for provider, mode in itertools.product(functions, self.modes):
            if provider in self.timed and (provider, mode, level) != (COMPILED, "step", "quick"):
                call = self.call(functions[provider], self.tensors, self.data, mode, torch.float32)
                rows[provider, mode], calls[provider, mode] = self._row(provider, mode), call
        self._check(calls, rows)
        if IS_GPU:
            self._add_graphs(calls, rows)
        for rival, mode in itertools.product(self.rivals, self.modes):
            rows[rival.name, mode] = self._row(rival.name, mode)
            calls[rival.name, mode] = self.call(rival.function, rival.tensors, rival.data, mode, torch.float32)
        self._count(calls, rows, functions)
        alive = {key: call for key, call in calls.items() if not rows[key].get("failed")}
        with threads(self.threads):
            _add_times(rows, interleaved({**alive, **ROOFS}, EFFORTS[level], repeats))
        return list(rows.values())

    def _add_graphs(self, calls: dict, rows: dict[Any, Row]) -> None:
        """Add our calls as replays of a CUDA graph. If a call cannot be captured, its row contains the reason."""
        for mode in self.modes:
            if (OURS, mode) in calls and not rows[OURS, mode].get("failed"):
                rows[GRAPH, mode] = self._row(GRAPH, mode)
                try:
                    calls[GRAPH, mode] = graphed(calls[OURS, mode])
                except Exception as failure:
                    rows[GRAPH, mode]["failed"] = _sentence(failure)

    def _row(self, provider: str, mode: str) -> Row:
        known = {"subject": self.subject, "case": self.name, "mode": mode, "provider": provider, "images": self.images}
        series = {"group": self.group, "x": self.x, "votes": self.votes}
        return known | {key: value for key, value in series.items() if value is not None}

    def call(
        self, function: Function, tensors: Callable[[], list[Tensor]], data: int, mode: str, dtype: torch.dtype
    ) -> Callable[[], list[Tensor]]:
        """A function that returns the outputs, and in a step also the gradients."""
        inputs = [x.to(DEVICE, dtype if x.is_floating_point() else None) for x in tensors()]
        if mode == "forward":
            return lambda: _without_gradient(function, inputs)
        wanted = [x for i, x in enumerate(inputs) if x.is_floating_point() and (self.data_gradient or i >= data)]
        for x in wanted:
            x.requires_grad_()
        cotangents: list[Tensor] = []

        def step() -> list[Tensor]:
            outputs = list(function(*inputs))
            if not cotangents:
                cotangents.extend(_cotangent(x) for x in outputs)
            gradients = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
            return [*outputs, *(x for x in gradients if x is not None)]

        return step

    def _check(self, calls: dict, rows: dict[Any, Row]) -> None:
        """The error of a provider may be twice that of plain torch in float32, plus a floor. Nothing is compared if the
        reference in float64 does not fit into memory."""
        try:
            exact, errors = self._results(torch.float64), {}
        except torch.OutOfMemoryError:
            exact, errors = [], {}
        for key, call in calls.items():
            try:
                errors[key] = error(call(), exact)
            except Exception as failure:  # torch.compile needs a C++ compiler, memory, and more
                rows[key]["failed"] = _sentence(failure)
        if not exact:
            return
        floor = FLOOR * torch.finfo(torch.float32).eps
        plain = errors.get((REFERENCE, self.modes[-1]))
        if plain is None:  # it is slow, so compute it only if it is needed
            plain = error(self._results(torch.float32), exact) if max(errors.values(), default=0) > floor else 0.0
        allowed = 2 * plain + floor
        for key, wrong in errors.items():
            rows[key] |= {"error": wrong, "allowed_error": allowed}
            if not wrong <= allowed:
                rows[key]["failed"] = f"its error of {wrong:.1e} is above {allowed:.1e}"

    def _results(self, dtype: torch.dtype) -> list[Tensor]:
        return [x.detach() for x in self.call(self.reference, self.tensors, self.data, self.modes[-1], dtype)()]

    def _count(self, calls: dict, rows: dict[Any, Row], functions: dict[str, Function]) -> None:
        """Count operations if all of them have a formula, bytes that must be moved, and bytes kept for backward."""
        for (provider, mode), row in rows.items():
            limited_by_memory = self.bytes is not None and provider in functions
            if provider not in (REFERENCE, COMPILED) and not limited_by_memory and not row.get("failed"):
                row["flops"] = flops(calls[provider, mode])
            if self.bytes is not None and mode == "forward" and provider in functions:
                row["bytes"] = self.bytes
            if mode == "step" and provider in (OURS, REFERENCE):
                with suppress(torch.OutOfMemoryError):
                    row["kept_mib"] = kept_bytes(functions[provider], self.tensors(), self.data) / self.images / MIB


def _sentence(failure: Exception) -> str:
    return " ".join(str(failure).split())[:200] or type(failure).__name__


def graphed(call: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """The same launches, replayed as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and allocate everything before the capture
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()

    def replay() -> list[Tensor]:
        graph.replay()
        return outputs

    return replay


def _without_gradient(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return list(function(*inputs))


def _cotangent(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(x.numel())
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype)


def error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest error of any result, relative to the largest number in its tensor; nan counts as infinite."""
    worst = 0.0
    for result, expected in zip(results, exact, strict=False):  # a forward pass has no gradients
        if expected.numel():
            scale = float(expected.abs().max()) or 1.0
            difference = (result.detach().double() - expected).abs().nan_to_num(nan=float("inf"))
            worst = max(worst, float(difference.max()) / scale)
    return worst


def interleaved(calls: dict, effort: Effort, repeats: int | None = None) -> dict[Any, list[float]]:
    """Seconds of each call in every round. A round calls all in turn, so that a noisy machine affects all equally.

    The order changes from round to round, because the state of the caches depends on the previous call. A short call is
    made twice, and the second one counts, as in a loop. All calls have been made before, to compile kernels.
    """
    taken: dict[Any, list[float]] = {key: [] for key in calls}
    gc.collect()
    gc.freeze()  # exclude existing objects, such as those of torch.compile, from later collections
    order, shuffle = list(calls), random.Random(0).shuffle
    start, rounds = time.perf_counter(), 0
    while rounds < (repeats or effort.least) or (
        not repeats and rounds < effort.most and time.perf_counter() - start < effort.seconds
    ):
        shuffle(order)
        for key in order:
            time_of_call = seconds(calls[key])
            taken[key].append(time_of_call if time_of_call > SHORT else seconds(calls[key]))
        rounds += 1
    return taken


def seconds(call: Callable[[], object]) -> float:
    """The time of a call. On a GPU, it is measured by events, with cold caches."""
    if IS_GPU:
        return _seconds_on_gpu(call)
    start = time.perf_counter()
    result = call()
    taken = time.perf_counter() - start
    del result  # do not measure the time to free it
    return taken


def _seconds_on_gpu(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _target.zero_()  # 256 MiB, more than any L2 cache
    torch.cuda.synchronize()
    start.record()
    result = call()
    end.record()
    end.synchronize()
    del result
    return start.elapsed_time(end) / 1e3


def _add_times(rows: dict[Any, Row], taken: dict[Any, list[float]]) -> None:
    """Add percentiles, rates as fractions of the roofs, and ratios to our own time, computed in each round."""
    roofs = {name: amount / statistics.median(taken[name]) for name, amount in ROOF_AMOUNTS.items()}
    for key, row in rows.items():
        if key not in taken:
            continue
        times = taken[key]
        p20, p50, p80 = percentiles(times)
        row |= {"p20_ms": p20 * 1e3, "p50_ms": p50 * 1e3, "p80_ms": p80 * 1e3}
        row |= {"times_ms": [round(t * 1e3, 6) for t in times], "images_per_s": row["images"] / p50}
        row |= {"sgemm_gflops": roofs["sgemm"] / 1e9, f"{MEMORY}_gbs": roofs[MEMORY] / 1e9}
        if row.get("flops"):
            row |= {"gflops": row["flops"] / p50 / 1e9, "of_sgemm": row["flops"] / p50 / roofs["sgemm"]}
        if row.get("bytes"):
            row |= {"gbs": row["bytes"] / p50 / 1e9, f"of_{MEMORY}": row["bytes"] / p50 / roofs[MEMORY]}
        if row.get("group"):
            row["ns_per_vote"] = p50 / row["votes"] * 1e9
        own = taken.get((OURS, row["mode"]))
        if own and row["provider"] != OURS:
            low, middle, high = percentiles([t / o for t, o in zip(times, own, strict=True)])
            row |= {"times_ours_p20": low, "times_ours": middle, "times_ours_p80": high}


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p20, p50 and p80, interpolated."""
    low, middle, high = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double())
    return float(low), float(middle), float(high)


# The roofs, which are upper limits of a rate: cuBLAS and memset on a GPU, torch's matrix product and a copy on a CPU.
MEMORY = "memset" if IS_GPU else "copy"
_SIDE, _NUMBERS = (4096, 2**26) if IS_GPU else (1024, 2**23)
_a, _b = torch.randn(2, _SIDE, _SIDE, device=DEVICE)
_source = torch.ones(_NUMBERS, device=DEVICE)
_target = torch.empty_like(_source)
ROOFS: dict[Any, Callable[[], object]] = {
    "sgemm": lambda: _a @ _b,
    MEMORY: _target.zero_ if IS_GPU else lambda: _target.copy_(_source),
}
ROOF_AMOUNTS = {"sgemm": 2 * _SIDE**3, MEMORY: _target.nbytes if IS_GPU else 2 * _target.nbytes}
SHORT = 0.1  # seconds


def flops(call: Callable[[], object]) -> int:
    """Floating-point operations of matrix products, convolutions and our kernels; a multiply-add is two."""
    with _Operations() as counter:
        call()
    return counter.total


class _Operations(TorchDispatchMode):
    """FlopCounterMode without its hooks in modules, which do not work with autograd.grad."""

    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        formula = flop_registry.get(function.overloadpacket)
        if formula:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def kept_bytes(function: Function, tensors: Sequence[Tensor], data: int) -> int:
    """Bytes that autograd keeps for the backward pass in float32, including inputs, without parameters and tables."""
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point():
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = [x.to(DEVICE, torch.float32).requires_grad_() if x.is_floating_point() else x.to(DEVICE) for x in tensors]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = function(*inputs)
    for parameter in inputs[data:]:
        seen.pop(parameter.untyped_storage().data_ptr(), None)
    del outputs
    return sum(seen.values())


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """A context in which torch uses ``count`` threads; None: no change."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def convolution(images: int, size: Sequence[int], channels: tuple[int, int], kernel: int = 1, stride: int = 1) -> Rival:
    """nn.Conv2d without bias, of 8 B to 8 C channels for B child types and C parent types: 64 multiply-adds for each
    vote, as many as the vote itself needs."""
    generator = torch.Generator().manual_seed(0)

    def tensors() -> list[Tensor]:
        shapes = ((images, channels[0], *size), (channels[1], channels[0], kernel, kernel))
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    return Rival(CONV, lambda x, weight: [F.conv2d(x, weight, stride=stride)], tensors)


def profile(case: Case, file: Path, profiler: str) -> None:
    """Profile three of our steps with torch's profiler or Triton's."""
    call = case.call(case.ours, case.tensors, case.data, case.modes[-1], torch.float32)
    call()
    with {"torch": _torch_trace, "proton": _proton_tree}[profiler](file):
        for _ in range(3):
            call()


@contextmanager
def _torch_trace(file: Path) -> Iterator[None]:
    """Write ``file``.trace.json, for chrome://tracing or Perfetto."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        yield
    profiler.export_chrome_trace(f"{file}.trace.json")


@contextmanager
def _proton_tree(file: Path) -> Iterator[None]:
    """Write ``file``.hatchet, for `proton-viewer -m tflop/s,gbyte/s`: launches with their operations and bytes."""
    import triton.profiler as proton

    session = proton.start(str(file), hook="triton")
    yield
    proton.finalize(session)


def reset_resident_peak() -> int:
    """Reset the peak of the resident size, if the system supports it, and return the current size."""
    if not CLEAR.exists():
        return resident_peak()
    CLEAR.write_text("5")
    return _resident("VmRSS")


def resident_peak() -> int:
    """The peak of the resident size since the last reset, in bytes."""
    return _resident("VmHWM") if STATUS.exists() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident(field: str) -> int:
    line = next(x for x in STATUS.read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def header(level: str) -> Row:
    """The machine, the versions and the commit. The load shows whether other programs were running."""
    versions = {name: _version(name) for name in ("torch", "triton", "numba", "numpy", "einops")}
    return {
        "header": True,
        "level": level,
        "device": DEVICE.type.upper().replace("CUDA", "GPU"),
        "name": torch.cuda.get_device_name() if DEVICE.type == "cuda" else processor(),
        "clock_mhz": clock(),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "dtype": "float32",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version},
        "tritoncaps": tritoncaps.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _version(package: str) -> str | None:
    module = sys.modules.get(package)
    return getattr(module, "__version__", None) if module else _installed(package)


def _installed(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def clock() -> float | None:
    """The clock in MHz: the maximum of a GPU, the current one of a CPU."""
    if DEVICE.type == "cuda":
        return getattr(torch.cuda.get_device_properties(DEVICE), "clock_rate", 0) / 1e3 or None
    text = _cpuinfo("cpu MHz")
    return float(text) if text else None


def _cpuinfo(field: str) -> str | None:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith(field)), None)


def commit() -> str:
    """The commit of the measured library."""
    folder = Path(tritoncaps.__file__).resolve().parents[1]
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
