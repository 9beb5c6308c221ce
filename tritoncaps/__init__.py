"""tritoncaps: capsule layers for PyTorch whose kernels never store a vote."""

from tritoncaps import functional, inspect, reference
from tritoncaps.capsules import Capsules, Gaussians
from tritoncaps.kernels.common.backends import use_backend
from tritoncaps.layers import (
    ClassCaps,
    ConvCaps1d,
    ConvCaps2d,
    ConvCaps3d,
    GraphCaps,
    PrimaryCaps,
    PrimaryCaps1d,
    PrimaryCaps3d,
)
from tritoncaps.losses import LinearMargin, MarginLoss, SigmoidMargin, SpreadLoss
from tritoncaps.regularization import CapsuleBias, CapsuleDropout, CapsuleNorm
from tritoncaps.routing import (
    Components,
    DynamicRouting,
    EMRouting,
    MatrixRouting,
    MixtureRouting,
    Moments,
    Routing,
    SelfAttentionRouting,
    TemperedEMRouting,
    VBRouting,
    VectorRouting,
)
from tritoncaps.routing_map import RoutingMap
from tritoncaps.vector_layers import ConvVectorCaps2d, VectorCaps, VectorPrimaryCaps
from tritoncaps.version import __version__

__all__ = [
    "CapsuleBias",
    "CapsuleDropout",
    "CapsuleNorm",
    "Capsules",
    "ClassCaps",
    "Components",
    "ConvCaps1d",
    "ConvCaps2d",
    "ConvCaps3d",
    "ConvVectorCaps2d",
    "DynamicRouting",
    "EMRouting",
    "Gaussians",
    "GraphCaps",
    "LinearMargin",
    "MarginLoss",
    "MatrixRouting",
    "MixtureRouting",
    "Moments",
    "PrimaryCaps",
    "PrimaryCaps1d",
    "PrimaryCaps3d",
    "Routing",
    "RoutingMap",
    "SelfAttentionRouting",
    "SigmoidMargin",
    "SpreadLoss",
    "TemperedEMRouting",
    "VBRouting",
    "VectorCaps",
    "VectorPrimaryCaps",
    "VectorRouting",
    "__version__",
    "functional",
    "inspect",
    "reference",
    "use_backend",
]
