"""MatrixCapsNet: the network of "Matrix Capsules with EM Routing" (2018)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tritoncaps import (
    CapsuleBias,
    CapsuleDropout,
    CapsuleNorm,
    Capsules,
    ClassCaps,
    ConvCaps2d,
    EMRouting,
    MatrixRouting,
    MixtureRouting,
    PrimaryCaps,
)
from tritoncaps._internal.checks import check_positive, check_shape, check_tensor
from tritoncaps.models.intermediate import CapsuleNetwork
from tritoncaps.models.pretrained import load_pretrained_of


class MatrixCapsNet(CapsuleNetwork):
    """The network of "Matrix Capsules with EM Routing" (Hinton, Sabour and Frosst 2018).

    A 5x5 convolution with stride 2, primary capsules, two layers of convolutional capsules (3x3, strides 2 and 1)
    and class capsules. ``channels`` (A, B, C, D) are the features and the capsule types of the three layers;
    images of 32x32 give 14x14, 14x14, 6x6 and 4x4 positions, and any size from 17x17 on works.

    ``model(images, return_intermediate=True)`` returns the capsules of all layers by name: ``primary``,
    ``conv_caps1``, ``conv_caps2`` and ``class_caps``.

    Args:
        in_channels: channels of the images.
        num_classes: number of classes.
        channels: A, B, C and D.
        iterations: iterations of EM routing.
        routing: any routing of matrix capsules; it overrides ``iterations``. If only positions compete in it, the
            classes of the last layer compete all the same.
        coordinates: coordinate addition in the class capsules.
        norm: batch normalisation of the features and of the capsules of every layer, by
            :class:`~tritoncaps.regularization.CapsuleNorm`.
        dropout: probability that a capsule of the second ConvCaps2d is dropped in training.
        primary_bias: initial bias of the logits of primary activations; the authors' code uses -1.
        vote_bias: a bias of the votes of the last two layers, by :class:`~tritoncaps.regularization.CapsuleBias`.
        backend: backend of all layers; default: chosen by device.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - images: [N, in_channels, H, W], standardised (mean 0, variance 1)
        - result: poses [N, num_classes, 4, 4], activations [N, num_classes]

    Raises:
        ValueError: if an option is wrong, or images are smaller than 17x17.

    Example:
        >>> import torch
        >>> from tritoncaps.models import MatrixCapsNet
        >>> MatrixCapsNet.small(in_channels=1, num_classes=10)(torch.randn(2, 1, 28, 28)).activations.shape
        torch.Size([2, 10])
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
        norm: bool = False,
        dropout: float = 0.0,
        primary_bias: float = 0.0,
        vote_bias: bool = False,
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
        self.in_channels, self.primary_bias = in_channels, primary_bias
        self.conv = nn.Conv2d(in_channels, a, 5, stride=2, **factory)
        self.primary = PrimaryCaps(a, b, **factory)
        self.conv_caps1 = ConvCaps2d(b, c, 3, stride=2, **routed)
        self.conv_caps2 = ConvCaps2d(c, d, 3, stride=1, **routed)
        if isinstance(routing, MixtureRouting) and routing.competition == "positions":
            routed["routing"] = replace(routing, competition="local")
        self.class_caps = ClassCaps(d, num_classes, coordinates=coordinates, **routed)
        self.dropout = CapsuleDropout(dropout)
        self.biases = nn.ModuleList([CapsuleBias(count, **factory) if vote_bias else nn.Identity() for count in (c, d)])
        self.conv_norm = nn.BatchNorm2d(a, **factory) if norm else nn.Identity()
        caps = (b, c, d, num_classes)
        self.norms = nn.ModuleList([CapsuleNorm(count, **factory) if norm else nn.Identity() for count in caps])
        self.reset_parameters()

    @classmethod
    def small(
        cls,
        in_channels: int,
        num_classes: int,
        iterations: int | None = None,
        *,
        pretrained: str | None = None,
        **kwargs: Any,
    ) -> MatrixCapsNet:
        """The paper's network of 68 thousand parameters: A = 64, B = 8, C = D = 16.

        Args:
            in_channels: channels of the images.
            num_classes: number of classes.
            iterations: iterations of EM routing; default 3, or those with which ``pretrained`` was trained.
            pretrained: name of weights that are part of the package, for example "toynorb" (see docs/models.md). The
                network then uses the routing of the training, unless ``routing`` is given.
            **kwargs: other arguments of :class:`MatrixCapsNet`.

        Returns:
            The network.

        Raises:
            ValueError: if ``pretrained`` has other channels or classes, or is of another network.
        """
        channels = (64, 8, 16, 16)
        if pretrained is None:
            return cls(in_channels, num_classes, channels, 3 if iterations is None else iterations, **kwargs)
        settings, _, weights = load_pretrained_of("matrix-capsnet-small", pretrained)
        trained = (weights["conv.weight"].shape[1], len(weights["class_caps.beta_a"]))
        if (in_channels, num_classes) != trained:
            raise ValueError(
                f"in_channels and num_classes must be {trained[0]} and {trained[1]} for pretrained {pretrained!r}, "
                f"but they are {in_channels} and {num_classes}"
            )
        routing = EMRouting(
            settings["iterations"] if iterations is None else iterations,
            settings["final_lambda"],
            competition=settings["competition"],
        )
        network = cls(in_channels, num_classes, channels, **{"routing": routing, **kwargs})
        network.load_state_dict(weights)
        return network

    def forward(self, images: Tensor, return_intermediate: bool = False) -> Capsules | dict[str, Capsules]:
        check_tensor("images", images)
        check_shape("images", images, ["N", self.in_channels, "H", "W"])
        if min(images.shape[2:]) < 17:
            raise ValueError(f"images must be at least 17x17, but they are {images.shape[2]}x{images.shape[3]}")
        primary_norm, norm1, norm2, class_norm = self.norms
        bias1, bias2 = self.biases
        found = {"primary": primary_norm(self.primary(self.conv_norm(self.conv(images)).relu()))}
        found["conv_caps1"] = norm1(self.conv_caps1(found["primary"]))
        found["conv_caps2"] = self.dropout(norm2(self.conv_caps2(bias1(found["conv_caps1"]))))
        found["class_caps"] = class_norm(self.class_caps(bias2(found["conv_caps2"])))
        return found if return_intermediate else found["class_caps"]

    def reset_parameters(self) -> None:
        """Initialise the weights so that about half of the capsules of each layer are active, on images of mean 0 and
        variance 1."""
        nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)
        for layer in (self.primary, self.conv_caps1, self.conv_caps2, self.class_caps):
            layer.reset_parameters()
        for bias in self.biases:
            if isinstance(bias, CapsuleBias):
                bias.reset_parameters()
        assert self.primary.activation.bias is not None
        nn.init.constant_(self.primary.activation.bias, self.primary_bias)
        if isinstance(self.conv_caps2.routing, EMRouting):  # its votes agree more than those of conv_caps1
            nn.init.constant_(self.conv_caps2.get_parameter("beta_u"), 1.25)
