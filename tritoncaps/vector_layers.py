"""Vector-capsule layers (Sabour, Frosst and Hinton 2017). They take and give :class:`Capsules`, whose activations are
the lengths of the poses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tritoncaps import functional
from tritoncaps._internal.checks import (
    check_like_layer,
    check_positive,
    check_routing,
    check_shape,
    check_tensor,
    refuse_script,
)
from tritoncaps.capsules import Capsules
from tritoncaps.kernels.common import backends
from tritoncaps.routing import DynamicRouting
from tritoncaps.routing_map import RoutingMap, per_axis


class VectorPrimaryCaps(nn.Module):
    """The first vector capsules: a convolution whose channels, squashed, are the poses of ``out_caps`` types.

    Features [N, in_channels, H, W] -> Capsules([N, out_caps, H', W', dim], [N, out_caps, H', W']).
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        in_channels: int,
        out_caps: int,
        dim: int,
        kernel_size: int | tuple[int, int] = 9,
        stride: int | tuple[int, int] = 2,
        padding: int | tuple[int, int] = 0,
        *,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(in_channels=in_channels, out_caps=out_caps, dim=dim)
        super().__init__()
        self.in_channels, self.out_caps, self.dim = in_channels, out_caps, dim
        self.backend = backends.check_name(backend)
        self.pose = nn.Conv2d(in_channels, out_caps * dim, kernel_size, stride, padding, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Poses of about the features' scale."""
        nn.init.kaiming_normal_(self.pose.weight, nonlinearity="linear")
        assert self.pose.bias is not None
        nn.init.zeros_(self.pose.bias)

    def forward(self, features: Tensor) -> Capsules:
        check_tensor("features", features)
        check_like_layer("features", features, self.pose.weight)
        check_shape("features", features, ["N", self.in_channels, "H", "W"])
        # channels are [out_caps, dim]: a capsule's pose is `dim` channels of one pixel
        vectors = self.pose(features).unflatten(1, (self.out_caps, self.dim)).movedim(2, -1)
        return with_lengths(functional.squash(vectors, backend=self.backend))

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_caps}, dim={self.dim}"


class _VectorRoutedCaps(nn.Module):
    """What both layers with votes share: transformation matrices, the routing and its first logits."""

    weight: nn.Parameter
    priors: nn.Parameter | None

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        in_caps: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        kernel_size: tuple[int, ...],
        routing: DynamicRouting | None,
        priors: bool,
        backend: str | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        check_positive(in_caps=in_caps, in_dim=in_dim, out_caps=out_caps, out_dim=out_dim)
        super().__init__()
        self.in_caps, self.in_dim, self.out_caps, self.out_dim = in_caps, in_dim, out_caps, out_dim
        self.kernel_size = kernel_size
        self.routing = DynamicRouting() if routing is None else routing
        check_routing(self.routing, DynamicRouting)
        self.backend = backends.check_name(backend)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(*kernel_size, in_caps, out_caps, in_dim, out_dim, **factory))
        logits = nn.Parameter(torch.empty(*kernel_size, in_caps, out_caps, **factory)) if priors else None
        self.register_parameter("priors", logits)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.1)
        if self.priors is not None:
            nn.init.zeros_(self.priors)

    def _route(self, poses: Tensor, routing_map: RoutingMap) -> Capsules:
        weight = self.weight.reshape(-1, *self.weight.shape[-4:])  # [K, B, C, D, E]
        priors = None if self.priors is None else self.priors.reshape(weight.shape[:3])
        return with_lengths(
            functional.dynamic_routing(poses, weight, routing_map, self.routing, priors, backend=self.backend)
        )

    def _poses(self, capsules: Capsules | Tensor) -> Tensor:
        """The poses of ``capsules``, or the poses themselves: nothing else matters to the routing."""
        given = capsules[0] if isinstance(capsules, tuple) and len(capsules) == 2 else capsules
        if not isinstance(given, Tensor):
            what = f"a {type(capsules).__name__}"
            raise TypeError(f"capsules must be Capsules or a tensor of poses, but {type(self).__name__} got {what}")
        check_tensor("poses", given)
        check_like_layer("poses", given, self.weight)
        return given

    def _options(self) -> str:
        text = f", routing={self.routing}" + ("" if self.priors is None else ", priors=True")
        return text + (f", backend={self.backend!r}" if self.backend else "")


class VectorCaps(_VectorRoutedCaps):
    """Fully connected vector capsules: every child votes for every parent, each pair with a matrix of its own.

    Capsules([N, ..., in_dim], [N, ...]), ``in_caps`` for each image however they are laid out in space
    -> Capsules([N, out_caps, out_dim], [N, out_caps])

    routing   how votes become parents; default ``DynamicRouting(iterations=3)``.
    priors    learn the first routing logits of every pair; default: they are zero.
    backend   "reference", "cpu" or "triton"; default: chosen by device.

    Parameters: ``weight`` [in_caps, out_caps, in_dim, out_dim] and, if asked for, ``priors`` [in_caps, out_caps].
    """

    def __init__(
        self,
        in_caps: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        *,
        routing: DynamicRouting | None = None,
        priors: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_caps, in_dim, out_caps, out_dim, (), routing, priors, backend, device, dtype)

    def forward(self, capsules: Capsules | Tensor) -> Capsules:
        poses = self._poses(capsules)
        if poses.ndim < 3 or math.prod(poses.shape[1:-1]) != self.in_caps or poses.shape[-1] != self.in_dim:
            raise ValueError(
                f"poses must hold {self.in_caps} capsules of {self.in_dim} numbers for each image, "
                f"[N, {self.in_caps}, {self.in_dim}] or spread over space, but they have shape {list(poses.shape)}"
            )
        return self._route(poses.flatten(1, -2), RoutingMap.full((), coordinates=False))

    def extra_repr(self) -> str:
        return f"{self.in_caps}, {self.in_dim}, {self.out_caps}, {self.out_dim}" + self._options()


class ConvVectorCaps2d(_VectorRoutedCaps):
    """Convolutional vector capsules: a local grid of children votes for every parent, with another matrix for each
    offset in the grid and each pair of types.

    Capsules([N, in_caps, H, W, in_dim], [N, in_caps, H, W])
    -> Capsules([N, out_caps, H', W', out_dim], [N, out_caps, H', W'])

    kernel_size, stride, padding, dilation   as in nn.Conv2d; a child outside the input does not vote.
    routing, priors, backend                 as in :class:`VectorCaps`.

    Parameters: ``weight`` [*kernel_size, in_caps, out_caps, in_dim, out_dim] and, if asked for, ``priors``
    [*kernel_size, in_caps, out_caps].
    """

    def __init__(
        self,
        in_caps: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        *,
        routing: DynamicRouting | None = None,
        priors: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        kernel = per_axis("kernel_size", kernel_size, 2, 1)
        super().__init__(in_caps, in_dim, out_caps, out_dim, kernel, routing, priors, backend, device, dtype)
        self.stride = per_axis("stride", stride, 2, 1)
        self.padding = per_axis("padding", padding, 2, 0)
        self.dilation = per_axis("dilation", dilation, 2, 1)

    def forward(self, capsules: Capsules | Tensor) -> Capsules:
        poses = self._poses(capsules)
        check_shape("poses", poses, ["N", self.in_caps, "H", "W", self.in_dim])
        return self._route(poses, self.routing_map(poses.shape[2:4]))

    def routing_map(self, size: Sequence[int]) -> RoutingMap:
        """Who votes for whom at this input size."""
        return RoutingMap.conv(size, self.kernel_size, self.stride, self.padding, self.dilation)

    def extra_repr(self) -> str:
        text = f"{self.in_caps}, {self.in_dim}, {self.out_caps}, {self.out_dim}, kernel_size={self.kernel_size}"
        text += f", stride={self.stride}"
        if any(self.padding):
            text += f", padding={self.padding}"
        if max(self.dilation) > 1:
            text += f", dilation={self.dilation}"
        return text + self._options()


def with_lengths(poses: Tensor) -> Capsules:
    """Capsules [N, C, *space, D] that are as active as their poses are long."""
    return Capsules(poses, torch.linalg.vector_norm(poses, dim=-1))
