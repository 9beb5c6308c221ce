"""An untrained network learns with every competition and 1, 3 or 5 iterations, if the E-step is tempered.

The images are ToyNORB's, of one toy of each category from two elevations, scaled to 20x20 pixels. The network has the
layers of MatrixCapsNet, with 8 features and 4 types each. So the test covers the start of learning, the first 640
images, and says nothing about new toys.
"""

import pytest
import torch
import torch.nn.functional as F

from tritoncaps import EMRouting, TemperedEMRouting
from tritoncaps.data import toynorb
from tritoncaps.models import MatrixCapsNet

STEPS, BATCH = 40, 16


@pytest.fixture(scope="module")
def toys():
    """Images [N, 2, 20, 20] of mean 0 and variance 1, and their categories."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toynorb, "ELEVATIONS", 2)
        toys = [torch.from_numpy(toynorb.render_toy(0, category, 4)) for category in range(5)]
    images = F.interpolate(torch.cat(toys)[:, :, 8:40, 8:40].float(), size=(20, 20), mode="area")
    variance, mean = torch.var_mean(images, (1, 2, 3), keepdim=True)
    return (images - mean) / variance.sqrt(), torch.arange(5).repeat_interleave(len(toys[0]))


def late_accuracy(routing, images, labels):
    """Of the batches of the second half of the training, before each step. Chance is 0.2."""
    torch.manual_seed(0)
    network = MatrixCapsNet(2, 5, (8, 4, 4, 4), routing=routing)
    optimiser = torch.optim.Adam(network.parameters(), 5e-3)
    right = []
    for _ in range(STEPS):
        batch = torch.randint(len(images), (BATCH,))
        activations = network(images[batch]).activations
        optimiser.zero_grad()
        F.cross_entropy(activations.logit(1e-6), labels[batch]).backward()
        optimiser.step()
        right.append((activations.argmax(1) == labels[batch]).float().mean())
    return torch.stack(right[STEPS // 2 :]).mean().item()


@pytest.mark.parametrize("competition", ["global", "local", "positions"])
@pytest.mark.parametrize("iterations", [1, 3, 5])
def test_every_start_leaves_chance(competition, iterations, toys):
    assert late_accuracy(TemperedEMRouting(iterations, competition=competition), *toys) > 0.4


def test_five_iterations_of_em_routing_do_not(toys):
    """Why the E-step is tempered. If this fails, EM routing has a better start, and the docs must say so."""
    assert late_accuracy(EMRouting(5, competition="local"), *toys) < 0.3


def test_a_sharpness_of_one_is_em_routing():
    torch.manual_seed(0)
    network = MatrixCapsNet.small(1, 3, routing=EMRouting(3))
    same = MatrixCapsNet.small(1, 3, routing=TemperedEMRouting(3, sharpness=1.0))
    same.load_state_dict(network.state_dict())
    images = torch.randn(2, 1, 20, 20)
    torch.testing.assert_close(same(images), network(images), rtol=1e-3, atol=1e-4)
