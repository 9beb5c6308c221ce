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
