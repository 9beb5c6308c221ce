"""run a benchmark of bench/

examples:
  tritoncaps bench                        list the benchmarks
  tritoncaps bench suite --quick          run all of them, in two minutes
  tritoncaps bench em_routing --smoke     run one; it gets the arguments after its name
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

import tritoncaps


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="name of the benchmark")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the benchmark")


def run(args: argparse.Namespace) -> int:
    folder = Path(tritoncaps.__file__).parents[1] / "bench"
    scripts = {path.stem: path for path in sorted(folder.glob("*.py")) if "__main__" in path.read_text()}
    if not scripts:
        raise FileNotFoundError("bench/ is part of the repository, not of the installed package: clone it")
    if args.name is None:
        for name, path in scripts.items():
            print(f"{name:<20} {(ast.get_docstring(ast.parse(path.read_text())) or '').splitlines()[0]}")
        return 0
    if args.name not in scripts:
        raise ValueError(f"bench must be one of {', '.join(scripts)}, but it is {args.name!r}")
    return subprocess.run([sys.executable, str(scripts[args.name]), *args.arguments], check=False).returncode
