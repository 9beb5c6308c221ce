"""The command `tritoncaps`. It is outside of the package, because importing any part of the package imports torch.

OpenMP reads its settings when torch is imported. By default, torch's threads spin for milliseconds after an operation.
On a busy machine these threads slow down the kernels that follow, so the command lets them sleep instead.
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
    """Start Python again with the setting, for `python -m tritoncaps`, which imports the package first. Do nothing if
    the variable is set already, or if there is only one thread."""
    if os.name == "posix" and POLICY not in os.environ and os.environ.get("OMP_NUM_THREADS") != "1":
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, {**os.environ, POLICY: "PASSIVE"})
