"""show the shapes, parameters, votes and memory of a network

examples:
  tritoncaps info                                              the small MatrixCapsNet for images of ToyNORB
  tritoncaps info --model matrix-capsnet --data smallnorb
  tritoncaps info --model matrix-capsnet --size 224            larger images
  tritoncaps info --batch-size 64                              memory of a batch
  tritoncaps info --run runs/mnist-capsnet --json
  tritoncaps info --run runs/mnist-capsnet --curve curve.png   also draw the learning curve
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tritoncaps.data import DATASETS
from tritoncaps.training import NETWORKS, Config, ConfigError, Task
from tritoncaps.training.own import find_all, with_network
from tritoncaps.training.pictures import check_folder, learning_curve
from tritoncaps.training.saved import load_network, task_by_name
from tritoncaps.training.summary import summarise
from tritoncaps.training.task import build_network


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run", metavar="RUN", dest="run_folder", help="folder of a run, instead of --model and --data"
    )
    names = f"{{{','.join(NETWORKS)},MODULE:FUNCTION}}"
    parser.add_argument("--model", metavar=names, default="matrix-capsnet-small", help="network [matrix-capsnet-small]")
    parser.add_argument("--data", choices=DATASETS, default="toynorb", help="data set [toynorb]")
    parser.add_argument("--iterations", type=int, default=3, help="routing iterations [3]")
    parser.add_argument("--size", type=int, metavar="N", help="images of NxN pixels [those of the data set]")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="images whose memory is measured [1]")
    parser.add_argument("--curve", type=Path, metavar="FILE", help="draw the learning curve of --run into this file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if args.curve:
        if not args.run_folder:
            raise ConfigError("--curve needs the folder of a run: name it with --run")
        check_folder("--curve", args.curve)
        learning_curve(Path(args.run_folder), args.curve)
    own = find_all(model=args.model).get("network")
    if args.run_folder:
        network, config = load_network(args.run_folder, own)
    else:
        config = Config(model=args.model, data=args.data, iterations=args.iterations)
        config = config if own is None else with_network(config, own)
    task = task_by_name(config)
    if args.size:
        task = Task(task.data, task.channels, args.size, args.size, task.classes)
    if not args.run_folder:
        network = build_network(config, task)
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, but it is {args.batch_size}")
    summary = summarise(network, task, args.batch_size)
    print(json.dumps(summary.as_dict()) if args.json else summary)
    return 0
