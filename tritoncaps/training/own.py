"""Networks, data and losses of the user, as functions.

Each has a name, ``package.module:function``, which becomes an entry of NETWORKS or DATASETS. A run saves the name, not
the code. A name is imported only if it is given on the command line, never because a run contains it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tritoncaps.data import DATASETS, Entry, ImageSet, Pipeline, data_folder
from tritoncaps.data.pipeline import Jitter
from tritoncaps.training.config import Config, ConfigError, is_own
from tritoncaps.training.networks import NETWORKS, Network, Task

BuildNetwork = Callable[[Task, int, "str | None"], nn.Module]
LoadData = Callable[[str, Path], "ImageSet | tuple[ImageSet, Pipeline]"]
Loss = Callable[[Any, Tensor], Tensor]

PLAIN = Pipeline(standardise="crop")  # for data without a pipeline
TRIAL = 2  # blank images, with which a user's network is tried before the run starts


def find(option: str, name: str) -> Callable[..., Any]:
    """Import the function ``package.module:function``. The current folder is searched first, as in ``python -m``."""
    module_name, _, attributes = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attributes.split("."))):
        raise ConfigError(f"{option} must be a known name or package.module:function, but it is {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{option} {name}: {module_name} needs the module {error.name}, not found") from error
        raise ConfigError(
            f"{option} {name}: there is no module {error.name}, neither in {os.getcwd()} nor on Python's path"
        ) from None
    except Exception as error:
        raise ConfigError(f"{option} {name}: {module_name} fails with {type(error).__name__}: {error}") from error
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise ConfigError(f"{option} {name}: {module_name} has no {attributes}")
        found = getattr(found, attribute)
    return found


def find_all(**names: str | None) -> dict[str, Any]:
    """Import the functions that the options ``model``, ``data`` and ``loss`` name, as arguments of ``train``."""
    arguments = {"model": "network"}
    return {
        arguments.get(option, option): find(f"--{option}", name)
        for option, name in names.items()
        if name is not None and is_own(name)
    }


def with_own(config: Config, network: BuildNetwork | None, data: LoadData | None, loss: Loss | None) -> Config:
    """The configuration with the names of these functions. The network and the data are registered by their names."""
    if network is not None:
        config = with_network(config, network)
    if data is not None:
        config = replace(config, data=_name(config.data, data))
        add_data(config.data, data, data_folder(config.data_dir))
    if loss is not None:
        config = replace(config, loss=_name(config.loss, loss))
        _check_signature("--loss", config.loss, loss, "the network's outputs", "labels")
    elif is_own(config.loss):
        raise ConfigError(_wanted("loss", config.loss, "--loss", "loss"))
    check_known(config)
    return config


def with_network(config: Config, build: BuildNetwork) -> Config:
    config = replace(config, model=_name(config.model, build))
    _check_signature("--model", config.model, build, "a Task", "the routing iterations", "a backend")
    NETWORKS[config.model] = Network(build, "auto", True, "your own")
    return config


def check_known(config: Config) -> None:
    """Raise an error if the network or the data are neither part of tritoncaps nor given by the user."""
    if is_own(config.model) and config.model not in NETWORKS:
        raise ConfigError(_wanted("network", config.model, "--model", "network"))
    if is_own(config.data) and config.data not in DATASETS:
        raise ConfigError(_wanted("data", config.data, "--data", "data"))


def add_data(name: str, load: LoadData, folder: Path) -> None:
    """Register data of the user. The test images are loaded, to find their size and classes."""
    _check_signature("--data", name, load, "'train' or 'test'", "a folder")
    test, pipeline = _checked(name, "test", load("test", folder))
    loaded = {"test": test}

    def load_again(split: str, folder: Path) -> ImageSet:
        data = loaded.pop(split, None) or _checked(name, split, load(split, folder))[0]
        if (data.shape, data.classes) != (test_shape, classes):
            raise ConfigError(
                f"--data {name}: training images of {_text(data.shape)} in the classes {', '.join(data.classes)} "
                f"do not match test images of {_text(test_shape)} in the classes {', '.join(classes)}"
            )
        return data

    test_shape, classes = test.shape, test.classes
    del test  # `loaded` keeps the images until their first use
    DATASETS[name] = Entry(load_again, test_shape, classes, pipeline, (), "your own")


def describe(name: str) -> dict[str, Any] | None:
    """The description of a user's data for a checkpoint, so that the network can be used without the data."""
    if not is_own(name):
        return None
    entry = DATASETS[name]
    return {"shape": entry.shape, "classes": entry.classes, "pipeline": asdict(entry.pipeline)}


def add_described(name: str, description: dict[str, Any]) -> None:
    """Register the description of a user's data from a checkpoint, unless the data are registered. It cannot load."""

    def load(split: str, folder: Path) -> ImageSet:
        raise ConfigError(_wanted("data", name, "--data", "data"))

    if is_own(name) and name not in DATASETS:
        shape, classes, treated = (description[key] for key in ("shape", "classes", "pipeline"))
        jitter = Jitter(**treated["jitter"]) if treated["jitter"] else None
        pipeline = Pipeline(**{**treated, "jitter": jitter})
        DATASETS[name] = Entry(load, tuple(shape), tuple(classes), pipeline, (), "your own")


def try_network(name: str, network: nn.Module, task: Task, loss: Loss | None) -> str:
    """Check that the network takes the images and returns one score for each class, and that ``loss`` returns one
    number. Return the default loss: cross-entropy for scores, the spread loss for capsules."""
    if not isinstance(network, nn.Module):
        raise ConfigError(f"--model {name} must return an nn.Module, but it returned a {type(network).__name__}")
    was_training, device = network.training, next(network.parameters(), torch.empty(0)).device
    with torch.no_grad():
        outputs = network.eval()(torch.zeros(TRIAL, task.channels, task.height, task.width, device=device))
    network.train(was_training)
    scores = outputs[1] if isinstance(outputs, tuple) and len(outputs) == 2 else outputs
    if not isinstance(scores, Tensor) or scores.shape != (TRIAL, task.classes):
        given = list(scores.shape) if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise ConfigError(
            f"--model {name} must return scores of shape [{TRIAL}, {task.classes}] for {TRIAL} images in "
            f"{task.classes} classes, or capsules with such activations, but it returns {given}"
        )
    if loss is not None:
        _try_loss(loss, outputs, torch.zeros(TRIAL, dtype=torch.long, device=device))
    return "cross-entropy" if isinstance(outputs, Tensor) else "spread"


def _try_loss(loss: Loss, outputs: Any, labels: Tensor) -> None:
    if isinstance(loss, nn.Module):
        if list(loss.parameters()):
            raise ConfigError("--loss must have no parameters: only those of the network are trained")
        loss = loss.to(labels.device)
    value = loss(outputs, labels)
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        given = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ConfigError(f"--loss must return a tensor with one number, the mean over images, but it returns {given}")


def _checked(name: str, split: str, given: Any) -> tuple[ImageSet, Pipeline]:
    data, pipeline = given if isinstance(given, tuple) and len(given) == 2 else (given, PLAIN)
    if not isinstance(data, ImageSet) or not isinstance(pipeline, Pipeline):
        raise ConfigError(
            f"--data {name} must return an ImageSet, or an ImageSet and a Pipeline, but for {split!r} it returned "
            f"a {type(given).__name__}"
        )
    images, labels, count = data.images, data.labels, len(data.classes)
    if not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.ndim != 4 or not len(images):
        given = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else f"a {type(images).__name__}"
        raise ConfigError(f"--data {name}: {split} images must be uint8 of shape [N, C, H, W], but they are {given}")
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        given = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise ConfigError(
            f"--data {name}: {split} labels must be int64 of shape [{len(images)}], one for each image, "
            f"but they are {given}"
        )
    if labels.min() < 0 or labels.max() >= count:
        raise ConfigError(
            f"--data {name}: {split} labels must be from 0 to {count - 1}, the classes {', '.join(data.classes)}, "
            f"but they are from {labels.min()} to {labels.max()}"
        )
    return data, pipeline


def _check_signature(option: str, name: str, function: Any, *arguments: str) -> None:
    expected = f"{option} {name} must be a function of {', '.join(arguments)}"
    if not callable(function):
        raise ConfigError(f"{expected}, but it is a {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ConfigError(f"{expected}, but its signature is {signature}") from None


def _name(given: str, function: Any) -> str:
    """The name in the configuration if it names a function, otherwise the function's own name."""
    if is_own(given):
        return given
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _wanted(what: str, name: str, option: str, argument: str) -> str:
    return (
        f"the run needs the {what} {name}, which is not part of tritoncaps and is not imported automatically: "
        f"pass it with {option} {name}, or in Python with {argument}="
    )


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
