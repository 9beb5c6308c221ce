"""The networks of the papers."""

from tritoncaps.models import baselines
from tritoncaps.models.matrix_capsnet import MatrixCapsNet

__all__ = ["MatrixCapsNet", "baselines"]
