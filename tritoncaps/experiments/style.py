"""The style of the figures of the experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncaps.training.pictures import RIGHT, WRONG, pyplot

CAPSULES, CNN, OTHER = "#2563b8", "#d9622b", "#7a8599"
SERIES = (CAPSULES, CNN, "#2e8b57", "#8e5bb5", "#c9a227", OTHER)

_RC = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#98a1b0",
    "axes.grid": True,
    "grid.color": "#e3e5e8",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}


def drawn_alike() -> Any:
    """A context in which all figures have this style."""
    return pyplot().rc_context(_RC)


def subplots(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure of ``size`` inches and its axes [rows][columns]."""
    return pyplot().subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)


def picture(axis: Any, image: Tensor, title: str = "", right: bool | None = None, **options: Any) -> None:
    """Draw an image [C, H, W] with pixels in [0, 1], in colour or only its first channel. The title is green if
    ``right`` is True, red if it is False."""
    bare(axis)
    pixels = image.detach().clamp(0, 1)
    if len(pixels) == 3:
        axis.imshow(pixels.permute(1, 2, 0).numpy(), **options)
    else:
        axis.imshow(pixels[0].numpy(), **{"cmap": "gray", "vmin": 0, "vmax": 1, **options})
    colour = "black" if right is None else RIGHT if right else WRONG
    axis.set_title(title, fontsize=8, pad=2.5, color=colour, loc="center", fontweight="normal")


def tiles(axis: Any, images: Tensor, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Draw many grey images [rows, columns, C, H, W], with names beside the rows and above the columns."""
    count, across, _, height, width = images.shape
    gap = max(width // 10, 1)
    sheet = torch.ones(count, across, height + gap, width + gap)
    sheet[:, :, :height, :width] = images[:, :, 0].clamp(0, 1)
    picture = sheet.transpose(1, 2).reshape(count * (height + gap), across * (width + gap))[:-gap, :-gap]
    bare(axis)
    axis.imshow(picture.numpy(), cmap="gray", vmin=0, vmax=1)
    axis.set_xticks([(width + gap) * k + width / 2 for k in range(across)], columns, fontsize=7.5)
    axis.set_yticks([(height + gap) * k + height / 2 for k in range(count)], rows, fontsize=8.5)
    axis.tick_params(length=0, top=False, labeltop=True, labelbottom=False)


def bare(axis: Any) -> None:
    """Remove ticks, spines and grid."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(False)
    for side in axis.spines.values():
        side.set_visible(False)


def row_label(axis: Any, text: str) -> None:
    axis.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=8.5, labelpad=6)


def bars(axis: Any, names: Sequence[str], values: Sequence[float], marks: Sequence[float | None], mark: str) -> None:
    """Draw horizontal bars in per cent, from top to bottom. A diamond shows the number in ``marks``, for comparison."""
    places = range(len(names))
    axis.barh(places, [100 * value for value in values], color=CAPSULES, height=0.62)
    for place, value in zip(places, values, strict=True):
        inside = value > 0.15
        at = {"x": 100 * value - 1, "ha": "right", "color": "white"} if inside else {"x": 100 * value + 1, "ha": "left"}
        axis.text(y=place, s=f"{100 * value:.1f}%", va="center", fontsize=8, **at)
    shown = [(100 * value, place) for place, value in zip(places, marks, strict=True) if value is not None]
    if shown:
        diamond = {"marker": "D", "s": 32, "color": CNN, "edgecolor": "white", "linewidth": 0.8, "zorder": 3}
        axis.scatter(*zip(*shown, strict=True), label=mark, **diamond)
        axis.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderpad=0)
    axis.set_yticks(list(places), names)
    axis.invert_yaxis()
    axis.grid(False, axis="y")
