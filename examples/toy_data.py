"""Small data sets for the examples, generated in milliseconds: shapes on images, waves, solids and stick figures."""

import torch


def images(count, size=32, seed=0):
    """Coloured discs, vertical bars and horizontal bars at random positions: images [N, 3, size, size] of mean 0 and
    variance 1, labels [N]."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    centre = 0.35 + 0.3 * torch.rand(count, 2, 1, 1, generator=generator)
    radius = 0.2 + 0.1 * torch.rand(count, 1, 1, generator=generator)
    colour = 0.5 + 0.5 * torch.rand(count, 3, 1, 1, generator=generator)
    line = (torch.arange(size) + 0.5) / size
    y, x = (line[None, :, None] - centre[:, 0]).abs(), (line[None, None, :] - centre[:, 1]).abs()
    disc = x**2 + y**2 < radius**2
    upright, lying = (x < 0.3 * radius) & (y < radius), (y < 0.3 * radius) & (x < radius)
    shape = torch.stack([disc, upright, lying])[labels, torch.arange(count)]
    drawn = colour * shape[:, None] + 0.1 * torch.randn(count, 3, size, size, generator=generator)
    return (drawn - drawn.mean((1, 2, 3), keepdim=True)) / drawn.std((1, 2, 3), keepdim=True), labels


def signals(count, length=128, seed=0):
    """Sine, square and sawtooth waves of random phase and frequency: signals [N, 1, length], labels [N]."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    phase, frequency = torch.rand(2, count, 1, generator=generator)
    turns = phase + (3 + 3 * frequency) * torch.arange(length) / length
    sine = torch.sin(2 * torch.pi * turns)
    waves = torch.stack([sine, sine.sign(), 2 * (turns % 1) - 1])[labels, torch.arange(count)]
    return (waves + 0.2 * torch.randn(count, length, generator=generator))[:, None], labels


def volumes(count, size=14, seed=0):
    """Balls, cubes and rods: volumes [N, 1, size, size, size], labels [N]."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    centre = 0.35 + 0.3 * torch.rand(count, 3, generator=generator)
    line = (torch.arange(size) + 0.5) / size
    grid = torch.stack(torch.meshgrid(line, line, line, indexing="ij"))  # [3, size, size, size]
    away = (grid - centre[:, :, None, None, None]).abs()
    ball = away.square().sum(1) < 0.28**2
    cube = away.amax(1) < 0.22
    rod = (away[:, 1:].amax(1) < 0.1) & (away[:, 0] < 0.4)
    solid = torch.stack([ball, cube, rod])[labels, torch.arange(count)].float()
    return (2 * solid - 1)[:, None] + 0.3 * torch.randn(count, 1, size, size, size, generator=generator), labels


def figures(count, seed=0):
    """Stick figures of 7 joints with both arms up, both down, or one up and one down, rotated by a random angle:
    joints [N, 7, 2], labels [N].

    Joints: hip, neck, head, left elbow, left hand, right elbow, right hand.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    left = torch.tensor([1.0, -1.0, 1.0])[labels]  # up or down
    right = torch.tensor([1.0, -1.0, -1.0])[labels]
    zero, one = torch.zeros(count), torch.ones(count)
    x = torch.stack([zero, zero, zero, -0.5 * one, -0.8 * one, 0.5 * one, 0.8 * one], 1)
    y = torch.stack([zero, one, 1.4 * one, 1 + 0.2 * left, 1 + 0.7 * left, 1 + 0.2 * right, 1 + 0.7 * right], 1)
    angle = 2 * torch.pi * torch.rand(count, 1, generator=generator)
    turned = torch.stack([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()], 2)
    return turned + 0.03 * torch.randn(count, 7, 2, generator=generator), labels
