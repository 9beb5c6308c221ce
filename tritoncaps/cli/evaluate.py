"""test a trained network

examples:
  tritoncaps evaluate runs/toynorb-matrix-capsnet-small
  tritoncaps evaluate runs/smallnorb-matrix-capsnet --crops 13        average over 13 crops of each image
  tritoncaps evaluate runs/smallnorb-matrix-capsnet --by azimuth      accuracy for each azimuth
  tritoncaps evaluate runs/toynorb-matrix-capsnet-small --data smallnorb   use other data with the same classes
  tritoncaps evaluate runs/mnist-build --model nets:build             your own network: function build in nets.py
  tritoncaps evaluate --pretrained toynorb                            a pretrained network of the package
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from tritoncaps.data import data_folder
from tritoncaps.data.images import degrees
from tritoncaps.data.pipeline import CROPS
from tritoncaps.models.pretrained import CHECKSUMS
from tritoncaps.training import evaluate, load_network, pipeline_of
from tritoncaps.training.distributed import world
from tritoncaps.training.evaluation import views
from tritoncaps.training.own import add_data, find_all
from tritoncaps.training.saved import load_pretrained_network, task_by_name
from tritoncaps.training.task import check_fits, limit_test, load_test, task_of


def add(parser: argparse.ArgumentParser) -> None:
    network = parser.add_mutually_exclusive_group(required=True)
    network.add_argument("run_folder", metavar="RUN", nargs="?", help="folder of a run, or a checkpoint")
    network.add_argument("--pretrained", choices=CHECKSUMS, help="a pretrained network of the package")
    parser.add_argument("--no-average", action="store_true", help="use the weights, not their moving average")
    parser.add_argument("--data", metavar="NAME", help="data set, or MODULE:FUNCTION [that of the training]")
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="function that builds your own network")
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder of the data files")
    parser.add_argument("--test-limit", metavar="N", type=int, help="test on this many images, chosen at random [all]")
    parser.add_argument("--crops", type=int, choices=CROPS, help="number of crops of each image to average over")
    parser.add_argument("--by", metavar="FACTOR", help="accuracy by azimuth, elevation, lighting or instance")
    parser.add_argument("--device", default="auto", help="cpu, cuda, .. [a GPU if there is one]")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    own = find_all(model=args.model, data=args.data)
    if args.pretrained:
        network, config, _ = load_pretrained_network(args.pretrained)
    else:
        network, config = load_network(args.run_folder, own.get("network"), averaged=not args.no_average)
    made_for = task_by_name(config)
    changes = {name: getattr(args, name) for name in ("data", "data_dir", "crops")}
    changes = {name: value for name, value in changes.items() if value is not None}
    config = replace(config, **changes, test_limit=args.test_limit)  # the limit of the run is not used here
    if "data" in own:
        add_data(config.data, own["data"], data_folder(config.data_dir))
    test = load_test(replace(config, test_limit=None))
    data = limit_test(config, test)
    check_fits(network, made_for, task_of(config, data))
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
        "test_images": len(test),
        "all_images": len(data) == len(test),
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
    count = "all" if numbers["all_images"] else f"{numbers['images']} of the"
    lines = [f"{numbers['data']}, {count} {numbers['test_images']} test images: accuracy {numbers['accuracy']:.2%}"]
    lines += [f"{name} views: {numbers[name]:.2%}" for name in ("familiar", "novel") if name in numbers]
    if by:
        values = {degrees(by, value): accuracy for value, accuracy in numbers[by].items()}
        width = max(map(len, values))
        lines += [f"{by} {value:>{width}}: {accuracy:7.2%}" for value, accuracy in values.items()]
    if "confusion" in numbers:
        lines += ["", "true class in rows, predicted class in columns:"]
        lines += _table(numbers["classes"], numbers["confusion"])
    return "\n".join(lines)


def _table(classes: list[str], confusion: list[list[int]]) -> list[str]:
    """The lines of the confusion matrix."""
    rows = [["", *classes], *([name, *map(str, row)] for name, row in zip(classes, confusion, strict=True))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
