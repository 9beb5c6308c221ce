"""Dynamic routing on the CPU. Each iteration, forward or backward, is one sweep over the children:

    u_hat_ij = W_ij^T u_i                                    votes, recomputed, for a few images in a scratch array
    R_ij     = softmax over j of b_ij + u_hat_ij . q_j
    s_j      = sum_i R_ij u_hat_ij                           forward
    dl_ij    = R_ij (G_ij - sum_k R_ik G_ik)                 backward, with G_ij = u_hat_ij . g_j
    dq_j     = sum_i dl_ij u_hat_ij

A sweep processes all parents of a child together, so it computes each vote once, for the softmax and for the parents'
sums. A task owns some children of some images and a part of the sum. The kernels that squash add up the parts, whose
number depends neither on the batch nor on the threads. The last sweep of the backward pass computes the gradients of
poses, weight and priors for all iterations at once.

The lanes of a vector are images. The kernels compute votes for two blocks of images at a time, so that they load each
entry of a matrix once for both. The matrices of some children stay in the L2 cache for all images of a task.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tritoncaps.kernels.common.cpu.arrays import array
from tritoncaps.kernels.common.cpu.compiling import inlined, kernel
from tritoncaps.kernels.common.cpu.tasks import first_task, next_task
from tritoncaps.kernels.common.cpu.threads import Plan, num_threads
from tritoncaps.kernels.common.cpu.workspace import scratch
from tritoncaps.kernels.common.tables import Tables, orders_of
from tritoncaps.kernels.dynamic.cpu.squash import product_of, square_of, squash_factor, squash_slope
from tritoncaps.kernels.dynamic.cpu.votes import (
    FOUR,
    VECTOR_BYTES,
    add_pose_gradient_1,
    add_pose_gradient_2,
    add_weight_gradient,
    add_weighted,
    set_rows,
    softmax,
    softmax_gradient,
    vote_gradient,
    votes_1,
    votes_2,
)
from tritoncaps.kernels.dynamic.options import Gradients, Options

CHUNKS = 8  # largest number of parts of the children; each part has its own sum
CHUNK_NUMBERS = 2**15  # limit for the sums of all parts of an image, if there are more than FEWEST_CHUNKS
FEWEST_CHUNKS = 4
TASKS = 16  # of a sweep for each thread, if there are enough images
MATRICES = 2**15  # entries of the matrices that a sweep uses for some images before it takes the next images
PACKED = 32  # children of a task that packs poses
PARTS = 32  # approximate number of tasks of the last sweep: parts of the child types times parts of the images
GROUP = 4  # blocks of images whose vote gradients the last sweep keeps, to compute dW


class VectorEdges(NamedTuple):
    """The inputs of a call: flat arrays and their sizes, in the form that Numba accepts.

    A block has `lanes` images; the last block is padded with poses of zeros. D and E are padded to multiples of FOUR.
    A *state* is an array of the parents: [blocks, P, C, E, lanes], with zeros as padding.
    """

    poses: NDArray  # [blocks, B, L, D, lanes]
    weight: NDArray  # [K, B, C, D, E]
    priors: NDArray  # [K, B, C]
    rival: NDArray  # [1]: the logit of the additional parent "none of the above", or the lowest number if there is none
    nothing: NDArray  # [1]: zero
    start: NDArray  # int32 [L + 1]: child location c has the edges start[c] to start[c + 1]
    parent_of: NDArray  # int32 [edges]: parent location
    weight_of: NDArray  # int32 [edges]: weight block
    degree: int  # largest number of edges of a child location
    local: bool
    images: int  # N
    blocks: int
    child_types: int  # B
    children: int  # L
    depth: int  # D
    parent_types: int  # C
    entries: int  # E
    parents: int  # P
    weights: int  # K
    lanes: int
    given_depth: int  # D and E without padding
    given_entries: int


def forward(
    poses: Tensor, weight: Tensor, priors: Tensor | None, tables: Tables, options: Options
) -> tuple[Tensor, Tensor]:
    """poses [N, B, L, D], weight [K, B, C, D, E], priors [K, B, C] -> the sums s of every iteration [T, N, P, C, E] and
    the parents [N, P, C, E]."""
    plan = Plan()
    e = _edges(plan, poses, weight, priors, tables, options)
    shape = (e.images, e.parents, e.parent_types, e.given_entries)
    sums, out = poses.new_empty(options.iterations, *shape), poses.new_empty(shape)
    q = scratch("dynamic q", (1, *_state(e)), poses.dtype)
    for t in range(options.iterations):
        parts = _sweep(plan, e, q[: min(t, 1)])
        given = (array(x) for x in (parts, sums[t], q, out))
        plan.add(_squash_kernel, e.blocks, e, len(parts), t == 0, *given)
    plan.run()
    return sums, out


def backward(
    grad: Tensor,
    poses: Tensor,
    weight: Tensor,
    priors: Tensor | None,
    tables: Tables,
    sums: Tensor,
    options: Options,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """The gradients of poses, weight and priors that `needs` selects, in the shapes of these tensors; from dL/dv
    [N, P, C, E] and the sums of the forward pass."""
    plan = Plan()
    e = _edges(plan, poses, weight, priors, tables, options)
    iterations, dtype = options.iterations, poses.dtype
    states = scratch("dynamic states", (iterations, 2, *_state(e)), dtype)  # q and g
    # grad is the gradient of the last v; the gradients of the others come only from agreements
    dv = scratch("dynamic dv", (2, *grad.shape), dtype)
    dv[0], dv[1] = grad, 0
    none = grad.new_empty(0)
    plan.add(_agreed_kernel, e.blocks, e, iterations, array(sums), array(states))
    given = (array(x) for x in (none, sums[-1], dv[0], states[-1, 1]))
    plan.add(_squash_gradient_kernel, e.blocks, e, 0, *given)
    if options.gradient == "last":
        return _last_sweep(plan, e, states[-1:], iterations == 1, needs, poses, weight)
    for t in reversed(range(1, iterations)):
        parts = _sweep(plan, e, states[t])
        given = (array(x) for x in (parts, sums[t - 1], dv[1], states[t - 1, 1]))
        plan.add(_squash_gradient_kernel, e.blocks, e, len(parts), *given)
    return _last_sweep(plan, e, states, True, needs, poses, weight)


def _edges(
    plan: Plan, poses: Tensor, weight: Tensor, priors: Tensor | None, tables: Tables, options: Options
) -> VectorEdges:
    """The inputs of the kernels. The first kernel of the plan packs the poses."""
    images, child_types, children, given_depth = poses.shape
    weights, _, parent_types, _, given_entries = weight.shape
    lanes = VECTOR_BYTES // poses.element_size()
    blocks = -(-images // lanes)
    depth, entries = (-(-size // FOUR) * FOUR for size in (given_depth, given_entries))
    if weight.shape[3:] != (depth, entries):
        sizes = (*weight.shape[:3], depth, entries)
        padding = (0, entries - given_entries, 0, depth - given_depth)
        weight = scratch("dynamic weight", sizes, weight.dtype).copy_(F.pad(weight, padding))
    if priors is None:
        priors = scratch("dynamic priors", (weights, child_types, parent_types), poses.dtype).zero_()
    rival = 0.0 if options.none_of_the_above else torch.finfo(poses.dtype).min
    packed = scratch("dynamic poses", (blocks, child_types, children, depth, lanes), poses.dtype)
    e = VectorEdges(
        poses=array(packed),
        weight=array(weight),
        priors=array(priors),
        rival=array(poses.new_tensor([rival])),
        nothing=array(poses.new_zeros(1)),
        **_of_map(tables),
        local=options.competition == "local",
        images=images,
        blocks=blocks,
        child_types=child_types,
        children=children,
        depth=depth,
        parent_types=parent_types,
        entries=entries,
        parents=len(tables.children),
        weights=weights,
        lanes=lanes,
        given_depth=given_depth,
        given_entries=given_entries,
    )
    plan.add(_pack_kernel, _packing_tasks(e), e, array(poses), e.poses)
    return e


_maps: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _of_map(tables: Tables) -> dict[str, Any]:
    """The fields of `VectorEdges` that depend only on the routing map, computed once for each map."""
    if tables.children not in _maps:
        pairs = orders_of(tables)
        _maps[tables.children] = {
            "start": array(tables.parents_start),
            "parent_of": array(pairs.parent),
            "weight_of": array(tables.weight_of[pairs.slot]),
            "degree": int(tables.parents_start.diff().max()),
        }
    return _maps[tables.children]


def _state(e: VectorEdges) -> tuple[int, ...]:
    return e.blocks, e.parents, e.parent_types, e.entries, e.lanes


def _packing_tasks(e: VectorEdges) -> int:
    return e.blocks * -(-e.child_types * e.children // PACKED)


def _sweep(plan: Plan, e: VectorEdges, states: Tensor) -> Tensor:
    """Add a sweep to the plan. Returns [chunks, state]: a part of s for each chunk of the children; with states [q, g],
    a part of dq."""
    children, numbers = e.child_types * e.children, math.prod(_state(e)[1:4])
    chunks = min(CHUNKS, max(FEWEST_CHUNKS, CHUNK_NUMBERS // numbers), -(-children // 8))
    image_parts = min(-(-e.blocks // 2), -(-TASKS * num_threads() // chunks))
    parts = scratch("dynamic sums", (chunks, *_state(e)), states.dtype)
    given = chunks, image_parts, array(parts), array(states), len(states)
    plan.add(_sweep_kernel, chunks * image_parts, e, *given)
    return parts


def _last_sweep(
    plan: Plan,
    e: VectorEdges,
    states: Tensor,
    from_first: bool,
    needs: tuple[bool, bool, bool],
    poses: Tensor,
    weight: Tensor,
) -> Gradients:
    """Run the plan and a last sweep for the gradients, from states [iterations, (q, g)]. ``from_first``: states[0] is
    the first iteration of the routing, whose q is zero."""
    needs_poses, needs_weight, needs_priors = needs
    # the parts determine the order of the sum over images, so they must not depend on threads
    type_parts, image_parts = min(e.child_types, PARTS), min(-(-e.blocks // 2), -(-PARTS // e.child_types))
    sizes = (e.weights, e.child_types, e.parent_types, e.depth, e.entries)
    owned = image_parts == 1 and sizes == weight.shape
    none = poses.new_empty(0)
    grad_poses = torch.empty_like(poses) if needs_poses else none
    grad_weight = torch.empty_like(weight) if needs_weight else none
    du = scratch("dynamic du", (len(e.poses) if needs_poses else 0,), poses.dtype)
    dW = grad_weight if owned or not needs_weight else scratch("dynamic dW", (image_parts, *sizes), poses.dtype)
    db = poses.new_empty(image_parts, *sizes[:3]) if needs_priors else none
    plan.add(
        _gradient_kernel,
        type_parts * image_parts,
        e,
        image_parts,
        len(states),
        from_first,
        array(states),
        array(du),
        array(dW),
        array(db),
    )
    if needs_poses:
        plan.add(_unpack_kernel, _packing_tasks(e), e, array(du), array(grad_poses))
    plan.run()
    if needs_weight and not owned:
        grad_weight.copy_(dW.sum(dim=0)[..., : e.given_depth, : e.given_entries])
    return Gradients(
        grad_poses if needs_poses else None,
        grad_weight if needs_weight else None,
        db.sum(dim=0) if needs_priors else None,
    )


@kernel
def _pack_kernel(counter, tasks, e, given, packed):  # type: ignore[no-untyped-def]
    """packed [blocks, B, L, D, lanes] from [N, B, L, D]; a task owns some children in a block."""
    children, D, lanes = e.child_types * e.children, e.depth, e.lanes
    task = first_task(counter, tasks)
    while task < tasks:
        block, first = task % e.blocks, task // e.blocks * PACKED
        images = min(lanes, e.images - block * lanes)
        for child in range(first, min(first + PACKED, children)):
            at = (block * children + child) * D * lanes
            if images < lanes or e.given_depth < D:
                packed[at : at + D * lanes] = 0
            for n in range(images):
                source = ((block * lanes + n) * children + child) * e.given_depth
                for d in range(e.given_depth):
                    packed[at + d * lanes + n] = given[source + d]
        task = next_task(counter, tasks)


@kernel
def _unpack_kernel(counter, tasks, e, packed, out):  # type: ignore[no-untyped-def]
    """out [N, B, L, D] from [blocks, B, L, D, lanes]; a task owns some children in a block."""
    children, D, lanes = e.child_types * e.children, e.depth, e.lanes
    task = first_task(counter, tasks)
    while task < tasks:
        block, first = task % e.blocks, task // e.blocks * PACKED
        for n in range(min(lanes, e.images - block * lanes)):
            for child in range(first, min(first + PACKED, children)):
                at = (block * children + child) * D * lanes + n
                to = ((block * lanes + n) * children + child) * e.given_depth
                for d in range(e.given_depth):
                    out[to + d] = packed[at + d * lanes]
        task = next_task(counter, tasks)


@kernel
def _sweep_kernel(counter, tasks, e, chunks, image_parts, sums, states, several):  # type: ignore[no-untyped-def]
    """sums [chunks, state] = parts of s or dq; states [several, state]: none in the first iteration, [q] for s, [q, g]
    for dq.

    A task owns a chunk of the children and a part of the images.
    """
    rows = e.degree * e.parent_types * e.lanes
    votes, pairs = np.empty(2 * rows * e.entries, e.poses.dtype), np.empty(4 * rows, e.poses.dtype)
    children, state = e.child_types * e.children, e.parents * e.parent_types * e.entries * e.lanes
    near = max(1, MATRICES // (e.degree * e.parent_types * e.depth * e.entries))
    task = first_task(counter, tasks)
    while task < tasks:
        chunk, part = task // image_parts, task % image_parts
        first_block, last_block = _blocks_of(e, part, image_parts)
        base = chunk * e.blocks * state
        sums[base + first_block * state : base + last_block * state] = 0
        last_child = children * (chunk + 1) // chunks
        for first_child in range(children * chunk // chunks, last_child, near):
            for block in range(first_block, last_block, 2):
                blocks = min(2, last_block - block)
                for child in range(first_child, min(first_child + near, last_child)):
                    b, c = child // e.children, child % e.children
                    _begin(e, b, c, blocks, max(1, several), pairs)
                    _votes(e, b, c, block, blocks, states, 0, several, votes, pairs)
                    _normalize(e, c, blocks, 1, several > 1, pairs)
                    _add_to_parents(e, c, block, blocks, votes, pairs, 2 * rows if several > 1 else 0, sums, base)
        task = next_task(counter, tasks)


@kernel
def _gradient_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, image_parts, iterations, from_first, states, du, dW, db
):
    """du_i = sum_j W_ij dV_ij,  dW = sum u_i dV_ij^T,  db = sum dl_ij, with dV and dl of all iterations.

    du [blocks, B, L, D, lanes], dW [image_parts, K, B, C, D, E], db [image_parts, K, B, C]; an array of size 0 is not
    computed. states [iterations, (q, g), state]. A task owns some child types and a part of the images.
    """
    rows = e.degree * e.parent_types * e.lanes
    tile, type_parts = rows * e.entries, tasks // image_parts
    votes, dV = np.empty(2 * tile, e.poses.dtype), np.empty(GROUP * tile, e.poses.dtype)
    pairs = np.empty(4 * iterations * rows, e.poses.dtype)
    unused = 2 if from_first and len(db) == 0 else 0  # skip states[0]: q is zero, and only db needs G
    task = first_task(counter, tasks)
    while task < tasks:
        type_part, part = task // image_parts, task % image_parts
        first_type, last_type = e.child_types * type_part // type_parts, e.child_types * (type_part + 1) // type_parts
        first_block, last_block = _blocks_of(e, part, image_parts)
        for k in range(part * e.weights, (part + 1) * e.weights):
            _zero_types(e, k, first_type, last_type, dW, e.depth * e.entries)
            _zero_types(e, k, first_type, last_type, db, 1)
        for start in range(first_block, last_block, GROUP):
            end = min(start + GROUP, last_block)
            for child in range(first_type * e.children, last_type * e.children):
                b, c = child // e.children, child % e.children
                for block in range(start, end, 2):
                    blocks, place = min(2, end - block), (block - start) * tile
                    _begin(e, b, c, blocks, 2 * iterations, pairs)
                    _votes(e, b, c, block, blocks, states, unused, 2 * iterations - unused, votes, pairs)
                    _normalize(e, c, blocks, iterations, True, pairs)
                    if len(db) > 0:
                        _add_priors_gradient(e, b, c, block, blocks, iterations, pairs, db, part)
                    _vote_gradient(e, c, block, blocks, iterations, states, pairs, dV, place)
                    if len(du) > 0:
                        _pose_gradient(e, b, c, block, blocks, dV, place, du)
                if len(dW) > 0:
                    _add_weight_gradient(e, b, c, start, end - start, dV, dW, part)
        task = next_task(counter, tasks)


@inlined
def _blocks_of(e, part, parts):  # type: ignore[no-untyped-def]
    """The first block of a part of the images, and the one after the last. Pairs of blocks are not divided."""
    pairs = (e.blocks + 1) // 2
    return 2 * (pairs * part // parts), min(e.blocks, 2 * (pairs * (part + 1) // parts))


@inlined
def _zero_types(e, k, first, last, out, size):  # type: ignore[no-untyped-def]
    """out [..., B, C, size] = 0 for some child types, unless out has size 0."""
    if len(out) > 0:
        numbers = e.parent_types * size
        out[(k * e.child_types + first) * numbers : (k * e.child_types + last) * numbers] = 0


@inlined
def _pose(e, b, c, block):  # type: ignore[no-untyped-def]
    """Position of a child's pose in the poses, for a block of images."""
    return ((block * e.child_types + b) * e.children + c) * e.depth * e.lanes


@inlined
def _parent(e, edge, block):  # type: ignore[no-untyped-def]
    """Position of the parents of an edge in a state."""
    return (block * e.parents + e.parent_of[edge]) * e.parent_types * e.entries * e.lanes


@inlined
def _matrices(e, edge, b, part):  # type: ignore[no-untyped-def]
    """Index of the first of the C matrices, or priors, of an edge; for a gradient, in a part of the sum over images."""
    return ((part * e.weights + e.weight_of[edge]) * e.child_types + b) * e.parent_types


@inlined
def _begin(e, b, c, blocks, several, pairs):  # type: ignore[no-untyped-def]
    """Initialize the first `several` of pairs [iterations (logits, G), 2, degree, C, lanes]: logits = priors, G = 0."""
    C, rows = e.parent_types, e.degree * e.parent_types * e.lanes
    for k in range(several):
        for n in range(blocks):
            for edge in range(e.start[c], e.start[c + 1]):
                at = (2 * k + n) * rows + (edge - e.start[c]) * C * e.lanes
                if k % 2 == 0:
                    set_rows(pairs, at, e.priors, _matrices(e, edge, b, 0), C, 1)
                else:
                    set_rows(pairs, at, e.nothing, 0, C, 0)


@inlined
def _votes(e, b, c, block, blocks, states, first, several, votes, pairs):  # type: ignore[no-untyped-def]
    """votes [2, degree, C, E, lanes] of a child in one or two blocks of images, and pairs += votes . states for
    `several` states from `first` on."""
    C, D, E, rows = e.parent_types, e.depth, e.entries, e.degree * e.parent_types * e.lanes
    pose_step, state_block = _pose(e, 0, 0, 1), e.parents * C * E * e.lanes
    state_step = e.blocks * state_block
    u = _pose(e, b, c, block)
    for edge in range(e.start[c], e.start[c + 1]):
        at = (edge - e.start[c]) * C * e.lanes
        vote, pair, state = at * E, 2 * first * rows + at, first * state_step + _parent(e, edge, block)
        weight = _matrices(e, edge, b, 0) * D * E
        if blocks == 2:
            votes_2(
                votes, vote, pairs, pair, e.poses, u, e.weight, weight, states, state,
                several, C, D, E, rows, pose_step, state_step, state_block,
            )  # fmt: skip
        else:
            votes_1(
                votes, vote, pairs, pair, e.poses, u, e.weight, weight, states, state,
                several, C, D, E, rows, pose_step, state_step, state_block,
            )  # fmt: skip


@inlined
def _normalize(e, c, blocks, iterations, slopes, pairs):  # type: ignore[no-untyped-def]
    """In place: R = softmax(logits), and if `slopes`, dl = R (G - sum_k R_k G_k) replaces G."""
    rows, edges = e.degree * e.parent_types * e.lanes, e.start[c + 1] - e.start[c]
    rivals = e.parent_types * (1 if e.local else max(1, edges))
    for t in range(iterations):
        for n in range(blocks):
            first = (4 * t + n) * rows
            for at in range(first, first + edges * e.parent_types * e.lanes, rivals * e.lanes):
                softmax(pairs, at, pairs, at, e.rival, 0, rivals)
                if slopes:
                    softmax_gradient(pairs, at + 2 * rows, pairs, at, pairs, at + 2 * rows, rivals)


@inlined
def _add_to_parents(e, c, block, blocks, votes, pairs, first, sums, base):  # type: ignore[no-untyped-def]
    """sums[base :], a state, += w votes, with the weights w = R or dl in pairs[first :]."""
    C, rows = e.parent_types, e.degree * e.parent_types * e.lanes
    for n in range(blocks):
        for edge in range(e.start[c], e.start[c + 1]):
            at = n * rows + (edge - e.start[c]) * C * e.lanes
            to = base + _parent(e, edge, block + n)
            add_weighted(sums, to, votes, at * e.entries, pairs, first + at, C, e.entries)


@inlined
def _vote_gradient(e, c, block, blocks, iterations, states, pairs, dV, place):  # type: ignore[no-untyped-def]
    """dV[place :] = sum over the iterations of R g + dl q, in the layout of votes."""
    C, E, rows = e.parent_types, e.entries, e.degree * e.parent_types * e.lanes
    state_step = e.blocks * e.parents * C * E * e.lanes
    for n in range(blocks):
        for edge in range(e.start[c], e.start[c + 1]):
            at = n * rows + (edge - e.start[c]) * C * e.lanes
            state = _parent(e, edge, block + n)
            vote_gradient(dV, place + at * E, pairs, at, states, state, iterations, C, E, rows, state_step)


@inlined
def _add_priors_gradient(e, b, c, block, blocks, iterations, pairs, db, part):  # type: ignore[no-untyped-def]
    """db [image_parts, K, B, C] += sum over iterations and images of dl."""
    C, lanes = e.parent_types, e.lanes
    for t in range(iterations):
        for n in range(blocks):
            images = min(lanes, e.images - (block + n) * lanes)
            for edge in range(e.start[c], e.start[c + 1]):
                at = (((4 * t + 2 + n) * e.degree) + edge - e.start[c]) * C * lanes
                for j in range(C):
                    for image in range(images):
                        db[_matrices(e, edge, b, part) + j] += pairs[at + j * lanes + image]


@inlined
def _pose_gradient(e, b, c, block, blocks, dV, place, du):  # type: ignore[no-untyped-def]
    """du [blocks, B, L, D, lanes] = sum_j W_ij dV_ij in one or two blocks."""
    C, D, E, rows = e.parent_types, e.depth, e.entries, e.degree * e.parent_types * e.lanes
    out, pose_step = _pose(e, b, c, block), _pose(e, 0, 0, 1)
    for n in range(blocks):
        for i in range(D * e.lanes):
            du[out + n * pose_step + i] = 0
    for edge in range(e.start[c], e.start[c + 1]):
        x, weight = place + (edge - e.start[c]) * C * E * e.lanes, _matrices(e, edge, b, 0) * D * E
        if blocks == 2:
            add_pose_gradient_2(du, out, dV, x, e.weight, weight, C, D, E, rows, pose_step)
        else:
            add_pose_gradient_1(du, out, dV, x, e.weight, weight, C, D, E, rows, pose_step)


@inlined
def _add_weight_gradient(e, b, c, block, blocks, dV, dW, part):  # type: ignore[no-untyped-def]
    """dW [image_parts, K, B, C, D, E] += sum over the images of some blocks of u_i dV_ij."""
    C, D, E, rows = e.parent_types, e.depth, e.entries, e.degree * e.parent_types * e.lanes
    u, pose_step = _pose(e, b, c, block), _pose(e, 0, 0, 1)
    for edge in range(e.start[c], e.start[c + 1]):
        x, weight = (edge - e.start[c]) * C * E * e.lanes, _matrices(e, edge, b, part) * D * E
        add_weight_gradient(dW, weight, e.poses, u, dV, x, blocks, C, D, E, rows, pose_step)


@kernel
def _squash_kernel(counter, tasks, e, chunks, first, parts, sums, q, out):  # type: ignore[no-untyped-def]
    """s = the sum of the parts, v = squash(s), q += v.

    parts [chunks, state], sums (s) and out (v) [N, P, C, E], q a state. A task owns a block of images.
    """
    E, lanes, parents, pose = e.given_entries, e.lanes, e.parents * e.parent_types, e.entries * e.lanes
    block = first_task(counter, tasks)
    while block < tasks:
        if first:
            q[block * parents * pose : (block + 1) * parents * pose] = 0
        for n in range(min(lanes, e.images - block * lanes)):
            for parent in range(parents):
                at, to = (block * parents + parent) * pose + n, ((block * lanes + n) * parents + parent) * E
                for i in range(E):
                    sums[to + i] = _sum_of_parts(parts, at + i * lanes, chunks, len(q))
                factor = squash_factor(square_of(sums, to, E))
                for i in range(E):
                    out[to + i] = factor * sums[to + i]
                    q[at + i * lanes] += out[to + i]
        block = next_task(counter, tasks)


@kernel
def _agreed_kernel(counter, tasks, e, iterations, sums, states):  # type: ignore[no-untyped-def]
    """q_t = v_1 + ... + v_(t-1): states [T, (q, g)] from sums [T, N, P, C, E]. A task owns a block."""
    E, lanes, parents, pose = e.given_entries, e.lanes, e.parents * e.parent_types, e.entries * e.lanes
    step = 2 * e.blocks * parents * pose
    block = first_task(counter, tasks)
    while block < tasks:
        for t in range(iterations):
            at = t * step + block * parents * pose
            states[at : at + parents * pose] = 0
        for n in range(min(lanes, e.images - block * lanes)):
            for parent in range(parents):
                for t in range(1, iterations):
                    at = t * step + (block * parents + parent) * pose + n
                    source = (((t - 1) * e.images + block * lanes + n) * parents + parent) * E
                    factor = squash_factor(square_of(sums, source, E))
                    for i in range(E):
                        states[at + i * lanes] = states[at - step + i * lanes] + factor * sums[source + i]
        block = next_task(counter, tasks)


@kernel
def _squash_gradient_kernel(counter, tasks, e, chunks, parts, sums, dv, g):  # type: ignore[no-untyped-def]
    """dv += the sum of the parts, g = squash'(s) dv.

    parts [chunks, state], sums (s) and dv [N, P, C, E], g a state. A task owns a block of images.
    """
    E, lanes, parents, pose = e.given_entries, e.lanes, e.parents * e.parent_types, e.entries * e.lanes
    block = first_task(counter, tasks)
    while block < tasks:
        g[block * parents * pose : (block + 1) * parents * pose] = 0
        for n in range(min(lanes, e.images - block * lanes)):
            for parent in range(parents):
                at, to = (block * parents + parent) * pose + n, ((block * lanes + n) * parents + parent) * E
                for i in range(E):
                    dv[to + i] += _sum_of_parts(parts, at + i * lanes, chunks, len(g))
                square = square_of(sums, to, E)
                factor, along = squash_factor(square), squash_slope(square) * product_of(sums, dv, to, E)
                for i in range(E):
                    g[at + i * lanes] = factor * dv[to + i] + along * sums[to + i]
        block = next_task(counter, tasks)


@inlined
def _sum_of_parts(parts, at, chunks, step):  # type: ignore[no-untyped-def]
    """The sum over the chunks of parts[chunk, at]; zero if there are no chunks."""
    total = parts.dtype.type(0)
    for chunk in range(chunks):
        total += parts[chunk * step + at]
    return total
