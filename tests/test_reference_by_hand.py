"""The reference, on tiny examples with results that are computed by hand."""

import math

import pytest
import torch

from tritoncaps import (
    Capsules,
    EMRouting,
    Gaussians,
    RoutingMap,
    SelfAttentionRouting,
    VectorCaps,
    functional,
    reference,
)
from tritoncaps.routing.attention import soft_squash


def one_location(children: int) -> RoutingMap:
    """``children`` child locations that all feed one parent location, with one weight block each."""
    return RoutingMap.from_edges(list(range(children)), [0] * children, children, 1)


def votes_of(*values: float) -> torch.Tensor:
    """Votes [1, 1, S, 1, 1, 1] of one-entry poses: one child type, one parent type."""
    return torch.tensor(values, dtype=torch.float64).reshape(1, 1, -1, 1, 1, 1)


def test_a_vote_is_pose_times_weight():
    pose = torch.arange(16.0).reshape(1, 1, 4, 4)
    weight = torch.zeros(1, 1, 1, 4, 4)
    weight[0, 0, 0, 0, 1] = 2.0  # column 1 of the vote is twice column 0 of the pose
    votes = functional.pose_votes(pose, weight, RoutingMap.full(()))
    expected = torch.zeros(4, 4)
    expected[:, 1] = 2 * torch.tensor([0.0, 4.0, 8.0, 12.0])
    torch.testing.assert_close(votes.reshape(4, 4), expected)


def test_coordinates_go_to_the_right_hand_column():
    votes = torch.zeros(1, 1, 6, 1, 1, 4, 4)
    added = functional.coordinate_addition(votes, RoutingMap.full((2, 3)))[0, 0, :, 0, 0]
    rows = [0.25, 0.25, 0.25, 0.75, 0.75, 0.75]
    columns = [1 / 6, 0.5, 5 / 6] * 2
    torch.testing.assert_close(added[:, 0, 3], torch.tensor(rows))
    torch.testing.assert_close(added[:, 1, 3], torch.tensor(columns))
    added[:, :2, 3] = 0
    assert not added.any()


def test_m_step_of_two_children():
    # r = 1 * 0.5 and 1 * 0.25; S = 0.75; mean = (0.5 * 1 + 0.25 * 4) / 0.75 = 2
    # variance = (0.5 * 1 + 0.25 * 4) / 0.75 = 2; cost = (0.3 + 0.5 log 2) * 0.75 / 2
    gaussians = functional.m_step(
        votes_of(1.0, 4.0),
        torch.ones(1, 1, 2, 1, 1, dtype=torch.float64),
        torch.tensor([[[0.5, 0.25]]], dtype=torch.float64),
        torch.tensor([0.3], dtype=torch.float64),
        torch.tensor([0.7], dtype=torch.float64),
        one_location(2),
        inverse_temperature=0.5,
    )
    cost = (0.3 + 0.5 * math.log(2)) * 0.75 / 2  # two children for one parent: mean_data = 2
    assert gaussians.mean.item() == pytest.approx(2.0)
    assert gaussians.variance.item() == pytest.approx(2.0)
    assert gaussians.logits.item() == pytest.approx(0.5 * (0.7 - cost))
    assert gaussians.activations.item() == pytest.approx(1 / (1 + math.exp(-0.5 * (0.7 - cost))))


def test_variance_floor_is_a_clamp():
    m_step = {"inverse_temperature": 1.0, "variance_floor": 0.5}
    one = torch.ones(1, 1, 2, 1, 1, dtype=torch.float64)
    args = (
        one,
        torch.ones(1, 1, 2).double(),
        torch.zeros(1).double(),
        torch.zeros(1).double(),
        one_location(2),
    )
    assert functional.m_step(votes_of(3.0, 3.0), *args, **m_step).variance.item() == 0.5
    assert functional.m_step(votes_of(1.0, 3.0), *args, **m_step).variance.item() == 1.0  # not 1.5


def test_e_step_of_two_parents():
    # one child, two parent types: l_0 = log 0.5 - 1/2 (1 / 1 + log 2 pi), l_1 = log 0.5 - 1/2 (4 / 4 + log 8 pi)
    gaussians = Gaussians(
        torch.tensor([[0.0, 3.0]]).double()[..., None],
        torch.tensor([[1.0, 4.0]]).double()[..., None],
        torch.zeros(1, 2).double(),
    )
    votes = torch.ones(1, 1, 1, 1, 2, 1).double()  # both parents get the vote 1
    assignments = functional.e_step(votes, gaussians, RoutingMap.full(()))
    # the distances are equal, so the ratio is that of the normalising factors: 1 to 1/2
    torch.testing.assert_close(assignments.flatten(), torch.tensor([2 / 3, 1 / 3]).double())


def test_log_activation_takes_part_in_the_e_step():
    logits = torch.tensor([[math.log(3.0), -math.log(3.0)]]).double()  # activations 3/4 and 1/4
    gaussians = Gaussians(torch.zeros(1, 2, 1).double(), torch.ones(1, 2, 1).double(), logits)
    assignments = functional.e_step(torch.zeros(1, 1, 1, 1, 2, 1).double(), gaussians, RoutingMap.full(()))
    torch.testing.assert_close(assignments.flatten(), torch.tensor([0.75, 0.25]).double())


def test_parents_at_two_positions_compete():
    # child 1 of three sees both parents; children 0 and 2 see one each
    routing_map = RoutingMap.conv((3,), kernel=2)
    gaussians = Gaussians(*(torch.full((1, 1, 2, 1), x).double() for x in (0.0, 1.0)), torch.zeros(1, 1, 2).double())
    votes = torch.zeros(1, 2, 2, 1, 1, 1).double()
    shared = functional.e_step(votes, gaussians, routing_map)
    torch.testing.assert_close(shared.reshape(2, 2), torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double())
    alone = functional.e_step(votes, gaussians, routing_map, competition="local")
    torch.testing.assert_close(alone.reshape(2, 2), torch.ones(2, 2).double())


def test_positions_of_one_type_compete():
    # child 1 of three sees parents at two positions; that of type 1 at the second one has three times the likelihood
    routing_map = RoutingMap.conv((3,), kernel=2)
    logits = torch.zeros(1, 2, 2).double()
    logits[0, 1, 0] = -math.log(5.0)  # activation 1 / 6, a third of 1 / 2
    gaussians = Gaussians(*(torch.full((1, 2, 2, 1), x).double() for x in (0.0, 1.0)), logits)
    found = functional.e_step(torch.zeros(1, 2, 2, 1, 2, 1).double(), gaussians, routing_map, competition="positions")
    expected = torch.tensor([[[1.0, 1.0], [0.5, 0.25]], [[0.5, 0.75], [1.0, 1.0]]])  # parent locations, slots, types
    torch.testing.assert_close(found.reshape(2, 2, 2), expected.double())
    first = functional.initial_assignments(torch.ones(1, 1, 3), 2, routing_map, "positions")
    torch.testing.assert_close(first.reshape(2, 2, 2)[0], torch.tensor([[1.0, 1.0], [0.5, 0.5]]))


def test_competition_over_positions_is_one_routing_for_each_type():
    routing_map, routing = RoutingMap.conv((3, 3), 2), EMRouting(2, competition="positions")
    poses, activations = torch.randn(2, 3, 3, 3, 4, 4).double(), torch.rand(2, 3, 3, 3).double()
    weight, betas = torch.randn(4, 3, 5, 4, 4).double(), torch.randn(2, 5).double()
    together = functional.em_routing(poses, activations, weight, *betas, routing_map, routing)
    for c in range(5):
        given = weight[:, :, c : c + 1], betas[0, c : c + 1], betas[1, c : c + 1]
        alone = functional.em_routing(poses, activations, *given, routing_map, EMRouting(2))
        torch.testing.assert_close(together.poses[:, c : c + 1], alone.poses)
        torch.testing.assert_close(together.activations[:, c : c + 1], alone.activations)


def test_one_iteration_of_two_children_and_two_parents():
    # identity poses and weights w_b I for child type b: both parents get votes 1 and 3, each with share 1/2
    poses = torch.eye(4).double().expand(1, 2, 4, 4)
    activations = torch.tensor([[0.8, 0.4]]).double()
    weight = torch.eye(4).double() * torch.tensor([1.0, 3.0]).double().reshape(1, 2, 1, 1, 1)
    weight = weight.expand(1, 2, 2, 4, 4)
    betas = torch.zeros(2).double(), torch.tensor([0.0, 1.0]).double()
    routing = EMRouting(iterations=1, final_lambda=1.0)
    result = functional.em_routing(poses, activations, weight, *betas, RoutingMap.full(()), routing)
    mean = (0.4 * 1 + 0.2 * 3) / 0.6
    variance = (0.4 * (1 - mean) ** 2 + 0.2 * (3 - mean) ** 2) / 0.6
    cost = (4 * 0.5 * math.log(variance) + 12 * 0.5 * math.log(1e-4)) * 0.6  # mean_data is 2 / 2
    torch.testing.assert_close(result.poses, (mean * torch.eye(4)).double().expand(1, 2, 4, 4))
    expected = torch.sigmoid(0.05 * (betas[1] - cost))
    torch.testing.assert_close(result.activations[0], expected)


def test_lambdas_follow_the_schedule():
    assert EMRouting(iterations=3).lambdas == pytest.approx((0.05, 0.0975, 0.142625))
    assert EMRouting(iterations=2, mean_data=False).lambdas == pytest.approx((0.0005, 0.000975))


def test_squash_of_a_vector():
    torch.testing.assert_close(reference.squash(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 4.0]) / 5 * 25 / 26)
    zero = torch.zeros(3, requires_grad=True)
    reference.squash(zero).sum().backward()
    assert not zero.grad.any()


def test_dynamic_routing_of_one_iteration():
    # two parents, equal coupling 1/2: v = squash of half the sum of the votes
    poses = torch.tensor([[[1.0], [3.0]]])  # [1, 2, 1]
    weight = torch.tensor([1.0, 2.0]).reshape(1, 1, 2, 1, 1).expand(1, 2, 2, 1, 1)
    routing = reference.DynamicRouting(iterations=1)
    result = functional.dynamic_routing(poses, weight, RoutingMap.full(()), routing)
    expected = torch.tensor([2.0**2 / 5.0, 4.0**2 / 17.0])
    torch.testing.assert_close(result.flatten(), expected)


def test_self_attention_routing_of_two_children():
    layer = VectorCaps(2, 1, 2, 1, routing=SelfAttentionRouting())  # votes are numbers
    with torch.no_grad():
        layer.weight[:] = torch.tensor([[1.0, 2.0], [3.0, -1.0]])[..., None, None]  # of child 0, of child 1
        layer.priors[:] = torch.tensor([[0.5, 0.0], [0.0, 0.25]])
    poses = layer(torch.ones(1, 2, 1)).poses.flatten()
    # the votes for parent 0 are 1 and 3, their sum is 4; for parent 1 they are 2 and -1, their sum is 1
    first, second = math.exp(4) / (math.exp(4) + math.exp(2)), math.exp(12) / (math.exp(12) + math.exp(-1))
    sums = (first + 0.5) * 1 + second * 3, (1 - first) * 2 + (1 - second + 0.25) * -1
    assert poses.tolist() == pytest.approx([math.copysign(1 - math.exp(-abs(s)), s) for s in sums], rel=1e-5)


def test_soft_squash_of_zero_is_zero_with_finite_derivatives():
    for scale in (0.0, 1e-30, 1e-3, 1.0, 1e6):
        x = (scale * torch.tensor([[3.0, 4.0]])).requires_grad_()
        (y,) = soft_squash(x)
        assert y.norm().item() == pytest.approx(-math.expm1(-5 * scale), rel=1e-5)
        y.sum().backward()
        assert x.grad.isfinite().all()


def test_capsules_is_a_named_tuple():
    capsules = Capsules(torch.zeros(1), torch.ones(1))
    poses, activations = capsules
    assert poses is capsules.poses
    assert activations is capsules.activations
