"""How our operators are registered with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operator(function: Callable[..., Any]) -> Any:
    """Make ``function`` the opaque operator ``tritoncaps::<its name>`` of all devices; autograd is left to the caller.

    `torch.library.custom_op` would do, but its first call imports torch's compiler, which takes more than a second.
    """
    name = f"tritoncaps::{function.__name__}"
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(name, "default", function)
    return getattr(torch.ops.tritoncaps, function.__name__).default


def fake(overload: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the function that tells shapes, strides and dtypes of the outputs of an operator."""
    return torch.library.register_fake(overload._schema.name)
