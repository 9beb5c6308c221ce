"""Named tuples of the tensors that layers take and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple


class Capsules(NamedTuple):
    """The capsules of a layer: a named tuple of two tensors.

    Attributes:
        poses: the pose of each capsule, a 4x4 matrix or a vector.
        activations: how likely each capsule is present.

    Shape:
        - matrix capsules: poses [N, C, *space, 4, 4], activations [N, C, *space]
        - vector capsules: poses [N, C, *space, D], activations [N, C, *space], the lengths of the poses

    Example:
        >>> import torch
        >>> from tritoncaps import Capsules
        >>> capsules = Capsules(torch.randn(2, 8, 6, 6, 4, 4), torch.rand(2, 8, 6, 6))
        >>> poses, activations = capsules
        >>> capsules.to(torch.float64).activations.dtype
        torch.float64
    """

    poses: Tensor
    activations: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Capsules:
        """Apply a function to both tensors.

        Args:
            function: a function of a tensor that returns a tensor.

        Returns:
            New capsules of the two results.
        """
        return Capsules(function(self.poses), function(self.activations))

    def to(self, *args: Any, **kwargs: Any) -> Capsules:
        """Move or cast both tensors, as ``torch.Tensor.to`` does.

        Args:
            *args: arguments of ``torch.Tensor.to``.
            **kwargs: keyword arguments of ``torch.Tensor.to``.

        Returns:
            New capsules.
        """
        return self.map(lambda x: x.to(*args, **kwargs))

    def detach(self) -> Capsules:
        """New capsules of both tensors, detached from the autograd graph."""
        return self.map(Tensor.detach)


class Gaussians(NamedTuple):
    """The parents after an M-step: a diagonal Gaussian and a logit for each. A named tuple of three tensors.

    Attributes:
        mean: mean of the votes for each parent.
        variance: variance of the votes for each parent.
        logits: logit of the activation of each parent.

    Shape:
        - mean and variance: [N, C, *space, *pose]
        - logits: [N, C, *space]

    Example:
        >>> import torch
        >>> from tritoncaps import Gaussians
        >>> Gaussians(torch.zeros(1, 2, 4, 4), torch.ones(1, 2, 4, 4), torch.zeros(1, 2)).activations
        tensor([[0.5000, 0.5000]])
    """

    mean: Tensor
    variance: Tensor
    logits: Tensor

    @property
    def activations(self) -> Tensor:
        """The activations of the parents: a_j = sigmoid(logit_j)."""
        return torch.sigmoid(self.logits)


# so that torch.export can save programs that take or return them
_register_namedtuple(Capsules, serialized_type_name="tritoncaps.Capsules")
_register_namedtuple(Gaussians, serialized_type_name="tritoncaps.Gaussians")
