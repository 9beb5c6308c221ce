"""Dropout, normalisation and bias of capsules. These layers take and return :class:`Capsules`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tritoncaps._internal.checks import check_like_layer, check_positive, check_shape, check_tensor
from tritoncaps.capsules import Capsules

LOGIT_EPSILON = 1e-6  # activations are clamped to [eps, 1 - eps] before their logits are computed


class CapsuleDropout(nn.Module):
    """In training, set the activation of each capsule to 0 with probability ``p``, so that its votes do not count.

    The other activations are not scaled, because they are probabilities. In evaluation the layer does nothing.

    Args:
        p: probability that a capsule is dropped.

    Shape:
        - children and result: poses [N, C, *space, ...], activations [N, C, *space]

    Raises:
        ValueError: if ``p`` is not at least 0 and below 1.
        TypeError: if the input is not a pair of tensors.

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
    """Batch normalisation of matrix capsules: each pose entry and the activation logit of each type are normalised.

    Networks with variational Bayes routing use it after every routing (Ribeiro et al. 2020). Statistics are computed
    over images and positions. In training, each entry needs at least two values: one image is enough for a layer with
    positions, but not for class capsules. Under DistributedDataParallel each process uses the statistics of its own
    part of the batch, and the running statistics are those of the first process. On GPUs,
    nn.SyncBatchNorm.convert_sync_batchnorm replaces them by the statistics of the whole batch.

    Args:
        num_caps: capsule types.
        affine: learn a scale and a shift for the logits of each type. Poses have none, because a loss of class
            activations would not use those of the last layer, and DistributedDataParallel stops at unused parameters.
        momentum: momentum of the running statistics, which evaluation uses, as in nn.BatchNorm1d.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - children and result: poses [N, num_caps, *space, 4, 4], activations [N, num_caps, *space]

    Raises:
        ValueError: if a shape is wrong, or an entry has only one value in training.
        TypeError: if the input is not a pair of tensors.

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


class CapsuleBias(nn.Module):
    """Add a learned matrix to the poses of each type, so that the votes of the next layer have a bias.

    The votes (M + B) W of a pose M are M W + B W. Without a bias, EM and dynamic routing cannot distinguish the poses M
    and -M of all children: the votes change their signs, and nothing else changes (Peer, Stabinger and
    Rodriguez-Sanchez 2019). Primary capsules have a bias already.

    Args:
        num_caps: capsule types.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - children and result: poses [N, num_caps, *space, 4, 4], activations [N, num_caps, *space]

    Raises:
        ValueError: if a shape is wrong.
        TypeError: if the input is not a pair of tensors.

    Example:
        >>> import torch
        >>> from tritoncaps import Capsules, CapsuleBias
        >>> capsules = Capsules(torch.randn(4, 8, 6, 6, 4, 4), torch.rand(4, 8, 6, 6))
        >>> CapsuleBias(8)(capsules).poses.shape
        torch.Size([4, 8, 6, 6, 4, 4])
    """

    def __init__(
        self, num_caps: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        check_positive(num_caps=num_caps)
        super().__init__()
        self.num_caps = num_caps
        self.bias = nn.Parameter(torch.empty(num_caps, 4, 4, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to zero."""
        nn.init.zeros_(self.bias)

    def forward(self, capsules: Capsules) -> Capsules:
        poses, activations = _pair(capsules, self)
        space = [f"space{axis}" for axis in range(max(activations.ndim - 2, 0))]
        check_shape("poses", poses, ["N", self.num_caps, *space, 4, 4])
        check_shape("activations", activations, poses.shape[:-2])
        check_like_layer("poses", poses, self.bias)
        return Capsules(poses + self.bias.view(self.num_caps, *[1] * len(space), 4, 4), activations)

    def extra_repr(self) -> str:
        return f"{self.num_caps}"


def _pair(capsules: Capsules, layer: nn.Module) -> tuple[Tensor, Tensor]:
    if not isinstance(capsules, tuple) or len(capsules) != 2:
        given = f"a {type(capsules).__name__}"
        raise TypeError(f"capsules must be Capsules(poses, activations), but {type(layer).__name__} got {given}")
    check_tensor("poses", capsules[0])
    check_tensor("activations", capsules[1])
    return capsules[0], capsules[1]
