"""Adversarial attacks on any classifier: the fast gradient sign method and the basic iterative method.

A classifier is a function of images [N, C, H, W] that returns scores [N, classes] or the class capsules. It may be a
network, or a function that preprocesses pixels and calls a network; then epsilon is in units of the pixels.

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
    """Size of the gradient of a loss with respect to the pixels.

    An attack by gradients fails if the gradients vanish. Look at both numbers before you call a classifier robust
    (Hinton 2018, section 5.2).

    Attributes:
        zeros: the fraction of gradients that are exactly zero.
        mean: the mean of the absolute values.
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
    """The fast gradient sign method (Goodfellow et al. 2015): change every pixel by ``epsilon`` to increase the loss.

    Pixels whose gradient is zero do not change.

    Args:
        classifier: a function from images to scores or class capsules.
        images: the images to change.
        labels: the true classes, or the target classes if ``targeted``.
        epsilon: the change of a pixel.
        targeted: decrease the loss of the target classes instead.
        bounds: smallest and largest value of a pixel; results are clipped to them. None: results are not clipped.
        loss: a function of the classifier's output and the labels; default: :func:`cross_entropy`.

    Shape:
        - images and result: [N, C, H, W], labels: [N]

    Returns:
        The changed images.

    Raises:
        ValueError: if a shape is wrong, or the images are not within the bounds.

    Example:
        >>> import torch
        >>> from tritoncaps import attacks
        >>> classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
        >>> images, labels = torch.full((2, 1, 8, 8), 0.5), torch.tensor([0, 2])
        >>> changed = attacks.fgsm(classifier, images, labels, epsilon=0.1)
        >>> round((changed - images).abs().max().item(), 3)
        0.1
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
    """The basic iterative method (Kurakin et al. 2017): several small steps of :func:`fgsm`.

    After each step, pixels that changed by more than ``epsilon`` are clipped to a change of ``epsilon``.

    Args:
        classifier: a function from images to scores or class capsules.
        images: the images to change.
        labels: the true classes, or the target classes if ``targeted``.
        epsilon: the largest change of a pixel.
        steps: number of steps.
        step_size: epsilon of one step; default: 1.25 ``epsilon`` / ``steps``.
        targeted: decrease the loss of the target classes instead.
        bounds: smallest and largest value of a pixel; results are clipped to them. None: results are not clipped.
        loss: a function of the classifier's output and the labels; default: :func:`cross_entropy`.

    Shape:
        - images and result: [N, C, H, W], labels: [N]

    Returns:
        The changed images.

    Raises:
        ValueError: if a shape is wrong, ``steps`` is below 1, or the images are not within the bounds.

    Example:
        >>> import torch
        >>> from tritoncaps import attacks
        >>> classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
        >>> images, labels = torch.full((2, 1, 8, 8), 0.5), torch.tensor([0, 2])
        >>> changed = attacks.bim(classifier, images, labels, epsilon=0.1, steps=5)
        >>> round((changed - images).abs().max().item(), 3)
        0.1
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
    """The gradient of each image's loss with respect to its pixels. The classifier's parameters get no gradient.

    Args:
        classifier: a function from images to scores or class capsules.
        images: the images.
        labels: the classes.
        loss: a function of the classifier's output and the labels; default: :func:`cross_entropy`.

    Shape:
        - images and result: [N, C, H, W], labels: [N]

    Returns:
        The gradients.

    Example:
        >>> import torch
        >>> from tritoncaps import attacks
        >>> classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
        >>> attacks.gradient(classifier, torch.rand(2, 1, 8, 8), torch.tensor([0, 2])).shape
        torch.Size([2, 1, 8, 8])
    """
    images = images.detach().requires_grad_()
    with torch.enable_grad():
        mean = (cross_entropy if loss is None else loss)(classifier(images), labels)
        return torch.autograd.grad(mean * len(images), images)[0]


def gradient_size(gradients: Tensor) -> GradientSize:
    """Summarise the result of :func:`gradient` in two numbers.

    Args:
        gradients: the gradients.

    Shape:
        - gradients: [N, C, H, W]

    Returns:
        The fraction of zeros, and the mean absolute value.

    Example:
        >>> import torch
        >>> from tritoncaps import attacks
        >>> attacks.gradient_size(torch.tensor([[[[0.0, 0.5]]]]))
        GradientSize(zeros=0.5, mean=0.25)
    """
    return GradientSize((gradients == 0).float().mean().item(), gradients.abs().mean().item())


def cross_entropy(outputs: Capsules | Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of scores, or of class capsules.

    For capsules it uses the logits of the activations, because the gradient of a sigmoid vanishes where it saturates.

    Args:
        outputs: scores, or class capsules.
        labels: the classes.

    Shape:
        - outputs: scores or activations [N, classes], labels: [N]
        - result: a scalar

    Returns:
        The loss.

    Example:
        >>> import torch
        >>> from tritoncaps import attacks
        >>> attacks.cross_entropy(torch.zeros(1, 2), torch.tensor([0]))  # log 2
        tensor(0.6931)
    """
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
            f"images must be within bounds {bounds}, but they range from {images.min():.3g} to {images.max():.3g}: "
            "pass the bounds of your pixels, or None"
        )
