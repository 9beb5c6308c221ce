"""CapsNet and its decoder: parameter counts, shapes, masks, learning."""

import pytest
import torch

from tritoncaps import Capsules, DynamicRouting, MarginLoss
from tritoncaps.models import CapsNet, Decoder
from tritoncaps.training import networks


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: CapsNet(decoder=False), 6_804_224),
        (lambda: CapsNet(), 8_215_568),
        (lambda: CapsNet.multi_mnist(), 11_361_808),
        # primary capsules: 64 types with 8 entries at 4x4 positions, 32 with 8 at 8x8, 16 with 6 at 8x8
        (lambda: CapsNet.cifar10(decoder=False), (243 + 1) * 256 + (20_736 + 1) * 512 + 1024 * 10 * 128),
        (lambda: CapsNet.small_norb(decoder=False), (162 + 1) * 256 + (20_736 + 1) * 256 + 2048 * 5 * 128),
        (lambda: CapsNet.svhn(decoder=False), (243 + 1) * 64 + (5_184 + 1) * 96 + 1024 * 10 * 48),
    ],
)
def test_parameter_counts(build, count):
    assert sum(p.numel() for p in build().parameters()) == count


def tiny_capsnet(**kwargs):
    return CapsNet(channels=4, primary_caps=2, primary_dim=4, class_dim=6, **kwargs)


def test_capsnet_gives_capsules_and_draws_them():
    model = tiny_capsnet()
    images = torch.rand(3, 1, 28, 28)
    capsules = model(images)
    assert capsules.poses.shape == (3, 10, 6)
    torch.testing.assert_close(capsules.activations, capsules.poses.norm(dim=-1))
    labels = torch.tensor([3, 1, 4])
    drawn = model.reconstruct(capsules, labels)
    assert drawn.shape == images.shape
    ((drawn - images) ** 2).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_decoder_sees_one_capsule_at_a_time():
    decoder = Decoder(5, 4, 1, 6)
    poses = torch.randn(3, 5, 4)
    capsules = Capsules(poses, poses.norm(dim=-1))
    longest = capsules.activations.argsort(dim=1, descending=True)
    with torch.no_grad():
        assert torch.equal(decoder(capsules), decoder(capsules, longest[:, 0]))
        both = decoder(capsules, count=2)
        assert both.shape == (3, 2, 1, 6, 6)
        torch.testing.assert_close(both, decoder(capsules, longest[:, :2]))
        torch.testing.assert_close(both[:, 1], decoder(capsules, longest[:, 1]))
        other = poses.clone()
        other[:, 2] += 1
        mine = torch.tensor([0, 1, 3])  # capsule 2 is masked out
        assert torch.equal(decoder(capsules, mine), decoder(Capsules(other, capsules.activations), mine))
    masked = decoder.masked(poses, mine)
    assert torch.equal(masked[1, 1], poses[1, 1])
    assert masked.any(dim=-1).sum() == 3


@pytest.mark.parametrize("data", ["cifar10", "svhn", "mnist"])
def test_every_capsnet_takes_the_iterations(data):
    model = networks.build("capsnet", networks.Task(data, 3, 24, 24, 10), iterations=1)
    assert model.class_caps.routing == DynamicRouting(1, none_of_the_above=data == "cifar10")


def test_cifar_has_a_parent_that_is_none_of_the_above():
    assert CapsNet.cifar10(channels=4, primary_caps=2).class_caps.routing.none_of_the_above


def test_capsnet_learns_a_fixed_batch():
    torch.manual_seed(0)
    model = tiny_capsnet(num_classes=5, decoder=False)
    images, labels = torch.randn(20, 1, 28, 28), torch.arange(20) % 5
    loss = MarginLoss()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        value = loss(model(images), labels)
        value.backward()
        optimiser.step()
        losses.append(value.item())
    assert losses[-1] < 0.5 * losses[0], losses[::10]
