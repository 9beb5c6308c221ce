"""The training objective: a loss of the classes and, if the network has a decoder, of its reconstructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tritoncaps.capsules import Capsules
from tritoncaps.losses import LinearMargin, MarginLoss, SigmoidMargin, SpreadLoss
from tritoncaps.regularization import LOGIT_EPSILON


class Objective(nn.Module):
    """A network and its loss in one module, so that DistributedDataParallel also synchronises the decoder.

    ``loss`` is a name, or a function of the network's outputs and the labels.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: str | Callable[[Any, Tensor], Tensor],
        margin: str,
        margin_steps: int,
        reconstruction: float,
    ) -> None:
        super().__init__()
        self.network = network
        self.loss = _loss(loss, margin, margin_steps) if isinstance(loss, str) else loss
        draws = getattr(network, "decoder", None) is not None and hasattr(network, "reconstruct")
        self.reconstruction = reconstruction if draws else 0.0

    def set_step(self, step: int) -> None:
        """Set the step of a loss that changes during training."""
        set_step = getattr(self.loss, "set_step", None)
        if callable(set_step):
            set_step(step)

    def forward(
        self, images: Tensor, labels: Tensor, drawings: Tensor | None = None, share: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the class scores [N, classes]. ``drawings`` are the targets of the decoder: by default the
        images; in MultiMNIST, each digit alone [N, 2, C, H, W]. ``share``: weight of the labels after :func:`mix`.
        """
        outputs = self.network(images)
        loss = self.loss(outputs, labels)
        if share < 1:
            loss = share * loss + (1 - share) * self.loss(outputs, labels.flip(0))
        if self.reconstruction:
            target = images if drawings is None else drawings
            classes = labels if labels.ndim == 1 else _present(labels)
            drawn = self.network.reconstruct(outputs, classes)  # type: ignore[operator]
            loss = loss + self.reconstruction * (drawn - target).square().sum() / len(images)
        return loss, class_scores(outputs)


def mix(images: Tensor, share: float) -> Tensor:
    """Mixup (Zhang et al. 2018): mix the batch with itself in reverse order."""
    return share * images + (1 - share) * images.flip(0)


def class_scores(outputs: Capsules | Tensor) -> Tensor:
    """The activations of class capsules, or the softmax of a baseline's scores."""
    return outputs.softmax(dim=1) if isinstance(outputs, Tensor) else outputs[1]


def correct(scores: Tensor, labels: Tensor) -> Tensor:
    """Which images [N] are classified correctly: the class, or all classes of an image that has several."""
    if labels.ndim == 1:
        return scores.argmax(dim=1) == labels
    count = int(labels[0].sum()) if len(labels) else 1
    found = torch.zeros_like(labels).scatter(1, scores.topk(count, dim=1).indices, 1)
    return (found == labels).all(dim=1)


class CrossEntropy(nn.Module):
    """Cross-entropy of scores or of activations; binary cross-entropy if an image has several classes."""

    def forward(self, outputs: Capsules | Tensor, labels: Tensor) -> Tensor:
        logits = outputs if isinstance(outputs, Tensor) else outputs[1]
        if labels.ndim == 1:
            return F.cross_entropy(logits, labels)
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype)) * labels.shape[1]


class LogitCrossEntropy(CrossEntropy):
    """Cross-entropy of the logits of the activations, which are not limited to [0, 1]."""

    def forward(self, outputs: Capsules | Tensor, labels: Tensor) -> Tensor:
        return super().forward(torch.logit(outputs[1], LOGIT_EPSILON), labels)


def _loss(name: str, margin: str, steps: int) -> nn.Module:
    if name == "spread":
        schedules: dict[str, Callable[[int], float] | float]
        schedules = {"linear": LinearMargin(steps), "sigmoid": SigmoidMargin(steps), "fixed": 0.5}
        return SpreadLoss(schedules[margin])
    return {"margin": MarginLoss, "cross-entropy": CrossEntropy, "logit-cross-entropy": LogitCrossEntropy}[name]()


def _present(labels: Tensor) -> Tensor:
    """Multi-hot [N, classes] -> the classes [N, m], ascending."""
    return labels.topk(int(labels[0].sum()), dim=1).indices.sort(dim=1).values
