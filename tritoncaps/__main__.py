"""`python -m tritoncaps`, and so `torchrun -m tritoncaps`: the command."""

import sys

from tritoncaps_command import main, restart

if __name__ == "__main__":
    restart()
    sys.exit(main())
