"""The models: parameter counts, shapes and initial values."""

import pytest
import torch

from tritoncaps import DynamicRouting, MarginLoss, SpreadLoss
from tritoncaps.models import EfficientCapsNet, MatrixCapsNet, baselines

SHAPES, SIZE = ("disk", "ring", "square", "triangle", "cross"), 32


def make_shapes(count, seed):
    """Bright shapes with random position, size, angle, stretch and contrast; each image is standardised.

    Images [count, 1, 32, 32] and labels [count].
    """
    random = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return torch.empty(count, 1, 1).uniform_(low, high, generator=random)

    labels = torch.randint(len(SHAPES), (count,), generator=random)
    axis = torch.linspace(-1, 1, SIZE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    x, y = x - uniform(-0.3, 0.3), y - uniform(-0.3, 0.3)
    angle, size, stretch = uniform(-0.5, 0.5), uniform(0.4, 0.65), uniform(0.8, 1.25)
    u = (x * angle.cos() + y * angle.sin()) / (size * stretch)
    v = (y * angle.cos() - x * angle.sin()) / (size / stretch)
    inside = torch.stack([_inside(shape, u, v) for shape in SHAPES])[labels, torch.arange(count)]
    noise = 0.2 * torch.randn(count, SIZE, SIZE, generator=random)
    images = inside * uniform(0.7, 1.6) + noise
    images = (images - images.mean(dim=(1, 2), keepdim=True)) / images.std(dim=(1, 2), keepdim=True)
    return images[:, None], labels


def _inside(shape, u, v):
    """1 inside a shape of size one around the origin, 0 outside."""
    radius, width = (u**2 + v**2).sqrt(), torch.maximum(u.abs(), v.abs())
    within = {
        "disk": radius < 0.9,
        "ring": (radius < 1.0) & (radius > 0.55),
        "square": width < 0.8,
        "triangle": (v > -0.6) & (v + 1.8 * u.abs() < 1.0),
        "cross": (width < 1.0) & (torch.minimum(u.abs(), v.abs()) < 0.28),
    }
    return within[shape].float()


def parameters(model):
    return sum(p.numel() for name, p in model.named_parameters() if "beta" not in name)


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: MatrixCapsNet.small(2, 5), 68_680),
        (lambda: MatrixCapsNet(2, 5), 317_056),
        (lambda: EfficientCapsNet(2, 5), 151_664),
        (lambda: baselines.MNISTBaseline(), 35_445_522),
        (lambda: baselines.MultiMNISTBaseline(), 24_563_978),
        (lambda: baselines.SmallNORBBaseline(), 4_253_349),
    ],
)
def test_parameter_counts(build, count):
    assert parameters(build()) == count


def test_betas_are_one_for_each_type():
    betas = {name: p.numel() for name, p in MatrixCapsNet.small(2, 5).named_parameters() if "beta" in name}
    assert sum(betas.values()) == 2 * (16 + 16 + 5)


@pytest.mark.parametrize(
    ("model", "channels", "size", "classes"),
    [
        (baselines.MNISTBaseline, 1, 28, 10),
        (baselines.MultiMNISTBaseline, 1, 36, 10),
        (baselines.SmallNORBBaseline, 2, 32, 5),
    ],
)
def test_baselines_classify(model, channels, size, classes):
    with torch.no_grad():
        assert model()(torch.randn(2, channels, size, size)).shape == (2, classes)
    with pytest.raises(ValueError, match=r"images must have shape \[N, "):
        model()(torch.randn(2, channels, size + 1, size))


def test_positions_are_those_of_the_paper():
    model = MatrixCapsNet.small(2, 5)
    shapes = {}
    for name in ("primary", "conv_caps1", "conv_caps2", "class_caps"):
        layer = getattr(model, name)
        layer.register_forward_hook(lambda _, __, out, name=name: shapes.update({name: out.activations.shape[1:]}))
    model(torch.randn(1, 2, 32, 32))
    assert shapes == {
        "primary": (8, 14, 14),
        "conv_caps1": (16, 6, 6),
        "conv_caps2": (16, 4, 4),
        "class_caps": (5,),
    }


@pytest.mark.parametrize("build", [MatrixCapsNet.small, MatrixCapsNet])
def test_about_half_of_the_capsules_are_active_at_the_start(build):
    images, _ = make_shapes(8, seed=0)
    shares: dict[str, list[float]] = {}
    for seed in range(3):
        torch.manual_seed(seed)
        model = build(1, 5)
        for name in ("primary", "conv_caps1", "conv_caps2", "class_caps"):
            share = shares.setdefault(name, [])
            layer = getattr(model, name)
            layer.register_forward_hook(
                lambda _, __, out, s=share: s.append((out.activations > 0.5).float().mean().item())
            )
        with torch.no_grad():
            model(images)
    for name, share in shares.items():
        assert 0.2 < sum(share) / 3 < 0.8, f"{name}: {share}"


def test_efficient_capsnet_gives_capsules_by_name():
    network = EfficientCapsNet(1, 3, 23)
    found = network(torch.randn(2, 1, 23, 23), return_intermediate=True)
    assert found["primary"].poses.shape == (2, 16, 8)
    assert found["class_caps"].poses.shape == (2, 3, 16)
    assert (found["class_caps"].activations < 1).all()
    assert EfficientCapsNet(1, 3, 23, routing=DynamicRouting(2)).class_caps.routing == DynamicRouting(2)
    with pytest.raises(ValueError, match="image_size must be at least 23, but it is 22"):
        EfficientCapsNet(1, 3, 22)
    with pytest.raises(ValueError, match=r"images must have shape \[N, 1, 23, 23\]"):
        network(torch.randn(2, 1, 24, 24))


def test_efficient_capsnet_learns_a_fixed_batch():
    torch.manual_seed(0)
    images, labels = make_shapes(32, seed=0)
    network = EfficientCapsNet(1, len(SHAPES), SIZE)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(60):
        optimiser.zero_grad()
        MarginLoss()(network(images), labels).backward()
        optimiser.step()
    assert (network(images).activations.argmax(1) == labels).float().mean() > 0.9


def test_a_model_learns_a_fixed_batch():
    torch.manual_seed(0)
    model = MatrixCapsNet(1, 5, channels=(16, 4, 4, 4))
    images, labels = make_shapes(20, seed=0)
    loss = SpreadLoss(0.5)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(80):
        optimiser.zero_grad()
        value = loss(model(images), labels)
        value.backward()
        optimiser.step()
        losses.append(value.item())
    assert losses[-1] < 0.2 * losses[0], losses[::10]
