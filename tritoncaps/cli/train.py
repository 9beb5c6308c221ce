"""train a network

examples:
  tritoncaps train                                                    small MatrixCapsNet, ToyNORB, 10 epochs
  tritoncaps train --data mnist --model capsnet --epochs 3 --lr 1e-3
  tritoncaps train --config runs/mnist-capsnet/config.toml --seed 1   another seed of an earlier run
  tritoncaps train --resume runs/mnist-capsnet                        go on with an interrupted run
  torchrun --nproc-per-node 8 -m tritoncaps train --data smallnorb --model matrix-capsnet --epochs 300
"""

from __future__ import annotations

import argparse
import json
from dataclasses import Field, fields, replace
from typing import Any, get_args, get_type_hints

from tritoncaps.training import Config, ConfigError, load_checkpoint, read_config, train
from tritoncaps.training.checkpoint import LAST
from tritoncaps.training.config import flag

# what a run is; the other settings may change when it goes on
FIXED = ("data", "mono", "novel", "limit", "validation", "model", "iterations", "loss", "batch_size", "seed")


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "tritoncaps train [--config FILE] [--resume RUN] [--json] [--SETTING VALUE ..]"
    parser.add_argument("--config", metavar="FILE", help="settings of a TOML or YAML file; flags come on top")
    parser.add_argument("--resume", metavar="RUN", help="go on with the run in this folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, nothing else")
    kinds = get_type_hints(Config)
    settings = parser.add_argument_group("settings, in flags or in the file")
    for item in fields(Config):
        kind = (get_args(kinds[item.name]) or (kinds[item.name],))[0]
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(item)}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": kind, "choices": item.metadata["choices"]}
            if not item.metadata["choices"]:
                options["metavar"] = {int: "N", float: "X", str: "NAME"}[kind]
        settings.add_argument(flag(item.name), **options)


def _help(item: Field) -> str:
    """With the default in brackets, unless the sentence ends with them."""
    text = item.metadata["help"]
    if item.default is None or text.endswith("]"):
        return text
    return f"{text} [{'no' if item.default is False else item.default}]"


def run(args: argparse.Namespace) -> int:
    names = {item.name for item in fields(Config)}
    flags = {name: value for name, value in vars(args).items() if name in names}
    result = train(_config(args, flags), resume=args.resume is not None, quiet=args.json)
    numbers = {
        "reason": result.reason,
        "folder": str(result.folder),
        "step": result.step,
        "accuracy": result.accuracy if result.evaluation else None,  # interrupted before the first evaluation
        "best_accuracy": result.best_accuracy,
        "seconds": round(result.seconds, 3),
        "images_per_second": round(result.images_per_second, 1),
    }
    if args.json:
        print(json.dumps(numbers))
    elif result.reason == "interrupted":
        print(f"interrupted at step {result.step}: go on with `tritoncaps train --resume {result.folder}`")
    else:
        print(
            f"{result.reason}: accuracy {result.accuracy:.2%}, {result.seconds:.0f} s of training; in {result.folder}"
        )
    return 130 if result.reason == "interrupted" else 0


def _config(args: argparse.Namespace, flags: dict[str, Any]) -> Config:
    settings = read_config(args.config) if args.config else {}
    if args.resume is None:
        settings.pop("out", None)  # a file from a run's folder is for another run
        return Config(**{**settings, **flags})
    saved: Config = load_checkpoint(f"{args.resume}/{LAST}")["config"]
    changes = {**settings, **flags}
    for name in FIXED:
        if name in changes and changes[name] != getattr(saved, name):
            raise ConfigError(
                f"{flag(name)} was {getattr(saved, name)} in {args.resume} and cannot become {changes[name]}"
            )
    return replace(saved, **{**changes, "out": args.resume})
