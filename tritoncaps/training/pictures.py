"""Pictures of data and of results, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tritoncaps.data import ImageSet, MultiMNIST
from tritoncaps.data.files import DataError, write_atomically
from tritoncaps.extras import require
from tritoncaps.training.metrics import METRICS, read_metrics

COLUMNS = 12
RIGHT, WRONG = "#207020", "#c02020"


def contact_sheet(data: ImageSet | MultiMNIST, out: Path, title: str = "") -> None:
    """One or two rows of images for each class, spread evenly over the data; only the left image of stereo pairs. For
    MultiMNIST, images with the names of their two classes."""
    if isinstance(data, MultiMNIST):
        images, labels, _ = data.__getitems__(range(0, len(data), max(len(data) // (10 * COLUMNS), 1)))
        names = [" and ".join(data.classes[k] for k in row.nonzero().flatten()) for row in labels[: 10 * COLUMNS]]
        _save_grid(images[: 10 * COLUMNS], out, title, captions=names)
        return
    rows = 2 if len(data.classes) <= 5 else 1
    chosen = []
    for k in range(len(data.classes)):
        members = torch.nonzero(data.labels == k).flatten()
        if not len(members):
            raise DataError(f"there is no image of class {data.classes[k]}")
        # steps that share no divisor with the numbers of views and lights, so that all of them appear
        steps = torch.arange(rows * COLUMNS) * (len(members) // (rows * COLUMNS) * 1.0 + 0.37)
        chosen.append(members[steps.long() % len(members)])
    _save_grid(data.images[torch.cat(chosen)], out, title, classes=data.classes)


def _save_grid(
    images: torch.Tensor, out: Path, title: str, classes: Sequence[str] = (), captions: Sequence[str] = ()
) -> None:
    """Rows of images with the names of the ``classes`` beside their rows, or with ``captions`` above each image."""
    plt = pyplot()
    rows = -(-len(images) // COLUMNS)
    # space beside, above and between the images, in inches
    beside, above, between = (1.0 if classes else 0.06), 0.34, (0.2 if captions else 0.04)
    cell = 0.86
    width, height = beside + COLUMNS * (cell + 0.04), above + rows * (cell + between) + 0.06
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(width, height), squeeze=False)
    top = above + (between if captions else 0)
    figure.subplots_adjust(
        beside / width, 0.06 / height, 1 - 0.04 / width, 1 - top / height, wspace=0.04 / cell, hspace=between / cell
    )
    for i, axis in enumerate(axes.flat):
        if i >= len(images):
            axis.axis("off")
            continue
        _draw(axis, images[i])
        if captions:
            axis.set_title(captions[i], fontsize=8, pad=2)
    for k, name in enumerate(classes):
        share = rows // len(classes)
        first, last = (axes[k * share + r, 0].get_position() for r in (0, share - 1))
        figure.text((beside - 0.1) / width, (first.y1 + last.y0) / 2, name, ha="right", va="center", fontsize=10)
    figure.text(beside / width, 1 - 0.1 / height, title, ha="left", va="top", fontsize=10)
    save(figure, out)


def _draw(axis: Any, image: torch.Tensor) -> None:
    """Draw the left image of a pair, or a colour image."""
    axis.set_xticks([])
    axis.set_yticks([])
    for side in axis.spines.values():
        side.set_visible(False)
    if len(image) == 3:
        axis.imshow(image.permute(1, 2, 0).numpy())
    else:
        axis.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=255)


def pyplot() -> Any:
    require("matplotlib", "a picture", "train")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_folder(flag: str, out: Path) -> None:
    """Raise an error if the folder of a picture does not exist: its name may be mistyped."""
    if not out.absolute().parent.is_dir():
        raise DataError(f"{flag} {out} cannot be written: there is no folder {out.parent}")


def save(figure: Any, out: Path) -> None:
    kind = out.suffix.removeprefix(".") or "png"
    write_atomically(out, lambda file: figure.savefig(file, format=kind, dpi=100))
    pyplot().close(figure)


def learning_curve(folder: Path, out: Path) -> None:
    """Accuracy over the steps of a run: on its training batches, and at its evaluations."""
    rows = read_metrics(folder)
    if not rows:
        raise DataError(f"{folder / METRICS} contains no metrics")
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for kind in ("train", "validation", "test"):
        points = [(row["epoch"], 100 * row["accuracy"]) for row in rows if row["kind"] == kind]
        if points:
            label = (
                "training batches, with augmentation" if kind == "train" else f"{kind}, {points[-1][1]:.2f}% at the end"
            )
            marker = "" if kind == "train" and len(points) > 1 else "o"  # a single point makes no line
            axis.plot(*zip(*points, strict=True), marker=marker, markersize=4, linewidth=1.2, label=label)
    axis.set(xlabel="epoch", ylabel="accuracy, %", title=folder.resolve().name)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    save(figure, out)


def report(
    out: Path,
    title: str,
    data: ImageSet,
    predictions: np.ndarray,
    curve: list[tuple[float, float]],
    lines: dict[str, float],
    confusion: np.ndarray,
) -> None:
    """A picture of samples with their predictions, the learning curve with ``lines`` for comparison, and the confusion
    matrix.

    ``data`` and ``predictions`` are the samples; ``curve`` has pairs of training images and accuracy.
    """
    plt = pyplot()
    figure = plt.figure(figsize=(13, 7.2))
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    grid = figure.add_gridspec(1, 2, width_ratios=(1.25, 1), left=0.01, right=0.98, top=0.92, bottom=0.08, wspace=0.2)
    figure.text(0.01, 0.02, "green: correct prediction; red: wrong prediction (true class)", fontsize=8)
    _samples(figure, grid[0], data, predictions)
    right = grid[1].subgridspec(2, 1, hspace=0.32)
    _curve(figure.add_subplot(right[0]), curve, lines)
    title = "Confusion matrix"
    _confusion(figure.add_subplot(right[1]), confusion, data.classes, title)
    save(figure, out)


def _samples(figure: Any, place: Any, data: ImageSet, predictions: np.ndarray) -> None:
    columns = 8
    rows = -(-len(data) // columns)
    axes = place.subgridspec(rows, columns, wspace=0.06, hspace=0.28).subplots()
    for i, axis in enumerate(axes.flat):
        if i >= len(data):
            axis.axis("off")
            continue
        _draw(axis, data.images[i])
        true, predicted = data.classes[int(data.labels[i])], data.classes[int(predictions[i])]
        colour, text = (RIGHT, predicted) if true == predicted else (WRONG, f"{predicted}\n({true})")
        axis.set_title(text, fontsize=7, pad=2, color=colour, linespacing=1.0)


def _curve(axis: Any, curve: list[tuple[float, float]], lines: dict[str, float]) -> None:
    seen, accuracy = zip(*curve, strict=True)
    label = f"capsules, new toys: {accuracy[-1]:.1%} at the end"
    axis.plot(seen, [100 * a for a in accuracy], marker="o", markersize=4, label=label)
    for style, (name, value) in zip(("--", ":", "-."), lines.items(), strict=False):
        axis.axhline(100 * value, linestyle=style, color="gray", linewidth=1.2, label=f"{name}: {value:.1%}")
    axis.set(xlabel="training images", ylabel="test accuracy, %", ylim=(0, 100), xlim=(0, 1.05 * max(seen)))
    axis.set_title("Learning curve", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="best")


def confusion_figure(confusion: np.ndarray, classes: tuple[str, ...]) -> Any:
    """A figure of the confusion matrix."""
    side = 2.0 + 0.55 * len(classes)
    figure, axis = pyplot().subplots(figsize=(side, side), layout="constrained")
    _confusion(axis, confusion, classes, "Confusion matrix")
    axis.tick_params(axis="x", rotation=45 if max(map(len, classes)) > 6 else 0)
    return figure


def _confusion(axis: Any, confusion: np.ndarray, classes: tuple[str, ...], title: str) -> None:
    share = confusion / confusion.sum(axis=1, keepdims=True).clip(1)
    axis.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for i, j in np.ndindex(share.shape):
        colour = "white" if share[i, j] > 0.5 else "black"
        axis.text(j, i, f"{share[i, j]:.0%}", ha="center", va="center", color=colour, fontsize=8)
    axis.set_xticks(range(len(classes)), classes, fontsize=8)
    axis.set_yticks(range(len(classes)), classes, fontsize=8)
    axis.set(xlabel="predicted", ylabel="true")
    axis.set_title(title, fontsize=10)
