"""Compare a layer of another capsule repository with ours: time and memory of a training step on this machine.

git clone https://github.com/XifengGuo/CapsNet-Pytorch /somewhere/CapsNet-Pytorch
python bench/peers.py --repo /somewhere/CapsNet-Pytorch --adapter xifengguo
python bench/peers.py --repo FOLDER --adapter yl-1993 --types 8 16 --images 4

The program imports the other layer from your clone; this file contains none of its code. If that code calls `.cuda()`
and there is no GPU, it gets CPU tensors. Both layers have the same sizes and iterations; docs/migrating.md describes
where their algorithms differ. Times are the smallest of all rounds. Memory is the peak of a step above the memory
before it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from harness import DEVICE, MIB, processor, reset_resident_peak, resident_peak
from torch import Tensor

from tritoncaps import Capsules, ConvCaps2d, DynamicRouting, EMRouting, VBRouting, VectorCaps

Step = Callable[[], object]  # forward and backward
SIDE, KERNEL, STRIDE, ITERATIONS = 14, 3, 2, 3  # the first routed layer of the papers' networks
PARENTS = (SIDE - KERNEL) // STRIDE + 1
CHILDREN, CHILD_DIM, CLASSES, CLASS_DIM = 1152, 8, 10, 16  # the class capsules of CapsNet


@dataclass(frozen=True)
class Sizes:
    images: int
    in_caps: int
    out_caps: int
    children: int = CHILDREN  # for fully connected layers


@dataclass(frozen=True)
class Adapter:
    """A repository: the files with its layer, the name of the layer, and functions that make a step of each layer."""

    repository: str
    files: tuple[str, ...]
    layer: str
    theirs: Callable[[list[ModuleType], Sizes], Step]
    ours: Callable[[Sizes], Step]


def backward(*outputs: Tensor) -> None:
    sum(x.sum() for x in outputs).backward()  # type: ignore[union-attr]


def poses(sizes: Sizes, *axes: int) -> Tensor:
    """Random poses of matrix capsules: [N, in_caps, H, W, 4, 4] with its axes permuted."""
    drawn = torch.randn(sizes.images, sizes.in_caps, SIDE, SIDE, 4, 4, device=DEVICE)
    return drawn.permute(axes).contiguous().requires_grad_() if axes else drawn.requires_grad_()


def activations(sizes: Sizes) -> Tensor:
    return torch.rand(sizes.images, sizes.in_caps, SIDE, SIDE, device=DEVICE).requires_grad_()


def our_conv(routing: Any) -> Callable[[Sizes], Step]:
    def make(sizes: Sizes) -> Step:
        layer = ConvCaps2d(sizes.in_caps, sizes.out_caps, KERNEL, STRIDE, routing=routing, device=DEVICE)
        given = Capsules(poses(sizes), activations(sizes))
        return lambda: backward(*layer(given))

    return make


def our_dense(routing: DynamicRouting) -> Callable[[Sizes], Step]:
    def make(sizes: Sizes) -> Step:
        layer = VectorCaps(sizes.children, CHILD_DIM, CLASSES, CLASS_DIM, routing=routing, device=DEVICE)
        given = vectors(sizes)
        return lambda: backward(layer(given).poses)

    return make


def vectors(sizes: Sizes) -> Tensor:
    return torch.randn(sizes.images, sizes.children, CHILD_DIM, device=DEVICE).requires_grad_()


def xifengguo(modules: list[ModuleType], sizes: Sizes) -> Step:
    layer = modules[0].DenseCapsule(sizes.children, CHILD_DIM, CLASSES, CLASS_DIM, ITERATIONS).to(DEVICE)
    given = vectors(sizes)
    return lambda: backward(layer(given))


def gram_ai(modules: list[ModuleType], sizes: Sizes) -> Step:
    modules[0].Variable = lambda tensor: tensor  # the module defines the name only if it is run as a script
    layer = modules[0].CapsuleLayer(CLASSES, sizes.children, CHILD_DIM, CLASS_DIM, num_iterations=ITERATIONS).to(DEVICE)
    given = vectors(sizes)
    return lambda: backward(layer(given))


def yl_1993(modules: list[ModuleType], sizes: Sizes) -> Step:
    layer = modules[0].ConvCaps(sizes.in_caps, sizes.out_caps, KERNEL, 4, stride=STRIDE, iters=ITERATIONS).to(DEVICE)
    flat = poses(sizes, 0, 2, 3, 1, 4, 5).detach().flatten(3)  # [N, H, W, types * 16], then the activations
    given = torch.cat([flat, activations(sizes).detach().permute(0, 2, 3, 1)], dim=3).requires_grad_()
    return lambda: backward(layer(given))


def officium(modules: list[ModuleType], sizes: Sizes) -> Step:
    layer = modules[0].ConvCapsule(sizes.in_caps, sizes.out_caps, KERNEL, STRIDE, ITERATIONS).to(DEVICE)
    drawn, active = poses(sizes, 0, 1, 4, 5, 2, 3), activations(sizes)
    return lambda: backward(*layer(active.reshape(-1, 1, SIDE, SIDE), drawn.reshape(-1, 1, SIDE, SIDE)))


def fabio_deep(modules: list[ModuleType], sizes: Sizes) -> Step:
    if sizes.images < 2:
        sys.exit(f"bench: --images must be at least 2 for this repository's layer, but it is {sizes.images}")
    votes = modules[0].ConvCapsules2d(sizes.in_caps, sizes.out_caps, 4, KERNEL, STRIDE).to(DEVICE)
    prior = {"alpha0": 1.0, "m0": torch.zeros(16), "kappa0": 1.0, "Psi0": torch.eye(16), "nu0": 17}
    sides = (sizes.in_caps, sizes.out_caps, 4, KERNEL, STRIDE)
    routing = modules[1].VariationalBayesRouting2d(*sides, **prior, cov="diag", iter=ITERATIONS).to(DEVICE)
    drawn, active = poses(sizes, 0, 1, 4, 5, 2, 3), activations(sizes)
    return lambda: backward(*routing(*votes(active, drawn)))


EM = our_conv(EMRouting(ITERATIONS))
LOCAL_EM = our_conv(EMRouting(ITERATIONS, competition="local"))
MATRIX = "{0.in_caps} to {0.out_caps} types, 3x3, stride 2, 14x14"
VECTOR = "{0.children} capsules of 8 to 10 of 16"

ADAPTERS = {
    "xifengguo": Adapter(
        "XifengGuo/CapsNet-Pytorch",
        ("capsulelayers.py",),
        f"DenseCapsule, {VECTOR}",
        xifengguo,
        our_dense(DynamicRouting(ITERATIONS, gradient="last")),
    ),
    "gram-ai": Adapter(
        "gram-ai/capsule-networks",
        ("capsule_network.py",),
        f"CapsuleLayer, {VECTOR}",
        gram_ai,
        our_dense(DynamicRouting(ITERATIONS)),
    ),
    "yl-1993": Adapter(
        "yl-1993/Matrix-Capsules-EM-PyTorch", ("model/capsules.py",), f"ConvCaps, {MATRIX}", yl_1993, LOCAL_EM
    ),
    "officium": Adapter("Officium/Capsules", ("src/matrix_capsules.py",), f"ConvCapsule, {MATRIX}", officium, EM),
    "fabio-deep": Adapter(
        "fabio-deep/Variational-Capsule-Routing",
        ("src/layers.py", "src/vb_routing.py"),
        f"VariationalBayesRouting2d, {MATRIX}",
        fabio_deep,
        our_conv(VBRouting(ITERATIONS)),
    ),
}


def load(folder: Path, files: tuple[str, ...]) -> list[ModuleType]:
    """Import files of the clone. Missing packages for data and plots are replaced by mocks."""
    modules = []
    for file in files:
        path = folder / file
        if not path.is_file():
            raise FileNotFoundError(f"--repo {folder} must be a clone with the file {file}, but there is none")
        spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        unneeded = ("torchvision", "torchnet", "smallnorb_dataset", "PIL")
        missing = {name: mock.MagicMock() for name in unneeded if importlib.util.find_spec(name) is None}
        with mock.patch.dict(sys.modules, missing):
            spec.loader.exec_module(module)
        modules.append(module)
    return modules


@contextmanager
def as_it_was_written_for() -> Iterator[None]:
    """Change torch for old code: without a GPU, `.cuda()` returns CPU tensors; `torch.cholesky` exists."""
    with mock.patch.object(torch, "cholesky", torch.linalg.cholesky):
        if DEVICE.type == "cuda":
            yield
            return
        with (
            mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
            mock.patch.object(torch.cuda, "FloatTensor", torch.FloatTensor),
        ):
            yield


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak(step: Step) -> float:
    """Peak memory of a step in MiB, above the memory before it."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    before = reset_resident_peak()
    step()
    return (resident_peak() - before) / MIB


def steps_of(adapter: Adapter, folder: Path, sizes: Sizes) -> dict[str, Step]:
    torch.manual_seed(0)
    return {"theirs": adapter.theirs(load(folder, adapter.files), sizes), "ours": adapter.ours(sizes)}


def times(adapter: Adapter, folder: Path, sizes: Sizes, rounds: int) -> dict[str, float]:
    """The smallest time of a step of both layers, in ms."""
    found: dict[str, list[float]] = {"theirs": [], "ours": []}
    with as_it_was_written_for():
        steps = steps_of(adapter, folder, sizes)
        for step in steps.values():
            step()  # compiles
        for _ in range(rounds):
            for name, step in steps.items():
                found[name].append(seconds(step))
    return {name: min(taken) * 1e3 for name, taken in found.items()}


def print_peak(adapter: Adapter, folder: Path, sizes: Sizes, name: str) -> None:
    """Print the peak memory of a step, after a step of a tiny layer, which compiles and loads code."""
    with as_it_was_written_for():
        steps_of(adapter, folder, Sizes(2, 2, 2, children=2))[name]()
        print(peak(steps_of(adapter, folder, sizes)[name]))


def peaks() -> dict[str, float]:
    """The peak memory of both layers, each in its own process with the same arguments."""
    command = [sys.executable, *sys.argv, "--peak-of"]
    started = {
        name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in ("theirs", "ours")
    }
    return {name: float(process.communicate()[0]) for name, process in started.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, required=True, metavar="FOLDER", help="your clone of the repository")
    parser.add_argument("--adapter", choices=list(ADAPTERS), required=True, help="owner of the repository")
    parser.add_argument("--images", type=int, default=4, help="images of a batch [%(default)s]")
    types = "types of matrix capsules: children and parents [32 32]"
    parser.add_argument("--types", type=int, nargs=2, default=(32, 32), metavar=("B", "C"), help=types)
    parser.add_argument("--children", type=int, default=CHILDREN, help="children of vector capsules [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds [%(default)s]")
    parser.add_argument("--peak-of", choices=("theirs", "ours"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    adapter, sizes = ADAPTERS[args.adapter], Sizes(args.images, *args.types, args.children)
    try:
        if args.peak_of:
            print_peak(adapter, args.repo, sizes, args.peak_of)
            return
        found = times(adapter, args.repo, sizes, args.rounds)
    except FileNotFoundError as error:
        sys.exit(f"bench: {error}")
    load_average = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else processor()
    print(f"{adapter.repository}: {adapter.layer.format(sizes)}, {args.images} images, forward and backward")
    print(f"{where}, {torch.get_num_threads()} threads{load_average}, torch {torch.__version__}\n")
    held = peaks()
    print(f"{'':8}{'ms':>10}{'MiB':>10}")
    for name, ms in found.items():
        print(f"{name:8}{ms:10.1f}{held[name]:10.1f}")
    print(f"{'ratio':8}{found['theirs'] / found['ours']:10.1f}{held['theirs'] / max(held['ours'], 0.1):10.1f}")


if __name__ == "__main__":
    main()
