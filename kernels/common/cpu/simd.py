"""SIMD vectors for Numba: straight-line vector code, written in Python and emitted as LLVM IR.

A micro-kernel is a Python function of `Rows` that runs once, while Numba compiles. Every operation on its `Vector`
values emits one instruction, so Python loops are unrolled. Numba code calls it with an array and a position (in
elements) for each of its `Rows`:

    @microkernel
    def axpy(y: Rows, x: Rows, a: Rows) -> None:
        y[0] = fma(a.broadcast(0), x[0], y[0])

    axpy(y, 8 * i, x, 8 * i, a, 0)      # inside a Numba function: y[8i : 8i + 8] += a[0] * x[8i : 8i + 8]

`processor.VECTOR_BYTES` is the width of a vector. Micro-kernels work with any width, with float32 and float64.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tritoncaps.kernels.common.cpu.processor import VECTOR_BYTES

_INT32 = ir.IntType(32)


class _Format:
    """The LLVM types of a vector of one dtype."""

    def __init__(self, dtype: Any, vector_bytes: int = VECTOR_BYTES) -> None:
        self.bits = dtype.bitwidth
        self.lanes = vector_bytes * 8 // self.bits
        self.scalar = {32: ir.FloatType(), 64: ir.DoubleType()}[self.bits]
        self.vector = ir.VectorType(self.scalar, self.lanes)
        self.integers = ir.VectorType(ir.IntType(self.bits), self.lanes)
        self.suffix = f"v{self.lanes}f{self.bits}"
        self.lowest = {32: -(2.0**128 - 2.0**104), 64: -sys.float_info.max}[self.bits]

    def constant(self, value: float) -> ir.Constant:
        return ir.Constant(self.vector, [float(value)] * self.lanes)


class Vector:
    """A vector in a register, with operators for vectors and numbers."""

    def __init__(self, builder: ir.IRBuilder, form: _Format, value: ir.Value) -> None:
        self.builder, self.form, self.value = builder, form, value

    def like(self, x: Vector | float) -> Vector:
        """x as a vector of this format."""
        return x if isinstance(x, Vector) else self._make(self.form.constant(x))

    def _make(self, value: ir.Value) -> Vector:
        return Vector(self.builder, self.form, value)

    def __add__(self, other: Vector | float) -> Vector:
        return self._make(self.builder.fadd(self.value, self.like(other).value))

    def __sub__(self, other: Vector | float) -> Vector:
        return self._make(self.builder.fsub(self.value, self.like(other).value))

    def __mul__(self, other: Vector | float) -> Vector:
        return self._make(self.builder.fmul(self.value, self.like(other).value))

    def __truediv__(self, other: Vector | float) -> Vector:
        return self._make(self.builder.fdiv(self.value, self.like(other).value))

    def __neg__(self) -> Vector:
        return self._make(self.builder.fneg(self.value))

    def __gt__(self, other: Vector | float) -> ir.Value:
        return self.builder.fcmp_ordered(">", self.value, self.like(other).value)

    def not_above(self, other: Vector | float) -> ir.Value:
        """self <= other; false for nan."""
        return self.builder.fcmp_ordered("<=", self.value, self.like(other).value)

    def bits(self) -> ir.Value:
        return self.builder.bitcast(self.value, self.form.integers)

    def from_bits(self, bits: ir.Value) -> Vector:
        return self._make(self.builder.bitcast(bits, self.form.vector))

    def shuffle(self, other: Vector, order: list[int]) -> Vector:
        """Lanes of self (numbered from 0) and other (numbered from `lanes`) in the given order."""
        mask = ir.Constant(ir.VectorType(_INT32, self.form.lanes), order)
        return self._make(self.builder.shuffle_vector(self.value, other.value, mask))

    def rotate(self, lanes: int) -> Vector:
        """Lane i becomes lane i + lanes, cyclically."""
        return self.shuffle(self, [(i + lanes) % self.form.lanes for i in range(self.form.lanes)])


class Rows:
    """The vectors of an array from a position on: rows[i] has the elements i * lanes, ..., (i + 1) * lanes - 1."""

    def __init__(self, builder: ir.IRBuilder, form: _Format, pointer: ir.Value) -> None:
        self.builder, self.form, self.pointer = builder, form, pointer

    def _element(self, index: int) -> ir.Value:
        return self.builder.gep(self.pointer, [ir.Constant(ir.IntType(64), index)])

    def _row(self, row: int) -> ir.Value:
        return self.builder.bitcast(self._element(row * self.form.lanes), self.form.vector.as_pointer())

    def __getitem__(self, row: int) -> Vector:
        return Vector(self.builder, self.form, self.builder.load(self._row(row), align=self.form.bits // 8))

    def __setitem__(self, row: int, x: Vector | float) -> None:
        value = x.value if isinstance(x, Vector) else self.form.constant(x)
        self.builder.store(value, self._row(row), align=self.form.bits // 8)

    def broadcast(self, element: int) -> Vector:
        """The element in all lanes."""
        undefined = ir.Constant(self.form.vector, ir.Undefined)
        single = self.builder.insert_element(
            undefined, self.builder.load(self._element(element)), ir.Constant(_INT32, 0)
        )
        zeros = ir.Constant(ir.VectorType(_INT32, self.form.lanes), [0] * self.form.lanes)
        return Vector(self.builder, self.form, self.builder.shuffle_vector(single, undefined, zeros))

    def barrier(self) -> None:
        """The compiler moves no load or store across it: it loads a value again, and keeps it in no register."""
        self.builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)

    def add_lanes(self, x: Vector, lanes: Sequence[int]) -> None:
        """Add some lanes of x to the first elements."""
        part = ir.VectorType(self.form.scalar, len(lanes))
        place = self.builder.bitcast(self.pointer, part.as_pointer())
        mask = ir.Constant(ir.VectorType(_INT32, len(lanes)), list(lanes))
        before = self.builder.load(place, align=self.form.bits // 8)
        value = self.builder.fadd(before, self.builder.shuffle_vector(x.value, x.value, mask))
        self.builder.store(value, place, align=self.form.bits // 8)

    def set_element(self, element: int, x: Vector) -> None:
        """Store the first lane of x."""
        lane = self.builder.extract_element(x.value, ir.Constant(_INT32, 0))
        self.builder.store(lane, self._element(element))


def fma(x: Vector, y: Vector | float, z: Vector | float) -> Vector:
    """x y + z, rounded once if the CPU has an instruction for it."""
    form, vector = x.form, x.form.vector
    name, signature = f"llvm.fmuladd.{form.suffix}", ir.FunctionType(vector, [vector] * 3)
    function = cgutils.get_or_insert_function(x.builder.module, signature, name)
    return x._make(x.builder.call(function, [x.value, x.like(y).value, x.like(z).value]))


def where(condition: ir.Value, x: Vector, y: Vector | float) -> Vector:
    return x._make(x.builder.select(condition, x.value, x.like(y).value))


def maximum(x: Vector, y: Vector | float) -> Vector:
    """The greater of each lane; x where x is nan."""
    y = x.like(y)
    return where(y > x, y, x)


def minimum(x: Vector, y: Vector | float) -> Vector:
    """The smaller of each lane; x where x is nan."""
    y = x.like(y)
    return where(x > y, y, x)


def across(operation: Callable[[Vector, Vector], Vector], x: Vector) -> Vector:
    """Reduce the lanes of x; every lane of the result holds the reduction."""
    step = x.form.lanes // 2
    while step:
        x = operation(x, x.rotate(step))
        step //= 2
    return x


def add(x: Vector, y: Vector) -> Vector:
    return x + y


def sum_each(rows: list[Vector]) -> Vector:
    """Lane i is the sum of the lanes of rows[i], for at most as many rows as there are lanes."""
    return reduce_each(add, rows, 0.0)


def reduce_each(operation: Callable[[Vector, Vector], Vector], rows: list[Vector], neutral: float) -> Vector:
    """Lane i is the reduction of the lanes of rows[i].

    Each step joins pairs of rows and reduces halves of both. Until the last step these are halves of 16 bytes, because
    shuffles within 16 bytes are cheap.
    """
    lanes, group = rows[0].form.lanes, 1
    half, quarter = lanes // 2, lanes // 4
    rows = rows + [rows[0].like(neutral)] * (lanes - len(rows))
    while len(rows) > 2:
        low = [
            source + base + k + i
            for base in (0, half)
            for k in range(0, quarter, group)
            for source in (0, lanes)
            for i in range(group)
        ]
        high = [i + quarter for i in low]
        pairs = zip(rows[::2], rows[1::2], strict=True)
        rows = [operation(a.shuffle(b, low), a.shuffle(b, high)) for a, b in pairs]
        group *= 2
    a, b = rows
    low = [*range(half), *range(lanes, lanes + half)]
    return operation(a.shuffle(b, low), a.shuffle(b, [i + half for i in low]))


# bits: (ln 2 in two parts, degree of the Taylor polynomial, number whose addition rounds to an integer,
#        bits of the mantissa, extra power of two, argument below which exp is zero)
_EXP = {
    32: ((0.693359375, -2.12194440e-4), 7, 1.5 * 2**23, 23, 64, -104.0),
    64: ((6.93145751953125e-1, 1.42860682030941723212e-6), 13, 1.5 * 2**52, 52, 256, -746.0),
}


def exp(xs: list[Vector], zero_until: float | None = None) -> list[Vector]:
    """exp(x) for x <= 0, to 1 or 2 units in the last place, with gradual underflow. With ``zero_until``, the result is
    0 for x <= zero_until, which must be so large that no result is subnormal.

    exp(x) = 2^n exp(r), r = x - n ln 2, |r| <= ln(2) / 2. It adds n + extra to the exponent bits, where extra keeps the
    result a normal number, and divides by 2^extra at the end. One exp is a long chain of dependent operations, so
    those of several vectors are interleaved.
    """
    form, builder = xs[0].form, xs[0].builder
    (high, low), degree, magic, mantissa, extra, least = _EXP[form.bits]
    if zero_until is not None:
        extra, least = 0, zero_until
    xs = [maximum(x, least) for x in xs]
    shifted = [fma(x, 1 / math.log(2), magic + extra) for x in xs]  # lowest bits: the integer n + extra
    ns = [x - (magic + extra) for x in shifted]
    rs = [fma(n, -high, x) for n, x in zip(ns, xs, strict=True)]
    rs = [fma(n, -low, r) for n, r in zip(ns, rs, strict=True)]
    ys = [r.like(1 / math.factorial(degree)) for r in rs]
    for k in reversed(range(degree)):
        ys = [fma(y, r, 1 / math.factorial(k)) for y, r in zip(ys, rs, strict=True)]
    shift = ir.Constant(form.integers, [mantissa] * form.lanes)
    powers = [builder.shl(x.bits(), shift) for x in shifted]
    ys = [y.from_bits(builder.add(y.bits(), power)) for y, power in zip(ys, powers, strict=True)]
    # x - x is 0, or nan if x is: a nan with other bits than the usual one could become a number above
    if zero_until is not None:
        return [where(x > least, y, x - x) for y, x in zip(ys, xs, strict=True)]
    return [fma(y, 2.0**-extra, x - x) for y, x in zip(ys, xs, strict=True)]


# bits: (terms of the series of atanh, bits of the mantissa, bias of the exponent)
_LOG = {32: (5, 23, 127), 64: (11, 52, 1023)}


def log(x: Vector) -> Vector:
    """log(x) for normal numbers, to 2 or 3 units in the last place; inf and nan stay; -inf for smaller x.

    x = 2^n m with m in [sqrt(1/2), sqrt(2)); log(m) = 2 atanh(s), s = (m - 1) / (m + 1).
    """
    form, builder = x.form, x.builder
    terms, mantissa, bias = _LOG[form.bits]
    integer = lambda value: ir.Constant(form.integers, [value] * form.lanes)  # noqa: E731
    half = x.like(math.sqrt(0.5)).bits()
    above = builder.sub(x.bits(), half)  # the exponent of x / sqrt(1/2), above its mantissa
    n = builder.ashr(above, integer(mantissa))
    m = x.from_bits(builder.sub(x.bits(), builder.shl(n, integer(mantissa))))
    exponent = x._make(builder.sitofp(n, form.vector))
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    y = s.like(2 / (2 * terms + 1))
    for k in reversed(range(1, terms)):
        y = fma(y, square, 2 / (2 * k + 1))
    (high, low), *_ = _EXP[form.bits]
    # log(m) = 2 s + s^3 y: add the largest term last
    result = fma(exponent, high, fma(s * square, y, fma(exponent, low, s * 2.0)))
    least = 2.0 ** (1 - bias)
    result = where(x > -form.lowest, x, result)
    tiny = builder.fcmp_ordered("<", x.value, x.like(least).value)
    result = where(tiny, x.like(-math.inf), result)
    return where(builder.fcmp_unordered("uno", x.value, x.value), x, result)


def microkernel(emit: Callable[..., None], *leading: int) -> Any:
    """Make a function of `Rows` callable from Numba, with an array and a position for each of its `Rows`.

    ``leading``: constants for the first parameters of the function.
    """

    def function(typing_context: Any, *args: Any) -> Any:
        signature = types.void(*map(types.unliteral, args))

        def code(context: Any, builder: ir.IRBuilder, signature: Any, values: list[ir.Value]) -> ir.Value:
            form = _Format(signature.args[0].dtype)
            rows = []
            for array_type, array, position in zip(signature.args[::2], values[::2], values[1::2], strict=True):
                data = context.make_array(array_type)(context, builder, value=array).data
                rows.append(Rows(builder, form, builder.gep(data, [position])))
            emit(*leading, *rows)
            return context.get_dummy_value()

        return signature, code

    function.__name__, function.__doc__ = emit.__name__, emit.__doc__
    arrays = list(inspect.signature(emit).parameters)[len(leading) :]
    names = ["typing_context", *(name for array in arrays for name in (array, f"{array}_position"))]
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    return intrinsic(function)
