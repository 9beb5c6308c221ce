"""Every benchmark runs, and its numbers are numbers. No test asserts a time."""

import json
import math
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent / "bench"


def smoke(script, folder):
    """The rows of a benchmark's short run."""
    out = folder / "rows.json"
    command = [sys.executable, str(BENCH / script), "--smoke", "--json", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("device: CPU")
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_em_routing(tmp_path):
    rows = smoke("em_routing.py", tmp_path)
    assert {row["provider"] for row in rows} == {"tritoncaps", "reference"}
    assert all(math.isfinite(row["ms"]) and row["ms"] > 0 for row in rows)


def test_dynamic_routing(tmp_path):
    *timed, memory, traffic = smoke("dynamic_routing.py", tmp_path)
    assert {row["provider"] for row in timed} == {"tritoncaps", "reference"}
    assert all(math.isfinite(row["ms"]) and row["ms"] > 0 for row in timed)
    assert memory["kept_mib_ours"] < memory["kept_mib_reference"]
    assert 0 < traffic["share"] < 1


def test_gpu_estimate(tmp_path):
    """The traffic of the paper's first ConvCaps, forward and backward, is at most 5% of what the eager reference moves;
    every view fills the 108 multiprocessors of an A100 at batch 16."""
    out = tmp_path / "rows.json"
    command = [sys.executable, str(BENCH / "gpu_estimate.py"), "--smoke", "--json", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("ESTIMATES")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    *kernels, ours, eager = rows
    assert ours["bytes"] <= 0.05 * eager["bytes"]
    assert all(row["programs_at_16"] >= 108 for row in kernels if row["kernel"].startswith(VIEWS))


VIEWS = ("parent_view", "log_sum", "assignment_gradient", "child_gradient", "weight_view")


def test_resource_tables_of_the_documents():
    """Each table in docs/ is what the command in the comment before it prints."""
    found = 0
    for page in sorted((BENCH.parent / "docs").glob("*-view.md")):
        _, command, table = page.read_text().partition("<!-- python bench/gpu_estimate.py ")
        arguments, _, table = table.partition(" -->")
        command = [sys.executable, str(BENCH / "gpu_estimate.py"), *arguments.split()]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert table.strip() == printed.strip(), page
        found += 1
    assert found == 3
