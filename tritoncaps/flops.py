"""Floating-point operations of our operators, for `torch.utils.flop_counter.FlopCounterMode`.

Import this module before you create the counter:

    import tritoncaps.flops
    with FlopCounterMode() as counter: ...

`import tritoncaps` does not import it, because torch's counter imports Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from tritoncaps.kernels.common.flops import (
    COORDINATES,
    PRODUCT,
    SQUASH,
    STORED,
    VOTE,
    backward_flops,
    dynamic_backward_flops,
    dynamic_forward_flops,
    forward_flops,
)
from tritoncaps.routing_map import Tables

Shape = Sequence[int]


@register_flop_formula(torch.ops.tritoncaps.em_routing_forward)
def em_routing_forward(
    poses: Shape,
    activations: Shape,
    weight: Shape,
    beta_u: Shape,
    beta_a: Shape,
    tables: Any,
    lambdas: Any,
    *_: Any,
    **__: Any,
) -> int:
    return _votes(poses, weight, tables) * forward_flops(len(lambdas))


@register_flop_formula(torch.ops.tritoncaps.em_routing_backward)
def em_routing_backward(
    grad_poses: Shape,
    grad_activations: Shape,
    poses: Shape,
    activations: Shape,
    weight: Shape,
    beta_u: Shape,
    beta_a: Shape,
    tables: Any,
    statistics: Shape,
    *_: Any,
    **__: Any,
) -> int:
    return _votes(poses, weight, tables) * backward_flops(statistics[0])


@register_flop_formula(torch.ops.tritoncaps.dynamic_routing_forward)
def dynamic_routing_forward(
    poses: Shape, weight: Shape, priors: Any, tables: Any, iterations: int, *_: Any, **__: Any
) -> int:
    return _votes(poses, weight, tables) * dynamic_forward_flops(iterations, *weight[3:])


@register_flop_formula(torch.ops.tritoncaps.dynamic_routing_backward)
def dynamic_routing_backward(
    grad: Shape, poses: Shape, weight: Shape, priors: Any, sums: Shape, tables: Any, iterations: int, *_: Any, **__: Any
) -> int:
    return _votes(poses, weight, tables) * dynamic_backward_flops(iterations, *weight[3:])


@register_flop_formula(torch.ops.tritoncaps.pose_votes_forward)
def pose_votes_forward(poses: Shape, weight: Shape, tables: Any, *_: Any, **__: Any) -> int:
    return _votes(poses, weight, tables) * VOTE


@register_flop_formula(torch.ops.tritoncaps.pose_votes_backward)
def pose_votes_backward(grad: Shape, poses: Shape, weight: Shape, tables: Any, *_: Any, **__: Any) -> int:
    return _votes(poses, weight, tables) * 2 * PRODUCT


@register_flop_formula(torch.ops.tritoncaps.coordinate_addition)
def coordinate_addition(votes: Shape, tables: Any, *_: Any, **__: Any) -> int:
    return _stored(votes, tables) * COORDINATES


def _register_step(name: str, votes_position: int, tables_position: int) -> None:
    """Register the formula of an operator on stored votes [N, P, S, B, C, H]."""

    def formula(*shapes: Any, **_: Any) -> int:
        votes = shapes[votes_position]
        return _stored(votes, shapes[tables_position]) * STORED[name](votes[5])

    register_flop_formula(getattr(torch.ops.tritoncaps, name))(formula)


for _name, _positions in {
    "m_step_forward": (0, 5),
    "m_step_backward": (3, 8),
    "e_step_forward": (0, 4),
    "e_step_backward": (1, 6),
}.items():
    _register_step(_name, *_positions)


@register_flop_formula(torch.ops.tritoncaps.squash_forward)
def squash_forward(vectors: Shape, *_: Any, **__: Any) -> int:
    return math.prod(vectors) * SQUASH["squash_forward"]


@register_flop_formula(torch.ops.tritoncaps.squash_backward)
def squash_backward(grad: Shape, *_: Any, **__: Any) -> int:
    return math.prod(grad) * SQUASH["squash_backward"]


def _votes(poses: Shape, weight: Shape, tables: Sequence[Shape]) -> int:
    """Number of votes: images times edges times child types times parent types."""
    return poses[0] * Tables(*tables).parents_pair[0] * weight[1] * weight[2]  # type: ignore[arg-type, return-value]


def _stored(votes: Shape, tables: Sequence[Shape]) -> int:
    """The same, from the shape of stored votes, whose missing slots do not count."""
    return votes[0] * Tables(*tables).parents_pair[0] * votes[3] * votes[4]  # type: ignore[arg-type, return-value]
