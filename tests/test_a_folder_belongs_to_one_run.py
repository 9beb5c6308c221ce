"""Only one process can use the folder of a run: others get an error that names it, until it has ended."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import official_files as official
import pytest

from tritoncaps.training import Config, ConfigError, load_checkpoint, train
from tritoncaps.training import claim as claims
from tritoncaps.training.claim import LOCK, Claim, FolderInUseError, claim_new

OWNER = r"is in use by process {} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d"
FOREVER = 1_000_000  # steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    official.write_smallnorb(place, count=40)
    return str(place)


# Threads of a process group that outlive it can abort the process at its end.
TRAIN = """
import os
from tritoncaps.cli import main
code = main()
names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
assert not [name for name in names if "gloo" in name], names
raise SystemExit(code)
"""


@pytest.fixture
def start(tmp_path, folder):
    """Start `tritoncaps train` in tmp_path; processes that still run at the end of the test are killed."""
    processes = []

    def begin(*arguments, steps=2, runner=("-m", "tritoncaps")):
        command = [sys.executable, *runner, "train"]
        if "--resume" not in arguments:
            command += ["--data", "smallnorb", "--data-dir", folder, "--model", "linear", "--batch-size", "8"]
        command += ["--steps", str(steps), "--checkpoint-every", "1", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes)
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(path, process):
    for _ in range(2400):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def test_runs_that_start_together_get_folders_of_their_own(tmp_path, start):
    processes = [start("--json") for _ in range(2)]
    results = []
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        results.append(json.loads(out))
    assert {result["folder"] for result in results} == {f"runs/smallnorb-linear{n}" for n in ("", "-2")}
    for result in results:
        run = tmp_path / result["folder"]
        assert load_checkpoint(run / "last.pt")["step"] == 2
        assert not (run / LOCK).exists()


def test_a_live_run_is_neither_overwritten_nor_resumed(tmp_path, start):
    """After the process is killed, another one can continue the run immediately."""
    live = start("--out", "run", steps=FOREVER)
    wait_for(tmp_path / "run" / "last.pt", live)
    others = [start("--out", "run"), start("--resume", "run")]
    for other in others:
        _, err = other.communicate(timeout=240)
        assert other.returncode == 1
        assert re.search("tritoncaps train: run " + OWNER.format(live.pid), err), err
        assert err.count("\n") == 1
    assert live.poll() is None
    live.send_signal(signal.SIGKILL)
    live.wait()
    step = load_checkpoint(tmp_path / "run" / "last.pt")["step"]
    assert (tmp_path / "run" / LOCK).exists()  # the killed process could not remove it
    resumed = start("--resume", "run", "--json", steps=step + 1)
    out, err = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, err
    assert json.loads(out)["step"] == step + 1


def test_under_torchrun_one_process_claims_and_one_prints(tmp_path, start):
    runner = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    runner += ("--rdzv-endpoint", "localhost:0", "train.py")
    (tmp_path / "train.py").write_text(TRAIN)
    process = start(runner=runner)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.count("finished:") == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["smallnorb-linear"]
    with_claim = Claim(tmp_path / "runs" / "smallnorb-linear")
    refused = start("--resume", "runs/smallnorb-linear", runner=runner)
    _, err = refused.communicate(timeout=240)
    with_claim.release()
    assert refused.returncode == 1
    assert re.search(OWNER.format(os.getpid()), err), err


def test_a_claim_ends_with_its_process_though_its_children_live(tmp_path):
    """Processes that load images are forked, and inherit open files."""
    code = (
        "import os, sys, time; from pathlib import Path; from tritoncaps.training.claim import Claim\n"
        "Claim(Path(sys.argv[1]))\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(60); os._exit(0)\n"
        "print(child, flush=True); os._exit(1)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        process.wait()
        Claim(tmp_path / "run").release()
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_a_failed_start_leaves_no_folder(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--batch-size must be at most"):
        train(Config(data="smallnorb", model="linear", data_dir=folder, batch_size=1000), quiet=True)
    assert not (tmp_path / "runs").exists()


def test_an_unusable_folder_gets_a_sentence(tmp_path, folder):
    (tmp_path / "file").write_text("")
    config = Config(data="smallnorb", model="linear", data_dir=folder, out=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"the folder .*file cannot be used: File exists"):
        train(config, quiet=True)


@pytest.mark.parametrize("locks", ["none", "refused"])
def test_without_file_locks_a_file_names_the_owner(tmp_path, monkeypatch, locks):
    """On Windows, and on file systems that refuse to lock."""
    if locks == "none":
        monkeypatch.setattr(claims, "fcntl", None)
    else:

        def refuse(*_):
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(claims.fcntl, "flock", refuse)
    claim = Claim(tmp_path / "run")
    with pytest.raises(
        FolderInUseError, match=OWNER.format(os.getpid()) + "; if that process has ended, delete .*owner"
    ):
        Claim(tmp_path / "run")
    assert claim_new(tmp_path / "run").folder == tmp_path / "run-2"
    claim.release()
    assert not (tmp_path / "run").exists()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "run").mkdir()
    owner = {"process": ended.pid, "host": claims.socket.gethostname(), "since": "2020-01-01 00:00:00"}
    (tmp_path / "run" / claims.OWNER).write_text(json.dumps(owner))
    Claim(tmp_path / "run").release()  # its process has ended
    (tmp_path / "run" / claims.OWNER).write_text(json.dumps({**owner, "host": "elsewhere"}))
    with pytest.raises(FolderInUseError, match=f"process {ended.pid} on elsewhere since 2020"):
        Claim(tmp_path / "run")  # this machine cannot know whether the process still runs
