"""The Triton backend of mixture routings: implements `kernels.mixture.backend.MixtureBackend` with the three views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncaps.kernels.mixture.backend import Components, MomentGradients, Packed, VoteSource
from tritoncaps.kernels.mixture.triton import parents
from tritoncaps.kernels.mixture.triton.em_routing import (
    TritonPasses,
    edges_of,
    empty_history,
    log_sum_shape,
    pack,
    saved_shapes,
    slopes_shape,
    statistics_shape,
)
from tritoncaps.kernels.mixture.triton.kept import kept_backward, kept_forward
from tritoncaps.kernels.mixture.triton.rows import empty_weight
from tritoncaps.kernels.mixture.triton.views import (
    ENTRIES,
    child_assignment_gradient,
    child_log_sum,
    empty_moments,
    sum_moments,
    sweep,
)


class TritonMixture:
    """For CUDA, ROCm and Triton's interpreter. In memory, types are the fastest axis."""

    vb = None

    def empty_parents(self, source: VoteSource) -> tuple[Tensor, Tensor]:
        N, P, C = source.parents
        return _empty(source, N, P, C), _empty(source, N, P, ENTRIES, C)

    def empty_child_gradients(self, source: VoteSource) -> tuple[Tensor, Tensor]:
        N, B, L = source.activations.shape
        poses = source.poses.new_empty(N, L, 4, 4, B).movedim(4, 1)
        return poses, source.activations.new_empty(N, L, B).movedim(2, 1)

    def empty_log_sum(self, source: VoteSource) -> Tensor:
        return _empty(source, *log_sum_shape(source))

    def empty_da(self, source: VoteSource) -> Tensor:
        return self.empty_log_sum(source)

    def empty_outputs(self, source: VoteSource) -> tuple[Tensor, Tensor]:
        N, P, C = source.parents
        return source.poses.new_empty(N, P, ENTRIES, C), source.poses.new_empty(N, P, C)

    saved_shapes = staticmethod(saved_shapes)
    empty_history = staticmethod(empty_history)
    kept_forward = staticmethod(kept_forward)
    kept_backward = staticmethod(kept_backward)

    def em_passes(self, source: VoteSource) -> TritonPasses:
        return TritonPasses(edges_of(source, pack(source)))

    def by_iteration(self, saved: Tensor) -> Tensor:
        return saved

    def packed(self, source: VoteSource) -> tuple[Tensor, Tensor, Tensor]:
        """See `em_routing.pack`. Copies: an operator must not return its inputs."""
        poses, weight, activations = (
            x.clone() if x.data_ptr() in (source.poses.data_ptr(), source.weight.data_ptr()) else x
            for x in pack(source)
        )
        return poses, weight, activations

    def empty_packed(self, source: VoteSource) -> tuple[Tensor, Tensor, Tensor]:
        N, B, L = source.activations.shape
        poses = source.poses.new_empty(N, L, B, ENTRIES)
        return poses, empty_weight(source.weight), source.activations.new_empty(N, L, B)

    def moments(
        self, source: VoteSource, packed: Packed, before: Components | None, scatter_floor: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``scatter_floor`` is unused: the parent view updates the mean with every vote, so variances do not cancel."""
        edges = edges_of(source, packed)
        support, mean = self.empty_parents(source)
        variance, partial = torch.empty_like(mean), empty_moments(edges)
        if before is None:
            log_sum, statistics = support.new_empty(0), None
            sum_moments(edges, "uniform", partial)
        else:
            log_sum, statistics = self.empty_log_sum(source), _statistics([before])[0]
            child_log_sum(edges, statistics, log_sum)
            sum_moments(edges, "assignment", partial, p_statistics=statistics, p_log_sum=log_sum)
        parents.moments(partial, statistics, support, mean, variance)
        return support, mean, variance, log_sum

    def component_gradients(
        self, source: VoteSource, packed: Packed, before: Components, log_sum: Tensor, moments: MomentGradients
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        edges, da = edges_of(source, packed), self.empty_da(source)
        statistics, rows, partial = _statistics([before])[0], _slopes([moments])[0], empty_moments(edges)
        log_sum = log_sum.contiguous()
        given: dict[str, Any] = {"p_statistics": statistics, "p_log_sum": log_sum, "p_slopes": rows, "p_da": da}
        child_assignment_gradient(edges, statistics, log_sum, rows, da, any_fit=True)
        sum_moments(edges, "gradient", partial, any_fit=True, **given)
        grad_log_weight, grad_mean = self.empty_parents(source)
        grad_precision = torch.empty_like(grad_mean)
        parents.component_gradients(partial, statistics, grad_mean, grad_precision, grad_log_weight)
        return grad_mean, grad_precision, grad_log_weight, da

    def gradients(
        self,
        source: VoteSource,
        packed: Packed,
        components: Sequence[Components],
        log_sums: Sequence[Tensor],
        moments: Sequence[MomentGradients],
        da: Sequence[Tensor],
        needs_children: bool,
        needs_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        nothing = _empty(source, 0)
        return sweep(
            edges_of(source, packed),
            needs_children,
            needs_weight,
            p_statistics=_statistics(components) if components else nothing,
            p_slopes=_slopes(moments),
            p_log_sums=torch.stack(list(log_sums)) if log_sums else nothing,
            p_da=torch.stack(list(da)) if da else nothing,
            T=len(moments),
            ALL=len(moments) > len(components),
            ANY_FIT=True,
        )


BACKEND = TritonMixture()


def _empty(source: VoteSource, *shape: int) -> Tensor:
    return source.poses.new_empty(shape, dtype=source.dtype)


def _statistics(components: Sequence[Components]) -> Tensor:
    """Components as rows [T, ...], which the views read."""
    N, P, _, C = components[0].mean.shape
    rows = components[0].mean.new_empty(len(components), *statistics_shape(N, P, C))
    for row, given in zip(rows, components, strict=True):
        parents.components(given.mean, given.precision, given.log_weight, row)
    return rows


def _slopes(moments: Sequence[MomentGradients]) -> Tensor:
    """Slopes as rows [T, ...], which the views read."""
    N, P, _, C = moments[0].mean.shape
    rows = moments[0].mean.new_empty(len(moments), *slopes_shape(N, P, C))
    for row, given in zip(rows, moments, strict=True):
        parents.slopes_of_moments(given, row)
    return rows
