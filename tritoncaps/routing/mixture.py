"""Mixture routings: they fit a Gaussian to the votes for each parent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from tritoncaps.capsules import Capsules
from tritoncaps.routing.base import MatrixRouting, check_choice, check_iterations
from tritoncaps.routing_map import RoutingMap

Competition = Literal["global", "local"]
Gradient = Literal["all", "last"]


class Moments(NamedTuple):
    """Moments of the votes for each parent, with the weights r_ij = R_ij a_i.

    ``support`` [N, C, *out_size] is the sum of r. ``mean`` and ``variance`` [N, C, *out_size, 4, 4] are the mean and
    the variance of the votes. All three are zero for a parent without support. ``data_per_parent`` is the number of
    child capsules of the layer divided by the number of parent capsules.
    """

    support: Tensor
    mean: Tensor
    variance: Tensor
    data_per_parent: float


class Components(NamedTuple):
    """The result of a fit: the Gaussian of each parent, and the logit of its activation.

    ``mean`` and ``precision`` [N, C, *out_size, 4, 4], ``log_weight`` and ``logit`` [N, C, *out_size]. The next
    assignments are the softmax over competing parents j of l_ij = log_weight_j - 1/2 sum_h precision_jh (V_ijh -
    mean_jh)^2. After the last iteration, the poses of the layer are ``mean``, its activations sigmoid(``logit``).
    """

    mean: Tensor
    precision: Tensor
    log_weight: Tensor
    logit: Tensor


@dataclass(frozen=True)
class MixtureRouting(MatrixRouting):
    """Base class of routings that fit a Gaussian to the votes for each parent, on the fused kernels: write `fit`.

    Args:
        iterations: number of fits.
        competition: "global": all parents of a child, of all types and positions, compete for it. "local": only the
            types at one position compete, separately for every position.
        gradient: "all": gradients flow through every iteration. "last": the last assignments are constants.

    Raises:
        ValueError: if an option is unknown or out of its range.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch, tritoncaps
        >>> @dataclass(frozen=True)
        ... class RoundRouting(tritoncaps.MixtureRouting):
        ...     "Every parent has the same variance in all 16 entries."
        ...
        ...     parameter_names = ("beta_a",)
        ...
        ...     def fit(self, moments, parameters, iteration):
        ...         variance = moments.variance.mean((-1, -2), keepdim=True).clamp(min=1e-4).expand_as(moments.mean)
        ...         beta_a = parameters["beta_a"].reshape(-1, *[1] * (moments.support.ndim - 2))
        ...         logit = beta_a + moments.support / moments.data_per_parent - variance.log().mean((-1, -2))
        ...         log_weight = torch.nn.functional.logsigmoid(logit) - 0.5 * variance.log().sum((-1, -2))
        ...         return tritoncaps.Components(moments.mean, 1 / variance, log_weight, logit)
        >>> layer = tritoncaps.ConvCaps2d(8, 16, kernel_size=3, routing=RoundRouting(iterations=2))
        >>> layer(tritoncaps.Capsules(torch.randn(2, 8, 6, 6, 4, 4), torch.rand(2, 8, 6, 6))).poses.shape
        torch.Size([2, 16, 4, 4, 4, 4])
    """

    iterations: int = 3
    competition: Competition = field(default="global", kw_only=True)
    gradient: Gradient = field(default="all", kw_only=True)

    def __post_init__(self) -> None:
        check_iterations(self.iterations)
        check_choice("competition", self.competition, ("global", "local"))
        check_choice("gradient", self.gradient, ("all", "last"))

    @property
    def scatter_floor(self) -> float:
        """Errors of support times variance that are much smaller than this number do not matter to `fit`.

        Override it if the fit adds a prior to the scatter (support times variance). The kernels then do not repeat a
        pass for parents whose few votes are almost equal.
        """
        return 0.0

    @abstractmethod
    def fit(self, moments: Moments, parameters: Mapping[str, Tensor], iteration: int) -> Components:
        """Compute the Gaussians and logits of the parents, with differentiable torch operations.

        It may combine parents of one image, but not different images. It must get all tensors as arguments.
        ``iteration`` counts from 0.
        """

    def route(
        self,
        capsules: Capsules,
        weight: Tensor,
        parameters: Mapping[str, Tensor],
        routing_map: RoutingMap,
        backend: str | None = None,
    ) -> Capsules:
        from tritoncaps import functional

        return functional.mixture_routing(
            capsules.poses, capsules.activations, weight, parameters, routing_map, self, backend
        )


def of_types(parameter: Tensor, like: Tensor) -> Tensor:
    """A parameter [C] in a shape that broadcasts with ``like`` [N, C, *out_size]."""
    return parameter.reshape(-1, *[1] * (like.ndim - 2))


def sum_of_entries(x: Tensor) -> Tensor:
    """``x.sum((-1, -2))`` of [N, C, *out_size, 4, 4], in the memory layout of moments, where types are consecutive.

    The plain sum returns the same numbers in another layout. An operation on tensors of two layouts takes several times
    as long as one on a single layout, so this function makes a `fit` faster.
    """
    return x.movedim(1, -1).sum((-3, -2)).movedim(-1, 1)
