"""Thousands of training steps on batches of random shapes: memory does not grow, and all numbers are finite.

python tests/soak.py --steps 2000
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

# oneDNN caches programs for 1024 convolutions, one for each shape: this cache would grow to 200 MiB
os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "8"  # before torch is imported

import torch

from tritoncaps import MarginLoss, SpreadLoss
from tritoncaps.models import CapsNet, MatrixCapsNet

GROWTH = 0.05  # growth of the resident memory from a quarter of the steps to the end
EVERY = 50  # steps between two lines of output


def resident() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    matrix = MatrixCapsNet(1, 5, (8, 4, 6, 5), iterations=2)
    vector = CapsNet(1, 5, image_size=20, channels=16, primary_caps=4, decoder=False)
    trained = [(matrix, SpreadLoss()), (vector, MarginLoss())]
    optimizer = torch.optim.Adam([*matrix.parameters(), *vector.parameters()], lr=1e-3)
    warm, largest = None, 0
    for step in range(1, args.steps + 1):
        model, loss = trained[step % 2]
        size = 20 if model is vector else random.choice(range(17, 33))
        images = torch.randn(random.choice(range(1, 17)), 1, size, random.choice((20, size)) if model is matrix else 20)
        value = loss(model(images).activations, torch.randint(5, (len(images),)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if not value.isfinite() or not all(p.isfinite().all() for p in model.parameters()):
            sys.exit(f"a number was not finite at step {step}, seed {args.seed}")
        if step == args.steps // 4:
            warm = resident()
        elif warm is not None:
            largest = max(largest, resident())
        if step % EVERY == 0:
            print(f"step {step}: loss {value.item():.3f}, {resident() / 2**20:.0f} MiB", flush=True)
    assert warm is not None
    print(f"memory grew by {largest / warm - 1:+.1%} after the first quarter")
    if largest > (1 + GROWTH) * warm:
        sys.exit(f"memory grew by more than {GROWTH:.0%}")


if __name__ == "__main__":
    main()
