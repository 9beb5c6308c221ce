"""The protocol of a backend for mixture routings, and the records that its methods take.

Letters: N images, L child and P parent locations, S slots, B child and C parent types, K weight blocks, G groups of
competing parents (one for each child location, or for each edge if the competition is local), T iterations. If only
positions compete, the numbers of a group (log_sum and da) are numbers of each of its parent types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tritoncaps.kernels.common.backends import kernels
from tritoncaps.kernels.common.chunks import ALL, chunks_of
from tritoncaps.kernels.common.numerics import POSE, wide_dtype
from tritoncaps.kernels.common.operators import Given
from tritoncaps.kernels.common.tables import Tables
from tritoncaps.kernels.mixture.iteration import EMPasses, Fit, Gradients, History

# Temporary memory of an image, in numbers. For each parent: slopes and components of an iteration, moments, tensors of
# a fit and of its gradient. For each child: copies of pose, activation and gradients.
SLOPES, COMPONENTS, MOMENTS, FIT, CHILD = 4 * POSE + 3, 2 * POSE + 1, 2 * POSE + 1, 10 * POSE, 2 * (POSE + 1)


class VoteSource(NamedTuple):
    """The inputs of the votes: V_ij = M_i W_ij, plus the offset of the slot in the right-hand column."""

    poses: Tensor  # [N, B, L, 16]; [N, B, L, 4, 4] for a whole batch
    activations: Tensor  # [N, B, L]
    weight: Tensor  # [K, B, C, 4, 4]
    tables: Tables
    competition: str  # "global", "local" or "positions"

    @property
    def parents(self) -> tuple[int, int, int]:
        """N, P and C."""
        return self.poses.shape[0], self.tables.children.shape[0], self.weight.shape[2]

    @property
    def groups(self) -> int:
        """Number of groups of competing parents: child locations, or pairs of a parent location and a slot."""
        return _groups(self)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        return wide_dtype(self.poses.dtype)

    def empty(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Empty tensors of these shapes, in the dtype of the arithmetic."""
        return [self.poses.new_empty(shape, dtype=self.dtype) for shape in shapes]

    def of_images(self, chunk: slice) -> VoteSource:
        """The source for some images, as kernels read it: negative activations become zero."""
        poses, activations = self.poses, self.activations
        if chunk is not ALL:
            poses, activations = poses[chunk], activations[chunk]
        return self._replace(poses=poses.flatten(3), activations=activations.clamp(min=0))


Packed = Sequence[Tensor]


def image_chunks(source: VoteSource, iterations: int, any_fit: bool = False) -> list[slice]:
    """Slices of the images that are routed together; see `kernels.common.chunks`. ``any_fit``: between the passes,
    torch computes the components and their gradients. No properties: torch.compile in torch 2.8 does not trace them."""
    (N, B, L), P, C = source.activations.shape, source.tables.children.shape[0], source.weight.shape[2]
    of_iteration, once = (SLOPES + COMPONENTS, MOMENTS + FIT) if any_fit else (SLOPES, MOMENTS)
    of_groups = _groups(source) * (C if source.competition == "positions" else 1)
    numbers = (iterations * of_iteration + once) * P * C + CHILD * B * L + 2 * (iterations - 1) * B * of_groups
    return chunks_of(N, numbers * wide_dtype(source.poses.dtype).itemsize)


def _groups(source: VoteSource) -> int:
    return source.tables.children.numel() if source.competition == "local" else source.activations.shape[2]


def vote_source(
    poses: Tensor, activations: Tensor, weight: Tensor, tables: Sequence[Tensor], competition: str
) -> VoteSource:
    """A `VoteSource` from the arguments of an operator; poses [N, B, L, 4, 4]."""
    return VoteSource(poses, activations, weight, Tables(*tables), competition)


def given_source(given: Given) -> VoteSource:
    """A `VoteSource` from the arguments of a fake operator."""
    return vote_source(given.poses, given.activations, given.weight, given.tables, given.competition)


class Components(NamedTuple):
    """A Gaussian for each parent: l_ij = log_weight_j - 1/2 sum_h precision_jh (V_ijh - mean_jh)^2."""

    mean: Tensor  # [N, P, 16, C]
    precision: Tensor  # [N, P, 16, C]
    log_weight: Tensor  # [N, P, C]
    centre: Tensor | None = None  # [N, P, 16, C]: estimate of the mean of the votes; moments may be taken about it


class MomentGradients(NamedTuple):
    """The moments of an iteration and their gradients. They determine the slopes, the gradient of the weight r_ij of a
    vote: G_ij = offset_j + sum_h (linear_jh + quadratic_jh e_h) e_h, with e = V_ij - mean_j and

        linear = grad_mean / support,   quadratic = grad_variance / support,
        offset = grad_support - sum_h quadratic_h variance_h

    A support of at most `least_support` counts as 1.
    """

    support: Tensor  # [N, P, C]
    mean: Tensor  # [N, P, 16, C]
    variance: Tensor  # [N, P, 16, C]
    grad_support: Tensor  # [N, P, C]
    grad_mean: Tensor  # [N, P, 16, C]
    grad_variance: Tensor  # [N, P, 16, C]


class VBKernels(Protocol):
    """The fit of variational Bayes routing and its gradients; see `kernels.mixture.vb`."""

    def fit(
        self, support: Tensor, mean: Tensor, variance: Tensor, beta_a: Tensor, priors: Sequence[float]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    def gradients(
        self,
        moments: tuple[Tensor, Tensor, Tensor],
        grads: tuple[Tensor, Tensor, Tensor, Tensor],
        priors: Sequence[float],
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def contiguous_like(x: Tensor) -> Tensor:
    """An empty contiguous tensor in the shape of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class MixtureBackend(Protocol):
    """The passes over votes. Separate methods allocate the outputs, because fake operators need them too."""

    @property
    def vb(self) -> VBKernels | None:
        """Kernels for the fit of variational Bayes routing; None: torch computes it."""
        ...

    def empty_parents(self, source: VoteSource) -> tuple[Tensor, Tensor]:
        """Empty tensors [N, P, C] and [N, P, 16, C] for parents, in the dtype of the arithmetic."""
        ...

    def empty_child_gradients(self, source: VoteSource) -> tuple[Tensor, Tensor]:
        """Empty gradients of poses [N, B, L, 4, 4] and activations [N, B, L], in the dtype of the poses."""
        ...

    def empty_log_sum(self, source: VoteSource) -> Tensor:
        """Empty tensor for the log_sum of every child in every group."""
        ...

    def empty_da(self, source: VoteSource) -> Tensor:
        """Empty tensor for da_i = sum_j R_ij G_ij of every child in every group, in the backend's own layout."""
        ...

    def empty_outputs(self, source: VoteSource) -> tuple[Tensor, Tensor]:
        """Empty poses [N, P, 16, C] and activations [N, P, C] that EM routing returns, in the dtype of the poses."""
        ...

    def saved_shapes(self, source: VoteSource, iterations: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of statistics [T, ...] and log_sums [T - 1, ...], which EM routing keeps for its backward pass."""
        ...

    def empty_history(self, source: VoteSource, statistics: Tensor, log_sums: Tensor) -> History:
        """A history with these tensors, and with memory for slopes and da."""
        ...

    def kept_forward(self, source: VoteSource, fits: Sequence[Fit], save: bool) -> tuple[Tensor, ...] | None:
        """Run the forward pass with a plan that is kept from earlier calls. Returns poses, activations, statistics and
        log_sums (the last two with T = 0 unless ``save``), or None if the backend keeps no plan for such a call."""
        ...

    def kept_backward(
        self, source: VoteSource, fits: Sequence[Fit], given: Sequence[Tensor], gradient: str, needs: tuple[bool, bool]
    ) -> Gradients | None:
        """The same for the backward pass: the gradients of `iteration.backward`, from ``given``: statistics, log_sums,
        gradients of poses and activations. ``needs``: gradients of children, of the weight."""
        ...

    def em_passes(self, source: VoteSource) -> EMPasses:
        """The passes for one call of EM routing."""
        ...

    def by_iteration(self, saved: Tensor) -> Sequence[Any]:
        """Statistics or log_sums [T, ...] as a sequence over the iterations, whose items `em_passes` accept."""
        ...

    def packed(self, source: VoteSource) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs as the next three methods read them, in the backend's own layout; see `passes.mixture_packed`."""
        ...

    def empty_packed(self, source: VoteSource) -> tuple[Tensor, Tensor, Tensor]:
        """Empty tensors for the result of `packed`."""
        ...

    def moments(
        self, source: VoteSource, packed: Packed, before: Components | None, scatter_floor: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Support, mean and variance of the votes, and log_sum; see `passes.mixture_moments`."""
        ...

    def component_gradients(
        self, source: VoteSource, packed: Packed, before: Components, log_sum: Tensor, moments: MomentGradients
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of mean, precision and log_weight, and da; see `passes.mixture_component_gradients`."""
        ...

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
        """dL/dM [N, B, L, 4, 4], dL/da [N, B, L] and dL/dW [K, B, C, 4, 4], None if not needed; see
        `passes.mixture_gradients`."""
        ...


def backend_of(name: str) -> MixtureBackend:
    """The backend object of that name."""
    return kernels("mixture", name).BACKEND
