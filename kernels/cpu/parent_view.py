"""The parent view: moments of the deviations of a parent's votes, and what an M-step makes of them.

    total = sum_i w_ij      first = sum_i w_ij d_ij      second = sum_i w_ij d_ij^2      d_ij = V_ij - centre_j

with weights r_ij = R_ij a_i in the forward pass and dl_ij in the backward pass. A task owns a block of parent
types of some parents. Blocks change slowest, because a block's weights fit into the second-level cache. The votes of
four children at a time stand in a scratch array of 2 KiB.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritoncaps.kernels.cpu.compiling import kernel, part
from tritoncaps.kernels.cpu.layout import Beta, Edges, Moment, Slope, Statistic, array, betas, numbers
from tritoncaps.kernels.cpu.parents import activation, activation_backward, fit, fit_backward, likelihood_backward
from tritoncaps.kernels.cpu.simd import next_task
from tritoncaps.kernels.cpu.threads import run
from tritoncaps.kernels.cpu.votes import (
    add_moments_1,
    add_moments_4,
    add_shift,
    check_centre,
    clear_16,
    clear_moments,
    deviations,
    gradient_weights_1,
    gradient_weights_4,
    likelihood_and_deviations,
    likelihood_gradient_and_deviations,
    move_moments,
    uniform_weights_1,
    uniform_weights_4,
    weights_1,
    weights_4,
)
from tritoncaps.kernels.em_routing import Fit, History

CHUNKS = 16  # of parents, for each block of types
SLOTS_AT_A_TIME = 32  # partial sums of so many slots, so that rounding errors do not grow with all slots

STATISTICS, SLOPES, MOMENTS, BETAS = Statistic.ROWS, Slope.ROWS, Moment.ROWS, Beta.ROWS
TOTAL, FIRST = Moment.TOTAL, Moment.FIRST
MINUS_MEAN = Statistic.MINUS_MEAN

DEVIATIONS = 64  # rows of four votes
WORK = DEVIATIONS + 12  # and their likelihoods, slopes G and weights

# the weights of moments: share a_i, r_ij, or dl_ij
UNIFORM, ASSIGNMENT, GRADIENT = 0, 1, 2


def m_step(edges: Edges, fit: Fit, before: Tensor | None, log_sum: Tensor | None, out: Tensor) -> None:
    """Statistics [N, P, blocks, 36, lanes] of the votes; the first M-step, with nothing before, shares equally."""
    if before is None:
        _run(_first_m_step_kernel, edges, array(out), betas(edges, fit), numbers(edges, fit))
    else:
        _run(_m_step_kernel, edges, array(out), array(before), array(log_sum), betas(edges, fit), numbers(edges, fit))


def outputs(edges: Edges, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Poses [N, P, 16, C] and activations [N, P, C]."""
    sizes = edges.images, edges.parents_count
    poses = torch.empty(*sizes, 16, edges.parent_types, dtype=statistics.dtype)
    activations = torch.empty(*sizes, edges.parent_types, dtype=statistics.dtype)
    _run(_outputs_kernel, edges, array(poses), array(activations), array(statistics))
    return poses, activations


def output_slopes(edges: Edges, fit: Fit, history: History, grad_poses: Tensor, grad_activations: Tensor) -> None:
    """Slopes [N, P, blocks, 51, lanes] of the last M-step."""
    _run(
        _output_slopes_kernel,
        edges,
        array(history.slopes[-1]),
        array(grad_poses),
        array(grad_activations),
        array(history.statistics[-1]),
        array(history.statistics[-2:][0]),
        betas(edges, fit),
        numbers(edges, fit),
    )


def slopes_before(edges: Edges, fit: Fit, history: History, t: int) -> None:
    """Slopes [N, P, blocks, 51, lanes] of iteration t - 1, from the moments of dl of iteration t."""
    _run(
        _slopes_before_kernel,
        edges,
        array(history.slopes[t - 1]),
        array(history.statistics[t - 1]),
        array(history.slopes[t]),
        array(history.log_sums[t - 1]),
        array(history.da[t - 1]),
        array(history.statistics[max(t - 2, 0)]),
        betas(edges, fit),
        numbers(edges, fit),
    )


def beta_gradients(edges: Edges, history: History, since: int) -> tuple[Tensor, Tensor]:
    """dL/dbeta_u and dL/dbeta_a, [C]."""
    slopes, C = history.slopes[since:], edges.parent_types
    beta_u, beta_a = (slopes[..., row, :].sum(dim=(0, 1, 2)).flatten()[:C] for row in (Slope.BETA_U, Slope.BETA_A))
    return beta_u, beta_a


def _run(function: Any, edges: Edges, *arguments: Any) -> None:
    chunks = min(CHUNKS, edges.images * edges.parents_count)
    run(function, edges.blocks * chunks, edges, chunks, *arguments)


@kernel
def _first_m_step_kernel(counter, tasks, e, chunks, statistics, betas, numbers):  # type: ignore[no-untyped-def]
    """statistics [N, P, blocks, 36, lanes] of votes with equal shares.

    The centre is the mean of the votes of the first slot that has support: rough, but close enough that the
    variance does not cancel. It stands where the mean will stand.
    """
    lanes = e.lanes
    moments, partial, work, nothing = _new_work(e)
    task = next_task(counter)
    while task < tasks:
        block = task // chunks
        begin, end = _parents_of(e, chunks, task % chunks)
        for parent in range(begin, end):
            row = _row(e, parent, block, STATISTICS)
            clear_16(statistics, row)
            clear_moments(partial, 0)
            s = _first_supported_slot(e, parent)
            _add_slot(e, UNIFORM, parent, s, block, partial, work, statistics, nothing, nothing, nothing, nothing)
            if partial[0] > 0:
                for i in range(16 * lanes):
                    statistics[row + i] = -partial[FIRST * lanes + i] / partial[0]
            _add_votes(
                e, UNIFORM, parent, block, moments, partial, work, statistics, nothing, nothing, nothing, nothing
            )
            fit(statistics, row, moments, 0, statistics, row, betas, block * BETAS * lanes, numbers, 0)
        task = next_task(counter)


@kernel
def _m_step_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, chunks, statistics, before, log_sum, betas, numbers
):
    """statistics [N, P, blocks, 36, lanes] from those before and log_sum [N, G, B].

    The centre is the mean before. Where that turns out to be so far from the new mean that the variance would
    cancel, a second pass is about the new mean.
    """
    lanes = e.lanes
    moments, partial, work, nothing = _new_work(e)
    shift = np.empty(16 * lanes, e.poses.dtype)
    excess = np.empty(1, e.poses.dtype)
    task = next_task(counter)
    while task < tasks:
        block = task // chunks
        begin, end = _parents_of(e, chunks, task % chunks)
        for parent in range(begin, end):
            row = _row(e, parent, block, STATISTICS)
            _add_votes(e, ASSIGNMENT, parent, block, moments, partial, work, before, nothing, log_sum, nothing, nothing)
            check_centre(excess, 0, shift, 0, moments, 0)
            if excess[0] > 0:
                _add_votes(
                    e, ASSIGNMENT, parent, block, moments, partial, work, before, nothing, log_sum, nothing, shift
                )
                add_shift(shift, 0, before, row)
                fit(statistics, row, moments, 0, shift, 0, betas, block * BETAS * lanes, numbers, 0)
            else:
                fit(statistics, row, moments, 0, before, row, betas, block * BETAS * lanes, numbers, 0)
        task = next_task(counter)


@kernel
def _slopes_before_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, chunks, out, statistics, slopes, log_sum, da, before, betas, numbers
):
    """out [N, P, blocks, 51, lanes], the slopes of the M-step that left `statistics`, from an iteration's

    slopes [N, P, blocks, 51, lanes], log_sum and da [N, G, B]; `before` are the statistics still earlier.
    """
    lanes = e.lanes
    moments, partial, work, nothing = _new_work(e)
    task = next_task(counter)
    while task < tasks:
        block = task // chunks
        begin, end = _parents_of(e, chunks, task % chunks)
        for parent in range(begin, end):
            row = _row(e, parent, block, STATISTICS)
            _add_votes(e, GRADIENT, parent, block, moments, partial, work, statistics, slopes, log_sum, da, nothing)
            likelihood_backward(moments, 0, statistics, row)
            fit_backward(
                out, _row(e, parent, block, SLOPES), moments, 0, statistics, row, before, row,
                betas, block * BETAS * lanes, numbers, 0,
            )  # fmt: skip
        task = next_task(counter)


@kernel
def _output_slopes_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, chunks, slopes, grad_poses, grad_activations, statistics, before, betas, numbers
):
    """slopes [N, P, blocks, 51, lanes] from grad_poses [N, P, 16, C] and grad_activations [N, P, C]."""
    C, lanes = e.parent_types, e.lanes
    gradients = np.zeros(MOMENTS * lanes, e.poses.dtype)
    task = next_task(counter)
    while task < tasks:
        block = task // chunks
        begin, end = _parents_of(e, chunks, task % chunks)
        types = min(lanes, C - block * lanes)
        gradients[:] = 0
        for parent in range(begin, end):
            row = _row(e, parent, block, STATISTICS)
            for lane in range(types):
                c = block * lanes + lane
                gradients[TOTAL * lanes + lane] = grad_activations[parent * C + c]
                for h in range(16):
                    gradients[(FIRST + h) * lanes + lane] = grad_poses[(parent * 16 + h) * C + c]
            activation_backward(gradients, 0, statistics, row)
            fit_backward(
                slopes, _row(e, parent, block, SLOPES), gradients, 0, statistics, row, before, row,
                betas, block * BETAS * lanes, numbers, 0,
            )  # fmt: skip
        task = next_task(counter)


@kernel
def _outputs_kernel(counter, tasks, e, chunks, poses, activations, statistics):  # type: ignore[no-untyped-def]
    """poses [N, P, 16, C] and activations [N, P, C] from statistics [N, P, blocks, 36, lanes]."""
    C, lanes = e.parent_types, e.lanes
    a = np.empty(lanes, e.poses.dtype)
    task = next_task(counter)
    while task < tasks:
        block = task // chunks
        begin, end = _parents_of(e, chunks, task % chunks)
        types = min(lanes, C - block * lanes)
        for parent in range(begin, end):
            row = _row(e, parent, block, STATISTICS)
            activation(a, 0, statistics, row)
            for lane in range(types):
                activations[parent * C + block * lanes + lane] = a[lane]
            for h in range(16):
                for lane in range(types):
                    mean = -statistics[row + (MINUS_MEAN + h) * lanes + lane]
                    poses[(parent * 16 + h) * C + block * lanes + lane] = mean
        task = next_task(counter)


@part
def _add_votes(  # type: ignore[no-untyped-def]
    e, weights, parent, block, moments, partial, work, statistics, slopes, log_sum, da, shift
):
    """moments [33, lanes] of a parent's votes, with a kind of weights."""
    clear_moments(moments, 0)
    clear_moments(partial, 0)
    for s in range(e.slots):
        _add_slot(e, weights, parent, s, block, partial, work, statistics, slopes, log_sum, da, shift)
        if s % SLOTS_AT_A_TIME == SLOTS_AT_A_TIME - 1 or s == e.slots - 1:
            move_moments(moments, 0, partial, 0)


@part
def _add_slot(  # type: ignore[no-untyped-def]
    e, weights, parent, s, block, moments, work, statistics, slopes, log_sum, da, shift
):
    """Add the votes that come to a parent from one slot to moments [33, lanes].

    Deviations d are from the mean of the parent's statistics, or, if there is a `shift`, d + shift is taken.
    """
    B, lanes, vote = e.child_types, e.lanes, 16 * e.lanes
    n, p = parent // e.parents_count, parent % e.parents_count
    c = e.children[p * e.slots + s]
    if c < 0:
        return
    of_parent, of_slopes = _row(e, parent, block, STATISTICS), _row(e, parent, block, SLOPES)
    group = e.group_of[p * e.slots + s]
    d, likelihood, G, w = 0, DEVIATIONS * lanes, (DEVIATIONS + 4) * lanes, (DEVIATIONS + 8) * lanes
    for b in range(0, B, 4):
        count = min(4, B - b)
        child = (n * e.children_count + c) * B + b
        weight = ((e.weight_of[s] * e.blocks + block) * B + b) * vote
        i = (n * e.groups + group) * B + b
        for j in range(count):
            of_vote = d + j * vote
            if weights == UNIFORM:
                deviations(
                    work, of_vote, e.poses, 16 * (child + j), e.weight, weight + j * vote, e.offset, 4 * s,
                    statistics, of_parent,
                )  # fmt: skip
            elif weights == ASSIGNMENT:
                likelihood_and_deviations(
                    work, likelihood + j * lanes, work, of_vote, e.poses, 16 * (child + j),
                    e.weight, weight + j * vote, e.offset, 4 * s, statistics, of_parent,
                )  # fmt: skip
                if len(shift):
                    add_shift(work, of_vote, shift, 0)
            else:
                likelihood_gradient_and_deviations(
                    work, likelihood + j * lanes, work, G + j * lanes, work, of_vote, e.poses, 16 * (child + j),
                    e.weight, weight + j * vote, e.offset, 4 * s, statistics, of_parent, slopes, of_slopes,
                )  # fmt: skip
        if count == 4:
            if weights == UNIFORM:
                uniform_weights_4(work, w, e.share, group, e.activations, child)
            elif weights == ASSIGNMENT:
                weights_4(work, w, work, likelihood, log_sum, i, e.activations, child)
            else:
                gradient_weights_4(work, w, work, likelihood, work, G, log_sum, i, e.activations, child, da, i)
            add_moments_4(moments, 0, work, d, work, w)
        else:
            for j in range(count):
                at = j * lanes
                if weights == UNIFORM:
                    uniform_weights_1(work, w, e.share, group, e.activations, child + j)
                elif weights == ASSIGNMENT:
                    weights_1(work, w, work, likelihood + at, log_sum, i + j, e.activations, child + j)
                else:
                    gradient_weights_1(
                        work,
                        w,
                        work,
                        likelihood + at,
                        work,
                        G + at,
                        log_sum,
                        i + j,
                        e.activations,
                        child + j,
                        da,
                        i + j,
                    )
                add_moments_1(moments, 0, work, d + j * vote, work, w)


@kernel
def _new_work(e):  # type: ignore[no-untyped-def]
    """Memory of a task: moments, partial sums of them, a few votes; and an array for what is not there."""
    dtype, rows = e.poses.dtype, MOMENTS * e.lanes
    return np.empty(rows, dtype), np.empty(rows, dtype), np.empty(WORK * e.lanes, dtype), np.empty(0, dtype)


@part
def _parents_of(e, chunks, chunk):  # type: ignore[no-untyped-def]
    """The parents of a chunk: first, and the one after the last."""
    parents = e.images * e.parents_count
    return parents * chunk // chunks, parents * (chunk + 1) // chunks


@part
def _row(e, parent, block, rows):  # type: ignore[no-untyped-def]
    """Where a parent's block begins in an array [N, P, blocks, rows, lanes]."""
    return (parent * e.blocks + block) * rows * e.lanes


@part
def _first_supported_slot(e, parent):  # type: ignore[no-untyped-def]
    """The first slot of a parent whose child location is not silent, or 0."""
    n, p = parent // e.parents_count, parent % e.parents_count
    for s in range(e.slots):
        c = e.children[p * e.slots + s]
        if c >= 0:
            child = (n * e.children_count + c) * e.child_types
            for i in range(child, child + e.child_types):
                if e.activations[i] > 0:
                    return s
    return 0
