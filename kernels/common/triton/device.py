"""Device functions for the kernels of all algorithms."""

import triton
import triton.language as tl


@triton.jit
def not_unrolled(size: tl.constexpr, N):
    """`size` as a value that the compiler cannot see to be constant (N is not negative). As the end of a loop, it
    prevents unrolling, which would need several times the registers."""
    return size + tl.minimum(N, 0)
