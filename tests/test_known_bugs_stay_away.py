"""Known bugs of public capsule code: one test for each."""

import pytest
import torch
from torch import nn

from tritoncaps import (
    Capsules,
    ConvCaps2d,
    EMRouting,
    Gaussians,
    PrimaryCaps,
    RoutingMap,
    functional,
    reference,
)
from tritoncaps.testing import Problem


@pytest.fixture
def problem():
    return Problem(RoutingMap.conv((4, 5), 3, padding=1), in_caps=2, out_caps=3)


def stored_votes(problem):
    inputs = problem.inputs()
    votes = reference.pose_votes(inputs.poses, inputs.weight, problem.routing_map)
    gaussians = Gaussians(
        torch.randn(problem.images, problem.out_caps, 4, 5, 4, 4).double(),
        torch.rand(problem.images, problem.out_caps, 4, 5, 4, 4).double() + 0.1,
        torch.randn(problem.images, problem.out_caps, 4, 5).double(),
    )
    return inputs, votes, gaussians


def test_activations_are_not_cancelled_by_renormalising(problem):
    inputs = problem.inputs()
    strong = problem.solve(functional.em_routing, inputs)
    weak = problem.solve(functional.em_routing, inputs._replace(activations=inputs.activations * 0.1))
    assert not torch.allclose(strong.activations, weak.activations)


def test_assignments_sum_to_one_over_the_parents_of_a_child(problem):
    _, votes, gaussians = stored_votes(problem)
    assignments = functional.e_step(votes, gaussians, problem.routing_map)
    total = torch.zeros(problem.images, problem.routing_map.num_children, problem.in_caps).double()
    for child in range(problem.routing_map.num_children):
        for parent, slot in problem.routing_map.parents(child):
            total[:, child] += assignments[:, parent, slot].sum(dim=-1)
    torch.testing.assert_close(total, torch.ones_like(total))
    # the sum over the children of a parent is not one
    over_children = assignments.sum(dim=(2, 3))
    assert not torch.allclose(over_children, torch.ones_like(over_children))


def test_e_step_is_not_over_types_only(problem):
    _, votes, gaussians = stored_votes(problem)
    over_types = functional.e_step(votes, gaussians, problem.routing_map).sum(dim=-1)
    shared = (over_types > 1e-6) & (over_types < 1 - 1e-6)
    assert shared.any()


def test_log_activation_is_not_dropped(problem):
    _, votes, gaussians = stored_votes(problem)
    other = gaussians._replace(logits=gaussians.logits + torch.arange(3).reshape(1, 3, 1, 1))
    before, after = (functional.e_step(votes, g, problem.routing_map) for g in (gaussians, other))
    assert not torch.allclose(before, after)


def test_children_of_different_positions_are_not_mixed_up():
    layer = ConvCaps2d(2, 3, 3, dtype=torch.float64)
    poses, activations = torch.randn(1, 2, 5, 6, 4, 4).double(), torch.rand(1, 2, 5, 6).double()
    before = layer(Capsules(poses, activations))
    moved = poses.clone()
    moved[:, :, 0, 5] += 1.0  # seen by the parent in the upper right corner only, in its first E-step
    routed = ConvCaps2d(2, 3, 3, routing=EMRouting(iterations=1), dtype=torch.float64)
    routed.load_state_dict(layer.state_dict())
    first, second = routed(Capsules(poses, activations)), routed(Capsules(moved, activations))
    changed = (first.poses != second.poses).flatten(4).any(dim=-1)[0].any(dim=0)
    expected = torch.zeros(3, 4, dtype=torch.bool)
    expected[0, 3] = True
    assert torch.equal(changed, expected)
    assert before.poses.shape == (1, 3, 3, 4, 4, 4)


def test_primary_capsule_is_one_pixel_not_its_neighbours():
    layer = PrimaryCaps(3, 4)
    images = torch.randn(1, 3, 5, 6)
    changed = images.clone()
    changed[:, :, 2, 3] += 1.0
    difference = (layer(images).poses - layer(changed).poses).abs().sum(dim=(0, 1, 4, 5))
    assert difference[2, 3] > 0
    difference[2, 3] = 0
    assert not difference.any()


def test_spread_loss_leaves_out_the_target_class():
    perfect = torch.tensor([[1.0, 0.0, 0.0]])
    assert functional.spread_loss(perfect, torch.tensor([0]), 0.9) == 0


def test_squash_is_over_the_capsules_own_axis():
    vectors = torch.randn(5, 3, 8)
    lengths = functional.squash(vectors).norm(dim=-1)
    original = vectors.norm(dim=-1)
    torch.testing.assert_close(lengths, original**2 / (1 + original**2))


def test_routing_logits_are_not_shared_over_the_batch():
    routing_map = RoutingMap.full(())
    poses, weight = torch.randn(2, 6, 4).double(), torch.randn(1, 6, 3, 4, 5).double()
    both = functional.dynamic_routing(poses, weight, routing_map)
    for image in range(2):
        alone = functional.dynamic_routing(poses[image : image + 1], weight, routing_map)
        torch.testing.assert_close(both[image : image + 1], alone)


@pytest.mark.parametrize("size", [(7, 7), (3, 9), (9, 3)])
@pytest.mark.parametrize("images", [0, 1, 3])
def test_any_rectangle_and_any_batch(size, images):
    layer = nn.Sequential(PrimaryCaps(2, 3), ConvCaps2d(3, 2, 3, stride=(2, 1)))
    result = layer(torch.randn(images, 2, *size))
    expected = ((size[0] - 3) // 2 + 1, size[1] - 2)
    assert result.activations.shape == (images, 2, *expected)
    assert result.poses.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nan_of_any_bits_stays_a_nan(dtype):
    """exp changes the bits of its result; a nan whose bits are all ones became a number."""
    problem = Problem(RoutingMap.conv((3,), 2), EMRouting(2), images=1, in_caps=1, out_caps=1)
    poses, activations, *others = problem.inputs(dtype)
    ones = torch.full((1,), -1, dtype=torch.int32 if dtype == torch.float32 else torch.int64).view(dtype)
    poses, activations = poses.clone(), torch.ones_like(activations)
    poses[0, 0, 2] = ones
    found = functional.em_routing(poses, activations, *others, problem.routing_map, problem.routing, "cpu")
    # the middle child takes part in both parents, so that both are broken
    assert found.poses.isnan().all()
    assert found.activations.isnan().all()
