"""`pion-grpc`: the command line. Each command is a module of this package, imported when it is used."""

import argparse
import sys
from collections.abc import Callable, Sequence

from pion_grpc import __version__
from pion_grpc.cli import arguments
from pion_grpc.errors import CannotStart


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="pion-grpc",
        description="Keeps what a language model has already computed.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pion-grpc {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in arguments.COMMANDS:
        add(commands)
    options = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except CannotStart as error:
        print(f"pion-grpc: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
