"""Self-attention routing of vector capsules (Mazzia, Salvetti and Chiaberge 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from einops import einsum
from torch import Tensor

from tritoncaps.capsules import Capsules
from tritoncaps.routing.base import LayerSizes, NewParameter, VectorRouting
from tritoncaps.routing_map import RoutingMap


@dataclass(frozen=True)
class SelfAttentionRouting(VectorRouting):
    """The routing of Efficient-CapsNet (Mazzia, Salvetti and Chiaberge 2021): one pass, without iterations.

    A vote counts more if it agrees with the other votes for the same parent. With votes v_ij of E entries:

        c_ij = softmax over the types j of (v_ij . sum_k v_kj / sqrt(E)) + prior_ij
        s_j = sum_i c_ij v_ij      pose_j = (1 - exp(-|s_j|)) s_j / |s_j|

    The priors are the parameter ``priors`` [*kernel_size, in_caps, out_caps] of a layer, zero at the start. This
    routing stores votes, in plain torch: it is for layers with few capsules.

    Example:
        >>> import torch
        >>> from tritoncaps import SelfAttentionRouting, VectorCaps
        >>> layer = VectorCaps(16, 8, 10, 16, routing=SelfAttentionRouting())
        >>> layer(torch.randn(4, 16, 8)).activations.shape
        torch.Size([4, 10])
    """

    def new_parameters(self, layer: LayerSizes) -> dict[str, NewParameter]:
        priors = NewParameter((*layer.weights, layer.in_caps, layer.out_caps))
        return super().new_parameters(layer) | {"priors": priors}

    def route(
        self,
        capsules: Capsules,
        weight: Tensor,
        parameters: Mapping[str, Tensor],
        routing_map: RoutingMap,
        backend: str | None = None,
    ) -> Capsules:
        from tritoncaps import functional

        votes = functional.vector_votes(capsules.poses, weight, routing_map)  # [N, P, S, B, C, E], zero if missing
        total = votes.sum((2, 3))
        agreement = einsum(votes, total, "n p s b c e, n p c e -> n p s b c") / votes.shape[-1] ** 0.5
        block = routing_map.tables(weight.device).weight_of.long()
        priors = parameters["priors"].reshape(weight.shape[:3])[block]  # [S, B, C]
        poses = soft_squash(einsum(agreement.softmax(-1) + priors, votes, "n p s b c, n p s b c e -> n c p e"))
        return functional.with_lengths(poses.reshape(*poses.shape[:2], *routing_map.out_size, poses.shape[-1]))


def soft_squash(s: Tensor) -> Tensor:
    """(1 - exp(-|s|)) s / |s|, with its derivative at zero, the identity. Small vectors shrink less than in squash."""
    # a sum below the square of the smallest normal number would have an infinite derivative of the root
    square = (s * s).sum(-1, keepdim=True)
    tiny = square <= torch.finfo(s.dtype).tiny
    length = square.masked_fill(tiny, 1).sqrt()
    return torch.where(tiny, s, -torch.expm1(-length) / length * s)
