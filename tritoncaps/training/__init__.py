"""Training and evaluation: a plain PyTorch loop with the losses and schedules of the papers.

>>> from tritoncaps.training import Config, train
>>> train(Config(data="toynorb", epochs=2))  # doctest: +SKIP
"""

from tritoncaps.training.checkpoint import CheckpointError, load_checkpoint
from tritoncaps.training.config import Config, ConfigError, read_config
from tritoncaps.training.evaluation import Evaluation, evaluate
from tritoncaps.training.loop import DivergedError, Result, train
from tritoncaps.training.networks import NETWORKS, Task, build

__all__ = [
    "NETWORKS",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DivergedError",
    "Evaluation",
    "Result",
    "Task",
    "build",
    "evaluate",
    "load_checkpoint",
    "read_config",
    "train",
]
