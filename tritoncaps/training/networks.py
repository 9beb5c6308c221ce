"""The table of networks by name. An entry has the function that builds a network for a task, and its default loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from tritoncaps.models import CapsNet, EfficientCapsNet, MatrixCapsNet, TinyCapsNet, baselines

MATRIX_CAPSNETS = ("matrix-capsnet-small", "matrix-capsnet")
EM_NETWORKS = (*MATRIX_CAPSNETS, "tiny-capsnet")


class Task(NamedTuple):
    """The task of a network.

    Attributes:
        data: name of the data set.
        channels: channels of an image.
        height: rows of an image.
        width: columns of an image.
        classes: number of classes.
    """

    data: str
    channels: int
    height: int
    width: int
    classes: int


class Network(NamedTuple):
    """An entry of the table of networks.

    Attributes:
        build: function of a task, the number of iterations and a backend that returns the network. For the networks of
            ``EM_NETWORKS``, it has more options as keyword arguments.
        loss: name of the default loss.
        standardise: whether the images must have mean 0 and variance 1.
        description: a few words about the network.
    """

    build: Callable[..., nn.Module]
    loss: str
    standardise: bool
    description: str


def _matrix_capsnet(task: Task, iterations: int, backend: str | None, **options: Any) -> nn.Module:
    channels = (256 if task.data == "cifar10" else 32, 32, 32, 32)
    return MatrixCapsNet(task.channels, task.classes, channels, iterations, backend=backend, **options)


def _small_matrix_capsnet(task: Task, iterations: int, backend: str | None, **options: Any) -> nn.Module:
    return MatrixCapsNet.small(task.channels, task.classes, iterations, backend=backend, **options)


def _tiny_capsnet(task: Task, iterations: int, backend: str | None, **options: Any) -> nn.Module:
    return TinyCapsNet(task.channels, task.classes, _square(task), iterations=iterations, backend=backend, **options)


def _capsnet(task: Task, iterations: int, backend: str | None) -> nn.Module:
    side = _square(task)
    if task.data == "cifar10":
        return CapsNet.cifar10(iterations, backend=backend)
    if task.data == "svhn":
        return CapsNet.svhn(iterations=iterations, backend=backend)
    return CapsNet(task.channels, task.classes, side, iterations, backend=backend)


def _efficient_capsnet(task: Task, iterations: int, backend: str | None) -> nn.Module:
    return EfficientCapsNet(task.channels, task.classes, _square(task), backend=backend)


def _baseline(kind: Callable[..., nn.Module]) -> Callable[[Task, int, str | None], nn.Module]:
    return lambda task, iterations, backend: kind(task.channels, task.classes, _square(task))


def _linear(task: Task, iterations: int, backend: str | None) -> nn.Module:
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
    "efficient-capsnet": Network(_efficient_capsnet, "margin", True, "self-attention routing, Mazzia et al. 2021"),
    "cnn-smallnorb": Network(_baseline(baselines.SmallNORBBaseline), "cross-entropy", True, "baseline, Hinton 2018"),
    "cnn-mnist": Network(_baseline(baselines.MNISTBaseline), "cross-entropy", True, "baseline, Sabour 2017"),
    "cnn-multimnist": Network(_baseline(baselines.MultiMNISTBaseline), "cross-entropy", True, "baseline, Sabour 2017"),
    "linear": Network(_linear, "cross-entropy", True, "a linear classifier of the pixels"),
}
"""The networks for `tritoncaps train --model`, by name."""


def build(name: str, task: Task, iterations: int = 3, backend: str | None = None, **options: Any) -> nn.Module:
    """Build a network of the table by its name.

    Args:
        name: a key of ``NETWORKS``.
        task: the images and the number of classes.
        iterations: number of routing iterations; baselines ignore it.
        backend: the ``backend`` of its layers; baselines ignore it.
        **options: ``routing``, ``norm``, ``dropout`` and ``primary_bias``, only for networks of ``EM_NETWORKS``;
            ``vote_bias``, only for matrix-capsnet and matrix-capsnet-small.

    Returns:
        The network.

    Raises:
        ValueError: if there is no network of this name.

    Example:
        >>> from tritoncaps.training import Task, build
        >>> network = build("tiny-capsnet", Task("toynorb", channels=2, height=32, width=32, classes=5), iterations=2)
        >>> type(network).__name__
        'TinyCapsNet'
    """
    if name not in NETWORKS:
        raise ValueError(f"model must be one of {', '.join(NETWORKS)}, but it is {name!r}")
    return NETWORKS[name].build(task, iterations, backend, **options)
