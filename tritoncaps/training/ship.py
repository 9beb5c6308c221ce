"""Make weights that come with the package from a run: tests the network, and writes the file and its checksum.

    python -m tritoncaps.training.ship runs/toynorb-matrix-capsnet-small toynorb --about "rendered toys"

The accuracy on the card is that of all test images, measured here. The name and the checksum go into CHECKSUMS of
models/pretrained.py by hand.
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import asdict, replace
from pathlib import Path

from tritoncaps.data.files import write_atomically
from tritoncaps.models.pretrained import FOLDER, Pretrained, encode
from tritoncaps.training.checkpoint import LAST, load_checkpoint
from tritoncaps.training.distributed import world
from tritoncaps.training.evaluation import evaluate
from tritoncaps.training.saved import load_network
from tritoncaps.training.task import load_test, pipeline_of


def ship(run: Path, about: str) -> Pretrained:
    """The network of the run's last checkpoint: the average of its weights, if it has one."""
    network, config = load_network(run / LAST)
    config = replace(config, data_dir=None, out=None, test_limit=None)
    with world("cpu") as w:
        accuracy = evaluate(network, load_test(config), pipeline_of(config), w).accuracy
    step = load_checkpoint(run / LAST)["step"]
    card = {
        "about": about,
        "test_accuracy": accuracy,
        "images_seen": step * config.batch_size,
        "parameters": sum(p.numel() for p in network.parameters()),
    }
    weights = {name: value.contiguous() for name, value in network.state_dict().items()}
    return Pretrained(asdict(config), card, weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--about", required=True, help="the data, and what to know about them")
    args = parser.parse_args()
    pretrained = ship(args.run, args.about)
    content = encode(pretrained)
    write_atomically(FOLDER / f"{args.name}.pt", lambda file: file.write(content))
    print(pretrained.card)
    print(f'    "{args.name}": "{hashlib.sha256(content).hexdigest()}",')


if __name__ == "__main__":
    main()
