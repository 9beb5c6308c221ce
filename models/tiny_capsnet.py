"""TinyCapsNet: one layer of routed capsules, the small network of variational Bayes routing (Ribeiro et al. 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tritoncaps import CapsuleDropout, CapsuleNorm, Capsules, ConvCaps2d, EMRouting, MatrixRouting, PrimaryCaps
from tritoncaps._internal.checks import check_positive, check_shape, check_tensor
from tritoncaps.models.intermediate import CapsuleNetwork


class TinyCapsNet(CapsuleNetwork):
    """The small network of variational Bayes routing (Ribeiro et al. 2020): one layer of routed capsules.

    A 5x5 convolution with stride 2, primary capsules by a 3x3 convolution with stride 2, and class capsules that get
    the votes of all of them. Each position has its own matrices. ``channels`` are the features and the primary types.
    Images of ``image_size`` 32 give 14x14 features and 6x6 primary capsules: 206 thousand parameters, 2,880 votes.

    ``model(images, return_intermediate=True)`` returns capsules by name: ``primary``, ``class_caps``.

    Args:
        in_channels: channels of the images.
        num_classes: number of classes.
        image_size: height and width of the images, at least 9.
        channels: features and primary types.
        iterations: iterations of EM routing.
        routing: any routing of matrix capsules; it overrides ``iterations``.
        norm: batch normalisation of features and of both layers of capsules.
        dropout: probability that a primary capsule is dropped in training.
        primary_bias: initial bias of the logits of primary activations.
        backend: backend of all layers; default: chosen by device.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - images: [N, in_channels, image_size, image_size]
        - result: poses [N, num_classes, 4, 4], activations [N, num_classes]

    Raises:
        ValueError: if an option or the shape of the images is wrong.

    Example:
        >>> import torch
        >>> from tritoncaps.models import TinyCapsNet
        >>> TinyCapsNet(1, 10)(torch.randn(2, 1, 32, 32)).activations.shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        image_size: int = 32,
        channels: tuple[int, int] = (64, 16),
        iterations: int = 3,
        *,
        routing: MatrixRouting | None = None,
        norm: bool = True,
        dropout: float = 0.0,
        primary_bias: float = 0.0,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(in_channels=in_channels, num_classes=num_classes, image_size=image_size)
        if len(channels) != 2:
            raise ValueError(f"channels must be two numbers, features and primary types, but they are {channels}")
        places = ((image_size - 5) // 2 + 1 - 3) // 2 + 1
        if image_size < 9:
            raise ValueError(f"image_size must be at least 9, but it is {image_size}")
        super().__init__()
        features, primary = channels
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_channels, self.image_size, self.primary_bias = in_channels, image_size, primary_bias
        self.conv = nn.Conv2d(in_channels, features, 5, stride=2, **factory)
        self.conv_norm = nn.BatchNorm2d(features, **factory) if norm else nn.Identity()
        self.primary = PrimaryCaps(features, primary, 3, stride=2, **factory)
        self.primary_norm = CapsuleNorm(primary, **factory) if norm else nn.Identity()
        self.dropout = CapsuleDropout(dropout)
        routing = EMRouting(iterations) if routing is None else routing
        self.class_caps = ConvCaps2d(primary, num_classes, places, routing=routing, backend=backend, **factory)
        self.class_norm = CapsuleNorm(num_classes, **factory) if norm else nn.Identity()
        self.reset_parameters()

    def forward(self, images: Tensor, return_intermediate: bool = False) -> Capsules | dict[str, Capsules]:
        check_tensor("images", images)
        check_shape("images", images, ["N", self.in_channels, self.image_size, self.image_size])
        features = self.conv_norm(self.conv(images)).relu()
        primary = self.dropout(self.primary_norm(self.primary(features)))
        poses, activations = self.class_caps(primary)
        classes = self.class_norm(Capsules(poses.flatten(2, 3).squeeze(2), activations.flatten(1)))
        return {"primary": primary, "class_caps": classes} if return_intermediate else classes

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)
        for module in self.modules():
            if isinstance(module, (PrimaryCaps, ConvCaps2d, nn.BatchNorm1d, nn.BatchNorm2d)):
                module.reset_parameters()
        assert self.primary.activation.bias is not None
        nn.init.constant_(self.primary.activation.bias, self.primary_bias)
