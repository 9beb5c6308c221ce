"""ToyNORB: data like smallNORB, rendered in seconds, without a download.

There are five categories of toys and ten instances of each: five for training and five for testing. Stereo images show
them from 9 elevations and 18 azimuths under 6 lights: 24,300 pairs of 48x48 pixels in each split, with the factors of
smallNORB in the same units. Each view moves, scales and tilts the toy a little, so that no single pixel shows the
category.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import torch

from tritoncaps.data.files import write_atomically
from tritoncaps.data.images import ImageSet
from tritoncaps.data.norb import CATEGORIES
from tritoncaps.data.toys import Toy, make_toy
from tritoncaps.waiting import waiting

VERSION = 1  # version of the images, part of the name of the cache file
SIZE = 48
INSTANCES = {"train": (4, 6, 7, 8, 9), "test": (0, 1, 2, 3, 5)}
ELEVATIONS, AZIMUTHS, LIGHTS = 9, 18, 6

DISTANCE = 6.0  # distance of the camera, in toy sizes
ZOOM = 98.0  # pixels for a length of 1 at distance 1
EYES = 0.35  # distance between the two eyes

# azimuth and elevation of each light in degrees, and its brightness
LIGHTINGS = ((20, 80, 1.1), (110, 55, 1.0), (230, 50, 1.0), (320, 50, 0.85), (60, 45, 0.7), (180, 60, 1.25))


def load_toynorb(split: str, folder: Path, seed: int = 0) -> ImageSet:
    """Load the images from the cache in ``folder``, or render them and write the cache."""
    path = folder / "toynorb" / f"toynorb-{VERSION}-{seed}-{split}.npy"
    images = _cached(path)
    if images is None:
        images = render_split(split, seed)
        try:
            write_atomically(path, lambda file: np.save(file, images))
        except OSError as error:
            warnings.warn(f"the images of ToyNORB are not cached: {path} cannot be written ({error})", stacklevel=2)
    category, instance, elevation, azimuth, lighting = torch.cartesian_prod(
        torch.arange(len(CATEGORIES)),
        torch.tensor(INSTANCES[split]),
        torch.arange(ELEVATIONS),
        torch.arange(0, 2 * AZIMUTHS, 2),
        torch.arange(LIGHTS),
    ).T
    factors = {"instance": instance, "elevation": elevation, "azimuth": azimuth, "lighting": lighting}
    return ImageSet(torch.from_numpy(images), category, CATEGORIES, factors)


def render_split(split: str, seed: int = 0) -> np.ndarray:
    """Bytes [24300, 2, 48, 48], ordered by category, instance, elevation, azimuth and lighting."""
    toys = list(product(range(len(CATEGORIES)), INSTANCES[split]))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        images = pool.map(lambda toy: render_toy(seed, *toy), toys)
        return np.concatenate(list(waiting(f"rendering ToyNORB's {split} toys, once", images, len(toys))))


def render_toy(seed: int, category: int, instance: int) -> np.ndarray:
    """All views of one toy: bytes [9 * 18 * 6, 2, 48, 48]."""
    random = np.random.default_rng((seed, category, instance))
    toy = make_toy(CATEGORIES[category], random)
    images = np.empty((ELEVATIONS, AZIMUTHS, LIGHTS, 2, SIZE, SIZE))
    for e, a in product(range(ELEVATIONS), range(AZIMUTHS)):
        _render_view(toy, np.radians(30 + 5 * e), np.radians(20 * a), random, images[e, a])
    noise = random.normal(0, 0.015, images.shape).astype(np.float32)
    return ((images + noise).clip(0, 1) * 255).round().astype(np.uint8).reshape(-1, 2, SIZE, SIZE)


def _render_view(toy: Toy, elevation: float, azimuth: float, random: np.random.Generator, images: np.ndarray) -> None:
    """Fill ``images`` [lights, 2, 48, 48] with one view; position, scale, angles and lights vary a little at random."""
    from tritoncaps.data.render import render  # imported only here, because it compiles

    elevation = elevation + random.uniform(-0.04, 0.04)
    azimuth = azimuth + random.uniform(-0.15, 0.15)
    zoom = ZOOM * random.uniform(0.75, 1.1)
    middle = SIZE / 2 + random.uniform(-3, 3, size=2)
    lights = np.array([_light(*lighting, random) for lighting in LIGHTINGS])
    for eye in range(2):
        place, right, up, ahead = _camera(elevation, azimuth, (eye - 0.5) * EYES, toy.height / 2)
        out = np.empty((LIGHTS, SIZE, SIZE))
        render(toy.kinds, toy.to_local, toy.albedo, 1.0, place, right, up, ahead, zoom, middle, lights, out)
        images[:, eye] = out


def _camera(elevation: float, azimuth: float, aside: float, height: float) -> tuple[np.ndarray, ...]:
    """The position of the eye, and the directions right, up and ahead when it looks at the middle of the toy."""
    flat = np.array([np.cos(azimuth), np.sin(azimuth), 0.0])
    right = np.array([-np.sin(azimuth), np.cos(azimuth), 0.0])
    target = np.array([0.0, 0.0, height])
    eye = target + DISTANCE * (np.cos(elevation) * flat + np.sin(elevation) * np.array([0, 0, 1.0])) + aside * right
    ahead = (target - eye) / np.linalg.norm(target - eye)
    right = np.cross(ahead, np.array([0, 0, 1.0]))
    right /= np.linalg.norm(right)
    return eye, right, np.cross(right, ahead), ahead


def _light(azimuth: float, elevation: float, brightness: float, random: np.random.Generator) -> np.ndarray:
    a, e = np.radians(azimuth + random.uniform(-15, 15)), np.radians(elevation + random.uniform(-5, 5))
    direction = (np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e))
    return np.array([*direction, brightness * random.uniform(0.9, 1.1)])


def _cached(path: Path) -> np.ndarray | None:
    """The images in the cache; None if there are none, or if the file is damaged."""
    try:
        images = np.load(path)
    except (OSError, ValueError, EOFError):
        return None
    pairs = len(CATEGORIES) * len(INSTANCES["train"]) * ELEVATIONS * AZIMUTHS * LIGHTS
    return images if images.shape == (pairs, 2, SIZE, SIZE) and images.dtype == np.uint8 else None
