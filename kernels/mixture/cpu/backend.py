"""The CPU backend of mixture routings: implements `kernels.mixture.backend.MixtureBackend` with the views.

Every call plans its kernels and then runs all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritoncaps.kernels.common.cpu.arrays import array
from tritoncaps.kernels.common.cpu.workspace import scratch, short_lived
from tritoncaps.kernels.common.numerics import POSE, least_support, widen
from tritoncaps.kernels.mixture.backend import Components, MomentGradients, Packed, VBKernels, VoteSource
from tritoncaps.kernels.mixture.cpu import vb
from tritoncaps.kernels.mixture.cpu.components import (
    pack_centre,
    pack_components,
    pack_slopes,
    unpack_component_gradients,
    unpack_moments,
)
from tritoncaps.kernels.mixture.cpu.em_routing import (
    CPUPasses,
    empty_history,
    empty_outputs,
    has_non_finite,
    pack,
    saved_shapes,
    without_silent,
)
from tritoncaps.kernels.mixture.cpu.gradient import child_and_weight_gradient
from tritoncaps.kernels.mixture.cpu.kept import kept_backward, kept_forward
from tritoncaps.kernels.mixture.cpu.layout import (
    MOST_KEPT,
    Call,
    Moment,
    Number,
    add_pack_weight,
    by_iteration,
    call_of,
    da_shape,
    log_sums_shape,
    slopes_shape,
    statistics_shape,
    types_together,
    vectors,
    weight_shape,
    weights_count,
)
from tritoncaps.kernels.mixture.cpu.parent_view import (
    add_component_gradients,
    add_moments_of,
    add_to_parents,
)
from tritoncaps.kernels.mixture.iteration import History


class CPUMixture:
    """The methods of `MixtureBackend`. `BACKEND` is the only object."""

    vb: VBKernels | None = vb

    def empty_parents(self, source: VoteSource) -> tuple[Tensor, Tensor]:
        N, P, C = source.parents
        numbers = source.poses.new_empty(N, P, C, dtype=source.dtype)
        return numbers, source.poses.new_empty(N, P, POSE, C, dtype=source.dtype)

    def empty_child_gradients(self, source: VoteSource) -> tuple[Tensor, Tensor]:
        shape = source.activations.shape
        return source.poses.new_empty(*shape, 4, 4), source.activations.new_empty(shape)

    def empty_log_sum(self, source: VoteSource) -> Tensor:
        return source.poses.new_empty(log_sums_shape(source), dtype=source.dtype)

    def empty_da(self, source: VoteSource) -> Tensor:
        """da [N, B, G], followed by the weights of gradients (`layout.weights_count`), which `gradients` uses again."""
        return source.poses.new_empty(self._da_and_weights_count(source), dtype=source.dtype)

    @staticmethod
    def _da_and_weights_count(source: VoteSource) -> int:
        images, types, _ = source.activations.shape
        parents, slots = source.tables.children.shape
        weights, _, parent_types = source.weight.shape[:3]
        together = types_together(types, weights, slots)
        kept = weights_count(images, types, parent_types, together, parents * slots, source.dtype)
        return _da_count(source) + kept

    def empty_outputs(self, source: VoteSource) -> tuple[Tensor, Tensor]:
        return empty_outputs(*source.parents, source.poses.dtype, source.poses.device)

    saved_shapes, empty_history = staticmethod(saved_shapes), staticmethod(empty_history)
    kept_forward, kept_backward = staticmethod(kept_forward), staticmethod(kept_backward)

    def em_passes(self, source: VoteSource) -> CPUPasses:
        return CPUPasses(pack(source))

    def by_iteration(self, saved: Tensor) -> Any:
        """As an array: taking a row of an array is faster than taking an item of a tensor."""
        return by_iteration(saved)

    def packed(self, source: VoteSource) -> tuple[Tensor, Tensor, Tensor]:
        """The weight as rows, the activations, and the sum of the poses, which shows whether all are finite."""
        rows = source.poses.new_empty(weight_shape(source.weight, source.dtype), dtype=source.dtype)
        poses, activations, weight = widen(source.poses), widen(source.activations), widen(source.weight)
        call = call_of(poses, activations, weight, rows, source.tables, source.competition)
        add_pack_weight(call, weight)
        call.plan.run()
        return rows, activations.contiguous(), poses.sum()

    def empty_packed(self, source: VoteSource) -> tuple[Tensor, Tensor, Tensor]:
        shapes = weight_shape(source.weight, source.dtype), source.activations.shape, ()
        return tuple(source.empty(shapes))  # type: ignore[return-value]

    def moments(
        self, source: VoteSource, packed: Packed, before: Components | None, scatter_floor: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        call = _call(source, packed)
        support, mean = self.empty_parents(source)
        variance = torch.empty_like(mean)
        log_sum = support.new_empty(0) if before is None else self.empty_log_sum(source)
        found = array(_scratch_rows("statistics", source, statistics_shape))
        numbers = _numbers(source, scatter_floor)
        rows = None
        if before is not None:
            rows = _pack_components(call, source, [before])[0]
            add_to_parents(call, pack_centre, found, array(before.mean if before.centre is None else before.centre))
        add_moments_of(call, rows, found, array(log_sum), numbers)
        add_to_parents(call, unpack_moments, *map(array, (support, mean, variance)), found)
        call.plan.run()
        return support, mean, variance, log_sum

    def component_gradients(
        self, source: VoteSource, packed: Packed, before: Components, log_sum: Tensor, moments: MomentGradients
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        call = _call(source, packed)
        grad_log_weight, grad_mean = self.empty_parents(source)
        grad_precision = torch.empty_like(grad_mean)
        da = short_lived(self._da_and_weights_count(source), source.dtype)
        if call.edges.edges_count < source.tables.children.numel() or call.edges.child_types % call.edges.together:
            da.zero_()  # the kernels do not write the weights of missing edges and types
        components = _pack_components(call, source, [before])
        rows = _pack_slopes(call, source, components, [moments])
        total = array(_scratch_rows("totals", source, _moments_shape))
        of_children, weights = map(array, da.tensor_split([_da_count(source)]))
        add_component_gradients(call, components[0], rows[1], array(log_sum), of_children, weights, total)
        grads = map(array, (grad_mean, grad_precision, grad_log_weight))
        add_to_parents(call, unpack_component_gradients, *grads, total, components[0])
        call.plan.run()
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
        call = _call(source, packed)
        since = len(components) - len(moments) + 1  # 1 if the first moments have their own components
        rows = _pack_components(call, source, components)
        history = History(
            statistics=rows.tensor,
            log_sums=_stacked(log_sums, source),
            slopes=_pack_slopes(call, source, rows, moments, since).tensor,
            da=_stacked([x[: _da_count(source)] for x in da], source),
        )
        if len(da) <= MOST_KEPT:
            call.weights = [array(x[_da_count(source) :]) for x in da]
        grads = child_and_weight_gradient(call, history, since, needs_children, needs_weight)
        call.plan.run()
        return grads


BACKEND = CPUMixture()


def _call(source: VoteSource, packed: Packed) -> Call:
    """The inputs of the kernels, from the result of `CPUMixture.packed`."""
    rows, activations, sum_of_poses = packed
    poses = widen(source.poses.flatten(3))
    if has_non_finite(sum_of_poses):
        poses = without_silent(poses, activations)
    return call_of(poses, activations, source.weight, rows, source.tables, source.competition)


def _numbers(source: VoteSource, scatter_floor: float = 0.0) -> Any:
    """See `Number`; without those of a `Fit`."""
    numbers = np.zeros(Number.COUNT, array(source.poses.new_empty(0, dtype=source.dtype)).dtype)
    numbers[Number.LEAST_SUPPORT] = least_support(source.dtype)
    numbers[Number.SCATTER_FLOOR] = scatter_floor
    return numbers


class _Rows:
    """Rows of several iterations: the tensor [iterations, ...], and item t as a flat array."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, t: int) -> Any:
        return array(self.tensor[t])


def _pack_components(call: Call, source: VoteSource, components: Sequence[Components]) -> _Rows:
    rows = _Rows(_scratch_rows("components", source, statistics_shape, len(components)))
    for t, given in enumerate(components):
        add_to_parents(call, pack_components, rows[t], *map(array, given[:3]))
    return rows


def _pack_slopes(
    call: Call, source: VoteSource, components: _Rows, moments: Sequence[MomentGradients], since: int = 1
) -> _Rows:
    """Slopes of the iterations from ``since`` on; the components before iteration t are components[t - 1]."""
    slopes, numbers = _Rows(_scratch_rows("slopes", source, slopes_shape, since + len(moments))), _numbers(source)
    for t, given in enumerate(moments, since):
        before = components[t - 1] if t else numbers[:0]
        add_to_parents(call, pack_slopes, slopes[t], before, *map(array, given), numbers)
    return slopes


def _scratch_rows(name: str, source: VoteSource, shape: Any, iterations: int | None = None) -> Tensor:
    """Scratch memory for the rows of all parents, for a number of iterations."""
    of_parents = shape(*source.parents, source.dtype)
    return scratch(name, of_parents if iterations is None else (iterations, *of_parents), source.dtype)


def _moments_shape(images: int, parents: int, types: int, dtype: torch.dtype) -> tuple[int, ...]:
    lanes, blocks = vectors(types, dtype)
    return images, parents, blocks, Moment.ROWS, lanes


def _da_count(source: VoteSource) -> int:
    return math.prod(da_shape(source))


def _stacked(tensors: Sequence[Tensor], source: VoteSource) -> Tensor:
    return torch.stack(list(tensors)) if tensors else source.poses.new_empty(0, 0, dtype=source.dtype)
