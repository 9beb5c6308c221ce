"""ToyNORB: the same bits from the same seed, disjoint toys, the effect of each factor, positions, and the cache."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch

from tritoncaps.data import DATASETS, ImageSet, toynorb
from tritoncaps.data.norb import CATEGORIES
from tritoncaps.data.toys import make_toy

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def car():
    """Images of a car, with two elevations to save time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toynorb, "ELEVATIONS", 2)
        yield toynorb.render_toy(0, 4, 0).reshape(2, 18, 6, 2, 48, 48)


def test_same_seed_same_bits(car):
    assert np.array_equal(car, toynorb.render_toy(0, 4, 0).reshape(car.shape))
    assert not np.array_equal(car, toynorb.render_toy(1, 4, 0).reshape(car.shape))


def test_toys_of_training_and_test_are_disjoint():
    train, test = toynorb.INSTANCES["train"], toynorb.INSTANCES["test"]
    assert sorted(train + test) == list(range(10))


def test_every_factor_changes_the_picture(car):
    left = car[..., 0, :, :].astype(float)
    noise = 3 * 255 * 0.015
    for axis in range(3):
        change = np.abs(np.diff(left, axis=axis)).max(axis=(-1, -2))
        assert (change > 2 * noise).all()
    stereo = np.abs(car[..., 0, :, :].astype(float) - car[..., 1, :, :])
    assert (stereo.max(axis=(-1, -2)) > 2 * noise).all()


@pytest.mark.parametrize("category", CATEGORIES)
def test_toys_stand_on_the_ground_within_reach(category):
    """Where a solid is of size one, the corners of its box are within the toy's reach in the world."""
    for seed in range(20):
        toy = make_toy(category, np.random.default_rng(seed))
        for to_local in toy.to_local:
            to_world = np.linalg.inv(np.vstack([to_local, [0, 0, 0, 1]]))
            corners = np.array([(x, y, z, 1) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]) @ to_world.T
            assert corners[:, 2].min() > -1e-6
            assert corners[:, 2].max() <= toy.height + 1e-6
            assert np.hypot(corners[:, 0], corners[:, 1]).max() < 1.01


def test_cache(tmp_path, monkeypatch):
    """Written once, read back; a damaged file is rendered again."""
    monkeypatch.setattr(toynorb, "ELEVATIONS", 9)
    pairs = np.zeros((24_300, 2, 48, 48), np.uint8)
    calls = []
    monkeypatch.setattr(toynorb, "render_split", lambda split, seed: calls.append(split) or pairs)
    first = toynorb.load_toynorb("train", tmp_path)
    assert (len(first), first.shape, first.classes) == (24_300, (2, 48, 48), CATEGORIES)
    assert torch.bincount(first.labels).tolist() == [4860] * 5
    assert set(first.factors["azimuth"].tolist()) == set(range(0, 36, 2))
    toynorb.load_toynorb("train", tmp_path)
    assert calls == ["train"]
    (file,) = (tmp_path / "toynorb").iterdir()
    with open(file, "r+b") as damaged:
        damaged.truncate(1000)
    toynorb.load_toynorb("train", tmp_path)
    assert calls == ["train", "train"]


def test_settings_are_chosen_on_other_toys(monkeypatch, tmp_path):
    """docs/recipes/other_toys.py trains on the toys of one seed and tests on those of another, never of ToyNORB."""
    recipe = ROOT / "docs" / "recipes" / "other_toys.py"
    spec = spec_from_file_location("other_toys", recipe)
    other_toys = module_from_spec(spec)
    spec.loader.exec_module(other_toys)
    loaded = []

    def load(split, folder, seed):
        loaded.append((split, seed))
        labels = torch.arange(24_300) // 4860
        return ImageSet(labels.view(-1, 1, 1, 1).byte(), labels, CATEGORIES)

    monkeypatch.setattr(other_toys, "load_toynorb", load)
    sets = [getattr(other_toys, f"toys_{seed}")(split, tmp_path) for seed in (1, 2, 3) for split in ("train", "test")]
    assert set(loaded) == {("train", 1), ("train", 2), ("train", 3), ("train", 101), ("test", 101)}
    for (toys, pipeline), size in zip(sets, 3 * [24_300, 10_000], strict=True):
        assert len(toys) == size
        assert torch.equal(toys.images.flatten().long(), toys.labels)  # each image keeps its label
        assert pipeline == DATASETS["toynorb"].pipeline
