"""EM routing in Triton, for CUDA, ROCm and Triton's interpreter: the three views, and operations on stored votes."""

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
from tritoncaps.kernels.triton.stored import (
    coordinate_addition_backward,
    coordinate_addition_forward,
    e_step_backward,
    e_step_forward,
    m_step_backward,
    m_step_forward,
    pose_votes_backward,
    pose_votes_forward,
)

__all__ = [
    "child_and_weight_gradient",
    "child_assignment_gradient",
    "child_gradient",
    "child_log_sum",
    "coordinate_addition_backward",
    "coordinate_addition_forward",
    "e_step_backward",
    "e_step_forward",
    "edges",
    "m_step_backward",
    "m_step_forward",
    "parent_gradient_moments",
    "parent_moments",
    "pose_votes_backward",
    "pose_votes_forward",
    "weight_gradient",
]
