"""The command line of all benchmarks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import report
from harness import DEVICE, Case, Row, header, percentiles, profile
from tqdm import tqdm

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
Subjects = dict[str, Callable[[str], list[Any]]]


def main(subjects: Subjects, doc: str | None) -> None:
    args = parse(subjects, doc)
    try:
        run(args, subjects)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"bench: {' '.join(str(error).split())}")


def parse(subjects: Subjects, doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="level", action="store_const", const="quick", help="smaller sizes, fewer rounds")
    size.add_argument(
        "--smoke", dest="level", action="store_const", const="smoke", help="tiny sizes, only to test the program"
    )
    parser.set_defaults(level="full")
    parser.add_argument("--only", nargs="+", choices=list(subjects), metavar="SUBJECT", help=", ".join(subjects))
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds of every case")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file for the rows; CSV and figures go beside it [bench/results/]"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE.md", help="also write a page, with its rows and the figures beside it"
    )
    parser.add_argument("--rows", type=Path, metavar="FILE", help="do not measure, use the rows of an earlier run")
    parser.add_argument(
        "--profile",
        nargs="?",
        const="torch",
        choices=("torch", "proton"),
        help="also write a trace of our steps [torch]",
    )
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="compare two runs case by case")
    parser.add_argument(
        "--against", metavar="GITREF", help="measure another commit in turns with this one, and compare"
    )
    return parser.parse_args()


def run(args: argparse.Namespace, subjects: Subjects) -> None:
    if args.compare:
        print(report.comparison(*(report.read(file) for file in args.compare)))
        return
    if args.profile == "proton" and DEVICE.type != "cuda":
        raise ValueError("--profile proton needs a GPU, but there is none; --profile torch works everywhere")
    target = args.json or RESULTS / f"{Path(sys.argv[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    if args.against:
        print(report.comparison(*against(args, target)))
        return
    rows = report.read(args.rows) if args.rows else measure(args, subjects, target)
    report.write(rows, target)
    if args.page:
        report.write_page(rows, args.page)
    elif args.level != "smoke":
        report.figures(rows, target.with_suffix(""))
    print(f"\nrows: {target}")


def measure(args: argparse.Namespace, subjects: Subjects, target: Path) -> list[Row]:
    rows = [header(args.level)]
    print(report.heading(rows[0]))
    jobs = {name: subjects[name](args.level) for name in args.only or subjects}
    with tqdm(total=sum(map(len, jobs.values())), disable=None, leave=False) as bar:
        for subject, own in jobs.items():
            found: list[Row] = []
            for job in own:
                bar.set_description(f"{subject}, {job.name}")
                found += job.rows(args.level, args.repeats)
                if args.profile and isinstance(job, Case):
                    profile(job, target.with_suffix(f".{subject}-{job.name.replace(' ', '-')}"), args.profile)
                bar.update()
            tqdm.write(f"\n{subject}\n{report.table(found)}")
            rows += found
    return rows


def against(args: argparse.Namespace, target: Path, turns: int = 3) -> tuple[list[Row], list[Row]]:
    """The rows of the other commit and of this one. Each turn measures both, in separate processes."""
    with checkout(args.against) as folder, tempfile.TemporaryDirectory() as cache:
        runs: dict[str, list[list[Row]]] = {"other": [], "this": []}
        for turn in range(turns):
            for side, environment in (("other", {"PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": cache}), ("this", {})):
                file = target.with_suffix(f".{side}-{turn}.json")
                command = [sys.executable, sys.argv[0], *_size(args), "--json", str(file)]
                subprocess.run(command, check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
                runs[side].append(report.read(file))
    return merged(runs["other"]), merged(runs["this"])


def _size(args: argparse.Namespace) -> list[str]:
    level = [] if args.level == "full" else [f"--{args.level}"]
    only = ["--only", *args.only] if args.only else []
    repeats = ["--repeats", str(args.repeats)] if args.repeats else []
    return [*level, *only, *repeats]


def merged(runs: list[list[Row]]) -> list[Row]:
    """Merge several runs into one, with the times of all."""
    times: dict[Any, list[float]] = {}
    for row in (row for run in runs for row in run):
        times.setdefault(report.key(row), []).extend(row.get("times_ms", []))
    result = [dict(row) for row in runs[0]]
    for row in result:
        if times[report.key(row)]:
            row["p20_ms"], row["p50_ms"], row["p80_ms"] = percentiles(times[report.key(row)])
    return result


@contextmanager
def checkout(reference: str) -> Iterator[Path]:
    """A folder with another commit, from which Python can import tritoncaps."""
    git = ["git", "-C", str(BENCH)]
    with tempfile.TemporaryDirectory() as temporary:
        tree, site = Path(temporary) / "tree", Path(temporary) / "site"
        added = subprocess.run(
            [*git, "worktree", "add", "--detach", str(tree), reference], capture_output=True, text=True
        )
        if added.returncode:
            raise ValueError(f"git finds no commit {reference!r}: {added.stderr.strip().splitlines()[-1]}")
        try:
            (site / "tritoncaps").mkdir(parents=True)
            for source in (*(tree / "tritoncaps").iterdir(), tree / "kernels", tree / "models"):
                (site / "tritoncaps" / source.name).symlink_to(source)
            yield site
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], capture_output=True, check=False)
