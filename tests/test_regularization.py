"""Capsule dropout, capsule norm, capsule bias, mixup and cross-entropy of logits, in training and in evaluation."""

import pytest
import torch

from tritoncaps import CapsuleBias, CapsuleDropout, CapsuleNorm, Capsules, ClassCaps
from tritoncaps.models import MatrixCapsNet, TinyCapsNet
from tritoncaps.training import Config, ConfigError, build
from tritoncaps.training.networks import Task
from tritoncaps.training.objective import Objective, mix
from tritoncaps.training.saved import task_by_name
from tritoncaps.training.task import build_network, loss_of


def capsules(images=4, types=3, space=(5, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    poses = torch.randn(images, types, *space, 4, 4, generator=generator)
    return Capsules(3 + 2 * poses, torch.rand(images, types, *space, generator=generator))


def test_a_share_of_the_capsules_is_silent_in_training():
    torch.manual_seed(0)
    layer, given = CapsuleDropout(0.3), capsules(images=40)
    poses, activations = layer(given)
    silent = activations == 0
    assert silent.float().mean() == pytest.approx(0.3, abs=0.05)
    assert torch.equal(activations[~silent], given.activations[~silent])  # not scaled
    assert torch.equal(poses, given.poses)
    assert all(torch.equal(a, b) for a, b in zip(layer.eval()(given), given, strict=True))


def test_a_silent_capsule_does_not_count():
    """The parents do not depend on the pose of a child with activation zero."""
    given, layer = capsules(types=4, space=(2, 2)), ClassCaps(4, 3)
    silent = torch.rand(given.activations.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    activations = given.activations * ~silent
    first = layer(Capsules(given.poses, activations))
    moved = torch.where(silent[..., None, None], given.poses + 7, given.poses)
    second = layer(Capsules(moved, activations))
    assert torch.allclose(first.poses, second.poses, atol=1e-5)
    assert torch.allclose(first.activations, second.activations, atol=1e-5)


@pytest.mark.parametrize("space", [(), (7,), (2, 3, 4)])
def test_a_bias_is_added_to_the_poses_of_each_type(space):
    layer, given = CapsuleBias(3), capsules(space=space)
    assert all(torch.equal(a, b) for a, b in zip(layer(given), given, strict=True))  # zero at the start
    with torch.no_grad():
        layer.bias[1] = torch.arange(16.0).view(4, 4)
    poses, activations = layer(given)
    assert torch.equal(activations, given.activations)
    assert torch.equal(poses[:, [0, 2]], given.poses[:, [0, 2]])
    assert torch.equal(poses[:, 1], given.poses[:, 1] + torch.arange(16.0).view(4, 4))
    with pytest.raises(ValueError, match=r"poses must have shape \[N, 3"):
        layer(capsules(types=2, space=space))


def test_only_a_bias_distinguishes_poses_from_their_negatives():
    """Without a bias, activations do not change if all poses change their signs."""
    given, bias = capsules(space=(2, 2)), CapsuleBias(3)
    torch.nn.init.normal_(bias.bias)
    layer = ClassCaps(3, 4, coordinates=False)
    negative = Capsules(-given.poses, given.activations)
    assert torch.allclose(layer(given).activations, layer(negative).activations, atol=1e-5)
    assert not torch.allclose(layer(bias(given)).activations, layer(bias(negative)).activations, atol=1e-3)


def test_votes_of_matrix_capsnets_may_have_a_bias():
    task = Task("toynorb", channels=2, height=20, width=20, classes=5)
    network = build_network(Config(vote_bias=True), task)
    names = [name for name, _ in network.named_parameters() if name.startswith("biases")]
    assert names == ["biases.0.bias", "biases.1.bias"]
    network(torch.randn(2, 2, 20, 20)).activations.sum().backward()
    assert all(bool(network.get_parameter(name).grad.any()) for name in names)
    with pytest.raises(ConfigError, match="--vote-bias is for matrix-capsnet-small and matrix-capsnet, but --model"):
        build_network(Config(model="tiny-capsnet", vote_bias=True), task)


@pytest.mark.parametrize("space", [(), (7,), (5, 5), (2, 3, 4)])
def test_each_type_and_entry_is_normalised_by_itself(space):
    layer, given = CapsuleNorm(3), capsules(images=8, space=space)
    poses, activations = layer(given)
    axes = (0, *range(2, 2 + len(space)))
    assert torch.allclose(poses.mean(dim=axes), torch.zeros(3, 4, 4), atol=1e-5)
    assert torch.allclose(poses.var(dim=axes, correction=0), torch.ones(3, 4, 4), atol=1e-3)
    logits = torch.logit(activations)
    assert torch.allclose(logits.mean(dim=axes), torch.zeros(3), atol=1e-4)
    assert torch.allclose(logits.var(dim=axes, correction=0), torch.ones(3), atol=1e-3)
    expected = (given.poses[:, 1, ..., 2, 3] - given.poses[:, 1, ..., 2, 3].mean()) / given.poses[:, 1, ..., 2, 3].std(
        correction=0
    )
    assert torch.allclose(poses[:, 1, ..., 2, 3], expected, atol=1e-4)


def test_evaluation_uses_running_statistics():
    layer = CapsuleNorm(3, momentum=1.0)
    given = capsules(images=8)
    seen = layer(given)
    one = layer.eval()(Capsules(given.poses[:1], given.activations[:1]))
    assert torch.allclose(one.poses, seen.poses[:1], atol=0.02)  # running variances are unbiased, by n / (n - 1)
    assert torch.allclose(one.activations, seen.activations[:1], atol=0.02)


def test_gradients_of_saturated_activations_are_finite():
    given = Capsules(capsules().poses, torch.tensor([0.0, 1.0, 0.5, 1e-9]).expand(4, 3, 5, 5, 4)[..., 0].clone())
    given.activations[0, 0, 0] = torch.tensor([0.0, 1.0, 0.5, 1e-9, 1.0])
    given.activations.requires_grad_()
    poses, activations = CapsuleNorm(3)(given)
    (poses.sum() + activations.square().sum()).backward()
    assert given.activations.grad.isfinite().all()


def test_one_image_is_enough_where_there_are_positions():
    assert CapsuleNorm(3)(capsules(images=1)).poses.isfinite().all()
    with pytest.raises(ValueError, match="poses must have at least two images or positions for CapsuleNorm in train"):
        CapsuleNorm(3)(capsules(images=1, space=()))
    assert CapsuleNorm(3).eval()(capsules(images=1, space=())).poses.isfinite().all()


@pytest.mark.parametrize("layer", [CapsuleNorm(3), CapsuleBias(3), CapsuleDropout()])
def test_bad_input_gets_a_sentence(layer):
    with pytest.raises(TypeError, match=r"capsules must be Capsules\(poses, activations\), but Capsule.* got a Tensor"):
        layer(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="poses must be a tensor"):
        layer((None, torch.zeros(2, 3)))


def test_bad_arguments_get_a_sentence():
    with pytest.raises(ValueError, match="p must be a number of at least 0 and below 1, but it is 1"):
        CapsuleDropout(1)
    with pytest.raises(ValueError, match="num_caps must be a whole number"):
        CapsuleNorm(0)
    with pytest.raises(ValueError, match=r"poses must have shape \[N, 3, space0, 4, 4\]"):
        CapsuleNorm(3)(capsules(types=2, space=(4,)))
    with pytest.raises(ValueError, match="image_size must be at least 9, but it is 8"):
        TinyCapsNet(1, 5, 8)
    with pytest.raises(ValueError, match="channels must be two numbers"):
        TinyCapsNet(1, 5, channels=(1, 2, 3))


def test_networks_have_them_where_they_are_asked_for():
    plain, full = MatrixCapsNet.small(1, 5), MatrixCapsNet.small(1, 5, norm=True, dropout=0.25, primary_bias=-1.0)
    assert not any(isinstance(module, CapsuleNorm) for module in plain.modules())
    assert sum(isinstance(module, CapsuleNorm) for module in full.modules()) == 4
    assert (plain.dropout.p, full.dropout.p) == (0.0, 0.25)
    assert plain.primary.activation.bias.unique().tolist() == [0.0]
    assert full.primary.activation.bias.unique().tolist() == [-1.0]
    # without the options, weights have the same names and initial values as before
    assert [name for name in plain.state_dict() if "norm" in name] == []
    config = Config(capsule_dropout=0.25, capsule_norm=True, primary_bias=-1.0)
    trained = build_network(config, task_by_name(config))
    assert trained.state_dict().keys() == full.state_dict().keys()
    assert trained.dropout.p == 0.25
    config = Config(model="linear", capsule_dropout=0.5)
    with pytest.raises(ConfigError, match="--capsule-dropout is for networks of matrix capsules, which linear is not"):
        build_network(config, task_by_name(config))


@pytest.mark.parametrize("model", [MatrixCapsNet.small(1, 5, norm=True, iterations=2), TinyCapsNet(1, 5)])
def test_every_parameter_takes_part_in_the_loss(model):
    """DistributedDataParallel waits for all of them."""
    model(torch.randn(2, 1, 32, 32)).activations.square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_dropout_is_before_the_class_capsules():
    torch.manual_seed(0)
    model = MatrixCapsNet.small(1, 5, iterations=1, dropout=0.5)
    seen = []
    model.class_caps.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].activations))
    images = torch.randn(2, 1, 32, 32)
    model(images)
    model.eval()(images)
    assert (seen[0] == 0).float().mean() == pytest.approx(0.5, abs=0.1)
    assert (seen[1] == 0).sum() == 0


def test_tiny_capsnet_is_that_of_the_paper():
    model = TinyCapsNet(2, 5, norm=False)
    assert sum(p.numel() for name, p in model.named_parameters() if "beta" not in name) == 206_288
    shapes = []
    model.primary.register_forward_hook(lambda _, __, out: shapes.append(out.activations.shape[1:]))
    poses, activations = model(torch.randn(3, 2, 32, 32))
    assert shapes == [(16, 6, 6)]
    assert (poses.shape, activations.shape) == ((3, 5, 4, 4), (3, 5))
    with pytest.raises(ValueError, match=r"images must have shape \[N, 2, 32, 32\]"):
        model(torch.randn(3, 2, 33, 33))


@pytest.mark.parametrize("norm", [True, False])
def test_tiny_capsnet_learns_a_fixed_batch(norm):
    torch.manual_seed(0)
    model = build("tiny-capsnet", Task("mnist", 1, 28, 28, 5), norm=norm)
    objective = Objective(model, "logit-cross-entropy", "fixed", 1, 0.0)
    images, labels = torch.randn(10, 1, 28, 28), torch.arange(10) % 5
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        optimiser.zero_grad()
        loss, scores = objective(images, labels)
        loss.backward()
        optimiser.step()
    assert (scores.argmax(dim=1) == labels).all()


def test_cross_entropy_of_logits():
    activations = torch.tensor([[0.9, 0.2, 0.5]])
    objective = Objective(torch.nn.Identity(), "logit-cross-entropy", "fixed", 1, 0.0)
    odds = torch.tensor([9.0, 0.25, 1.0])  # a / (1 - a): exp of the logit
    expected = -torch.log(odds[0] / odds.sum())
    assert objective.loss((None, activations), torch.tensor([0])).item() == pytest.approx(expected.item(), rel=1e-4)
    assert loss_of(Config(model="tiny-capsnet")) == "logit-cross-entropy"


def test_mixed_images_have_two_labels():
    images = torch.arange(4.0)[:, None].expand(4, 5)
    assert torch.equal(mix(images, 0.75)[:, 0], torch.tensor([0.75, 1.25, 1.75, 2.25]))
    objective = Objective(torch.nn.Linear(5, 3), "cross-entropy", "fixed", 1, 0.0)
    labels = torch.tensor([0, 1, 2, 2])
    (own, _), (others, _) = objective(images, labels), objective(images, labels.flip(0))
    mixed, _ = objective(images, labels, None, 0.75)
    assert mixed.item() == pytest.approx(0.75 * own.item() + 0.25 * others.item(), rel=1e-5)
    with pytest.raises(ConfigError, match="--mixup gives no single digit to reconstruct"):
        loss_of(Config(model="capsnet", mixup=0.2))
