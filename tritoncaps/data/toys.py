"""The toys of ToyNORB: animals, humans, airplanes, trucks and cars, each made of a few solids.

A toy faces +x and is on the ground, z = 0. Its proportions are random, so that all toys differ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ELLIPSOID, BOX, CYLINDER, CONE = range(4)

Vector = tuple[float, float, float]


class Toy(NamedTuple):
    """S solids. ``to_local`` maps world coordinates to local ones, in which the solid has size one around the origin.
    ``albedo`` is the brightness of each solid, ``height`` the height of the toy."""

    kinds: np.ndarray  # [S]
    to_local: np.ndarray  # [S, 3, 4]
    albedo: np.ndarray  # [S]
    height: float


class Builder:
    """Collects solids. Sizes are half widths; ``turn`` rotates about the axes x, y, z, in this order, by degrees."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.paint = random.uniform(0.45, 0.9)
        self.solids: list[tuple[int, np.ndarray, float]] = []

    def vary(self, low: float, high: float) -> float:
        return float(self.random.uniform(low, high))

    def maybe(self, chance: float = 0.5) -> bool:
        return bool(self.random.random() < chance)

    def add(self, kind: int, centre: Vector, size: Vector, turn: Vector = (0, 0, 0), shade: float = 1.0) -> None:
        to_world = np.eye(4)
        to_world[:3, :3] = rotation(*np.radians(turn)) * np.asarray(size)
        to_world[:3, 3] = centre
        self.solids.append((kind, to_world, self.paint * shade))

    def both_sides(self, kind: int, centre: Vector, size: Vector, turn: Vector = (0, 0, 0), shade: float = 1.0) -> None:
        """Add a solid and its mirror image in y."""
        self.add(kind, centre, size, turn, shade)
        self.add(kind, (centre[0], -centre[1], centre[2]), size, (-turn[0], turn[1], -turn[2]), shade)

    def toy(self, reach: float) -> Toy:
        """The toy, moved to the origin and scaled so that its corners are within ``reach`` of the middle."""
        corners = np.concatenate([_corners(to_world) for _, to_world, _ in self.solids])
        low, high = corners.min(axis=0), corners.max(axis=0)
        scale = reach / max(np.linalg.norm((high - low)[:2]) / 2, 0.6 * (high - low)[2])
        place = np.diag([scale, scale, scale, 1.0])
        place[:3, 3] = -scale * np.array([(low[0] + high[0]) / 2, (low[1] + high[1]) / 2, low[2]])
        to_local = [np.linalg.inv(place @ to_world)[:3] for _, to_world, _ in self.solids]
        kinds = np.array([kind for kind, _, _ in self.solids])
        albedo = np.array([albedo for _, _, albedo in self.solids])
        return Toy(kinds, np.array(to_local), albedo, scale * float(high[2] - low[2]))


def make_toy(category: str, random: np.random.Generator, reach: float = 1.0) -> Toy:
    builder = Builder(random)
    MAKERS[category](builder)
    return builder.toy(reach)


def animal(b: Builder) -> None:
    length, girth, leg, width = b.vary(0.7, 1.0), b.vary(0.25, 0.42), b.vary(0.3, 0.75), b.vary(0.09, 0.15)
    back = 2 * leg + girth
    b.add(ELLIPSOID, (0, 0, back), (length, girth, girth))
    b.both_sides(CYLINDER, (0.6 * length, 0.6 * girth, leg), (width, width, leg))
    b.both_sides(CYLINDER, (-0.6 * length, 0.6 * girth, leg), (width, width, leg))
    rise, head = b.vary(0.1, 0.8), b.vary(0.22, 0.32)
    ahead = length + b.vary(0.05, 0.2)
    b.add(CYLINDER, (0.88 * length, 0, back + rise / 2), (0.14, 0.14, 0.2 + rise / 2), (0, 20, 0))
    b.add(ELLIPSOID, (ahead, 0, back + rise + 0.1), (head, 0.75 * head, 0.75 * head))
    b.add(CONE, (ahead + head, 0, back + rise), (0.6 * head, 0.6 * head, b.vary(0.15, 0.4)), (0, 100, 0), 0.85)
    b.both_sides(CONE, (ahead - 0.05, 0.15, back + rise + 0.1 + head), (0.08, 0.08, b.vary(0.1, 0.3)), (-15, 0, 0))
    b.add(CYLINDER, (-length - 0.1, 0, back), (0.06, 0.06, b.vary(0.15, 0.45)), (0, b.vary(-150, -60), 0))


def human(b: Builder) -> None:
    leg, torso, shoulder = b.vary(0.5, 0.7), b.vary(0.4, 0.55), b.vary(0.3, 0.42)
    stride, arm = b.vary(0, 25), b.vary(0.32, 0.42)
    hip, neck = 2 * leg, 2 * leg + 2 * torso
    swing = 0.5 * np.sin(np.radians(stride)) * 2 * leg
    b.add(CYLINDER, (swing, 0.17, leg), (0.14, 0.14, leg), (0, -stride, 0))
    b.add(CYLINDER, (-swing, -0.17, leg), (0.14, 0.14, leg), (0, stride, 0))
    b.add(ELLIPSOID if b.maybe() else BOX, (0, 0, hip + torso), (0.2, shoulder, torso))
    b.add(ELLIPSOID, (0, 0, neck + 0.22), (0.22, 0.2, 0.26))
    for side in (1, -1):
        lift, forward = b.vary(10, 150), b.vary(-40, 60)
        direction = rotation(np.radians(side * lift), np.radians(-forward), 0) @ np.array([0, 0, -1.0])
        shoulder_point = np.array([0, side * shoulder, neck - 0.12])
        centre = tuple(shoulder_point + arm * direction)
        b.add(CYLINDER, centre, (0.1, 0.1, arm), (side * lift, -forward, 0), 0.9)
    if b.maybe():
        b.add(CYLINDER, (0, 0, neck + 0.45), (0.26, 0.26, 0.06), shade=0.7)
    b.add(CYLINDER, (0, 0, 0.03), (0.5, 0.5, 0.05), shade=0.8)


def airplane(b: Builder) -> None:
    length, girth = b.vary(0.9, 1.2), b.vary(0.13, 0.22)
    span, chord, sweep = b.vary(0.45, 0.65), b.vary(0.15, 0.3), b.vary(-5, 40)
    height = girth + 0.2
    b.add(ELLIPSOID, (0, 0, height), (length, girth, girth))
    back = 0.8 * span * np.tan(np.radians(sweep))
    b.both_sides(BOX, (0.2 - back, 0.9 * span, height + b.vary(-0.1, 0.1)), (chord, span, 0.035), (0, 0, sweep))
    b.both_sides(BOX, (-0.85 * length, 0.25, height + 0.05), (0.13, 0.25, 0.03), (0, 0, sweep))
    b.add(BOX, (-0.85 * length, 0, height + 0.3), (0.15, 0.03, b.vary(0.2, 0.35)), (0, -15, 0))
    if b.maybe(0.6):
        b.both_sides(CYLINDER, (0.25 - back, 0.5, height - 0.12), (0.09, 0.09, 0.2), (0, 90, 0), 0.8)
    else:
        b.add(CYLINDER, (length, 0, height), (0.3, 0.3, 0.02), (0, 90, 0), 0.7)
    b.add(CYLINDER, (0.55 * length, 0, 0.12), (0.06, 0.06, 0.12), shade=0.6)
    b.both_sides(CYLINDER, (-0.2, 0.15, 0.12), (0.06, 0.06, 0.12), shade=0.6)


def truck(b: Builder) -> None:
    length, width, wheel = b.vary(0.75, 1.0), b.vary(0.3, 0.4), b.vary(0.15, 0.2)
    cab, tall = b.vary(0.22, 0.32), b.vary(0.28, 0.38)
    floor = 1.7 * wheel
    b.add(BOX, (0, 0, floor), (length, 0.9 * width, 0.06), shade=0.7)
    b.add(BOX, (length - cab, 0, floor + tall), (cab, width, tall))
    rear = length - cab - 0.06
    place = -length + rear
    load = b.random.integers(3)
    if load == 0:
        high = b.vary(0.35, 0.55)
        b.add(BOX, (place, 0, floor + high), (rear, width, high), shade=1.1)
    elif load == 1:
        b.add(CYLINDER, (place, 0, floor + 0.95 * width), (0.9 * width, 0.9 * width, rear), (0, 90, 0), 1.1)
    else:
        b.both_sides(BOX, (place, width, floor + 0.18), (rear, 0.03, 0.16), shade=1.1)
        b.add(ELLIPSOID, (place, 0, floor + 0.1), (0.8 * rear, 0.85 * width, b.vary(0.15, 0.4)), shade=0.8)
    for x in (length - cab, -0.35 * length, -0.75 * length):
        b.both_sides(CYLINDER, (x, width, wheel), (wheel, wheel, 0.06), (90, 0, 0), 0.35)


def car(b: Builder) -> None:
    length, width, wheel = b.vary(0.8, 1.05), b.vary(0.36, 0.45), b.vary(0.15, 0.2)
    body, cabin = b.vary(0.13, 0.2), b.vary(0.15, 0.25)
    floor, middle = 1.2 * wheel, b.vary(-0.25, 0.05)
    round_body = b.maybe(0.4)
    b.add(ELLIPSOID if round_body else BOX, (0, 0, floor + body), (length, width, body * (1.3 if round_body else 1)))
    b.add(
        ELLIPSOID if b.maybe(0.6) else BOX,
        (middle, 0, floor + 2 * body),
        (b.vary(0.4, 0.6) * length, 0.85 * width, 1.3 * cabin),
        shade=1.1,
    )
    for x in (0.6 * length, -0.6 * length):
        b.both_sides(CYLINDER, (x, 0.95 * width, wheel), (wheel, wheel, 0.07), (90, 0, 0), 0.35)
    if b.maybe(0.4):
        b.add(BOX, (-0.9 * length, 0, floor + 2 * body + 0.15), (0.1, width, 0.02), (0, 10, 0))


MAKERS = {"animal": animal, "human": human, "airplane": airplane, "truck": truck, "car": car}


def rotation(x: float, y: float, z: float) -> np.ndarray:
    """The matrix of a rotation about x, then y, then z, in radians."""
    cx, sx, cy, sy, cz, sz = np.cos(x), np.sin(x), np.cos(y), np.sin(y), np.cos(z), np.sin(z)
    about_x = np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]])
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    about_z = np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]])
    return about_z @ about_y @ about_x


def _corners(to_world: np.ndarray) -> np.ndarray:
    signs = np.array([(x, y, z, 1) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    return (signs @ to_world.T)[:, :3]
