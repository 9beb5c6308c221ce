"""Layers that help capsules to generalise. They take and give :class:`Capsules`, and go between other layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tritoncaps._internal.checks import check_like_layer, check_positive, check_shape, check_tensor
from tritoncaps.capsules import Capsules

LOGIT_EPSILON = 1e-6  # activations are kept this far from 0 and 1 where their logits are needed


class CapsuleDropout(nn.Module):
    """In training, each capsule is silent with probability ``p``: its activation is 0, so its votes do not count.

    Activations of the others are not scaled: they are probabilities, and a parent sees fewer children, not surer ones.
    In evaluation it does nothing.

    Args:
        p: probability that a capsule is silent.

    Shape:
        - children and result: poses [N, C, *space, ...], activations [N, C, *space]

    Raises:
        ValueError: if ``p`` is not at least 0 and below 1.

    Example:
        >>> import torch
        >>> from tritoncaps import Capsules, CapsuleDropout
        >>> capsules = Capsules(torch.randn(1, 8, 5, 5, 4, 4), torch.rand(1, 8, 5, 5))
        >>> bool((CapsuleDropout(0.5)(capsules).activations == 0).any())
        True
    """

    def __init__(self, p: float = 0.5) -> None:
        if not isinstance(p, (int, float)) or isinstance(p, bool) or not 0 <= p < 1:
            raise ValueError(f"p must be a number of at least 0 and below 1, but it is {p!r}")
        super().__init__()
        self.p = float(p)

    def forward(self, capsules: Capsules) -> Capsules:
        poses, activations = _pair(capsules, self)
        if not self.training or self.p == 0:
            return Capsules(poses, activations)
        return Capsules(poses, activations * (torch.rand_like(activations) >= self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}"


class CapsuleNorm(nn.Module):
    """Batch normalisation of matrix capsules: of each entry of a type's poses, and of its activation logits.

    Variational Bayes routing has it after every routing (Ribeiro et al. 2020). Statistics are taken over images and
    positions. Training needs at least two values of each entry: one image is enough where there are positions, but
    not for class capsules. Under DistributedDataParallel each process normalises by its own share of the batch, and
    the statistics of the first process are kept; nn.SyncBatchNorm.convert_sync_batchnorm makes them those of the
    whole batch on GPUs.

    Args:
        num_caps: capsule types.
        affine: learn a scale and a shift for the logits of each type. Poses have none: parameters that a loss of class
            activations does not use would stop DistributedDataParallel.
        momentum: of the running statistics, which evaluation uses, as in nn.BatchNorm1d.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        - children and result: poses [N, num_caps, *space, 4, 4], activations [N, num_caps, *space]

    Raises:
        ValueError: if a shape is wrong, or training has one value of an entry only.

    Example:
        >>> import torch
        >>> from tritoncaps import Capsules, CapsuleNorm
        >>> capsules = Capsules(3 + torch.randn(4, 8, 6, 6, 4, 4), torch.rand(4, 8, 6, 6))
        >>> bool(CapsuleNorm(8)(capsules).poses.mean().abs() < 1e-5)
        True
    """

    def __init__(
        self,
        num_caps: int,
        *,
        affine: bool = True,
        momentum: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(num_caps=num_caps)
        super().__init__()
        self.num_caps = num_caps
        options: dict[str, Any] = {"momentum": momentum, "device": device, "dtype": dtype}
        self.pose = nn.BatchNorm1d(num_caps * 16, affine=False, **options)
        self.activation = nn.BatchNorm1d(num_caps, affine=affine, **options)

    def forward(self, capsules: Capsules) -> Capsules:
        poses, activations = _pair(capsules, self)
        space = [f"space{axis}" for axis in range(max(activations.ndim - 2, 0))]
        check_shape("poses", poses, ["N", self.num_caps, *space, 4, 4])
        check_shape("activations", activations, poses.shape[:-2])
        assert self.pose.running_mean is not None
        check_like_layer("poses", poses, self.pose.running_mean)
        if self.training and activations.numel() <= self.num_caps:
            raise ValueError(
                f"poses must have at least two images or positions for {type(self).__name__} in training, "
                f"but their shape is {list(poses.shape)}"
            )
        entries = poses.flatten(2, -3) if space else poses.unsqueeze(2)  # [N, num_caps, P, 4, 4]
        entries = entries.flatten(3).transpose(2, 3).flatten(1, 2)  # [N, num_caps * 16, P]
        normed = self.pose(entries).unflatten(1, (self.num_caps, 16)).transpose(2, 3)
        logits = torch.logit(activations, LOGIT_EPSILON)
        logits = self.activation(logits.flatten(2) if space else logits)
        return Capsules(normed.reshape(poses.shape), torch.sigmoid(logits).reshape(activations.shape))

    def extra_repr(self) -> str:
        return f"{self.num_caps}"


def _pair(capsules: Capsules, layer: nn.Module) -> tuple[Tensor, Tensor]:
    if not isinstance(capsules, tuple) or len(capsules) != 2:
        given = f"a {type(capsules).__name__}"
        raise TypeError(f"capsules must be Capsules(poses, activations), but {type(layer).__name__} got {given}")
    check_tensor("poses", capsules[0])
    check_tensor("activations", capsules[1])
    return capsules[0], capsules[1]
