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
    overload = getattr(torch.ops.tritoncaps, function.__name__).default
    torch.library.register_vmap(name, _one_by_one(overload))
    return overload


def fake(overload: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the function that tells shapes, strides and dtypes of the outputs of an operator."""
    return torch.library.register_fake(overload._schema.name)


def _one_by_one(overload: Any) -> Callable[..., Any]:
    """The rule of `torch.func.vmap`: call the operator for each member of the batch, and stack what it returns."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        members = range(info.batch_size)
        outputs = [overload(*(_member(x, dim, i) for x, dim in zip(args, in_dims, strict=True))) for i in members]
        if isinstance(outputs[0], torch.Tensor):
            return torch.stack(outputs), 0
        return tuple(torch.stack(parts) for parts in zip(*outputs, strict=True)), (0,) * len(outputs[0])

    return rule


def _member(x: Any, dim: Any, i: int) -> Any:
    if isinstance(x, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [_member(part, part_dim, i) for part, part_dim in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, i)
