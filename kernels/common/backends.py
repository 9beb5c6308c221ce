"""The table of backends, and the choice of a backend: by the user, or by the device of the tensors.

reference   any device      einops; stores votes; the definition
cpu         CPU             kernels/*/cpu, compiled by Numba
triton      CUDA and ROCm   kernels/*/triton; on CPU tensors under TRITON_INTERPRET=1
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tritoncaps.kernels.common.packages import MissingPackageError
from tritoncaps.kernels.common.tracing import constant


@dataclass(frozen=True)
class Backend:
    """A set of kernels. The kernels of an algorithm are in the package `kernels.<algorithm>.<name>`."""

    name: str
    package: str  # the Python package that compiles the kernels
    oldest: tuple[int, int]  # oldest version of the package that compiles them correctly
    devices: tuple[str, ...]  # types of devices that select this backend

    def kernels(self, algorithm: str) -> Any:
        """The backend object of an algorithm, imported at its first use."""
        return _kernels(algorithm, self.name)

    def surroundings(self, tensor: torch.Tensor) -> AbstractContextManager[Any]:
        """The context manager for all kernels that compute with ``tensor``."""
        return _surroundings(self.name)(tensor)


CPU = Backend("cpu", "numba", (0, 61), ("cpu", "meta"))
TRITON = Backend("triton", "triton", (3, 4), ("cuda",))
BACKENDS = {backend.name: backend for backend in (CPU, TRITON)}
NAMES = ("reference", *BACKENDS)

_requested: str | None = None


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Context manager: calls inside it use the backend ``name``, unless they have their own ``backend=``.

    It applies to all threads of the process: `nn.DataParallel` starts its own threads, autograd may run the backward
    pass in another thread, and `torch.compile` guards on the backend as a global. If threads need different backends,
    pass ``backend=`` to the layers.

    Args:
        name: "reference", "cpu" or "triton"; None: the device of the tensors selects it.

    Returns:
        A context manager.

    Raises:
        ValueError: if there is no such backend.

    Example:
        >>> import torch, tritoncaps
        >>> layer = tritoncaps.ClassCaps(2, 3)
        >>> with tritoncaps.use_backend("reference"):
        ...     parents = layer(tritoncaps.Capsules(torch.randn(1, 2, 4, 4, 4), torch.rand(1, 2, 4)))
    """
    global _requested
    before, _requested = _requested, check_name(name)
    try:
        yield
    finally:
        _requested = before


def check_name(name: str | None) -> str | None:
    if name is not None and name not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(map(repr, NAMES))} or None, but it is {name!r}")
    return name


def choose(name: str | None, device: torch.device, triton_refuses: str = "") -> str:
    """The backend for tensors on ``device``: the requested one, which must work there, or the fastest that does.
    ``triton_refuses`` is the reason why Triton's kernels cannot compute with these tensors, or empty."""
    name = check_name(name) or _requested
    if torch.onnx.is_in_onnx_export() or torch.jit.is_tracing():
        return "reference"  # it consists of operators that ONNX and TorchScript support
    if name is None:
        return _automatic(device.type, triton_refuses)
    check_installed(name)
    if name == CPU.name and device.type not in CPU.devices:
        raise RuntimeError(f"backend 'cpu' needs CPU tensors, but they are on {device}")
    if name == TRITON.name and triton_refuses:
        raise ValueError(triton_refuses)
    if name == TRITON.name and device.type not in ("cuda", "meta") and not triton_runs_on_cpu():
        raise RuntimeError(
            f"backend 'triton' needs a GPU, or TRITON_INTERPRET=1 in the environment before Triton is imported, "
            f"but the tensors are on {device}"
        )
    return name


def check_installed(name: str | None) -> None:
    """Raise MissingPackageError if the package that compiles the kernels of a backend is missing."""
    missing = _missing(name) if name in BACKENDS else ""
    if missing:
        raise MissingPackageError(f"backend {name!r} cannot be used: {missing}")


def kernels(algorithm: str, name: str) -> Any:
    """The backend object of an algorithm: `kernels("mixture", "cpu")`."""
    return BACKENDS[name].kernels(algorithm)


def triton_runs_on_cpu() -> bool:
    """True under Triton's interpreter, or if an emulator replaces Triton's launches."""
    return os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("TRITONCAPS_TRITON_ON_CPU") == "1"


def _automatic(device_type: str, triton_refuses: str) -> str:
    found = [backend for backend in BACKENDS.values() if device_type in backend.devices]
    if not found:
        _fall_back(f"no kernels for {device_type} devices")
        return "reference"
    wanted = found[0]
    missing = _missing(wanted.name) or (triton_refuses if wanted.name == TRITON.name else "")
    if missing:
        _fall_back(missing)
        return "reference"
    return wanted.name


@constant
def _missing(name: str) -> str:
    """Why the backend cannot be used, or an empty string."""
    package, oldest = BACKENDS[name].package, BACKENDS[name].oldest
    if not importlib.util.find_spec(package):
        return f"the package {package} is not installed: pip install {package}"
    found = _version(package)
    if found and found < oldest:
        return f"its kernels need {package} {_text(oldest)} or newer, but {_text(found)} is installed"
    return ""


def _version(package: str) -> tuple[int, ...]:
    """The first two numbers of the installed version; empty if they are unknown, such as for a local build."""
    for distribution in (package, f"pytorch-{package}", f"pytorch-{package}-rocm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            numbers = re.match(r"(\d+)\.(\d+)", importlib.metadata.version(distribution))
            return tuple(map(int, numbers.groups())) if numbers else ()
    return ()


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@constant
def _fall_back(reason: str) -> None:
    """Warn, once for each reason."""
    warnings.warn(f"tritoncaps uses its slow reference backend, which stores votes: {reason}", stacklevel=4)


@cache
def _kernels(algorithm: str, name: str) -> Any:
    return importlib.import_module(f"tritoncaps.kernels.{algorithm}.{name}")


@cache
def _surroundings(name: str) -> Any:
    return importlib.import_module(f"tritoncaps.kernels.common.{name}.surroundings").surroundings
