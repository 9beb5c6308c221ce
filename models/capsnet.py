"""CapsNet: the network of "Dynamic Routing Between Capsules" (2017), and its decoder, which reconstructs images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tritoncaps import Capsules, DynamicRouting, VectorCaps, VectorPrimaryCaps, VectorRouting
from tritoncaps._internal.checks import check_positive, check_range_of_labels, check_shape, check_tensor
from tritoncaps.models.intermediate import CapsuleNetwork, through

KERNEL = 9  # kernel size of both convolutions


class CapsNet(CapsuleNetwork):
    """The network of "Dynamic Routing Between Capsules" (Sabour, Frosst and Hinton 2017).

    A 9x9 convolution of ``channels``, primary capsules (9x9, stride 2) of ``primary_caps`` types with ``primary_dim``
    entries, and a fully connected layer of class capsules. With ``decoder``, ``model.reconstruct`` reconstructs images.

    ``model(images, return_intermediate=True)`` returns the capsules of all layers by name: ``primary``, ``class_caps``.

    Args:
        in_channels: channels of the images.
        num_classes: number of classes.
        image_size: height and width of the images, at least 17.
        iterations: iterations of dynamic routing.
        channels: channels of the first convolution.
        primary_caps: types of primary capsules.
        primary_dim: entries of a primary capsule's pose.
        class_dim: entries of a class capsule's pose.
        routing: any routing of vector capsules; it overrides ``iterations``.
        priors: learn the initial routing logits.
        decoder: add a decoder that reconstructs images from class capsules.
        backend: backend of all layers; default: chosen by device.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - images: [N, in_channels, image_size, image_size]
        - result: poses [N, num_classes, class_dim], activations [N, num_classes], their lengths

    Raises:
        ValueError: if an option or the shape of the images is wrong.

    Example:
        >>> import torch
        >>> from tritoncaps.models import CapsNet
        >>> model = CapsNet(channels=16, primary_caps=2)
        >>> capsules = model(torch.rand(2, 1, 28, 28))
        >>> capsules.poses.shape, model.reconstruct(capsules).shape
        (torch.Size([2, 10, 16]), torch.Size([2, 1, 28, 28]))
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int = 28,
        iterations: int = 3,
        *,
        channels: int = 256,
        primary_caps: int = 32,
        primary_dim: int = 8,
        class_dim: int = 16,
        routing: VectorRouting | None = None,
        priors: bool = False,
        decoder: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(in_channels=in_channels, num_classes=num_classes, channels=channels)
        if not isinstance(image_size, int) or image_size < 2 * KERNEL - 1:
            raise ValueError(
                f"image_size must be a whole number of at least {2 * KERNEL - 1}, but it is {image_size!r}"
            )
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_channels, self.num_classes, self.image_size = in_channels, num_classes, image_size
        self.conv = nn.Conv2d(in_channels, channels, KERNEL, **factory)
        self.primary = VectorPrimaryCaps(channels, primary_caps, primary_dim, KERNEL, 2, backend=backend, **factory)
        side = (image_size - 2 * KERNEL + 1) // 2 + 1
        self.class_caps = VectorCaps(
            primary_caps * side**2,
            primary_dim,
            num_classes,
            class_dim,
            routing=routing or DynamicRouting(iterations),
            priors=priors,
            backend=backend,
            **factory,
        )
        self.decoder = Decoder(num_classes, class_dim, in_channels, image_size, **factory) if decoder else None
        self.reset_parameters()

    @classmethod
    def multi_mnist(cls, **kwargs: Any) -> CapsNet:
        """The paper's network for MultiMNIST, two overlapping digits on 36x36 pixels: 11.36M parameters.

        Args:
            **kwargs: other arguments of :class:`CapsNet`.

        Returns:
            The network.
        """
        return cls(1, 10, 36, **kwargs)

    @classmethod
    def cifar10(cls, iterations: int = 3, **kwargs: Any) -> CapsNet:
        """The paper's network for 24x24 crops of CIFAR-10: 64 types of primary capsules, and one more parent, "none of
        the above", for children that belong to none of the ten classes.

        Args:
            iterations: iterations of dynamic routing.
            **kwargs: other arguments of :class:`CapsNet`.

        Returns:
            The network.
        """
        paper: dict[str, Any] = {"primary_caps": 64, "routing": DynamicRouting(iterations, none_of_the_above=True)}
        return cls(3, 10, 24, **paper | kwargs)

    @classmethod
    def small_norb(cls, **kwargs: Any) -> CapsNet:
        """The paper's network for 32x32 crops of smallNORB's stereo pairs, with the architecture for MNIST.

        Args:
            **kwargs: other arguments of :class:`CapsNet`.

        Returns:
            The network.
        """
        return cls(2, 5, 32, **kwargs)

    @classmethod
    def svhn(cls, **kwargs: Any) -> CapsNet:
        """The paper's smaller network for SVHN, 32x32 images of house numbers.

        It has 64 channels, 16 types of primary capsules with 6 entries, and class capsules with 8 entries.

        Args:
            **kwargs: other arguments of :class:`CapsNet`.

        Returns:
            The network.
        """
        paper: dict[str, Any] = {"channels": 64, "primary_caps": 16, "primary_dim": 6, "class_dim": 8}
        return cls(3, 10, 32, **paper | kwargs)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)
        self.primary.reset_parameters()
        self.class_caps.reset_parameters()
        if self.decoder is not None:
            self.decoder.reset_parameters()

    def forward(self, images: Tensor, return_intermediate: bool = False) -> Capsules | dict[str, Capsules]:
        check_tensor("images", images)
        check_shape("images", images, ["N", self.in_channels, self.image_size, self.image_size])
        primary = self.primary(self.conv(images).relu())
        return through("primary", primary, {"class_caps": self.class_caps}, return_intermediate)

    def reconstruct(self, capsules: Capsules, labels: Tensor | None = None, count: int = 1) -> Tensor:
        """Reconstruct images from class capsules: see :class:`Decoder`.

        Args:
            capsules: the class capsules.
            labels: the class to reconstruct; default: the capsule with the longest pose.
            count: without labels, the number of longest capsules to reconstruct, each one alone.

        Shape:
            - capsules: poses [N, num_classes, class_dim], activations [N, num_classes]; labels: [N] or [N, m]
            - result: [N, channels, H, W], or [N, m, channels, H, W] for labels [N, m] or ``count`` above 1

        Returns:
            The images, with pixels in [0, 1].

        Raises:
            RuntimeError: if the network has no decoder.
        """
        if self.decoder is None:
            raise RuntimeError("this CapsNet has no decoder; make it with decoder=True")
        return self.decoder(capsules, labels, count)


class Decoder(nn.Module):
    """The decoder of CapsNet: it reconstructs an image from one class capsule, with layers of 512 and 1024 units.

    ``decoder(capsules, labels=None, count=1)`` masks all capsules except one: the capsule of the label, or without
    labels the longest one. For the two digits of MultiMNIST, labels [N, 2], or ``count`` 2 without labels, give two
    images, one of each digit.

    Args:
        num_classes: number of classes.
        dim: entries of a class capsule's pose.
        channels: channels of the images.
        image_size: height and width of the images.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - capsules: poses [N, num_classes, dim], activations [N, num_classes]; labels: [N] or [N, m]
        - result: [N, channels, image_size, image_size], or [N, m, channels, image_size, image_size] for labels [N, m]
          or ``count`` above 1; pixels are in [0, 1]

    Raises:
        ValueError: if the shape of capsules or labels is wrong.
        TypeError: if the labels are not a tensor of whole numbers.

    Example:
        >>> import torch
        >>> from tritoncaps import functional
        >>> from tritoncaps.models import Decoder
        >>> Decoder(10, 16, channels=1, image_size=28)(functional.with_lengths(torch.rand(2, 10, 16))).shape
        torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        channels: int,
        image_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(num_classes=num_classes, dim=dim, channels=channels, image_size=image_size)
        super().__init__()
        self.num_classes, self.dim, self.channels, self.image_size = num_classes, dim, channels, image_size
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.layers = nn.Sequential(
            nn.Linear(num_classes * dim, 512, **factory),
            nn.ReLU(),
            nn.Linear(512, 1024, **factory),
            nn.ReLU(),
            nn.Linear(1024, channels * image_size**2, **factory),
            nn.Sigmoid(),
        )

    def reset_parameters(self) -> None:
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def forward(self, capsules: Capsules, labels: Tensor | None = None, count: int = 1) -> Tensor:
        poses, activations = capsules
        check_tensor("poses", poses)
        check_shape("poses", poses, ["N", self.num_classes, self.dim])
        check_shape("activations", activations, poses.shape[:2])
        if labels is None:
            check_positive(count=count)
            if count > self.num_classes:
                raise ValueError(f"count must be at most {self.num_classes}, the classes, but it is {count}")
            labels = activations.topk(count, dim=1).indices
            labels = labels[:, 0] if count == 1 else labels
        _check_classes(labels, len(poses), self.num_classes)
        images = self.layers(self.masked(poses, labels).flatten(-2))
        return images.unflatten(-1, (self.channels, self.image_size, self.image_size))

    def masked(self, poses: Tensor, labels: Tensor) -> Tensor:
        """Replace all poses by zero, except those of the labelled capsule.

        Args:
            poses: poses of the class capsules.
            labels: the classes to keep.

        Shape:
            - poses: [N, classes, dim], labels: [N] or [N, m]
            - result: [N, classes, dim] or [N, m, classes, dim]

        Returns:
            The masked poses.
        """
        mask = torch.zeros(*labels.shape, self.num_classes, dtype=poses.dtype, device=poses.device)
        mask = mask.scatter(-1, labels[..., None].long(), 1)[..., None]
        return mask * (poses if labels.ndim == 1 else poses[:, None])


def _check_classes(labels: object, images: int, classes: int) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, but it is a {type(labels).__name__}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be whole numbers, but their dtype is {labels.dtype}")
    if labels.ndim not in (1, 2) or len(labels) != images:
        raise ValueError(f"labels must have shape [{images}] or [{images}, m], but they have {list(labels.shape)}")
    check_range_of_labels(labels, classes)
