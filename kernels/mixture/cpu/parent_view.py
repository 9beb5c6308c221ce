"""The parent view: moments of the votes for each parent, and the M-step, which uses them.

    total = sum_i w_ij      first = sum_i w_ij d_ij      second = sum_i w_ij d_ij^2      d_ij = V_ij - centre_j

with weights w_ij = r_ij = R_ij a_i in the forward pass and dl_ij in the backward pass. A task owns the children of some
types of an image: the child view computes their weights, and the parent view adds their votes to the task's own moments
of all parents. Another kernel adds the moments of the tasks in a fixed order, which does not depend on the number of
images or threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from tritoncaps.kernels.common.cpu.arrays import array, scratch_array
from tritoncaps.kernels.common.cpu.compiling import kernel, part
from tritoncaps.kernels.common.cpu.tasks import first_task, next_task
from tritoncaps.kernels.mixture.cpu.child_view import (
    assignment_gradient,
    assignment_weights,
    assignments_and_gradient,
    edges_of,
    new_sums,
    uniform_weights,
    weights_of_gradient,
    weights_of_tile,
)
from tritoncaps.kernels.mixture.cpu.layout import (
    Beta,
    Call,
    Edge,
    Edges,
    Moment,
    Slope,
    Statistic,
    arrays,
    betas,
    numbers,
)
from tritoncaps.kernels.mixture.cpu.parents import (
    activation,
    activation_backward,
    collect,
    fit,
    fit_backward,
    likelihood_backward,
)
from tritoncaps.kernels.mixture.cpu.votes import add_moments, check_centre, clear_moments, sum_moments
from tritoncaps.kernels.mixture.iteration import Fit, History

CHUNKS = 32  # largest number of tasks over parents
PARENTS = 64  # blocks of parents that are enough for a task
RANGES = 4  # largest number of ranges of child types; a task has one range of one image
MOMENTS_BYTES = 32 << 20  # limit for the moments of all ranges of the images of a wave, if it has more than one image
EDGES_AT_A_TIME = 64  # votes of a partial sum: partial sums reduce rounding errors
ENOUGH = 8  # votes for an estimate of the mean

STATISTICS, SLOPES, MOMENTS, BETAS = Statistic.ROWS, Slope.ROWS, Moment.ROWS, Beta.ROWS
TOTAL, FIRST = Moment.TOTAL, Moment.FIRST
MINUS_MEAN = Statistic.MINUS_MEAN
CHILD, NUMBERS = Edge.CHILD, Edge.NUMBERS

# the weights of moments: share a_i, r_ij, or dl_ij
UNIFORM, ASSIGNMENT, GRADIENT = 0, 1, 2


def add_m_step(call: Call, fit: Fit, before: Any, log_sum: Any, out: Any) -> None:
    """Statistics [N, P, blocks, 36, lanes] and log_sum [2, N, B, G], from the previous statistics ``before``; None:
    uniform assignments."""
    of_fit = betas(call, fit), numbers(call, fit)
    if before is None:
        add_to_parents(call, _centres_kernel, out)
        _statistics(call, UNIFORM, out, out, out, log_sum, *of_fit)
    else:
        _statistics(call, ASSIGNMENT, before, before, out, log_sum, *of_fit)


def _statistics(
    call: Call, weights: int, before: Any, centre: Any, out: Any, log_sum: Any, of_types: Any, of_fit: Any
) -> None:
    """Fill ``out`` from moments about ``centre``. For parents whose mean is far from the centre, compute the moments
    again about that mean. ``of_types``: betas; if their size is 0, ``out`` gets the moments."""
    edges, nothing = call.edges, out[:0]
    for first, images, ranges, moments in _waves(call):
        again, chunks = np.empty(images * edges.parents_count * edges.blocks, np.bool_), _chunks(edges, images)
        for all_, about in ((True, centre), (False, out)):
            given = moments, about, again[:0] if all_ else again, before, nothing, log_sum, nothing, nothing
            call.plan.add(_moments_kernel, images * ranges, edges, first, ranges, weights, *given)
            given = out, moments, about, all_, again, of_types, of_fit
            call.plan.add(_fit_kernel, chunks, edges, first, images, chunks, ranges, *given)


def add_moments_of(call: Call, before: Any, out: Any, log_sum: Any, least: Any) -> None:
    """Support, mean and variance in the rows of ``out`` [N, P, blocks, 36, lanes], and log_sum [2, N, B, G].

    ``before``: previous components, then ``out`` holds estimates of the means; or None: uniform assignments."""
    if before is None:
        add_to_parents(call, _centres_kernel, out)
        _statistics(call, UNIFORM, out, out, out, log_sum, out[:0], least)
    else:
        _statistics(call, ASSIGNMENT, before, out, out, log_sum, out[:0], least)


def add_component_gradients(
    call: Call, before: Any, slopes: Any, log_sum: Any, da: Any, weights: Any, out: Any
) -> None:
    """The moments of dl, summed over all child types, in ``out`` [N, P, blocks, 33, lanes]; da [N, B, G]; and
    ``weights``, r and dl (`layout.weights_count`)."""
    edges, everywhere = call.edges, np.empty(0, np.bool_)
    for first, images, ranges, moments in _waves(call):
        given = moments, before, everywhere, before, slopes, log_sum, da, weights
        call.plan.add(_moments_kernel, images * ranges, edges, first, ranges, GRADIENT, *given)
        chunks = _chunks(edges, images)
        call.plan.add(_total_kernel, chunks, edges, first, images, chunks, ranges, out, moments)


def add_slopes_before(call: Call, fit: Fit, history: History, t: int) -> None:
    """da [N, B, G] of iteration t, and the slopes [N, P, blocks, 67, lanes] of iteration t - 1."""
    edges, known = call.edges, arrays(call, history)
    statistics, before, slopes = known.statistics[t - 1], known.statistics[max(t - 2, 0)], known.slopes[t - 1]
    inputs = known.slopes[t], known.log_sums[t - 1], known.da[t - 1]
    everywhere, kept = np.empty(0, np.bool_), call.weights[t - 1] if call.weights else slopes[:0]
    for first, images, ranges, moments in _waves(call):
        given = moments, statistics, everywhere, statistics, *inputs, kept
        call.plan.add(_moments_kernel, images * ranges, edges, first, ranges, GRADIENT, *given)
        chunks = _chunks(edges, images)
        given = slopes, moments, statistics, before, betas(call, fit), numbers(call, fit)
        call.plan.add(_slopes_kernel, chunks, edges, first, images, chunks, ranges, *given)


def add_outputs(call: Call, poses: Tensor, activations: Tensor, statistics: Any) -> None:
    """Poses [N, P, 16, C] and activations [N, P, C] from the last statistics; in memory, types are slower than
    locations."""
    given = array(poses.permute(0, 3, 1, 2)), array(activations.transpose(1, 2))
    add_to_parents(call, _outputs_kernel, *given, statistics)


def add_output_slopes(call: Call, fit: Fit, history: History, grad_poses: Tensor, grad_activations: Tensor) -> None:
    """Slopes [N, P, blocks, 67, lanes] of the last M-step, from gradients [N, P, 16, C] and [N, P, C]."""
    known = arrays(call, history)
    grads = array(grad_poses.permute(0, 3, 1, 2)), array(grad_activations.transpose(1, 2))
    statistics = known.statistics[-1], known.statistics[-2:][0]
    add_to_parents(
        call, _output_slopes_kernel, known.slopes[-1], *grads, *statistics, betas(call, fit), numbers(call, fit)
    )


def _waves(call: Call) -> list[tuple[int, int, int, Any]]:
    """Waves of images: the first image, the number of images, the ranges of child types, and memory for the moments.
    Ranges depend only on the layer, because they determine the order of sums."""
    if call.waves is None:
        edges = call.edges
        numbers = edges.parents_count * edges.blocks * MOMENTS * edges.lanes
        ranges = min(RANGES, -(-edges.child_types // edges.together))
        while ranges > 2 and ranges * numbers * edges.poses.itemsize > MOMENTS_BYTES:
            ranges //= 2
        step = max(1, MOMENTS_BYTES // max(1, ranges * numbers * edges.poses.itemsize))
        step = min(step, edges.images)
        moments = scratch_array("moments", step * ranges * numbers, call.dtype)
        starts = range(0, edges.images, max(1, step))
        call.waves = [(first, min(step, edges.images - first), ranges, moments) for first in starts]
    return call.waves


def _chunks(edges: Edges, images: int) -> int:
    """Number of tasks of a kernel over parents."""
    return min(CHUNKS, -(-images * edges.parents_count * edges.blocks // PARENTS))


def add_to_parents(call: Call, function: Any, *arguments: Any) -> None:
    """Add a kernel over the parents of all images to the plan."""
    images = call.edges.images
    chunks = _chunks(call.edges, images)
    call.plan.add(function, chunks, call.edges, 0, images, chunks, *arguments)


@kernel
def _moments_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, first, ranges, weights, moments, centre, again, statistics, slopes, log_sum, da, kept
):
    """moments [images, ranges, blocks, P, 33, lanes] = sums of w, w d, w d^2 about centre [N, P, blocks, 36, lanes].

    Only for parents with `again` [images, P, blocks]; size 0: for all. Weights from statistics [N, P, blocks, 36,
    lanes] and slopes [N, P, blocks, 67, lanes]; fills log_sum [2, N, B, G] or da [N, B, G], and keeps r and dl
    (`layout.weights_count`). A task owns a range of child types of an image.
    """
    rows = np.empty(e.together * e.edges_count * e.blocks * e.lanes, e.poses.dtype)
    rows_of_G = np.empty(len(rows) if weights == GRADIENT else 0, e.poses.dtype)
    sums, one, two = new_sums(e)
    parents = e.parents_count * e.blocks
    task = first_task(counter, tasks)
    while task < tasks:
        image, own = task // ranges, task % ranges
        n = first + image
        wanted = again[image * parents : (image + 1) * parents]
        if len(again) == 0 or np.any(wanted):
            own_moments = moments[task * parents * MOMENTS * e.lanes : (task + 1) * parents * MOMENTS * e.lanes]
            tiles = -(-e.child_types // e.together)
            begin, end = tiles * own // ranges * e.together, tiles * (own + 1) // ranges * e.together
            for b in range(begin, end, e.together):
                types, r, G = min(e.together, e.child_types - b), rows, rows_of_G
                if weights == UNIFORM:
                    uniform_weights(e, n, b, types, r)
                elif weights == ASSIGNMENT:
                    assignment_weights(e, n, b, types, r, sums, one, two, statistics, log_sum)
                else:
                    start, stop = weights_of_tile(e, kept, n, b)
                    if start < stop:
                        r, G = kept[start : start + len(rows)], kept[start + len(rows) : stop]
                    assignments_and_gradient(e, n, b, types, r, G, statistics, slopes, log_sum)
                    assignment_gradient(e, n, b, types, r, G, sums, one, da)
                    weights_of_gradient(e, n, b, types, r, G, da)
                    r = G
                _add_children(e, n, b, types, b == begin, r, own_moments, centre, wanted)
        task = next_task(counter, tasks)


@part
def _add_children(e, n, b, types, fresh, r, moments, centre, wanted):  # type: ignore[no-untyped-def]
    """Add the votes of children of a few types, with weights r [blocks, edges, lanes], to moments [blocks, P, 33,
    lanes]. If `fresh`, set the moments to zero first."""
    lanes, blocks = e.lanes, e.blocks
    poses = (n * e.child_types + b) * e.children_count * 16
    for block in range(blocks):
        for p in range(e.parents_count):
            parent, of_parent = p * blocks + block, (block * e.parents_count + p) * MOMENTS * lanes
            first, last = edges_of(e, p, types)
            if fresh:
                clear_moments(moments, of_parent)
            if len(wanted) == 0 or wanted[parent]:
                for edge in range(first, last, EDGES_AT_A_TIME):
                    add_moments(
                        moments, of_parent, e.poses, poses,
                        e.weight, (block * e.child_types + b) * e.weights * 16 * lanes, e.offset, 0,
                        centre, (n * e.parents_count * blocks + parent) * STATISTICS * lanes,
                        r, (block * e.together * e.edges_count + edge) * lanes, e.edges, edge * NUMBERS,
                        min(EDGES_AT_A_TIME, last - edge),
                    )  # fmt: skip


@kernel
def _centres_kernel(counter, tasks, e, first, images, chunks, statistics):  # type: ignore[no-untyped-def]
    """An estimate of the mean of the votes for each parent, in the rows of the mean of statistics [N, P, blocks, 36,
    lanes]: the mean of a few votes from the first child location with positive activations. It is near enough that the
    variance does not lose precision. A task owns some parent locations.
    """
    lanes, blocks, rows = e.lanes, e.blocks, STATISTICS * e.lanes
    moments, weight = np.empty(MOMENTS * lanes, e.poses.dtype), np.empty(lanes, e.poses.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        for parent in range(images * e.parents_count * task // chunks, images * e.parents_count * (task + 1) // chunks):
            n, p = parent // e.parents_count, parent % e.parents_count
            statistics[parent * blocks * rows : (parent + 1) * blocks * rows] = 0
            edge = _first_supported_edge(e, n, p)  # index for one child type
            for block in range(blocks if edge >= 0 else 0):
                row, found = (parent * blocks + block) * rows, 0
                clear_moments(moments, 0)
                for b in range(e.child_types):
                    children = (n * e.child_types + b) * e.children_count
                    weight[:] = e.activations[children + e.edges[edge * NUMBERS + CHILD]]
                    if weight[0] > 0 and found < ENOUGH:
                        found += 1
                        add_moments(
                            moments, 0, e.poses, children * 16,
                            e.weight, (block * e.child_types + b) * e.weights * 16 * lanes, e.offset, 0,
                            statistics, row, weight, 0, e.edges, edge * NUMBERS, 1,
                        )  # fmt: skip
                for i in range(16 * lanes):
                    statistics[row + i] = -moments[FIRST * lanes + i] / moments[TOTAL * lanes]
        task = next_task(counter, tasks)


@part
def _first_supported_edge(e, n, p):  # type: ignore[no-untyped-def]
    """The first edge of a parent location whose child location has a positive activation, or -1."""
    first, last = edges_of(e, p, 1)
    for edge in range(first, last):
        for b in range(e.child_types):
            if e.activations[(n * e.child_types + b) * e.children_count + e.edges[edge * NUMBERS + CHILD]] > 0:
                return edge
    return -1


@kernel
def _fit_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, first, images, chunks, ranges, statistics, moments, centre, all_, again, betas, numbers
):
    """statistics [N, P, blocks, 36, lanes] from moments [images, ranges, blocks, P, 33, lanes] about centre, for `all_`
    parents or those with `again` [images, P, blocks], which becomes true where the mean is far from the centre. If
    betas have size 0, statistics are support, mean and variance. A task owns some blocks of parents.
    """
    lanes = e.lanes
    total, excess = np.empty(MOMENTS * lanes, e.poses.dtype), np.empty(1, e.poses.dtype)
    parents = e.parents_count * e.blocks
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * parents * task // chunks, images * parents * (task + 1) // chunks):
            if all_ or again[index]:
                _join_moments(e, ranges, index, moments, total)
                check_centre(excess, 0, total, 0, numbers, 0)
                again[index] = excess[0] > 0
                row, beta = (first * parents + index) * STATISTICS * lanes, index % e.blocks * BETAS * lanes
                if len(betas) > 0:
                    fit(statistics, row, total, 0, centre, row, betas, beta, numbers, 0)
                else:
                    collect(statistics, row, total, 0, centre, row, numbers, 0)
        task = next_task(counter, tasks)


@kernel
def _total_kernel(counter, tasks, e, first, images, chunks, ranges, out, moments):  # type: ignore[no-untyped-def]
    """out [N, P, blocks, 33, lanes] = the sum over the ranges of moments [images, ranges, blocks, P, 33, lanes]. A task
    owns some blocks of parents."""
    lanes, total = e.lanes, np.empty(MOMENTS * e.lanes, e.poses.dtype)
    parents = e.parents_count * e.blocks
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * parents * task // chunks, images * parents * (task + 1) // chunks):
            _join_moments(e, ranges, index, moments, total)
            row = (first * parents + index) * MOMENTS * lanes
            for i in range(MOMENTS * lanes):
                out[row + i] = total[i]
        task = next_task(counter, tasks)


@kernel
def _slopes_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, first, images, chunks, ranges, out, moments, statistics, before, betas, numbers
):
    """out [N, P, blocks, 67, lanes] = the slopes of the M-step that computed `statistics`, from the moments of dl of
    the next iteration. `before`: the statistics of the previous iteration. A task owns some blocks of parents.
    """
    lanes, total = e.lanes, np.empty(MOMENTS * e.lanes, e.poses.dtype)
    parents = e.parents_count * e.blocks
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * parents * task // chunks, images * parents * (task + 1) // chunks):
            _join_moments(e, ranges, index, moments, total)
            parent, beta = first * parents + index, index % e.blocks * BETAS * lanes
            row = parent * STATISTICS * lanes
            likelihood_backward(total, 0, statistics, row)
            fit_backward(out, parent * SLOPES * lanes, total, 0, statistics, row, before, row, betas, beta, numbers, 0)
        task = next_task(counter, tasks)


@part
def _join_moments(e, ranges, index, moments, total):  # type: ignore[no-untyped-def]
    """total [33, lanes] = the sum over the ranges of child types, for the block of a parent with this index in [images,
    P, blocks]."""
    parents = e.parents_count * e.blocks
    image, p, block = index // parents, index % parents // e.blocks, index % e.blocks
    clear_moments(total, 0)
    for own in range(ranges):
        row = (((image * ranges + own) * e.blocks + block) * e.parents_count + p) * MOMENTS * e.lanes
        sum_moments(total, 0, moments, row)


@kernel
def _output_slopes_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, first, images, chunks, slopes, grad_poses, grad_activations, statistics, before, betas, numbers
):
    """slopes [N, P, blocks, 67, lanes] from grad_poses [N, C, P, 16] and grad_activations [N, C, P]. A task owns some
    parent locations."""
    C, P, lanes = e.parent_types, e.parents_count, e.lanes
    gradients = np.zeros(MOMENTS * lanes, e.poses.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * P * task // chunks, images * P * (task + 1) // chunks):
            n, p = index // P, index % P
            for block in range(e.blocks):
                gradients[:] = 0
                for lane in range(min(lanes, C - block * lanes)):
                    capsule = (n * C + block * lanes + lane) * P + p
                    gradients[TOTAL * lanes + lane] = grad_activations[capsule]
                    for h in range(16):
                        gradients[(FIRST + h) * lanes + lane] = grad_poses[capsule * 16 + h]
                parent, beta = index * e.blocks + block, block * BETAS * lanes
                row = parent * STATISTICS * lanes
                activation_backward(gradients, 0, statistics, row)
                fit_backward(
                    slopes, parent * SLOPES * lanes, gradients, 0, statistics, row, before, row, betas, beta, numbers, 0
                )
        task = next_task(counter, tasks)


@kernel
def _outputs_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, first, images, chunks, poses, activations, statistics
):
    """poses [N, C, P, 16] and activations [N, C, P] from statistics [N, P, blocks, 36, lanes]. A task owns some parent
    locations."""
    C, P, lanes = e.parent_types, e.parents_count, e.lanes
    a = np.empty(lanes, e.poses.dtype)
    task = first_task(counter, tasks)
    while task < tasks:
        for index in range(images * P * task // chunks, images * P * (task + 1) // chunks):
            n, p = index // P, index % P
            for block in range(e.blocks):
                row = (index * e.blocks + block) * STATISTICS * lanes
                activation(a, 0, statistics, row)
                for lane in range(min(lanes, C - block * lanes)):
                    capsule = (n * C + block * lanes + lane) * P + p
                    activations[capsule] = a[lane]
                    for h in range(16):
                        poses[capsule * 16 + h] = -statistics[row + (MINUS_MEAN + h) * lanes + lane]
        task = next_task(counter, tasks)
