"""A small part of `make fuzz` and `make soak`, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(script, *arguments):
    command = [sys.executable, "-W", "ignore", str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_fuzz():
    assert "300 of 300 examples passed" in run("fuzz.py", "--examples", "300", "--seed", "7")


def test_soak():
    """Too short to say much of memory, but it must run."""
    run("soak.py", "--steps", "8")
