"""Adversarial images, compared with gradients that are computed by hand."""

import pytest
import torch

from tritoncaps import Capsules, attacks

WEIGHT = torch.tensor([[1.0, -2.0, 0.0, 0.0], [-1.0, 1.0, 0.0, 0.0]])  # two classes, four pixels


def linear(images):
    return images.flatten(1) @ WEIGHT.T


def picture(*pixels):
    return torch.tensor(pixels).view(1, 1, 2, 2)


def test_gradient_of_a_linear_classifier():
    """d/dx of -log softmax: sum over classes of (p_c - [c is the label]) W_c, by hand."""
    image, label = picture(0.5, 0.25, 0.5, 0.5), torch.tensor([0])
    p = torch.softmax(WEIGHT @ image.flatten(), 0)
    expected = (p[0] - 1) * WEIGHT[0] + p[1] * WEIGHT[1]
    found = attacks.gradient(linear, image, label)
    torch.testing.assert_close(found.flatten(), expected)
    assert attacks.gradient_size(found) == (0.5, pytest.approx(expected.abs().mean().item()))


def test_gradients_are_those_of_each_image_alone():
    images, labels = torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 0])
    alone = [attacks.gradient(linear, images[i : i + 1], labels[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(attacks.gradient(linear, images, labels), torch.cat(alone))


def test_fgsm_moves_every_pixel_by_the_sign():
    """W_1 - W_0 = (-2, 3, 0, 0): for label 0 the loss grows along it, and pixels 2 and 3 have no gradient."""
    image = picture(0.5, 0.5, 0.5, 0.5)
    moved = attacks.fgsm(linear, image, torch.tensor([0]), 0.25)
    torch.testing.assert_close(moved, picture(0.25, 0.75, 0.5, 0.5))
    targeted = attacks.fgsm(linear, image, torch.tensor([0]), 0.25, targeted=True)
    torch.testing.assert_close(targeted, picture(0.75, 0.25, 0.5, 0.5))


def test_pixels_stay_within_bounds():
    image, label = picture(0.1, 0.9, 0.5, 0.5), torch.tensor([0])
    torch.testing.assert_close(attacks.fgsm(linear, image, label, 0.25), picture(0.0, 1.0, 0.5, 0.5))
    free = attacks.fgsm(linear, image, label, 0.25, bounds=None)
    torch.testing.assert_close(free, picture(-0.15, 1.15, 0.5, 0.5))
    assert attacks.bim(linear, image, label, 0.25).aminmax() == (0.0, 1.0)


@pytest.fixture
def curved():
    """A classifier whose gradients change their signs from step to step."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    ).eval()


def test_bim_stays_within_epsilon_and_beats_fgsm(curved):
    images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 4
    few, many = attacks.fgsm(curved, images, labels, 0.1), attacks.bim(curved, images, labels, 0.1, steps=10)
    assert 0.09 < (many - images).abs().max() <= 0.1 + 1e-6
    losses = [attacks.cross_entropy(curved(x), labels).item() for x in (images, few, many)]
    assert losses[0] < losses[1] < losses[2]


def test_one_step_of_the_size_of_epsilon_is_fgsm(curved):
    images, labels = torch.rand(5, 1, 8, 8), torch.arange(5) % 4
    once = attacks.bim(curved, images, labels, 0.1, steps=1, step_size=0.1)
    torch.testing.assert_close(once, attacks.fgsm(curved, images, labels, 0.1))


def test_targeted_moves_towards_the_target(curved):
    images, target = torch.rand(20, 1, 8, 8), torch.full((20,), 3)
    moved = attacks.bim(curved, images, target, 0.2, targeted=True)
    before, after = (curved(x).softmax(1)[:, 3] for x in (images, moved))
    assert (after > before).all()
    assert (curved(moved).argmax(1) == 3).float().mean() > (curved(images).argmax(1) == 3).float().mean()


def test_capsules_are_attacked_by_the_logits_of_their_activations():
    """softmax(logit(sigmoid(x))) = softmax(x)."""
    image, label = picture(0.5, 0.25, 0.5, 0.5), torch.tensor([0])

    def capsules(images):
        return Capsules(torch.zeros(1, 2, 4, 4), torch.sigmoid(linear(images)))

    torch.testing.assert_close(attacks.gradient(capsules, image, label), attacks.gradient(linear, image, label))


def test_parameters_get_no_gradient(curved):
    attacks.bim(curved, torch.rand(2, 1, 8, 8), torch.tensor([0, 1]), 0.1, steps=2)
    with torch.no_grad():
        assert attacks.fgsm(curved, torch.rand(2, 1, 8, 8), torch.tensor([0, 1]), 0.1).requires_grad is False
    assert all(parameter.grad is None for parameter in curved.parameters())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epsilon": -1.0}, "epsilon must be a number of at least 0"),
        ({"images": torch.full((1, 1, 2, 2), 200.0)}, "images must be within bounds"),
        ({"images": torch.rand(2, 2)}, r"images must have shape \[N, C, H, W\]"),
        ({"labels": torch.tensor([0, 1])}, r"labels must have shape \[1\]"),
    ],
)
def test_bad_input(changes, sentence):
    given = {"images": torch.rand(1, 1, 2, 2), "labels": torch.tensor([0]), "epsilon": 0.1, **changes}
    with pytest.raises(ValueError, match=sentence):
        attacks.fgsm(linear, **given)
