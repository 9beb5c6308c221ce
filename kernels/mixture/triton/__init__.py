"""Mixture routings in Triton, for CUDA, ROCm and Triton's interpreter: the three views."""

from tritoncaps.kernels.mixture.triton import stored
from tritoncaps.kernels.mixture.triton.backend import TritonMixture
from tritoncaps.kernels.mixture.triton.em_routing import (
    beta_gradients,
    child_and_weight_gradient,
    da_shape,
    edges,
    em_step,
    first_m_step,
    log_sums_shape,
    output_slopes,
    outputs,
    slopes_before,
    slopes_shape,
    statistics_shape,
)

BACKEND = TritonMixture()

__all__ = [
    "BACKEND",
    "beta_gradients",
    "child_and_weight_gradient",
    "da_shape",
    "edges",
    "em_step",
    "first_m_step",
    "log_sums_shape",
    "output_slopes",
    "outputs",
    "slopes_before",
    "slopes_shape",
    "statistics_shape",
    "stored",
]
