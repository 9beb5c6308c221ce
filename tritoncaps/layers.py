"""Matrix-capsule layers. They take and give :class:`Capsules`, so they compose in ``nn.Sequential``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.common_types import _size_any_t

from tritoncaps._internal.checks import check_like_layer, check_positive, check_routing, check_shape, check_tensor
from tritoncaps.capsules import Capsules
from tritoncaps.kernels.common import backends
from tritoncaps.routing import EMRouting
from tritoncaps.routing_map import RoutingMap, per_axis

SPACE = ("D", "H", "W")


class PrimaryCaps(nn.Module):
    """The first capsules: a convolution whose channels are the poses and activation logits of ``out_caps`` types.

    Features [N, in_channels, H, W] -> Capsules([N, out_caps, H', W', 4, 4], [N, out_caps, H', W']).
    """

    def __init__(
        self,
        in_channels: int,
        out_caps: int,
        kernel_size: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(in_channels=in_channels, out_caps=out_caps)
        super().__init__()
        self.in_channels, self.out_caps = in_channels, out_caps
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.pose = nn.Conv2d(in_channels, out_caps * 16, kernel_size, stride, padding, **factory)
        self.activation = nn.Conv2d(in_channels, out_caps, kernel_size, stride, padding, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Poses of about the features' scale, activations about one half."""
        for conv in (self.pose, self.activation):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="linear")
            assert conv.bias is not None
            nn.init.zeros_(conv.bias)

    def forward(self, features: Tensor) -> Capsules:
        check_tensor("features", features)
        check_like_layer("features", features, self.pose.weight)
        check_shape("features", features, ["N", self.in_channels, "H", "W"])
        # channels are [out_caps, 16]: a capsule's pose is 16 channels of one pixel
        poses = self.pose(features).unflatten(1, (self.out_caps, 4, 4))
        return Capsules(poses.permute(0, 1, 4, 5, 2, 3), torch.sigmoid(self.activation(features)))

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_caps}"


class _RoutedCaps(nn.Module):
    """What all layers with votes share: transformation matrices, the routing and its parameters."""

    weight: nn.Parameter
    beta_u: nn.Parameter
    beta_a: nn.Parameter

    initial_beta_u: float

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        kernel_size: tuple[int, ...],
        routing: EMRouting | None,
        backend: str | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.in_caps, self.out_caps, self.kernel_size = in_caps, out_caps, kernel_size
        self.routing = EMRouting() if routing is None else routing
        check_routing(self.routing, EMRouting)
        self.backend = backends.check_name(backend)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(*kernel_size, in_caps, out_caps, 4, 4, **factory))
        for name in self.routing.parameter_names:
            self.register_parameter(name, nn.Parameter(torch.empty(out_caps, **factory)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Near the identity, so that children that agree make parents that agree, from the first step on; beta_u such
        that about half of the capsules are active, on poses of scale one."""
        with torch.no_grad():
            nn.init.normal_(self.weight, std=0.2)
            self.weight.add_(torch.eye(4, device=self.weight.device, dtype=self.weight.dtype))
        nn.init.constant_(self.beta_u, self.initial_beta_u)
        nn.init.zeros_(self.beta_a)

    def _route(self, capsules: Capsules, routing_map: RoutingMap) -> Capsules:
        parameters = {name: getattr(self, name) for name in self.routing.parameter_names}
        weight = self.weight.reshape(-1, *self.weight.shape[-4:])  # [K, B, C, 4, 4]
        return self.routing.route(capsules, weight, parameters, routing_map, self.backend)

    def _check(self, capsules: Capsules, space: Sequence[str] | None = None) -> None:
        """``space`` names the spatial axes; without it there may be any."""
        if not isinstance(capsules, tuple) or len(capsules) != 2:
            given = f"a {type(capsules).__name__}"
            raise TypeError(f"capsules must be Capsules(poses, activations), but {type(self).__name__} got {given}")
        poses, activations = capsules
        check_tensor("poses", poses)
        check_tensor("activations", activations)
        if poses.ndim >= 2 and poses.shape[1] != self.in_caps:
            raise ValueError(
                f"poses must have {self.in_caps} capsule types, the in_caps of this {type(self).__name__}, "
                f"but they have {poses.shape[1]} (shape {list(poses.shape)})"
            )
        if space is None:
            space = [f"space{axis}" for axis in range(max(activations.ndim - 2, 0))]
        check_shape("poses", poses, ["N", self.in_caps, *space, 4, 4])
        check_shape("activations", activations, poses.shape[:-2])
        if 0 in poses.shape[2:-2]:
            raise ValueError(f"poses must have at least one position, but their shape is {list(poses.shape)}")
        check_like_layer("poses", poses, self.weight)
        check_like_layer("activations", activations, self.weight)


class _ConvCaps(_RoutedCaps):
    dims: int
    initial_beta_u = 0.55

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        kernel_size: _size_any_t,
        stride: _size_any_t = 1,
        padding: _size_any_t = 0,
        dilation: _size_any_t = 1,
        *,
        routing: EMRouting | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(in_caps=in_caps, out_caps=out_caps)
        kernel = per_axis("kernel_size", kernel_size, self.dims, 1)
        super().__init__(in_caps, out_caps, kernel, routing, backend, device, dtype)
        self.stride = per_axis("stride", stride, self.dims, 1)
        self.padding = per_axis("padding", padding, self.dims, 0)
        self.dilation = per_axis("dilation", dilation, self.dims, 1)

    def forward(self, capsules: Capsules) -> Capsules:
        self._check(capsules, SPACE[-self.dims :])
        return self._route(Capsules(*capsules), self.routing_map(capsules[1].shape[2:]))

    def routing_map(self, size: Sequence[int]) -> RoutingMap:
        """Who votes for whom at this input size."""
        return RoutingMap.conv(size, self.kernel_size, self.stride, self.padding, self.dilation)

    def extra_repr(self) -> str:
        text = f"{self.in_caps}, {self.out_caps}, kernel_size={self.kernel_size}, stride={self.stride}"
        if any(self.padding):
            text += f", padding={self.padding}"
        if max(self.dilation) > 1:
            text += f", dilation={self.dilation}"
        return f"{text}, routing={self.routing}" + (f", backend={self.backend!r}" if self.backend else "")


class ConvCaps1d(_ConvCaps):
    """Convolutional capsules along a line: poses [N, in_caps, W, 4, 4] -> [N, out_caps, W', 4, 4].

    See :class:`ConvCaps2d`.
    """

    dims = 1


class ConvCaps2d(_ConvCaps):
    """Convolutional capsules: every parent routes the votes of a ``kernel_size`` window of children.

    Capsules([N, in_caps, H, W, 4, 4], [N, in_caps, H, W]) -> ([N, out_caps, H', W', 4, 4], [N, out_caps, H', W'])

    Activations are at least zero, usually the results of a sigmoid; see :func:`tritoncaps.functional.em_routing`.

    in_caps, out_caps   capsule types of the children and of the parents.
    kernel_size, stride, padding, dilation   as in nn.Conv2d; a child outside the input does not vote.
    routing             how votes become parents; default ``EMRouting(iterations=3)``.
    backend             "reference", "cpu" or "triton"; default: chosen by device.

    Parameters: ``weight`` [*kernel_size, in_caps, out_caps, 4, 4], ``beta_u`` and ``beta_a`` [out_caps].
    """

    dims = 2


class ConvCaps3d(_ConvCaps):
    """Convolutional capsules in a volume: poses [N, in_caps, D, H, W, 4, 4] -> [N, out_caps, D', H', W', 4, 4].

    See :class:`ConvCaps2d`.
    """

    dims = 3


class ClassCaps(_RoutedCaps):
    """One capsule for each class, which routes the votes of all children of all positions.

    Capsules([N, in_caps, *space, 4, 4], [N, in_caps, *space]) -> ([N, num_classes, 4, 4], [N, num_classes])

    Activations are at least zero, usually the results of a sigmoid; see :func:`tritoncaps.functional.em_routing`.

    The transformation matrices are shared over positions. With ``coordinates``, the scaled position of each
    child's receptive field is added to the first entries of the right-hand column of its votes.

    Parameters: ``weight`` [in_caps, num_classes, 4, 4], ``beta_u`` and ``beta_a`` [num_classes].
    """

    initial_beta_u = 0.75

    def __init__(
        self,
        in_caps: int,
        num_classes: int,
        *,
        coordinates: bool = True,
        routing: EMRouting | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(in_caps=in_caps, num_classes=num_classes)
        super().__init__(in_caps, num_classes, (), routing, backend, device, dtype)
        self.coordinates = coordinates

    @property
    def num_classes(self) -> int:
        return self.out_caps

    def forward(self, capsules: Capsules) -> Capsules:
        self._check(capsules)
        return self._route(Capsules(*capsules), self.routing_map(capsules[1].shape[2:]))

    def routing_map(self, size: Sequence[int]) -> RoutingMap:
        """Who votes for whom at this input size."""
        return RoutingMap.full(size, self.coordinates)

    def extra_repr(self) -> str:
        text = f"{self.in_caps}, {self.num_classes}, coordinates={self.coordinates}, routing={self.routing}"
        return text + (f", backend={self.backend!r}" if self.backend else "")
