"""The context of every call of CPU kernels."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

OMP_PAUSE_SOFT = 1

torchs_threads = threading.local()  # .number: torch's number of threads, inside of `surroundings`


@contextmanager
def surroundings(_: torch.Tensor) -> Iterator[None]:
    """Between two kernels, torch does small things in the calling thread alone, and its other threads end.

    After an operation, OpenMP's threads spin for milliseconds in the hope of another one. They would take the cores
    from the kernels that follow; torch's next operation starts them again, in some 50 microseconds. OpenMP keeps
    threads, and their number, per calling thread, so nobody else notices.
    """
    threads, openmp = torch.get_num_threads(), _openmp()
    if threads == 1 or hasattr(torchs_threads, "number") or openmp is None:
        yield
        return
    torchs_threads.number = threads
    openmp.omp_set_num_threads(1)
    openmp.omp_pause_resource_all(OMP_PAUSE_SOFT)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(threads)
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
