"""Writes a run for TensorBoard, if it is installed: curves, weights, the confusion matrix, and misclassified images."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritoncaps.data import ImageSet, MultiMNIST
from tritoncaps.training.evaluation import Evaluation

SHOWN = 16  # misclassified images


class Board:
    """Writes scalars at any step, and histograms and images at evaluations. Without TensorBoard it does nothing."""

    def __init__(self, folder: Path) -> None:
        self._writer = _writer(folder)

    def add_scalars(self, kind: str, step: int, numbers: dict[str, Any]) -> None:
        if self._writer is not None:
            for name, value in numbers.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)

    def add_evaluation(
        self, kind: str, step: int, network: nn.Module, data: ImageSet | MultiMNIST, evaluation: Evaluation
    ) -> None:
        """Write histograms of the weights, the first misclassified images, and the confusion matrix."""
        if self._writer is None:
            return
        for name, weight in network.named_parameters():
            self._writer.add_histogram(f"weights/{name}", weight.detach().float().cpu(), step)
        wrong = torch.nonzero(~evaluation.right).flatten()[:SHOWN].tolist()
        if wrong:
            images = data.__getitems__(wrong)[0]
            self._writer.add_images(f"{kind}/wrong", images if images.shape[1] == 3 else images[:, :1], step)
        if evaluation.confusion is not None and find_spec("matplotlib"):
            from tritoncaps.training.pictures import confusion_figure  # imported here to avoid a circular import

            figure = confusion_figure(evaluation.confusion.numpy(), data.classes)
            self._writer.add_figure(f"{kind}/confusion", figure, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
