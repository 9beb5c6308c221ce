"""write an HTML page that shows the capsules of a network

The page is one HTML file of at most 5 MB. It opens in any browser and needs no internet connection. It shows the
capsules of every layer, their poses and assignments, the pixels that support a class, and adversarial images.
docs/explore.md explains how to use it.

examples:
  tritoncaps explore --pretrained toynorb                 writes toynorb.html
  tritoncaps explore runs/mnist-capsnet --images 8 --out digits.html
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritoncaps import DynamicRouting, EMRouting, TemperedEMRouting, VBRouting
from tritoncaps.data import MultiMNIST
from tritoncaps.data.files import data_folder
from tritoncaps.explore import write_page
from tritoncaps.explore.collect import check_network
from tritoncaps.models.pretrained import CHECKSUMS
from tritoncaps.training import load_network, pipeline_of
from tritoncaps.training.own import add_data, find_all
from tritoncaps.training.pictures import check_folder
from tritoncaps.training.saved import load_pretrained_network
from tritoncaps.training.task import Data, load_test


def add(parser: argparse.ArgumentParser) -> None:
    network = parser.add_mutually_exclusive_group(required=True)
    network.add_argument("run_folder", metavar="RUN", nargs="?", help="folder of a run, or a checkpoint")
    network.add_argument("--pretrained", choices=CHECKSUMS, help="a pretrained network of the package")
    parser.add_argument("--images", metavar="N", type=int, default=10, help="number of test images to show [10]")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page [NAME.html, with the network's name]")
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="function that builds your own network")
    parser.add_argument("--data", metavar="MODULE:FUNCTION", help="function that loads your own images")
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder of the data files")


def run(args: argparse.Namespace) -> int:
    if args.images < 1:
        raise ValueError(f"--images must be a whole number of at least 1, but it is {args.images}")
    own = find_all(model=args.model, data=args.data)
    if args.pretrained:
        network, config, _ = load_pretrained_network(args.pretrained)
        name = args.pretrained
    else:
        network, config = load_network(args.run_folder, own.get("network"))
        name = Path(args.run_folder).resolve().name.removesuffix(".pt")
    check_network(network)
    out = args.out or Path(f"{name}.html")
    check_folder("--out", out)
    if "data" in own:
        add_data(config.data, own["data"], data_folder(args.data_dir))
    data = load_test(replace(config, data_dir=args.data_dir or config.data_dir, test_limit=None))
    pixels, labels = chosen(data, args.images)
    about = f"{described(network)}, test images of {config.data}"
    count = write_page(out, network, pixels, labels, data.classes, pipeline_of(config), name, about)
    left_out = f" (without {len(pixels) - count}, for which 5 MB are not enough)" if count < len(pixels) else ""
    print(f"{out}: {count} images{left_out}, {out.stat().st_size / 1e6:.1f} MB")
    return 0


def described(network: nn.Module) -> str:
    """A description of the network and its routing."""
    routing: Any = network.get_submodule("class_caps").routing
    known: dict[type, str] = {
        EMRouting: "EM routing",
        TemperedEMRouting: "tempered EM routing",
        VBRouting: "variational Bayes routing",
        DynamicRouting: "dynamic routing",
    }
    name = known.get(type(routing), type(routing).__name__)
    return f"{type(network).__name__}, {routing.iterations} iterations of {name}, {routing.competition} competition"


def chosen(data: Data, count: int) -> tuple[torch.Tensor, list[list[int]]]:
    """Random images [N, C, H, W] that alternate between the classes, and the true classes of each."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(data, MultiMNIST):
        places = torch.randint(len(data), (count,), generator=generator).tolist()
        images, two_hot, _ = data.__getitems__(places)
        return images, [row.nonzero().flatten().tolist() for row in two_hot]
    order = torch.randperm(len(data), generator=generator)
    turn = torch.zeros(len(data), dtype=torch.long)  # number of earlier images of the same class
    for k in range(len(data.classes)):
        members = data.labels[order] == k
        turn[members] = torch.arange(int(members.sum()))
    rank = turn * len(data.classes) + data.labels[order]
    places = order[rank.argsort()][:count].tolist()
    return data.images[places], [[int(k)] for k in data.labels[places]]
