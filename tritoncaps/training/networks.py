"""The networks by name. To add one, add an entry: how it is built for some images, and the loss it was made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from tritoncaps import EMRouting
from tritoncaps.models import CapsNet, MatrixCapsNet, TinyCapsNet, baselines

COMPETITIONS = ("global", "local")
EM_NETWORKS = ("matrix-capsnet-small", "matrix-capsnet", "tiny-capsnet")


class Task(NamedTuple):
    """What a network is for: the data set's name, the images that it gets and the classes that it tells apart."""

    data: str
    channels: int
    height: int
    width: int
    classes: int


class Options(NamedTuple):
    """How a network is built. Networks with EM routing use all of it, others the iterations and the backend."""

    routing: EMRouting = EMRouting()
    backend: str | None = None
    norm: bool | None = None
    dropout: float = 0.0
    primary_bias: float = 0.0


class Network(NamedTuple):
    """``standardise``: it wants mean 0 and variance 1."""

    build: Callable[[Task, Options], nn.Module]
    loss: str
    standardise: bool
    description: str


def _matrix_capsnet(task: Task, options: Options) -> nn.Module:
    channels = (256 if task.data == "cifar10" else 32, 32, 32, 32)
    return MatrixCapsNet(task.channels, task.classes, channels, **_of_matrix_capsnet(options))


def _small_matrix_capsnet(task: Task, options: Options) -> nn.Module:
    return MatrixCapsNet.small(task.channels, task.classes, **_of_matrix_capsnet(options))


def _of_matrix_capsnet(options: Options) -> dict[str, Any]:
    return {**options._asdict(), "norm": bool(options.norm)}


def _tiny_capsnet(task: Task, options: Options) -> nn.Module:
    norm = options.norm is not False
    return TinyCapsNet(
        task.channels,
        task.classes,
        _square(task),
        routing=options.routing,
        norm=norm,
        dropout=options.dropout,
        backend=options.backend,
    )


def _capsnet(task: Task, options: Options) -> nn.Module:
    side, iterations, backend = _square(task), options.routing.iterations, options.backend
    if task.data == "cifar10":
        return CapsNet.cifar10(backend=backend)
    if task.data == "svhn":
        return CapsNet.svhn(iterations=iterations, backend=backend)
    return CapsNet(task.channels, task.classes, side, iterations, backend=backend)


def _baseline(kind: Callable[..., nn.Module]) -> Callable[[Task, Options], nn.Module]:
    return lambda task, options: kind(task.channels, task.classes, _square(task))


def _linear(task: Task, options: Options) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(task.channels * task.height * task.width, task.classes))


def _square(task: Task) -> int:
    if task.height != task.width:
        raise ValueError(f"this network needs square images, but they are {task.height}x{task.width}")
    return task.height


NETWORKS: dict[str, Network] = {
    "matrix-capsnet-small": Network(_small_matrix_capsnet, "spread", True, "EM routing, A=64 B=8 C=D=16"),
    "matrix-capsnet": Network(_matrix_capsnet, "spread", True, "EM routing, A=B=C=D=32"),
    "tiny-capsnet": Network(_tiny_capsnet, "logit-cross-entropy", True, "EM routing, one routed layer, batch norm"),
    "capsnet": Network(_capsnet, "margin", False, "dynamic routing, with a decoder"),
    "cnn-smallnorb": Network(_baseline(baselines.SmallNORBBaseline), "cross-entropy", True, "baseline, Hinton 2018"),
    "cnn-mnist": Network(_baseline(baselines.MNISTBaseline), "cross-entropy", True, "baseline, Sabour 2017"),
    "cnn-multimnist": Network(_baseline(baselines.MultiMNISTBaseline), "cross-entropy", True, "baseline, Sabour 2017"),
    "linear": Network(_linear, "cross-entropy", True, "a linear classifier of the pixels"),
}


def build(
    name: str, task: Task, iterations: int = 3, backend: str | None = None, options: Options | None = None
) -> nn.Module:
    """``options`` override ``iterations`` and ``backend``."""
    if name not in NETWORKS:
        raise ValueError(f"model must be one of {', '.join(NETWORKS)}, but it is {name!r}")
    return NETWORKS[name].build(task, options or Options(EMRouting(iterations), backend))
