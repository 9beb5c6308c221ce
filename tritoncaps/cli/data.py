"""list, download or show data

examples:
  tritoncaps data list                         what there is, and which files are here
  tritoncaps data get mnist                    download; goes on where an earlier try stopped
  tritoncaps data get smallnorb --data-dir D
  tritoncaps data show toynorb --out toys.png  a contact sheet
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tritoncaps.data import DATASETS, DataError, data_folder, load
from tritoncaps.data.download import fetch
from tritoncaps.data.sources import SOURCES
from tritoncaps.data.toynorb import load_toynorb


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "get", "show"))
    parser.add_argument("name", nargs="?", choices=DATASETS, help="data set, for get and show")
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder of the data files")
    parser.add_argument("--split", choices=("train", "test"), default="train", help="for show")
    parser.add_argument("--out", type=Path, default=Path("sheet.png"), metavar="FILE", help="for show [sheet.png]")
    parser.add_argument("--json", action="store_true", help="for list: print JSON")


def run(args: argparse.Namespace) -> int:
    folder = data_folder(args.data_dir)
    if args.action == "list":
        return _list(folder, args.json)
    if args.name is None:
        raise DataError(f"`data {args.action}` needs the name of a data set: {', '.join(DATASETS)}")
    return _get(args.name, folder) if args.action == "get" else _show(args.name, folder, args.split, args.out)


def _list(folder: Path, as_json: bool) -> int:
    rows = [
        {
            "name": name,
            "description": entry.description,
            "files": [str(folder / part / s.name) for part in entry.files for s in SOURCES[part]],
            "here": _is_here(name, folder),
        }
        for name, entry in DATASETS.items()
    ]
    if as_json:
        print(json.dumps(rows))
        return 0
    print(f"in {folder}:")
    for row in rows:
        state = "here" if row["here"] else f"get it with `tritoncaps data get {row['name']}`"
        print(f"  {row['name']:<14} {row['description']:<48} {state}")
    return 0


def _is_here(name: str, folder: Path) -> bool:
    """Are the files there? ToyNORB needs none."""
    return all(
        any((place / file).exists() for place in (folder / part, folder) for file in (source.name, source.unpacked))
        for part in DATASETS[name].files
        for source in SOURCES[part]
    )


def _get(name: str, folder: Path) -> int:
    if name == "toynorb":
        for split in ("train", "test"):
            print(f"ToyNORB {split}: {len(load_toynorb(split, folder))} pairs in {folder / 'toynorb'}")
        return 0
    for part in DATASETS[name].files:
        for source in SOURCES[part]:
            with _Bar(source.name, source.size) as bar:
                print(fetch(source, folder / part, bar.report))
    return 0


class _Bar:
    """tqdm as fetch reports to it."""

    def __init__(self, name: str, size: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=size, desc=name, unit="B", unit_scale=True, leave=False)

    def report(self, name: str, done: int, size: int) -> None:
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()


def _show(name: str, folder: Path, split: str, out: Path) -> int:
    from tritoncaps.training.pictures import contact_sheet

    contact_sheet(load(name, split, folder), out)
    print(out)
    return 0
