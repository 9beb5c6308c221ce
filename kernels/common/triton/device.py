"""Device functions of all algorithms."""

import triton
import triton.language as tl


@triton.jit
def not_unrolled(size: tl.constexpr, N):
    """`size`, as a value that is opaque to the compiler (N is not negative). As a loop's end it prevents unrolling,
    which would need several times the registers."""
    return size + tl.minimum(N, 0)
