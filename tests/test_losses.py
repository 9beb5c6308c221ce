"""The losses, compared with results that are computed by hand, and their schedules."""

import pickle

import pytest
import torch

from tritoncaps import Capsules, LinearMargin, MarginLoss, SigmoidMargin, SpreadLoss


def test_spread_loss_by_hand():
    activations = torch.tensor([[0.6, 0.5, 0.1], [0.2, 0.9, 0.8]])
    # image 0, class 0: (0.5 - 0.1)^2 + 0; image 1, class 2: 0 + (0.5 - (-0.1))^2
    expected = (0.4**2 + 0.6**2) / 2
    loss = SpreadLoss(0.5)
    assert loss(activations, torch.tensor([0, 2])).item() == pytest.approx(expected)
    capsules = Capsules(torch.zeros(2, 3, 4, 4), activations)
    assert loss(capsules, torch.tensor([0, 2])).item() == pytest.approx(expected)


def test_margin_loss_by_hand():
    activations = torch.tensor([[0.8, 0.3, 0.05]])
    # present: (0.9 - 0.8)^2; absent: 0.5 (0.3 - 0.1)^2
    expected = 0.1**2 + 0.5 * 0.2**2
    assert MarginLoss()(activations, torch.tensor([0])).item() == pytest.approx(expected)


def test_margin_loss_of_two_digits():
    activations = torch.tensor([[0.8, 0.3, 0.5]])
    both = torch.tensor([[1, 1, 0]])
    expected = 0.1**2 + 0.6**2 + 0.5 * 0.4**2
    assert MarginLoss()(activations, both).item() == pytest.approx(expected)


def test_margins_follow_their_schedules():
    loss = SpreadLoss(LinearMargin(steps=100))
    margins = []
    for step in (0, 50, 100, 1000):
        loss.set_step(step)
        margins.append(loss.margin.item())
    assert margins == pytest.approx([0.2, 0.55, 0.9, 0.9])
    schedule = SigmoidMargin()
    assert schedule(200_000) == pytest.approx(0.2 + 0.79 / 2)
    assert schedule(10**9) == pytest.approx(0.99, abs=1e-4)


@pytest.mark.parametrize(
    ("loss", "step", "training", "grad", "warnings"),
    [
        (SpreadLoss(), False, True, True, 1),
        (SpreadLoss(), True, True, True, 0),
        (SpreadLoss(0.5), False, True, True, 0),
        (SpreadLoss(), False, False, True, 0),
        (SpreadLoss(), False, True, False, 0),
    ],
    ids=["forgotten", "called", "a number", "evaluation", "no gradient"],
)
def test_a_forgotten_step_is_told_once(loss, step, training, grad, warnings, recwarn):
    loss.train(training)
    activations = torch.rand(1, 2, requires_grad=True)
    with torch.set_grad_enabled(grad):
        for i in range(1500):
            if step:
                loss.set_step(i)
            loss(activations, torch.tensor([0]))
    told = [str(warning.message) for warning in recwarn if "set_step" in str(warning.message)]
    assert len(told) == warnings
    assert all("1000 times with the margin 0.2 of step 0" in message for message in told)


def test_losses_are_modules():
    loss = SpreadLoss()
    assert not list(loss.parameters())
    assert not loss.state_dict()
    assert pickle.loads(pickle.dumps(loss)).margin == loss.margin
    assert "LinearMargin(steps=50000" in repr(loss)


def test_losses_of_an_empty_batch_are_zero():
    for loss in (SpreadLoss(), MarginLoss()):
        assert loss(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)) == 0


@pytest.mark.parametrize(
    ("loss", "activations", "labels", "sentence"),
    [
        (
            SpreadLoss(),
            torch.zeros(2, 3),
            torch.zeros(3, dtype=torch.long),
            r"labels must have shape \[2\] or \[2, 3\]",
        ),
        (SpreadLoss(), torch.zeros(2, 3), torch.zeros(2), "labels of shape .N. must be whole numbers"),
        (
            SpreadLoss(),
            torch.zeros(2, 3),
            torch.zeros(2, 3),
            r"labels must have shape \[2\], but it has \[2, 3\]",
        ),
        (
            MarginLoss(),
            torch.zeros(2, 3, 4),
            torch.zeros(2).long(),
            r"activations must have shape \[N, classes\]",
        ),
        (MarginLoss(), torch.zeros(2, 3), [0, 1], "labels must be a tensor, but it is a list"),
    ],
)
def test_wrong_labels_are_refused(loss, activations, labels, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        loss(activations, labels)
