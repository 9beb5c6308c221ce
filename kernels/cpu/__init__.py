"""The CPU backend: the three views of EM routing, compiled by Numba with explicit SIMD vectors.

The functions are those that `kernels.em_routing` asks of a backend. Numba is imported at their first use, so that
importing this package costs nothing.

    layout.py       the arrays that kernels read
    packing.py      how parents' tensors become such arrays
    simd.py         vectors and micro-kernels for Numba
    votes.py        the micro-kernels: what is computed for one vote
    parent_view.py  moments
    child_view.py   log_sum and the gradient of the assignments
    gradient.py     the last sweep of the backward pass: gradients of poses, activations and weight
    workspace.py    memory that is reused from call to call
    threads.py, compiling.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritoncaps.kernels.cpu.child_view import child_assignment_gradient, child_log_sum
    from tritoncaps.kernels.cpu.gradient import child_and_weight_gradient, child_gradient, weight_gradient
    from tritoncaps.kernels.cpu.layout import edges
    from tritoncaps.kernels.cpu.parent_view import parent_gradient_moments, parent_moments
    from tritoncaps.kernels.cpu.threads import torch_in_one_thread

_MODULE_OF = {
    "edges": "layout",
    "parent_moments": "parent_view",
    "parent_gradient_moments": "parent_view",
    "child_log_sum": "child_view",
    "child_assignment_gradient": "child_view",
    "child_gradient": "gradient",
    "weight_gradient": "gradient",
    "child_and_weight_gradient": "gradient",
    "torch_in_one_thread": "threads",
}

__all__ = [
    "child_and_weight_gradient",
    "child_assignment_gradient",
    "child_gradient",
    "child_log_sum",
    "edges",
    "parent_gradient_moments",
    "parent_moments",
    "torch_in_one_thread",
    "weight_gradient",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
