"""Registration of our operators with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature, unwrap
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tritoncaps.kernels.common.backends import BACKENDS


def operator(function: Callable[..., Any]) -> Any:
    """Register ``function`` as the opaque operator ``tritoncaps::<its name>`` for all devices, without a gradient.

    `torch.library.custom_op` does the same, but it imports torch's compiler, which takes more than a second.
    """
    name = f"tritoncaps::{function.__name__}"
    # unwrap: the annotations are names in the file of the function, not in the file of its decorator
    torch.library.define(name, torch.library.infer_schema(unwrap(function), mutates_args=()))
    torch.library.impl(name, "default", function)
    overload = getattr(torch.ops.tritoncaps, function.__name__).default
    torch.library.register_vmap(name, _one_by_one(overload))
    return overload


class Given(SimpleNamespace):
    """The arguments of an operator, by their names."""


def fake(overload: Any) -> Callable[[Callable[[Given], Any]], Callable[[Given], Any]]:
    """Decorator of the function that returns empty outputs of an operator, with their shapes, strides and dtypes."""
    names = _argument_names(overload)

    def register(function: Callable[[Given], Any]) -> Callable[[Given], Any]:
        by_name = lambda *arguments: function(Given(**dict(zip(names, arguments, strict=True))))  # noqa: E731
        torch.library.register_fake(overload._schema.name)(by_name)
        return function

    return register


def _argument_names(function: Any) -> list[str]:
    """The names of the arguments of an operator or a plain function."""
    if isinstance(function, torch._ops.OpOverload):
        return [argument.name for argument in function._schema.arguments]
    return list(signature(function).parameters)


def surrounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``function`` in the context of its backend. The first argument is a tensor, the last the backend's name."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        with BACKENDS[arguments[-1]].surroundings(arguments[0]):
            return function(*arguments)

    return call


_references: dict[Any, Callable[[Given], tuple[Tensor, ...]]] = {}  # keys: backward operators


def reference_of(backward: Any) -> Callable[[Callable[[Given], Any]], Callable[[Given], Any]]:
    """Decorator of the function that computes the result of a backward operator with the reference.

    It takes the arguments of the operator and returns all its gradients, also those that the operator leaves empty.
    """

    def register(function: Callable[[Given], Any]) -> Callable[[Given], Any]:
        _references[backward] = function
        return function

    return register


def differentiable_again(backward: Any) -> Callable[..., Any]:
    """The backward operator as a function whose gradient comes from its reference (see `reference_of`)."""
    names = _argument_names(backward)

    class Again(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return backward(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            leaves, ctx.structure = tree_flatten(inputs)
            ctx.save_for_backward(*[x for x in leaves if isinstance(x, Tensor)])
            ctx.leaves = [_SAVED if isinstance(x, Tensor) else x for x in leaves]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            saved = iter(ctx.saved_tensors)
            inputs = tree_unflatten([next(saved) if x is _SAVED else x for x in ctx.leaves], ctx.structure)
            places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]

            def first(*tensors: Tensor) -> tuple[Tensor, ...]:
                changed = dict(zip(places, tensors, strict=True))
                arguments = (changed.get(i, x) for i, x in enumerate(inputs))
                return _references[backward](Given(**dict(zip(names, arguments, strict=True))))

            values, pull_back = torch.func.vjp(first, *(inputs[i] for i in places))[:2]
            needed = zip(grads, values, strict=True)
            found = pull_back(tuple(g if g.shape == x.shape else torch.zeros_like(x) for g, x in needed))
            second = dict(zip(places, found, strict=True))
            return tuple(second.get(i) for i in range(len(inputs)))

    def call(*arguments: Any) -> Any:
        twice = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return Again.apply(*arguments) if twice else backward(*arguments)

    return call


_SAVED = object()  # replaces a tensor among the other arguments


def _one_by_one(overload: Any) -> Callable[..., Any]:
    """The rule of `torch.func.vmap`: call the operator for each member of the batch, and stack the results."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        members = range(info.batch_size)
        outputs = [overload(*(_member(x, dim, i) for x, dim in zip(args, in_dims, strict=True))) for i in members]
        if isinstance(outputs[0], Tensor):
            return torch.stack(outputs), 0
        return tuple(torch.stack(parts) for parts in zip(*outputs, strict=True)), (0,) * len(outputs[0])

    return rule


def _member(x: Any, dim: Any, i: int) -> Any:
    if isinstance(x, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [_member(part, part_dim, i) for part, part_dim in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, i)
