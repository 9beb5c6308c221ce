"""Routings for table 1 of Hinton 2018 that are not part of the library itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tritoncaps import functional
from tritoncaps.capsules import Capsules, Gaussians
from tritoncaps.regularization import LOGIT_EPSILON
from tritoncaps.routing import Components, EMRouting, LayerSizes, MixtureRouting, Moments, NewParameter
from tritoncaps.routing_map import RoutingMap

ENTRIES = 16  # entries of a pose


@dataclass(frozen=True)
class MixingProportions(MixtureRouting):
    """A standard mixture of Gaussians: the activation of a parent is its mixing proportion, the part of the support at
    its position that it has. In EM routing it is a logistic function of the cost."""

    variance_floor: float = 1e-4

    def fit(self, moments: Moments, parameters: Mapping[str, Tensor], iteration: int) -> Components:
        """activation_j = S_j / (sum of S over the types at the position of j)"""
        support, mean, variance, _ = moments
        variance = variance.clamp(min=self.variance_floor)
        total = support.sum(dim=1, keepdim=True).clamp(min=torch.finfo(support.dtype).tiny)
        proportion = (support / total).clamp(LOGIT_EPSILON, 1 - LOGIT_EPSILON)
        log_density = -0.5 * (variance.log().sum((-1, -2)) + ENTRIES * math.log(2 * math.pi))
        return Components(mean, 1 / variance, proportion.log() + log_density, torch.logit(proportion))


@dataclass(frozen=True)
class FullMatrices(EMRouting):
    """EM routing of poses that are vectors of 16 entries: the transformation matrices are 16x16 instead of 4x4. It
    stores the votes."""

    def new_parameters(self, layer: LayerSizes) -> dict[str, NewParameter]:
        shape = (*layer.weights, layer.in_caps, layer.out_caps, ENTRIES, ENTRIES)
        return super().new_parameters(layer) | {"weight": NewParameter(shape, _near_identity_)}

    def route(
        self,
        capsules: Capsules,
        weight: Tensor,
        parameters: Mapping[str, Tensor],
        routing_map: RoutingMap,
        backend: str | None = None,
    ) -> Capsules:
        poses, activations = capsules
        votes = functional.vector_votes(poses.flatten(-2), weight, routing_map).unflatten(-1, (4, 4))
        votes = functional.coordinate_addition(votes, routing_map, backend)
        types, competition = weight.shape[2], self.competition
        assignments = functional.initial_assignments(activations, types, routing_map, competition)
        betas = parameters["beta_u"], parameters["beta_a"]
        gaussians: Gaussians | None = None
        for inverse_temperature in self.lambdas:
            if gaussians is not None:
                assignments = functional.e_step(votes, gaussians, routing_map, competition=competition, backend=backend)
            gaussians = functional.m_step(
                votes,
                assignments,
                activations,
                *betas,
                routing_map,
                inverse_temperature=inverse_temperature,
                variance_floor=self.variance_floor,
                mean_data=self.mean_data,
                competition=competition,
                backend=backend,
            )
        assert gaussians is not None, "there is at least one iteration"
        return Capsules(gaussians.mean, gaussians.activations)


def _near_identity_(weight: Tensor) -> Tensor:
    """Initialise the matrices near the identity. The votes have the same variance as those of the 4x4 matrices."""
    with torch.no_grad():
        torch.nn.init.normal_(weight, std=0.1)
        return weight.add_(torch.eye(ENTRIES, device=weight.device, dtype=weight.dtype))
