"""Each example runs in seconds: its network learns, its exports and processes have equal results."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.py"))
HELPERS = {"make_notebooks", "toy_data", "training"}
LEARN = {"cifar_cnn": 0.8, "signals": 0.8, "volumes": 0.6, "graph": 0.8, "transfer": 0.7}  # of three classes
OTHERS = {"own_routing", "ddp", "export_onnx"}


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def test_there_is_a_test_for_each_example():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*LEARN, *OTHERS, *HELPERS}


@pytest.mark.parametrize("name", LEARN)
def test_toy_networks_learn(example, name):
    assert example(name)() > LEARN[name]


def test_a_routing_of_your_own_learns_and_is_the_references(example):
    found, difference = example("own_routing")()
    assert found > 0.7
    assert difference < 1e-4


def test_onnx_gives_the_same_activations(example, tmp_path):
    pytest.importorskip("onnxscript")
    assert example("export_onnx")(tmp_path / "capsules.onnx") < 1e-4


def test_two_processes_have_the_same_weights():
    runner = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    runner += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", EXAMPLES / "ddp.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*map(str, runner)], capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    assert re.search(r"2 processes, loss 0\.\d+, all have the same weights: True", result.stdout)


@pytest.mark.parametrize("script", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_their_scripts(script):
    """Same cells in the same order, executed, with small outputs. `make notebooks` makes them again."""
    jupytext = pytest.importorskip("jupytext")
    file = script.with_suffix(".ipynb")
    notebook = json.loads(file.read_text())
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert cells == [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    assert not [output for cell in code for output in cell["outputs"] if output["output_type"] == "error"]
    assert file.stat().st_size < 200_000


@pytest.mark.parametrize("script", NOTEBOOKS, ids=lambda path: path.stem)
def test_scripts_of_notebooks_run(script, monkeypatch):
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(script.parent)  # as a notebook runs
    runpy.run_path(str(script))
