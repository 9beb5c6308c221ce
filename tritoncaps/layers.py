"""Matrix-capsule layers. They take and return :class:`Capsules`, so they work in ``nn.Sequential``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.common_types import _size_any_t

from tritoncaps import functional
from tritoncaps._internal.checks import (
    check_like_layer,
    check_map,
    check_positive,
    check_shape,
    check_tensor,
    refuse_script,
)
from tritoncaps._internal.routed import RoutedCaps, check_matrix_capsules, conv_map, conv_options
from tritoncaps.capsules import Capsules
from tritoncaps.routing import EMRouting, LayerSizes, MatrixRouting, MixtureRouting
from tritoncaps.routing_map import RoutingMap, padding_per_axis, per_axis

SPACE = ("D", "H", "W")
MATRIX = (4, 4)

Padding = _size_any_t | Literal["same"]


class _PrimaryCaps(nn.Module):
    dims: int
    convolution: type[nn.Module]

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        in_channels: int,
        out_caps: int,
        kernel_size: _size_any_t = 1,
        stride: _size_any_t = 1,
        padding: Padding = 0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(in_channels=in_channels, out_caps=out_caps)
        super().__init__()
        self.in_channels, self.out_caps = in_channels, out_caps
        given: Any = (kernel_size, stride, padding)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.pose: Any = self.convolution(in_channels, out_caps * 16, *given, **factory)
        self.activation: Any = self.convolution(in_channels, out_caps, *given, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights: poses have about the scale of the features, activations are about one half."""
        for conv in (self.pose, self.activation):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="linear")
            nn.init.zeros_(conv.bias)

    def forward(self, features: Tensor) -> Capsules:
        check_tensor("features", features)
        check_like_layer("features", features, self.pose.weight)
        check_shape("features", features, ["N", self.in_channels, *SPACE[-self.dims :]])
        # channels are [out_caps, 16]: a capsule's pose is 16 channels of one pixel
        poses = self.pose(features).unflatten(1, (self.out_caps, 4, 4)).movedim((2, 3), (-2, -1))
        return Capsules(poses, torch.sigmoid(self.activation(features)))

    if TYPE_CHECKING:

        def __call__(self, features: Tensor) -> Capsules: ...

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_caps}"


class PrimaryCaps1d(_PrimaryCaps):
    """Primary capsules of signals: see :class:`PrimaryCaps`.

    Args:
        in_channels: channels of the features.
        out_caps: capsule types.
        kernel_size: kernel size of the convolution.
        stride: stride of the convolution.
        padding: padding of the convolution.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - features: [N, in_channels, W]
        - result: poses [N, out_caps, W', 4, 4], activations [N, out_caps, W'], in (0, 1)

    Raises:
        ValueError: if the features have another shape.

    Example:
        >>> import torch
        >>> from tritoncaps import PrimaryCaps1d
        >>> PrimaryCaps1d(16, 4, kernel_size=3, stride=2)(torch.randn(2, 16, 51)).poses.shape
        torch.Size([2, 4, 25, 4, 4])
    """

    dims, convolution = 1, nn.Conv1d


class PrimaryCaps(_PrimaryCaps):
    """Primary capsules: one convolution computes the poses, another one the activation logits, of ``out_caps`` types.

    Args:
        in_channels: channels of the features.
        out_caps: capsule types.
        kernel_size: kernel size of the convolution.
        stride: stride of the convolution.
        padding: padding of the convolution.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - features: [N, in_channels, H, W]
        - result: poses [N, out_caps, H', W', 4, 4], activations [N, out_caps, H', W'], in (0, 1)

    Raises:
        ValueError: if the features have another shape.

    Example:
        >>> import torch
        >>> from tritoncaps import PrimaryCaps
        >>> poses, activations = PrimaryCaps(32, 8)(torch.randn(2, 32, 12, 12))
        >>> poses.shape, activations.shape
        (torch.Size([2, 8, 12, 12, 4, 4]), torch.Size([2, 8, 12, 12]))
    """

    dims, convolution = 2, nn.Conv2d


class PrimaryCaps3d(_PrimaryCaps):
    """Primary capsules of volumes: see :class:`PrimaryCaps`.

    Args:
        in_channels: channels of the features.
        out_caps: capsule types.
        kernel_size: kernel size of the convolution.
        stride: stride of the convolution.
        padding: padding of the convolution.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - features: [N, in_channels, D, H, W]
        - result: poses [N, out_caps, D', H', W', 4, 4], activations [N, out_caps, D', H', W'], in (0, 1)

    Raises:
        ValueError: if the features have another shape.

    Example:
        >>> import torch
        >>> from tritoncaps import PrimaryCaps3d
        >>> PrimaryCaps3d(8, 4)(torch.randn(1, 8, 5, 6, 7)).poses.shape
        torch.Size([1, 4, 5, 6, 7, 4, 4])
    """

    dims, convolution = 3, nn.Conv3d


class _MatrixRoutedCaps(RoutedCaps):
    """Routed layers of matrix capsules."""

    def __init__(
        self,
        sizes: LayerSizes,
        routing: MatrixRouting | None,
        logits: bool,
        backend: str | None,
    ) -> None:
        super().__init__(sizes, EMRouting() if routing is None else routing, "matrix", backend)
        self.logits = logits
        if logits:
            self._mixture("logits=True")

    def _route(self, capsules: Capsules, routing_map: RoutingMap) -> Capsules:
        if not self.logits:
            return super()._route(capsules, routing_map)
        routing = self._mixture("logits=True")
        weight, parameters, _ = self._inputs(routing_map)
        return functional.mixture_logits(*capsules, weight, parameters, routing_map, routing, self.backend)

    def _assignments(self, capsules: Capsules, routing_map: RoutingMap) -> Tensor:
        routing = self._mixture("assignments")
        weight, parameters, _ = self._inputs(routing_map)
        return functional.mixture_assignments(*capsules, weight, parameters, routing_map, routing)

    def _mixture(self, what: str) -> MixtureRouting:
        """The routing; an error if its `fit` alone does not define it."""
        if not isinstance(self.routing, MixtureRouting):
            raise TypeError(f"{what} needs a MixtureRouting, but the routing is {self.routing!r}")
        if type(self.routing).route not in (MixtureRouting.route, EMRouting.route):
            raise TypeError(f"{what} needs the route of MixtureRouting, but {type(self.routing).__name__} has its own")
        return self.routing

    def _options(self) -> str:
        return super()._options() + (", logits=True" if self.logits else "")


class _ConvCaps(_MatrixRoutedCaps):
    dims: int

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        kernel_size: _size_any_t,
        stride: _size_any_t = 1,
        padding: Padding = 0,
        dilation: _size_any_t = 1,
        *,
        routing: MatrixRouting | None = None,
        logits: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(in_caps=in_caps, out_caps=out_caps)
        kernel = per_axis("kernel_size", kernel_size, self.dims, 1)
        sizes = LayerSizes("conv", kernel, in_caps, out_caps, MATRIX, MATRIX)
        super().__init__(sizes, routing, logits, backend)
        self.stride = per_axis("stride", stride, self.dims, 1)
        self.padding: tuple[int, ...] | Literal["same"] = padding_per_axis(padding, self.stride)
        self.dilation = per_axis("dilation", dilation, self.dims, 1)
        self._create_parameters(device, dtype)

    def forward(self, capsules: Capsules) -> Capsules:
        return self._route(*self._children(capsules))

    if TYPE_CHECKING:

        def __call__(self, capsules: Capsules) -> Capsules: ...

    def assignments(self, capsules: Capsules) -> Tensor:
        """The last assignments R of a mixture routing, for inspection; see :func:`functional.mixture_assignments`.

        Args:
            capsules: the children, as the layer takes them.

        Returns:
            [N, P, S, in_caps, out_caps], without gradient.

        Raises:
            TypeError: if the routing is not a mixture routing.
        """
        return self._assignments(*self._children(capsules))

    def _children(self, capsules: Capsules) -> tuple[Capsules, RoutingMap]:
        check_matrix_capsules(self, capsules, SPACE[-self.dims :])
        return Capsules(*capsules), self.routing_map(capsules[1].shape[2:])

    def routing_map(self, size: Sequence[int]) -> RoutingMap:
        """The routing map for children of one input size.

        Args:
            size: positions of the children along each axis.

        Returns:
            Which child feeds which parent.
        """
        return conv_map(self, size)

    def extra_repr(self) -> str:
        return f"{self.in_caps}, {self.out_caps}, {conv_options(self)}, {self._options()}"


class ConvCaps1d(_ConvCaps):
    """Convolutional capsules for signals: see :class:`ConvCaps2d`.

    Args:
        in_caps: capsule types of the children.
        out_caps: capsule types of the parents.
        kernel_size: as in nn.Conv1d.
        stride: as in nn.Conv1d.
        padding: as in nn.Conv1d, including "same".
        dilation: as in nn.Conv1d.
        routing: any :class:`~tritoncaps.routing.MatrixRouting`; default ``EMRouting(iterations=3)``.
        logits: return the logits of the activations instead of the activations. Only for mixture routings.
        backend: "reference", "cpu" or "triton"; default: chosen by device.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - children: poses [N, in_caps, W, 4, 4], activations [N, in_caps, W]
        - result: poses [N, out_caps, W', 4, 4], activations [N, out_caps, W']

    Raises:
        ValueError: if an option or a shape is wrong, or an activation is negative.
        TypeError: if the input is not a pair of tensors.

    Example:
        >>> import torch
        >>> from tritoncaps import Capsules, ConvCaps1d
        >>> layer = ConvCaps1d(4, 6, kernel_size=3, padding="same")
        >>> layer(Capsules(torch.randn(2, 4, 50, 4, 4), torch.rand(2, 4, 50))).poses.shape
        torch.Size([2, 6, 50, 4, 4])
    """

    dims = 1


class ConvCaps2d(_ConvCaps):
    """Convolutional capsules: every parent gets the votes of a ``kernel_size`` window of children.

    Its parameters are ``weight`` [*kernel_size, in_caps, out_caps, 4, 4] and those of the routing: for EM, ``beta_u``
    and ``beta_a`` [out_caps].

    Args:
        in_caps: capsule types of the children.
        out_caps: capsule types of the parents.
        kernel_size: as in nn.Conv2d: one number, or one for each axis.
        stride: as in nn.Conv2d.
        padding: as in nn.Conv2d, including "same". The padded border contains no children, so it gives no votes.
        dilation: as in nn.Conv2d.
        routing: any :class:`~tritoncaps.routing.MatrixRouting`; default ``EMRouting(iterations=3)``.
        logits: return the logits of the activations instead of the activations. Only for mixture routings.
        backend: "reference", "cpu" or "triton"; default: chosen by device.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - children: poses [N, in_caps, H, W, 4, 4], activations [N, in_caps, H, W], at least zero, usually the output
          of a sigmoid
        - result: poses [N, out_caps, H', W', 4, 4], activations [N, out_caps, H', W']

    Raises:
        ValueError: if an option or a shape is wrong, or an activation is negative.
        TypeError: if the input is not a pair of tensors.

    Example:
        >>> import torch
        >>> from tritoncaps import Capsules, ConvCaps2d, EMRouting
        >>> layer = ConvCaps2d(8, 16, kernel_size=3, stride=2, routing=EMRouting(iterations=2))
        >>> poses, activations = layer(Capsules(torch.randn(2, 8, 9, 9, 4, 4), torch.rand(2, 8, 9, 9)))
        >>> poses.shape, activations.shape
        (torch.Size([2, 16, 4, 4, 4, 4]), torch.Size([2, 16, 4, 4]))
    """

    dims = 2


class ConvCaps3d(_ConvCaps):
    """Convolutional capsules for volumes: see :class:`ConvCaps2d`.

    Args:
        in_caps: capsule types of the children.
        out_caps: capsule types of the parents.
        kernel_size: as in nn.Conv3d: one number, or one for each axis.
        stride: as in nn.Conv3d.
        padding: as in nn.Conv3d, including "same".
        dilation: as in nn.Conv3d.
        routing: any :class:`~tritoncaps.routing.MatrixRouting`; default ``EMRouting(iterations=3)``.
        logits: return the logits of the activations instead of the activations. Only for mixture routings.
        backend: "reference", "cpu" or "triton"; default: chosen by device.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - children: poses [N, in_caps, D, H, W, 4, 4], activations [N, in_caps, D, H, W]
        - result: poses [N, out_caps, D', H', W', 4, 4], activations [N, out_caps, D', H', W']

    Raises:
        ValueError: if an option or a shape is wrong, or an activation is negative.
        TypeError: if the input is not a pair of tensors.

    Example:
        >>> import torch
        >>> from tritoncaps import Capsules, ConvCaps3d
        >>> layer = ConvCaps3d(2, 4, kernel_size=3)
        >>> layer(Capsules(torch.randn(1, 2, 4, 5, 6, 4, 4), torch.rand(1, 2, 4, 5, 6))).activations.shape
        torch.Size([1, 4, 2, 3, 4])
    """

    dims = 3


class ClassCaps(_MatrixRoutedCaps):
    """Class capsules: one capsule for each class, which gets the votes of all children at all positions.

    All positions share the transformation matrices. Its parameters are ``weight`` [in_caps, num_classes, 4, 4]
    and those of the routing: for EM, ``beta_u`` and ``beta_a`` [num_classes].

    Args:
        in_caps: capsule types of the children.
        num_classes: number of classes: capsule types of the parents.
        coordinates: coordinate addition: add the scaled position of each child to the first entries of the right-hand
            column of its votes.
        routing: any :class:`~tritoncaps.routing.MatrixRouting`; default ``EMRouting(iterations=3)``.
        logits: return the logits of the activations instead of the activations. Only for mixture routings.
        backend: "reference", "cpu" or "triton"; default: chosen by device.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - children: poses [N, in_caps, *space, 4, 4], activations [N, in_caps, *space], at least zero, usually the
          output of a sigmoid
        - result: poses [N, num_classes, 4, 4], activations [N, num_classes]

    Raises:
        ValueError: if an option or a shape is wrong, or an activation is negative.
        TypeError: if the input is not a pair of tensors.

    Example:
        >>> import torch
        >>> from tritoncaps import Capsules, ClassCaps
        >>> layer = ClassCaps(16, num_classes=10)
        >>> layer(Capsules(torch.randn(2, 16, 4, 4, 4, 4), torch.rand(2, 16, 4, 4))).activations.shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_caps: int,
        num_classes: int,
        *,
        coordinates: bool = True,
        routing: MatrixRouting | None = None,
        logits: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(in_caps=in_caps, num_classes=num_classes)
        sizes = LayerSizes("class", (), in_caps, num_classes, MATRIX, MATRIX)
        super().__init__(sizes, routing, logits, backend)
        self.coordinates = coordinates
        self._create_parameters(device, dtype)

    @property
    def num_classes(self) -> int:
        """Capsule types of the parents."""
        return self.out_caps

    def forward(self, capsules: Capsules) -> Capsules:
        return self._route(*self._children(capsules))

    if TYPE_CHECKING:

        def __call__(self, capsules: Capsules) -> Capsules: ...

    def assignments(self, capsules: Capsules) -> Tensor:
        """The last assignments R of a mixture routing, for inspection; see :func:`functional.mixture_assignments`.

        Args:
            capsules: the children, as the layer takes them.

        Returns:
            [N, 1, S, in_caps, num_classes], without gradient.

        Raises:
            TypeError: if the routing is not a mixture routing.
        """
        return self._assignments(*self._children(capsules))

    def _children(self, capsules: Capsules) -> tuple[Capsules, RoutingMap]:
        check_matrix_capsules(self, capsules)
        return Capsules(*capsules), self.routing_map(capsules[1].shape[2:])

    def routing_map(self, size: Sequence[int]) -> RoutingMap:
        """The routing map for children of one input size.

        Args:
            size: positions of the children along each axis.

        Returns:
            Which child feeds which parent.
        """
        return RoutingMap.full(size, self.coordinates)

    def extra_repr(self) -> str:
        return f"{self.in_caps}, {self.num_classes}, coordinates={self.coordinates}, {self._options()}"


class GraphCaps(_MatrixRoutedCaps):
    """Capsules on the nodes of a graph: every parent node gets the votes of the children that its edges connect to it.

    The layer takes two arguments: the children, and a :class:`~tritoncaps.RoutingMap` of the graph.

    Its parameters are ``weight`` [num_relations, in_caps, out_caps, 4, 4] and those of the routing.

    Args:
        in_caps: capsule types of the children.
        out_caps: capsule types of the parents.
        num_relations: relations, which are kinds of edges; each has its own transformation matrices.
        routing: any :class:`~tritoncaps.routing.MatrixRouting`; default ``EMRouting(iterations=3)``.
        logits: return the logits of the activations instead of the activations. Only for mixture routings.
        backend: "reference", "cpu" or "triton"; default: chosen by device.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - children: poses [N, in_caps, nodes, 4, 4], activations [N, in_caps, nodes]
        - result: poses [N, out_caps, parents, 4, 4], activations [N, out_caps, parents]

    Raises:
        ValueError: if the map has more relations than the layer, a shape is wrong, or an activation is negative.
        TypeError: if the input is not a pair of tensors.

    Example:
        >>> import torch
        >>> from tritoncaps import Capsules, GraphCaps, RoutingMap
        >>> graph = RoutingMap.from_edges([0, 1, 2, 2], [0, 0, 0, 1], 3, 2, relations=[0, 1, 0, 1])
        >>> layer = GraphCaps(4, 8, num_relations=2)
        >>> layer(Capsules(torch.randn(5, 4, 3, 4, 4), torch.rand(5, 4, 3)), graph).poses.shape
        torch.Size([5, 8, 2, 4, 4])
    """

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        num_relations: int = 1,
        *,
        routing: MatrixRouting | None = None,
        logits: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(in_caps=in_caps, out_caps=out_caps, num_relations=num_relations)
        sizes = LayerSizes("graph", (num_relations,), in_caps, out_caps, MATRIX, MATRIX)
        super().__init__(sizes, routing, logits, backend)
        self._create_parameters(device, dtype)

    @property
    def num_relations(self) -> int:
        """Number of relations: kinds of edges."""
        return self.kernel_size[0]

    def forward(self, capsules: Capsules, routing_map: RoutingMap) -> Capsules:
        return self._route(*self._children(capsules, routing_map))

    if TYPE_CHECKING:

        def __call__(self, capsules: Capsules, routing_map: RoutingMap) -> Capsules: ...

    def assignments(self, capsules: Capsules, routing_map: RoutingMap) -> Tensor:
        """The last assignments R of a mixture routing, for inspection; see :func:`functional.mixture_assignments`.

        Args:
            capsules: the children, as the layer takes them.
            routing_map: the graph.

        Returns:
            [N, P, S, in_caps, out_caps], without gradient.

        Raises:
            TypeError: if the routing is not a mixture routing.
        """
        return self._assignments(*self._children(capsules, routing_map))

    def _inputs(self, routing_map: RoutingMap) -> tuple[Tensor, dict[str, Tensor], RoutingMap]:
        weight, parameters, _ = super()._inputs(routing_map)
        return weight[: routing_map.num_weights], parameters, routing_map  # a graph may lack the last relations

    def _children(self, capsules: Capsules, routing_map: RoutingMap) -> tuple[Capsules, RoutingMap]:
        check_map(routing_map)
        if routing_map.num_weights > self.num_relations:
            raise ValueError(
                f"routing_map must have at most {self.num_relations} relations, the num_relations of this GraphCaps, "
                f"but it has {routing_map.num_weights}"
            )
        check_matrix_capsules(self, capsules, routing_map.in_size)
        return Capsules(*capsules), routing_map

    def extra_repr(self) -> str:
        return f"{self.in_caps}, {self.out_caps}, num_relations={self.num_relations}, {self._options()}"
