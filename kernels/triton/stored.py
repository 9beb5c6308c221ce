"""Votes, coordinate addition, M-step and E-step on arrays in memory, forward and backward.

Votes are [N, P, S, B, H, C] and assignments [N, P, S, B, C], for any pose size H; parents' arrays are [N, P, H, C] and
[N, P, C], children's [N, L, 16, B] and [N, L, B]. What missing slots hold is never read, and is written as zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from tritoncaps.kernels.em_routing import Fit
from tritoncaps.kernels.triton import child_view, edge_view, parents
from tritoncaps.kernels.triton.config import blocks
from tritoncaps.kernels.triton.em_routing import (
    ENTRIES,
    child_sum,
    children_from_votes,
    log_sum,
    moments,
    weight_from_votes,
)
from tritoncaps.kernels.triton.launch import Edges, arithmetic, contiguous, launch, make_edges
from tritoncaps.kernels.triton.parents import Moments, Statistics
from tritoncaps.routing_map import Tables


def pose_votes_forward(poses: Tensor, weight: Tensor, tables: Tables) -> Tensor:
    """V_ij = M_i W_ij: poses [N, L, 16, B], weight [K, B, C, 4, 4] -> votes [N, P, S, B, 16, C]."""
    edges = _pose_edges(poses, weight, tables)
    N, P, S, B, C = (edges.sizes[name] for name in "NPSBC")
    votes = poses.new_empty(N, P, S, B, ENTRIES, C)
    _each_edge(edges, edge_view.pose_votes_kernel, edges.poses, edges.weight, tables.children, tables.weight_of, votes)
    return votes


def pose_votes_backward(grad_votes: Tensor, poses: Tensor, weight: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """dL/dM [N, L, 16, B] and dL/dW [K, B, C, 4, 4]."""
    edges = _pose_edges(poses, weight, tables)
    grad_votes, none = grad_votes.contiguous(), (None,) * 9
    grad_poses, _ = children_from_votes(edges, grad_votes, none, 0, 0)
    return grad_poses, weight_from_votes(edges, grad_votes, none, 0, 0)


def coordinate_addition_forward(votes: Tensor, tables: Tables) -> Tensor:
    """Votes [N, P, S, B, 16, C] plus the map's offset of each slot, in the right-hand column."""
    edges = _edges(votes, None, tables, "global")
    out = torch.empty_like(edges.votes)
    _each_edge(edges, edge_view.coordinate_addition_kernel, edges.votes, tables.offset.to(edges.dtype), out)
    return out


def coordinate_addition_backward(grad_votes: Tensor) -> Tensor:
    """The offsets are constants: the gradient of the votes is that of the sum."""
    return grad_votes


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
) -> Statistics:
    """Fit every parent's Gaussian to its votes: mean, variance [N, P, H, C], logit, support [N, P, C]."""
    edges = _edges(votes, activations, tables, "global")
    fit = Fit(beta_u, beta_a, inverse_temperature, variance_floor, mean_data)
    return parents.fit(_moments(edges, assignments, None), fit)


def m_step_backward(
    grad_mean: Tensor,
    grad_variance: Tensor,
    grad_logit: Tensor,
    votes: Tensor,
    assignments: Tensor,
    activations: Tensor,
    beta_u: Tensor,
    statistics: Sequence[Tensor],
    tables: Tables,
    inverse_temperature: float,
    variance_floor: float,
    mean_data: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of votes, assignments, activations, beta_u and beta_a."""
    edges = _edges(votes, activations, tables, "global")
    fit = Fit(beta_u, beta_u, inverse_temperature, variance_floor, mean_data)
    found = Statistics(*statistics)
    A, B, C, _, grad_beta_u, grad_beta_a = parents.fit_backward(
        grad_mean, grad_variance, grad_logit, found, found.mean, fit
    )
    assignments = assignments.contiguous()
    grad_votes, grad_assignments = torch.empty_like(edges.votes), torch.empty_like(assignments)
    slope = edges.empty(*assignments.shape)
    _each_edge(
        edges,
        edge_view.m_step_gradient_kernel,
        *(edges.votes, assignments, edges.activations, tables.children),
        *contiguous(found.mean, A, B, C),
        *(grad_votes, grad_assignments, slope),
        H=votes.shape[4],
    )
    grad_activations = child_sum(edges, child_view.edge_product_kernel, assignments, slope, *edges.groups)
    return grad_votes, grad_assignments, grad_activations, grad_beta_u.sum(dim=(0, 1)), grad_beta_a.sum(dim=(0, 1))


def e_step_forward(
    votes: Tensor, mean: Tensor, variance: Tensor, logit: Tensor, tables: Tables, competition: str
) -> Tensor:
    """Share every child among its parents: assignments [N, P, S, B, C]."""
    edges = _edges(votes, None, tables, competition)
    gaussian = parents.likelihood(Statistics(mean, variance, logit, logit))
    assignments = votes.new_empty(*votes.shape[:4], votes.shape[5])
    _each_edge(
        edges,
        edge_view.assignment_kernel,
        *(edges.votes, tables.children, *contiguous(*gaussian), log_sum(edges, gaussian), assignments),
        H=votes.shape[4],
        LOCAL=edges.local,
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
    """Gradients of votes, mean, variance and logit; `assignments` is what the forward pass returned."""
    edges = _edges(votes, None, tables, competition)
    assignments, grad_assignments = assignments.contiguous(), grad_assignments.contiguous()
    dot = child_sum(edges, child_view.edge_product_kernel, assignments, grad_assignments, *edges.groups)
    grad_votes, dl = torch.empty_like(edges.votes), edges.empty(*assignments.shape)
    _each_edge(
        edges,
        edge_view.e_step_gradient_kernel,
        *(edges.votes, assignments, grad_assignments, tables.children),
        *contiguous(mean, 0.5 / variance),
        *(dot, dl, grad_votes),
        H=votes.shape[4],
        LOCAL=edges.local,
    )
    statistics = Statistics(mean, variance, logit, logit)
    return grad_votes, *parents.likelihood_backward(_moments(edges, dl, mean), statistics)


def _moments(edges: Edges, weights: Tensor, mean: Tensor | None) -> Moments:
    """The moments of stored votes with stored weights, about `mean` or about their own."""
    parts = []
    for i_h in range(0, edges.votes.shape[4], ENTRIES):
        centre = None if mean is None else mean[:, :, i_h : i_h + ENTRIES]
        count = min(ENTRIES, edges.votes.shape[4] - i_h)
        parts.append(moments(edges, "stored", centre, stored=weights, i_h=i_h, count=count, about_mean=mean is None))
    total, *entries = zip(*parts, strict=True)
    return Moments(total[0], *(torch.cat(part, dim=2) for part in entries))


def _pose_edges(poses: Tensor, weight: Tensor, tables: Tables) -> Edges:
    sizes = poses.shape[0], *weight.shape[1:3]
    return make_edges(tables, "global", arithmetic(poses, weight), sizes, poses, weight, None, poses[:, :, 0])


def _edges(votes: Tensor, activations: Tensor | None, tables: Tables, competition: str) -> Edges:
    N, _, _, B, _, C = votes.shape
    given = (votes,) if activations is None else (votes, activations)
    votes, activations = contiguous(votes, activations)
    return make_edges(tables, competition, arithmetic(*given), (N, B, C), votes=votes, activations=activations)


def _each_edge(edges: Edges, kernel: object, *pointers: Tensor | None, **numbers: object) -> None:
    """Launch a kernel of the edge view: a program for each pair, block of child types and block of images."""
    sizes, tile = edges.sizes, edges.config.gradient
    programs = blocks(sizes["N"], tile.BN) * blocks(sizes["B"], tile.BB) * sizes["P"] * sizes["S"]
    dtype = tl.float64 if edges.dtype == torch.float64 else tl.float32
    launch(kernel, programs, tile, *pointers, **sizes, **numbers, DTYPE=dtype)
