"""The networks of the papers."""

from tritoncaps.models import baselines
from tritoncaps.models.capsnet import CapsNet, Decoder
from tritoncaps.models.efficient_capsnet import EfficientCapsNet
from tritoncaps.models.matrix_capsnet import MatrixCapsNet
from tritoncaps.models.tiny_capsnet import TinyCapsNet

__all__ = ["CapsNet", "Decoder", "EfficientCapsNet", "MatrixCapsNet", "TinyCapsNet", "baselines"]
