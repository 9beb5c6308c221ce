"""Dynamic routing on the CPU. One sweep over the children makes each iteration, forward or backward:

    u_hat_ij = W_ij^T u_i                                    votes, recomputed, for a few images in a scratch array
    R_ij     = softmax over j of b_ij + u_hat_ij . q_j
    s_j      = sum_i R_ij u_hat_ij                           forward
    dl_ij    = R_ij (G_ij - sum_k R_ik G_ik)                 backward, with G_ij = u_hat_ij . g_j
    dq_j     = sum_i dl_ij u_hat_ij

A child knows all its parents, so the child view's softmax and the parent view's sum need the votes only once. A task
owns some children of some images and a part of the sum; the parts, whose number depends on neither batch nor threads,
are added up by the kernels that squash. The last sweep of the backward pass makes the gradients of poses, weight and
priors of all iterations at once.

Every pair of a child and a parent type has a matrix of its own, and it is the same for all images: a child passes over
all images while its matrices stay in the first-level cache, and each row of a matrix is loaded once for four images.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tritoncaps.kernels.cpu.compiling import kernel, part
from tritoncaps.kernels.cpu.layout import array
from tritoncaps.kernels.cpu.simd import VECTOR_BYTES, next_task
from tritoncaps.kernels.cpu.squash import product_of, square_of, squash_factor, squash_slope
from tritoncaps.kernels.cpu.threads import num_threads, run
from tritoncaps.kernels.cpu.vector_votes import (
    add_agreements_1,
    add_agreements_2,
    add_pose_gradient,
    add_vote_gradient_1,
    add_vote_gradient_2,
    add_weight_gradient_1x1,
    add_weight_gradient_4x1,
    add_weight_gradient_4x2,
    add_weighted_1,
    add_weighted_2,
    set_logits,
    set_weighted_1,
    set_weighted_2,
    softmax,
    softmax_gradient,
    votes_1x1,
    votes_4x1,
    votes_4x2,
)
from tritoncaps.kernels.cpu.workspace import scratch
from tritoncaps.kernels.dynamic_routing import Gradients, Options
from tritoncaps.routing_map import Tables

CHUNKS = 8  # parts of the children, at most, each with a sum of its own
CHUNK_NUMBERS = 2**15  # that all parts of an image's sum may have, beyond the least number of parts
FEWEST_CHUNKS = 4
TASKS = 16  # of a sweep for each thread, if there are as many images
PACKED = 32  # children of a task that packs poses
PARTS = 32  # of the last sweep, about: parts of the images times child types

# What the agreements of an iteration are: none yet, constants, or functions of the iterations before.
FIRST, CONSTANT, VARIABLE = 0, 1, 2


class VectorEdges(NamedTuple):
    """The inputs of a call: flat arrays and their sizes, in the form that Numba takes.

    A pose of E numbers is V vectors, and `lanes` images are a block. What belongs to parents is a *state*:
    [blocks, P, C, V, lanes of images, lanes of entries]. Images in it that do not exist hold anything.
    """

    poses: NDArray  # [B, L, N, D]
    weight: NDArray  # [K, B, C, D, V * lanes]
    priors: NDArray  # [K, B, C]
    rival: NDArray  # [1]: the logit of the parent that is none of the above, or the lowest number
    nothing: NDArray  # [1]: zero
    start: NDArray  # int32 [L + 1]: child location c has the edges start[c] to start[c + 1]
    parent_of: NDArray  # int32 [edges]: parent location
    weight_of: NDArray  # int32 [edges]: weight block
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
    vectors: int  # V
    lanes: int
    degree: int  # edges of the child location that has most


def forward(
    poses: Tensor, weight: Tensor, priors: Tensor | None, tables: Tables, options: Options
) -> tuple[Tensor, Tensor]:
    """poses [N, B, L, D], weight [K, B, C, D, E], priors [K, B, C] -> the sums s of every iteration [T, N, P, C, E] and
    the parents [N, P, C, E]."""
    e = _edges(poses, weight, priors, tables, options)
    shape = (e.images, e.parents, e.parent_types, e.entries)
    sums, out = poses.new_empty(options.iterations, *shape), poses.new_empty(shape)
    q = scratch("dynamic q", _state(e), poses.dtype)
    none = array(poses.new_empty(0))
    for t in range(options.iterations):
        parts = _sweep(e, array(q) if t else none, none, poses.dtype)
        run(_squash_kernel, e.images, e, len(parts), t == 0, array(parts), array(sums[t]), array(q), array(out))
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
    """From dL/dv [N, P, C, E] and the sums of the forward pass: the gradients of poses, weight and priors that `needs`
    asks for, as they were given."""
    e = _edges(poses, weight, priors, tables, options)
    iterations, dtype = options.iterations, poses.dtype
    q = scratch("dynamic qs", (iterations, *_state(e)), dtype)
    g = scratch("dynamic gs", (iterations, *_state(e)), dtype)
    dv = scratch("dynamic dv", grad.shape, dtype).copy_(grad)
    none = grad.new_empty(0)
    run(_agreed_kernel, e.images, e, iterations, array(sums), array(q))
    run(_squash_gradient_kernel, e.images, e, 0, array(none), array(sums[-1]), array(dv), array(g[-1]))
    if options.gradient == "last":
        kind = CONSTANT if iterations > 1 else FIRST
        return _last_sweep(e, q[-1:], g[-1:], [kind], needs, poses, weight)
    dv.zero_()  # what was given is the gradient of the last v; that of the others comes from agreements alone
    for t in reversed(range(1, iterations)):
        parts = _sweep(e, array(q[t]), array(g[t]), dtype)
        states = (array(x) for x in (parts, sums[t - 1], dv, g[t - 1]))
        run(_squash_gradient_kernel, e.images, e, len(parts), *states)
    kinds = [FIRST] + [VARIABLE] * (iterations - 1)
    return _last_sweep(e, q, g, kinds, needs, poses, weight)


def _edges(poses: Tensor, weight: Tensor, priors: Tensor | None, tables: Tables, options: Options) -> VectorEdges:
    images, child_types, children, depth = poses.shape
    weights, _, parent_types, _, entries = weight.shape
    parents, slots = tables.children.shape
    lanes = VECTOR_BYTES // poses.element_size()
    vectors = -(-entries // lanes)
    if entries % lanes:
        sizes = (*weight.shape[:-1], vectors * lanes)
        weight = scratch("dynamic weight", sizes, weight.dtype).copy_(F.pad(weight, (0, sizes[-1] - entries)))
    if priors is None:
        priors = scratch("dynamic priors", (weights, child_types, parent_types), poses.dtype).zero_()
    rival = 0.0 if options.none_of_the_above else torch.finfo(poses.dtype).min
    e = VectorEdges(
        poses=array(poses),
        weight=array(weight),
        priors=array(priors),
        rival=array(poses.new_tensor([rival])),
        nothing=array(poses.new_zeros(1)),
        start=array(tables.parents_start),
        parent_of=array(tables.parents_pair // slots),
        weight_of=array(tables.weight_of[tables.parents_pair % slots]),
        local=options.competition == "local",
        images=images,
        blocks=-(-images // lanes),
        child_types=child_types,
        children=children,
        depth=depth,
        parent_types=parent_types,
        entries=entries,
        parents=parents,
        weights=weights,
        vectors=vectors,
        lanes=lanes,
        degree=int(tables.parents_start.diff().max()),
    )
    return _with_packed_poses(e, poses.dtype)


def _with_packed_poses(e: VectorEdges, dtype: torch.dtype) -> VectorEdges:
    """[N, B, L, D] -> [B, L, N, D]: the poses of a child in all images are close together."""
    packed = scratch("dynamic poses", (e.child_types, e.children, e.images, e.depth), dtype)
    run(_pack_kernel, -(-e.child_types * e.children // PACKED), e, array(packed))
    return e._replace(poses=array(packed))


def _state(e: VectorEdges) -> tuple[int, ...]:
    return e.blocks, e.parents, e.parent_types, e.vectors, e.lanes, e.lanes


def _sweep(e: VectorEdges, q: Any, g: Any, dtype: torch.dtype) -> Tensor:
    """States whose sum is s (or, with g, dq), one for each chunk of the children."""
    children, numbers = e.child_types * e.children, math.prod(_state(e)[1:5])
    chunks = min(CHUNKS, max(FEWEST_CHUNKS, CHUNK_NUMBERS // numbers), -(-children // 8))
    image_parts = min(e.blocks, -(-TASKS * num_threads() // chunks))
    parts = scratch("dynamic sums", (chunks, *_state(e)), dtype)
    run(_sweep_kernel, chunks * image_parts, e, chunks, image_parts, array(parts), q, g)
    return parts


def _last_sweep(
    e: VectorEdges,
    q: Tensor,
    g: Tensor,
    kinds: list[int],
    needs: tuple[bool, bool, bool],
    poses: Tensor,
    weight: Tensor,
) -> Gradients:
    needs_poses, needs_weight, needs_priors = needs
    # decides the order of the sum over images, so it must not depend on threads
    image_parts = min(e.blocks, -(-PARTS // e.child_types))
    padded = e.entries % e.lanes != 0
    sizes = (e.weights, e.child_types, e.parent_types, e.depth, e.vectors * e.lanes)
    owned = image_parts == 1 and not padded
    none = poses.new_empty(0)
    grad_poses = torch.empty_like(poses) if needs_poses else none
    grad_weight = torch.empty_like(weight) if needs_weight else none
    parts = grad_weight if owned or not needs_weight else scratch("dynamic dW", (image_parts, *sizes), poses.dtype)
    grad_priors = poses.new_empty(image_parts, *sizes[:3]) if needs_priors else none
    run(
        _gradient_kernel,
        image_parts * e.child_types,
        e,
        image_parts,
        np.array(kinds),
        array(q),
        array(g),
        array(grad_poses),
        array(parts),
        array(grad_priors),
        needs_poses,
        needs_weight,
        needs_priors,
    )
    if e.images == 0:
        grad_weight.zero_()
        grad_priors = grad_priors.new_zeros(1, *sizes[:3])
    elif needs_weight and not owned:
        grad_weight.copy_(parts.sum(dim=0)[..., : e.entries])
    return Gradients(
        grad_poses if needs_poses else None,
        grad_weight if needs_weight else None,
        grad_priors.sum(dim=0) if needs_priors else None,
    )


@kernel
def _pack_kernel(counter, tasks, e, packed):  # type: ignore[no-untyped-def]
    """packed [B, L, N, D] from poses [N, B, L, D]; a task owns some children."""
    children, D = e.child_types * e.children, e.depth
    task = next_task(counter)
    while task < tasks:
        for n in range(e.images):
            for child in range(task * PACKED, min((task + 1) * PACKED, children)):
                for d in range(D):
                    packed[(child * e.images + n) * D + d] = e.poses[(n * children + child) * D + d]
        task = next_task(counter)


@kernel
def _sweep_kernel(counter, tasks, e, chunks, image_parts, sums, q, g):  # type: ignore[no-untyped-def]
    """sums [chunks, state] from states q and g: s, or dq if there is a g. Without q, b = priors.

    A task owns a chunk of the children and a part of the images.
    """
    lanes, pose = e.lanes, e.vectors * e.lanes
    votes = np.zeros(e.degree * e.parent_types * pose * lanes, e.poses.dtype)
    pairs = e.degree * e.parent_types * lanes
    logits = np.empty(pairs, e.poses.dtype)
    R = np.empty(pairs, e.poses.dtype)
    dl = np.empty(pairs, e.poses.dtype)
    children = e.child_types * e.children
    state = e.parents * e.parent_types * pose * lanes  # of a block
    task = next_task(counter)
    while task < tasks:
        chunk, part = task // image_parts, task % image_parts
        first_block, last_block = e.blocks * part // image_parts, e.blocks * (part + 1) // image_parts
        base = chunk * e.blocks * state
        sums[base + first_block * state : base + last_block * state] = 0
        for child in range(children * chunk // chunks, children * (chunk + 1) // chunks):
            b, c = child // e.children, child % e.children
            if len(q) == 0:
                _first_assignments(e, b, c, logits, R, 0)
            for block in range(first_block, last_block):
                _votes(e, b, c, block, votes)
                if len(q) > 0:
                    _assignments(e, b, c, block, votes, q, 0, logits, R, 0)
                if len(g) > 0:
                    _slopes(e, c, block, votes, g, 0, logits, R, 0, dl, 0)
                    _add_to_parents(e, c, block, votes, dl, 0, sums, base)
                else:
                    _add_to_parents(e, c, block, votes, R, 0, sums, base)
        task = next_task(counter)


@kernel
def _gradient_kernel(  # type: ignore[no-untyped-def]
    counter, tasks, e, image_parts, kinds, q, g, du, dW, db, needs_poses, needs_weight, needs_priors
):
    """du [N, B, L, D], dW [image_parts, K, B, C, D, V, lanes], db [image_parts, K, B, C] from q and g [T, state].

    A task owns a child type and a part of the images.
    """
    lanes, pose, B = e.lanes, e.vectors * e.lanes, e.child_types
    T = len(kinds)
    columns = e.degree * e.parent_types * pose
    votes = np.zeros(lanes * columns, e.poses.dtype)
    dV = np.zeros(lanes * columns, e.poses.dtype)
    pairs = e.degree * e.parent_types * lanes
    logits = np.empty(pairs, e.poses.dtype)
    R = np.empty(T * pairs, e.poses.dtype)
    dl = np.empty(T * pairs, e.poses.dtype)
    row = -(-e.depth // lanes) * lanes
    transposed = np.zeros(e.weights * e.parent_types * pose * row, e.poses.dtype)
    grad = np.empty(lanes * row, e.poses.dtype)
    state = e.blocks * e.parents * e.parent_types * pose * lanes
    matrix = e.depth * pose
    task = next_task(counter)
    while task < tasks:
        b, part = task // image_parts, task % image_parts
        if needs_poses:
            _transpose(e, b, transposed)
        for k in range(part * e.weights, (part + 1) * e.weights):
            of_type = (k * B + b) * e.parent_types
            if needs_weight:
                dW[of_type * matrix : (of_type + e.parent_types) * matrix] = 0
            if needs_priors:
                db[of_type : of_type + e.parent_types] = 0
        for c in range(e.children):
            if kinds[0] == FIRST:
                _first_assignments(e, b, c, logits, R, 0)
            for block in range(e.blocks * part // image_parts, e.blocks * (part + 1) // image_parts):
                _votes(e, b, c, block, votes)
                for t in range(T):
                    if kinds[t] != FIRST:
                        _assignments(e, b, c, block, votes, q, t * state, logits, R, t * pairs)
                    if kinds[t] == VARIABLE or needs_priors:
                        _slopes(e, c, block, votes, g, t * state, logits, R, t * pairs, dl, t * pairs)
                    if needs_priors:
                        _add_priors_gradient(e, b, c, block, dl, t * pairs, db, part)
                    _add_vote_gradient(e, c, block, t, dV, q, g, t * state, R, dl, t * pairs)
                if needs_poses:
                    _pose_gradient(e, b, c, block, dV, transposed, grad, du)
                if needs_weight:
                    _add_weight_gradient(e, b, c, block, dV, dW, part)
        task = next_task(counter)


@part
def _votes(e, b, c, block, votes):  # type: ignore[no-untyped-def]
    """votes: tiles [edges, C] of a child in a block; rows of images that do not exist stay as they are."""
    C, V, D, lanes, pose = e.parent_types, e.vectors, e.depth, e.lanes, e.vectors * e.lanes
    tile, square, matrix = pose * lanes, lanes * lanes, D * pose
    count = min(lanes, e.images - block * lanes)
    child = ((b * e.children + c) * e.images + block * lanes) * D
    for edge in range(e.start[c], e.start[c + 1]):
        out = (edge - e.start[c]) * C * tile
        weight = (e.weight_of[edge] * e.child_types + b) * C * matrix
        for n in range(0, count - 3, 4):
            u = child + n * D
            for v in range(0, V - 1, 2):
                at = out + v * square + n * lanes
                votes_4x2(votes, at, e.poses, u, e.weight, weight + v * lanes, C, D, pose, tile, square, matrix, lanes)
            if V % 2 == 1:
                at, w = out + (V - 1) * square + n * lanes, weight + pose - lanes
                # two types at a time, for as many sums in registers
                votes_4x2(votes, at, e.poses, u, e.weight, w, C // 2, D, pose, 2 * tile, tile, 2 * matrix, matrix)
                if C % 2 == 1:
                    at, w = at + (C - 1) * tile, w + (C - 1) * matrix
                    votes_4x1(votes, at, e.poses, u, e.weight, w, 1, D, pose, 0, 0, 0, 0)
        for n in range(count - count % 4, count):
            for v in range(V):
                at, w = out + v * square + n * lanes, weight + v * lanes
                votes_1x1(votes, at, e.poses, child + n * D, e.weight, w, C, D, pose, tile, 0, matrix, 0)


@part
def _first_assignments(e, b, c, logits, R, at):  # type: ignore[no-untyped-def]
    """R [edges, C, lanes] from the priors, the same in all images."""
    C, lanes = e.parent_types, e.lanes
    for edge in range(e.start[c], e.start[c + 1]):
        prior = (e.weight_of[edge] * e.child_types + b) * C
        set_logits(logits, (edge - e.start[c]) * C * lanes, e.priors, prior, C, 1)
    _softmaxes(e, c, logits, R, at)


@part
def _assignments(e, b, c, block, votes, q, q_at, logits, R, at):  # type: ignore[no-untyped-def]
    """R [edges, C, lanes] from the agreement of votes and q."""
    C, lanes = e.parent_types, e.lanes
    for edge in range(e.start[c], e.start[c + 1]):
        prior = (e.weight_of[edge] * e.child_types + b) * C
        set_logits(logits, (edge - e.start[c]) * C * lanes, e.priors, prior, C, 1)
        _add_agreements(e, c, edge, block, votes, q, q_at, logits)
    _softmaxes(e, c, logits, R, at)


@part
def _add_agreements(e, c, edge, block, votes, parents, at, out):  # type: ignore[no-untyped-def]
    """out [edges, C, lanes] += votes . parents for one edge."""
    C, V, lanes, square = e.parent_types, e.vectors, e.lanes, e.lanes * e.lanes
    index, tile = edge - e.start[c], V * square
    to, vote = index * C * lanes, index * C * tile
    parent = at + (block * e.parents + e.parent_of[edge]) * C * tile
    for v in range(0, (V - 1) * square, 2 * square):
        add_agreements_2(out, to, votes, vote + v, parents, parent + v, C, tile)
    if V % 2 == 1:
        add_agreements_1(out, to, votes, vote + tile - square, parents, parent + tile - square, C, tile)


@part
def _softmaxes(e, c, logits, R, at):  # type: ignore[no-untyped-def]
    """Over all parents of the child, or over the types of each parent location."""
    edges = e.start[c + 1] - e.start[c]
    groups = edges if e.local else min(edges, 1)
    count = e.parent_types if e.local else edges * e.parent_types
    for o in range(0, groups * count * e.lanes, max(1, count * e.lanes)):
        softmax(R, at + o, logits, o, e.rival, 0, count)


@part
def _slopes(e, c, block, votes, g, g_at, G, R, R_at, dl, at):  # type: ignore[no-untyped-def]
    """dl [edges, C, lanes] from R and the slopes G = u_hat . g of the loss in R."""
    C, lanes = e.parent_types, e.lanes
    edges = e.start[c + 1] - e.start[c]
    set_logits(G, 0, e.nothing, 0, edges * C, 0)
    for edge in range(e.start[c], e.start[c + 1]):
        _add_agreements(e, c, edge, block, votes, g, g_at, G)
    groups = edges if e.local else min(edges, 1)
    count = C if e.local else edges * C
    for o in range(0, groups * count * lanes, max(1, count * lanes)):
        softmax_gradient(dl, at + o, R, R_at + o, G, o, count)


@part
def _add_to_parents(e, c, block, votes, R, at, sums, base):  # type: ignore[no-untyped-def]
    """The state sums[base :] += R votes."""
    C, V, lanes, square = e.parent_types, e.vectors, e.lanes, e.lanes * e.lanes
    tile = V * square
    for edge in range(e.start[c], e.start[c + 1]):
        vote, weight = (edge - e.start[c]) * C * tile, at + (edge - e.start[c]) * C * lanes
        parent = base + (block * e.parents + e.parent_of[edge]) * C * tile
        for v in range(0, (V - 1) * square, 2 * square):
            add_weighted_2(sums, parent + v, votes, vote + v, R, weight, C, tile)
        if V % 2 == 1:
            add_weighted_1(sums, parent + tile - square, votes, vote + tile - square, R, weight, C, tile)


@part
def _add_vote_gradient(e, c, block, t, dV, q, g, state_at, R, dl, at):  # type: ignore[no-untyped-def]
    """dV, tiles [edges, C], = R g at first, then += R g + dl q."""
    C, V, lanes, square = e.parent_types, e.vectors, e.lanes, e.lanes * e.lanes
    tile = V * square
    for edge in range(e.start[c], e.start[c + 1]):
        to, r = (edge - e.start[c]) * C * tile, at + (edge - e.start[c]) * C * lanes
        parent = state_at + (block * e.parents + e.parent_of[edge]) * C * tile
        for v in range(0, (V - 1) * square, 2 * square):
            if t == 0:
                set_weighted_2(dV, to + v, g, parent + v, R, r, C, tile)
            else:
                add_vote_gradient_2(dV, to + v, g, parent + v, R, r, q, parent + v, dl, r, C, tile)
        if V % 2 == 1:
            to, parent = to + tile - square, parent + tile - square
            if t == 0:
                set_weighted_1(dV, to, g, parent, R, r, C, tile)
            else:
                add_vote_gradient_1(dV, to, g, parent, R, r, q, parent, dl, r, C, tile)


@part
def _add_priors_gradient(e, b, c, block, dl, at, db, part):  # type: ignore[no-untyped-def]
    """db [image_parts, K, B, C] += sum over images of dl."""
    C, lanes = e.parent_types, e.lanes
    for edge in range(e.start[c], e.start[c + 1]):
        out = ((part * e.weights + e.weight_of[edge]) * e.child_types + b) * C
        for j in range(C):
            for n in range(min(lanes, e.images - block * lanes)):
                db[out + j] += dl[at + ((edge - e.start[c]) * C + j) * lanes + n]


@part
def _transpose(e, b, transposed):  # type: ignore[no-untyped-def]
    """transposed [K, C, V * lanes, row]: the matrices of a child type, with rows of whole vectors."""
    C, D, pose = e.parent_types, e.depth, e.vectors * e.lanes
    row = -(-D // e.lanes) * e.lanes
    for k in range(e.weights):
        for j in range(C):
            matrix = ((k * e.child_types + b) * C + j) * D * pose
            for d in range(D):
                for i in range(pose):
                    transposed[((k * C + j) * pose + i) * row + d] = e.weight[matrix + d * pose + i]


@part
def _pose_gradient(e, b, c, block, dV, transposed, grad, du):  # type: ignore[no-untyped-def]
    """du [N, B, L, D] = sum_j dV_ij W_ij^T, summed in grad [lanes of images, row]."""
    C, V, D, lanes = e.parent_types, e.vectors, e.depth, e.lanes
    row = len(grad) // lanes
    for i in range(len(grad)):
        grad[i] = 0
    for edge in range(e.start[c], e.start[c + 1]):
        vote = (edge - e.start[c]) * C * V * lanes * lanes
        weight = e.weight_of[edge] * C * V * lanes * row
        for d in range(0, row, lanes):
            add_pose_gradient(grad, d, dV, vote, transposed, weight + d, C * V, row)
    for n in range(min(lanes, e.images - block * lanes)):
        out = (((block * lanes + n) * e.child_types + b) * e.children + c) * D
        for d in range(D):
            du[out + d] = grad[n * row + d]


@part
def _add_weight_gradient(e, b, c, block, dV, dW, part):  # type: ignore[no-untyped-def]
    """dW [image_parts, K, B, C, D, V, lanes] += sum over images of u_i dV_ij."""
    C, V, D, lanes, pose = e.parent_types, e.vectors, e.depth, e.lanes, e.vectors * e.lanes
    tile, square, matrix = pose * lanes, lanes * lanes, D * pose
    count = min(lanes, e.images - block * lanes)
    child = ((b * e.children + c) * e.images + block * lanes) * D
    for edge in range(e.start[c], e.start[c + 1]):
        vote = (edge - e.start[c]) * C * tile
        weight = ((part * e.weights + e.weight_of[edge]) * e.child_types + b) * C * matrix
        for d in range(0, D - 3, 4):
            out, u = weight + d * pose, child + d
            for v in range(0, V - 1, 2):
                add_weight_gradient_4x2(
                    dW, out + v * lanes, e.poses, u, dV, vote + v * square,
                    C, count, D, pose, tile, square, matrix, lanes,
                )  # fmt: skip
            if V % 2 == 1:
                at, x = out + pose - lanes, vote + (V - 1) * square
                add_weight_gradient_4x2(
                    dW, at, e.poses, u, dV, x, C // 2, count, D, pose, 2 * tile, tile, 2 * matrix, matrix
                )
                if C % 2 == 1:
                    at, x = at + (C - 1) * matrix, x + (C - 1) * tile
                    add_weight_gradient_4x1(dW, at, e.poses, u, dV, x, 1, count, D, pose, 0, 0, 0, 0)
        for d in range(D - D % 4, D):
            for v in range(V):
                at, x = weight + d * pose + v * lanes, vote + v * square
                add_weight_gradient_1x1(dW, at, e.poses, child + d, dV, x, C, count, D, pose, tile, 0, matrix, 0)


@kernel
def _squash_kernel(counter, tasks, e, chunks, first, parts, sums, q, out):  # type: ignore[no-untyped-def]
    """s = the sum of the parts, v = squash(s), q += v: parts [chunks, state], sums and out [N, P, C, E], q a state.

    A task is an image.
    """
    E, lanes = e.entries, e.lanes
    chunk_step = e.blocks * e.parents * e.parent_types * e.vectors * lanes * lanes
    n = next_task(counter)
    while n < tasks:
        for parent in range(e.parents * e.parent_types):
            at = (n * e.parents * e.parent_types + parent) * E
            _add_parts(e, n, parent, parts, chunks, chunk_step, sums, at, False)
            factor = squash_factor(square_of(sums, at, E))
            for v in range(e.vectors):
                row = _row(e, n, parent, v)
                for i in range(lanes):
                    entry = v * lanes + i
                    if entry < E:
                        x = factor * sums[at + entry]
                        out[at + entry] = x
                        q[row + i] = x if first else q[row + i] + x
                    else:
                        q[row + i] = 0
        n = next_task(counter)


@kernel
def _agreed_kernel(counter, tasks, e, iterations, sums, q):  # type: ignore[no-untyped-def]
    """q_t = v_1 + ... + v_(t-1): q [T, state] from sums [T, N, P, C, E]. A task is an image."""
    E, lanes = e.entries, e.lanes
    parents = e.parents * e.parent_types
    step = e.blocks * parents * e.vectors * lanes * lanes
    n = next_task(counter)
    while n < tasks:
        for parent in range(parents):
            for v in range(e.vectors):
                row = _row(e, n, parent, v)
                for i in range(lanes):
                    q[row + i] = 0
            for t in range(1, iterations):
                at = (((t - 1) * e.images + n) * parents + parent) * E
                factor = squash_factor(square_of(sums, at, E))
                for v in range(e.vectors):
                    row = t * step + _row(e, n, parent, v)
                    for i in range(lanes):
                        entry = v * lanes + i
                        q[row + i] = q[row - step + i] + factor * sums[at + entry] if entry < E else 0
        n = next_task(counter)


@kernel
def _squash_gradient_kernel(counter, tasks, e, chunks, parts, sums, dv, g):  # type: ignore[no-untyped-def]
    """g = squash'(s) dv, with dv += the sum of the parts: parts [chunks, state], sums and dv [N, P, C, E], g a state.

    A task is an image.
    """
    E, lanes = e.entries, e.lanes
    chunk_step = e.blocks * e.parents * e.parent_types * e.vectors * lanes * lanes
    n = next_task(counter)
    while n < tasks:
        for parent in range(e.parents * e.parent_types):
            at = (n * e.parents * e.parent_types + parent) * E
            if chunks > 0:
                _add_parts(e, n, parent, parts, chunks, chunk_step, dv, at, True)
            square = square_of(sums, at, E)
            factor, along = squash_factor(square), squash_slope(square) * product_of(sums, dv, at, E)
            for v in range(e.vectors):
                row = _row(e, n, parent, v)
                for i in range(lanes):
                    entry = at + v * lanes + i
                    g[row + i] = factor * dv[entry] + along * sums[entry] if entry < at + E else 0
        n = next_task(counter)


@part
def _row(e, n, parent, v):  # type: ignore[no-untyped-def]
    """Where a vector of a parent's pose in image n begins in a state."""
    block, image = n // e.lanes, n % e.lanes
    return (((block * e.parents * e.parent_types + parent) * e.vectors + v) * e.lanes + image) * e.lanes


@part
def _add_parts(e, n, parent, parts, chunks, chunk_step, out, at, more):  # type: ignore[no-untyped-def]
    """out[at : at + E] = (out if more) + the sum of the parts of a parent in image n."""
    for v in range(e.vectors):
        row, to = _row(e, n, parent, v), at + v * e.lanes
        count = min(e.lanes, e.entries - v * e.lanes)
        for i in range(count):
            out[to + i] = out[to + i] + parts[row + i] if more else parts[row + i]
        for chunk in range(1, chunks):
            for i in range(count):
                out[to + i] += parts[chunk * chunk_step + row + i]
