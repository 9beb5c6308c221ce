"""The context manager of every call of CPU kernels."""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from pathlib import Path

import torch

OMP_PAUSE_SOFT = 1
SMALL = 2048  # numbers of a tensor; for fewer, kernels end before other threads could slow them down

torchs_threads = threading.local()  # .number: torch's number of threads, inside of `surroundings`


class surroundings:  # noqa: N801, a function to its callers, but cheaper than one with @contextmanager
    """Inside, torch's own operations use only the calling thread, and the OpenMP threads of torch end.

    After an operation, OpenMP's threads spin for milliseconds and wait for the next one. They would take the cores from
    the kernels that follow. The next operation of torch outside starts them again, in about 50 microseconds. OpenMP has
    separate threads, and their number, for each calling thread, so other threads do not change.
    """

    __slots__ = ("openmp", "small", "threads")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.small = tensor.numel() <= SMALL

    def __enter__(self) -> None:
        self.threads, self.openmp = torch.get_num_threads(), _openmp()
        if self.threads == 1 or hasattr(torchs_threads, "number"):
            self.openmp = None
        if self.openmp is not None:
            torchs_threads.number = self.threads
            self.openmp.omp_set_num_threads(1)
            if not self.small:
                self.openmp.omp_pause_resource_all(OMP_PAUSE_SOFT)

    def __exit__(self, *_: object) -> None:
        if self.openmp is not None:
            self.openmp.omp_set_num_threads(self.threads)
            del torchs_threads.number


@lru_cache(maxsize=1)
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch uses, if there is one and it can be found."""
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            library = ctypes.CDLL(str(path))
            library.omp_set_num_threads, library.omp_pause_resource_all  # noqa: B018
            return library
        except (OSError, AttributeError):
            continue
    return None
