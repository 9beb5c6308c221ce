"""The package as it is installed."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import tritoncaps

CONTRACT = """
from tritoncaps import Capsules, RoutingMap, EMRouting, DynamicRouting
from tritoncaps import PrimaryCaps, ConvCaps1d, ConvCaps2d, ConvCaps3d, ClassCaps
from tritoncaps import SpreadLoss, MarginLoss
from tritoncaps import functional, reference
from tritoncaps.models import MatrixCapsNet
"""


def test_names_of_the_contract():
    exec(CONTRACT)


def test_version_is_in_one_place():
    assert version("tritoncaps") == tritoncaps.__version__


def test_import_is_light():
    """No matplotlib, no compiler, no kernels before they are needed."""
    code = (
        "import sys, tritoncaps, tritoncaps.models;"
        "print([m for m in ('matplotlib', 'numba', 'triton', 'hypothesis') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_package_is_typed():
    assert (Path(tritoncaps.__file__).parent / "py.typed").exists()
