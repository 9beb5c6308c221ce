"""A small part of `make fuzz` and `make soak`, each in its own process."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(script, *arguments):
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(("backend", "examples"), [("cpu", 300), ("triton", 10)])
def test_fuzz(backend, examples):
    arguments = ("--backend", backend, "--examples", str(examples), "--seed", "7")
    assert f"{examples} of {examples} examples on {backend} passed" in run("fuzz.py", *arguments)


def test_soak():
    """Too short to measure memory, but it must run."""
    run("soak.py", "--steps", "8")
