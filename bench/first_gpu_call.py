"""The kernels that the first training step of MatrixCapsNet.small compiles on a GPU, with an empty cache. The program
needs no GPU: it compiles the kernels for a GPU and does not run them.

    python bench/first_gpu_call.py [--capability 90] [--batch 8]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
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
        for name, spent in first_step(options.capability, options.batch).items():
            seconds, cpu = sum(x[1] for x in spent), sum(x[2] for x in spent)
            print(f"{name}: {len(spent)} kernels, {seconds:.1f} s, {cpu:.1f} s of CPU")


def first_step(capability: int, batch: int) -> dict[str, list[tuple[str, float, float]]]:
    """Name, seconds and CPU seconds of each kernel that the forward pass and the whole step compile."""
    import torch

    from tritoncaps import functional
    from tritoncaps.models import MatrixCapsNet

    torch.use_deterministic_algorithms(True)  # fills empty tensors with nan: a layer refuses negative activations
    compiled = compile_only(capability)
    network = MatrixCapsNet.small(2, 5, backend="triton")
    capsules = network(torch.randn(batch, 2, 32, 32))
    forward = list(compiled)
    functional.spread_loss(capsules.activations, torch.arange(batch) % 5, 0.5).backward()
    return {"forward": forward, "step": compiled}


def compile_only(capability: int) -> list[tuple[str, float, float]]:
    """Make launches compile kernels without running them. The returned list gets an entry for each compiled kernel."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    gpu = {
        "get_current_target": lambda: GPUTarget("cuda", capability, 32),
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device=None: 0,
        "get_active_torch_device": lambda: torch.device("cpu"),
    }
    driver.set_active(SimpleNamespace(**gpu))
    compiled: list[tuple[str, float, float]] = []
    run, compile_kernel = JITFunction.run, JITFunction._do_compile

    def compile_timed(kernel: Any, *arguments: Any, **options: Any) -> Any:
        start, cpu = time.perf_counter(), sum(os.times()[:4])
        result = compile_kernel(kernel, *arguments, **options)
        compiled.append((kernel.fn.__name__, time.perf_counter() - start, sum(os.times()[:4]) - cpu))
        name, seconds, cpu_seconds = compiled[-1]
        print(f"    {name:30} {seconds:6.2f} s {cpu_seconds:6.2f} s of CPU", flush=True)
        return result

    JITFunction._do_compile = compile_timed
    JITFunction.run = lambda kernel, *args, **options: run(kernel, *args, **{**options, "warmup": True})
    return compiled


if __name__ == "__main__":
    main()
