"""Every benchmark runs, and its numbers are numbers. No test asserts a time."""

import json
import math
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent / "bench"


def test_em_routing(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(BENCH / "em_routing.py"), "--smoke", "--json", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("device: CPU")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["provider"] for row in rows} == {"tritoncaps", "reference"}
    assert all(math.isfinite(row["ms"]) and row["ms"] > 0 for row in rows)
