"""The networks of the papers."""

from tritoncaps.models import baselines
from tritoncaps.models.capsnet import CapsNet, Decoder
from tritoncaps.models.matrix_capsnet import MatrixCapsNet
from tritoncaps.models.tiny_capsnet import TinyCapsNet

__all__ = ["CapsNet", "Decoder", "MatrixCapsNet", "TinyCapsNet", "baselines"]
