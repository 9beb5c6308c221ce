"""Triton's interpreter for the tests: as a GPU where it differs from one, and more than twice as fast.

`test_the_house.py` compares bits with those of the interpreter without the changes for speed.
"""

from functools import cache

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    GridExecutor,
    InterpretedFunction,
    InterpreterBuilder,
    InterpreterOptions,
    interpreter_builder,
)

# device_assert works, and an overflow of int32 is an error
interpreter_builder.options = InterpreterOptions(debug=True)

# as on a GPU, the maximum of nan and a number is the number, unless a kernel propagates nan
InterpreterBuilder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
InterpreterBuilder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)

call = InterpretedFunction.__call__
patched = set()


def call_patched(function, *args, **kwargs):
    """Call a device function. Triton patches its language for each call, which takes a third of the time. A launch has
    patched it for our files, and for each of Triton's own files once is enough."""
    names = function.fn.__globals__["__name__"]
    if names.startswith("tritoncaps") or names in patched:
        return function.rewrite()(*args, **kwargs)
    patched.add(names)
    return call(function, *args, **kwargs)


InterpretedFunction.__call__ = call_patched

# Python stores frames in chunks of 16 KiB. If a chunk is full, every further call maps and unmaps a new one, which
# takes a third of the time of some tests. The frame of this function needs a chunk of 128 KiB, which has room for the
# frames of its calls.
with_room = eval(f"lambda call, {', '.join(f'_{i}=0' for i in range(8200))}: call()")
run = GridExecutor.__call__
GridExecutor.__call__ = lambda grid, *args, **kwargs: with_room(lambda: run(grid, *args, **kwargs))

# Every operation makes types, and tensors of these types, and compares shapes. There are few different ones.
block_type, of_types = core.block_type.__init__, {}
tensor, of_tensors = core.tensor.__init__, {}
broadcast = TritonSemantic.broadcast_impl_value


def block_type_once(self, element_ty, shape):
    """Compute the attributes of a block type once for each element type and shape."""
    key = element_ty.name, *(getattr(size, "value", size) for size in shape)
    if key not in of_types:
        block_type(self, element_ty, shape)
        of_types[key] = dict(self.__dict__)
    self.__dict__.update(of_types[key])


def tensor_once(self, handle, type):
    """Compute the attributes of a tensor once for each type."""
    if type.name not in of_tensors:
        tensor(self, handle, type)
        of_tensors[type.name] = dict(self.__dict__)
    self.__dict__.update(of_tensors[type.name])
    self.handle, self.type, self.dtype = handle, type, type.scalar


def broadcast_unless_equal(self, lhs, rhs):
    """Tensors of the same shape need no broadcasting."""
    left, right = lhs.type, rhs.type
    if left.is_block() and right.is_block() and list(left.shape) == list(right.shape):
        return lhs, rhs
    return broadcast(self, lhs, rhs)


core.block_type.__init__ = block_type_once
core.tensor.__init__ = tensor_once
TritonSemantic.broadcast_impl_value = broadcast_unless_equal

numpy_dtype = cache(interpreter._get_np_dtype)
interpreter._get_np_dtype = lambda dtype: (
    np.dtype(np.uint64) if isinstance(dtype.scalar, core.pointer_type) else numpy_dtype(dtype.scalar)
)
