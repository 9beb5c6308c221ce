"""Votes, M-step and E-step on arrays in memory, forward and backward.

Votes are [N, P, S, B, C, H] and assignments [N, P, S, B, C], for any pose size H; parents' arrays are [N, P, C, H] and
[N, P, C], children's [N, B, L]. What missing slots hold is never read, and is written as zero.

Memory is the limit, so votes are read once, and gradients of votes written once. An M-step reads them twice, but the
second time from a cache. A task owns a parent location of an image, with all its edges, or some child locations.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritoncaps.kernels.cpu.compiling import inlined, kernel, part
from tritoncaps.kernels.cpu.layout import array
from tritoncaps.kernels.cpu.simd import VECTOR_BYTES
from tritoncaps.kernels.cpu.squash import product_of
from tritoncaps.kernels.cpu.stored_votes import (
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
from tritoncaps.kernels.cpu.tasks import first_task, next_task
from tritoncaps.kernels.cpu.threads import Plan, run
from tritoncaps.kernels.cpu.workspace import empty, scratch
from tritoncaps.reference import least_support, widen
from tritoncaps.routing_map import Tables

GROUPS = 8  # of a task
TYPES = 4  # of children, of a task that makes gradients of poses and weight
CHUNKS = 8  # of images, at most, each with a gradient of the weight of its own
LOG_TWO_PI = math.log(2 * math.pi)


class Edges(NamedTuple):
    """Votes and who gives them: flat arrays and their sizes, in the form that Numba takes."""

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
    groups: int  # G: child locations; if competition is local, edges


def pose_votes_forward(poses: Tensor, weight: Tensor, tables: Tables) -> Tensor:
    """V_ij = M_i W_ij: poses [N, B, L, 16], weight [K, B, C, 4, 4] -> votes [N, P, S, B, C, 16]."""
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
    """Of what an M-step leaves behind: means and variances (above no floor) [C, H], supports and costs [C]."""
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
    """Fit every parent's Gaussian to its votes: mean, variance, logit and statistics."""
    votes, assignments, activations, beta_u, beta_a = map(widen, (votes, assignments, activations, beta_u, beta_a))
    e = _edges(votes, tables, "global")
    statistics = votes.new_empty(statistics_shape(e.images, e.parents, e.parent_types, e.entries))
    given = (array(x) for x in (assignments, activations, beta_u, statistics))
    plan = Plan()
    plan.add(_m_step_kernel, e.images * e.parents, e, *given, _limits(variance_floor, votes.dtype))
    plan.run()
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
    grad_cost = -grad_beta_a / mean_data  # of what a datum costs, times the support
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
    """Share every child among its parents: assignments [N, P, S, B, C]."""
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
    """Gradients of votes, mean, variance and logit; `assignments` is what the forward pass returned."""
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
    given = (array(x) for x in (votes, tables.children, start, pairs))
    return Edges(*given, N, P, S, B, locations, C, H, len(start) - 1)


def _limits(variance_floor: float, dtype: torch.dtype) -> NDArray:
    """[2]: the least variance, and the support that is none."""
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
    """Fills e.votes; a task has a slot of all parent locations of an image, and so one block of the weight."""
    P, S, B, C = e.parents, e.slots, e.child_types, e.parent_types
    task = first_task(counter, tasks)
    while task < tasks:
        n, s = task // S, task % S
        for p in range(P):
            child, edge = e.children[p * S + s], ((n * P + p) * S + s) * B
            if child < 0:
                _fill(e.votes, edge * C * e.entries, B * C * e.entries, 0)
                continue
            for b in range(B):
                pose, block = (n * B + b) * e.children_count + child, weight_of[s] * B + b
                pose_votes(
                    e.votes, (edge + b) * C * e.entries, poses, pose * e.entries, weight, block * C * e.entries, C
                )  # fmt: skip
        task = next_task(counter, tasks)


@kernel
def _pose_votes_gradient_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, chunks, weights, poses, weight, weight_of, grad_poses, grad_weight
):
    """e.votes are gradients, grad_weight [chunks, K, B, C, 4, 4]; a task has some child types of some images."""
    P, S, B, C, L, H = e.parents, e.slots, e.child_types, e.parent_types, e.children_count, e.entries
    task = first_task(counter, tasks)
    while task < tasks:
        chunk, first = task % chunks, task // chunks * TYPES
        last = min(first + TYPES, B)
        for k in range(weights):
            _fill(grad_weight, ((chunk * weights + k) * B + first) * C * H, (last - first) * C * H, 0)
        for n in range(chunk * e.images // chunks, (chunk + 1) * e.images // chunks):
            _fill(grad_poses, (n * B + first) * L * H, (last - first) * L * H, 0)
            for p in range(P):
                for s in range(S):
                    child, edge = e.children[p * S + s], ((n * P + p) * S + s) * B
                    for b in range(first, last if child >= 0 else first):
                        pose, block = ((n * B + b) * L + child) * H, weight_of[s] * B + b
                        pose_votes_gradient(
                            grad_poses, pose, grad_weight, (chunk * weights * B + block) * C * H, e.votes,
                            (edge + b) * C * H, poses, pose, weight, block * C * H, C,
                        )  # fmt: skip
        task = next_task(counter, tasks)


@kernel
def _m_step_kernel(counter, tasks, e, assignments, activations, beta_u, statistics, limits):  # type: ignore[no-untyped-def]
    """A task fits all types of a parent location."""
    S, B, C, H = e.slots, e.child_types, e.parent_types, e.entries
    scale, logs = np.empty(C, e.votes.dtype), np.empty(C * H, e.votes.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        mean = task * (2 * H + 2) * C
        variance, support, cost = mean + C * H, mean + 2 * C * H, mean + (2 * H + 1) * C
        _fill(statistics, mean, (2 * H + 2) * C, 0)
        for moment in range(3):
            for slot in range(task * S, (task + 1) * S):
                child = e.children[slot % (e.parents * S)]
                for b in range(B if child >= 0 else 0):
                    a, R, vote = _activation(e, slot, b, child), (slot * B + b) * C, (slot * B + b) * C * H
                    if moment == 0:
                        for c in range(C):
                            statistics[support + c] += assignments[R + c] * activations[a]
                    elif moment == 1:
                        add_first(statistics, mean, e.votes, vote, assignments, R, activations, a, scale, 0, C, H)
                    else:
                        add_second(
                            statistics, variance, e.votes, vote, statistics, mean, assignments, R, activations, a,
                            scale, 0, C, H,
                        )  # fmt: skip
            if moment == 0:
                for c in range(C):
                    scale[c] = _inverse_support(statistics[support + c], limits)
        logarithms(logs, 0, statistics, variance, limits, 0, C * H)
        for c in range(C):
            statistics[cost + c] = H * beta_u[c] + _sum(logs, c * H, H) / 2
        task = next_task(counter, tasks)


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
    """products [N, P, S, B] are those of R and its slope, summed over types. A task has all types of a parent location.

    With e = V - mean, the slope of r is  offset + sum_h (linear_h + square_h e_h) e_h.
    """
    S, B, C, H = e.slots, e.child_types, e.parent_types, e.entries
    linear, square = np.empty(C * H, e.votes.dtype), np.empty(C * H, e.votes.dtype)
    offset = np.empty(C, e.votes.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        mean = task * (2 * H + 2) * C
        for c in range(C):
            variance, support = mean + (C + c) * H, mean + 2 * C * H + c
            scale = _inverse_support(statistics[support], limits)
            parent, cost = task * C + c, support + C
            offset[c] = grad_cost[parent] * statistics[cost]
            for h in range(H):
                i, given, raw = c * H + h, parent * H + h, statistics[variance + h]
                linear[i] = grad_mean[given] * scale
                slope = grad_variance[given] + grad_cost[parent] * statistics[support] / (2 * raw)
                square[i] = slope * scale if raw >= limits[0] else 0
                offset[c] -= square[i] * raw if raw >= limits[0] else 0
        for slot in range(task * S, (task + 1) * S):
            child = e.children[slot % (e.parents * S)]
            if child < 0:
                _fill(grad_votes, slot * B * C * H, B * C * H, 0)
                _fill(grad_assignments, slot * B * C, B * C, 0)
                continue
            for b in range(B):
                a, R, vote = _activation(e, slot, b, child), (slot * B + b) * C, (slot * B + b) * C * H
                m_step_gradient(
                    grad_votes, vote, grad_assignments, R, e.votes, vote, statistics, mean, linear, 0, square, 0,
                    offset, 0, assignments, R, activations, a, C, H,
                )  # fmt: skip
                products[slot * B + b] = product_of(assignments, grad_assignments, R, C)
                for c in range(C):
                    grad_assignments[R + c] *= activations[a]
        task = next_task(counter, tasks)


@kernel
def _child_sum_kernel(counter, tasks, e, products, out):  # type: ignore[no-untyped-def]
    """out [N, B, L] from products [N, P, S, B]; a task has some child locations of an image."""
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
    """out [N, P, S, B, C]: what is proportional to the log of the assignments; a task has a parent location."""
    S, B, C, H = e.slots, e.child_types, e.parent_types, e.entries
    precision, logs = np.empty(C * H, e.votes.dtype), np.empty(C * H, e.votes.dtype)
    constant, nothing = np.empty(C, e.votes.dtype), np.zeros(1, e.votes.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        parent = task * C
        logarithms(logs, 0, variance, parent * H, nothing, 0, C * H)
        for i in range(C * H):
            precision[i] = 1 / (2 * variance[parent * H + i])
        for c in range(C):
            constant[c] = _log_sigmoid(logit[parent + c]) - (_sum(logs, c * H, H) + H * LOG_TWO_PI) / 2
        for slot in range(task * S, (task + 1) * S):
            if e.children[slot % (e.parents * S)] < 0:
                _fill(out, slot * B * C, B * C, 0)
                continue
            for edge in range(slot * B, (slot + 1) * B):
                log_likelihood(
                    out, edge * C, e.votes, edge * C * H, mean, parent * H, precision, 0, constant, 0, C, H
                )  # fmt: skip
        task = next_task(counter, tasks)


@kernel
def _softmax_kernel(counter, tasks, e, out):  # type: ignore[no-untyped-def]
    """In place, over the parents that compete; a task has some groups of them in an image."""
    B, C, edges = e.child_types, e.parent_types, e.parents * e.slots
    lanes = VECTOR_BYTES // e.votes.itemsize
    rows = np.empty((np.diff(e.start).max() * C + lanes if e.groups else 0), e.votes.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        n, first, last = _groups(e, task)
        for group in range(first, last):
            begin, count = e.start[group], e.start[group + 1] - e.start[group]
            for b in range(B):
                for i in range(count):
                    R = ((n * edges + e.pairs[begin + i]) * B + b) * C
                    for c in range(C):
                        rows[i * C + c] = out[R + c]
                _fill(rows, count * C, lanes, -np.inf)
                softmax(rows, 0, (count * C + lanes - 1) // lanes)
                for i in range(count):
                    R = ((n * edges + e.pairs[begin + i]) * B + b) * C
                    for c in range(C):
                        out[R + c] = rows[i * C + c]
        task = next_task(counter, tasks)


@kernel
def _softmax_gradient_kernel(counter, tasks, e, assignments, grad, dl):  # type: ignore[no-untyped-def]
    """dl = R (grad - sum of R grad over the parents that compete); a task has some groups of them in an image."""
    B, C, edges = e.child_types, e.parent_types, e.parents * e.slots
    task = first_task(counter, tasks)
    while task < tasks:
        n, first, last = _groups(e, task)
        for group in range(first, last):
            for b in range(B):
                total = e.votes.dtype.type(0)
                for i in range(e.start[group], e.start[group + 1]):
                    total += product_of(assignments, grad, ((n * edges + e.pairs[i]) * B + b) * C, C)
                for i in range(e.start[group], e.start[group + 1]):
                    R = ((n * edges + e.pairs[i]) * B + b) * C
                    for c in range(R, R + C):
                        dl[c] = assignments[c] * (grad[c] - total)
        task = next_task(counter, tasks)


@kernel
def _e_step_gradient_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, mean, variance, logit, dl, grad_votes, grad_mean, grad_variance, grad_logit
):
    """A task has all types of a parent location."""
    S, B, C, H = e.slots, e.child_types, e.parent_types, e.entries
    inverse = np.empty(C * H, e.votes.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        parent, pose = task * C, task * C * H
        for i in range(C * H):
            inverse[i] = 1 / variance[pose + i]
        _fill(grad_mean, pose, C * H, 0)
        _fill(grad_variance, pose, C * H, 0)
        _fill(grad_logit, parent, C, 0)
        for slot in range(task * S, (task + 1) * S):
            if e.children[slot % (e.parents * S)] < 0:
                _fill(grad_votes, slot * B * C * H, B * C * H, 0)
                continue
            for edge in range(slot * B, (slot + 1) * B):
                e_step_gradient(
                    grad_votes, edge * C * H, grad_mean, pose, grad_variance, pose, e.votes, edge * C * H, mean, pose,
                    inverse, 0, dl, edge * C, C, H,
                )  # fmt: skip
                for c in range(C):
                    grad_logit[parent + c] += dl[edge * C + c]
        for c in range(C):
            total = grad_logit[parent + c]
            for i in range(c * H, (c + 1) * H):
                grad_mean[pose + i] *= inverse[i]
                grad_variance[pose + i] = inverse[i] * (grad_variance[pose + i] * inverse[i] - total) / 2
            grad_logit[parent + c] = total * math.exp(_log_sigmoid(-logit[parent + c]))
        task = next_task(counter, tasks)


@inlined
def _activation(e, slot, b, child):  # type: ignore[no-untyped-def]
    """Where the activation of a child is; slots are numbered (n, p, s)."""
    return (slot // (e.parents * e.slots) * e.child_types + b) * e.children_count + child


@inlined
def _groups(e, task):  # type: ignore[no-untyped-def]
    """Image, first group and the one after the last of a task."""
    tasks = -(-e.groups // GROUPS)
    first = task % tasks * GROUPS
    return task // tasks, first, min(first + GROUPS, e.groups)


@part
def _inverse_support(support, limits):  # type: ignore[no-untyped-def]
    """1 / S, or 1 where a parent explains nothing."""
    return 1 / (support if support > limits[1] else 1)


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
