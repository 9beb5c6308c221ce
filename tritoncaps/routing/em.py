"""EM routing (Hinton, Sabour and Frosst 2018)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from tritoncaps.capsules import Capsules
from tritoncaps.routing.base import LayerSizes, NewParameter, check_range
from tritoncaps.routing.mixture import Components, MixtureRouting, Moments, of_types, sum_of_entries
from tritoncaps.routing_map import RoutingMap

# Initial beta_u for each kind of layer. With it, about half of the capsules are active, for poses of scale one.
BETA_U = {"conv": 0.55, "class": 0.75}


@dataclass(frozen=True)
class EMRouting(MixtureRouting):
    """EM routing of matrix capsules (Hinton, Sabour and Frosst 2018, with Gritzman's 2019 corrections).

    Args:
        iterations: number of M-steps. There is an E-step between two M-steps.
        final_lambda: the limit of the inverse temperature lambda_t = final_lambda * (1 - lambda_decay^t).
            Default: 1 with ``mean_data``, 0.01 without.
        lambda_decay: decay of the difference to the limit; with a larger value, lambda_t grows more slowly.
        variance_floor: smallest variance of a parent's Gaussian; smaller variances are clamped to it.
        mean_data: divide the support of a parent by its mean in the layer, children / parents, so that the sigmoid
            does not saturate in layers with many votes.
        competition: "global": all parents of a child, of all types and positions, compete for it. "local": only the
            types at one position compete, separately for every position. "positions": only the positions of one type
            compete, separately for every type; in `ClassCaps`, which has one position, nothing competes.
        gradient: "all": gradients flow through every iteration. "last": the last assignments are constants.

    Raises:
        ValueError: if an option is unknown or out of its range.

    Example:
        >>> from tritoncaps import EMRouting
        >>> [round(x, 4) for x in EMRouting(iterations=3).lambdas]
        [0.05, 0.0975, 0.1426]
    """

    parameter_names: ClassVar[tuple[str, ...]] = ("beta_u", "beta_a")

    final_lambda: float | None = None
    lambda_decay: float = 0.95
    variance_floor: float = 1e-4
    mean_data: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.final_lambda is None:
            object.__setattr__(self, "final_lambda", 1.0 if self.mean_data else 0.01)
        check_range("final_lambda", self.final_lambda, 0.0, float("inf"))
        check_range("lambda_decay", self.lambda_decay, 0.0, 1.0)
        check_range("variance_floor", self.variance_floor, 0.0, float("inf"))

    @property
    def lambdas(self) -> tuple[float, ...]:
        """The inverse temperature of each iteration."""
        assert self.final_lambda is not None
        return tuple(self.final_lambda * (1 - self.lambda_decay**t) for t in range(1, self.iterations + 1))

    def new_parameters(self, layer: LayerSizes) -> dict[str, NewParameter]:
        beta_u = partial(nn.init.constant_, val=BETA_U.get(layer.kind, BETA_U["conv"]))
        return super().new_parameters(layer) | {"beta_u": NewParameter((layer.out_caps,), beta_u)}

    def fit(self, moments: Moments, parameters: Mapping[str, Tensor], iteration: int) -> Components:
        """The M-step, and the constants of the next E-step.

        cost_j = sum_h (beta_u_j + 1/2 log variance_jh) S_j / mean_data,   logit_j = lambda_t (beta_a_j - cost_j)
        log_weight_j = log a_j - 1/2 sum_h log(2 pi variance_jh)
        """
        support, mean, variance, data_per_parent = moments
        beta_u, beta_a = (of_types(parameters[name], support) for name in self.parameter_names)
        variance = variance.clamp(min=self.variance_floor)
        log_variance = sum_of_entries(variance.log())
        cost = (16 * beta_u + 0.5 * log_variance) * support / (data_per_parent if self.mean_data else 1.0)
        logit = self.lambdas[iteration] * (beta_a - cost)
        log_weight = F.logsigmoid(logit) - 0.5 * (log_variance + 16 * math.log(2 * math.pi))
        return Components(mean, variance.reciprocal(), log_weight, logit)

    def route(
        self,
        capsules: Capsules,
        weight: Tensor,
        parameters: Mapping[str, Tensor],
        routing_map: RoutingMap,
        backend: str | None = None,
    ) -> Capsules:
        from tritoncaps import functional

        functional.check_names(type(self), ("beta_u", "beta_a"), parameters)
        beta_u, beta_a = parameters["beta_u"], parameters["beta_a"]
        return functional.em_routing(*capsules, weight, beta_u, beta_a, routing_map, self, backend)
