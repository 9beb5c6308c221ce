"""MatrixCapsNet: the network of "Matrix Capsules with EM Routing" (2018)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from tritoncaps import Capsules, ClassCaps, ConvCaps2d, EMRouting, MatrixRouting, PrimaryCaps
from tritoncaps._internal.checks import check_positive, check_shape, check_tensor
from tritoncaps.models.intermediate import through


class MatrixCapsNet(nn.Module):
    """Images [N, in_channels, H, W] -> Capsules of the classes: poses [N, num_classes, 4, 4], activations.

    A 5x5 convolution with stride 2, primary capsules, two layers of convolutional capsules (3x3, strides 2 and 1)
    and class capsules. ``channels`` (A, B, C, D) are the features and the capsule types of the three layers;
    images of 32x32 give 14x14, 14x14, 6x6 and 4x4 positions, and any size from 17x17 on works.

    ``routing`` overrides ``iterations``; ``backend`` is that of all layers.

    ``model(images, return_intermediate=True)`` returns the capsules of all layers by name: ``primary``,
    ``conv_caps1``, ``conv_caps2`` and ``class_caps``.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        channels: tuple[int, int, int, int] = (32, 32, 32, 32),
        iterations: int = 3,
        *,
        routing: MatrixRouting | None = None,
        coordinates: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(in_channels=in_channels, num_classes=num_classes)
        if len(channels) != 4:
            raise ValueError(f"channels must be four numbers (A, B, C, D), but they are {channels}")
        super().__init__()
        a, b, c, d = channels
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        routed: dict[str, Any] = {"routing": routing or EMRouting(iterations), "backend": backend, **factory}
        self.in_channels = in_channels
        self.conv = nn.Conv2d(in_channels, a, 5, stride=2, **factory)
        self.primary = PrimaryCaps(a, b, **factory)
        self.conv_caps1 = ConvCaps2d(b, c, 3, stride=2, **routed)
        self.conv_caps2 = ConvCaps2d(c, d, 3, stride=1, **routed)
        self.class_caps = ClassCaps(d, num_classes, coordinates=coordinates, **routed)
        self.reset_parameters()

    @classmethod
    def small(cls, in_channels: int, num_classes: int, iterations: int = 3, **kwargs: Any) -> MatrixCapsNet:
        """The paper's network of 68 thousand parameters: A = 64, B = 8, C = D = 16."""
        return cls(in_channels, num_classes, (64, 8, 16, 16), iterations, **kwargs)

    def forward(self, images: Tensor, return_intermediate: bool = False) -> Capsules | dict[str, Capsules]:
        check_tensor("images", images)
        check_shape("images", images, ["N", self.in_channels, "H", "W"])
        if min(images.shape[2:]) < 17:
            raise ValueError(f"images must be at least 17x17, but they are {images.shape[2]}x{images.shape[3]}")
        primary = self.primary(self.conv(images).relu())
        layers = {name: getattr(self, name) for name in ("conv_caps1", "conv_caps2", "class_caps")}
        return through("primary", primary, layers, return_intermediate)

    if TYPE_CHECKING:

        @overload
        def __call__(self, images: Tensor, return_intermediate: Literal[False] = False) -> Capsules: ...

        @overload
        def __call__(self, images: Tensor, return_intermediate: Literal[True]) -> dict[str, Capsules]: ...

        def __call__(self, images: Tensor, return_intermediate: bool = False) -> Capsules | dict[str, Capsules]: ...

    def reset_parameters(self) -> None:
        """About half of the capsules of each layer are active at the start, on images of mean 0 and variance 1."""
        nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)
        for layer in (self.primary, self.conv_caps1, self.conv_caps2, self.class_caps):
            layer.reset_parameters()
        if isinstance(self.conv_caps2.routing, EMRouting):
            # poses that agreed once agree more the second time
            nn.init.constant_(self.conv_caps2.get_parameter("beta_u"), 1.25)
