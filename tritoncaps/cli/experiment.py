"""run an experiment of the papers

examples:
  tritoncaps experiment list                                  list the experiments
  tritoncaps experiment adversarial --quick                   takes a minute; writes runs/experiments/adversarial
  tritoncaps experiment adversarial --run runs/smallnorb-matrix-capsnet-small
  tritoncaps experiment vote-histograms --pretrained smallnorb --data smallnorb

To continue an interrupted experiment, run the same command again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from tritoncaps.data import DATASETS
from tritoncaps.experiments import EXPERIMENTS, Options, Report, as_json
from tritoncaps.experiments import run as run_experiment
from tritoncaps.experiments.page import is_share
from tritoncaps.models.pretrained import CHECKSUMS


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", choices=("list", *EXPERIMENTS), help="name of an experiment, or list")
    parser.add_argument("--quick", action="store_true", help="rough results, in a minute on two cores")
    parser.add_argument("--data", choices=DATASETS, help="data set [that of the experiment or of the network]")
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder of the data files")
    network = parser.add_mutually_exclusive_group()
    network.add_argument("--run", dest="run_folder", metavar="RUN", help="use the network of this run")
    network.add_argument("--pretrained", choices=CHECKSUMS, help="use a pretrained network of the package")
    parser.add_argument("--steps", metavar="N", type=int, help="optimiser steps of each training")
    parser.add_argument("--images", metavar="N", type=int, help="number of test images")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="random seed of weights, images, order [0]")
    parser.add_argument("--out", metavar="FOLDER", help="folder of the report [runs/experiments/NAME]")
    parser.add_argument("--json", action="store_true", help="print JSON, nothing else")


def run(args: argparse.Namespace) -> int:
    if args.name == "list":
        return _list(args.json)
    given = {**vars(args), "run": args.run_folder}
    options = {item.name: given[item.name] for item in fields(Options)}
    try:
        report = run_experiment(args.name, args.out, quiet=args.json, **options)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to continue", file=sys.stderr)
        raise
    print(json.dumps(as_json(report)) if args.json else _text(report))
    return 0


def _list(as_json: bool) -> int:
    if as_json:
        print(json.dumps([{"name": name, **entry._asdict()} for name, entry in EXPERIMENTS.items()]))
        return 0
    width = max(map(len, EXPERIMENTS))
    for name, entry in EXPERIMENTS.items():
        print(f"{name:<{width}}  {entry.title} ({entry.paper})")
    return 0


def _text(report: Report) -> str:
    lines = [report.title]
    lines += [f"  {name}: {_number(name, value)}" for name, value in report.numbers.items()]
    lines += _table(report.rows)
    return "\n".join([*lines, f"{report.seconds:.0f} s; {report.folder / Path('report.html')}"])


def _table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_number(key, row.get(key)) for key in columns] for row in rows)]
    cells[0] = [name.replace("_", " ") for name in columns]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]


def _number(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.1%}" if is_share(name) else f"{value:.4g}"
    return str(value)
