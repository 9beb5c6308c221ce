"""The losses of the two papers, and schedules for the margin of the spread loss."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tritoncaps import functional
from tritoncaps._internal.checks import check_positive, refuse_script
from tritoncaps.capsules import Capsules

PATIENCE = 1000  # training steps without a call of set_step before a warning


@dataclass(frozen=True)
class LinearMargin:
    """A margin that grows linearly from ``start`` to ``end`` in ``steps`` training steps (Hinton et al. 2018).

    Args:
        steps: training steps until the margin is ``end``.
        start: the margin at step 0.
        end: the margin from step ``steps`` on.

    Raises:
        ValueError: if ``steps`` is below 1.

    Example:
        >>> from tritoncaps import LinearMargin
        >>> LinearMargin(steps=100, start=0.0, end=1.0)(50)
        0.5
    """

    steps: int = 50_000
    start: float = 0.2
    end: float = 0.9

    def __post_init__(self) -> None:
        check_positive(steps=self.steps)

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(max(step / self.steps, 0.0), 1.0)


@dataclass(frozen=True)
class SigmoidMargin:
    """The margin 0.2 + 0.79 sigmoid(min(10, step / steps - 4)), the schedule in the authors' own code.

    Args:
        steps: scale of the training steps; 50,000 in the authors' code.

    Raises:
        ValueError: if it is below 1.

    Example:
        >>> from tritoncaps import SigmoidMargin
        >>> round(SigmoidMargin(steps=100)(400), 3)
        0.595
    """

    steps: int = 50_000

    def __post_init__(self) -> None:
        check_positive(steps=self.steps)

    def __call__(self, step: int) -> float:
        return 0.2 + 0.79 / (1 + math.exp(-min(10.0, step / self.steps - 4)))


class SpreadLoss(nn.Module):
    """Spread loss (Hinton et al. 2018): the sum over the wrong classes i of max(0, margin - (a_t - a_i))^2.

    Call ``loss.set_step(step)`` in every training step; the buffer ``margin`` holds the current margin. Without these
    calls the margin does not grow. The loss warns about that after 1,000 training steps, unless it is compiled.

    Args:
        schedule: a function that returns the margin of a step, or a constant margin; default ``LinearMargin()``.

    Shape:
        - capsules: with activations [N, classes], or these alone; labels: [N]
        - result: a scalar

    Raises:
        ValueError: if a label is not the index of a class.

    Example:
        >>> from tritoncaps import LinearMargin, SpreadLoss
        >>> loss = SpreadLoss(LinearMargin(steps=1000))
        >>> loss.set_step(500)
        >>> round(loss.margin.item(), 2)
        0.55
    """

    margin: Tensor

    __prepare_scriptable__ = refuse_script

    def __init__(self, schedule: Callable[[int], float] | float | None = None) -> None:
        super().__init__()
        self.schedule = LinearMargin() if schedule is None else schedule
        self.register_buffer("margin", torch.tensor(self._margin_at(0)), persistent=False)
        self._calls_without_step: int | None = 0 if callable(self.schedule) else None  # None: no longer counted

    def set_step(self, step: int) -> None:
        """Set the margin to that of a training step.

        Args:
            step: number of the training step, from 0 on.
        """
        self.margin.fill_(self._margin_at(step))
        self._calls_without_step = None

    def forward(self, capsules: Capsules | Tensor, labels: Tensor) -> Tensor:
        """The loss of ``capsules``, with activations [N, classes], or of the activations alone; labels [N]."""
        if not torch.compiler.is_compiling() and self.training and torch.is_grad_enabled():
            self._warn_without_step()
        return functional.spread_loss(_activations(capsules), labels, self.margin)

    def _warn_without_step(self) -> None:
        if self._calls_without_step is None:
            return
        self._calls_without_step += 1
        if self._calls_without_step == PATIENCE:
            self._calls_without_step = None
            warnings.warn(
                f"SpreadLoss has been called {PATIENCE} times with the margin {self.margin.item():.2g} of step 0: "
                "call loss.set_step(step) in each training step, or give a number as its schedule",
                stacklevel=4,
            )

    def extra_repr(self) -> str:
        return f"schedule={self.schedule}"

    def _margin_at(self, step: int) -> float:
        return self.schedule(step) if callable(self.schedule) else float(self.schedule)


class MarginLoss(nn.Module):
    """Margin loss (Sabour et al. 2017). Several classes may be present in an image.

    It is the sum over the classes of T max(0, upper - a)^2 + down_weight (1 - T) max(0, a - lower)^2, where T is 1 for
    the classes that are present, and 0 for the others.

    Args:
        upper: present classes have no loss from this activation on.
        lower: absent classes have no loss up to this activation.
        down_weight: weight of the absent classes.

    Shape:
        - capsules: with activations [N, classes], or these alone; labels: [N], or multi-hot [N, classes]
        - result: a scalar

    Raises:
        ValueError: if a label is not the index of a class.

    Example:
        >>> import torch
        >>> from tritoncaps import MarginLoss
        >>> MarginLoss()(torch.tensor([[0.95, 0.05]]), torch.tensor([0]))
        tensor(0.)
    """

    __prepare_scriptable__ = refuse_script

    def __init__(self, upper: float = 0.9, lower: float = 0.1, down_weight: float = 0.5) -> None:
        super().__init__()
        self.upper, self.lower, self.down_weight = upper, lower, down_weight

    def forward(self, capsules: Capsules | Tensor, labels: Tensor) -> Tensor:
        """The loss of ``capsules``, with activations [N, classes], or of the activations alone; labels [N] or multi-hot
        [N, classes]."""
        return functional.margin_loss(_activations(capsules), labels, self.upper, self.lower, self.down_weight)

    def extra_repr(self) -> str:
        return f"upper={self.upper}, lower={self.lower}, down_weight={self.down_weight}"


def _activations(capsules: Capsules | Tensor) -> Tensor:
    return capsules if isinstance(capsules, Tensor) else capsules[1]
