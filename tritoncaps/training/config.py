"""All settings of a run. The command line, the configuration file and the checkpoint use these names."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tritoncaps.data import DATASETS
from tritoncaps.data.pipeline import CROPS
from tritoncaps.routing.mixture import COMPETITIONS
from tritoncaps.training.networks import NETWORKS

LOSSES = ("auto", "spread", "margin", "cross-entropy", "logit-cross-entropy")


class ConfigError(ValueError):
    """The value of a setting cannot be used."""


def _setting(default: Any, help: str, choices: Collection | None = None, own: bool = False) -> Any:
    """A setting with its help text. ``own``: besides the choices, it may name a function of the user."""
    return field(default=default, metadata={"help": help, "choices": choices, "own": own})


@dataclass(frozen=True)
class Config:
    """The settings of a run. `tritoncaps train --help` and docs/training.md describe each of them.

    The defaults are those of "Matrix Capsules with EM Routing", where the paper gives a number.

    Raises:
        ConfigError: if a setting has a wrong type or value.

    Example:
        >>> from tritoncaps.training import Config
        >>> Config(data="mnist", epochs=2).batch_size
        64
    """

    data: str = _setting("toynorb", "data set", DATASETS, own=True)
    data_dir: str | None = _setting(None, "folder of the data files [TRITONCAPS_DATA, or the user's cache]")
    mono: bool = _setting(False, "use only the left image of stereo pairs")
    novel: str = _setting("none", "train on a third of the views, test on all", ("none", "azimuth", "elevation"))
    limit: int | None = _setting(None, "train on this many images, chosen at random [all]")
    test_limit: int | None = _setting(None, "test on this many images, chosen at random [all]")
    validation: int = _setting(
        0, "number of training images to hold out; the best network is chosen on them, not on the test images"
    )
    validation_instances: int = _setting(
        0, "number of objects of each class to hold out, with all their images; the best network is chosen on them"
    )
    final_test: bool = _setting(
        True, "at the end of a run with held-out images, test the best network on the test images"
    )
    standardise: str = _setting(
        "auto", "scale images or crops to mean 0 and variance 1", ("auto", "crop", "image", "none")
    )
    standardise_channels: bool = _setting(False, "standardise each channel (each eye) separately")
    jitter: str = _setting(
        "auto",
        "random brightness and contrast: last, after standardisation (the papers), or first (the authors' code)",
        ("auto", "last", "first", "none"),
    )
    rotation: float = _setting(0.0, "rotate training images at random by up to this many degrees")
    scaling: float = _setting(0.0, "scale training images by random factors of 1 - X to 1 + X")
    affine: float = _setting(0.0, "stretch and shear training images at random: entries of a matrix change by up to X")
    crop: int | None = _setting(None, "height and width of the crops of images [those of the data set]")
    shift: int | None = _setting(None, "shift training images by up to this many random pixels [those of the data set]")
    edge_padding: int = _setting(0, "before the random crop, pad images by this many pixels that repeat the edge")
    crops: int = _setting(1, "number of crops of each test image; their predictions are averaged", tuple(CROPS))

    model: str = _setting("matrix-capsnet-small", "network", NETWORKS, own=True)
    iterations: int = _setting(3, "routing iterations")
    routing: str = _setting(
        "em", "of matrix capsules: EM, EM with a softer E-step, or variational Bayes", ("em", "tempered", "vb")
    )
    competition: str = _setting(
        "global",
        "matrix capsules: all parents of a child compete for it, or only the types at one position, or (but not for "
        "classes) only the positions of one type",
        COMPETITIONS,
    )
    final_lambda: float | None = _setting(None, "EM routing: limit of the inverse temperature [1]")
    capsule_norm: bool | None = _setting(None, "batch normalisation of capsules [only in tiny-capsnet]")
    capsule_dropout: float = _setting(0.0, "probability that a capsule before the last layer is dropped in training")
    primary_bias: float = _setting(0.0, "initial bias of the logits of primary activations; the authors' code: -1")
    vote_bias: bool = _setting(False, "a bias of the votes of the last two layers of matrix-capsnet")
    backend: str | None = _setting(None, "kernels [chosen by device]", ("reference", "cpu", "triton"))

    loss: str = _setting("auto", "loss; auto: chosen by the network", LOSSES, own=True)
    mixup: float = _setting(0.0, "mixup: mix pairs of images with weights from Beta(X, X); 0: none")
    margin: str = _setting("linear", "schedule of the margin of the spread loss", ("linear", "sigmoid", "fixed"))
    margin_steps: int | None = _setting(None, "steps of that schedule [half of the run; the paper: 50000]")
    reconstruction: float = _setting(0.0005, "weight of the decoder's squared error, for networks with a decoder")

    epochs: int = _setting(10, "passes over the training images")
    steps: int | None = _setting(None, "optimiser steps, instead of epochs")
    batch_size: int = _setting(64, "images of a step, on all devices together")
    accumulate: int = _setting(1, "compute the batch of a device in this many parts, to save memory")
    lr: float = _setting(3e-3, "learning rate of Adam")
    lr_schedule: str = _setting(
        "exponential",
        "decay of the learning rate; cosine: to 0 at the end; tail: constant, then a cosine to 0",
        ("exponential", "cosine", "tail"),
    )
    lr_tail: float = _setting(0.4, "fraction of the run in which the schedule tail decays")
    lr_decay: float = _setting(0.96, "factor of the exponential schedule")
    lr_decay_steps: int = _setting(20_000, "steps after which the learning rate has decayed by this factor")
    weight_decay: float = _setting(2e-7, "weight of the L2 penalty")
    ema: float = _setting(0.0, "decay of a moving average of the weights; the average is evaluated; 0: none")
    patience: int = _setting(0, "stop after this many evaluations without a better accuracy; 0: never")
    stop_at: float = _setting(0.0, "stop when an evaluation reaches this accuracy, such as 0.9; 0: never")

    device: str = _setting("auto", "cpu, cuda, cuda:1, .. [a GPU if there is one]")
    amp: str = _setting("none", "mixed precision", ("none", "bfloat16", "float16"))
    compile: bool = _setting(False, "torch.compile the network")
    graphs: bool = _setting(False, "compile the network and replay it as CUDA graphs: for small networks on a GPU")
    workers: int = _setting(0, "processes that load images")
    seed: int = _setting(0, "random seed of weights, order and augmentation")

    out: str | None = _setting(None, "folder of the run [runs/DATA-MODEL, numbered]")
    checkpoint_every: int = _setting(500, "steps between checkpoints")
    evaluate_every: int | None = _setting(None, "steps between evaluations [an epoch]")
    log_every: int = _setting(20, "steps between lines of metrics")

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for item in fields(self):
            value, name = getattr(self, item.name), flag(item.name)
            object.__setattr__(self, item.name, _typed(name, value, kinds[item.name]))
            choices = item.metadata["choices"]
            if choices and value is not None and value not in choices and not (item.metadata["own"] and is_own(value)):
                known = ", ".join(map(str, choices)) + (" or package.module:function" if item.metadata["own"] else "")
                raise ConfigError(f"{name} must be one of {known}, but it is {value!r}")
        for key in ("iterations", "epochs", "batch_size", "accumulate", "lr_decay_steps", "checkpoint_every"):
            self._at_least(key, 1)
        for key in ("evaluate_every", "log_every", "limit", "test_limit", "steps", "margin_steps", "crop"):
            self._at_least(key, 1)
        for key in ("validation", "validation_instances", "shift", "edge_padding", "workers", "patience", "seed"):
            self._at_least(key, 0)
        for key in ("lr", "weight_decay", "reconstruction", "rotation", "mixup"):
            self._at_least(key, 0)
        if self.validation and self.validation_instances:
            raise ConfigError("--validation and --validation-instances cannot both be given")
        if self.shift is not None and self.edge_padding:
            raise ConfigError("--shift and --edge-padding cannot both be given")
        if not self.final_test and not (self.validation or self.validation_instances):
            raise ConfigError("--no-final-test needs held-out images: --validation or --validation-instances")
        if not 0 < self.lr_tail <= 1:
            raise ConfigError(f"--lr-tail must be above 0 and at most 1, but it is {self.lr_tail}")
        if not 0 <= self.capsule_dropout < 1:
            raise ConfigError(f"--capsule-dropout must be at least 0 and below 1, but it is {self.capsule_dropout}")
        if not 0 <= self.scaling < 1:
            raise ConfigError(f"--scaling must be at least 0 and below 1, but it is {self.scaling}")
        if not 0 <= self.affine < 0.5:
            raise ConfigError(f"--affine must be at least 0 and below 0.5, but it is {self.affine}")
        if self.final_lambda is not None and not 0 < self.final_lambda < float("inf"):
            raise ConfigError(f"--final-lambda must be above 0, but it is {self.final_lambda}")
        if not 0 <= self.stop_at <= 1:
            raise ConfigError(f"--stop-at must be from 0 to 1, but it is {self.stop_at}")
        if not 0 <= self.ema < 1:
            raise ConfigError(f"--ema must be at least 0 and below 1, but it is {self.ema}")

    def _at_least(self, key: str, least: int) -> None:
        value = getattr(self, key)
        if value is not None and not value >= least:
            raise ConfigError(f"{flag(key)} must be at least {least}, but it is {value}")

    def to_toml(self) -> str:
        """The settings as TOML. Settings that are None are omitted, because TOML has no None."""
        pairs = ((name, value) for name, value in asdict(self).items() if value is not None)
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in pairs)


def is_own(name: str) -> bool:
    """True if it names a function of the user, ``package.module:function``."""
    return ":" in name


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_config(path: str | Path) -> dict[str, Any]:
    """Read the settings in a TOML or YAML file.

    Args:
        path: the file.

    Returns:
        The settings by name; pass them to :class:`Config`.

    Raises:
        ConfigError: if the file cannot be read, or there is no such setting.

    Example:
        >>> from tritoncaps.training import Config, read_config
        >>> Config(**read_config("docs/recipes/mnist-capsnet.toml")).model  # doctest: +SKIP
        'capsnet'
    """
    path = Path(path)
    try:
        content = path.read_text()
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror or error}") from None
    settings = _parse_yaml(path, content) if path.suffix in (".yaml", ".yml") else _parse_toml(path, content)
    settings = {name.replace("-", "_"): value for name, value in settings.items()}
    unknown = settings.keys() - {item.name for item in fields(Config)}
    if unknown:
        raise ConfigError(f"--config {path}: there is no setting called {sorted(unknown)[0]!r}")
    return settings


def _parse_toml(path: Path, content: str) -> dict[str, Any]:
    try:
        import tomllib  # type: ignore[import-not-found, unused-ignore]
    except ImportError:  # before Python 3.11
        import tomli as tomllib
    try:
        return tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from None


def _parse_yaml(path: Path, content: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"--config {path}: YAML needs the package PyYAML; TOML needs no package") from None
    try:
        settings = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"--config {path} must contain names and values")
    return settings


def _typed(name: str, value: Any, kind: Any) -> Any:
    """Check that ``value`` is of type ``kind``, such as float or int | None. An int is accepted for a float."""
    kinds = get_args(kind) or (kind,)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not any(type(value) is k for k in kinds):
        expected = " or ".join(k.__name__ for k in kinds if k is not type(None))
        raise ConfigError(f"{name} must be of type {expected}, but it is {value!r}")
    return value
