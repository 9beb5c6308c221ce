"""The layout of the arrays that the kernels read, and the packing of the tensors of a call.

The lanes of a vector are parent types. The C parent types are `blocks` vectors of `lanes`. The last vector is padded
with types whose weights are zero, and for which exp of the log-likelihood is zero.

The numbers of a parent for one block are consecutive rows of `lanes`, so that a kernel can address all of them from one
pointer. `Statistic`, `Slope` and `Moment` list the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tritoncaps.kernels.common.cpu.arrays import array, contiguous, scratch_array
from tritoncaps.kernels.common.cpu.compiling import kernel
from tritoncaps.kernels.common.cpu.processor import VECTOR_BYTES
from tritoncaps.kernels.common.cpu.tasks import first_task, next_task
from tritoncaps.kernels.common.cpu.threads import Plan
from tritoncaps.kernels.common.cpu.workspace import scratch
from tritoncaps.kernels.common.numerics import least_support, wide_dtype
from tritoncaps.kernels.common.tables import Tables, offset_of
from tritoncaps.kernels.mixture.backend import VoteSource
from tritoncaps.kernels.mixture.iteration import Fit, History

WEIGHTS_TOGETHER = 1152 // VECTOR_BYTES  # weight blocks of child types routed together: these fit the L1 cache
EDGES_TOGETHER = 4096 // VECTOR_BYTES  # limit for the edges of a parent, for the same reason
TYPES_TOGETHER = 8  # limit for the child types
ALONE = 3072  # vectors of votes; for fewer, a second thread costs more than it gains
SMALL = 8192  # vectors of votes; for fewer, the plan of a call is kept
MOST_KEPT = 2  # iterations after the first whose weights of gradients are kept
WEIGHTS_BYTES = 16 << 20  # limit for the weights of gradients of an iteration


class Statistic:
    """Rows of a parent's component, l = constant - sum_h precision_h (V_h - mean_h)^2, and other results of an
    M-step."""

    MINUS_MEAN = 0
    PRECISION = 16  # half of the component's precision: 1 / (2 variance)
    VARIANCE = 16  # instead of the precision, if the rows hold moments
    CONSTANT = 32  # the component's log_weight: log a - 1/2 sum_h log(2 pi variance_h)
    LOGIT = 33
    SUPPORT = 34
    LOG_VARIANCE = 35  # sum_h log(variance_h)
    ROWS = 36


class Slope:
    """Rows of an iteration's slopes, G = offset + sum_h (linear_h + quadratic_h e_h) e_h with e = V - centre; and the
    gradients of the betas."""

    TWICE_LINEAR = 0  # twice, because the kernels sum (2 linear + 2 quadratic e) e
    TWICE_QUADRATIC = 16
    SHIFT = 32  # mean of the previous components - centre: e = d + shift
    MINUS_CENTRE = 48
    OFFSET = 64
    BETA_U = 65
    BETA_A = 66
    ROWS = 67


class Moment:
    """Rows of the moments of a parent: sums of w, w d, w d^2; or of the gradients of its logit, mean and variance."""

    TOTAL = 0
    FIRST = 1
    SECOND = 17
    ROWS = 33


class Coefficient:
    """Rows of the coefficients of the vote gradients of a parent: first `linear` and `2 quadratic` of each entry, for
    the first iteration that gradients reach."""

    OFFSET = 32
    LATER = 33  # start of the later iterations: for each of them, four rows for each entry
    ROWS_OF_LATER = 64


class Beta:
    """Rows of the parameters of a block of types."""

    U = 0
    A = 1
    EXISTS = 2  # 0 for padding types, else 1
    ROWS = 3


class Number:
    """The positions of the numbers of a `Fit` in an array."""

    INVERSE_TEMPERATURE = 0
    VARIANCE_FLOOR = 1
    MEAN_DATA = 2
    LEAST_SUPPORT = 3
    SCATTER_FLOOR = 4  # of support times variance
    COUNT = 5


class Edge:
    """The four numbers of an edge in `Edges.edges`, for the j-th of the child types that are routed together."""

    CHILD = 0  # j L + location
    WEIGHT = 1  # j K + weight block
    SLOT = 2
    GROUP = 3  # j G + group of competing parents
    NUMBERS = 4


class Edges(NamedTuple):
    """The inputs of a call: flat arrays and their sizes, in the form that Numba accepts."""

    poses: NDArray  # [N, B, L, 16]
    activations: NDArray  # [N, B, L]
    weight: NDArray  # [blocks, B, K, 16, lanes]: consecutive in the order of use, for the caches
    edges: NDArray  # int64 [E together, 4]: see `Edge`; in the order of parent locations, then of child types
    start: (
        NDArray  # int64 [P + 1]: parent location p has the edges start[p], ..., start[p + 1] - 1 from each child type
    )
    offset: NDArray  # [S, 4]
    share: NDArray  # [together, G]: R of the first iteration, one over the number of parents that compete in a group
    images: int
    children_count: int  # L
    parents_count: int  # P
    edges_count: int  # E
    degree: int  # largest number of edges of a parent location
    groups: int  # G: child locations; P S if the competition is local; L blocks if only positions compete
    width: int  # numbers of a group: 1; lanes if only positions compete
    together: int  # largest number of child types that are routed together
    child_types: int  # B
    parent_types: int  # C
    weights: int  # K
    blocks: int
    lanes: int


BETA_U, BETA_A, EXISTS, BETAS = Beta.U, Beta.A, Beta.EXISTS, Beta.ROWS  # for kernels


@dataclass
class Call:
    """A call of an operator: the inputs of its kernels, and the plan of the kernels, which run at the end."""

    edges: Edges
    dtype: torch.dtype
    plan: Plan
    betas: Any = None  # [blocks, Beta.ROWS, lanes]; computed at first use, as the next two fields
    waves: Any = None  # of images; see `parent_view`
    history: Any = None  # its tensors as arrays [T or T - 1, ...]
    weights: Any = ()  # arrays of iterations 1, ..., T - 1, if they are kept; see `weights_count`


def edges(poses: Tensor, activations: Tensor, weight: Tensor, tables: Tables, competition: str) -> Call:
    """Pack poses [N, B, L, 16], activations [N, B, L] and weight [K, B, C, 4, 4], with any strides."""
    rows = scratch("weight", weight_shape(weight, poses.dtype), poses.dtype)
    call = call_of(poses, activations, weight, rows, tables, competition)
    add_pack_weight(call, weight)
    return call


def call_of(poses: Tensor, activations: Tensor, weight: Tensor, rows: Tensor, tables: Tables, competition: str) -> Call:
    """A call whose weight is packed in ``rows``; or later, by `add_pack_weight`."""
    sizes = _sizes(tables, competition, poses.shape[1:3], weight.shape[:3], poses.dtype)
    edges = sizes._replace(
        poses=array(contiguous("poses", poses)),
        activations=array(contiguous("activations", activations)),
        weight=array(rows),
        images=poses.shape[0],
    )
    return Call(edges, poses.dtype, Plan(alone=_votes(sizes, edges.images) <= ALONE))


def add_pack_weight(call: Call, weight: Tensor) -> None:
    call.plan.add(_pack_weight_kernel, call.edges.weights * call.edges.child_types, call.edges, array(weight))


def weight_shape(weight: Tensor, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of `Edges.weight`."""
    K, B, C = weight.shape[:3]
    lanes, blocks = vectors(C, dtype)
    return blocks, B, K, 16, lanes


def is_small(tables: Tables, competition: str, poses: Tensor, weight: Tensor) -> bool:
    """True if a call has so few votes that its plan is kept."""
    sizes = _sizes(tables, competition, poses.shape[1:3], weight.shape[:3], wide_dtype(poses.dtype))
    return _votes(sizes, poses.shape[0]) <= SMALL


def _votes(edges: Edges, images: int) -> int:
    """The number of votes, in vectors."""
    return images * edges.child_types * edges.edges_count * edges.blocks


def vectors(parent_types: int, dtype: torch.dtype) -> tuple[int, int]:
    """Lanes of a vector, and the number of vectors that hold all parent types."""
    lanes = VECTOR_BYTES // dtype.itemsize
    return lanes, -(-parent_types // lanes)


def statistics_shape(images: int, parents: int, types: int, dtype: torch.dtype) -> tuple[int, ...]:
    lanes, blocks = vectors(types, dtype)
    return images, parents, blocks, Statistic.ROWS, lanes


def log_sums_shape(source: VoteSource) -> tuple[int, ...]:
    """Instead of log_sum, kernels keep two numbers: the greatest exponent m, and 1 / sum exp(l - m)."""
    return 2, *da_shape(source)


def da_shape(source: VoteSource) -> tuple[int, ...]:
    """[N, B, G], or [N, B, L, blocks, lanes] if only positions compete."""
    images, types, _ = source.activations.shape
    lanes, blocks = vectors(source.weight.shape[2], source.dtype)
    return images, types, source.groups, *([blocks, lanes] if source.competition == "positions" else [])


def slopes_shape(images: int, parents: int, types: int, dtype: torch.dtype) -> tuple[int, ...]:
    lanes, blocks = vectors(types, dtype)
    return images, parents, blocks, Slope.ROWS, lanes


def by_iteration(x: Tensor) -> NDArray:
    """A tensor [T, ...] as an array of T rows."""
    return array(x).reshape(len(x), x.numel() // max(1, len(x)))


def arrays(call: Call, history: History) -> History:
    """The tensors of a history as arrays with one row for each iteration."""
    if call.history is None:
        of_iterations: Any = map(by_iteration, history)
        call.history = History(*of_iterations)
    return call.history


def weights_count(
    images: int, child_types: int, parent_types: int, together: int, edges: int, dtype: torch.dtype
) -> int:
    """Numbers of r and dl of an iteration, [images, tiles, 2, blocks, edges, lanes], which the backward pass keeps. A
    tile is `together` child types. There are as many images as the limit allows; for the others, the backward pass
    computes r and dl twice."""
    lanes, blocks = vectors(parent_types, dtype)
    numbers = -(-child_types // together) * 2 * blocks * together * edges * lanes
    return numbers * min(images, WEIGHTS_BYTES // max(1, numbers * dtype.itemsize))


def keep_weights(call: Call, iterations: int) -> None:
    """Memory for the weights of gradients of the iterations after the first, if there are at most MOST_KEPT."""
    e = call.edges
    if iterations <= MOST_KEPT:
        count = weights_count(e.images, e.child_types, e.parent_types, e.together, e.edges_count, call.dtype)
        call.weights = [scratch_array(f"weights of gradients {t}", count, call.dtype) for t in range(iterations)]


def types_together(child_types: int, weights: int, slots: int) -> int:
    """The number of child types that are routed together."""
    most = min(TYPES_TOGETHER, child_types, WEIGHTS_TOGETHER // max(1, weights), EDGES_TOGETHER // max(1, slots))
    return max(1, most)


def betas(call: Call, fit: Fit) -> NDArray:
    """[blocks, Beta.ROWS, lanes], the same in all iterations."""
    if call.betas is None:
        e = call.edges
        call.betas = np.empty(e.blocks * Beta.ROWS * e.lanes, e.poses.dtype)
        call.plan.add(_pack_betas_kernel, e.blocks, e, call.betas, array(fit.beta_u), array(fit.beta_a))
    return call.betas


def numbers(call: Call, fit: Fit) -> NDArray:
    """See `Number`."""
    least = _least_support(call.dtype)
    return np.array([fit.inverse_temperature, fit.variance_floor, fit.mean_data, least, 0], call.edges.poses.dtype)


_least_support = cache(least_support)


@kernel
def _pack_weight_kernel(counter, tasks, e, weight):  # type: ignore[no-untyped-def]
    """e.weight [blocks, B, K, 16, lanes] from weight [K, B, C, 16]. A task owns a child type of a weight block."""
    B, C, lanes = e.child_types, e.parent_types, e.lanes
    task = first_task(counter, tasks)
    while task < tasks:
        k, b = task // B, task % B
        for block in range(e.blocks):
            out = ((block * B + b) * e.weights + k) * 16 * lanes
            types = min(lanes, C - block * lanes)
            for lane in range(lanes):
                source = (task * C + block * lanes + lane) * 16
                for h in range(16):
                    e.weight[out + h * lanes + lane] = weight[source + h] if lane < types else 0
        task = next_task(counter, tasks)


@kernel
def _pack_betas_kernel(counter, tasks, e, betas, beta_u, beta_a):  # type: ignore[no-untyped-def]
    """betas [blocks, Beta.ROWS, lanes] from beta_u and beta_a [C]. A task owns a block."""
    task = first_task(counter, tasks)
    while task < tasks:
        row = task * BETAS * e.lanes
        betas[row : row + BETAS * e.lanes] = 0
        for lane in range(min(e.lanes, e.parent_types - task * e.lanes)):
            betas[row + BETA_U * e.lanes + lane] = beta_u[task * e.lanes + lane]
            betas[row + BETA_A * e.lanes + lane] = beta_a[task * e.lanes + lane]
            betas[row + EXISTS * e.lanes + lane] = 1
        task = next_task(counter, tasks)


_maps: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _sizes(tables: Tables, competition: str, *sizes: Any) -> Edges:
    """The inputs of a call, without tensors and the number of images: computed once for each map and layer."""
    known, key = _maps.get(tables.children), (competition, *sizes)
    if known is None:
        known = _maps[tables.children] = {}
    if key not in known:
        known[key] = _new_sizes(tables, competition, *sizes)
    return known[key]


def _new_sizes(
    tables: Tables, competition: str, children: tuple[int, int], weight: tuple[int, int, int], dtype: torch.dtype
) -> Edges:
    child_types, locations = children
    weights, _, parent_types = weight
    parents, slots = tables.children.shape
    lanes, blocks = vectors(parent_types, dtype)
    together = types_together(child_types, weights, slots)
    nothing = array(torch.empty(0, dtype=dtype))
    return Edges(
        poses=nothing,
        activations=nothing,
        weight=nothing,
        **_made_of_map(tables, competition, weights, together, parent_types, dtype),
        images=0,
        children_count=locations,
        parents_count=parents,
        together=together,
        child_types=child_types,
        parent_types=parent_types,
        weights=weights,
        blocks=blocks,
        lanes=lanes,
        width=lanes if competition == "positions" else 1,
    )


def _made_of_map(
    tables: Tables, competition: str, weights: int, together: int, parent_types: int, dtype: torch.dtype
) -> dict[str, Any]:
    parents, slots = tables.children.shape
    locations = len(tables.parents_start) - 1
    groups = parents * slots if competition == "local" else locations
    children = tables.children.long()[:, None].expand(-1, together, -1)
    parent, j, slot = (children >= 0).nonzero(as_tuple=True)  # in the order of parents, then of types
    child = children[parent, j, slot]
    group = parent * slots + slot if competition == "local" else child
    competitors = group[j == 0].bincount(minlength=groups)
    if competition == "positions":
        blocks = vectors(parent_types, dtype)[1]
        groups, group, competitors = groups * blocks, group * blocks, competitors.repeat_interleave(blocks)
    else:
        competitors *= parent_types
    numbers = j * locations + child, j * weights + tables.weight_of.long()[slot], slot, j * groups + group
    degrees = (tables.children >= 0).sum(dim=1)
    return {
        "edges": array(torch.stack(numbers, dim=1)),
        "start": array(F.pad(degrees.cumsum(0), (1, 0))),
        "edges_count": int(degrees.sum()),
        "degree": int(degrees.max()) if parents else 0,
        "groups": groups,
        "offset": array(offset_of(tables, dtype)),
        "share": array(1 / competitors.clamp(min=1).to(dtype).repeat(together)),
    }
