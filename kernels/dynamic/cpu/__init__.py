"""Dynamic routing and squash on the CPU, compiled by Numba."""

from tritoncaps.kernels.dynamic.cpu.routing import backward, forward
from tritoncaps.kernels.dynamic.cpu.squash import squash, squash_gradient

__all__ = ["backward", "forward", "squash", "squash_gradient"]
