"""The command `tritoncaps`. It stands outside of the package, because to import any part of the package imports torch.

OpenMP reads its settings when torch is imported. By default, torch's threads spin for milliseconds after an operation.
On a machine where other programs run, they take the cores from the kernels that follow, so here they sleep instead.
"""

from __future__ import annotations

import os
import sys

POLICY = "OMP_WAIT_POLICY"


def main() -> int:
    os.environ.setdefault(POLICY, "PASSIVE")
    from tritoncaps.cli import main

    return main()


def restart() -> None:
    """For `python -m tritoncaps`, which imports the package first: start Python again, unless the setting is there, or
    there is one thread and nothing to set."""
    if os.name == "posix" and POLICY not in os.environ and os.environ.get("OMP_NUM_THREADS") != "1":
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, {**os.environ, POLICY: "PASSIVE"})
