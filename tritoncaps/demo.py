"""The program of `make demo`: train a small MatrixCapsNet for about two minutes to classify five kinds of toys.

The network is tested on toys that are not in the training set, and compared with a linear classifier. Its speed is
compared with the reference backend. The folder demo/ gets the run and a picture, report.png.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from tritoncaps import use_backend
from tritoncaps.data import ImageSet, load
from tritoncaps.training import Config, Result, pipeline_of, train
from tritoncaps.training.metrics import read_metrics
from tritoncaps.training.objective import Objective, class_scores
from tritoncaps.training.pictures import report
from tritoncaps.training.saved import load_network, task_by_name
from tritoncaps.training.task import build_network, load_test

EVALUATIONS = 5
LEAST_IMAGES = 8000  # training images on a slow machine, where the demo takes longer
SAMPLES = 48

CONFIG = Config(
    data="toynorb",
    model="matrix-capsnet-small",
    iterations=2,
    competition="local",
    crop=40,
    jitter="none",  # with jitter, training takes longer
    batch_size=32,
    lr=5e-3,
    lr_schedule="cosine",
    margin="fixed",
    test_limit=2000,
)
PIPELINE = pipeline_of(CONFIG)


def main(seconds: float = 120.0, folder: Path = Path("demo")) -> float:
    """Train for about ``seconds``, print the measurements, draw the report, and return the test accuracy."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    toys = load("toynorb", "train")
    tests = load_test(CONFIG)
    assert isinstance(toys, ImageSet)
    assert isinstance(tests, ImageSet)
    print(f"ToyNORB: {len(toys):,} stereo pairs of {', '.join(toys.classes)} for training; tests use other toys")

    ours, reference = images_per_second(toys, None, steps=5), images_per_second(toys, "reference", steps=1)
    print(f"training speed: {ours:.0f} images/s; the reference, which stores votes: {reference:.3g} images/s")
    images = max(round(seconds * ours), LEAST_IMAGES)
    result = train_capsules(images // CONFIG.batch_size, folder / "run")
    linear = linear_accuracy(toys, tests)
    seen = result.step * CONFIG.batch_size
    title = (
        f"accuracy {result.accuracy:.1%} on {len(tests):,} images of new toys after {seen:,} training images, "
        f"{seen / result.seconds:.0f} images/s"
    )
    print(f"{title} on {torch.get_num_threads()} CPU threads")
    print(f"accuracy of a linear classifier of the pixels: {linear:.1%}; chance: {1 / len(toys.classes):.0%}")
    draw(result, tests, linear, title, folder / "report.png")
    print(f"pictures: {folder / 'report.png'}; the run: {folder / 'run'}")
    return result.accuracy


def images_per_second(toys: ImageSet, backend: str | None, steps: int) -> float:
    """Training speed: the median of a few steps, after a first step that compiles the kernels."""
    torch.manual_seed(0)
    network = build_network(CONFIG, task_by_name(CONFIG))
    objective = Objective(network, "spread", "fixed", 1, 0.0)
    images = PIPELINE.test(toys.images[:: len(toys) // CONFIG.batch_size][: CONFIG.batch_size])[0]
    labels = toys.labels[:: len(toys) // CONFIG.batch_size][: CONFIG.batch_size]
    taken = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        with use_backend(backend):
            objective(images, labels)[0].backward()
        taken.append(time.perf_counter() - start)
    return len(images) / sorted(taken[1:])[steps // 2]


def train_capsules(steps: int, folder: Path) -> Result:
    images = steps * CONFIG.batch_size
    print(f"MatrixCapsNet.small, {CONFIG.iterations} iterations of EM routing, learns from {images:,} images:")
    shutil.rmtree(folder, ignore_errors=True)
    return train(replace(CONFIG, steps=steps, evaluate_every=max(steps // EVALUATIONS, 1), out=str(folder)))


def linear_accuracy(toys: ImageSet, tests: ImageSet, epochs: int = 5) -> float:
    """Test accuracy of a linear classifier of the same pixels, after a few epochs."""
    torch.manual_seed(0)
    pixels = PIPELINE.test(toys.images)[0].flatten(1)
    classifier = nn.Linear(pixels.shape[1], len(toys.classes))
    optimiser = torch.optim.Adam(classifier.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(toys)).split(128):
            optimiser.zero_grad()
            F.cross_entropy(classifier(pixels[batch]), toys.labels[batch]).backward()
            optimiser.step()
    predicted = classifier(PIPELINE.test(tests.images)[0].flatten(1)).argmax(dim=1)
    return (predicted == tests.labels).float().mean().item()


def draw(result: Result, tests: ImageSet, linear: float, title: str, out: Path) -> None:
    network, _ = load_network(result.folder / "last.pt")
    samples = tests.select(torch.arange(SAMPLES))
    with torch.no_grad():
        predictions = class_scores(network(PIPELINE.test(samples.images)[0])).argmax(dim=1)
    rows = [row for row in read_metrics(result.folder) if row["kind"] == "test"]
    curve = [(row["step"] * CONFIG.batch_size, row["accuracy"]) for row in rows]
    assert result.evaluation is not None
    assert result.evaluation.confusion is not None
    lines = {"linear classifier": linear, "chance": 1 / len(tests.classes)}
    report(out, title, samples, predictions.numpy(), curve, lines, result.evaluation.confusion.numpy())


if __name__ == "__main__":
    main()
