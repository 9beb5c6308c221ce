"""Distributed training: torchrun starts one process for each device. Without torchrun there is one process."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncaps.training.config import ConfigError


class World(NamedTuple):
    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def agree(self, text: Callable[[], str]) -> str:
        """Call ``text`` in the main process and return its result in all processes. A ConfigError is raised in all."""
        box: list[str | ConfigError] = [""]
        if self.is_main:
            try:
                box = [text()]
            except ConfigError as error:
                box = [error]
        if self.size > 1:
            dist.broadcast_object_list(box, device=self.device)
        if isinstance(box[0], ConfigError):
            raise box[0]
        return box[0]

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of the main process to all processes."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)


def is_main() -> bool:
    """True in the main process, which prints: the only process, or the first one that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", 0)) <= 1 or int(os.environ.get("RANK", 0)) == 0


@contextmanager
def world(device: str) -> Iterator[World]:
    """The rank, the number of processes and the device of this process, from the environment that torchrun sets."""
    size, rank, local = (int(os.environ.get(name, 0)) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    if size <= 1:
        yield World(0, 1, choose_device(device))
        return
    own = choose_device(f"cuda:{local}" if device in ("auto", "cuda") and torch.cuda.is_available() else device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    # DistributedDataParallel imports dynamo. If a process group exists then, dynamo keeps it, and its threads run until
    # the interpreter ends, where they can abort the process.
    from torch import _dynamo  # noqa: F401

    dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
    try:
        yield World(rank, size, own)
    finally:
        gc.collect()  # modules of DistributedDataParallel are in cycles, and refer to the group
        dist.destroy_process_group()


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:NUMBER, but it is {name!r}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name} does not exist: torch finds {torch.cuda.device_count()} CUDA devices")
    return device
