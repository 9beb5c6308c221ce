"""The base class of all layers with votes: it creates the parameters of the routing and calls the routing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from tritoncaps._internal.checks import (
    Form,
    check_like_layer,
    check_shape,
    check_tensor,
    form,
    once,
    refuse_script,
    traced,
    under_autocast,
)
from tritoncaps.capsules import Capsules
from tritoncaps.kernels.common import backends
from tritoncaps.routing import LayerSizes, NewParameter, Routing
from tritoncaps.routing_map import RoutingMap


class RoutedCaps(nn.Module):
    """A layer that computes capsules from votes. It uses only the protocol of routings, not their algorithms."""

    weight: nn.Parameter

    __prepare_scriptable__ = refuse_script

    def __init__(self, sizes: LayerSizes, routing: Routing, capsules: str, backend: str | None) -> None:
        super().__init__()
        _check_kind(routing, capsules, type(self).__name__)
        self.in_caps, self.out_caps, self.kernel_size = sizes.in_caps, sizes.out_caps, sizes.weights
        self._sizes, self.routing = sizes, routing
        self.backend = backends.check_name(backend)

    def _create_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Create the parameters of the routing. A layer calls it last, so that a name that is in use is an error."""
        new_parameters = self._new_parameters()
        for name, new in new_parameters.items():
            if hasattr(self, name):
                raise ValueError(
                    f"{type(self.routing).__name__} must not name a parameter {name!r}: layers use that name"
                )
            self.register_parameter(name, nn.Parameter(torch.empty(new.shape, device=device, dtype=dtype)))
        self._names = tuple(name for name in new_parameters if name != "weight")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to the initial values of the routing."""
        for name, new in self._new_parameters().items():
            new.init(getattr(self, name))

    def _new_parameters(self) -> dict[str, NewParameter]:
        found = self.routing.new_parameters(self._sizes)
        _check_new_parameters(f"{type(self.routing).__name__}.new_parameters", found, self._sizes)
        return found

    def _inputs(self, routing_map: RoutingMap) -> tuple[Tensor, dict[str, Tensor], RoutingMap]:
        """The weight [K, B, C, ...], the other parameters and the map: arguments of `Routing.route`."""
        axes = len(self._sizes.weights)
        weight = self.weight.flatten(0, axes - 1) if axes else self.weight[None]
        return weight, {name: getattr(self, name) for name in self._names}, routing_map

    def _route(self, capsules: Capsules, routing_map: RoutingMap) -> Capsules:
        parents = self.routing.route(capsules, *self._inputs(routing_map), self.backend)
        self._check_parents(parents, capsules.poses.shape[0], routing_map)
        return Capsules(*parents)

    def _check_parents(self, parents: Capsules, images: int, routing_map: RoutingMap) -> None:
        name = f"{type(self.routing).__name__}.route"
        if not isinstance(parents, tuple) or len(parents) != 2:
            raise TypeError(
                f"{name} must return Capsules(poses, activations), but it returned a {type(parents).__name__}"
            )
        for what, value in zip(("poses", "activations"), parents, strict=True):
            check_tensor(f"{what} returned by {name}", value)
        _check_forms_of_parents(name, (images, self.out_caps, *routing_map.out_size), self._sizes, *map(form, parents))

    def _check_poses(self, poses: Tensor) -> None:
        check_tensor("poses", poses)
        check_like_layer("poses", poses, self.weight)

    def _options(self) -> str:
        return f"routing={self.routing}" + (f", backend={self.backend!r}" if self.backend else "")


def _check_kind(routing: object, capsules: str, layer: str) -> None:
    expected = f"routing must be a routing of {capsules} capsules, such as {_EXAMPLES[capsules]}"
    if not isinstance(routing, Routing):
        raise TypeError(f"{expected}, but {layer} got {routing!r}")
    kind = getattr(routing, "capsules", None)
    if kind not in _EXAMPLES:
        raise TypeError(f"{type(routing).__name__}.capsules must be 'matrix' or 'vector', but it is {kind!r}")
    if kind != capsules:
        raise TypeError(f"{expected}, but {type(routing).__name__} is one of {kind} capsules")


def _check_new_parameters(name: str, found: object, sizes: LayerSizes) -> None:
    """Raise an error of one sentence if the result of `new_parameters` is wrong."""
    if not isinstance(found, dict):
        raise TypeError(f"{name} must return a dict of NewParameter, but it returned a {type(found).__name__}")
    if "weight" not in found:
        given = ", ".join(map(str, found)) or "none"
        raise ValueError(f"{name} must return a parameter named 'weight', but it returned {given}")
    for key, new in found.items():
        if not isinstance(key, str) or not key.isidentifier():
            raise ValueError(f"{name} must return parameters whose names are Python identifiers, but one is {key!r}")
        if not isinstance(new, NewParameter):
            raise TypeError(f"{name} must return {key!r} as a NewParameter, but it is a {type(new).__name__}")
    axes = len(sizes.weights)
    if tuple(found["weight"].shape[:axes]) != sizes.weights or len(found["weight"].shape) <= axes:
        wanted = ", ".join(map(str, (*sizes.weights, "...")))
        raise ValueError(
            f"{name} must return a weight of shape [{wanted}], but its shape is {list(found['weight'].shape)}"
        )


_EXAMPLES = {"matrix": "EMRouting", "vector": "DynamicRouting"}


def conv_options(layer: Any) -> str:
    """The text with kernel_size, stride and, if they are not the default, padding and dilation."""
    text = f"kernel_size={layer.kernel_size}, stride={layer.stride}"
    if layer.padding == "same" or any(layer.padding):
        text += f", padding={layer.padding!r}"
    return text + (f", dilation={layer.dilation}" if max(layer.dilation) > 1 else "")


def conv_map(layer: Any, size: Sequence[int]) -> RoutingMap:
    """The routing map of a convolutional layer for this input size."""
    new = RoutingMap.conv if traced() else _kept_conv_map
    return new(tuple(size), layer.kernel_size, layer.stride, layer.padding, layer.dilation)


_kept_conv_map = lru_cache(maxsize=1024)(RoutingMap.conv)


def check_matrix_capsules(layer: RoutedCaps, capsules: Capsules, space: Sequence[str | int] | None = None) -> None:
    """``space``: names or sizes of the spatial axes; None: any number of axes."""
    if not isinstance(capsules, tuple) or len(capsules) != 2:
        given = f"a {type(capsules).__name__}"
        raise TypeError(f"capsules must be Capsules(poses, activations), but {type(layer).__name__} got {given}")
    poses, activations = capsules
    check_tensor("poses", poses)
    check_tensor("activations", activations)
    space = space and tuple(space)
    name, autocast = type(layer).__name__, under_autocast(poses)
    _check_forms(name, layer.in_caps, space, autocast, *map(form, (poses, activations, layer.weight)))


@once
def _check_forms(
    layer: str,
    in_caps: int,
    space: tuple[str | int, ...] | None,
    autocast: bool,
    poses: Form,
    activations: Form,
    weight: Form,
) -> None:
    """``space`` as in `check_matrix_capsules`; with ``autocast``, dtypes may differ."""
    if len(poses.shape) >= 2 and poses.shape[1] != in_caps:
        raise ValueError(
            f"poses must have {in_caps} capsule types, the in_caps of this {layer}, "
            f"but they have {poses.shape[1]} (shape {list(poses.shape)})"
        )
    if space is None:
        space = tuple(f"space{axis}" for axis in range(max(len(activations.shape) - 2, 0)))
    check_shape("poses", poses, ["N", in_caps, *space, 4, 4])
    check_shape("activations", activations, poses.shape[:-2])
    if 0 in poses.shape[2:-2]:
        raise ValueError(f"poses must have at least one position, but their shape is {list(poses.shape)}")
    check_like_layer("poses", poses, weight)
    check_like_layer("activations", activations, weight)


@once
def _check_forms_of_parents(
    name: str, shape: tuple[int, ...], sizes: LayerSizes, poses: Form, activations: Form
) -> None:
    """``shape``: the expected [N, C, *out_size] of the parents."""
    check_shape(f"poses returned by {name}", poses, [*shape, *sizes.out_pose])
    check_shape(f"activations returned by {name}", activations, shape)
