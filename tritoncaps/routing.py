"""The routing procedures, as small values: what a layer's ``routing`` argument takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tritoncaps.capsules import Capsules
from tritoncaps.routing_map import RoutingMap

Competition = Literal["global", "local"]
Gradient = Literal["all", "last"]


@dataclass(frozen=True)
class EMRouting:
    """EM routing of matrix capsules (Hinton, Sabour and Frosst 2018, with Gritzman's 2019 corrections).

    iterations      M-steps; an E-step stands between two of them.
    final_lambda    what the inverse temperature lambda_t = final_lambda * (1 - lambda_decay^t) tends to.
                    Default: 1 with ``mean_data``, 0.01 without.
    lambda_decay    how slowly it does.
    variance_floor  least variance of a parent's Gaussian (a clamp).
    mean_data       divide the data that a parent explains by the layer's mean, children / parents, so that
                    the logistic does not saturate in layers with many votes.
    competition     "global": all parents of a child, of all types and positions, compete for it.
                    "local": only the types at one position do, at every position anew.
    gradient        "all": through every iteration. "last": the last assignments are constants.
    """

    iterations: int = 3
    final_lambda: float | None = None
    lambda_decay: float = 0.95
    variance_floor: float = 1e-4
    mean_data: bool = True
    competition: Competition = "global"
    gradient: Gradient = "all"

    # One number per output type each; layers create them under these names.
    parameter_names = ("beta_u", "beta_a")

    def __post_init__(self) -> None:
        if self.final_lambda is None:
            object.__setattr__(self, "final_lambda", 1.0 if self.mean_data else 0.01)
        _check_iterations(self.iterations)
        _check_choice("competition", self.competition, ("global", "local"))
        _check_choice("gradient", self.gradient, ("all", "last"))
        _check_range("final_lambda", self.final_lambda, 0.0, float("inf"))
        _check_range("lambda_decay", self.lambda_decay, 0.0, 1.0)
        _check_range("variance_floor", self.variance_floor, 0.0, float("inf"))

    @property
    def lambdas(self) -> tuple[float, ...]:
        """The inverse temperature of each iteration."""
        assert self.final_lambda is not None
        return tuple(self.final_lambda * (1 - self.lambda_decay**t) for t in range(1, self.iterations + 1))

    def route(
        self,
        capsules: Capsules,
        weight: Tensor,
        parameters: Mapping[str, Tensor],
        routing_map: RoutingMap,
        backend: str | None = None,
    ) -> Capsules:
        """The parents of ``capsules``: what a layer computes."""
        from tritoncaps import functional

        return functional.em_routing(
            capsules.poses,
            capsules.activations,
            weight,
            parameters["beta_u"],
            parameters["beta_a"],
            routing_map=routing_map,
            routing=self,
            backend=backend,
        )


@dataclass(frozen=True)
class DynamicRouting:
    """Routing by agreement of vector capsules (Sabour, Frosst and Hinton 2017).

    iterations         weighted sums; the logits grow by the agreement between two of them.
    competition        "global": all parents of a child compete for it. "local": the types at one position.
    none_of_the_above  one more competitor with logit zero, which takes part in the softmax and outputs nothing.
    gradient           "all": through every iteration. "last": the agreements are constants.
    """

    iterations: int = 3
    competition: Competition = "global"
    none_of_the_above: bool = False
    gradient: Gradient = "all"

    def __post_init__(self) -> None:
        _check_iterations(self.iterations)
        _check_choice("competition", self.competition, ("global", "local"))
        _check_choice("gradient", self.gradient, ("all", "last"))


def _check_iterations(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"iterations must be a whole number of at least 1, but it is {value!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, but it is {value!r}")


def _check_range(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low < value < high:
        raise ValueError(f"{name} must be a number above {low:g} and below {high:g}, but it is {value!r}")
