"""The CPU backend: the three views of EM routing, compiled by Numba with explicit SIMD vectors.

The functions here are those that `kernels.em_routing` asks of a backend. Numba is imported at their first use, so that
importing this package costs nothing.

    layout.py       the arrays that kernels read
    simd.py         vectors and micro-kernels for Numba
    loops.py        micro-kernels with loops
    votes.py        the micro-kernels: what is computed for one vote
    parents.py      the micro-kernels of parents: what an M-step makes of moments, and its gradients
    child_view.py   how the parents of a child share it: assignments and their gradient
    parent_view.py  moments, M-steps and their slopes
    gradient.py     the last sweep of the backward pass: gradients of poses, activations and weight
    stored.py       votes, M-steps and E-steps on arrays in memory, forward and backward
    stored_votes.py their micro-kernels
    workspace.py    memory that is reused from call to call, and large memory that is not
    tasks.py        how threads share a kernel's tasks
    interrupts.py   signals while kernels run
    threads.py, compiling.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritoncaps.kernels.cpu.gradient import child_and_weight_gradient
    from tritoncaps.kernels.cpu.layout import da_shape, edges, log_sums_shape, slopes_shape, statistics_shape
    from tritoncaps.kernels.cpu.parent_view import (
        beta_gradients,
        em_step,
        first_m_step,
        output_slopes,
        outputs,
        slopes_before,
    )
    from tritoncaps.kernels.cpu.threads import surroundings

_MODULE_OF = {
    "beta_gradients": "parent_view",
    "child_and_weight_gradient": "gradient",
    "da_shape": "layout",
    "edges": "layout",
    "em_step": "parent_view",
    "first_m_step": "parent_view",
    "log_sums_shape": "layout",
    "output_slopes": "parent_view",
    "outputs": "parent_view",
    "slopes_before": "parent_view",
    "slopes_shape": "layout",
    "statistics_shape": "layout",
    "surroundings": "threads",
}

__all__ = [
    "beta_gradients",
    "child_and_weight_gradient",
    "da_shape",
    "edges",
    "em_step",
    "first_m_step",
    "log_sums_shape",
    "output_slopes",
    "outputs",
    "slopes_before",
    "slopes_shape",
    "statistics_shape",
    "surroundings",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)  # asked only once
    return globals()[name]
