"""Runs can continue after a kill at any moment, Ctrl-C and divergence; a resumed run ends with the same bits."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import official_files as official
import pytest
import torch

from tritoncaps.cli import main
from tritoncaps.training import CheckpointError, Config, ConfigError, DivergedError, load_checkpoint, loop, train
from tritoncaps.training.checkpoint import save_checkpoint
from tritoncaps.training.loop import Trainer
from tritoncaps.training.metrics import read_metrics
from tritoncaps.training.objective import Objective

TINY = {"data": "smallnorb", "batch_size": 8, "log_every": 1, "test_limit": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data folder with a few official files."""
    place = tmp_path_factory.mktemp("data")
    official.write_smallnorb(place, count=40)
    return str(place)


class Killed(BaseException):
    pass


def stop_at(monkeypatch, step):
    own = Trainer._step

    def until(self, parts):
        if self.step == step:
            raise Killed
        own(self, parts)

    monkeypatch.setattr(Trainer, "_step", until)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "matrix-capsnet-small", "mono": True, "iterations": 2, "lr_schedule": "cosine"},
        {"model": "cnn-smallnorb", "ema": 0.9, "accumulate": 2},  # with dropout
    ],
    ids=["matrix-capsnet-small", "cnn-smallnorb"],
)
def test_a_resumed_run_is_bit_identical(tmp_path, folder, monkeypatch, settings):
    config = Config(**TINY, **settings, steps=7, checkpoint_every=2, data_dir=folder)
    train(Config(**{**vars(config), "out": str(tmp_path / "whole")}), quiet=True)
    config = Config(**{**vars(config), "out": str(tmp_path / "parts")})
    for step in (3, 6):  # after checkpoints at 2 and at 5, the end of the first epoch, and after other steps
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            with pytest.raises(Killed):
                train(config, resume=step > 3, quiet=True)
    train(config, resume=True, quiet=True)
    whole, parts = (torch.load(tmp_path / run / "last.pt", weights_only=True) for run in ("whole", "parts"))
    for key in ("network", "average", "optimiser", "step", "best"):
        assert_same(whole[key], parts[key])
    rows = [[_timeless(row) for row in read_metrics(tmp_path / run)] for run in ("whole", "parts")]
    assert rows[0] == rows[1]


def _timeless(row):
    return {key: value for key, value in row.items() if key not in ("seconds", "images_per_second")}


def assert_same(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def start(out, folder, *more):
    command = [sys.executable, "-m", "tritoncaps", "train", "--data", "smallnorb", "--data-dir", folder]
    command += ["--model", "linear", "--batch-size", "8", "--checkpoint-every", "1", "--log-every", "1", *more]
    command += [] if "--resume" in more else ["--out", str(out), "--steps", "1000000"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path, process):
    for _ in range(1200):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def test_sigkill_at_any_moment_leaves_a_good_checkpoint(tmp_path, folder):
    """The run saves at every step, so most kills fall into a write."""
    run, step = tmp_path / "run", 0
    for attempt in range(3):
        process = start(run, folder, *(["--resume", str(run)] if attempt else []))
        if attempt == 0:
            wait_for(run / "last.pt", process)
        else:
            before = (run / "last.pt").stat().st_mtime_ns
            while (run / "last.pt").stat().st_mtime_ns == before and process.poll() is None:
                time.sleep(0.01)
        time.sleep(random.Random(attempt).uniform(0.05, 0.3))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.communicate()
        saved = load_checkpoint(run / "last.pt")
        assert saved["step"] > step
        step = saved["step"]


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, folder):
    run = tmp_path / "run"
    process = start(run, folder, "--checkpoint-every", "1000000")
    wait_for(run / "metrics.jsonl", process)
    while not (run / "metrics.jsonl").read_text():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert f"continue with `tritoncaps train --resume {run}`" in out
    assert "Traceback" not in err
    assert load_checkpoint(run / "last.pt")["step"] == read_metrics(run)[-1]["step"]


def test_a_loss_that_is_no_number_stops_the_run(tmp_path, folder, monkeypatch):
    own = Objective.forward

    def broken(self, *arguments):
        loss, scores = own(self, *arguments)
        broken.calls += 1
        return (loss * float("nan") if broken.calls > 5 else loss), scores

    broken.calls = 0
    monkeypatch.setattr(Objective, "forward", broken)
    config = Config(**TINY, model="linear", steps=20, checkpoint_every=2, data_dir=folder, out=str(tmp_path / "run"))
    with pytest.raises(DivergedError, match=r"the loss is not finite at step 6: .* good checkpoint is .*last\.pt"):
        train(config, quiet=True)
    saved = load_checkpoint(tmp_path / "run" / "last.pt")
    assert saved["step"] == 5  # the end of the first epoch
    assert all(value.isfinite().all() for value in saved["network"].values())


def test_weights_that_are_no_numbers_are_not_saved(tmp_path, folder, monkeypatch):
    own = torch.optim.Adam.step

    def broken(self, *arguments, **keywords):
        own(self, *arguments, **keywords)
        with torch.no_grad():
            self.param_groups[0]["params"][0].fill_(float("inf"))

    monkeypatch.setattr(torch.optim.Adam, "step", broken)
    config = Config(**TINY, model="linear", steps=20, checkpoint_every=1, data_dir=folder, out=str(tmp_path / "run"))
    with pytest.raises(DivergedError, match=r"a weight is not finite at step 1: .* there is no checkpoint yet"):
        train(config, quiet=True)
    assert not (tmp_path / "run" / "last.pt").exists()


@pytest.mark.parametrize("how", ["truncated", "empty", "foreign", "text"])
def test_damaged_checkpoints_get_a_sentence(tmp_path, folder, how):
    run = tmp_path / "run"
    train(Config(**TINY, model="linear", steps=1, data_dir=folder, out=str(run)), quiet=True)
    path = run / "last.pt"
    content = path.read_bytes()
    if how == "foreign":
        torch.save({"state_dict": {}}, path)
    else:
        path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "text": b"hello" * 100}[how])
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["last.pt", "best.pt"])
def test_checkpoints_cut_anywhere_get_a_sentence(tmp_path, folder, name):
    run = tmp_path / "run"
    train(Config(**TINY, model="linear", steps=1, data_dir=folder, out=str(run)), quiet=True)
    save_checkpoint(run / name, Config(), network={"weight": torch.zeros(100)}, step=1)
    content = (run / name).read_bytes()
    for length in range(0, len(content), 53):
        (run / name).write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=rf"{name} is truncated, or not a checkpoint$"):
            load_checkpoint(run / name)
    if name == "best.pt":
        with pytest.raises(CheckpointError, match=r"best\.pt is truncated, or not a checkpoint; try .*last\.pt$"):
            load_checkpoint(run)


@pytest.mark.parametrize("steps", [4, 2], ids=["later", "at the first checkpoint"])
def test_a_full_disk_ends_the_run_with_a_sentence_and_keeps_what_was_saved(
    tmp_path, folder, monkeypatch, capsys, steps
):
    """The disk has room for only a thousand bytes of a checkpoint."""
    run = tmp_path / "run"
    settings = ["--data", "smallnorb", "--data-dir", folder, "--model", "linear", "--batch-size", "8"]
    if steps > 2:
        assert main(["train", *settings, "--steps", "2", "--out", str(run), "--json"]) == 0
        settings = ["--resume", str(run)]
    before = {path.name: path.read_bytes() for path in run.glob("*.pt")} if steps > 2 else {}
    capsys.readouterr()
    own = torch.save
    monkeypatch.setattr(torch, "save", lambda content, file: own(content, SmallDisk(file)))
    settings += [] if steps > 2 else ["--out", str(run)]
    assert main(["train", *settings, "--steps", str(steps), "--checkpoint-every", "1"]) == 1
    error = capsys.readouterr().err
    kept = "of an earlier step is still there" if steps > 2 else "there is no earlier one"
    assert error.startswith(f"tritoncaps train: the checkpoint {run / 'last.pt'} cannot be written: No space left on ")
    assert error.strip().endswith(kept)
    assert error.count("\n") == 1
    assert {path.name: path.read_bytes() for path in run.glob("*.pt")} == before
    assert not list(run.glob(".*"))  # neither a part of a checkpoint nor a lock
    monkeypatch.setattr(torch, "save", own)
    if steps > 2:
        assert main(["train", "--resume", str(run), "--steps", str(steps), "--json"]) == 0
        assert load_checkpoint(run / "last.pt")["step"] == steps


class SmallDisk:
    def __init__(self, file):
        self.file, self.room = file, 1000

    def write(self, content):
        self.room -= len(content)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(content)

    def flush(self):
        self.file.flush()


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0)])
def test_an_average_neither_starts_nor_ends_within_a_run(tmp_path, folder, before, after):
    config = Config(**TINY, model="linear", steps=1, ema=before, data_dir=folder, out=str(tmp_path / "run"))
    train(config, quiet=True)
    content = (tmp_path / "run" / "last.pt").read_bytes()
    with pytest.raises(
        ConfigError, match=rf"--ema was {before} in .*run and cannot become {after}: the moving average"
    ):
        train(replace(config, ema=after, steps=2), resume=True, quiet=True)
    assert (tmp_path / "run" / "last.pt").read_bytes() == content
    if before:
        assert train(replace(config, ema=0.5, steps=2), resume=True, quiet=True).step == 2  # a decay may change


def test_an_interrupted_evaluation_is_made_up_for(tmp_path, folder, monkeypatch):
    """Ctrl-C in an evaluation does not wait for its end, and the run ends as one that was never interrupted."""
    config = Config(**TINY, model="linear", steps=4, evaluate_every=2, data_dir=folder)
    train(replace(config, out=str(tmp_path / "whole")), quiet=True)
    own = loop.evaluate

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
        return own(*arguments)

    parts = replace(config, out=str(tmp_path / "parts"))
    for resume in (False, True):  # in the first evaluation, and in the same again
        with monkeypatch.context() as patch:
            patch.setattr(loop, "evaluate", interrupted)
            result = train(parts, resume=resume, quiet=True)
        assert (result.reason, result.step) == ("interrupted", 2)
    assert train(parts, resume=True, quiet=True).reason == "finished"
    rows = [[_timeless(row) for row in read_metrics(tmp_path / run)] for run in ("whole", "parts")]
    assert rows[0] == rows[1]


def test_a_checkpoint_cannot_run_code(tmp_path, capsys):
    class Attack:
        def __reduce__(self):
            return print, ("this must never run",)

    torch.save({"format": Attack()}, tmp_path / "last.pt")
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path)
    assert capsys.readouterr().out == ""


def test_a_finished_run_is_not_overwritten(tmp_path, folder):
    config = Config(**TINY, model="linear", steps=1, data_dir=folder, out=str(tmp_path / "run"))
    train(config, quiet=True)
    with pytest.raises(ConfigError, match="contains a run: continue it with --resume"):
        train(config, quiet=True)
    again = train(config, resume=True, quiet=True)  # the run is complete
    assert (again.reason, again.step) == ("finished", 1)


def test_two_processes_train_the_same_network_as_one(tmp_path, folder):
    """Every image is drawn, cropped and weighted alike; sums differ by rounding only."""
    settings = ["train", "--data", "smallnorb", "--data-dir", folder, "--model", "matrix-capsnet-small", "--mono"]
    settings += ["--iterations", "2", "--steps", "4", "--batch-size", "8", "--test-limit", "7", "--json"]
    runner = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    runner += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "tritoncaps"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    results = {}
    for name, command in (("two", runner), ("one", [sys.executable, "-m", "tritoncaps"])):
        done = subprocess.run(
            [*command, *settings, "--out", str(tmp_path / name)], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        results[name] = json.loads(done.stdout.strip().splitlines()[-1])
    one, two = (load_checkpoint(tmp_path / name / "last.pt")["network"] for name in ("one", "two"))
    for key, value in one.items():
        assert torch.allclose(value, two[key], rtol=1e-3, atol=1e-4), key
    assert results["one"]["accuracy"] == results["two"]["accuracy"]
