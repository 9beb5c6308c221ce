"""The CPU kernels with vectors of 16, 32 and 64 bytes. Every processor can run all of them."""

import pytest
from other_process import run_python

from tritoncaps.kernels.common.cpu.processor import VECTOR_BYTES, WIDTHS

# with fewer types than lanes, and with more
PROGRAM = """
from functools import partial

from tritoncaps import DynamicRouting, EMRouting, RoutingMap, VBRouting, functional
from tritoncaps.kernels.common.cpu.processor import VECTOR_BYTES
from tritoncaps.testing import Problem, VectorProblem, checks, dynamic, route_on

conv = RoutingMap.conv((4, 3), 2)
for types in (3, 17):
    for routing in (EMRouting(3), *(EMRouting(2, competition=x) for x in ("local", "positions")), VBRouting(2)):
        checks.equals_the_reference(route_on("cpu"), Problem(conv, routing, in_caps=5, out_caps=types))
    checks.is_as_exact_as_plain_torch(route_on("cpu"), Problem(conv, EMRouting(2), in_caps=5, out_caps=types))
    of_vectors = VectorProblem(conv, DynamicRouting(2), in_caps=5, out_caps=types)
    dynamic.equals_the_reference(partial(functional.dynamic_routing, backend="cpu"), of_vectors)
print(VECTOR_BYTES)
"""


@pytest.mark.parametrize("width", [width for width in WIDTHS if width != VECTOR_BYTES])
def test_kernels_equal_the_reference(width):
    assert run_python("-c", PROGRAM, TRITONCAPS_VECTOR_BYTES=str(width)) == f"{width}\n"


def test_other_widths_get_a_sentence():
    program = "import tritoncaps.kernels.common.cpu.processor"
    with pytest.raises(AssertionError, match="TRITONCAPS_VECTOR_BYTES must be 16, 32 or 64, but it is '24'"):
        run_python("-c", program, TRITONCAPS_VECTOR_BYTES="24")
