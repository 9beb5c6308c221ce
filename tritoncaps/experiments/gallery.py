"""Copies the figures of finished experiments into one folder, as small files. ``make experiments`` calls it.

python -m tritoncaps.experiments.gallery runs/experiments docs/experiments
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

from tritoncaps.data.files import write_atomically
from tritoncaps.extras import require

LIMIT = 140_000  # largest size of a picture in bytes


def collect(experiments: Path, out: Path) -> list[Path]:
    """Copy every figure of every report.json in ``experiments`` to ``out``/EXPERIMENT-FIGURE."""
    require("PIL", "the gallery", "train")
    from PIL import Image

    written = []
    for path in sorted(experiments.glob("*/report.json")):
        report = json.loads(path.read_text())
        for figure in report["figures"]:
            target = out / f"{report['name']}-{figure['file']}"
            with Image.open(path.parent / figure["file"]) as picture:
                content = _small(picture.convert("RGB"))
            write_atomically(target, lambda file, content=content: file.write(content))  # type: ignore[misc]
            written.append(target)
    return written


def _small(picture: Any) -> bytes:
    """A PNG with a palette of 256 colours, or of fewer if the file is larger than the limit."""
    for colours in (256, 192, 128, 96, 64, 48, 32):
        file = io.BytesIO()
        picture.quantize(colours, dither=0).save(file, "PNG", optimize=True)
        if file.tell() <= LIMIT:
            break
    return file.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiments", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    for file in collect(given.experiments, given.out):
        print(f"{file} {file.stat().st_size // 1000} kB")
