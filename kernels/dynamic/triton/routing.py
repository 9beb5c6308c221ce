"""Dynamic routing in Triton: `forward` and `backward` of `kernels.dynamic.options`, which launch the three views."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncaps.kernels.common.tables import Orders, Tables
from tritoncaps.kernels.common.triton.launching import OPTIONS, blocks
from tritoncaps.kernels.common.triton.pairs import Groups, groups_of, pairs_of
from tritoncaps.kernels.dynamic.options import Gradients, Options
from tritoncaps.kernels.dynamic.triton import config, views
from tritoncaps.kernels.dynamic.triton.squash import launch_squash, launch_squash_gradient


class VectorEdges(NamedTuple):
    """The inputs of a call."""

    poses: Tensor  # [N, B, L, D]
    weight: Tensor  # [K, B, C, D, E]
    priors: Tensor | None  # [K, B, C]
    tables: Tables
    pairs: Orders
    groups: Groups
    options: Options
    config: config.Config
    sizes: dict[str, int]  # N, L, P, S, G, K, B, C, D and E

    def empty(self, *sizes: str | int) -> Tensor:
        """A new tensor; a size is a number or a key of `sizes`."""
        return self.poses.new_empty([self.sizes[x] if isinstance(x, str) else x for x in sizes])


def forward(
    poses: Tensor, weight: Tensor, priors: Tensor | None, tables: Tables, options: Options
) -> tuple[Tensor, Tensor]:
    """The sums s of every iteration [T, N, P, C, E] and the parents [N, P, C, E]."""
    e = _edges(poses, weight, priors, tables, options)
    sums, out = e.empty(options.iterations, *PARENTS), e.empty(*PARENTS)
    q, log_sum = None, _first_log_sum(e)
    for s in sums[:-1]:
        parts, agreed = _parent_view(e, q, None, log_sum, None), e.empty(*PARENTS)
        launch_squash(parts, before=q, sums=s, agreed=agreed)
        q, log_sum = agreed, e.empty(*GROUPS)
        _child_view(e, q, None, log_sum, None)
    launch_squash(_parent_view(e, q, None, log_sum, None), sums=sums[-1], out=out)
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
    """The gradients that `needs` selects, from dL/dv [N, P, C, E] and the sums of the forward pass."""
    e = _edges(poses, weight, priors, tables, options)
    T, last = options.iterations, options.iterations - 1
    q, g = e.empty(T, *PARENTS), e.empty(T, *PARENTS)
    q[0].zero_()
    for t in range(1, T):
        launch_squash(sums[t - 1 : t], before=q[t - 1], agreed=q[t])
    log_sum, mean = e.empty(T, *GROUPS), e.empty(T, *GROUPS)
    launch_squash_gradient(sums[last], grad, None, None, g[last])
    first = last if options.gradient == "last" else 0
    dv = None
    for t in range(last, first, -1):
        _child_view(e, q[t], g[t], log_sum[t], mean[t])
        parts = _parent_view(e, q[t], g[t], log_sum[t], mean[t])
        total = e.empty(*PARENTS)
        launch_squash_gradient(sums[t - 1], dv, parts, total, g[t - 1])
        dv = total
    if first == 0 and not needs[2]:  # q is zero, so only the gradient of the priors needs the means
        log_sum[0].copy_(_first_log_sum(e).expand_as(log_sum[0]))
        mean[0].zero_()
    else:
        _child_view(e, q[first], g[first], log_sum[first], mean[first])
    return _gradients(e, q[first:], g[first:], log_sum[first:], mean[first:], needs)


PARENTS = ("N", "P", "C", "E")
GROUPS = ("N", "G", "B")


def _edges(poses: Tensor, weight: Tensor, priors: Tensor | None, tables: Tables, options: Options) -> VectorEdges:
    N, B, L, D = poses.shape
    K, _, C, _, E = weight.shape
    P, S = tables.children.shape
    pairs, groups = pairs_of(tables), groups_of(tables, options.competition)
    sizes = {"N": N, "L": L, "P": P, "S": S, "G": len(groups.child), "K": K, "B": B, "C": C, "D": D, "E": E}
    chosen = config.choose(P, S, B, C, D, E, K, len(pairs.slot), poses.dtype == torch.float64)
    return VectorEdges(poses, weight, priors, tables, pairs, groups, options, chosen, sizes)


def _first_log_sum(e: VectorEdges) -> Tensor:
    """[1, G, B]: the log_sum of the priors, the same for all images."""
    log_sum = e.empty(1, "G", "B")
    _child_view(e, None, None, log_sum, None)
    return log_sum


def _parent_view(e: VectorEdges, q: Tensor | None, g: Tensor | None, log_sum: Tensor, mean: Tensor | None) -> Tensor:
    """[splits, N, P, C, E]: partial sums of s, or with g, of dq."""
    splits, tile, sizes = e.config.parent_splits, e.config.tile, e.sizes
    out = e.empty(splits, *PARENTS)
    _launch(
        views.dynamic_parent_view_kernel,
        blocks(sizes["N"], tile.BN) * blocks(sizes["C"], tile.BC) * sizes["P"] * splits,
        e,
        tile,
        p_children=e.tables.children,
        p_weight_of=e.tables.weight_of,
        p_q=q,
        p_g=g,
        p_log_sum=log_sum,
        p_mean=mean,
        p_out=out,
        steps=blocks(sizes["S"] * sizes["B"], splits),
        LOCAL=e.options.competition == "local",
    )
    return out


def _child_view(e: VectorEdges, q: Tensor | None, g: Tensor | None, log_sum: Tensor, mean: Tensor | None) -> None:
    """Compute log_sum and, with g, mean."""
    tile, images = e.config.tile, len(log_sum)
    _launch(
        views.dynamic_child_view_kernel,
        blocks(images, tile.BN) * e.sizes["B"] * e.sizes["G"],
        e,
        tile,
        p_weight_of=e.tables.weight_of,
        p_group_child=e.groups.child,
        p_group_start=e.groups.start,
        p_pair_parent=e.groups.parent,
        p_pair_slot=e.groups.slot,
        p_q=q,
        p_g=g,
        p_log_sum=log_sum,
        p_mean=mean,
        N=images,
        RIVAL=e.options.none_of_the_above,
    )


def _gradients(
    e: VectorEdges, q: Tensor, g: Tensor, log_sum: Tensor, mean: Tensor, needs: tuple[bool, bool, bool]
) -> Gradients:
    """The last sweeps: gradients for all iterations at once."""
    needs_poses, needs_weight, needs_priors = needs
    sizes, tile, weight_tile = e.sizes, e.config.tile, e.config.weight_tile
    common = {
        **{"p_q": q, "p_g": g, "p_log_sum": log_sum, "p_mean": mean, "T": len(q)},
        **{"LOCAL": e.options.competition == "local", "VARIABLE": e.options.gradient == "all"},
    }
    grad_poses = e.empty("N", "B", "L", "D") if needs_poses else None
    if needs_poses:
        _launch(
            views.dynamic_child_gradient_kernel,
            blocks(sizes["D"], config.NUMBERS) * blocks(sizes["N"], tile.BN) * sizes["B"] * sizes["L"],
            e,
            tile,
            p_weight_of=e.tables.weight_of,
            p_parents_start=e.tables.parents_start,
            p_pair_parent=e.pairs.parent,
            p_pair_slot=e.pairs.slot,
            p_out=grad_poses,
            BD=config.NUMBERS,
            **common,
        )
    pair_splits, image_splits = e.config.pair_splits, e.config.weight_image_splits(sizes["N"])
    splits = pair_splits * image_splits
    grad_weight = e.empty(splits, "K", "B", "C", "D", "E") if needs_weight else None
    grad_priors = e.empty(splits, "K", "B", "C") if needs_priors else None
    if needs_weight or needs_priors:
        _launch(
            views.dynamic_weight_view_kernel,
            blocks(sizes["D"], config.ROWS) * sizes["B"] * blocks(sizes["C"], weight_tile.BC) * sizes["K"] * splits,
            e,
            weight_tile,
            p_weight_start=e.pairs.weight_start,
            p_pair_child=e.pairs.weight_child,
            p_pair_parent=e.pairs.weight_parent,
            p_pair_slot=e.pairs.weight_slot,
            p_out=grad_weight,
            p_grad_priors=grad_priors,
            pair_splits=pair_splits,
            image_splits=image_splits,
            BD=config.ROWS,
            **common,
        )
    return Gradients(grad_poses, _add_splits(grad_weight), _add_splits(grad_priors))


def _add_splits(parts: Tensor | None) -> Tensor | None:
    if parts is None or len(parts) == 1:
        return None if parts is None else parts[0]
    return parts.sum(dim=0)


def _launch(kernel: Any, programs: int, e: VectorEdges, tile: config.Tile, **arguments: Any) -> None:
    """Launch a kernel, unless there are no programs. It gets those tensors and sizes of the edges that are among its
    parameters."""
    if not programs:
        return
    known = {"p_poses": e.poses, "p_weight": e.weight, "p_priors": e.priors, **e.sizes}
    known = {name: value for name, value in known.items() if name in kernel.arg_names}
    kernel[(programs,)](**{**known, **arguments}, **tile._asdict(), **OPTIONS)
