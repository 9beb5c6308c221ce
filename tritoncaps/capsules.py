"""The tensors that pass between layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple


class Capsules(NamedTuple):
    """A layer's capsules: the pose of each one, and how likely it is present. A named tuple of two tensors.

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
        """``function`` of both tensors, as new Capsules."""
        return Capsules(function(self.poses), function(self.activations))

    def to(self, *args: Any, **kwargs: Any) -> Capsules:
        """Both tensors on another device or of another dtype, as ``torch.Tensor.to`` takes them."""
        return self.map(lambda x: x.to(*args, **kwargs))

    def detach(self) -> Capsules:
        """Both tensors without their history."""
        return self.map(Tensor.detach)


class Gaussians(NamedTuple):
    """The result of an M-step for each parent: a diagonal Gaussian over its votes, and a logit. A named tuple.

    Shape:
        - mean and variance: [N, C, *space, *pose]
        - logits: [N, C, *space]
    """

    mean: Tensor
    variance: Tensor
    logits: Tensor

    @property
    def activations(self) -> Tensor:
        """a_j = sigmoid(logit_j)."""
        return torch.sigmoid(self.logits)


# so that torch.export can save programs that take or give them
_register_namedtuple(Capsules, serialized_type_name="tritoncaps.Capsules")
_register_namedtuple(Gaussians, serialized_type_name="tritoncaps.Gaussians")
