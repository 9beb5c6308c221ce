"""The passes over the votes of a mixture routing, as opaque operators. They do not store votes.

    mixture_packed                the inputs in the layout that the other passes read
    mixture_moments               support, mean and variance of the votes for every parent
    mixture_component_gradients   gradients of the components that determine the assignments of an iteration
    mixture_gradients             gradients of poses, activations and weight, of all iterations at once

Between two passes, a `fit` computes components from moments. `function.py` contains the iteration, docs/backward.md the
formulas.

Letters: N images, L child and P parent locations, B child and C parent types, K weight blocks, T iterations. Children
are poses [N, B, L, 4, 4] and activations [N, B, L]; weight is [K, B, C, 4, 4]; tensors of parents are
[N, P, 16, C] and [N, P, C], with the strides that the backend prefers and in the dtype of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritoncaps.kernels.common.chunks import ALL
from tritoncaps.kernels.common.operators import fake, operator, surrounded
from tritoncaps.kernels.mixture.backend import Components, MomentGradients, backend_of, given_source, vote_source


@operator
@surrounded
def mixture_packed(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    tables: Sequence[Tensor],
    competition: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs in the backend's own layout, for all passes of a forward or backward pass."""
    source = vote_source(poses, activations, weight, tables, competition)
    return backend_of(backend).packed(source.of_images(ALL))


@fake(mixture_packed)
def _(given):
    return backend_of(given.backend).empty_packed(given_source(given))


@operator
@surrounded
def mixture_moments(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    packed: Sequence[Tensor],
    components: Sequence[Tensor],
    tables: Sequence[Tensor],
    competition: str,
    scatter_floor: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Support [N, P, C], mean and variance [N, P, 16, C] of the votes, and the log_sum of every child.

    components: mean, precision, log_weight and centre; or empty, then assignments are uniform and log_sum is empty.
    scatter_floor: errors of support times variance much smaller than this number do not matter.
    """
    before = Components(*components) if components else None
    source = vote_source(poses, activations, weight, tables, competition)
    return backend_of(backend).moments(source, packed, before, scatter_floor)


@fake(mixture_moments)
def _(given):
    kernels = backend_of(given.backend)
    source = given_source(given)
    support, mean = kernels.empty_parents(source)
    log_sum = kernels.empty_log_sum(source) if given.components else support.new_empty(0)
    return support, mean, torch.empty_like(mean), log_sum


@operator
@surrounded
def mixture_component_gradients(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    packed: Sequence[Tensor],
    components: Sequence[Tensor],
    log_sum: Tensor,
    moments: Sequence[Tensor],
    tables: Sequence[Tensor],
    competition: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the components that determine the assignments of an iteration: of mean, precision [N, P, 16, C] and
    log_weight [N, P, C], from the moments of that iteration and their gradients (`MomentGradients`); and its
    da_i = sum_j R_ij G_ij of every child."""
    source = vote_source(poses, activations, weight, tables, competition)
    given = Components(*components), log_sum, MomentGradients(*moments)
    return backend_of(backend).component_gradients(source, packed, *given)


@fake(mixture_component_gradients)
def _(given):
    kernels = backend_of(given.backend)
    source = given_source(given)
    log_weight, mean = kernels.empty_parents(source)
    return mean, torch.empty_like(mean), log_weight, kernels.empty_da(source)


@operator
@surrounded
def mixture_gradients(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    packed: Sequence[Tensor],
    components: Sequence[Tensor],
    log_sums: Sequence[Tensor],
    moments: Sequence[Tensor],
    da: Sequence[Tensor],
    tables: Sequence[Tensor],
    competition: str,
    needs_children: bool,
    needs_weight: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of poses, activations and weight; those that are not needed are empty tensors of size 0.

    components, moments   the tensors of all iterations in one list: 3 and 6 for each iteration.
    log_sums, da          one tensor for each iteration with components.

    T moments, T - 1 components and T - 1 da: gradients flow through all iterations; the first has uniform assignments.
    One moments, one components and no da: gradients flow only through the last iteration; assignments are constants.
    """
    source = vote_source(poses, activations, weight, tables, competition)
    grads = backend_of(backend).gradients(
        source,
        packed,
        [Components(*components[i : i + 3]) for i in range(0, len(components), 3)],
        log_sums,
        [MomentGradients(*moments[i : i + 6]) for i in range(0, len(moments), 6)],
        da,
        needs_children,
        needs_weight,
    )
    if grads[1] is not None:
        grads[1].masked_fill_(activations < 0, 0)
    found = zip(grads, (poses, activations, weight), strict=True)
    grad_poses, grad_activations, grad_weight = (
        given.new_empty(0) if grad is None else grad.to(given.dtype) for grad, given in found
    )
    return grad_poses, grad_activations, grad_weight


@fake(mixture_gradients)
def _(given):
    kernels = backend_of(given.backend)
    source = given_source(given)
    grad_poses, grad_activations = kernels.empty_child_gradients(source)
    return (
        grad_poses if given.needs_children else given.poses.new_empty(0),
        grad_activations if given.needs_children else given.activations.new_empty(0),
        given.weight.new_empty(given.weight.shape if given.needs_weight else 0),
    )
