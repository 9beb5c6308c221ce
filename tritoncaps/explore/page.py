"""Writes the page: the HTML, CSS and JavaScript files in this folder, filled with the data."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tritoncaps.data.files import write_atomically
from tritoncaps.data.pipeline import Pipeline
from tritoncaps.explore.collect import Collected, collect, first_images
from tritoncaps.explore.packing import pack

FOLDER = Path(__file__).parent
SCRIPTS = ("data.js", "network.js", "routing.js", "page.js")  # in this order
LIMIT = 5_000_000  # largest size of a page in bytes


def render(collected: Collected, title: str, about: str) -> str:
    """The HTML, without external resources. ``about``: one line under the title."""
    packed = pack(collected.arrays)
    header = {"title": title, "about": about, **collected.header, "arrays": packed.table}
    fillings = {
        "title": html.escape(title),
        "style": (FOLDER / "style.css").read_text(encoding="utf-8"),
        "header": json.dumps(header, separators=(",", ":")).replace("<", "\\u003c"),
        "data": packed.content,
        "script": "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    page = (FOLDER / "page.html").read_text(encoding="utf-8")
    for name, text in fillings.items():
        page = page.replace(f"<!-- {name} -->", text)
    return page


def write_page(
    path: str | os.PathLike,
    network: nn.Module,
    pixels: Tensor,
    labels: Sequence[Sequence[int]],
    classes: Sequence[str],
    pipeline: Pipeline,
    title: str = "A capsule network",
    about: str = "",
) -> int:
    """Write a page of a network and images. It shows as many of the images as fit into 5 MB.

    Args:
        path: the HTML file.
        network: MatrixCapsNet, TinyCapsNet, CapsNet, or a network with the same names of layers, in evaluation mode.
        pixels: images of a data set.
        labels: the true classes of each image.
        classes: names of the classes.
        pipeline: preprocessing of the images.
        title: title of the page.
        about: one line under the title.

    Shape:
        - pixels: uint8 [N, channels, H, W]

    Returns:
        The number of images on the page.

    Raises:
        ValueError: if a page with one image is larger than 5 MB.
        TypeError: if the network has no such layers.
    """

    def prepare(x: Tensor) -> Tensor:
        return pipeline.test(255 * x)[0]

    def show(x: Tensor) -> Tensor:
        return replace(pipeline, standardise=None).test(255 * x)[0]

    given: Any = (labels, classes, prepare, show)
    collected = collect(network, pixels.float() / 255, *given)
    page = render(collected, title, about).encode()
    count = len(pixels)
    while len(page) > LIMIT and count > 1:
        count = max(1, min(count - 1, int(count * LIMIT / len(page))))
        page = render(first_images(collected, count), title, about).encode()
    if len(page) > LIMIT:
        raise ValueError(f"the network is too large for a page of {LIMIT:,} bytes: with one image it has {len(page):,}")
    write_atomically(Path(path), lambda file: file.write(page))
    return count
