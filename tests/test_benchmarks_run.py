"""Every benchmark runs, and its numbers are numbers. No test asserts a time."""

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
OURS, REFERENCE = "tritoncaps", "reference"
TIMED = ("pose_votes", "coordinate_addition", "m_step", "e_step", "em_routing", "dynamic_routing", "layers", "models")
SUBJECTS = (*TIMED, "scaling", "memory", "first_call")


def bench(script, *arguments, code=0):
    command = [sys.executable, str(BENCH / script), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stderr
    return result


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_sane(row):
    assert not row.get("failed"), row
    assert all(math.isfinite(x) and x >= 0 for x in row.values() if isinstance(x, float)), row


def test_there_is_a_script_for_each_subject():
    scripts = {path.stem for path in BENCH.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == {*SUBJECTS, "suite", "gpu_estimate"}


def test_every_subject_runs_alone(tmp_path):
    """Each script with --smoke, one after the other in a process that has imported torch once."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(BENCH)!r})\n"
        f"for name in {SUBJECTS!r}:\n"
        f"    script = {str(BENCH)!r} + f'/{{name}}.py'\n"
        f"    sys.argv = [script, '--smoke', '--json', {str(tmp_path)!r} + f'/{{name}}.json']\n"
        "    runpy.run_path(script, run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("device: ") == len(SUBJECTS)
    rows = {}
    for subject in SUBJECTS:
        header, *rows[subject] = read(tmp_path / f"{subject}.json")
        assert {"device", "threads", "versions", "commit"} <= set(header)
        assert (tmp_path / f"{subject}.csv").read_text().startswith("subject,case,mode,")
        for row in rows[subject]:
            assert_sane(row)
    for subject in TIMED:
        check_times([row for row in rows[subject] if row["mode"] != "traffic"])
    assert all(row["ns_per_vote"] > 0 for row in rows["scaling"])
    check_bytes(*rows["memory"], "kept_mib")
    check_bytes(*(row for row in rows["dynamic_routing"] if row["mode"] == "traffic"), "traffic_mib")
    assert rows["first_call"][0]["p50_ms"] > 0


def check_times(rows):
    for mode in ("forward", "step"):
        assert {OURS, REFERENCE} <= {row["provider"] for row in rows if row["mode"] == mode}
    for row in rows:
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["sgemm_gflops"] > 0
        assert row["copy_gbs"] > 0
        assert row["provider"] not in (OURS, REFERENCE) or row["error"] <= row["allowed_error"]


def check_bytes(ours, reference, name):
    """Our kernels keep and move less than the reference."""
    assert (ours["provider"], reference["provider"]) == (OURS, REFERENCE)
    assert 0 < ours[name] < reference[name]


def test_suite_writes_a_page_and_compares(tmp_path):
    """From the same rows, the same page; a run does not differ from itself."""
    out, page = tmp_path / "rows.json", tmp_path / "benchmarks.md"
    arguments = ("--smoke", "--only", "coordinate_addition", "scaling")
    bench("suite.py", *arguments, "--json", out, "--page", page, "--profile")
    assert "## Scaling" in page.read_text()
    assert (tmp_path / "benchmarks" / "scaling.png").stat().st_size > 1000
    assert list(tmp_path.glob("*.trace.json"))
    again = tmp_path / "again" / "benchmarks.md"
    again.parent.mkdir()
    bench("suite.py", "--rows", tmp_path / "benchmarks" / "rows.json", "--json", out, "--page", again)
    assert again.read_text() == page.read_text()
    lines = bench("suite.py", "--compare", out, out).stdout.splitlines()
    verdicts = [line for line in lines if line.startswith(("coordinate_addition", "scaling"))]
    assert len(verdicts) >= 4
    assert all(line.rstrip().endswith("no difference seen") for line in verdicts)


def test_the_page_in_docs_is_generated(tmp_path):
    """docs/benchmarks.md is what its rows give, to the letter."""
    page = BENCH.parent / "docs" / "benchmarks.md"
    if not page.exists():
        pytest.skip("`make bench` has not written it")
    again = tmp_path / "benchmarks.md"
    bench("suite.py", "--rows", page.with_suffix("") / "rows.json", "--json", tmp_path / "rows.json", "--page", again)
    assert again.read_text() == page.read_text()


def test_a_wrong_result_prints_no_time(tmp_path):
    """A provider whose error check fails has a reason in place of a time."""
    code = (
        "import report, problems, em_routing; from dataclasses import replace\n"
        "case = em_routing.case('em_routing', 'tiny', problems.TINY)\n"
        "wrong = replace(case, ours=lambda *x: [1.001 * y for y in case.reference(*x)])\n"
        "rows = wrong.rows('smoke')\n"
        "assert all('p50_ms' not in r for r in rows if r['provider'] == 'tritoncaps'), rows\n"
        "assert all('p50_ms' in r for r in rows if r['provider'] == 'reference'), rows\n"
        "print(report.table(rows))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "no time: tritoncaps, forward: its error of 1.0e-03 is above" in result.stdout


def test_errors_are_one_sentence(tmp_path):
    error = bench("suite.py", "--compare", tmp_path / "a.json", tmp_path / "b.json", code=1).stderr
    assert error.startswith("bench: ")
    assert error.count("\n") == 1


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


def test_resource_tables_of_the_documents(capsys):
    """Each table in docs/ is what the command in the comment before it prints."""
    resources = runpy.run_path(str(BENCH / "gpu_estimate.py"))["resources"]
    pages = sorted((BENCH.parent / "docs").glob("*-view.md"))
    assert len(pages) == 3
    for page in pages:
        _, _, table = page.read_text().partition("<!-- python bench/gpu_estimate.py --resources ")
        names, _, table = table.partition(" -->")
        resources(tuple(names.split()))
        assert table.strip() == capsys.readouterr().out.strip(), page
