"""The networks of the experiments: those of the papers, or with ``--quick`` smaller networks that train in seconds. The
functions that build them take a task, the routing iterations and a backend, as for your own networks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from tritoncaps.experiments.lab import Lab, Trained
from tritoncaps.models import CapsNet, MatrixCapsNet
from tritoncaps.models.baselines import SmallNORBBaseline
from tritoncaps.routing import EMRouting
from tritoncaps.training import Config, ConfigError, Task

# settings for fast training on a few thousand images, as in docs/recipes/toynorb-demo.toml
RECIPE: dict[str, Any] = {"batch_size": 32, "lr": 5e-3, "lr_schedule": "cosine", "margin": "fixed", "jitter": "none"}

Channels = tuple[int, int, int, int]
SMALL: Channels = (64, 8, 16, 16)  # the small network in table 1 of Hinton 2018
QUICK: Channels = (32, 8, 8, 8)


def matrix_capsnet(
    task: Task, iterations: int, backend: str | None, *, channels: Channels = SMALL, **options: Any
) -> nn.Module:
    return MatrixCapsNet(task.channels, task.classes, channels, iterations, backend=backend, **options)


def small_capsnet(task: Task, iterations: int, backend: str | None) -> nn.Module:
    """CapsNet with an eighth of the paper's channels and a quarter of its primary capsules."""
    return CapsNet(task.channels, task.classes, task.height, iterations, channels=32, primary_caps=8, backend=backend)


def cnn(task: Task, iterations: int, backend: str | None) -> nn.Module:
    return SmallNORBBaseline(task.channels, task.classes, task.height)


def small_cnn(task: Task, iterations: int, backend: str | None) -> nn.Module:
    """The baseline of Hinton 2018 with half of its channels and an eighth of its units."""
    return nn.Sequential(
        nn.Conv2d(task.channels, 16, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (task.height // 4) * (task.width // 4), 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, task.classes),
    )


def local(iterations: int) -> EMRouting:
    """EM routing with local competition, which learns faster than the global competition of the paper."""
    return EMRouting(iterations, competition="local")


def train_matrix_capsnet(lab: Lab, name: str, steps: int, variant: str = "", **settings: Any) -> Trained:
    """Train a MatrixCapsNet. ``variant`` is a name for ``settings["options"]``, the arguments of the network."""
    config, build = _matrix_capsnet(lab, steps, variant, settings)
    return lab.train(name, config, build)


def matrix_capsnet_stages(lab: Lab, stages: list[int], data: str) -> list[Trained]:
    """The same network after each of these steps."""
    settings: dict[str, Any] = {"data": data, "lr_schedule": "exponential", "lr": 3e-3, "test_limit": 200}
    settings["options"] = {"routing": local(3)}
    config, build = _matrix_capsnet(lab, stages[-1], "local-3", settings)
    return lab.train_in_stages("MatrixCapsNet", config, stages, build)


def _matrix_capsnet(lab: Lab, steps: int, variant: str, settings: dict[str, Any]) -> tuple[Config, Any]:
    channels = lab.choose(QUICK, SMALL)
    settings = {"loss": "spread", **settings}
    build = partial(matrix_capsnet, channels=channels, **settings.pop("options", {}))
    model = "-".join(["experiments:matrix-capsnet", *map(str, channels), *([variant] if variant else [])])
    return Config(model=model, **_settings(lab, steps, settings)), build


def train_cnn(lab: Lab, name: str, steps: int, **settings: Any) -> Trained:
    build = lab.choose(small_cnn, cnn)
    settings = {"lr": 1e-3, **settings}
    source = settings.pop("source", None)  # a function that loads data outside of DATASETS
    config = Config(model=f"experiments:{build.__name__}", **_settings(lab, steps, settings))
    return lab.train(name, config, build, source)


def train_capsnet(lab: Lab, name: str, steps: int, **settings: Any) -> Trained:
    """Train CapsNet with its decoder. The weight of the reconstruction error is 40 times that of the paper, so that the
    decoder learns faster."""
    source = settings.pop("source", None)
    config, build = _capsnet(lab, steps, settings)
    return lab.train(name, config, build, source)


def capsnet_stages(lab: Lab, stages: list[int], data: str) -> list[Trained]:
    """The same network after each of these steps."""
    settings = {"data": data, "lr_schedule": "exponential", "evaluate_every": stages[-1], "test_limit": 200}
    config, build = _capsnet(lab, stages[-1], {**settings, "mono": data.endswith("norb")})
    return lab.train_in_stages("CapsNet", config, stages, build)


def _capsnet(lab: Lab, steps: int, settings: dict[str, Any]) -> tuple[Config, Any]:
    decoder = {"loss": "margin", "lr": 2e-3, "standardise": "none", "jitter": "none", "reconstruction": 0.02}
    model = lab.choose("experiments:small-capsnet", "capsnet")
    return Config(model=model, **_settings(lab, steps, {**decoder, **settings})), lab.choose(small_capsnet, None)


def decoding_capsnet(lab: Lab, own: str = "mnist", quick_steps: int = 800) -> Trained:
    """The network in the options, or a network trained on the data in the options, or on ``own``."""
    trained = lab.given()
    if trained is None:
        data = lab.options.data or own
        steps = lab.options.steps or lab.choose(quick_steps, 10_000)
        return train_capsnet(lab, "CapsNet", steps, data=data, mono=data.endswith("norb"), test_limit=1000)
    if getattr(trained.network, "decoder", None) is None:
        raise ConfigError(
            f"{lab.name} needs a network with a decoder, trained with --model capsnet, but {trained.name} is "
            f"{trained.config.model}"
        )
    return trained


def _settings(lab: Lab, steps: int, changes: dict[str, Any]) -> dict[str, Any]:
    """The settings of a training: one evaluation at the end, unless ``changes`` contain another setting."""
    return {**RECIPE, "steps": steps, "evaluate_every": steps, "seed": lab.options.seed, **changes}
