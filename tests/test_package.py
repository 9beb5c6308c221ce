"""The installed package."""

import os
import re
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

import pytest

import tritoncaps
from tritoncaps.training import load_checkpoint, load_network, read_config

ROOT = Path(__file__).parent.parent
POLICY = "OMP_WAIT_POLICY"

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


def test_triton_comes_with_torch():
    """CUDA's package would overwrite that of ROCm: only the extra and the developers' tools name it."""
    text = (ROOT / "pyproject.toml").read_text()
    needed, extras = (text.partition(f"\n{name} = [")[2].partition("]")[0] for name in ("dependencies", "triton"))
    assert '"torch>=' in needed
    assert '"triton>=' not in needed
    assert '"triton>=' in extras


def test_the_version_is_told_where_people_look():
    newest = re.search(r"^## \[(.+?)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest.group(1) == tritoncaps.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {tritoncaps.__version__}\ndate-released: {newest.group(2)}\n" in citation


def test_what_0_1_saved_loads():
    """A checkpoint of a run, and the configurations of all runs and recipes."""
    run = ROOT / "tests" / "saved_by_0_1"
    network, config = load_network(run)[:2]
    assert load_checkpoint(run)["step"] == 4307
    assert config.model == "matrix-capsnet-small"
    assert sum(p.numel() for p in network.parameters()) == 68_754
    files = [*(ROOT / "docs" / "results").rglob("config.toml"), *(ROOT / "docs" / "recipes").glob("*.toml")]
    assert len([read_config(file) for file in files]) > 10


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


@pytest.mark.parametrize("command", [("-m", "tritoncaps"), ("-c", "import tritoncaps_command as t; t.main()")])
@pytest.mark.parametrize(("own", "expected"), [(None, "'0'"), ("ACTIVE", "'30000000000'")])
def test_commands_let_the_threads_of_torch_sleep(command, own, expected):
    """OpenMP reports how long they spin. A setting of the user has priority."""
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", POLICY)}
    environment |= {"OMP_DISPLAY_ENV": "verbose"} | ({POLICY: own} if own else {})
    arguments = [sys.executable, *command, "--version"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    assert result.stdout == f"tritoncaps {tritoncaps.__version__}\n"
    said = [line for line in result.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not said:
        pytest.skip("this OpenMP does not say it")
    assert expected in said[-1]


def test_triton_is_left_to_torch():
    """The wheel of PyPI would overwrite the Triton of ROCm, which has the same module."""
    plain = [line for line in requires("tritoncaps") if "extra ==" not in line]
    assert not any(line.startswith("triton") for line in plain)
    assert any(line.startswith("triton") and "extra" in line for line in requires("tritoncaps"))


def test_pythons_are_the_same_everywhere():
    """requires-python, the classifiers, the messages of the Makefile, the pages and the matrix of the CI."""
    project = (ROOT / "pyproject.toml").read_text()
    low, high = map(int, re.search(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"$', project, re.MULTILINE).groups())
    pythons = [f"3.{minor}" for minor in range(low, high)]
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project) == pythons
    for name in ("Makefile", "README.md", "docs/install.md"):
        assert f"Python {pythons[0]} to {pythons[-1]}" in (ROOT / name).read_text(), name
    assert f"(3, {low}) <= sys.version_info[:2] < (3, {high})" in (ROOT / "Makefile").read_text()
    matrix = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert sorted(set(re.findall(r'python: "(3\.\d+)" }', matrix))) == pythons
