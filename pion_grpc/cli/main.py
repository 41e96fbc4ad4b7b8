"""`pion-grpc`: the command line. Each command is in a module of this package, imported when it runs."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from pion_grpc import __version__
from pion_grpc.cli import arguments
from pion_grpc.cli.failure import CommandFailed
from pion_grpc.errors import CannotStart


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="pion-grpc",
        description="Keeps what a language model has already computed, for whoever needs it next.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pion-grpc {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in arguments.COMMANDS:
        add(commands)
    options = parser.parse_args(argv)
    try:
        return _run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `pion-grpc ls | head`
        _give_up_output()
        return 1
    except OSError as error:  # of what has no name, which is the output
        _give_up_output()
        return _told(f"the output cannot be written: {error.strerror or error}")


def _run(options: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except CannotStart as error:
        return _failed(options, "CANNOT_START", str(error))
    except CommandFailed as error:
        return _failed(options, error.reason, str(error))
    except OSError as error:
        if not error.filename:
            raise
        return _failed(options, "SYSTEM", f"{error.filename}: {error.strerror}")


def _failed(options: argparse.Namespace, reason: str, message: str) -> int:
    if getattr(options, "json", False) is not True:  # of `bench` it is a file
        return _told(message)
    print(json.dumps({"error": {"reason": reason, "message": message}}, indent=2), flush=True)
    return 1


def _told(message: str) -> int:
    print(f"pion-grpc: {message}", file=sys.stderr)
    return 1


def _give_up_output() -> None:
    """Lets what is still to be written vanish: the interpreter would fail with it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
