"""Adversarial images: the fast gradient sign method and the basic iterative method, on any classifier.

A classifier is a function of images [N, C, H, W] that gives scores [N, classes] or Capsules of the classes: a network,
or a function that prepares pixels for a network, so that epsilon is in units of the pixels.

>>> from tritoncaps import attacks
>>> changed = attacks.bim(network, images, labels, epsilon=0.1, steps=10)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tritoncaps._internal.checks import check_number, check_positive, check_shape, check_tensor
from tritoncaps.capsules import Capsules
from tritoncaps.regularization import LOGIT_EPSILON

Classifier = Callable[[Tensor], "Capsules | Tensor"]
Loss = Callable[["Capsules | Tensor", Tensor], Tensor]
Bounds = tuple[float, float]

PIXELS: Bounds = (0.0, 1.0)


class GradientSize(NamedTuple):
    """Of the loss by the pixels: the share that is exactly zero, and the mean of the absolute values.

    An attack by gradients finds nothing where they vanish, so both are to be looked at before a classifier is called
    robust (Hinton 2018, section 5.2).
    """

    zeros: float
    mean: float


def fgsm(
    classifier: Classifier,
    images: Tensor,
    labels: Tensor,
    epsilon: float,
    *,
    targeted: bool = False,
    bounds: Bounds | None = PIXELS,
    loss: Loss | None = None,
) -> Tensor:
    """The fast gradient sign method (Goodfellow et al. 2015): every pixel moves by ``epsilon``, where its gradient is
    not zero, so that the loss grows.

    ``targeted``: ``labels`` are the classes that the images are to be taken for, and the loss shrinks.
    ``bounds``: pixels are clipped to these; None: not clipped.
    ``loss``: of the classifier's outputs and the labels; default: :func:`cross_entropy`.
    """
    _check(images, labels, epsilon, bounds)
    direction = -1.0 if targeted else 1.0
    moved = images + direction * epsilon * gradient(classifier, images, labels, loss).sign()
    return _clip(moved, bounds)


def bim(
    classifier: Classifier,
    images: Tensor,
    labels: Tensor,
    epsilon: float,
    *,
    steps: int = 10,
    step_size: float | None = None,
    targeted: bool = False,
    bounds: Bounds | None = PIXELS,
    loss: Loss | None = None,
) -> Tensor:
    """The basic iterative method (Kurakin et al. 2017): ``steps`` small steps of :func:`fgsm`; after each, every pixel
    is brought back to at most ``epsilon`` from where it was.

    ``step_size``: of one step; default: 1.25 ``epsilon`` / ``steps``, so that a pixel can reach the edge.
    The other arguments are those of :func:`fgsm`.
    """
    _check(images, labels, epsilon, bounds)
    check_positive(steps=steps)
    size = 1.25 * epsilon / steps if step_size is None else step_size
    moved = images
    for _ in range(steps):
        moved = fgsm(classifier, moved, labels, size, targeted=targeted, bounds=None, loss=loss)
        moved = _clip(moved.clamp(min=images - epsilon, max=images + epsilon), bounds)
    return moved


def gradient(classifier: Classifier, images: Tensor, labels: Tensor, loss: Loss | None = None) -> Tensor:
    """Of each image's own loss, by its pixels: [N, C, H, W]. Parameters of the classifier get none."""
    images = images.detach().requires_grad_()
    with torch.enable_grad():
        mean = (cross_entropy if loss is None else loss)(classifier(images), labels)
        return torch.autograd.grad(mean * len(images), images)[0]


def gradient_size(gradients: Tensor) -> GradientSize:
    """What :func:`gradient` gave, in two numbers."""
    return GradientSize((gradients == 0).float().mean().item(), gradients.abs().mean().item())


def cross_entropy(outputs: Capsules | Tensor, labels: Tensor) -> Tensor:
    """Of scores; of capsules, of the logits of their activations, whose gradient does not vanish like a sigmoid's."""
    scores = outputs if isinstance(outputs, Tensor) else torch.logit(outputs[1], LOGIT_EPSILON)
    return F.cross_entropy(scores, labels)


def _clip(images: Tensor, bounds: Bounds | None) -> Tensor:
    return images if bounds is None else images.clamp(*bounds)


def _check(images: Tensor, labels: Tensor, epsilon: float, bounds: Bounds | None) -> None:
    check_tensor("images", images)
    check_shape("images", images, ["N", "C", "H", "W"])
    check_shape("labels", labels, [len(images)])
    check_number("epsilon", epsilon, 0.0)
    if bounds is not None and len(images) and not bounds[0] <= images.min() <= images.max() <= bounds[1]:
        raise ValueError(
            f"images must lie within bounds {bounds}, but they run from {images.min():.3g} to {images.max():.3g}: "
            "give the bounds of your pixels, or None"
        )
