"""What `make demo` runs: a small MatrixCapsNet learns to tell five shapes apart, on images made here."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from tritoncaps import SpreadLoss
from tritoncaps.models import MatrixCapsNet

SHAPES = ("disk", "ring", "square", "triangle", "cross")
SIZE = 32
BATCH = 16


def main(seconds: float = 45.0) -> float:
    """Train for about ``seconds``, print accuracy and speed, and return the test accuracy."""
    from tqdm import tqdm

    torch.manual_seed(0)
    model = MatrixCapsNet.small(in_channels=1, num_classes=len(SHAPES), iterations=2)
    loss = SpreadLoss(0.5)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"MatrixCapsNet.small: {parameters:,} parameters, 2 iterations of EM routing")
    print(f"learns to tell {', '.join(SHAPES)} apart, for {seconds:.0f} seconds")
    train(model, *make_shapes(BATCH, seed=0), loss, optimiser)  # compiles the kernels before the clock starts
    images, start = 0, time.perf_counter()
    with tqdm(total=round(seconds), unit="s", bar_format="{l_bar}{bar}| {n:.0f}/{total} s{postfix}") as bar:
        while (elapsed := time.perf_counter() - start) < seconds:
            step = images // BATCH + 1
            value, accuracy = train(model, *make_shapes(BATCH, seed=step), loss, optimiser)
            images += BATCH
            bar.n = min(elapsed, seconds)
            bar.set_postfix_str(f"loss {value:.3f}, batch accuracy {accuracy:.0%}")
        bar.n = bar.total
    speed = images / (time.perf_counter() - start)
    accuracy = evaluate(model, *make_shapes(1000, seed=10**6))
    print(f"accuracy on 1,000 new images: {accuracy:.1%} (chance: {1 / len(SHAPES):.0%})")
    print(f"training speed: {speed:.0f} images/s on {torch.get_num_threads()} CPU threads")
    return accuracy


def train(
    model: MatrixCapsNet, images: Tensor, labels: Tensor, loss: SpreadLoss, optimiser: torch.optim.Optimizer
) -> tuple[float, float]:
    """One step; the batch's loss and accuracy."""
    capsules = model(images)
    value = loss(capsules, labels)
    optimiser.zero_grad()
    value.backward()
    optimiser.step()
    accuracy = (capsules.activations.argmax(dim=1) == labels).float().mean()
    return value.item(), accuracy.item()


@torch.no_grad()
def evaluate(model: MatrixCapsNet, images: Tensor, labels: Tensor) -> float:
    right = [
        (model(batch).activations.argmax(dim=1) == label).sum()
        for batch, label in zip(images.split(100), labels.split(100), strict=True)
    ]
    return float(sum(right)) / len(labels)


def make_shapes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Bright shapes of random place, size, angle, stretch and contrast, each image standardised.

    Images [count, 1, 32, 32] and labels [count].
    """
    random = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
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


def _inside(shape: str, u: Tensor, v: Tensor) -> Tensor:
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


if __name__ == "__main__":
    main()
