"""show versions, devices, backends and caches, and run a quick self-test

examples:
  tritoncaps doctor
  tritoncaps doctor --json
  tritoncaps doctor --gpu-report report.txt   test and time every kernel on the GPU; attach the file to a bug report
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import tritoncaps
from tritoncaps import Capsules, ClassCaps, ConvCaps2d, kernels
from tritoncaps.data import data_folder
from tritoncaps.extras import require
from tritoncaps.kernels.common import backends
from tritoncaps.training.config import ConfigError

PACKAGES = ("torch", "triton", "numba", "einops", "numpy", "tqdm", "matplotlib", "pillow", "tensorboard")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--gpu-report", metavar="FILE", help="test and time every kernel on the GPU; takes minutes")
    parser.add_argument("--device", help="device of that report [the first GPU, or the CPU if there is none]")


def run(args: argparse.Namespace) -> int:
    if args.gpu_report:
        return _gpu_report(Path(args.gpu_report), args.device)
    report: dict[str, Any] = {
        "tritoncaps": tritoncaps.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "threads": torch.get_num_threads(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "devices": [{"device": str(d), "name": n, "backend": _backend(d)} for d, n in _devices()],
        "caches": {"kernels": _kernel_cache(), "data": _data_cache()},
        "self-test": [_self_test(device) for device, _ in _devices()],
    }
    failed = [test for test in report["self-test"] if not test["passed"]]
    print(json.dumps(report) if args.json else _text(report))
    return 1 if failed else 0


def _gpu_report(path: Path, name: str | None) -> int:
    require("hypothesis", "doctor --gpu-report", "testing")
    from tritoncaps.cli.gpu_report import write_report

    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name} does not exist: torch finds no GPU")
    passed = write_report(path, device, _backend(device), {name: _version(name) for name in PACKAGES})
    print(f"{path}: " + ("every check passed" if passed else "some checks FAILED; the file lists them"))
    return 0 if passed else 1


def _devices() -> list[tuple[torch.device, str]]:
    gpus = [(torch.device("cuda", i), torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    return [(torch.device("cpu"), platform.processor() or platform.machine()), *gpus]


def _backend(device: torch.device) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return backends.choose(None, device)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernel_cache() -> dict[str, Any]:
    """The compiled CPU kernels on disk."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(kernels.__file__ or "").parent)
    files = list(folder.rglob("*.nbc"))
    return {"folder": str(folder), "files": len(files), "bytes": sum(f.stat().st_size for f in files)}


def _data_cache() -> dict[str, Any]:
    folder = data_folder()
    files = [f for f in folder.rglob("*") if f.is_file()] if folder.exists() else []
    return {"folder": str(folder), "files": len(files), "bytes": sum(f.stat().st_size for f in files)}


def _self_test(device: torch.device) -> dict[str, Any]:
    """Compare the forward and backward pass of two small layers with the reference in float64."""
    start = time.perf_counter()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(ConvCaps2d(3, 5, 3), ClassCaps(5, 4)).to(device)
    capsules = Capsules(torch.randn(2, 3, 5, 5, 4, 4, device=device), torch.rand(2, 3, 5, 5, device=device))
    try:
        own = _gradients(layers, capsules)
        with tritoncaps.use_backend("reference"):
            expected = _gradients(layers.double(), Capsules(*(x.double() for x in capsules)))
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(own, expected, strict=True))
    except Exception as failure:
        return {"device": str(device), "passed": False, "error": str(failure)}
    seconds = round(time.perf_counter() - start, 2)
    return {"device": str(device), "passed": error < 1e-3, "error": error, "seconds": seconds}


def _gradients(layers: torch.nn.Module, capsules: Capsules) -> list[torch.Tensor]:
    outputs = layers(capsules)
    gradients = torch.autograd.grad([x.square().sum() for x in outputs], list(layers.parameters()))
    return [x.detach().double() for x in (*outputs, *gradients)]


def _text(report: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items() if version)
    missing = ", ".join(name for name, version in report["packages"].items() if not version)
    lines = [
        f"tritoncaps {report['tritoncaps']}, Python {report['python']}, {report['system']}",
        f"packages: {packages}" + (f"; not installed: {missing}" if missing else ""),
        *(f"device {d['device']} ({d['name']}): backend {d['backend']}" for d in report["devices"]),
        f"threads: {report['threads']}; OMP_WAIT_POLICY={report['wait_policy'] or ''}",
        "  The command `tritoncaps` sets it to PASSIVE, so that torch's threads do not spin while they wait.",
        "  For your own programs, set it before torch is imported: otherwise they are slow on a busy machine.",
        *(
            f"cache of {name}: {c['files']} files, {c['bytes'] / 1e6:.1f} MB in {c['folder']}"
            for name, c in report["caches"].items()
        ),
    ]
    for test in report["self-test"]:
        if test["passed"]:
            lines.append(f"self-test on {test['device']}: passed in {test['seconds']} s, error {test['error']:.1e}")
        else:
            lines.append(f"self-test on {test['device']}: FAILED: {test['error']}")
    return "\n".join(lines)
