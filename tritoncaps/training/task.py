"""From a configuration to the images for training and tests, their preprocessing, and the network."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from tritoncaps import EMRouting, MixtureRouting, TemperedEMRouting, VBRouting
from tritoncaps.data import DATASETS, ImageSet, MultiMNIST, Pipeline, familiar_views, load
from tritoncaps.data.pipeline import JITTERS, Jitter
from tritoncaps.training.config import Config, ConfigError, flag
from tritoncaps.training.networks import EM_NETWORKS, MATRIX_CAPSNETS, NETWORKS, Task, build

Data = ImageSet | MultiMNIST


class Splits(NamedTuple):
    """The images of a run. ``validation`` is None unless images are held out."""

    train: Data
    validation: Data | None
    test: Data


def load_splits(config: Config) -> Splits:
    train = load(config.data, "train", config.data_dir)
    validation: Data | None = None
    if config.novel != "none":
        if not isinstance(train, ImageSet) or config.novel not in train.factors:
            raise ConfigError(f"--novel {config.novel} needs data with views, such as toynorb, but it is {config.data}")
        train = train.select(familiar_views(train, config.novel))
    if config.validation:
        if config.validation >= len(train):
            raise ConfigError(f"--validation must be below {len(train)}, all images, but it is {config.validation}")
        validation, train = train.split(config.validation, config.seed)
    if config.validation_instances:
        if not isinstance(train, ImageSet) or "instance" not in train.factors:
            raise ConfigError(
                f"--validation-instances needs data with instances, such as toynorb, but it is {config.data}"
            )
        try:
            validation, train = train.split_instances(config.validation_instances, config.seed)
        except ValueError as error:
            raise ConfigError(f"--validation-instances: {error}") from None
    if config.limit and config.limit < len(train):
        train = train.split(config.limit, config.seed)[0]
    if config.batch_size > len(train):
        raise ConfigError(f"--batch-size must be at most {len(train)}, the training images, not {config.batch_size}")
    return Splits(_channels(config, train), validation and _channels(config, validation), load_test(config))


def load_test(config: Config) -> Data:
    return limit_test(config, _channels(config, load(config.data, "test", config.data_dir)))


def limit_test(config: Config, test: Data) -> Data:
    """At most ``config.test_limit`` of the images, chosen at random with the seed of the run."""
    if config.test_limit and config.test_limit < len(test):
        return test.split(config.test_limit, config.seed)[0]
    return test


def _channels(config: Config, data: Data) -> Data:
    return data.mono() if config.mono and isinstance(data, ImageSet) else data


def pipeline_of(config: Config) -> Pipeline:
    """The preprocessing of a run: the pipeline of its data set with the settings of ``config``.

    Args:
        config: the settings.

    Returns:
        The pipeline; ``pipeline_of(config).test(images)[0]`` is the input of the network for bytes [N, C, H, W].

    Raises:
        ConfigError: if the settings contradict each other.

    Example:
        >>> from tritoncaps.training import Config, pipeline_of
        >>> pipeline_of(Config(data="toynorb")).crop
        32
    """
    pipeline = DATASETS[config.data].pipeline
    own = pipeline.standardise if NETWORKS[config.model].standardise else None
    chosen = {"auto": own, "none": None}.get(config.standardise, config.standardise)
    if chosen is not None and config.model == "capsnet" and config.reconstruction:
        raise ConfigError("--model capsnet reconstructs pixels in [0, 1]: use --standardise none or --reconstruction 0")
    pipeline = _padded(config, pipeline)
    largest = min(DATASETS[config.data].shape[1:]) + 2 * pipeline.pad
    if config.crop is not None and config.crop > largest:
        raise ConfigError(f"--crop must be at most {largest}, the size of the padded images, but it is {config.crop}")
    return replace(
        pipeline,
        crop=config.crop or pipeline.crop,
        standardise=chosen,
        per_channel=config.standardise_channels or pipeline.per_channel,
        jitter=_jitter(config, pipeline, chosen is not None),
        rotation=config.rotation or pipeline.rotation,
        scaling=config.scaling or pipeline.scaling,
        affine=config.affine or pipeline.affine,
    )


def _padded(config: Config, pipeline: Pipeline) -> Pipeline:
    """With the padding of the configuration or of the data set."""
    if config.edge_padding:
        return replace(pipeline, pad=config.edge_padding, edges="repeat")
    return pipeline if config.shift is None else replace(pipeline, pad=config.shift)


def _jitter(config: Config, pipeline: Pipeline, standardised: bool) -> Jitter | None:
    """The jitter of the configuration or of the data set. The numbers of "last" are for standardised images."""
    if config.jitter == "last" and not standardised:
        raise ConfigError("--jitter last is for standardised images: use --jitter first with --standardise none")
    if config.jitter == "auto":
        return pipeline.jitter if standardised or pipeline.jitter is None else JITTERS["first"]
    return JITTERS.get(config.jitter)


def task_of(config: Config, data: Data) -> Task:
    channels, height, width = data.shape
    return Task(config.data, channels, *pipeline_of(config).size(height, width), len(data.classes))


def build_network(config: Config, task: Task) -> nn.Module:
    return build(config.model, task, config.iterations, config.backend, **_options(config))


def _options(config: Config) -> dict[str, Any]:
    """The options of networks of matrix capsules besides iterations and backend; other networks have none."""
    if config.vote_bias and config.model not in MATRIX_CAPSNETS:
        raise ConfigError(f"--vote-bias is for {' and '.join(MATRIX_CAPSNETS)}, but --model is {config.model}")
    if config.model not in EM_NETWORKS:
        for name in ("routing", "competition", "final_lambda", "capsule_norm", "capsule_dropout", "primary_bias"):
            if getattr(config, name) != getattr(Config, name):
                raise ConfigError(f"{flag(name)} is for networks of matrix capsules, which {config.model} is not")
        return {}
    optional = {"norm": config.capsule_norm, "vote_bias": config.vote_bias or None}
    return {
        "routing": _routing(config),
        "dropout": config.capsule_dropout,
        "primary_bias": config.primary_bias,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _routing(config: Config) -> MixtureRouting:
    if config.routing != "vb":
        em = EMRouting if config.routing == "em" else TemperedEMRouting
        return em(config.iterations, config.final_lambda, competition=config.competition)  # type: ignore[arg-type]
    if config.final_lambda is not None:
        raise ConfigError("--final-lambda is for --routing em and tempered")
    return VBRouting(config.iterations, competition=config.competition)  # type: ignore[arg-type]


def check_fits(network: nn.Module, made_for: Task, task: Task) -> None:
    """Raise an error if a network for other images cannot take the images of ``task``. Some networks take any size."""
    if (made_for.channels, made_for.classes) == (task.channels, task.classes):
        if (made_for.height, made_for.width) == (task.height, task.width):
            return
        with suppress(RuntimeError, ValueError), torch.no_grad():
            network(torch.zeros(1, task.channels, task.height, task.width))
            return
    raise ConfigError(
        f"the network is for images of {_text(made_for)}, but --data {task.data} gives it images of {_text(task)}"
    )


def _text(task: Task) -> str:
    return f"{task.channels}x{task.height}x{task.width} in {task.classes} classes"


def loss_of(config: Config, suits: str | None = None) -> str:
    """The name of the loss. ``suits``: the default loss of a user's network."""
    own = suits or NETWORKS[config.model].loss
    chosen = own if config.loss == "auto" else config.loss
    if config.mixup and config.model == "capsnet" and config.reconstruction:
        raise ConfigError("--mixup gives no single digit to reconstruct: use --reconstruction 0")
    if own == "cross-entropy" and chosen != own:
        raise ConfigError(f"--loss {chosen} is for capsules; --model {config.model} needs --loss cross-entropy")
    if config.data == "multimnist" and chosen == "spread":
        raise ConfigError("--loss spread needs one class in each image; use --loss margin for --data multimnist")
    return chosen
