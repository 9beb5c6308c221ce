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
    separate threads, and their number, for each calling thread, so other threads do not change. MKL, which computes
    `exp` and `log`, has its own number after `torch.set_num_threads`, also for each calling thread.
    """

    __slots__ = ("mkl", "mkl_threads", "openmp", "small", "threads")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.small = tensor.numel() <= SMALL

    def __enter__(self) -> None:
        self.openmp = self.mkl = None
        if hasattr(torchs_threads, "number"):  # inside of another one
            return
        self.threads = torch.get_num_threads()
        if self.threads > 1:
            self.openmp, self.mkl = _openmp(), _mkl()
        if self.openmp is not None:
            torchs_threads.number = self.threads
            self.openmp.omp_set_num_threads(1)
            if not self.small:
                self.openmp.omp_pause_resource_all(OMP_PAUSE_SOFT)
        if self.mkl is not None:
            self.mkl_threads = self.mkl.MKL_Set_Num_Threads_Local(1)  # returns the number before

    def __exit__(self, *_: object) -> None:
        if self.mkl is not None:
            self.mkl.MKL_Set_Num_Threads_Local(self.mkl_threads)
        if self.openmp is not None:
            self.openmp.omp_set_num_threads(self.threads)
            del torchs_threads.number


@lru_cache(maxsize=1)
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch uses, if there is one and it can be found."""
    return _torch_library("omp_set_num_threads", "omp_pause_resource_all")


@lru_cache(maxsize=1)
def _mkl() -> ctypes.CDLL | None:
    """The MKL that torch uses, if there is one and it can be found."""
    return _torch_library("MKL_Set_Num_Threads_Local")


def _torch_library(*functions: str) -> ctypes.CDLL | None:
    """torch's library, if it has these functions or is linked to a library that has them."""
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            library = ctypes.CDLL(str(path))
            if all(hasattr(library, name) for name in functions):
                return library
        except OSError:
            continue
    return None
