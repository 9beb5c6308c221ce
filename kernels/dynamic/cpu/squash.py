"""Squash and its gradient: v = f(r) s with r = |s| and f = r / (1 + r^2).

squash'(s) x = f x + f' / r (s . x) s,      f' = (1 - r^2) / (1 + r^2)^2;      zero at s = 0
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritoncaps.kernels.common.cpu.arrays import array
from tritoncaps.kernels.common.cpu.compiling import kernel, part
from tritoncaps.kernels.common.cpu.tasks import first_task, next_task
from tritoncaps.kernels.common.cpu.threads import run

ROWS = 1024  # vectors of a task


class Vectors(NamedTuple):
    poses: NDArray  # [rows, entries]
    rows: int
    entries: int


def squash(vectors: Tensor) -> Tensor:
    """Squash the vectors along the last axis."""
    out = torch.empty_like(vectors)
    _run(_squash_kernel, vectors, out)
    return out


def squash_gradient(grad: Tensor, vectors: Tensor) -> Tensor:
    out = torch.empty_like(vectors)
    _run(_squash_gradient_kernel, vectors, grad, out)
    return out


def _run(function: object, vectors: Tensor, *others: Tensor) -> None:
    entries = max(1, vectors.shape[-1])
    rows = vectors.numel() // entries
    given = Vectors(array(vectors), rows, entries)
    run(function, -(-rows // ROWS), given, *map(array, others))


@kernel
def _squash_kernel(counter, tasks, e, out):  # type: ignore[no-untyped-def]
    """out = squash(e.poses), both [rows, entries]. A task owns ROWS rows."""
    task = first_task(counter, tasks)
    while task < tasks:
        for row in range(task * ROWS, min((task + 1) * ROWS, e.rows)):
            at = row * e.entries
            factor = squash_factor(square_of(e.poses, at, e.entries))
            for i in range(at, at + e.entries):
                out[i] = factor * e.poses[i]
        task = next_task(counter, tasks)


@kernel
def _squash_gradient_kernel(counter, tasks, e, grad, out):  # type: ignore[no-untyped-def]
    """out = squash'(e.poses) grad, all [rows, entries]. A task owns ROWS rows."""
    task = first_task(counter, tasks)
    while task < tasks:
        for row in range(task * ROWS, min((task + 1) * ROWS, e.rows)):
            at = row * e.entries
            square = square_of(e.poses, at, e.entries)
            factor, along = squash_factor(square), squash_slope(square) * product_of(e.poses, grad, at, e.entries)
            for i in range(at, at + e.entries):
                out[i] = factor * grad[i] + along * e.poses[i]
        task = next_task(counter, tasks)


@part
def square_of(x, at, count):  # type: ignore[no-untyped-def]
    """Squared length of x[at : at + count]."""
    return product_of(x, x, at, count)


@part
def product_of(x, y, at, count):  # type: ignore[no-untyped-def]
    """Scalar product of x[at : at + count] and y[at : at + count]."""
    total = x.dtype.type(0)
    for i in range(at, at + count):
        total += x[i] * y[i]
    return total


@part
def squash_factor(square):  # type: ignore[no-untyped-def]
    """f(r) from r^2."""
    return np.sqrt(square) / (1 + square)


@part
def squash_slope(square):  # type: ignore[no-untyped-def]
    """f'(r) / r from r^2; zero at zero."""
    return (1 - square) / (np.sqrt(square) * (1 + square) * (1 + square)) if square > 0 else 0.0
