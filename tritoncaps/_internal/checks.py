"""Checks of arguments. An error message is one sentence: the argument, its value, the expected value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from tritoncaps.kernels.common.tracing import constant
from tritoncaps.routing_map import RoutingMap


class Form(NamedTuple):
    """The properties of a tensor that most checks need. Unlike a tensor, it can be compared and hashed."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def form(x: Tensor) -> Form:
    return Form(x.shape, x.dtype, x.device)


def once(check: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a check whose arguments can be hashed: it does not run again for arguments that have passed. Without
    it, the checks of a small layer would take longer than its kernels."""
    passed = lru_cache(maxsize=4096)(check)

    @wraps(check)
    def call(*arguments: Any) -> None:
        (check if traced() else passed)(*arguments)  # symbolic sizes cannot be hashed

    return call


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, but it is a {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, but it is {value.dtype}")


def check_tensors(**values: object) -> None:
    for name, value in values.items():
        check_tensor(name, value)


def under_autocast(x: Tensor | Form) -> bool:
    kind = x.device.type
    return _has_autocast(kind) and torch.is_autocast_enabled(kind)


@constant
def _has_autocast(kind: str) -> bool:
    """Whether torch has autocast for this type of device; a constant, because torch.compile of 2.8 cannot trace it."""
    return torch.amp.is_autocast_available(kind)


def check_shape(name: str, value: Tensor | Form, expected: Sequence[int | str]) -> None:
    """``expected``: a number for each axis, which must agree, or a letter for any size."""
    shape = value.shape
    agrees = len(shape) == len(expected)
    if agrees:
        for wanted, size in zip(expected, shape, strict=True):
            agrees = agrees and (isinstance(wanted, str) or wanted == size)
    if not agrees:
        listed = ", ".join(map(str, expected))
        raise ValueError(f"{name} must have shape [{listed}], but it has {list(shape)}")


def check_alike(**tensors: Tensor | Form) -> None:
    """All tensors must have the device and the dtype of the first."""
    (first, model), *others = tensors.items()
    for name, value in others:
        if value.device != model.device:
            raise ValueError(f"{name} must be on the device of {first}, {model.device}, but it is on {value.device}")
        if value.dtype != model.dtype:
            raise TypeError(f"{name} must have the dtype of {first}, {model.dtype}, but it has {value.dtype}")


def check_like_layer(name: str, value: Tensor | Form, weight: Tensor | Form) -> None:
    """``value`` must have the device of the layer and, unless autocast is on, its dtype."""
    if value.device != weight.device:
        raise ValueError(f"{name} must be on the device of the layer, {weight.device}, but they are on {value.device}")
    if value.dtype != weight.dtype and not under_autocast(value):
        raise TypeError(f"{name} must have the dtype of the layer, {weight.dtype}, but they have {value.dtype}")


def check_reverse_mode(name: str, *tensors: Tensor) -> None:
    """Raise an error in forward mode: the kernels have no forward-mode derivative."""
    if forward_ad._current_level < 0:
        return
    transformed = any(level.key() == TransformType.Jvp for level in get_interpreter_stack() or ())
    if transformed or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            f"{name} has no forward-mode derivative (jvp) on its kernels; use reverse mode, or backend='reference'"
        )


def check_map(routing_map: object) -> None:
    if not isinstance(routing_map, RoutingMap):
        raise TypeError(f"routing_map must be a RoutingMap, but it is a {type(routing_map).__name__}")


def check_routing(routing: object, expected: type) -> None:
    if not isinstance(routing, expected):
        raise TypeError(f"routing must be an instance of {expected.__name__}, but it is {routing!r}")


def check_positive(**numbers: object) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, but it is {value!r}")


def check_number(name: str, value: object, least: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= least:
        raise ValueError(f"{name} must be a number of at least {least:g}, but it is {value!r}")


def check_activations(activations: Tensor) -> None:
    """Raise an error if an activation is clearly negative, such as a logit. On a GPU, where reading it would wait, and
    under tracing there is no check, and negative activations count as zero."""
    if not traced() and activations.device.type == "cpu" and activations.numel():
        least = activations.detach().amin().item()
        if least < -1e-6:
            raise ValueError(f"activations must be at least 0, such as the results of a sigmoid, but one is {least:g}")


def check_labels(labels: object, activations: Tensor) -> None:
    """``labels`` must be class indices [N] or multi-hot [N, classes], for activations [N, classes]."""
    images, classes = activations.shape
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, but it is a {type(labels).__name__}")
    if labels.device != activations.device:
        raise ValueError(
            f"labels must be on the device of activations, {activations.device}, but they are on {labels.device}"
        )
    if labels.is_complex():
        raise TypeError(f"labels must be real numbers, but their dtype is {labels.dtype}")
    if labels.ndim == 1 and (labels.is_floating_point() or labels.dtype == torch.bool):
        raise TypeError(f"labels of shape [N] must be whole numbers, but their dtype is {labels.dtype}")
    if tuple(labels.shape) not in ((images,), (images, classes)):
        raise ValueError(
            f"labels must have shape [{images}] or [{images}, {classes}], but they have {list(labels.shape)}"
        )
    if labels.ndim == 1:
        check_range_of_labels(labels, classes)


def check_range_of_labels(labels: Tensor, classes: int) -> None:
    """Labels must be class indices. On a GPU, or where values are unknown, torch checks them itself."""
    if labels.device.type == "cpu" and not traced():
        outside = labels[(labels < 0) | (labels >= classes)]
        if len(outside):
            raise ValueError(f"labels must be at least 0 and below {classes}, but one is {outside[0].item()}")


def traced() -> bool:
    """True if the values of tensors are unknown, because torch compiles, traces or transforms the code."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or get_interpreter_stack() is not None
    return traced or torch._C._len_torch_dispatch_stack() > 0  # modes, such as FakeTensorMode


def refuse_script(module: object) -> object:
    """The method `__prepare_scriptable__` of our modules; `torch.jit.script` calls it."""
    raise RuntimeError(
        f"torch.jit.script cannot compile {type(module).__name__}: use torch.jit.trace, torch.export or torch.compile"
    )
