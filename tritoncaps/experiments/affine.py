"""Section 5.2 of Sabour 2017: train on shifted MNIST in 40x40 pixels, test on digits under affine transformations.

CapsNet and the CNN stop at the same accuracy on held-out digits that are only shifted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tritoncaps.data import DataError, ImageSet, Pipeline, data_folder
from tritoncaps.data.affnist import SIZE, affnist_like, load_affnist
from tritoncaps.data.idx import load_mnist
from tritoncaps.experiments.lab import Lab, Trained, pixels_of
from tritoncaps.experiments.networks import train_capsnet, train_cnn
from tritoncaps.experiments.style import CAPSULES, CNN, bars, picture, row_label, subplots
from tritoncaps.training import ConfigError
from tritoncaps.training.objective import class_scores

SHIFT = 6
PAPER = {"CapsNet": (0.9923, 0.79), "CNN": (0.9922, 0.66)}  # shifted MNIST, affNIST
EVALUATIONS = 15
CNN_STEPS = 4  # the CNN may take this many times the steps of CapsNet to reach its accuracy
COLUMNS = 10


def run(lab: Lab) -> None:
    if lab.options.run or lab.options.pretrained or lab.options.data not in (None, "mnist", "affnist"):
        raise ConfigError("affine trains on MNIST: do not use --run, --pretrained or --data other than affnist")
    lab.plan(4)
    steps = lab.options.steps or lab.choose(300, 10_000)
    settings: dict[str, Any] = {
        "data": "experiments:shifted-mnist",
        "source": shifted_mnist,
        "validation": lab.choose(300, 5000),
        "final_test": False,
        "evaluate_every": max(steps // EVALUATIONS, 1),
        "lr_schedule": "exponential",
    }
    capsnet = train_capsnet(lab, "CapsNet", steps, **settings)
    often = {**settings, "evaluate_every": max(steps // (4 * EVALUATIONS), 1)}  # it learns faster
    cnn = train_cnn(lab, "CNN", CNN_STEPS * steps, stop_at=capsnet.result["accuracy"], **often)
    if cnn.result["accuracy"] < capsnet.result["accuracy"]:
        capsnet = train_capsnet(lab, "CapsNet", steps, stop_at=cnn.result["accuracy"], **settings)
    count = lab.options.images or lab.choose(1000, 10_000)
    shifted, transformed, is_official = _tests(lab, count)
    for network in (capsnet, cnn):
        found = lab.step(f"test-{network.name}", lambda n=network: _test(n, shifted, transformed))  # type: ignore[misc]
        names = ("paper_mnist_accuracy", "paper_affnist_accuracy")
        paper = dict(zip(names, PAPER[network.name], strict=True))
        held_out = {"held_out_accuracy": network.result["accuracy"]}
        lab.row(network=network.name, **held_out, **found, **paper, steps=network.result["step"])
        lab.numbers[f"accuracy on transformed digits, {network.name}"] = found["transformed_accuracy"]
    name = "affNIST" if is_official else "an affNIST-like test set"
    lab.numbers |= {"images": len(transformed), "test set": name}
    lab.figure(
        "examples",
        _figure(capsnet, cnn, transformed),
        f"Digits of {name}, and the predictions of each network (green: correct).",
    )
    lab.figure(
        "accuracies",
        _bars(lab.rows),
        f"Accuracy on {len(shifted)} digits in the middle of the image and on the digits of {name}.",
    )
    if not is_official:
        lab.note(
            "The official files of affNIST are missing. The digits are test digits of MNIST, transformed by this "
            "program: rotated by up to 20 degrees, sheared by up to 0.2, scaled by 0.8 to 1.2 in height and width, and "
            "moved. Do not compare these accuracies with accuracies on affNIST; `tritoncaps data get affnist` "
            "downloads the files."
        )


def shifted_mnist(split: str, folder: Path) -> tuple[ImageSet, Pipeline]:
    """Digits in the middle of 40x40 pixels; training shifts them by up to 6 pixels."""
    mnist = load_mnist(split, folder)
    margin = (SIZE - mnist.shape[-1]) // 2
    images = torch.nn.functional.pad(mnist.images, (margin,) * 4)
    return ImageSet(images, mnist.labels, mnist.classes), Pipeline(pad=SHIFT, standardise="crop")


def _tests(lab: Lab, count: int) -> tuple[ImageSet, ImageSet, bool]:
    """Test digits in the middle of the image, transformed digits, and True if these are the files of affNIST."""
    folder, seed = data_folder(lab.options.data_dir), lab.options.seed
    plain, _ = shifted_mnist("test", folder)
    try:
        transformed, is_official = load_affnist("test", folder), True
    except DataError:
        mnist = load_mnist("test", folder)
        chosen = mnist if count >= len(mnist) else mnist.split(count, seed)[0]
        transformed, is_official = affnist_like(chosen, seed), False
    some = [data if count >= len(data) else data.split(count, seed)[0] for data in (plain, transformed)]
    return some[0], some[1], is_official


def _test(network: Trained, shifted: ImageSet, transformed: ImageSet) -> dict[str, float]:
    return {
        "mnist_accuracy": network.evaluate(shifted).accuracy,
        "transformed_accuracy": network.evaluate(transformed).accuracy,
    }


def _bars(rows: list[dict[str, Any]]) -> Any:
    names = [f"{row['network']}, {kind}" for row in rows for kind in ("only in the middle", "transformed")]
    values = [row[key] for row in rows for key in ("mnist_accuracy", "transformed_accuracy")]
    paper = [row[key] for row in rows for key in ("paper_mnist_accuracy", "paper_affnist_accuracy")]
    figure, ((axis,),) = subplots(1, 1, (7.2, 2.5))
    bars(axis, names, values, paper, "the paper, on affNIST")
    axis.set(xlabel="accuracy, %", xlim=(0, 108))
    return figure


def _figure(capsnet: Trained, cnn: Trained, data: ImageSet) -> Any:
    chosen = data.select(torch.arange(len(data)) < COLUMNS)
    figure, axes = subplots(2, COLUMNS, (0.86 * COLUMNS + 0.8, 2.5))
    for line, network, colour in zip(axes, (capsnet, cnn), (CAPSULES, CNN), strict=True):
        with torch.no_grad():
            predictions = class_scores(network(pixels_of(chosen))).argmax(dim=1).tolist()
        for axis, image, label, prediction in zip(
            line, pixels_of(chosen), chosen.labels.tolist(), predictions, strict=False
        ):
            picture(axis, image, data.classes[prediction], right=label == prediction)
        row_label(line[0], network.name)
        line[0].yaxis.label.set_color(colour)
    return figure
