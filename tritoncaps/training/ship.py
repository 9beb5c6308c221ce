"""Make pretrained weights of the package from a run: test the network, write the file and print its checksum.

    python -m tritoncaps.training.ship runs/toynorb-matrix-capsnet-small toynorb --about "rendered toys"

The program measures the accuracy of the card on all test images. Copy the name and the checksum into CHECKSUMS of
models/pretrained.py.
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
    """The pretrained weights of a run's last checkpoint: the moving average, if the run has one."""
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
    parser.add_argument("--about", required=True, help="description of the data")
    args = parser.parse_args()
    pretrained = ship(args.run, args.about)
    content = encode(pretrained)
    write_atomically(FOLDER / f"{args.name}.pt", lambda file: file.write(content))
    print(pretrained.card)
    print(f'    "{args.name}": "{hashlib.sha256(content).hexdigest()}",')


if __name__ == "__main__":
    main()
