"""The framework of the experiments: a folder, steps with saved results, shared trainings, and a report.

An experiment is a function of a :class:`Lab`. It gets trained networks and the results of steps from the lab, and adds
rows of a table, figures and notes to it. Finished results are saved. So an interrupted experiment can be continued, and
an experiment that is run again only draws its figures.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tritoncaps.data import ImageSet, MultiMNIST, Pipeline
from tritoncaps.data.files import remove_leftovers, write_atomically
from tritoncaps.experiments.page import page
from tritoncaps.extras import require
from tritoncaps.models.pretrained import CHECKSUMS
from tritoncaps.training import (
    Config,
    ConfigError,
    Evaluation,
    evaluate,
    load_checkpoint,
    load_network,
    pipeline_of,
    train,
)
from tritoncaps.training.checkpoint import LAST
from tritoncaps.training.distributed import world
from tritoncaps.training.own import BuildNetwork, LoadData
from tritoncaps.training.pictures import save
from tritoncaps.training.saved import load_pretrained_network
from tritoncaps.training.task import load_test
from tritoncaps.version import __version__

RESULT = "result.json"  # the result of a training at a stage
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """The options of an experiment. None: the default of the experiment.

    data, data_dir   the data set, and the folder of its files.
    run, pretrained  a trained network: the folder of a run, or the name of pretrained weights.
    quick            rough results in a minute on two cores, instead of hours.
    steps, images    optimiser steps of each training, and number of test images.
    seed             random seed of weights, images and order.
    """

    data: str | None = None
    data_dir: str | None = None
    run: str | None = None
    pretrained: str | None = None
    quick: bool = False
    steps: int | None = None
    images: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "images"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name} must be at least 1, but it is {value}")
        if self.run is not None and self.pretrained is not None:
            raise ConfigError("--run and --pretrained cannot both be given")
        if self.pretrained is not None and self.pretrained not in CHECKSUMS:
            raise ConfigError(f"--pretrained must be one of {', '.join(CHECKSUMS)}, but it is {self.pretrained!r}")


class Trained(NamedTuple):
    """A trained network and its settings.

    ``name``: its name in figures. ``result``: the result of the training, if the lab trained it: the step, and the
    accuracy on held-out images if there are any, otherwise on test images.
    """

    name: str
    network: nn.Module
    config: Config
    result: Mapping[str, Any]

    @property
    def pipeline(self) -> Pipeline:
        return pipeline_of(self.config)

    def __call__(self, pixels: Tensor) -> Any:
        """The output of the network for images [N, C, H, W] with pixels in [0, 1]; it is differentiable."""
        return self.network(self.pipeline.test(pixels * 255)[0])

    def test_images(self, count: int, seed: int) -> ImageSet:
        """At most ``count`` random test images of the data set."""
        data = load_test(replace(self.config, test_limit=None))
        if not isinstance(data, ImageSet):
            raise ConfigError(f"--data must have one class in each image, but {self.config.data} has two")
        return data if count >= len(data) else data.split(count, seed)[0]

    def evaluate(self, data: ImageSet | MultiMNIST) -> Evaluation:
        with world("cpu") as w:
            return evaluate(self.network, data, self.pipeline, w)

    def seen(self, pixels: Tensor) -> Tensor:
        """The crop from the middle of the images that is the input of the network, except for standardisation."""
        top, left, height, width = self._place(pixels)
        return pixels[..., top : top + height, left : left + width]

    def pasted(self, middle: Tensor, pixels: Tensor) -> Tensor:
        """The images with another crop in the middle."""
        top, left, height, width = self._place(pixels)
        edges = (left, pixels.shape[-1] - left - width, top, pixels.shape[-2] - top - height)
        return F.pad(middle - self.seen(pixels), edges) + pixels

    def _place(self, pixels: Tensor) -> tuple[int, int, int, int]:
        height, width = self.pipeline.size(*pixels.shape[-2:])
        return (pixels.shape[-2] - height) // 2, (pixels.shape[-1] - width) // 2, height, width


class Report(NamedTuple):
    """The result of an experiment. ``folder`` contains report.json, table.csv, report.html and the figures."""

    name: str
    title: str
    paper: str
    folder: Path
    options: dict[str, Any]
    numbers: dict[str, Any]
    rows: list[dict[str, Any]]
    figures: list[dict[str, str]]
    notes: list[str]
    seconds: float


class Lab:
    """The folder, the options and the results of an experiment.

    ``source``: the code of the experiment; saved results depend on it. ``quiet``: print nothing.
    """

    def __init__(
        self,
        name: str,
        title: str,
        folder: Path,
        options: Options,
        source: str,
        quiet: bool = False,
        paper: str = "",
    ) -> None:
        require("tqdm", "an experiment", "train")
        require("matplotlib", "an experiment", "train")
        self.name, self.title, self.folder, self.options, self.quiet = name, title, folder, options, quiet
        self.paper = paper
        self.numbers: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.figures: list[dict[str, str]] = []
        self.notes: list[str] = []
        self._made_from = _digest(__version__, source, asdict(options), _modified(options.run))
        self._start = time.perf_counter()
        self._bar = _bar(name, quiet)
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    def plan(self, total: int) -> None:
        """Set the number of steps and trainings of the progress bar."""
        self._bar.total = total
        self._bar.refresh()

    def choose(self, quick: T, full: T) -> T:
        return quick if self.options.quick else full

    def step(self, key: str, work: Callable[[], T]) -> T:
        """The result of ``work``: numbers, strings and tensors, in lists and dictionaries. It is computed once and
        saved. It is computed again if the options, the code of the experiment or the earlier trainings change."""
        path = self.folder / "steps" / f"{key}.pt"
        self._bar.set_postfix_str(key)
        kept = self._load(path)
        if kept is None:
            kept = {"made_from": self._made_from, "result": work()}
            write_atomically(path, partial(torch.save, kept))
        self._bar.update()
        return kept["result"]

    def _load(self, path: Path) -> Any:
        """The saved result; None if there is no file, or it is damaged, or from other options or other code."""
        with suppress(OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, pickle.UnpicklingError):
            kept = torch.load(path, map_location="cpu", weights_only=True)
            if kept["made_from"] == self._made_from:
                return kept
        return None

    def train(
        self, name: str, config: Config, network: BuildNetwork | None = None, data: LoadData | None = None
    ) -> Trained:
        """Train a network, or load it if it is trained already: experiments share their trainings. An interrupted
        training is continued. ``config.model`` is the name of ``network``, ``config.data`` the name of ``data``."""
        assert config.steps is not None, "a training of an experiment must set its steps"
        return self.train_in_stages(name, config, [config.steps], network, data)[0]

    def train_in_stages(
        self,
        name: str,
        config: Config,
        stages: Sequence[int],
        network: BuildNetwork | None = None,
        data: LoadData | None = None,
    ) -> list[Trained]:
        """The network of one training after each of these steps. The last one is the end of the training."""
        config = replace(config, steps=stages[-1], data_dir=config.data_dir or self.options.data_dir)
        folder = self.folder.parent / "trainings" / _folder_name(config)
        self._made_from = _digest(self._made_from, folder.name, list(stages))  # later steps depend on the training
        reached = []
        for stage in stages:
            self._bar.set_postfix_str(f"training {name}")
            done = folder / f"finished-{stage}"
            if not (done / RESULT).exists():
                settings = replace(config, steps=stage, out=str(folder))
                self._train_until(settings, done, network, data)
            self._bar.update()
            loaded, trained_as = load_network(done / LAST, network)
            trained_as = replace(trained_as, data_dir=config.data_dir)
            reached.append(Trained(name, loaded, trained_as, json.loads((done / RESULT).read_text())))
        return reached

    def _train_until(self, config: Config, done: Path, network: BuildNetwork | None, data: LoadData | None) -> None:
        """Start or continue a training, and copy its checkpoint to ``done``; the result is written last."""
        last = Path(config.out or "", LAST)
        result = train(config, resume=last.exists(), quiet=self.quiet, network=network, data=data)
        if result.reason == "interrupted":
            raise KeyboardInterrupt
        write_atomically(done / LAST, lambda file: file.write(last.read_bytes()))
        _write_json(done / RESULT, {key: getattr(result, key) for key in ("reason", "step", "accuracy", "seconds")})

    def given(self) -> Trained | None:
        """The network that the options name, or None."""
        if self.options.pretrained is not None:
            return self.shipped(self.options.pretrained)
        if self.options.run is not None:
            saved = load_checkpoint(self.options.run)
            network, config = load_network(self.options.run)
            return Trained(Path(self.options.run).name, network, self._with_data(config), {"step": saved["step"]})
        return None

    def shipped(self, name: str) -> Trained:
        """A pretrained network of the package."""
        network, config, card = load_pretrained_network(name)
        return Trained(f"pretrained {name}", network, self._with_data(config), {"card": card})

    def _with_data(self, config: Config) -> Config:
        return replace(config, data=self.options.data or config.data, data_dir=self.options.data_dir)

    def row(self, **values: Any) -> None:
        """Add a row to the table, with the values of its columns by name."""
        self.rows.append({key: _plain(value) for key, value in values.items()})

    def figure(self, name: str, figure: Any, caption: str) -> None:
        save(figure, self.folder / f"{name}.png")
        self.figures.append({"file": f"{name}.png", "caption": caption})

    def note(self, sentence: str) -> None:
        """Add a note for the readers of the figures."""
        self.notes.append(sentence)

    def report(self) -> Report:
        """Write table.csv and report.html, then report.json. If report.json exists, the report is complete."""
        self._bar.close()
        seconds = round(time.perf_counter() - self._start, 1)
        options = {key: value for key, value in asdict(self.options).items() if value is not None}
        numbers = {key: _plain(value) for key, value in self.numbers.items()}
        found = Report(
            self.name,
            self.title,
            self.paper,
            self.folder,
            options,
            numbers,
            self.rows,
            self.figures,
            self.notes,
            seconds,
        )
        write_atomically(self.folder / "table.csv", lambda file: file.write(_csv(self.rows).encode()))
        write_atomically(self.folder / "report.html", lambda file: file.write(page(found._asdict()).encode()))
        _write_json(self.folder / "report.json", as_json(found))
        return found

    def close(self) -> None:
        self._bar.close()


def as_json(report: Report) -> dict[str, Any]:
    return {**report._asdict(), "folder": str(report.folder), "tritoncaps": __version__}


def pixels_of(data: ImageSet) -> Tensor:
    """The pixels of the images, in [0, 1]."""
    return data.images.float() / 255


def _bar(name: str, quiet: bool) -> Any:
    from tqdm import tqdm

    hidden = quiet or not sys.stderr.isatty()
    return tqdm(desc=name, total=0, unit="step", dynamic_ncols=True, leave=False, disable=hidden)


def _folder_name(config: Config) -> str:
    """The name of the folder of a training. Trainings with different settings have different names."""
    settings = {key: value for key, value in asdict(config).items() if key not in ("out", "data_dir", "device")}
    model = config.model.rpartition(":")[2]
    return f"{config.data.rpartition(':')[2]}-{model}-{_digest(__version__, settings)[:10]}"


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _modified(run: str | None) -> float | None:
    """The time of the last change of a run's files."""
    files = [] if run is None else [Path(run), *Path(run).glob("*.pt")]
    return max((path.stat().st_mtime for path in files if path.exists()), default=None)


def _plain(value: Any) -> Any:
    """The value for JSON, with numbers of at most six digits."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=1) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def _csv(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
