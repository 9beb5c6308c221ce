"""Dynamic routing and squash in Triton."""

from tritoncaps.kernels.dynamic.triton.routing import backward, forward
from tritoncaps.kernels.dynamic.triton.squash import squash, squash_gradient

__all__ = ["backward", "forward", "squash", "squash_gradient"]
