"""`python -m tritoncaps`, and so `torchrun -m tritoncaps`: the command."""

import sys

from tritoncaps.cli import main

if __name__ == "__main__":
    sys.exit(main())
