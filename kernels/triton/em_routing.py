"""The protocol of `tritoncaps.kernels.em_routing`, launched on the three views."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritoncaps.kernels.em_routing import Fit, History
from tritoncaps.kernels.triton import child_view, parents
from tritoncaps.kernels.triton.config import blocks
from tritoncaps.kernels.triton.launch import Edges, arithmetic, contiguous, launch, make_edges
from tritoncaps.kernels.triton.parent_view import parent_view_kernel
from tritoncaps.kernels.triton.parents import Gaussian, Moments, Slopes, Statistics
from tritoncaps.kernels.triton.splits import add_splits, merge_moments
from tritoncaps.kernels.triton.weight_view import weight_view_kernel
from tritoncaps.routing_map import Tables

ENTRIES = 16  # pose entries that one launch holds in registers
STATISTICS = (ENTRIES, ENTRIES, 1, 1)  # rows of mean, variance, logit, support
SLOPES = (1, ENTRIES, ENTRIES, ENTRIES, 1, 1)  # rows of A, B, C, shift, and what goes to beta_u and beta_a


def edges(poses: Tensor, activations: Tensor, weight: Tensor, tables: Tables, competition: str) -> Edges:
    """Pack the inputs of a call: poses [N, B, L, 16], activations [N, B, L], weight [K, B, C, 4, 4]."""
    return make_edges(
        tables,
        competition,
        arithmetic(poses, activations, weight),
        (poses.shape[0], *weight.shape[1:3]),
        poses.permute(0, 2, 3, 1).contiguous(),
        weight,
        None,
        activations.transpose(1, 2).contiguous(),
    )


def statistics_shape(images: int, parents: int, types: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Rows of mean, variance, logit and support."""
    return images, parents, sum(STATISTICS), types


def slopes_shape(images: int, parents: int, types: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Rows of A, B, C, shift, and of what each parent gives to the gradients of beta_u and beta_a."""
    return images, parents, sum(SLOPES), types


def m_step(edges: Edges, fit: Fit, before: Tensor | None, log_sum: Tensor | None, out: Tensor) -> None:
    """Statistics of the votes with weights r_ij = R_ij a_i; R is uniform if nothing came before."""
    if before is None:
        found = moments(edges, "uniform")
    else:
        found = moments(edges, "assignment", *parents.likelihood(_statistics(before)), log_sum)
    _write(out, parents.fit(found, fit))


def child_log_sum(edges: Edges, statistics: Tensor, out: Tensor) -> None:
    """out [N, G, B]: the logarithm of the E-step's denominator."""
    out.copy_(log_sum(edges, parents.likelihood(_statistics(statistics))))


def outputs(edges: Edges, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Poses [N, P, 16, C] and activations [N, P, C]."""
    mean, _, logit, _ = _statistics(statistics)
    return mean.contiguous(), parents.sigmoid(logit)


def output_slopes(edges: Edges, fit: Fit, history: History, grad_poses: Tensor, grad_activations: Tensor) -> None:
    """The slopes of the last M-step."""
    found, before = _statistics(history.statistics[-1]), _statistics(history.statistics[-2:][0])
    activation = parents.sigmoid(found.logit)
    grad_logit = grad_activations * activation * (1 - activation)
    grad_variance = torch.zeros_like(grad_poses)
    _write(history.slopes[-1], parents.fit_backward(grad_poses, grad_variance, grad_logit, found, before.mean, fit))


def child_assignment_gradient(edges: Edges, history: History, t: int) -> None:
    """da_i = sum_j R_ij G_ij over the parents that compete for i."""
    gaussian, (A, B, C, shift, _, _) = parents.likelihood(_statistics(history.statistics[t - 1])), _slopes(history, t)
    history.da[t - 1] = child_sum(
        edges,
        child_view.assignment_gradient_kernel,
        *(edges.poses, edges.weight, edges.activations, edges.tables.weight_of, edges.offset),
        *edges.groups,
        *contiguous(*gaussian, history.log_sums[t - 1], A, B, C, shift),
    )


def slopes_before(edges: Edges, fit: Fit, history: History, t: int) -> None:
    """The slopes of iteration t - 1, from the moments of iteration t's votes with weights dl_ij."""
    found, before = _statistics(history.statistics[t - 1]), _statistics(history.statistics[max(t - 2, 0)])
    (mean, precision, constant), (A, B, C, shift, _, _) = parents.likelihood(found), _slopes(history, t)
    given = (mean, precision, constant, history.log_sums[t - 1], A, B, C, shift, history.da[t - 1])
    gradients = parents.likelihood_backward(moments(edges, "gradient", *given, about_mean=False), found)
    _write(history.slopes[t - 1], parents.fit_backward(*gradients, found, before.mean, fit))


def child_and_weight_gradient(
    edges: Edges, history: History, since: int, needs_children: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dL/dM [N, B, L, 4, 4], dL/da [N, B, L] and dL/dW [K, B, C, 4, 4]; None where not needed."""
    iterations = len(history.statistics) - since
    packed = _stack(edges, history, since), iterations, iterations - 1
    grad_poses = grad_activations = grad_weight = None
    if needs_children:
        children = children_from_votes(edges, None, *packed)  # types are fastest
        grad_poses, grad_activations = (x.movedim(-1, 1) for x in children)
        grad_poses = grad_poses.unflatten(3, (4, 4))
    if needs_weight:
        grad_weight = weight_from_votes(edges, None, *packed)
    return grad_poses, grad_activations, grad_weight


def beta_gradients(edges: Edges, history: History, since: int) -> tuple[Tensor, Tensor]:
    """dL/dbeta_u and dL/dbeta_a, [C]."""
    slopes = history.slopes[since:]
    return slopes[..., -2, :].sum(dim=(0, 1, 2)), slopes[..., -1, :].sum(dim=(0, 1, 2))


def log_sum(edges: Edges, gaussian: Gaussian) -> Tensor:
    """[N, G, B]: log sum_j exp(l_ij)."""
    return child_sum(
        edges,
        child_view.log_sum_kernel,
        *(edges.poses, edges.weight, edges.votes, edges.activations, edges.tables.weight_of, edges.offset),
        *edges.groups,
        *contiguous(*gaussian),
        H=gaussian.mean.shape[2],
    )


def moments(
    edges: Edges,
    weights: str,
    mean: Tensor | None = None,
    precision: Tensor | None = None,
    constant: Tensor | None = None,
    log_sum: Tensor | None = None,
    A: Tensor | None = None,
    B: Tensor | None = None,
    C: Tensor | None = None,
    shift: Tensor | None = None,
    da: Tensor | None = None,
    stored: Tensor | None = None,
    i_h: int = 0,
    count: int = ENTRIES,
    about_mean: bool = True,
) -> Moments:
    """What the parent view sums, of `count` pose entries from i_h on."""
    sizes, tile, splits = edges.sizes, edges.config.parent, edges.config.parent_splits
    partial = edges.empty(splits, sizes["N"], sizes["P"], 2 * count + 1, sizes["C"])
    launch(
        parent_view_kernel,
        blocks(sizes["N"], tile.BN) * blocks(sizes["C"], tile.BC) * sizes["P"] * splits,
        tile,
        *(edges.poses, edges.weight, edges.votes, edges.activations),
        *(edges.tables.children, edges.tables.weight_of, edges.offset, edges.tables.parents_start),
        *contiguous(mean, precision, constant, log_sum, A, B, C, shift, da, stored),
        partial,
        **sizes,
        H=count if edges.votes is None else edges.votes.shape[4],
        i_h=i_h,
        steps=blocks(sizes["S"] * blocks(sizes["B"], tile.BB), splits),
        WEIGHTS=weights,
        LOCAL=edges.local,
        COUNT=count,
        ABOUT_MEAN=about_mean,
    )
    sums = merge_moments(partial) if about_mean else add_splits(partial)
    first, second, total = sums.split((count, count, 1), dim=2)
    if not about_mean:
        return Moments(total[:, :, 0], first, second, mean)
    centre = first if mean is None else mean + first
    return Moments(
        total[:, :, 0], torch.zeros((), dtype=first.dtype, device=first.device).expand_as(first), second, centre
    )


def child_sum(edges: Edges, kernel: object, *pointers: Tensor | None, **numbers: object) -> Tensor:
    """[N, G, B]: what a kernel of the child view sums in each group."""
    sizes, tile = edges.sizes, edges.config.child
    out = edges.empty(sizes["N"], sizes["G"], sizes["B"])
    programs = blocks(sizes["N"], tile.BN) * blocks(sizes["B"], tile.BB) * sizes["G"]
    launch(kernel, programs, tile, *pointers, out, **sizes, **numbers)
    return out


def children_from_votes(
    edges: Edges, grad_votes: Tensor | None, packed: Sequence[Tensor | None], T: int, n_soft: int
) -> tuple[Tensor, Tensor]:
    """dM [N, L, 16, B] and da [N, L, B] from stored dV, or from packed iterations."""
    sizes, tile = edges.sizes, edges.config.gradient
    N, L, B = sizes["N"], sizes["L"], sizes["B"]
    grad_poses, grad_activations = edges.empty(N, L, ENTRIES, B), edges.empty(N, L, B)
    launch(
        child_view.child_gradient_kernel,
        blocks(N, tile.BN) * blocks(B, tile.BB) * L,
        tile,
        *(edges.poses, edges.weight, edges.activations, grad_votes, edges.tables.weight_of, edges.offset),
        *(edges.tables.parents_start, edges.pairs.parent, edges.pairs.slot),
        *packed,
        *(grad_poses, grad_activations),
        **sizes,
        T=T,
        n_soft=n_soft,
        LOCAL=edges.local,
    )
    return grad_poses, grad_activations


def weight_from_votes(
    edges: Edges, grad_votes: Tensor | None, packed: Sequence[Tensor | None], T: int, n_soft: int
) -> Tensor:
    """dW [K, B, C, 4, 4] from stored dV, or from packed iterations."""
    assert edges.weight is not None
    sizes, tile = edges.sizes, edges.config.gradient
    K, B, _, C = edges.weight.shape
    pair_splits = edges.config.pair_splits
    image_splits = max(1, min(edges.config.image_splits, blocks(sizes["N"], tile.BN)))
    partial = edges.empty(pair_splits * image_splits, K, B, ENTRIES, C)
    launch(
        weight_view_kernel,
        blocks(B, tile.BB) * blocks(C, tile.BC) * K * len(partial),
        tile,
        *(edges.poses, edges.weight, edges.activations, grad_votes, edges.offset),
        *edges.pairs[2:],
        *packed,
        partial,
        **sizes,
        K=K,
        T=T,
        n_soft=n_soft,
        pair_splits=pair_splits,
        image_splits=image_splits,
        LOCAL=edges.local,
    )
    return add_splits(partial).transpose(2, 3).reshape(K, B, C, 4, 4)


def _statistics(rows: Tensor) -> Statistics:
    mean, variance, logit, support = rows.split(STATISTICS, dim=2)
    return Statistics(mean, variance, logit.squeeze(2), support.squeeze(2))


def _slopes(history: History, t: int) -> Slopes:
    A, B, C, shift, beta_u, beta_a = history.slopes[t].split(SLOPES, dim=2)
    return Slopes(A.squeeze(2), B, C, shift, beta_u.squeeze(2), beta_a.squeeze(2))


def _write(rows: Tensor, parts: Sequence[Tensor]) -> None:
    """Parts [N, P, H, C] and [N, P, C] as rows [N, P, sum of H, C]."""
    torch.cat([x if x.dim() == 4 else x[:, :, None] for x in parts], dim=2, out=rows)


def _stack(edges: Edges, history: History, since: int) -> tuple[Tensor, ...]:
    """[T, ...] of every array of the iterations, the last one first, in the order of the kernels' arguments."""
    rows = []
    for t in reversed(range(since, len(history.statistics))):
        found = _statistics(history.statistics[max(t - 1, 0)])
        gaussian = parents.likelihood(found) if t else parents.uniform(found)
        log_sum = history.log_sums[t - 1] if t else _uniform_log_sum(edges)
        da = history.da[t - 1] if t > since else torch.zeros_like(log_sum)
        A, B, C, shift, _, _ = _slopes(history, t)
        rows.append((*gaussian, log_sum, A, B, C, shift, da))
    return tuple(torch.stack(column).contiguous() for column in zip(*rows, strict=True))


def _uniform_log_sum(edges: Edges) -> Tensor:
    """[N, G, B]: log of the number of parents that compete for each child."""
    sizes = edges.sizes
    competitors = edges.groups.start.diff() * sizes["C"]
    return competitors.to(edges.dtype).log()[None, :, None].repeat(sizes["N"], 1, sizes["B"])
