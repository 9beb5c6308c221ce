"""Training and evaluation: a plain PyTorch loop with the losses and schedules of the papers.

>>> from tritoncaps.training import Config, train
>>> train(Config(data="toynorb", epochs=2))  # doctest: +SKIP
"""

from tritoncaps.training.checkpoint import CheckpointError, load_checkpoint
from tritoncaps.training.config import Config, ConfigError, read_config
from tritoncaps.training.evaluation import Evaluation, evaluate
from tritoncaps.training.loop import DivergedError, Result, train
from tritoncaps.training.networks import NETWORKS, Network, Task, build
from tritoncaps.training.saved import load_network
from tritoncaps.training.task import pipeline_of

__all__ = [
    "NETWORKS",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DivergedError",
    "Evaluation",
    "Network",
    "Result",
    "Task",
    "build",
    "evaluate",
    "load_checkpoint",
    "load_network",
    "pipeline_of",
    "read_config",
    "train",
]
