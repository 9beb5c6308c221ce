"""EM routing in Triton: the three views, for CUDA, ROCm and Triton's interpreter."""

from tritoncaps.kernels.triton.em_routing import (
    child_and_weight_gradient,
    child_assignment_gradient,
    child_gradient,
    child_log_sum,
    edges,
    parent_gradient_moments,
    parent_moments,
    weight_gradient,
)

__all__ = [
    "child_and_weight_gradient",
    "child_assignment_gradient",
    "child_gradient",
    "child_log_sum",
    "edges",
    "parent_gradient_moments",
    "parent_moments",
    "weight_gradient",
]
