"""The context of every call of CPU kernels."""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from pathlib import Path

import torch

OMP_PAUSE_SOFT = 1
SMALL = 2048  # numbers of a tensor; below this, kernels end before other threads could disturb them

torchs_threads = threading.local()  # .number: torch's number of threads, inside of `surroundings`


class surroundings:  # noqa: N801, a function to its callers, but cheaper than one with @contextmanager
    """Between two kernels, torch does small things in the calling thread alone, and its other threads end.

    After an operation, OpenMP's threads spin for milliseconds in the hope of another one. They would take the cores
    from the kernels that follow; torch's next operation starts them again, in some 50 microseconds. OpenMP keeps
    threads, and their number, per calling thread, so that other threads are not affected.
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
