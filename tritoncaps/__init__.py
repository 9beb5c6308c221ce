"""tritoncaps: capsule layers for PyTorch whose kernels never store a vote."""

from tritoncaps import functional, reference
from tritoncaps.capsules import Capsules, Gaussians
from tritoncaps.kernels.common.backends import use_backend
from tritoncaps.layers import ClassCaps, ConvCaps1d, ConvCaps2d, ConvCaps3d, PrimaryCaps
from tritoncaps.losses import LinearMargin, MarginLoss, SigmoidMargin, SpreadLoss
from tritoncaps.routing import DynamicRouting, EMRouting
from tritoncaps.routing_map import RoutingMap
from tritoncaps.vector_layers import ConvVectorCaps2d, VectorCaps, VectorPrimaryCaps
from tritoncaps.version import __version__

__all__ = [
    "Capsules",
    "ClassCaps",
    "ConvCaps1d",
    "ConvCaps2d",
    "ConvCaps3d",
    "ConvVectorCaps2d",
    "DynamicRouting",
    "EMRouting",
    "Gaussians",
    "LinearMargin",
    "MarginLoss",
    "PrimaryCaps",
    "RoutingMap",
    "SigmoidMargin",
    "SpreadLoss",
    "VectorCaps",
    "VectorPrimaryCaps",
    "__version__",
    "functional",
    "reference",
    "use_backend",
]
