"""The kernels that the first training step of MatrixCapsNet.small compiles on a GPU, with an empty cache. The program
needs no GPU: it compiles the kernels for a GPU and does not run them.

    python bench/first_gpu_call.py [--capability 90] [--batch 8]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from functools import wraps
from types import SimpleNamespace
from typing import Any

os.environ["TRITONCAPS_TRITON_ON_CPU"] = "1"  # use Triton's kernels for CPU tensors, too
os.environ.pop("TRITON_INTERPRET", None)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--capability", type=int, default=90, help="compute capability of the NVIDIA GPU: 80, 90 or 100"
    )
    parser.add_argument("--batch", type=int, default=8, help="images of the step")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        print("seconds of each kernel; some are compiled at the same time")
        for name, (kernels, seconds, cpu) in first_step(options.capability, options.batch).items():
            print(f"{name}: {kernels} kernels, {seconds:.1f} s, {cpu:.1f} s of CPU")


def first_step(capability: int, batch: int) -> dict[str, tuple[int, float, float]]:
    """Number of kernels, seconds and CPU seconds of the forward pass and of the whole step."""
    import torch

    from tritoncaps import functional
    from tritoncaps.models import MatrixCapsNet

    torch.use_deterministic_algorithms(True)  # fills empty tensors with nan: a layer refuses negative activations
    compiled = compile_only(capability)
    network = MatrixCapsNet.small(2, 5, backend="triton")
    start, cpu = time.perf_counter(), sum(os.times()[:4])

    def spent() -> tuple[int, float, float]:
        return len(compiled), time.perf_counter() - start, sum(os.times()[:4]) - cpu

    capsules = network(torch.randn(batch, 2, 32, 32))
    forward = spent()
    functional.spread_loss(capsules.activations, torch.arange(batch) % 5, 0.5).backward()
    return {"forward": forward, "step": spent()}


def compile_only(capability: int) -> list[str]:
    """Make launches compile kernels without running them. The returned list gets the name of each compiled kernel."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    gpu = {
        "get_current_target": lambda: GPUTarget("cuda", capability, 32),
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device=None: 0,
        "get_active_torch_device": lambda: torch.device("cpu"),
    }
    driver.set_active(SimpleNamespace(**gpu))
    compiled: list[str] = []
    run, compile_kernel = JITFunction.run, JITFunction._do_compile

    def compile_timed(kernel: Any, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = compile_kernel(kernel, *arguments, **options)
        compiled.append(kernel.fn.__name__)
        print(f"    {compiled[-1]:30} {time.perf_counter() - start:6.2f} s", flush=True)
        return result

    @wraps(run)
    def compile_kernel_only(kernel: Any, *arguments: Any, **options: Any) -> Any:
        return run(kernel, *arguments, **{**options, "warmup": True})

    JITFunction._do_compile = compile_timed
    JITFunction.run = compile_kernel_only
    CompiledKernel.__getitem__ = lambda kernel, grid: lambda *arguments, **options: None
    return compiled


if __name__ == "__main__":
    main()
