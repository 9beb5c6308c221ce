"""EfficientCapsNet: four convolutions and few capsules with self-attention routing (Mazzia et al. 2021)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tritoncaps import Capsules, SelfAttentionRouting, VectorCaps, VectorRouting, functional
from tritoncaps._internal.checks import check_positive, check_shape, check_tensor
from tritoncaps.models.intermediate import CapsuleNetwork
from tritoncaps.models.pretrained import load_pretrained_of
from tritoncaps.routing.attention import soft_squash

# output channels, kernel size and stride of the four convolutions
CONVOLUTIONS = ((32, 7, 2), (64, 3, 1), (64, 3, 1), (128, 3, 2))
DIM, CLASS_DIM = 8, 16  # entries of primary and of class capsules


class EfficientCapsNet(CapsuleNetwork):
    """The network of "Efficient-CapsNet" for smallNORB (Mazzia, Salvetti and Chiaberge 2021), without its decoder.

    Four convolutions, each with instance normalisation; 16 primary capsules of 8 entries, by a depthwise convolution
    over the whole feature map; class capsules of 16 entries. Images of 48x48 with two channels give 8x8 features:
    152 thousand parameters for five classes.

    ``model(images, return_intermediate=True)`` returns capsules by name: ``primary``, ``class_caps``.

    Args:
        in_channels: channels of the images.
        num_classes: number of classes.
        image_size: height and width of the images, at least 23.
        routing: any routing of vector capsules; default: self-attention routing.
        pretrained: name of weights that are part of the package, "smallnorb-efficient" (see docs/models.md).
        backend: backend of the class capsules; default: chosen by device.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - images: [N, in_channels, image_size, image_size]
        - result: poses [N, num_classes, 16], activations [N, num_classes], their lengths

    Raises:
        ValueError: if an option or the shape of the images is wrong, or if the pretrained weights have other sizes.

    Example:
        >>> import torch
        >>> from tritoncaps.models import EfficientCapsNet
        >>> EfficientCapsNet(2, 5, 32)(torch.randn(2, 2, 32, 32)).activations.shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        image_size: int = 48,
        *,
        routing: VectorRouting | None = None,
        pretrained: str | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(in_channels=in_channels, num_classes=num_classes, image_size=image_size)
        if image_size < 23:
            raise ValueError(f"image_size must be at least 23, but it is {image_size}")
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_channels, self.image_size = in_channels, image_size
        features, channels, side = [], in_channels, image_size
        for out_channels, kernel, stride in CONVOLUTIONS:
            convolution = nn.Conv2d(channels, out_channels, kernel, stride, **factory)
            features += [convolution, nn.ReLU(), nn.InstanceNorm2d(out_channels, affine=True, **factory)]
            channels, side = out_channels, (side - kernel) // stride + 1
        self.features = nn.Sequential(*features)
        self.primary = nn.Conv2d(channels, channels, side, groups=channels, **factory)
        self.class_caps = VectorCaps(
            channels // DIM,
            DIM,
            num_classes,
            CLASS_DIM,
            routing=routing or SelfAttentionRouting(),
            backend=backend,
            **factory,
        )
        self.reset_parameters()
        if pretrained is not None:
            self._load(pretrained)

    def forward(self, images: Tensor, return_intermediate: bool = False) -> Capsules | dict[str, Capsules]:
        check_tensor("images", images)
        check_shape("images", images, ["N", self.in_channels, self.image_size, self.image_size])
        vectors = self.primary(self.features(images)).flatten(1).unflatten(1, (-1, DIM))
        primary = functional.with_lengths(soft_squash(vectors))
        classes = self.class_caps(primary)
        return {"primary": primary, "class_caps": classes} if return_intermediate else classes

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.InstanceNorm2d):
                module.reset_parameters()
        self.class_caps.reset_parameters()
        # class activations start near 0.5; the paper's start (0.5, He et al. 2015) saturates them, and learning is slow
        nn.init.normal_(self.class_caps.weight, std=0.2)

    def _load(self, pretrained: str) -> None:
        settings, _, weights = load_pretrained_of("efficient-capsnet", pretrained)
        channels, classes = weights["features.0.weight"].shape[1], weights["class_caps.weight"].shape[-3]
        trained = channels, classes, settings["crop"]
        given = self.in_channels, self.class_caps.out_caps, self.image_size
        if given != trained:
            raise ValueError(
                f"in_channels, num_classes and image_size must be {trained} for pretrained {pretrained!r}, "
                f"but they are {given}"
            )
        self.load_state_dict(weights)
