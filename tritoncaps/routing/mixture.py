"""Mixture routings: they fit a Gaussian to the votes for each parent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from tritoncaps.capsules import Capsules
from tritoncaps.routing.base import MatrixRouting, check_choice, check_iterations
from tritoncaps.routing_map import RoutingMap

Competition = Literal["global", "local", "positions"]
Gradient = Literal["all", "last"]
COMPETITIONS: tuple[str, ...] = get_args(Competition)


class Moments(NamedTuple):
    """Moments of the votes V_ij for each parent j, with the weights r_ij = R_ij a_i: the input of a fit.

        support_j = sum_i r_ij
        mean_j = sum_i r_ij V_ij / support_j
        variance_j = sum_i r_ij (V_ij - mean_j)^2 / support_j

    All three are zero for a parent without support.

    Attributes:
        support: the sum of the weights.
        mean: the mean of the votes, entry by entry.
        variance: the variance of the votes, entry by entry.
        data_per_parent: the number of child capsules of the layer divided by the number of parent capsules; if only
            positions compete, divided by the number of positions.

    Shape:
        - support: [N, C, *out_size]
        - mean, variance: [N, C, *out_size, 4, 4]
    """

    support: Tensor
    mean: Tensor
    variance: Tensor
    data_per_parent: float


class Components(NamedTuple):
    """The result of a fit: the Gaussian of each parent, and the logit of its activation.

    The next assignments R_ij are the softmax, over the parents j that compete for child i, of

        l_ij = log_weight_j - 1/2 sum_h precision_jh (V_ijh - mean_jh)^2

    After the last iteration, the poses of the layer are ``mean``, its activations sigmoid(``logit``).

    Attributes:
        mean: the mean of the Gaussian, and the pose of the parent.
        precision: one over the variance of the Gaussian, entry by entry; at least zero.
        log_weight: all terms of l_ij that do not depend on the vote. In EM routing it is the logarithm of the
            activation and of the constant of the Gaussian: log a_j - 1/2 sum_h log(2 pi variance_jh).
        logit: the number whose sigmoid is the activation.

    Shape:
        - mean, precision: [N, C, *out_size, 4, 4]
        - log_weight, logit: [N, C, *out_size]
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
            types at one position compete, separately for every position. "positions": only the positions of one type
            compete, separately for every type; in `ClassCaps`, which has one position, nothing competes.
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
        check_choice("competition", self.competition, COMPETITIONS)
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
        """Compute the Gaussian and the logit of each parent, with differentiable torch operations.

        It may combine parents of one image, for example by a softmax over types, but not different images. It must get
        all tensors as arguments. For a parent without support, it must return finite numbers.

        Args:
            moments: the moments of the votes for each parent.
            parameters: the parameters of ``parameter_names``, by name.
            iteration: number of the iteration, 0 to iterations - 1.

        Shape:
            - moments: support [N, C, *out_size], mean and variance [N, C, *out_size, 4, 4]
            - parameters: [C] each, unless `new_parameters` has other shapes
            - result: mean and precision [N, C, *out_size, 4, 4], log_weight and logit [N, C, *out_size]

        Returns:
            The Gaussians and logits.

        Example:
            >>> import torch
            >>> from tritoncaps import EMRouting
            >>> from tritoncaps.routing import Moments
            >>> support, mean = torch.full((2, 16, 5, 5), 3.0), torch.randn(2, 16, 5, 5, 4, 4)
            >>> moments = Moments(support, mean, torch.full_like(mean, 0.5), data_per_parent=4.5)
            >>> parameters = {"beta_u": torch.zeros(16), "beta_a": torch.zeros(16)}
            >>> components = EMRouting().fit(moments, parameters, iteration=0)
            >>> components.precision[0, 0, 0, 0, 0, 0].item(), components.logit.shape
            (2.0, torch.Size([2, 16, 5, 5]))
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
