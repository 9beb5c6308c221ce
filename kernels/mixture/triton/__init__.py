"""Mixture routings in Triton, for CUDA, ROCm and Triton's interpreter: the three views."""

from tritoncaps.kernels.mixture.triton import stored
from tritoncaps.kernels.mixture.triton.backend import BACKEND

__all__ = ["BACKEND", "stored"]
