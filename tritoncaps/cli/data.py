"""list, download or show data

examples:
  tritoncaps data list                         list the data sets, and whether their files are here
  tritoncaps data get mnist                    download; resumes an incomplete download
  tritoncaps data get smallnorb --data-dir D
  tritoncaps data show toynorb --out toys.png  draw some of the images
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tritoncaps.data import DATASETS, DataError, data_folder, load
from tritoncaps.data.download import fetch
from tritoncaps.data.sources import SOURCES, Source
from tritoncaps.data.toynorb import load_toynorb
from tritoncaps.extras import require
from tritoncaps.training.pictures import check_folder, contact_sheet
from tritoncaps.waiting import Waiting


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "get", "show"))
    parser.add_argument("name", nargs="?", choices=DATASETS, help="data set, for get and show")
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder of the data files")
    parser.add_argument("--split", choices=("train", "test"), default="train", help="for show: the split [train]")
    parser.add_argument(
        "--out", type=Path, default=Path("sheet.png"), metavar="FILE", help="for show: the picture [sheet.png]"
    )
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
    names, descriptions = (max(len(str(row[key])) for row in rows) for key in ("name", "description"))
    print(f"in {folder}:")
    for row in rows:
        state = "here" if row["here"] else f"get it with `tritoncaps data get {row['name']}`"
        print(f"  {row['name']:<{names}}  {row['description']:<{descriptions}}  {state}")
    return 0


def _is_here(name: str, folder: Path) -> bool:
    """True if all files are there. ToyNORB needs none."""
    return all(
        any((place / file).exists() for place in (folder / part, folder) for file in (source.name, source.unpacked))
        for part in DATASETS[name].files
        for source in SOURCES[part]
    )


def _get(name: str, folder: Path) -> int:
    require("tqdm", "data get", "train")
    if name == "toynorb":
        for split in ("train", "test"):
            print(f"ToyNORB {split}: {len(load_toynorb(split, folder))} pairs in {folder / 'toynorb'}")
        return 0
    for part in DATASETS[name].files:
        for source in SOURCES[part]:
            print(_download(source, folder / part))
    return 0


def _download(source: Source, folder: Path) -> Path:
    with Waiting(f"downloading {source.name}", source.size, "B") as shown:
        return fetch(source, folder, lambda name, done, size: shown.reach(done))


def _show(name: str, folder: Path, split: str, out: Path) -> int:
    require("matplotlib", "data show", "train")
    check_folder("--out", out)
    data = load(name, split, folder)
    channels, height, width = data.shape
    images = "stereo pairs" if channels == 2 else "images"
    contact_sheet(data, out, f"{name}, {split}: some of {len(data):,} {images} of {height}x{width}")
    print(out)
    return 0
