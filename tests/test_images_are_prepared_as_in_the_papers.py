"""Preprocessing of images: crops, shifts, brightness, contrast and standardisation."""

from dataclasses import replace

import pytest
import torch

from tritoncaps.data import DATASETS, Pipeline
from tritoncaps.data.pipeline import JITTERS, standardise

IMAGES = torch.randint(256, (6, 2, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
RANDOM_NUMBERS = Pipeline().random_numbers
RANDOM = torch.rand(6, RANDOM_NUMBERS, generator=torch.Generator().manual_seed(1))


def test_smallnorb_pipeline_step_by_step():
    """Mean 0 and variance 1 of both eyes together, a crop of 32, brightness, contrast about each channel's mean."""
    seen = DATASETS["smallnorb"].pipeline.train(IMAGES, RANDOM)
    for n, (y, x, brightness, contrast) in enumerate(RANDOM[:, :4].tolist()):
        pixels = IMAGES[n].double()
        pixels = (pixels - pixels.mean()) / pixels.std(correction=0)
        top, left = int(y * 17), int(x * 17)
        crop = pixels[:, top : top + 32, left : left + 32] + (2 * brightness - 1) * 2.0
        mean = crop.mean(dim=(1, 2), keepdim=True)
        expected = (crop - mean) * (0.5 + contrast) + mean
        assert torch.allclose(seen[n].double(), expected, atol=1e-4)


def test_the_order_of_the_authors_code():
    """Brightness by up to 63 of 255, contrast about each channel's mean, a crop of 32, then mean 0 and variance 1."""
    seen = Pipeline(crop=32, jitter=JITTERS["first"], standardise="crop").train(IMAGES, RANDOM)
    for n, (y, x, brightness, contrast) in enumerate(RANDOM[:, :4].tolist()):
        pixels = IMAGES[n].double() + (2 * brightness - 1) * 63
        mean = pixels.mean(dim=(1, 2), keepdim=True)
        pixels = (pixels - mean) * (0.2 + 1.6 * contrast) + mean
        top, left = int(y * 17), int(x * 17)
        crop = pixels[:, top : top + 32, left : left + 32] / 255
        expected = (crop - crop.mean()) / crop.std(correction=0)
        assert torch.allclose(seen[n].double(), expected, atol=1e-4)


@pytest.mark.parametrize("data", [name for name, entry in DATASETS.items() if entry.pipeline.jitter])
@pytest.mark.parametrize("column", [2, 3], ids=["brightness", "contrast"])
def test_jitter_changes_what_the_network_sees(data, column):
    """Standardisation after the jitter cancels it: the default order must not."""
    low, high = RANDOM.clone(), RANDOM.clone()
    low[:, column], high[:, column] = 0.1, 0.9
    pipeline = DATASETS[data].pipeline
    change = (pipeline.train(IMAGES, low) - pipeline.train(IMAGES, high)).abs().mean(dim=(1, 2, 3))
    assert change.min() > 0.3
    cancelled = replace(pipeline, jitter=JITTERS["first"], standardise="crop")
    assert (cancelled.train(IMAGES, low) - cancelled.train(IMAGES, high)).abs().mean() < 0.05


def test_both_eyes_jitter_alike():
    seen = DATASETS["smallnorb"].pipeline.train(IMAGES[:, :1].repeat(1, 2, 1, 1), RANDOM)
    assert torch.equal(seen[:, 0], seen[:, 1])


def test_each_eye_is_standardised_by_itself():
    dark = torch.stack([IMAGES[:, 0], IMAGES[:, 1] // 4], dim=1)
    (seen,) = Pipeline(crop=32, standardise="crop", per_channel=True).test(dark)
    assert torch.allclose(seen.mean(dim=(2, 3)), torch.zeros(6, 2), atol=1e-5)
    assert torch.allclose(seen.std(dim=(2, 3), correction=0), torch.ones(6, 2), atol=1e-5)


def test_edges_are_repeated():
    bright = torch.full((1, 1, 8, 8), 255, dtype=torch.uint8)
    corner = torch.zeros(1, RANDOM_NUMBERS)
    assert Pipeline(pad=2, edges="repeat").train(bright, corner).min() == 1
    assert Pipeline(pad=2).train(bright, corner)[0, 0, 0, 0] == 0


def test_images_turn_and_grow_about_their_middle():
    images = torch.zeros(1, 1, 33, 33, dtype=torch.uint8)
    images[0, 0, 15:18, 16:27] = 255  # a bar from the middle to the right
    random = torch.full((1, RANDOM_NUMBERS), 0.5)
    most = random.clone()
    most[0, 4] = 1.0
    turned = Pipeline(rotation=90.0).train(images, most)[0, 0]
    assert torch.allclose(turned, images[0, 0].float().rot90(1) / 255, atol=1e-4)
    most = random.clone()
    most[0, 5] = 1.0
    grown = Pipeline(scaling=0.4).train(images, most)[0, 0]
    assert grown.sum() == pytest.approx(1.4**2 * 33, rel=0.05)
    assert torch.allclose(Pipeline(rotation=9.0, scaling=0.4).train(images, random), images / 255, atol=1e-5)
    wide = torch.zeros(1, 1, 21, 41, dtype=torch.uint8)
    wide[0, 0, 10, 15:26] = 255
    quarter = Pipeline(rotation=90.0).train(wide, torch.tensor([[0.5, 0.5, 0.5, 0.5, 1.0, 0.5]]))[0, 0]
    assert torch.allclose(quarter[5:16, 20], torch.ones(11), atol=1e-4)  # no stretching of images that are not square


def test_images_are_stretched_and_sheared_about_their_middle():
    """Each of the last four random numbers changes one entry of the matrix from places in the result to the image."""
    pipeline = Pipeline(affine=0.4)
    assert pipeline.random_numbers == RANDOM_NUMBERS + 4
    y, x = torch.meshgrid(torch.arange(21.0) - 10, torch.arange(41.0) - 20, indexing="ij")
    images = torch.stack([100 + 2 * x + 3 * y]).byte()[None]  # a plane, so that interpolation is exact
    middle = torch.full((1, pipeline.random_numbers), 0.5)
    assert torch.allclose(pipeline.train(images, middle), images / 255, atol=1e-5)
    for entry, expected in enumerate([2.8 * x + 3 * y, 2 * x + 3.8 * y, 3.2 * x + 3 * y, 2 * x + 4.2 * y]):
        most = middle.clone()
        most[0, RANDOM_NUMBERS + entry] = 1.0
        near = (slice(6, 15), slice(12, 29))  # all places that come from inside of the image
        seen = pipeline.train(images, most)[0, 0]
        assert torch.allclose(seen[near], (100 + expected)[near] / 255, atol=1e-4), entry


def test_tests_see_the_middle():
    (seen,) = DATASETS["smallnorb"].pipeline.test(IMAGES)
    assert torch.allclose(seen, standardise(IMAGES.float() / 255)[:, :, 8:40, 8:40], atol=1e-5)


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
            random = torch.tensor([[y / 50, x / 5 + 0.1, 0, 0, 0, 0]])
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
    for number in (0.0, 1.0):  # random numbers are below 1, but may become 1 by rounding
        random = torch.full((2, RANDOM_NUMBERS), number)
        assert DATASETS["smallnorb"].pipeline.train(flat, random).isfinite().all()
    assert DATASETS["mnist"].pipeline.train(flat[:0], torch.zeros(0, RANDOM_NUMBERS)).shape == (0, 1, 48, 48)
