"""The arguments of every command: quick to import, so that `--help` and errors are immediate."""

import argparse
import dataclasses
import sys
from typing import Any

from pion_grpc.config import Config, environment_settings
from pion_grpc.errors import CannotStart

Commands = Any  # argparse's subparsers action, which has no public name


def add_serve(commands: Commands) -> None:
    """`pion-grpc serve`: every field of the configuration is a flag."""
    parser = commands.add_parser(
        "serve", help="run a server", description="Runs a server.", allow_abbrev=False
    )
    for field in dataclasses.fields(Config):
        flag, text = f"--{field.name.replace('_', '-')}", field.metadata["help"]
        if field.default is False:
            parser.add_argument(flag, action="store_true", default=None, help=text)
            continue
        default = field.default
        if default is dataclasses.MISSING and callable(field.default_factory):
            default = field.default_factory()
        shown = f" (default {default})" if default not in (None, 0) else ""
        parser.add_argument(
            flag,
            type=_named(field.metadata["parse"], field.metadata["metavar"]),
            metavar=field.metadata["metavar"],
            help=(text + shown).replace("%", "%%"),
        )
    parser.set_defaults(run=_serve)


def config_from(options: argparse.Namespace) -> Config:
    """Returns the configuration: flags over environment over defaults.

    Raises:
        CannotStart: a value is out of range.
    """
    given = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(Config)
        if getattr(options, field.name, None) is not None
    }
    try:
        return Config(**{**environment_settings(), **given})
    except ValueError as error:
        raise CannotStart(str(error)) from error


def _serve(options: argparse.Namespace) -> int:
    config = config_from(options)
    from pion_grpc.cli.logs import set_up_logs
    from pion_grpc.server import serve

    set_up_logs(sys.stdout)
    serve(config)
    return 0


def _named(parse: Any, name: str) -> Any:
    """Lets argparse show why a value is refused."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error) or f"{text!r} is no {name}") from error

    return convert


COMMANDS = (add_serve,)
