"""The tensors that pass between layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple


class Capsules(NamedTuple):
    """A layer's capsules: what each one has seen, and how sure it is that it is there.

    Matrix capsules: ``poses`` [N, C, *space, 4, 4], ``activations`` [N, C, *space].
    Vector capsules: ``poses`` [N, C, *space, D], ``activations`` [N, C, *space] (the lengths of the poses).
    """

    poses: Tensor
    activations: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Capsules:
        """Both tensors, each as ``function`` returns it."""
        return Capsules(function(self.poses), function(self.activations))

    def to(self, *args: Any, **kwargs: Any) -> Capsules:
        """Both tensors on another device or of another dtype, as :meth:`torch.Tensor.to` takes them."""
        return self.map(lambda x: x.to(*args, **kwargs))

    def detach(self) -> Capsules:
        """Both tensors without their history."""
        return self.map(Tensor.detach)


class Gaussians(NamedTuple):
    """What an M-step knows of each parent: a diagonal Gaussian over its votes and a logit.

    ``mean`` and ``variance`` [N, C, *space, *pose], ``logits`` [N, C, *space].
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
