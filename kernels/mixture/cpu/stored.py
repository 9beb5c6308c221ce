"""Pose votes, M-step and E-step on stored votes, forward and backward.

Votes are [N, P, S, B, C, H] and assignments [N, P, S, B, C], for any pose size H; arrays of parents are [N, P, C, H]
and [N, P, C], of children [N, B, L]. The kernels do not read the entries of missing slots, and write zeros there.

Memory bandwidth is the limit, so the kernels read votes once and write gradients of votes once. The M-step reads votes
twice, but the second time from a cache. A task owns a parent location of an image with all its edges, or some child
locations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritoncaps.kernels.common.cpu.arrays import array
from tritoncaps.kernels.common.cpu.compiling import inlined, kernel, part
from tritoncaps.kernels.common.cpu.processor import VECTOR_BYTES
from tritoncaps.kernels.common.cpu.tasks import first_task, next_task
from tritoncaps.kernels.common.cpu.threads import Plan, run
from tritoncaps.kernels.common.cpu.workspace import empty, scratch
from tritoncaps.kernels.common.numerics import least_support, widen
from tritoncaps.kernels.common.tables import Tables
from tritoncaps.kernels.dynamic.cpu.squash import product_of
from tritoncaps.kernels.mixture.cpu.stored_votes import (
    add_first,
    add_second,
    e_step_gradient,
    log_likelihood,
    logarithms,
    m_step_gradient,
    pose_votes,
    pose_votes_gradient,
    softmax,
)

GROUPS = 8  # groups of competing parents in a task
TYPES = 4  # child types of a task for the gradients of poses and weight
CHUNKS = 8  # largest number of parts of the images, each with its own gradient of the weight
FLOOR, LEAST_SUPPORT = 0, 1  # indices of the limits: smallest variance; a parent with this support or less has none
SUPPORT, MEAN, VARIANCE = 0, 1, 2  # the moments of an M-step
LOG_TWO_PI = math.log(2 * math.pi)


class Edges(NamedTuple):
    """Votes and their edges: flat arrays and their sizes, in the form that Numba accepts."""

    votes: NDArray  # [N, P, S, B, C, H]
    children: NDArray  # int32 [P, S]: child location, or -1
    start: NDArray  # int32 [G + 1]: the edges of a group of competing parents are pairs[start[g]:start[g + 1]]
    pairs: NDArray  # int32 [E]: p S + s
    images: int
    parents: int  # P
    slots: int  # S
    child_types: int  # B
    children_count: int  # L
    parent_types: int  # C
    entries: int  # H
    groups: int  # G: child locations; edges if the competition is local
    degree: int  # largest number of edges of a group
    rivals: int  # parent types that compete: C; 1 if only positions compete


def empty_votes(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor for votes of this shape, in the dtype of ``like``."""
    return like.new_empty(shape)


def pose_votes_forward(poses: Tensor, weight: Tensor, tables: Tables) -> Tensor:
    """Votes V_ij = M_i W_ij [N, P, S, B, C, 16] from poses [N, B, L, 16] and weight [K, B, C, 4, 4]."""
    poses, weight = widen(poses), widen(weight)
    votes = empty((len(poses), *tables.children.shape, *weight.shape[1:3], poses.shape[3]), poses.dtype)
    e = _edges(votes, tables, "global")
    run(_pose_votes_kernel, e.images * e.slots, e, *map(array, (poses, weight, tables.weight_of)))
    return votes


def pose_votes_backward(grad_votes: Tensor, poses: Tensor, weight: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """dL/dM [N, B, L, 16] and dL/dW [K, B, C, 4, 4]."""
    grad_votes, poses, weight = widen(grad_votes), widen(poses), widen(weight)
    e = _edges(grad_votes, tables, "global")
    chunks = min(CHUNKS, e.images)
    grad_poses, grad_weight = poses.new_empty(poses.shape), weight.new_empty(chunks, *weight.shape)
    given = (array(x) for x in (poses, weight, tables.weight_of, grad_poses, grad_weight))
    run(_pose_votes_gradient_kernel, chunks * -(-e.child_types // TYPES), e, chunks, len(weight), *given)
    return grad_poses, grad_weight.sum(dim=0)


def statistics_shape(images: int, parents: int, types: int, entries: int) -> tuple[int, ...]:
    """The shape of the results that an M-step keeps: means and variances (without the floor) [C, H], supports and
    costs [C]."""
    return images, parents, (2 * entries + 2) * types


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
    """Fit a Gaussian to the votes for every parent: mean, variance, logit and statistics."""
    votes, assignments, activations, beta_u, beta_a = map(widen, (votes, assignments, activations, beta_u, beta_a))
    e = _edges(votes, tables, "global")
    statistics = votes.new_empty(statistics_shape(e.images, e.parents, e.parent_types, e.entries))
    given = (array(x) for x in (assignments, activations, beta_u, statistics))
    run(_m_step_kernel, e.images * e.parents, e, *given, _limits(variance_floor, votes.dtype))
    mean, variance, support, cost = _split(statistics, e)
    logit = inverse_temperature * (beta_a - cost * support / mean_data)
    return mean.clone(memory_format=torch.contiguous_format), variance.clamp(min=variance_floor), logit, statistics


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
    """Gradients of votes, assignments, activations, beta_u and beta_a."""
    votes, assignments, activations = map(widen, (votes, assignments, activations))
    e = _edges(votes, tables, "global")
    grad_beta_a = inverse_temperature * grad_logit
    grad_cost = -grad_beta_a / mean_data  # gradient of cost times support
    grads = [empty(x.shape, x.dtype) for x in (votes, assignments, activations)]
    products = scratch("products of edges", assignments.shape[:4], votes.dtype)
    given = (assignments, activations, statistics, grad_mean, grad_variance, grad_cost, *grads[:2], products)
    plan = Plan()
    limits = _limits(variance_floor, votes.dtype)
    plan.add(_m_step_gradient_kernel, e.images * e.parents, e, *map(array, given), limits)
    plan.add(_child_sum_kernel, _group_tasks(e), e, array(products), array(grads[2]))
    plan.run()
    grad_beta_u = e.entries * (grad_cost * _split(statistics, e)[2]).sum(dim=(0, 1))
    return *grads, grad_beta_u, grad_beta_a.sum(dim=(0, 1))


def e_step_forward(
    votes: Tensor, mean: Tensor, variance: Tensor, logit: Tensor, tables: Tables, competition: str
) -> Tensor:
    """The assignments [N, P, S, B, C] of every child to its parents."""
    votes, mean, variance, logit = map(widen, (votes, mean, variance, logit))
    e = _edges(votes, tables, competition)
    out = empty(votes.shape[:5], votes.dtype)
    plan = Plan()
    plan.add(_log_likelihood_kernel, e.images * e.parents, e, *map(array, (mean, variance, logit, out)))
    plan.add(_softmax_kernel, _group_tasks(e), e, array(out))
    plan.run()
    return out


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
    grad_assignments, votes, assignments = map(widen, (grad_assignments, votes, assignments))
    gaussians = [widen(x) for x in (mean, variance, logit)]
    e = _edges(votes, tables, competition)
    dl = scratch("dl of edges", assignments.shape, votes.dtype)
    grads = [empty(x.shape, x.dtype) for x in (votes, *gaussians)]
    plan = Plan()
    plan.add(_softmax_gradient_kernel, _group_tasks(e), e, *map(array, (assignments, grad_assignments, dl)))
    plan.add(_e_step_gradient_kernel, e.images * e.parents, e, *map(array, (*gaussians, dl, *grads)))
    plan.run()
    return grads[0], grads[1], grads[2], grads[3]


def _edges(votes: Tensor, tables: Tables, competition: str) -> Edges:
    N, P, S, B, C, H = votes.shape
    start, pairs, locations = tables.parents_start, tables.parents_pair, len(tables.parents_start) - 1
    if competition == "local":
        start = torch.arange(len(pairs) + 1, dtype=pairs.dtype)
    given, rivals = [array(x) for x in (votes, tables.children, start, pairs)], 1 if competition == "positions" else C
    return Edges(*given, N, P, S, B, locations, C, H, len(start) - 1, int(np.diff(given[2]).max(initial=0)), rivals)


def _limits(variance_floor: float, dtype: torch.dtype) -> NDArray:
    """The array [2] with the limits FLOOR and LEAST_SUPPORT."""
    return array(torch.tensor([variance_floor, least_support(dtype)], dtype=dtype))


def _split(statistics: Tensor, e: Edges) -> list[Tensor]:
    """Means and variances [N, P, C, H], supports and costs [N, P, C]."""
    types, numbers = e.parent_types, e.parent_types * e.entries
    *poses, support, cost = statistics.split((numbers, numbers, types, types), dim=2)
    return [*(x.unflatten(2, (types, e.entries)) for x in poses), support, cost]


def _group_tasks(e: Edges) -> int:
    return e.images * -(-e.groups // GROUPS)


@kernel
def _pose_votes_kernel(counter, tasks, e, poses, weight, weight_of):  # type: ignore[no-untyped-def]
    """e.votes = M W; poses [N, B, L, 16], weight [K, B, C, 16], weight_of [S]. A task owns a slot of all parent
    locations of an image, so it uses one weight block."""
    task = first_task(counter, tasks)
    while task < tasks:
        _pose_votes(e, task // e.slots, task % e.slots, poses, weight, weight_of)
        task = next_task(counter, tasks)


@part
def _pose_votes(e, n, s, poses, weight, weight_of):  # type: ignore[no-untyped-def]
    P, S, B, vote, votes = e.parents, e.slots, e.child_types, e.entries, e.parent_types * e.entries
    for p in range(P):
        child, edge = e.children[p * S + s], ((n * P + p) * S + s) * B
        if child < 0:
            _fill(e.votes, edge * votes, B * votes, 0)
            continue
        for b in range(B):
            pose, block = (n * B + b) * e.children_count + child, weight_of[s] * B + b
            pose_votes(e.votes, (edge + b) * votes, poses, pose * vote, weight, block * votes, e.parent_types)


@kernel
def _pose_votes_gradient_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, chunks, weights, poses, weight, weight_of, grad_poses, grad_weight
):
    """dM_i = sum_j dV_ij W_ij^T, dW = sum of M_i^T dV_ij, with dV in e.votes.

    grad_poses [N, B, L, 16], grad_weight [chunks, K, B, C, 16]. A task owns some child types of some images.
    """
    votes = e.parent_types * e.entries
    task = first_task(counter, tasks)
    while task < tasks:
        chunk, first = task % chunks, task // chunks * TYPES
        last, start = min(first + TYPES, e.child_types), chunk * weights * e.child_types
        for k in range(weights):
            _fill(grad_weight, (start + k * e.child_types + first) * votes, (last - first) * votes, 0)
        for n in range(chunk * e.images // chunks, (chunk + 1) * e.images // chunks):
            _pose_votes_gradient(e, n, first, last, start, poses, weight, weight_of, grad_poses, grad_weight)
        task = next_task(counter, tasks)


@part
def _pose_votes_gradient(  # type: ignore[no-untyped-def]
    e, n, first, last, start, poses, weight, weight_of, grad_poses, grad_weight
):
    """For the child types first, ..., last - 1 of an image; `start`: the first block of the task's grad_weight."""
    P, S, B, L, vote, votes = e.parents, e.slots, e.child_types, e.children_count, e.entries, e.parent_types * e.entries
    _fill(grad_poses, (n * B + first) * L * vote, (last - first) * L * vote, 0)
    for p in range(P):
        for s in range(S):
            child, edge = e.children[p * S + s], ((n * P + p) * S + s) * B
            for b in range(first, last if child >= 0 else first):
                pose, block = ((n * B + b) * L + child) * vote, weight_of[s] * B + b
                pose_votes_gradient(
                    grad_poses, pose, grad_weight, (start + block) * votes, e.votes, (edge + b) * votes, poses, pose,
                    weight, block * votes, e.parent_types,
                )  # fmt: skip


@kernel
def _m_step_kernel(counter, tasks, e, assignments, activations, beta_u, statistics, limits):  # type: ignore[no-untyped-def]
    """statistics [N, P, (2 H + 2) C]: mean, variance, support and cost = sum_h (beta_u + 1/2 log variance_h).

    A task owns all types of a parent location.
    """
    scale, logs = np.empty(e.parent_types, e.votes.dtype), np.empty(e.parent_types * e.entries, e.votes.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        _fit(e, task, assignments, activations, beta_u, statistics, limits, scale, logs)
        task = next_task(counter, tasks)


@part
def _fit(e, parent, assignments, activations, beta_u, statistics, limits, scale, logs):  # type: ignore[no-untyped-def]
    C, H = e.parent_types, e.entries
    mean = parent * (2 * H + 2) * C
    variance, support, cost = mean + C * H, mean + 2 * C * H, mean + (2 * H + 1) * C
    _fill(statistics, mean, (2 * H + 2) * C, 0)
    _add_up(SUPPORT, e, parent, assignments, activations, statistics, support, support, scale)
    for c in range(C):
        scale[c] = _inverse_support(statistics[support + c], limits)
    _add_up(MEAN, e, parent, assignments, activations, statistics, mean, mean, scale)
    _add_up(VARIANCE, e, parent, assignments, activations, statistics, variance, mean, scale)
    logarithms(logs, 0, statistics, variance, limits, FLOOR, C * H)
    for c in range(C):
        statistics[cost + c] = H * beta_u[c] + _sum(logs, c * H, H) / 2


@part
def _add_up(moment, e, parent, assignments, activations, statistics, out, mean, scale):  # type: ignore[no-untyped-def]
    """Add a moment of all votes for a parent location to the statistics that start at `out`."""
    B, C, H = e.child_types, e.parent_types, e.entries
    n, pair = parent // e.parents, parent % e.parents * e.slots
    for s in range(e.slots):
        child = e.children[pair + s]
        for b in range(B if child >= 0 else 0):
            a, edge = (n * B + b) * e.children_count + child, (parent * e.slots + s) * B + b
            R, vote = edge * C, edge * C * H
            if moment == SUPPORT:
                for c in range(C):
                    statistics[out + c] += assignments[R + c] * activations[a]
            elif moment == MEAN:
                add_first(statistics, out, e.votes, vote, assignments, R, activations, a, scale, 0, C, H)
            else:
                add_second(
                    statistics, out, e.votes, vote, statistics, mean, assignments, R, activations, a, scale, 0, C, H
                )  # fmt: skip


@kernel
def _m_step_gradient_kernel(  # type: ignore[no-untyped-def]
    counter,
    tasks,
    e,
    assignments,
    activations,
    statistics,
    grad_mean,
    grad_variance,
    grad_cost,
    grad_votes,
    grad_assignments,
    products,
    limits,
):
    """With e = V - mean, the gradient of r = R a is  slope = offset + sum_h (linear_h + square_h e_h) e_h, and

    grad_votes = r (linear + 2 square e),  grad_assignments = a slope,  products [N, P, S, B] = sum_j R slope.
    A task owns all types of a parent location.
    """
    numbers = e.parent_types * e.entries
    linear, square = np.empty(numbers, e.votes.dtype), np.empty(numbers, e.votes.dtype)
    offset = np.empty(e.parent_types, e.votes.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        _slopes(e, task, statistics, grad_mean, grad_variance, grad_cost, limits, linear, square, offset)
        _m_step_gradient(
            e, task, assignments, activations, statistics, linear, square, offset, grad_votes, grad_assignments,
            products,
        )  # fmt: skip
        task = next_task(counter, tasks)


@part
def _slopes(e, parent, statistics, grad_mean, grad_variance, grad_cost, limits, linear, square, offset):  # type: ignore[no-untyped-def]
    C, H = e.parent_types, e.entries
    mean, floor = parent * (2 * H + 2) * C, limits[FLOOR]
    for c in range(C):
        variance, support, given = mean + (C + c) * H, mean + 2 * C * H + c, parent * C + c
        scale, cost = _inverse_support(statistics[support], limits), support + C
        offset[c] = grad_cost[given] * statistics[cost]
        for h in range(H):
            i, raw = c * H + h, statistics[variance + h]
            linear[i] = grad_mean[given * H + h] * scale
            square[i] = 0
            if raw >= floor:
                slope = grad_variance[given * H + h] + grad_cost[given] * statistics[support] / (2 * raw)
                square[i] = slope * scale
                offset[c] -= square[i] * raw


@part
def _m_step_gradient(  # type: ignore[no-untyped-def]
    e, parent, assignments, activations, statistics, linear, square, offset, grad_votes, grad_assignments, products
):
    B, C, H = e.child_types, e.parent_types, e.entries
    n, pair, mean = parent // e.parents, parent % e.parents * e.slots, parent * (2 * H + 2) * C
    for s in range(e.slots):
        child, first = e.children[pair + s], (parent * e.slots + s) * B
        if child < 0:
            _fill(grad_votes, first * C * H, B * C * H, 0)
            _fill(grad_assignments, first * C, B * C, 0)
            continue
        for b in range(B):
            a, R, vote = (n * B + b) * e.children_count + child, (first + b) * C, (first + b) * C * H
            m_step_gradient(
                grad_votes, vote, grad_assignments, R, e.votes, vote, statistics, mean, linear, 0, square, 0, offset, 0,
                assignments, R, activations, a, C, H,
            )  # fmt: skip
            products[first + b] = product_of(assignments, grad_assignments, R, C)
            for c in range(C):
                grad_assignments[R + c] *= activations[a]


@kernel
def _child_sum_kernel(counter, tasks, e, products, out):  # type: ignore[no-untyped-def]
    """out [N, B, L] = sum over the edges of a child of products [N, P, S, B]. A task owns GROUPS child locations of an
    image."""
    B, edges = e.child_types, e.parents * e.slots
    task = first_task(counter, tasks)
    while task < tasks:
        n, first, last = _groups(e, task)
        for group in range(first, last):
            for b in range(B):
                total = e.votes.dtype.type(0)
                for i in range(e.start[group], e.start[group + 1]):
                    total += products[(n * edges + e.pairs[i]) * B + b]
                out[(n * B + b) * e.children_count + group] = total
        task = next_task(counter, tasks)


@kernel
def _log_likelihood_kernel(counter, tasks, e, mean, variance, logit, out):  # type: ignore[no-untyped-def]
    """out [N, P, S, B, C] = log a - sum_h ((V - mean)^2 / (2 variance) + 1/2 log(2 pi variance)). A task owns a parent
    location."""
    numbers = e.parent_types * e.entries
    precision, logs = np.empty(numbers, e.votes.dtype), np.empty(numbers, e.votes.dtype)
    constant, nothing = np.empty(e.parent_types, e.votes.dtype), np.zeros(1, e.votes.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        logarithms(logs, 0, variance, task * numbers, nothing, 0, numbers)
        _log_likelihood(e, task, mean, variance, logit, out, precision, logs, constant)
        task = next_task(counter, tasks)


@part
def _log_likelihood(e, parent, mean, variance, logit, out, precision, logs, constant):  # type: ignore[no-untyped-def]
    B, C, H = e.child_types, e.parent_types, e.entries
    for i in range(C * H):
        precision[i] = 1 / (2 * variance[parent * C * H + i])
    for c in range(C):
        constant[c] = _log_sigmoid(logit[parent * C + c]) - (_sum(logs, c * H, H) + H * LOG_TWO_PI) / 2
    for s in range(e.slots):
        first = (parent * e.slots + s) * B
        if e.children[parent % e.parents * e.slots + s] < 0:
            _fill(out, first * C, B * C, 0)
            continue
        for edge in range(first, first + B):
            log_likelihood(
                out, edge * C, e.votes, edge * C * H, mean, parent * C * H, precision, 0, constant, 0, C, H
            )  # fmt: skip


@kernel
def _softmax_kernel(counter, tasks, e, out):  # type: ignore[no-untyped-def]
    """In place: softmax of out [N, P, S, B, C] over the competing parents. A task owns GROUPS groups of an image."""
    rows = np.empty(e.degree * e.parent_types + VECTOR_BYTES // e.votes.itemsize, e.votes.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        n, first, last = _groups(e, task)
        for group in range(first, last):
            for b in range(e.child_types):
                for c in range(0, e.parent_types, e.rivals):
                    _share(e, n, group, b, c, out, rows)
        task = next_task(counter, tasks)


@part
def _share(e, n, group, b, first, out, rows):  # type: ignore[no-untyped-def]
    """The softmax for one child, over the competing types from `first` on; `rows` is memory for its numbers."""
    B, C, types, lanes = e.child_types, e.parent_types, e.rivals, VECTOR_BYTES // rows.itemsize
    begin, count, edges = e.start[group], e.start[group + 1] - e.start[group], n * e.parents * e.slots
    for i in range(count):
        R = ((edges + e.pairs[begin + i]) * B + b) * C + first
        for c in range(types):
            rows[i * types + c] = out[R + c]
    _fill(rows, count * types, lanes, -np.inf)
    softmax(rows, 0, (count * types + lanes - 1) // lanes)
    for i in range(count):
        R = ((edges + e.pairs[begin + i]) * B + b) * C + first
        for c in range(types):
            out[R + c] = rows[i * types + c]


@kernel
def _softmax_gradient_kernel(counter, tasks, e, assignments, grad, dl):  # type: ignore[no-untyped-def]
    """dl = R (grad - sum of R grad over the competing parents), all [N, P, S, B, C]. A task owns GROUPS groups of an
    image."""
    task = first_task(counter, tasks)
    while task < tasks:
        n, first, last = _groups(e, task)
        for group in range(first, last):
            for b in range(e.child_types):
                for c in range(0, e.parent_types, e.rivals):
                    _share_gradient(e, n, group, b, c, assignments, grad, dl)
        task = next_task(counter, tasks)


@part
def _share_gradient(e, n, group, b, first, assignments, grad, dl):  # type: ignore[no-untyped-def]
    """dl of one child, for the competing types from `first` on."""
    B, C, edges, total = e.child_types, e.parent_types, n * e.parents * e.slots, grad.dtype.type(0)
    for i in range(e.start[group], e.start[group + 1]):
        total += product_of(assignments, grad, ((edges + e.pairs[i]) * B + b) * C + first, e.rivals)
    for i in range(e.start[group], e.start[group + 1]):
        R = ((edges + e.pairs[i]) * B + b) * C + first
        for c in range(R, R + e.rivals):
            dl[c] = assignments[c] * (grad[c] - total)


@kernel
def _e_step_gradient_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, mean, variance, logit, dl, grad_votes, grad_mean, grad_variance, grad_logit
):
    """grad_votes [N, P, S, B, C, H] = -dl (V - mean) / variance; grad_mean and grad_variance [N, P, C, H], grad_logit
    [N, P, C], from dl [N, P, S, B, C]. A task owns all types of a parent location."""
    inverse = np.empty(e.parent_types * e.entries, e.votes.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        for i in range(len(inverse)):
            inverse[i] = 1 / variance[task * len(inverse) + i]
        _e_step_gradient(e, task, mean, inverse, dl, grad_votes, grad_mean, grad_variance, grad_logit)
        _likelihood_gradient(e, task, inverse, logit, grad_mean, grad_variance, grad_logit)
        task = next_task(counter, tasks)


@part
def _e_step_gradient(e, parent, mean, inverse, dl, grad_votes, first, second, total):  # type: ignore[no-untyped-def]
    """The gradient of the votes, and the moments of dl about the mean."""
    B, C, H = e.child_types, e.parent_types, e.entries
    types, pose = parent * C, parent * C * H
    _fill(first, pose, C * H, 0)
    _fill(second, pose, C * H, 0)
    _fill(total, types, C, 0)
    for s in range(e.slots):
        edges = (parent * e.slots + s) * B
        if e.children[parent % e.parents * e.slots + s] < 0:
            _fill(grad_votes, edges * C * H, B * C * H, 0)
            continue
        for edge in range(edges, edges + B):
            vote = edge * C * H
            e_step_gradient(
                grad_votes, vote, first, pose, second, pose, e.votes, vote, mean, pose, inverse, 0, dl, edge * C, C, H
            )  # fmt: skip
            for c in range(C):
                total[types + c] += dl[edge * C + c]


@part
def _likelihood_gradient(e, parent, inverse, logit, grad_mean, grad_variance, grad_logit):  # type: ignore[no-untyped-def]
    """In place: the gradients of mean, variance and logit replace the moments of dl."""
    C, H = e.parent_types, e.entries
    for c in range(parent * C, (parent + 1) * C):
        for h in range(H):
            i, x = c * H + h, inverse[(c - parent * C) * H + h]
            grad_mean[i] *= x
            grad_variance[i] = x * (grad_variance[i] * x - grad_logit[c]) / 2
        grad_logit[c] *= math.exp(_log_sigmoid(-logit[c]))


@inlined
def _groups(e, task):  # type: ignore[no-untyped-def]
    """The image of a task, its first group, and the group after its last."""
    tasks = -(-e.groups // GROUPS)
    first = task % tasks * GROUPS
    return task // tasks, first, min(first + GROUPS, e.groups)


@part
def _inverse_support(support, limits):  # type: ignore[no-untyped-def]
    """1 / S, or 1 for a parent without support; nan stays nan."""
    return 1 / (1 if support <= limits[LEAST_SUPPORT] else support)


@part
def _log_sigmoid(x):  # type: ignore[no-untyped-def]
    return min(x, 0) - math.log1p(math.exp(-abs(x)))


@part
def _sum(x, first, count):  # type: ignore[no-untyped-def]
    total = x.dtype.type(0)
    for i in range(first, first + count):
        total += x[i]
    return total


@part
def _fill(x, first, count, value):  # type: ignore[no-untyped-def]
    for i in range(first, first + count):
        x[i] = value
