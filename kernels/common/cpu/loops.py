"""Micro-kernels with loops: like those of `simd`, but with loops whose lengths are known only at run time.

Sums over such a loop stay in registers. A parameter with the annotation `Number` is an integer of the calling Numba
code. A parameter with the annotation `Numbers` is an array of int64 and a position in it:

    def _dot(out: Rows, x: Rows, y: Rows, count: Number) -> None:
        zero = x[0].like(0.0)
        (total,) = repeat(count, [zero], lambda i, sums: [fma(at(x, i)[0], at(y, i)[0], sums[0])])
        out[0] = total

    dot = looping_microkernel(_dot)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from llvmlite.ir.values import MDValue
from numba import types
from numba.extending import intrinsic

from tritoncaps.kernels.common.cpu.processor import VECTOR_BYTES
from tritoncaps.kernels.common.cpu.simd import Rows, Vector, _Format

Number = ir.Value  # an int64 value of the calling code

ARRAYS = ("Rows", "Numbers")  # annotations of parameters that consist of an array and a position

_INT64 = ir.IntType(64)


class Numbers:
    """An array of int64 that starts at a position."""

    def __init__(self, builder: ir.IRBuilder, pointer: ir.Value) -> None:
        self.builder, self.pointer = builder, pointer

    def __getitem__(self, index: Number) -> Number:
        return self.builder.load(self.builder.gep(self.pointer, [index]))

    def at(self, index: Number, step: int) -> Numbers:
        """The array that starts at index * step."""
        return Numbers(self.builder, self.builder.gep(self.pointer, [self.builder.mul(index, number(step))]))


def number(value: int) -> Number:
    return ir.Constant(_INT64, value)


def repeat(
    count: Number,
    sums: list[Vector],
    body: Callable[[Number, list[Vector]], list[Vector]],
    first: Number | int = 0,
) -> list[Vector]:
    """sums = body(i, sums) for i = first, ..., count - 1."""
    return _loop(sums[0].builder, first if isinstance(first, ir.Value) else number(first), count, sums, body)


def for_each(rows: Rows, count: Number, body: Callable[[Number], None], first: Number | None = None) -> None:
    """body(i) for i = first, ..., count - 1; first is 0 by default."""

    def step(index: Number, sums: list[Vector]) -> list[Vector]:
        body(index)
        return sums

    _loop(rows.builder, number(0) if first is None else first, count, [], step)


def _row(row: int, x: Rows) -> Rows:
    return at(x, number(row))


class Element(Rows):
    """Rows of one element each. A load sets the other lanes to zero; a store does not write them."""

    def __getitem__(self, row: int) -> Vector:
        element = self.builder.load(self._element(row))
        lane = ir.Constant(ir.IntType(32), 0)
        return Vector(self.builder, self.form, self.builder.insert_element(zero(self).value, element, lane))

    def __setitem__(self, row: int, x: Vector | float) -> None:
        self.set_element(row, x if isinstance(x, Vector) else zero(self).like(x))


def over(
    rows: Rows,
    count: Number,
    sums: list[Vector],
    body: Callable[[Callable[[Rows], Rows], list[Vector]], list[Vector]],
) -> list[Vector]:
    """sums = body(here, sums) for `count` elements of arrays. here(x) is the part of x for this call: a whole row, or
    one `Element` of the last, incomplete row."""
    if isinstance(count, ir.Constant):  # a multiple of the lanes: unrolled
        for row in range(count.constant // rows.form.lanes):
            sums = body(partial(_row, row), sums)
        return sums
    builder, lanes = rows.builder, number(rows.form.lanes)
    whole = builder.sdiv(count, lanes)
    sums = _loop(builder, number(0), whole, sums, lambda i, sums: body(lambda x: at(x, i), sums))

    def of_element(i: Number, sums: list[Vector]) -> list[Vector]:
        return body(lambda x: Element(builder, x.form, at(x, (i, number(1))).pointer), sums)

    return _loop(builder, builder.mul(whole, lanes), count, sums, of_element)


def for_rows(rows: Rows, count: Number, body: Callable[[Number, int], None], together: int = 4) -> None:
    """body(first, number) for the rows 0, ..., count - 1: `together` rows at once, which hides latencies, then one."""
    builder = rows.builder
    whole = builder.sdiv(count, number(together))
    for_each(rows, whole, lambda i: body(builder.mul(i, number(together)), together))
    for_each(rows, count, lambda i: body(i, 1), builder.mul(whole, number(together)))


def _loop(
    builder: ir.IRBuilder,
    first: Number,
    count: Number,
    sums: list[Vector],
    body: Callable[[Number, list[Vector]], list[Vector]],
) -> list[Vector]:
    before = builder.block
    loop, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", first, count), loop, after)
    builder.position_at_end(loop)
    index = builder.phi(_INT64)
    states = [builder.phi(x.form.vector) for x in sums]
    results = body(index, [Vector(builder, x.form, phi) for x, phi in zip(sums, states, strict=True)])
    following, last = builder.add(index, number(1)), builder.block  # not `loop`, if the body contains a loop
    _not_unrolled(builder.cbranch(builder.icmp_signed("<", following, count), loop, after))
    builder.position_at_end(after)
    ends = [builder.phi(x.form.vector) for x in sums]
    index.add_incoming(first, before)
    index.add_incoming(following, last)
    for x, result, state, end in zip(sums, results, states, ends, strict=True):
        for phi in (state, end):
            phi.add_incoming(x.value, before)
            phi.add_incoming(result.value, last)
    return [Vector(builder, x.form, end) for x, end in zip(sums, ends, strict=True)]


def _not_unrolled(branch: ir.Instruction) -> None:
    """Tell LLVM not to unroll: in short nested loops, unrolled bodies need too many registers."""
    module = branch.module
    disable = module.add_metadata(["llvm.loop.unroll.disable"])
    loop = MDValue(module, [], name=str(len(module.metadata)))
    loop.operands = (loop, disable)  # LLVM requires that the first operand is the node itself
    branch.set_metadata("llvm.loop", loop)


def at(rows: Rows, *places: Number | tuple[Number, Number]) -> Rows:
    """Rows from a later position on. Each place is an index of vectors, or an index and its step in elements."""
    builder, pointer = rows.builder, rows.pointer
    for place in places:
        index, step = place if isinstance(place, tuple) else (place, number(rows.form.lanes))
        pointer = builder.gep(pointer, [builder.mul(index, step)])
    return Rows(builder, rows.form, pointer)


def looping_microkernel(emit: Callable[..., None], *leading: int, vector_bytes: int = VECTOR_BYTES) -> Any:
    """Make a function of `Rows` and `Number`s callable from Numba: with an array and a position for each of its
    `Rows`, and an integer for each `Number`. ``leading``: constants for the first parameters of the function.
    ``vector_bytes``: the width of its vectors."""
    parameters = list(inspect.signature(emit).parameters.values())[len(leading) :]

    def function(typing_context: Any, *args: Any) -> Any:
        signature = types.void(*map(types.unliteral, args))

        def code(context: Any, builder: ir.IRBuilder, signature: Any, values: list[ir.Value]) -> ir.Value:
            form = _Format(signature.args[0].dtype, vector_bytes)
            kinds, remaining, given = list(signature.args), list(values), []
            for parameter in parameters:
                kind, value = kinds.pop(0), remaining.pop(0)
                if parameter.annotation in ARRAYS:
                    data = context.make_array(kind)(context, builder, value=value).data
                    kinds.pop(0)
                    pointer = builder.gep(data, [remaining.pop(0)])
                    rows = parameter.annotation == "Rows"
                    given.append(Rows(builder, form, pointer) if rows else Numbers(builder, pointer))
                else:
                    given.append(context.cast(builder, value, kind, types.int64))
            emit(*leading, *given)
            return context.get_dummy_value()

        return signature, code

    function.__name__, function.__doc__ = emit.__name__, emit.__doc__
    names = ["typing_context"]
    for parameter in parameters:
        names += [parameter.name] + ([f"{parameter.name}_position"] if parameter.annotation in ARRAYS else [])
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    return intrinsic(function)


def flagged_microkernel(emit: Callable[..., None]) -> Any:
    """The micro-kernel of emit(flag, rows, ...), where the flag is the last argument of the micro-kernel, 0 or 1."""
    _, *parameters = inspect.signature(emit).parameters.values()

    def emit_both(*arguments: Any) -> None:
        *given, flag = arguments
        with given[0].builder.if_else(given[0].builder.icmp_signed("!=", flag, number(0))) as (true, false):
            with true:
                emit(1, *given)
            with false:
                emit(0, *given)

    flag = inspect.Parameter("flag", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Number")
    emit_both.__signature__ = inspect.Signature([*parameters, flag])  # type: ignore[attr-defined]
    emit_both.__name__, emit_both.__doc__ = emit.__name__, emit.__doc__
    return looping_microkernel(emit_both)


def zero(rows: Rows) -> Vector:
    """A vector of zeros: the start of a sum."""
    return Vector(rows.builder, rows.form, rows.form.constant(0.0))
