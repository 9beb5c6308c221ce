"""Every benchmark runs and reports finite numbers. No test asserts a time."""

import inspect
import json
import math
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCH = Path(__file__).parent.parent / "bench"
OURS, REFERENCE = "tritoncaps", "reference"
TIMED = ("pose_votes", "coordinate_addition", "m_step", "e_step", "em_routing", "dynamic_routing", "layers", "models")
SUBJECTS = (*TIMED, "scaling", "memory", "first_call", "call_cost")


@pytest.fixture
def bench(monkeypatch, capsys):
    """Run a script as a command, in this process, which has imported torch already. Returns its output."""
    monkeypatch.syspath_prepend(BENCH)

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [str(BENCH / script), *map(str, arguments)])
        runpy.run_path(sys.argv[0], run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    import harness

    return harness


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_sane(row):
    assert not row.get("failed"), row
    assert all(math.isfinite(x) and x >= 0 for x in row.values() if isinstance(x, float)), row


def test_there_is_a_script_for_each_subject():
    scripts = {path.stem for path in BENCH.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == {*SUBJECTS, "suite", "gpu_estimate", "busy", "first_gpu_call", "mixture_routing", "peers"}


def test_a_fit_of_ones_own_is_measured(bench):
    rows = bench("mixture_routing.py", "--types", 2, "--images", 1, "--rounds", 1).splitlines()[2:]
    assert [row.split("  ")[0] for row in rows] == ["EMRouting", "the same fit in torch", "VBRouting"]
    assert rows[0].split()[2] == "1.00"
    assert all(float(row.split()[-1]) > 0 for row in rows)


def test_every_subject_runs_alone(tmp_path, bench):
    for subject in SUBJECTS:
        assert bench(f"{subject}.py", "--smoke", "--json", tmp_path / f"{subject}.json").startswith("device: ")
    rows = {}
    for subject in SUBJECTS:
        header, *rows[subject] = read(tmp_path / f"{subject}.json")
        assert {"device", "threads", "versions", "commit"} <= set(header)
        assert (tmp_path / f"{subject}.csv").read_text().startswith("subject,case,mode,")
        for row in rows[subject]:
            assert_sane(row)
    for subject in TIMED:
        check_times([row for row in rows[subject] if row["mode"] not in ("traffic", "routing of a step")])
    assert [row["p50_ms"] > 0 for row in rows["models"] if row["mode"] == "routing of a step"] == [True]
    assert all(row["ns_per_vote"] > 0 for row in rows["scaling"])
    check_bytes(*rows["memory"], "kept_mib")
    check_bytes(*(row for row in rows["dynamic_routing"] if row["mode"] == "traffic"), "traffic_mib")
    assert rows["first_call"][0]["p50_ms"] > 0
    assert [row["mode"] for row in rows["call_cost"]] == ["forward", "step", "forward"]
    assert all(row["least_ms"] > 0 for row in rows["call_cost"])


def check_times(rows):
    for mode in ("forward", "step"):
        assert {OURS, REFERENCE} <= {row["provider"] for row in rows if row["mode"] == mode}
    for row in rows:
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["sgemm_gflops"] > 0
        assert row["copy_gbs"] > 0
        assert row["provider"] not in (OURS, REFERENCE) or row["error"] <= row["allowed_error"]


def check_bytes(ours, reference, name):
    """Our kernels keep and move fewer bytes than the reference."""
    assert (ours["provider"], reference["provider"]) == (OURS, REFERENCE)
    assert 0 < ours[name] < reference[name]


def test_suite_writes_a_page_and_compares(tmp_path, bench):
    """The same rows make the same page; a run compared with itself has no differences."""
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
    lines = bench("suite.py", "--compare", out, out).splitlines()
    verdicts = [line for line in lines if line.startswith(("coordinate_addition", "scaling"))]
    assert len(verdicts) >= 4
    assert all(line.rstrip().endswith("no difference seen") for line in verdicts)


def test_the_page_in_docs_is_generated(tmp_path, bench):
    """docs/benchmarks.md is exactly the page that its rows make."""
    page = BENCH.parent / "docs" / "benchmarks.md"
    if not page.exists():
        pytest.skip("`make bench` has not written it")
    again = tmp_path / "benchmarks.md"
    bench("suite.py", "--rows", page.with_suffix("") / "rows.json", "--json", tmp_path / "rows.json", "--page", again)
    assert again.read_text() == page.read_text()


def test_a_wrong_result_prints_no_time(harness):
    """If the error check of a provider fails, the table has the reason instead of a time."""
    import em_routing
    import problems
    import report

    case = em_routing.case("em_routing", "tiny", problems.TINY)
    wrong = replace(case, ours=lambda *x: [1.001 * y for y in case.reference(*x)])
    rows = wrong.rows("smoke")
    assert not any("p50_ms" in r for r in rows if r["provider"] == OURS)
    assert all("p50_ms" in r for r in rows if r["provider"] == REFERENCE)
    assert "no time: tritoncaps, forward: its error of 1.0e-03 is above" in report.table(rows)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--compare", "nowhere/a.json", "nowhere/b.json"), "bench: .*nowhere/a.json"),
        (("--smoke", "--against", "no-such-commit"), "bench: git finds no commit 'no-such-commit'"),
        (("--smoke", "--profile", "proton"), "bench: --profile proton needs a GPU"),
    ],
)
def test_errors_are_one_sentence(tmp_path, bench, arguments, sentence):
    with pytest.raises(SystemExit, match=sentence) as caught:
        bench("suite.py", *arguments, "--json", tmp_path / "rows.json")
    assert "\n" not in caught.value.code


def test_models_stand_beside_convolutions_of_as_many_multiply_adds(harness):
    """nn.Conv2d in the place of routed layers: as many operations as the votes have, and those of the other layers."""
    from torch.utils.flop_counter import FlopCounterMode

    import models

    case = models.matrix_case("small", (64, 8, 16, 16), 1, ())
    rival = next(x for x in case.rivals if x.name == "nn.Conv2d")
    with FlopCounterMode(display=False) as counter:
        rival.function(*(x.float() if x.is_floating_point() else x for x in rival.tensors()))
    votes = (36 * 9 * 8 * 16) + (16 * 9 * 16 * 16) + (16 * 16 * 5)
    features, primary = 14 * 14 * 64 * 2 * 25, 14 * 14 * 64 * 64
    assert counter.get_total_flops() == 2 * (64 * votes + features + primary)


def test_proton_gets_what_it_takes(tmp_path, monkeypatch, harness):
    """There is no GPU to profile: compare the calls with the signatures of Triton's profiler."""
    import triton.profiler as proton

    calls = []
    for function in (proton.start, proton.finalize):
        record = lambda *x, f=function, **k: calls.append((f.__name__, inspect.signature(f).bind(*x, **k).arguments))  # noqa: E731
        monkeypatch.setattr(proton, function.__name__, record)
    case = harness.Case("x", "x", ours := lambda x: [x * 2], ours, lambda: [torch.ones(2)], images=1, data=1)
    harness.profile(case, tmp_path / "tree", "proton")
    assert calls == [("start", {"name": str(tmp_path / "tree"), "hook": "triton"}), ("finalize", {"session": None})]


def test_busy_programs_run_beside_every_second_run(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCH)
    import busy

    started, beside, figures = [], [], iter([1.0, 50.0, 10.0, 60.0, 30.0])

    def start(command):
        started.append(subprocess.Popen(command))
        return started[-1]

    def measure(steps):
        beside.append(sum(loop.poll() is None for loop in started))
        return next(figures)

    monkeypatch.setattr(busy, "subprocess", SimpleNamespace(Popen=start))
    monkeypatch.setattr(busy, "images_per_second", measure)
    monkeypatch.setattr(sys, "argv", ["busy.py", "--rounds", "2"])
    assert busy.main() == 1
    assert beside == [0, 0, 2, 0, 2]
    assert all(loop.poll() is not None for loop in started)
    assert "busy / quiet                 0.36" in capsys.readouterr().out


def test_gpu_estimate(tmp_path, bench):
    """The traffic of the paper's first ConvCaps, forward and backward, is at most 5% of that of the eager reference;
    every view fills the 108 multiprocessors of an A100 at batch 16."""
    printed = bench("gpu_estimate.py", "--gpus", "A100", "MI300X", "--json", tmp_path / "rows.json")
    assert printed.startswith("ESTIMATES")
    assert "H100" not in printed
    rows = read(tmp_path / "rows.json")
    kernels = [row for row in rows if row["kernel"].startswith(VIEWS)]
    assert all(row["programs_at_16"] >= 108 and 0 < row["A100 occupancy"] <= 1 for row in kernels)
    ours, eager = ({row["layer"]: row for row in rows if row["kernel"] == x} for x in ("tritoncaps", "eager reference"))
    assert ours["ConvCaps1 32->32"]["bytes"] <= 0.05 * eager["ConvCaps1 32->32"]["bytes"]
    # instructions of a thread for a vote in a whole step: counted for NVIDIA's GPUs only
    assert 2500 < ours["ConvCaps1 32->32"]["A100 instructions"] < 3600
    assert all("A100 instructions" in row and "MI300X instructions" not in row for row in kernels)
    layers = ("ConvCaps1 32->32", "ConvCaps2 32->32", "ClassCaps 32->5")
    assert ours["MatrixCapsNet"]["flops"] == sum(ours[layer]["flops"] for layer in layers)


VIEWS = ("parent_view", "log_sum", "assignment_gradient", "child_gradient", "weight_view")


def test_resource_tables_of_the_documents(bench):
    """Each table in docs/ is the output of the command in the comment before it."""
    found = 0
    for page in sorted((BENCH.parent / "docs").glob("*-view.md")):
        _, _, table = page.read_text().partition("<!-- python bench/gpu_estimate.py ")
        arguments, _, table = table.partition(" -->")
        assert table.strip() == bench("gpu_estimate.py", *arguments.split()).strip(), page
        found += 1
    assert found == 4


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")


def test_a_reference_that_does_not_fit_is_a_row(harness):
    case = harness.Case(
        "x", "y", lambda x: [x * 2], out_of_memory, lambda: [torch.ones(3).double()], 1, 1, timed=(OURS, REFERENCE)
    )
    rows = {(row["provider"], row["mode"]): row for row in case.rows("smoke")}
    assert rows[REFERENCE, "step"]["failed"] == "CUDA out of memory. Tried to allocate"
    assert rows[OURS, "step"]["p50_ms"] > 0
    assert "error" not in rows[OURS, "step"]


class Clock:
    """Records the calls of a benchmark to CUDA, in order."""

    def __init__(self, monkeypatch, harness):
        self.seen, clock = [], self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                clock.seen.append("record")

            def synchronize(self):
                clock.seen.append("wait")

            def elapsed_time(self, other):
                return 7.0

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.seen.append("synchronize"))
        monkeypatch.setattr(
            harness, "_target", SimpleNamespace(zero_=lambda: self.seen.append("flush"), copy_=lambda _: None)
        )
        monkeypatch.setattr(harness, "IS_GPU", True)


def test_a_gpu_is_timed_by_its_own_clock_with_cold_caches(harness, monkeypatch):
    clock = Clock(monkeypatch, harness)
    assert harness.seconds(lambda: clock.seen.append("call")) == pytest.approx(7e-3)
    assert clock.seen == ["flush", "synchronize", "record", "call", "record", "wait"]


def test_graphs_are_rows_of_their_own(harness, monkeypatch):
    """A graph is captured once and replayed; if the capture fails, the row says so."""
    Clock(monkeypatch, harness)
    replays = []
    monkeypatch.setattr(harness, "graphed", lambda call: lambda: replays.append(call()) or replays[-1])
    case = harness.Case(
        "x", "y", lambda x: [x * 2], lambda x: [x + x], lambda: [torch.ones(3).double()], 1, 1, timed=(OURS,)
    )
    rows = {(row["provider"], row["mode"]): row for row in case.rows("smoke")}
    assert rows[harness.GRAPH, "step"]["p50_ms"] == 7.0
    assert replays
    monkeypatch.setattr(harness, "graphed", lambda call: 1 / 0)
    rows = {(row["provider"], row["mode"]): row for row in case.rows("smoke")}
    assert rows[harness.GRAPH, "step"]["failed"] == "division by zero"


def test_a_gpu_gets_batches_that_fill_it_and_no_thread_scaling(harness, monkeypatch):
    import problems
    import scaling

    monkeypatch.setattr(problems, "IS_GPU", True)
    monkeypatch.setattr(scaling, "IS_GPU", True)
    assert {problem.images for problem in problems.chosen("full").values()} == {64, 256}
    assert {case.group for case in scaling.cases("quick")} == {
        "batch",
        "image side",
        "parent types",
        "kernel size",
        "iterations",
    }


def test_rivals_do_not_use_tf32(harness):
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
