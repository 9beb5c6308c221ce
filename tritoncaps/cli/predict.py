"""classify pictures

The command scales each picture to the size of the network's images. For a network for stereo pairs, a picture must
contain the left and the right image side by side; a picture that is not twice as wide as high is used for both eyes.
Transparent parts become white behind dark ink and black behind bright ink. If a file is not a picture, the command
reports it, classifies the other files, and the exit code is 1.

examples:
  tritoncaps predict --pretrained toynorb pair.png                    a pretrained network of the package
  tritoncaps predict --run runs/mnist-capsnet seven.png two.png
  tritoncaps predict --run runs/mnist-capsnet *.png --json
  tritoncaps predict --run runs/mnist-capsnet --invert scan.jpg       dark ink on white paper
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritoncaps.data import DATASETS, DataError
from tritoncaps.extras import require
from tritoncaps.models.pretrained import CHECKSUMS
from tritoncaps.training.objective import class_scores
from tritoncaps.training.own import find_all
from tritoncaps.training.saved import load_network, load_pretrained_network
from tritoncaps.training.task import pipeline_of


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("images", metavar="IMAGE", nargs="+", type=Path, help="files of pictures")
    network = parser.add_mutually_exclusive_group(required=True)
    network.add_argument("--run", metavar="RUN", dest="run_folder", help="folder of a run, or a checkpoint")
    network.add_argument("--pretrained", choices=CHECKSUMS, help="a pretrained network of the package")
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="function that builds your own network")
    parser.add_argument("--invert", action="store_true", help="invert the brightness")
    parser.add_argument("--crops", type=int, default=1, choices=(1, 5, 13), help="number of crops to average over [1]")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each picture")


def run(args: argparse.Namespace) -> int:
    require("PIL", "predict", "train")
    if args.pretrained:
        network, config, _ = load_pretrained_network(args.pretrained)
    else:
        network, config = load_network(args.run_folder, find_all(model=args.model).get("network"))
    entry = DATASETS[config.data]
    channels = 1 if config.mono else entry.shape[0]
    broken = 0
    for path in args.images:
        try:
            pixels = read_picture(path, channels, *entry.shape[1:])
        except DataError as error:
            broken += 1
            if args.json:
                print(json.dumps({"image": str(path), "error": str(error)}))
            else:
                print(f"tritoncaps predict: {error}", file=sys.stderr)
            continue
        pixels = 255 - pixels if args.invert else pixels
        with torch.no_grad():
            crops = pipeline_of(config).test(pixels[None], args.crops)
            scores = torch.stack([class_scores(network(crop))[0] for crop in crops]).mean(dim=0)
        best = scores.argsort(descending=True)[:3].tolist()
        if args.json:
            by_class = {name: round(score, 4) for name, score in zip(entry.classes, scores.tolist(), strict=True)}
            print(json.dumps({"image": str(path), "class": entry.classes[best[0]], "scores": by_class}))
        else:
            print(f"{path}: " + ", ".join(f"{entry.classes[k]} ({scores[k]:.2f})" for k in best))
    return 1 if broken else 0


def read_picture(path: Path, channels: int, height: int, width: int) -> Tensor:
    """Bytes [channels, height, width]: grey for one channel, a stereo pair for two, colour for three."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            picture = _on_paper(file, path).convert("RGB" if channels == 3 else "L")
    except FileNotFoundError:
        raise DataError(f"there is no picture {path}") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is not a readable picture ({' '.join(str(error).split())})") from None
    if channels == 2:
        half = picture.width // 2
        stereo = picture.width == 2 * picture.height
        boxes = [(0, 0, half, picture.height), (half, 0, 2 * half, picture.height)] if stereo else [None, None]
        return torch.cat([_bytes(picture.resize((width, height), box=box)) for box in boxes])
    return _bytes(picture.resize((width, height)))


def _on_paper(picture: Any, path: Path) -> Any:
    """Put a picture with transparent parts on white if its ink is dark, otherwise on black, and print which."""
    from PIL import Image, ImageStat

    if "A" not in picture.getbands() and "transparency" not in picture.info:
        return picture
    picture = picture.convert("RGBA")
    ink = picture.getchannel("A")
    if ink.getextrema()[0] == 255:  # no pixel is transparent
        return picture
    shown = ink.point(lambda a: 255 if a >= 128 else 0)
    is_dark = not shown.getbbox() or ImageStat.Stat(picture.convert("L"), mask=shown).mean[0] < 128
    colour = "white" if is_dark else "black"
    print(f"{path}: transparent parts become {colour}", file=sys.stderr)
    paper = Image.new("RGBA", picture.size, colour)
    paper.alpha_composite(picture)
    return paper


def _bytes(picture: object) -> Tensor:
    import numpy as np

    pixels = torch.from_numpy(np.array(picture))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
