"""Crops, shifts, brightness, contrast and standardisation."""

import pytest
import torch

from tritoncaps.data import DATASETS, Pipeline
from tritoncaps.data.pipeline import RANDOM_NUMBERS, standardise

IMAGES = torch.randint(256, (6, 2, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
RANDOM = torch.rand(6, RANDOM_NUMBERS, generator=torch.Generator().manual_seed(1))


def test_smallnorb_pipeline_step_by_step():
    """Brightness by up to 63 of 255, contrast about each channel's mean, a crop of 32, then mean 0 and variance 1."""
    seen = DATASETS["smallnorb"].pipeline.train(IMAGES, RANDOM)
    for n, (y, x, brightness, contrast) in enumerate(RANDOM.tolist()):
        pixels = IMAGES[n].double() + (2 * brightness - 1) * 63
        mean = pixels.mean(dim=(1, 2), keepdim=True)
        pixels = (pixels - mean) * (0.2 + 1.6 * contrast) + mean
        top, left = int(y * 17), int(x * 17)
        crop = pixels[:, top : top + 32, left : left + 32] / 255
        expected = (crop - crop.mean()) / crop.std(correction=0)
        assert torch.allclose(seen[n].double(), expected, atol=1e-4)


def test_tests_see_the_middle():
    (seen,) = DATASETS["smallnorb"].pipeline.test(IMAGES)
    assert torch.allclose(seen, standardise(IMAGES[:, :, 8:40, 8:40].float() / 255), atol=1e-5)


@pytest.mark.parametrize("crops", [1, 5, 13])
def test_several_crops(crops):
    plain = Pipeline(crop=32)
    seen = plain.test(IMAGES, crops)
    assert len(seen) == crops
    corners = {(0, 0), (0, 16), (16, 0), (16, 16)} if crops > 1 else set()
    for y, x in corners | {(8, 8)}:  # the middle and the corners are among them
        window = IMAGES[:, :, y : y + 32, x : x + 32].float() / 255
        assert any(torch.equal(window, crop) for crop in seen)
    with pytest.raises(ValueError, match="crops must be one of 1, 5, 13, but it is 4"):
        plain.test(IMAGES, 4)


def test_mnist_is_shifted_by_up_to_two():
    pipeline = Pipeline(pad=2)
    point = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    point[0, 0, 14, 14] = 255
    places = set()
    for y in range(50):
        for x in range(5):
            random = torch.tensor([[y / 50, x / 5 + 0.1, 0, 0]])
            seen = pipeline.train(point, random)
            assert seen.shape == (1, 1, 28, 28)
            places.add(tuple(seen[0, 0].nonzero()[0].tolist()))
    assert places == {(14 + dy, 14 + dx) for dy in range(-2, 3) for dx in range(-2, 3)}
    assert torch.equal(pipeline.test(point)[0], point.float() / 255)


def test_the_other_published_recipe():
    """Standardised at 48 pixels, then cropped."""
    pipeline = Pipeline(crop=32, standardise="image")
    whole = standardise(IMAGES.float() / 255)
    assert torch.allclose(pipeline.test(IMAGES)[0], whole[:, :, 8:40, 8:40])
    corner = pipeline.train(IMAGES, torch.zeros(6, RANDOM_NUMBERS))
    assert torch.allclose(corner, whole[:, :, :32, :32])


def test_extremes_stay_finite():
    flat = torch.full((2, 1, 48, 48), 7, dtype=torch.uint8)
    for random in (torch.zeros(2, 4), torch.ones(2, 4)):  # 1 itself never comes, but may by rounding
        assert DATASETS["smallnorb"].pipeline.train(flat, random).isfinite().all()
    assert DATASETS["mnist"].pipeline.train(flat[:0], torch.zeros(0, 4)).shape == (0, 1, 48, 48)
