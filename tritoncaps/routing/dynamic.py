"""Routing by agreement (Sabour, Frosst and Hinton 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tritoncaps.capsules import Capsules
from tritoncaps.routing.base import LayerSizes, NewParameter, VectorRouting, check_choice, check_iterations
from tritoncaps.routing.mixture import Gradient
from tritoncaps.routing_map import RoutingMap


@dataclass(frozen=True)
class DynamicRouting(VectorRouting):
    """Routing by agreement of vector capsules (Sabour, Frosst and Hinton 2017).

    Args:
        iterations: number of weighted sums of the votes; between two sums, the logits grow by the agreements.
        competition: "global": all parents of a child compete for it. "local": only the types at one position compete.
        none_of_the_above: add a parent with logit zero to the softmax. It has no output.
        gradient: "all": gradients flow through every iteration. "last": the agreements are constants.
        priors: learn the initial logits, the parameter ``priors`` [*kernel_size, in_caps, out_caps] of a layer.
            Default: they are zero.

    Raises:
        ValueError: if an option is unknown or out of its range.

    Example:
        >>> import torch
        >>> from tritoncaps import DynamicRouting, VectorCaps
        >>> layer = VectorCaps(32, 8, 10, 16, routing=DynamicRouting(iterations=2, gradient="last"))
        >>> layer(torch.randn(4, 32, 8)).activations.shape
        torch.Size([4, 10])
    """

    iterations: int = 3
    competition: Literal["global", "local"] = "global"
    none_of_the_above: bool = False
    gradient: Gradient = "all"
    priors: bool = False

    def __post_init__(self) -> None:
        check_iterations(self.iterations)
        check_choice("competition", self.competition, ("global", "local"))
        check_choice("gradient", self.gradient, ("all", "last"))

    def new_parameters(self, layer: LayerSizes) -> dict[str, NewParameter]:
        priors = {"priors": NewParameter((*layer.weights, layer.in_caps, layer.out_caps))} if self.priors else {}
        return super().new_parameters(layer) | priors

    def route(
        self,
        capsules: Capsules,
        weight: Tensor,
        parameters: Mapping[str, Tensor],
        routing_map: RoutingMap,
        backend: str | None = None,
    ) -> Capsules:
        from tritoncaps import functional

        priors = parameters["priors"].reshape(weight.shape[:3]) if self.priors else None
        poses = functional.dynamic_routing(capsules.poses, weight, routing_map, self, priors, backend)
        return functional.with_lengths(poses)
