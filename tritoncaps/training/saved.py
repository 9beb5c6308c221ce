"""Load a trained network from its checkpoint, without its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from tritoncaps.data import DATASETS
from tritoncaps.models.pretrained import load_pretrained
from tritoncaps.training.checkpoint import CheckpointError, first_problem, load_checkpoint
from tritoncaps.training.config import Config
from tritoncaps.training.networks import Task
from tritoncaps.training.own import BuildNetwork, add_described, check_known, with_network
from tritoncaps.training.task import build_network, pipeline_of


def load_network(
    path: str | Path, network: BuildNetwork | None = None, averaged: bool = True
) -> tuple[nn.Module, Config]:
    """Load a trained network.

    Args:
        path: a checkpoint, or the folder of a run.
        network: the function that builds the network, if it is one of your own. A run does not contain code.
        averaged: use the moving average of the weights, if the run has one.

    Returns:
        The network in evaluation mode, and the settings of its training.

    Raises:
        CheckpointError: if there is no checkpoint, or it does not fit the network.
        ConfigError: if the network is one of your own and ``network`` is missing.

    Example:
        >>> from tritoncaps.training import load_network, pipeline_of
        >>> network, config = load_network("runs/mnist-capsnet")  # doctest: +SKIP
        >>> capsules = network(pipeline_of(config).test(images)[0])  # doctest: +SKIP
    """
    saved = load_checkpoint(path)
    config = saved["config"] if network is None else with_network(saved["config"], network)
    try:
        add_described(config.data, saved.get("images") or {})
    except (KeyError, TypeError):
        raise CheckpointError(f"{path} does not describe the images of {config.data}") from None
    check_known(config)
    built = build_network(config, task_by_name(config))
    average = saved.get("average") if averaged else None
    weights = saved["network"] if average is None else _averaged(average)
    try:
        built.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the network {config.model}: {first_problem(error)}") from None
    return built.eval(), config


def load_pretrained_network(name: str) -> tuple[nn.Module, Config, dict[str, Any]]:
    """Load a pretrained network of the package: the network in evaluation mode, its settings and its card."""
    settings, card, weights = load_pretrained(name)
    config = Config(**settings)
    network = build_network(config, task_by_name(config))
    network.load_state_dict(weights)
    return network.eval(), config, card


def task_by_name(config: Config) -> Task:
    entry = DATASETS[config.data]
    channels, height, width = entry.shape
    size = pipeline_of(config).size(height, width)
    return Task(config.data, 1 if config.mono else channels, *size, len(entry.classes))


def _averaged(average: dict) -> dict:
    """The weights of the network in the state of an AveragedModel."""
    return {name.removeprefix("module."): value for name, value in average.items() if name.startswith("module.")}
