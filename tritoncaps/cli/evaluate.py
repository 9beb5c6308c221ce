"""test a trained network

examples:
  tritoncaps evaluate runs/toynorb-matrix-capsnet-small
  tritoncaps evaluate runs/smallnorb-matrix-capsnet --crops 13        averaged over 13 crops of each image
  tritoncaps evaluate runs/smallnorb-matrix-capsnet --by azimuth      accuracy from every side
  tritoncaps evaluate --pretrained toynorb                            a network that comes with the package
  tritoncaps evaluate runs/mnist-capsnet --data affnist --json        on other data of the same size
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from tritoncaps.data import DATASETS
from tritoncaps.data.pipeline import CROPS
from tritoncaps.models.pretrained import CHECKSUMS
from tritoncaps.training import evaluate
from tritoncaps.training.distributed import world
from tritoncaps.training.evaluation import views
from tritoncaps.training.saved import load_network, load_pretrained_network
from tritoncaps.training.task import load_test, pipeline_of


def add(parser: argparse.ArgumentParser) -> None:
    network = parser.add_mutually_exclusive_group(required=True)
    network.add_argument("run_folder", metavar="RUN", nargs="?", help="a run's folder, or a checkpoint")
    network.add_argument("--pretrained", choices=CHECKSUMS, help="a network that comes with the package")
    parser.add_argument(
        "--no-average", action="store_true", help="of a checkpoint the weights, not their moving average"
    )
    parser.add_argument("--data", choices=DATASETS, help="other data than the network was trained for")
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder of the data files")
    parser.add_argument("--test-limit", metavar="N", type=int, help="test on this many images")
    parser.add_argument("--crops", type=int, choices=CROPS, help="crops of each image to average over")
    parser.add_argument("--by", metavar="FACTOR", help="accuracy by azimuth, elevation, lighting or instance")
    parser.add_argument("--device", default="auto", help="cpu, cuda, .. [a GPU if there is one]")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if args.pretrained:
        network, config, _ = load_pretrained_network(args.pretrained)
    else:
        network, config = load_network(args.run_folder, averaged=not args.no_average)
    changes = {name: getattr(args, name) for name in ("data", "data_dir", "test_limit", "crops")}
    config = replace(config, **{name: value for name, value in changes.items() if value is not None})
    data = load_test(config)
    if args.by and args.by not in data.factors:
        known = ", ".join(data.factors) or "none"
        raise ValueError(f"--by must be a factor of {config.data} ({known}), but it is {args.by!r}")
    with world(args.device) as w:
        result = evaluate(network.to(w.device), data, pipeline_of(config), w, config.crops, config.amp)
    if not w.is_main:
        return 0
    numbers: dict[str, Any] = {
        "data": config.data,
        "images": len(data),
        "crops": config.crops,
        "accuracy": result.accuracy,
        **views(result, data, config.novel),
    }
    if result.confusion is not None:
        numbers |= {"classes": list(data.classes), "confusion": result.confusion.tolist()}
    if args.by:
        numbers[args.by] = result.by(data.factors[args.by])
    print(json.dumps(numbers) if args.json else _text(numbers, args.by))
    return 0


def _text(numbers: dict[str, Any], by: str | None) -> str:
    lines = [f"{numbers['data']}, {numbers['images']} images: accuracy {numbers['accuracy']:.2%}"]
    lines += [f"{name} views: {numbers[name]:.2%}" for name in ("familiar", "novel") if name in numbers]
    if by:
        lines += [f"{by} {value}: {accuracy:.2%}" for value, accuracy in numbers[by].items()]
    if "confusion" in numbers:
        width = max(map(len, numbers["classes"])) + 2
        lines.append("true class in rows, predicted class in columns:")
        for name, row in zip(numbers["classes"], numbers["confusion"], strict=True):
            lines.append(f"{name:>{width}} " + " ".join(f"{count:>6}" for count in row))
    return "\n".join(lines)
