"""EM routing in Triton, for CUDA, ROCm and Triton's interpreter: the three views, and operations on stored votes."""

from tritoncaps.kernels.triton.em_routing import (
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
from tritoncaps.kernels.triton.stored import (
    coordinate_addition_forward,
    e_step_backward,
    e_step_forward,
    m_step_backward,
    m_step_forward,
    pose_votes_backward,
    pose_votes_forward,
)

__all__ = [
    "beta_gradients",
    "child_and_weight_gradient",
    "coordinate_addition_forward",
    "da_shape",
    "e_step_backward",
    "e_step_forward",
    "edges",
    "em_step",
    "first_m_step",
    "log_sums_shape",
    "m_step_backward",
    "m_step_forward",
    "output_slopes",
    "outputs",
    "pose_votes_backward",
    "pose_votes_forward",
    "slopes_before",
    "slopes_shape",
    "statistics_shape",
]
