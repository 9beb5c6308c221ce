"""The figures of finished experiments in one folder, small enough for a repository: ``make experiments`` calls it.

python -m tritoncaps.experiments.gallery runs/experiments docs/experiments
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tritoncaps.data.files import write_atomically
from tritoncaps.extras import require

COLOURS = 64


def collect(experiments: Path, out: Path) -> list[Path]:
    """Every figure of every report.json under ``experiments`` becomes ``out``/EXPERIMENT-FIGURE, with few colours."""
    require("PIL", "the gallery", "train")
    from PIL import Image

    written = []
    for path in sorted(experiments.glob("*/report.json")):
        report = json.loads(path.read_text())
        for figure in report["figures"]:
            target = out / f"{report['name']}-{figure['file']}"
            with Image.open(path.parent / figure["file"]) as picture:
                small = picture.convert("RGB").quantize(COLOURS)
            write_atomically(target, lambda file, small=small: small.save(file, "PNG", optimize=True))  # type: ignore[misc]
            written.append(target)
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiments", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    for file in collect(given.experiments, given.out):
        print(f"{file} {file.stat().st_size // 1000} kB")
