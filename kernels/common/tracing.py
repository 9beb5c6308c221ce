"""Helpers for torch's tracers: torch.compile, export and fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """Cache the results of a function of plain values. They are real tensors, also while torch traces or transforms or
    is in inference mode, and constants for its compiler."""

    @lru_cache(maxsize=1024)
    def kept(*args: Any) -> Any:
        with _disable_current_modes(), temporarily_clear_interpreter_stack(), torch.inference_mode(False):
            return function(*args)

    @wraps(function)
    def get(*args: Any) -> Any:
        return kept(*args)

    # the same as torch.compiler.assume_constant_result, which imports the compiler and takes a second
    get._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return get  # type: ignore[return-value]


def plain(n: int) -> int:
    """The number n as a plain int, where torch would use a symbol: torch compiles again for images of another size."""
    return len(range(n))
