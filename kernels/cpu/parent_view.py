"""The parent view: moments of the deviations of a parent's votes.

    total = sum_i w_ij      first = sum_i w_ij d_ij      second = sum_i w_ij d_ij^2      d_ij = V_ij - centre_j

with weights r_ij = R_ij a_i in the forward pass and dl_ij in the backward pass. A task owns a block of parent
types of some parents. Blocks change slowest, because a block's weights fit into the second-level cache. The
votes of four children at a time stand in a scratch array of 2 KiB.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritoncaps.kernels.cpu.compiling import kernel
from tritoncaps.kernels.cpu.layout import Edges, Moment, Row, array
from tritoncaps.kernels.cpu.packing import pack_gaussian, pack_iterations, unpack
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
from tritoncaps.kernels.cpu.workspace import scratch
from tritoncaps.kernels.em_routing import Gaussian, Iteration, Moments

CHUNKS = 16  # of parents, for each block of types
SLOTS_AT_A_TIME = 32  # partial sums of so many slots, so that rounding errors do not grow with all slots

MOMENTS = Moment.ROWS
GAUSSIAN = Row.GAUSSIAN
ITERATION = Row.ITERATION


def parent_moments(edges: Edges, gaussian: Gaussian | None, log_sum: Tensor | None) -> Moments:
    """Moments with the weights r_ij; the first iteration has no Gaussian yet and shares children equally."""
    if gaussian is None:
        return _uniform_moments(edges)
    dtype = gaussian.mean.dtype
    moments, correction = _rows("moments", edges, dtype, MOMENTS), _rows("centre", edges, dtype, 16)
    rows = array(pack_gaussian(edges, gaussian))
    _run(_moments_kernel, edges, array(moments), array(correction), rows, array(log_sum))
    return _unpack_moments(edges, moments, gaussian.mean - unpack(edges, correction))


def parent_gradient_moments(edges: Edges, iteration: Iteration) -> Moments:
    """Moments with the weights dl_ij."""
    moments = _rows("moments", edges, iteration.A.dtype, MOMENTS)
    rows = array(pack_iterations(edges, [iteration]))
    _run(_gradient_moments_kernel, edges, array(moments), rows, array(iteration.log_sum), array(iteration.da))
    return _unpack_moments(edges, moments, iteration.gaussian.mean)


def _uniform_moments(edges: Edges) -> Moments:
    dtype = torch.from_numpy(edges.activations).dtype
    moments, minus_centre = _rows("moments", edges, dtype, MOMENTS), _rows("centre", edges, dtype, 16)
    competitors = torch.from_numpy(edges.group_start).diff() * edges.parent_types
    share = 1 / competitors.clamp(min=1).to(dtype)
    _run(_uniform_moments_kernel, edges, array(moments), array(minus_centre), array(share))
    return _unpack_moments(edges, moments, -unpack(edges, minus_centre))


def _rows(name: str, edges: Edges, dtype: torch.dtype, rows: int) -> Tensor:
    return scratch(name, (edges.images, edges.parents_count, edges.blocks, rows, edges.lanes), dtype)


def _unpack_moments(edges: Edges, moments: Tensor, centre: Tensor) -> Moments:
    rows = unpack(edges, moments)
    return Moments(rows[:, :, 0], rows[:, :, Moment.FIRST : Moment.SECOND], rows[:, :, Moment.SECOND :], centre)


def _run(function: Any, edges: Edges, *arguments: Any) -> None:
    chunks = min(CHUNKS, edges.images * edges.parents_count)
    run(function, edges.blocks * chunks, edges, chunks, *arguments)


@kernel
def _moments_kernel(counter, tasks, e, chunks, moments, correction, gaussian, log_sum):  # type: ignore[no-untyped-def]
    """moments [N, P, blocks, 33, lanes] from gaussian [N, P, blocks, 33, lanes] and log_sum [N, G, B].

    The centre is the Gaussian's mean. Where that turns out to be so far from the new mean that the variance would
    cancel, a second pass is about the new mean: centre = mean - correction, [N, P, blocks, 16, lanes].
    """
    B, S, lanes, vote = e.child_types, e.slots, e.lanes, 16 * e.lanes
    d = np.empty(4 * vote, e.poses.dtype)
    likelihood = np.empty(4 * lanes, e.poses.dtype)
    r = np.empty(4 * lanes, e.poses.dtype)
    partial = np.empty(MOMENTS * lanes, e.poses.dtype)
    shift = np.empty(vote, e.poses.dtype)
    excess = np.empty(1, e.poses.dtype)
    parents = e.images * e.parents_count
    task = next_task(counter)
    while task < tasks:
        block, chunk = task // chunks, task % chunks
        for parent in range(parents * chunk // chunks, parents * (chunk + 1) // chunks):
            n, p = parent // e.parents_count, parent % e.parents_count
            at = parent * e.blocks + block
            clear_16(correction, at * vote)
            for attempt in range(2):
                clear_moments(partial, 0)
                clear_moments(moments, at * MOMENTS * lanes)
                for s in range(S):
                    c = e.children[p * S + s]
                    if c >= 0:
                        child = (n * e.children_count + c) * B
                        group = (n * e.groups + e.group_of[p * S + s]) * B
                        weight = (e.weight_of[s] * e.blocks + block) * B
                        for b in range(0, B, 4):
                            count = min(4, B - b)
                            for j in range(count):
                                likelihood_and_deviations(
                                    likelihood, j * lanes, d, j * vote, e.poses, 16 * (child + b + j),
                                    e.weight, (weight + b + j) * vote, e.offset, 4 * s,
                                    gaussian, at * GAUSSIAN * lanes,
                                )  # fmt: skip
                                if attempt == 1:
                                    add_shift(d, j * vote, correction, at * vote)
                            if count == 4:
                                weights_4(r, 0, likelihood, 0, log_sum, group + b, e.activations, child + b)
                                add_moments_4(partial, 0, d, 0, r, 0)
                            else:
                                for j in range(count):
                                    row, i = j * lanes, b + j
                                    weights_1(r, row, likelihood, row, log_sum, group + i, e.activations, child + i)
                                    add_moments_1(partial, 0, d, j * vote, r, row)
                    if s % SLOTS_AT_A_TIME == SLOTS_AT_A_TIME - 1 or s == S - 1:
                        move_moments(moments, at * MOMENTS * lanes, partial, 0)
                check_centre(excess, 0, shift, 0, moments, at * MOMENTS * lanes)
                if attempt == 1 or not excess[0] > 0:
                    break
                correction[at * vote : (at + 1) * vote] = shift
        task = next_task(counter)


@kernel
def _gradient_moments_kernel(counter, tasks, e, chunks, moments, iteration, log_sum, da):  # type: ignore[no-untyped-def]
    """moments [N, P, blocks, 33, lanes] from iteration [N, P, blocks, 82, lanes], log_sum and da [N, G, B]."""
    B, S, lanes, vote = e.child_types, e.slots, e.lanes, 16 * e.lanes
    d = np.empty(4 * vote, e.poses.dtype)
    likelihood = np.empty(4 * lanes, e.poses.dtype)
    G = np.empty(4 * lanes, e.poses.dtype)
    dl = np.empty(4 * lanes, e.poses.dtype)
    partial = np.empty(MOMENTS * lanes, e.poses.dtype)
    parents = e.images * e.parents_count
    task = next_task(counter)
    while task < tasks:
        block, chunk = task // chunks, task % chunks
        for parent in range(parents * chunk // chunks, parents * (chunk + 1) // chunks):
            n, p = parent // e.parents_count, parent % e.parents_count
            at = parent * e.blocks + block
            clear_moments(partial, 0)
            clear_moments(moments, at * MOMENTS * lanes)
            for s in range(S):
                c = e.children[p * S + s]
                if c >= 0:
                    child = (n * e.children_count + c) * B
                    group = (n * e.groups + e.group_of[p * S + s]) * B
                    weight = (e.weight_of[s] * e.blocks + block) * B
                    for b in range(0, B, 4):
                        count = min(4, B - b)
                        for j in range(count):
                            likelihood_gradient_and_deviations(
                                likelihood, j * lanes, G, j * lanes, d, j * vote, e.poses, 16 * (child + b + j),
                                e.weight, (weight + b + j) * vote, e.offset, 4 * s, iteration, at * ITERATION * lanes,
                            )  # fmt: skip
                        if count == 4:
                            gradient_weights_4(
                                dl, 0, likelihood, 0, G, 0, log_sum, group + b, e.activations, child + b, da, group + b
                            )
                            add_moments_4(partial, 0, d, 0, dl, 0)
                        else:
                            for j in range(count):
                                row, i = j * lanes, b + j
                                gradient_weights_1(
                                    dl, row, likelihood, row, G, row,
                                    log_sum, group + i, e.activations, child + i, da, group + i,
                                )  # fmt: skip
                                add_moments_1(partial, 0, d, j * vote, dl, row)
                if s % SLOTS_AT_A_TIME == SLOTS_AT_A_TIME - 1 or s == S - 1:
                    move_moments(moments, at * MOMENTS * lanes, partial, 0)
        task = next_task(counter)


@kernel
def _uniform_moments_kernel(counter, tasks, e, chunks, moments, minus_centre, share):  # type: ignore[no-untyped-def]
    """moments [N, P, blocks, 33, lanes] about minus_centre [N, P, blocks, 16, lanes], from share [G].

    The centre is the mean of the votes of the first slot that has support: rough, but close enough that the
    variance does not cancel. Pass -1 finds it, and the passes from 0 on are the slots.
    """
    B, S, lanes, vote = e.child_types, e.slots, e.lanes, 16 * e.lanes
    d = np.empty(4 * vote, e.poses.dtype)
    r = np.empty(4 * lanes, e.poses.dtype)
    partial = np.empty(MOMENTS * lanes, e.poses.dtype)
    parents = e.images * e.parents_count
    task = next_task(counter)
    while task < tasks:
        block, chunk = task // chunks, task % chunks
        for parent in range(parents * chunk // chunks, parents * (chunk + 1) // chunks):
            n, p = parent // e.parents_count, parent % e.parents_count
            at = parent * e.blocks + block
            minus_centre[at * vote : (at + 1) * vote] = 0
            clear_moments(partial, 0)
            clear_moments(moments, at * MOMENTS * lanes)
            for step in range(-1, S):
                s = _first_supported_slot(e, n, p) if step < 0 else step
                c = e.children[p * S + s]
                if c >= 0:
                    child = (n * e.children_count + c) * B
                    weight = (e.weight_of[s] * e.blocks + block) * B
                    group = e.group_of[p * S + s]
                    for b in range(0, B, 4):
                        count = min(4, B - b)
                        for j in range(count):
                            deviations(
                                d, j * vote, e.poses, 16 * (child + b + j), e.weight, (weight + b + j) * vote,
                                e.offset, 4 * s, minus_centre, at * vote,
                            )  # fmt: skip
                        if count == 4:
                            uniform_weights_4(r, 0, share, group, e.activations, child + b)
                            add_moments_4(partial, 0, d, 0, r, 0)
                        else:
                            for j in range(count):
                                uniform_weights_1(r, 0, share, group, e.activations, child + b + j)
                                add_moments_1(partial, 0, d, j * vote, r, 0)
                if step < 0:
                    if partial[0] > 0:
                        for i in range(vote):
                            minus_centre[at * vote + i] = -partial[lanes + i] / partial[0]
                    clear_moments(partial, 0)
                elif s % SLOTS_AT_A_TIME == SLOTS_AT_A_TIME - 1 or s == S - 1:
                    move_moments(moments, at * MOMENTS * lanes, partial, 0)
        task = next_task(counter)


@kernel
def _first_supported_slot(e, n, p):  # type: ignore[no-untyped-def]
    """The first slot of parent location p whose child location is not silent in image n, or 0."""
    for s in range(e.slots):
        c = e.children[p * e.slots + s]
        if c >= 0:
            child = (n * e.children_count + c) * e.child_types
            for i in range(child, child + e.child_types):
                if e.activations[i] > 0:
                    return s
    return 0
