"""train a network

examples:
  tritoncaps train                                                    small MatrixCapsNet, ToyNORB, 10 epochs
  tritoncaps train --data mnist --model capsnet --epochs 3 --lr 1e-3
  tritoncaps train --config runs/mnist-capsnet/config.toml --seed 1   repeat an earlier run with another seed
  tritoncaps train --resume runs/mnist-capsnet                        continue an interrupted run
  tritoncaps train --data mnist --model nets:build                    your own network: function build in nets.py
  torchrun --nproc-per-node 8 -m tritoncaps train --data smallnorb --model matrix-capsnet --epochs 300
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import Field, fields, replace
from typing import Any, get_args, get_type_hints

from tritoncaps.training import Config, Result, load_checkpoint, read_config, train
from tritoncaps.training.checkpoint import LAST
from tritoncaps.training.config import flag
from tritoncaps.training.distributed import is_main
from tritoncaps.training.own import find_all


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "tritoncaps train [--config FILE] [--resume RUN] [--json] [--SETTING VALUE ..]"
    parser.add_argument("--config", metavar="FILE", help="TOML or YAML file with settings; options override them")
    parser.add_argument("--resume", metavar="RUN", help="continue the run in this folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, nothing else")
    kinds = get_type_hints(Config)
    settings = parser.add_argument_group("settings, as options or in the file")
    for item in fields(Config):
        kind = (get_args(kinds[item.name]) or (kinds[item.name],))[0]
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(item)}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            choices = item.metadata["choices"]
            options |= {"type": kind, "choices": choices}
            if not choices:
                options["metavar"] = {int: "N", float: "X", str: "NAME"}[kind]
            elif item.metadata["own"]:
                options |= {"choices": None, "metavar": f"{{{','.join(choices)},MODULE:FUNCTION}}"}
        settings.add_argument(flag(item.name), **options)


def _help(item: Field) -> str:
    """The help text with the default in brackets, unless it ends with brackets already."""
    text = item.metadata["help"]
    if item.default is None or text.endswith("]"):
        return text
    default = {True: "yes", False: "no"}[item.default] if isinstance(item.default, bool) else item.default
    return f"{text} [{default}]"


def run(args: argparse.Namespace) -> int:
    names = {item.name for item in fields(Config)}
    flags = {name: value for name, value in vars(args).items() if name in names}
    own = find_all(**{name: flags.get(name) for name in ("model", "data", "loss")})
    result = train(_config(args, flags), resume=args.resume is not None, quiet=args.json, **own)
    if is_main():
        print(json.dumps(_numbers(result)) if args.json else _last_line(result))
    return 130 if result.reason == "interrupted" else 0


def _numbers(result: Result) -> dict[str, Any]:
    return {
        "reason": result.reason,
        "folder": str(result.folder),
        "step": result.step,
        "evaluated_on": result.evaluated_on,
        "accuracy": result.accuracy if result.evaluation else None,  # interrupted before the first evaluation
        "best_accuracy": result.best_accuracy,
        "test_accuracy": None if math.isnan(result.test_accuracy) else result.test_accuracy,
        "seconds": round(result.seconds, 3),
        "images_per_second": round(result.images_per_second, 1),
    }


def _last_line(result: Result) -> str:
    if result.reason == "interrupted":
        return f"interrupted at step {result.step}: continue with `tritoncaps train --resume {result.folder}`"
    line = f"{result.reason}: {result.evaluated_on} accuracy {result.accuracy:.2%}"
    if result.evaluated_on == "validation":
        line += f" (best {result.best_accuracy:.2%})"
        if not math.isnan(result.test_accuracy):
            line += f", test accuracy {result.test_accuracy:.2%} of the network with the best validation accuracy"
    return f"{line}, {result.seconds:.0f} s of training; in {result.folder}"


def _config(args: argparse.Namespace, flags: dict[str, Any]) -> Config:
    settings = read_config(args.config) if args.config else {}
    if args.resume is None:
        settings.pop("out", None)  # config.toml of an earlier run names its folder
        return Config(**{**settings, **flags})
    saved: Config = load_checkpoint(f"{args.resume}/{LAST}")["config"]
    return replace(saved, **{**settings, **flags, "out": args.resume})
