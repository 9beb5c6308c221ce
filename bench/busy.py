"""Training on a busy machine: images/s of `tritoncaps train` alone, and while two other programs use the CPU.

python bench/busy.py                     the exit code is 1 if the busy speed is below 0.4 of the quiet speed
python bench/busy.py --steps 20          a shorter run
OMP_WAIT_POLICY=ACTIVE python bench/busy.py      the same with threads of torch that spin while they wait
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LEAST = 0.4  # smallest busy speed, as a fraction of the quiet speed
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends when this script ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="training steps of each run [100]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each kind, in turns [3]")
    parser.add_argument("--loops", type=int, default=2, metavar="N", help="busy programs [2]")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    quiet, busy = [], []
    images_per_second(1)  # compiles kernels and renders the data
    for _ in range(args.rounds):
        quiet.append(images_per_second(args.steps))
        with busy_loops(args.loops):
            busy.append(images_per_second(args.steps))
    share = statistics.median(busy) / statistics.median(quiet)
    print(f"tritoncaps train, small MatrixCapsNet, batch 32, {args.steps} steps, on {os.cpu_count()} CPUs")
    if load > 0.5:
        print(f"THE MACHINE WAS NOT QUIET (load {load:.2f} before the first run): do not trust these numbers")
    for name, figures in (("alone", quiet), (f"beside {args.loops} busy programs", busy)):
        print(f"{name:<24} {statistics.median(figures):8.1f} images/s   {'  '.join(f'{x:.1f}' for x in figures)}")
    print(f"{'busy / quiet':<24} {share:8.2f}            must be at least {LEAST}")
    return 0 if share >= LEAST else 1


def images_per_second(steps: int) -> float:
    """The speed of the second half of a training run, in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--batch-size 32 --steps {steps} --log-every {-(-steps // 2)} --test-limit 1 --json".split()
        command = [sys.executable, "-m", "tritoncaps", "train", *flags, "--out", str(Path(folder) / "run")]
        return json.loads(subprocess.check_output(command, text=True))["images_per_second"]


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main())
