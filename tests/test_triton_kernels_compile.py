"""Every Triton kernel compiles for every target, without spills and within the budget of resources.json."""

import pytest
from other_process import run_python

from tritoncaps.kernels.common.triton import resources

COMPARE = """
from tritoncaps.kernels.common.triton.resources import TARGETS, compile_variant, variants

names = {"parent_view gradient", "weight_view of stored votes"}
found = [variant for variant in variants("sm_90") if variant.name in names]
assert len(found) == len(names)
for variant in found:
    assert not variant.needs_coalescing(TARGETS["sm_90"][2])
    fast, slow = (compile_variant(variant, "sm_90", coalescing).asm["ptx"] for coalescing in (False, True))
    assert fast == slow, variant.name
"""


def test_the_coalescing_pass_changes_nothing():
    """For the kernels whose launches skip it and whose threads have one element."""
    run_python("-c", COMPARE, TRITON_ALWAYS_COMPILE="1")


def test_a_fingerprint_ignores_what_does_not_change_the_code():
    code = """def kernel(x):\n    {docstring}\n    return x + {number}  # {comment}"""
    plain, documented, changed = (
        resources.without_docstrings(code.format(docstring=docstring, number=number, comment=comment))
        for docstring, number, comment in (("pass", 1, ""), ("'A sum.'\n    pass", 1, "why"), ("pass", 2, ""))
    )
    assert plain == documented != changed


def test_a_fingerprint_ignores_host_code():
    code = (
        "import x\nROWS = {rows}\n@triton.jit\ndef kernel(x):\n    return {device}\ndef launch(x):\n    return {host}\n"
    )
    plain, other_host, other_device, other_constant = (
        resources.without_docstrings(code.format(rows=rows, device=device, host=host), device_only=True)
        for rows, device, host in ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1))
    )
    assert plain == other_host
    assert len({plain, other_device, other_constant}) == 3


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_resources(target):
    """Kernels are compiled ahead of time, in another process, because this one uses Triton's interpreter."""
    printed = run_python("-m", "tritoncaps.kernels.common.triton.resources", "--targets", target)
    assert "all kernels are within the budget" in printed
