"""Votes, coordinate addition, M-step and E-step on arrays in memory, forward and backward.

Shapes, for any number H of pose entries:

    votes       [N, P, S, B, C, H]     mean, variance  [N, P, C, H]     poses        [N, B, L, 16]
    assignments [N, P, S, B, C]        logit           [N, P, C]        activations  [N, B, L]

Kernels read and write votes with the types last, [N, P, S, B, H, C]. Votes that these functions return have the strides
of such an array. The kernels do not read missing slots, and write zeros to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from tritoncaps.kernels.common.numerics import widen
from tritoncaps.kernels.common.tables import Tables, offset_of
from tritoncaps.kernels.common.triton.launching import blocks
from tritoncaps.kernels.mixture.iteration import Fit
from tritoncaps.kernels.mixture.triton import child_view, edge_view, parents
from tritoncaps.kernels.mixture.triton.launch import Edges, arithmetic, launch, make_edges
from tritoncaps.kernels.mixture.triton.rows import (
    CONSTANT,
    LOGIT,
    MEAN,
    TYPES,
    pack,
    pack_weight,
    slopes_rows,
    statistics_rows,
    type_blocks,
    unpack,
)
from tritoncaps.kernels.mixture.triton.views import (
    ENTRIES,
    child_gradient,
    child_log_sum,
    child_sum,
    empty_moments,
    sum_moments,
    weight_gradient,
)


def pose_votes_forward(poses: Tensor, weight: Tensor, tables: Tables) -> Tensor:
    """V_ij = M_i W_ij: poses [N, B, L, 16], weight [K, B, C, 4, 4] -> votes [N, P, S, B, C, 16]."""
    edges = _pose_edges(poses, weight, tables)
    N, P, S, B, C = (edges.sizes[name] for name in "NPSBC")
    votes = empty_votes(poses, (N, P, S, B, C, ENTRIES))
    _each_edge(edges, edge_view.pose_votes_kernel, p_out=votes.transpose(4, 5))
    return votes


def pose_votes_backward(grad_votes: Tensor, poses: Tensor, weight: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """dL/dM [N, B, L, 16] and dL/dW [K, B, C, 4, 4], from dL/dV [N, P, S, B, C, 16]."""
    edges = _pose_edges(poses, weight, tables)
    given = {"p_dV": _types_fastest(grad_votes), "T": 0, "ALL": False, "ANY_FIT": False}
    given |= dict.fromkeys(("p_statistics", "p_slopes", "p_log_sums", "p_da"))
    return child_gradient(edges, **given)[0].movedim(3, 1), weight_gradient(edges, **given)


def coordinate_addition_forward(votes: Tensor, tables: Tables) -> Tensor:
    """Add the offset of each slot in the routing map to the right-hand column of its votes [N, P, S, B, C, 16]."""
    edges = _edges(votes, None, tables, "global")
    out, offset = empty_votes(votes, votes.shape), offset_of(tables, edges.dtype)
    _each_edge(edges, edge_view.coordinate_addition_kernel, p_offset=offset, p_out=out.transpose(4, 5))
    return out


def statistics_shape(images: int, parents_count: int, types: int, entries: int) -> tuple[int, ...]:
    """The shape of the statistics that an M-step keeps for its gradient; `entries` is H."""
    return images, parents_count, type_blocks(types), statistics_rows(entries), TYPES.value


def m_step_forward(
    votes: Tensor,
    assignments: Tensor,
    activations: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    tables: Tables,
    inverse_temperature: float,
    variance_floor: float,
    mean_data: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The M-step: mean [N, P, C, H], variance [N, P, C, H] and logit [N, P, C] of every parent, and its statistics
    [N, P, blocks, 4 + 2 H, 16], rows as in `rows.py`."""
    edges = _edges(votes, activations, tables, "global")
    N, P, _, _, C, H = votes.shape
    moments = _moments(edges, "stored assignment", assignments.contiguous(), None)
    statistics = edges.empty(*statistics_shape(N, P, C, H))
    fit = Fit(widen(beta_u).contiguous(), widen(beta_a).contiguous(), inverse_temperature, variance_floor, mean_data)
    parents.fit(moments, None, fit, statistics)
    rows = unpack(statistics, C).clone()
    logit, mean, precision = rows[:, :, LOGIT.value], rows[:, :, MEAN.value :][:, :, :H], rows[:, :, -H:]
    variance = (0.5 / precision).clamp(min=variance_floor)  # 0.5 / precision may be rounded to less
    copy = mean.transpose(2, 3).clone(memory_format=torch.contiguous_format)
    return copy, variance.transpose(2, 3), logit.clone(), statistics


def m_step_backward(
    grad_mean: Tensor,
    grad_variance: Tensor,
    grad_logit: Tensor,
    votes: Tensor,
    assignments: Tensor,
    activations: Tensor,
    beta_u: Tensor,
    statistics: Tensor,
    tables: Tables,
    inverse_temperature: float,
    variance_floor: float,
    mean_data: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of votes, assignments, activations, beta_u [C] and beta_a [C]."""
    edges = _edges(votes, activations, tables, "global")
    beta_u = widen(beta_u).contiguous()
    fit = Fit(beta_u, beta_u, inverse_temperature, variance_floor, mean_data)
    N, P, _, _, C, H = votes.shape
    slopes = edges.empty(N, P, type_blocks(C), slopes_rows(H), TYPES.value)
    parents.slopes(
        statistics,
        None,
        fit,
        slopes,
        p_grad_mean=_types_fastest(grad_mean),
        p_grad_variance=_types_fastest(grad_variance),
        p_grad_logit=grad_logit.contiguous(),
    )
    assignments = assignments.contiguous()
    grad_votes, grad_assignments = _like_votes(edges), torch.empty_like(assignments)
    slope, grad_activations = edges.empty(*assignments.shape), edges.empty(*(edges.sizes[name] for name in "NLB"))
    _each_edge(
        edges,
        edge_view.m_step_gradient_kernel,
        p_assignments=assignments,
        p_statistics=statistics,
        p_slopes=slopes,
        p_grad_votes=grad_votes,
        p_grad_assignments=grad_assignments,
        p_slope=slope,
        H=votes.shape[5],
    )
    child_sum(edges, child_view.edge_product_kernel, grad_activations, p_left=assignments, p_right=slope)
    betas = parents.beta_gradients(slopes[None], C)
    return grad_votes.transpose(4, 5), grad_assignments, grad_activations.transpose(1, 2), *betas


def e_step_forward(
    votes: Tensor, mean: Tensor, variance: Tensor, logit: Tensor, tables: Tables, competition: str
) -> Tensor:
    """The E-step: assignments R_ij = exp(l_ij - log_sum_i), [N, P, S, B, C]."""
    edges = _edges(votes, None, tables, competition)
    statistics = _statistics(mean, variance, logit)
    assignments = votes.new_empty(votes.shape[:5])
    log_sum = edges.empty_groups()
    child_log_sum(edges, statistics, log_sum)
    _each_edge(
        edges,
        edge_view.assignment_kernel,
        p_statistics=statistics,
        p_log_sum=log_sum,
        p_out=assignments,
        H=votes.shape[5],
    )
    return assignments


def e_step_backward(
    grad_assignments: Tensor,
    votes: Tensor,
    mean: Tensor,
    variance: Tensor,
    logit: Tensor,
    assignments: Tensor,
    tables: Tables,
    competition: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of votes, mean, variance and logit; `assignments` is the result of the forward pass."""
    edges = _edges(votes, None, tables, competition)
    assignments, grad_assignments = assignments.contiguous(), grad_assignments.contiguous()
    statistics = _statistics(mean, variance, logit)
    dot = edges.empty_groups()
    child_sum(edges, child_view.edge_product_kernel, dot, p_left=assignments, p_right=grad_assignments)
    grad_votes, dl = _like_votes(edges), edges.empty(*assignments.shape)
    _each_edge(
        edges,
        edge_view.e_step_gradient_kernel,
        p_assignments=assignments,
        p_grad_assignments=grad_assignments,
        p_statistics=statistics,
        p_dot=dot,
        p_dl=dl,
        p_grad_votes=grad_votes,
        H=votes.shape[5],
    )
    entries = mean.shape[3]
    moments = unpack(_moments(edges, "stored gradient", dl, statistics).sum(dim=0), mean.shape[2]).transpose(2, 3)
    m0, m1, m2 = moments.split((1, entries, entries), dim=3)
    wide = widen(variance)
    grad_variance, grad_logit = 0.5 * (m2 / wide - m0) / wide, m0.squeeze(3) * torch.sigmoid(-widen(logit))
    return grad_votes.transpose(4, 5), m1 / wide, grad_variance, grad_logit


def _statistics(mean: Tensor, variance: Tensor, logit: Tensor) -> Tensor:
    """Statistics [N, P, blocks, 4 + 2 H, 16] with the rows that an E-step reads: mean, precision and constant."""
    mean, variance, logit = widen(mean).transpose(2, 3), widen(variance).transpose(2, 3), widen(logit)
    constant = F.logsigmoid(logit) - 0.5 * (2 * math.pi * variance).log().sum(dim=2)
    unread = logit[:, :, None].expand(-1, -1, MEAN.value - 1, -1)
    rows = pack(torch.cat([constant[:, :, None], unread, mean, 0.5 / variance], dim=2))
    rows[:, :, :, CONSTANT.value] = pack(constant[:, :, None], -math.inf)[:, :, :, 0]
    return rows


def _moments(edges: Edges, weights: str, stored: Tensor, statistics: Tensor | None) -> Tensor:
    """The moments of stored votes minus the mean of `statistics`; the weights [N, P, S, B, C] are stored as well."""
    assert edges.votes is not None
    out = empty_moments(edges, edges.votes.shape[4])
    for i_h in range(0, edges.votes.shape[4], ENTRIES):
        sum_moments(edges, weights, out, i_h, p_statistics=statistics, p_weights=stored)
    return out


def empty_votes(x: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor [N, P, S, B, C, H] that is contiguous as [N, P, S, B, H, C]. It is not a view of another tensor,
    so that users can change it in place."""
    return torch.empty_permuted(tuple(shape), (0, 1, 2, 3, 5, 4), dtype=x.dtype, device=x.device)


def _types_fastest(x: Tensor) -> Tensor:
    """[..., C, H] -> [..., H, C], contiguous."""
    return x.transpose(-1, -2).contiguous()


def _pose_edges(poses: Tensor, weight: Tensor, tables: Tables) -> Edges:
    sizes, children = (poses.shape[0], *weight.shape[1:3]), poses.transpose(1, 2).contiguous()
    return make_edges(tables, "global", arithmetic(poses, weight), sizes, children, pack_weight(weight))


def _edges(votes: Tensor, activations: Tensor | None, tables: Tables, competition: str) -> Edges:
    N, _, _, B, C, _ = votes.shape
    given = (votes,) if activations is None else (votes, activations)
    children = None if activations is None else activations.transpose(1, 2).contiguous()
    dtype, packed = arithmetic(*given), _types_fastest(votes)
    return make_edges(tables, competition, dtype, (N, B, C), votes=packed, activations=children)


def _like_votes(edges: Edges) -> Tensor:
    """An empty tensor with the shape of the votes in kernels, [N, P, S, B, H, C]."""
    assert edges.votes is not None
    return torch.empty_like(edges.votes)


def _each_edge(edges: Edges, kernel: object, **given: Any) -> None:
    """Launch a kernel of the edge view: one program for each image block, child type block and pair p S + s."""
    sizes, tile = edges.sizes, edges.config.stored
    programs = blocks(sizes["N"], tile.BN) * blocks(sizes["B"], tile.BB) * sizes["P"] * sizes["S"]
    dtype = tl.float64 if edges.dtype == torch.float64 else tl.float32
    launch(kernel, programs, tile, edges, **given, DTYPE=dtype)
