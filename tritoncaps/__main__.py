"""Runs the command `tritoncaps` for `python -m tritoncaps` and `torchrun -m tritoncaps`."""

import sys

from tritoncaps_command import main, restart

if __name__ == "__main__":
    restart()
    sys.exit(main())
