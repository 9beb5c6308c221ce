"""Vector-capsule layers (Sabour, Frosst and Hinton 2017). They take and return :class:`Capsules`, whose activations are
the lengths of the poses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from tritoncaps import functional
from tritoncaps._internal.checks import check_like_layer, check_positive, check_shape, check_tensor, refuse_script
from tritoncaps._internal.routed import RoutedCaps, conv_map, conv_options
from tritoncaps.capsules import Capsules
from tritoncaps.kernels.common import backends
from tritoncaps.routing import DynamicRouting, LayerSizes, VectorRouting
from tritoncaps.routing_map import RoutingMap, padding_per_axis, per_axis


class VectorPrimaryCaps(nn.Module):
    """Primary vector capsules: a convolution computes the poses of ``out_caps`` types, which are then squashed.

    Args:
        in_channels: channels of the features.
        out_caps: capsule types.
        dim: entries of a pose vector.
        kernel_size: kernel size of the convolution.
        stride: stride of the convolution.
        padding: padding of the convolution.
        backend: "reference", "cpu" or "triton"; default: chosen by device.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - features: [N, in_channels, H, W]
        - result: poses [N, out_caps, H', W', dim], activations [N, out_caps, H', W'], their lengths

    Raises:
        ValueError: if the features have another shape.

    Example:
        >>> import torch
        >>> from tritoncaps import VectorPrimaryCaps
        >>> VectorPrimaryCaps(64, 8, dim=8, kernel_size=5)(torch.randn(2, 64, 12, 12)).poses.shape
        torch.Size([2, 8, 4, 4, 8])
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
        """Initialise the weights: poses have about the scale of the features."""
        nn.init.kaiming_normal_(self.pose.weight, nonlinearity="linear")
        assert self.pose.bias is not None
        nn.init.zeros_(self.pose.bias)

    def forward(self, features: Tensor) -> Capsules:
        check_tensor("features", features)
        check_like_layer("features", features, self.pose.weight)
        check_shape("features", features, ["N", self.in_channels, "H", "W"])
        # channels are [out_caps, dim]: a capsule's pose is `dim` channels of one pixel
        vectors = self.pose(features).unflatten(1, (self.out_caps, self.dim)).movedim(2, -1)
        return functional.with_lengths(functional.squash(vectors, backend=self.backend))

    if TYPE_CHECKING:

        def __call__(self, features: Tensor) -> Capsules: ...

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_caps}, dim={self.dim}"


class _VectorRoutedCaps(RoutedCaps):
    """Base class of the vector layers that route votes."""

    priors: nn.Parameter | None

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        in_caps: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        kernel_size: tuple[int, ...],
        routing: VectorRouting | None,
        priors: bool,
        backend: str | None,
    ) -> None:
        check_positive(in_caps=in_caps, in_dim=in_dim, out_caps=out_caps, out_dim=out_dim)
        routing = DynamicRouting() if routing is None else routing
        if priors:
            if not isinstance(routing, DynamicRouting):
                raise ValueError(f"priors=True needs a DynamicRouting, but routing is {routing!r}")
            routing = replace(routing, priors=True)
        sizes = LayerSizes("conv" if kernel_size else "full", kernel_size, in_caps, out_caps, (in_dim,), (out_dim,))
        super().__init__(sizes, routing, "vector", backend)
        self.in_dim, self.out_dim = in_dim, out_dim

    def _create_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super()._create_parameters(device, dtype)
        if "priors" not in self._parameters:
            self.register_parameter("priors", None)

    def _capsules(self, capsules: Capsules | Tensor) -> Capsules:
        """``capsules``, or poses with their lengths as activations."""
        given = functional.with_lengths(capsules) if isinstance(capsules, Tensor) else capsules
        if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[0], Tensor):
            what = f"a {type(capsules).__name__}"
            raise TypeError(f"capsules must be Capsules or a tensor of poses, but {type(self).__name__} got {what}")
        poses, activations = given
        self._check_poses(poses)
        check_tensor("activations", activations)
        check_shape("activations", activations, poses.shape[:-1])
        return Capsules(poses, activations)

    if TYPE_CHECKING:

        def __call__(self, capsules: Capsules | Tensor) -> Capsules: ...

    def assignments(self, capsules: Capsules | Tensor) -> Tensor:
        """The last coupling coefficients of dynamic routing, for inspection.

        See :func:`functional.dynamic_assignments`. In VectorCaps each child is a type of its own, so P = S = 1.

        Args:
            capsules: the children, as the layer takes them.

        Returns:
            [N, P, S, in_caps, out_caps], without gradient.

        Raises:
            TypeError: if the routing is not :class:`~tritoncaps.DynamicRouting`.
        """
        routing = self._dynamic("assignments")
        given, routing_map = self._children(capsules)
        weight, parameters, _ = self._inputs(routing_map)
        priors = parameters["priors"].reshape(weight.shape[:3]) if routing.priors else None
        return functional.dynamic_assignments(given.poses, weight, routing_map, routing, priors)

    def _dynamic(self, what: str) -> DynamicRouting:
        """The routing; an error if it is not DynamicRouting itself."""
        if not isinstance(self.routing, DynamicRouting) or type(self.routing).route is not DynamicRouting.route:
            raise TypeError(f"{what} needs the route of DynamicRouting, but the routing is {self.routing!r}")
        return self.routing

    def forward(self, capsules: Capsules | Tensor) -> Capsules:
        return self._route(*self._children(capsules))

    def _children(self, capsules: Capsules | Tensor) -> tuple[Capsules, RoutingMap]:
        """Check the children; return them as the routing takes them, with the map for their size."""
        raise NotImplementedError


class VectorCaps(_VectorRoutedCaps):
    """Fully connected vector capsules: every child votes for every parent, and each pair has its own matrix.

    Its parameters are ``weight`` [in_caps, out_caps, in_dim, out_dim] and, with ``priors=True``, ``priors``
    [in_caps, out_caps].

    Args:
        in_caps: number of children in an image: types times positions.
        in_dim: entries of a child's pose vector.
        out_caps: number of parents.
        out_dim: entries of a parent's pose vector.
        routing: any :class:`~tritoncaps.routing.VectorRouting`; default ``DynamicRouting(iterations=3)``.
        priors: learn the initial routing logits of every pair; default: they are zero.
        backend: "reference", "cpu" or "triton"; default: chosen by device.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - children: poses [N, ..., in_dim] and activations [N, ...], or only the poses; the axes between the first and
          the last one have ``in_caps`` entries together
        - result: poses [N, out_caps, out_dim], activations [N, out_caps], their lengths

    Raises:
        ValueError: if an option or a shape is wrong.
        TypeError: if the input is neither Capsules nor a tensor.

    Example:
        >>> import torch
        >>> from tritoncaps import DynamicRouting, VectorCaps
        >>> layer = VectorCaps(8 * 4 * 4, 8, 10, 16, routing=DynamicRouting(iterations=2))
        >>> layer(torch.randn(2, 8, 4, 4, 8)).poses.shape
        torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        in_caps: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        *,
        routing: VectorRouting | None = None,
        priors: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_caps, in_dim, out_caps, out_dim, (), routing, priors, backend)
        self._create_parameters(device, dtype)

    def _children(self, capsules: Capsules | Tensor) -> tuple[Capsules, RoutingMap]:
        poses, activations = self._capsules(capsules)
        if poses.ndim < 3 or math.prod(poses.shape[1:-1]) != self.in_caps or poses.shape[-1] != self.in_dim:
            raise ValueError(
                f"poses must hold {self.in_caps} capsules of {self.in_dim} numbers for each image, "
                f"[N, {self.in_caps}, {self.in_dim}] or spread over space, but they have shape {list(poses.shape)}"
            )
        return Capsules(poses.flatten(1, -2), activations.flatten(1)), RoutingMap.full((), coordinates=False)

    def extra_repr(self) -> str:
        return f"{self.in_caps}, {self.in_dim}, {self.out_caps}, {self.out_dim}, {self._options()}"


class ConvVectorCaps2d(_VectorRoutedCaps):
    """Convolutional vector capsules: every parent gets the votes of a ``kernel_size`` window of children.

    Each offset in the window and each pair of types has its own matrix. Its parameters are ``weight``
    [*kernel_size, in_caps, out_caps, in_dim, out_dim] and, with ``priors=True``, ``priors``
    [*kernel_size, in_caps, out_caps].

    Args:
        in_caps: capsule types of the children.
        in_dim: entries of a child's pose vector.
        out_caps: capsule types of the parents.
        out_dim: entries of a parent's pose vector.
        kernel_size: as in nn.Conv2d.
        stride: as in nn.Conv2d.
        padding: as in nn.Conv2d, including "same". The padded border contains no children, so it gives no votes.
        dilation: as in nn.Conv2d.
        routing: any :class:`~tritoncaps.routing.VectorRouting`; default ``DynamicRouting(iterations=3)``.
        priors: learn the initial routing logits of every pair; default: they are zero.
        backend: "reference", "cpu" or "triton"; default: chosen by device.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - children: poses [N, in_caps, H, W, in_dim], activations [N, in_caps, H, W]
        - result: poses [N, out_caps, H', W', out_dim], activations [N, out_caps, H', W'], their lengths

    Raises:
        ValueError: if an option or a shape is wrong.
        TypeError: if the input is neither Capsules nor a tensor.

    Example:
        >>> import torch
        >>> from tritoncaps import ConvVectorCaps2d
        >>> ConvVectorCaps2d(4, 8, 6, 12, kernel_size=3)(torch.randn(2, 4, 7, 7, 8)).poses.shape
        torch.Size([2, 6, 5, 5, 12])
    """

    def __init__(
        self,
        in_caps: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | Literal["same"] = 0,
        dilation: int | tuple[int, int] = 1,
        *,
        routing: VectorRouting | None = None,
        priors: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        kernel = per_axis("kernel_size", kernel_size, 2, 1)
        super().__init__(in_caps, in_dim, out_caps, out_dim, kernel, routing, priors, backend)
        self.stride = per_axis("stride", stride, 2, 1)
        self.padding: tuple[int, ...] | Literal["same"] = padding_per_axis(padding, self.stride)
        self.dilation = per_axis("dilation", dilation, 2, 1)
        self._create_parameters(device, dtype)

    def _children(self, capsules: Capsules | Tensor) -> tuple[Capsules, RoutingMap]:
        given = self._capsules(capsules)
        check_shape("poses", given.poses, ["N", self.in_caps, "H", "W", self.in_dim])
        return given, self.routing_map(given.poses.shape[2:4])

    def routing_map(self, size: Sequence[int]) -> RoutingMap:
        """The routing map for children of one input size.

        Args:
            size: positions of the children along each axis.

        Returns:
            Which child feeds which parent.
        """
        return conv_map(self, size)

    def extra_repr(self) -> str:
        text = f"{self.in_caps}, {self.in_dim}, {self.out_caps}, {self.out_dim}"
        return f"{text}, {conv_options(self)}, {self._options()}"
