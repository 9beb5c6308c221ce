"""The command `tritoncaps`. Each subcommand is a module: `add` adds its arguments, `run` runs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from tritoncaps.cli import bench, data, doctor, evaluate, experiment, explore, info, predict, train
from tritoncaps.data import DataError
from tritoncaps.extras import MissingPackageError
from tritoncaps.training import CheckpointError, ConfigError, DivergedError
from tritoncaps.version import __version__

OK, FAILED, WRONG_USAGE, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 130

EPILOG = """\
examples:
  tritoncaps train                                       train a small capsule network on ToyNORB
  tritoncaps train --data mnist --model capsnet --epochs 3
  tritoncaps evaluate runs/mnist-capsnet
  tritoncaps experiment adversarial --quick
  tritoncaps explore --pretrained toynorb                write a page that shows the capsules of a network
  tritoncaps data get mnist
  tritoncaps info --model matrix-capsnet
  tritoncaps doctor

exit codes: 0 done, 1 failed, 2 wrong usage, 3 training diverged, 130 interrupted (a checkpoint is saved)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    args, unknown = parser().parse_known_args(given)
    if unknown:
        args.parser.error(f"there is no argument {unknown[0]!r}")
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the program that read the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        if args.debug:
            raise
        print(f"tritoncaps {args.command}: {_sentence(error)}", file=sys.stderr)
        return DIVERGED if isinstance(error, DivergedError) else FAILED


class Parser(argparse.ArgumentParser):
    """Prints one line for wrong usage. argparse would also print all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USAGE, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="tritoncaps",
        description="Train, evaluate and inspect capsule networks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"tritoncaps {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (train, evaluate, predict, experiment, explore, data, info, bench, doctor):
        name = module.__name__.rsplit(".", 1)[1]
        summary, _, examples = (module.__doc__ or "").partition("\n\n")
        command = commands.add_parser(
            name,
            help=summary.strip(),
            description=summary,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add(command)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=module.run, parser=command)
    return top


def _sentence(error: Exception) -> str:
    """The message in one line, with the type of the error if it is not one of this package."""
    text = " ".join(str(error).split())
    if isinstance(error, (DataError, ConfigError, CheckpointError, DivergedError, MissingPackageError)):
        return text
    return f"{type(error).__name__}: {text} (--debug shows the traceback)"
