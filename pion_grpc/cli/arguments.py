"""The arguments of every command.

Knows no command, only where it is. The one decision: a command is imported when it runs, so that
`--help` and errors are immediate.
"""

import argparse
import contextlib
import math
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import MISSING
from typing import Any

from pion_grpc.cli.bench import add_bench
from pion_grpc.cli.mesh import add_mesh
from pion_grpc.config import (
    SETTINGS,
    Config,
    default_data,
    environment_settings,
    parse_bytes,
    parse_count,
    parse_path,
)
from pion_grpc.errors import CannotStart

Commands = Any  # argparse's subparsers action, which has no public name

DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_serve(commands: Commands) -> None:
    """`pion-grpc serve`: every setting of the configuration is a flag."""
    parser = commands.add_parser(
        "serve",
        help="run a server",
        description="Runs a server. Every option can also be set by an environment variable: "
        "--disk-budget is PION_DISK_BUDGET, and so on.",
        allow_abbrev=False,
    )
    for field in SETTINGS:
        flag, text = f"--{field.name.replace('_', '-')}", field.metadata["help"]
        if field.name == "tenants":
            parser.add_argument(
                "--tenant",
                dest="tenants",
                action="extend",
                type=_named(field.metadata["parse"], field.metadata["metavar"]),
                metavar=field.metadata["metavar"],
                help=text,
            )
            continue
        if field.default is False:
            parser.add_argument(flag, action="store_true", default=None, help=text)
            continue
        default: Any = field.default
        if default is MISSING and callable(field.default_factory):
            default = field.default_factory()
        shown = f" (default {default})" if default not in (None, 0, "") else ""
        if field.metadata["parse"] is parse_bytes and default:
            shown = f" (default {default >> 30}GiB)"
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
        for field in SETTINGS
        if getattr(options, field.name, None) is not None
    }
    if "tenants" in given:
        given["tenants"] = tuple(given["tenants"])
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


def add_demo(commands: Commands) -> None:
    """`pion-grpc demo`."""
    _command(
        commands,
        "demo",
        "demo:demo",
        "show the main job on a real model",
        "Starts a server of its own. One process prefills a prompt and stores it, a second one fetches "
        "it; both answer the same question, and the answers are compared. Exit status 1 if they differ.",
    )


def add_ls(commands: Commands) -> None:
    """`pion-grpc ls [PREFIX]`."""
    parser = _command(
        commands, "ls", "inspect:ls", "list what is stored", "Lists prefixes by name."
    )
    add_connection(parser)
    parser.add_argument(
        "prefix", nargs="?", default="", help="list only names that begin with this"
    )


def add_stat(commands: Commands) -> None:
    """`pion-grpc stat`."""
    parser = _command(
        commands,
        "stat",
        "inspect:stat",
        "show what the server has saved you, and what it holds",
        "Shows the receipt (hits, tokens, bytes, prefill time avoided) and the budgets in use.",
    )
    add_connection(parser)
    parser.add_argument(
        "--reset", action="store_true", help="show the receipt, then set its counters to zero"
    )


def add_drop(commands: Commands) -> None:
    """`pion-grpc drop NAME...`."""
    parser = _command(
        commands,
        "drop",
        "inspect:drop",
        "remove prefixes",
        "Removes prefixes by name; they are neither found nor matched from then on. Exit status 1 if "
        "one was not stored.",
    )
    add_connection(parser)
    parser.add_argument("names", nargs="+", metavar="NAME", help="as `pion-grpc ls` shows it")


def add_export(commands: Commands) -> None:
    """`pion-grpc export NAME FILE`."""
    parser = _command(
        commands,
        "export",
        "transfer:export_prefix",
        "write one prefix to a safetensors file",
        "Writes a prefix, including the rows of its parents, to one safetensors file, which is complete "
        "as soon as it exists.",
    )
    add_connection(parser)
    parser.add_argument("name", metavar="NAME", help="as `pion-grpc ls` shows it")
    parser.add_argument("file", metavar="FILE", type=_path, help="the file to write")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def add_import(commands: Commands) -> None:
    """`pion-grpc import FILE`."""
    parser = _command(
        commands,
        "import",
        "transfer:import_file",
        "store what `export` wrote, or restore a snapshot",
        "Stores the prefix in a file. The header and every page are checked first; a file with a single "
        "changed bit is refused. With --data, restores a snapshot of a whole store to a new data "
        "directory, without a server.",
    )
    add_connection(parser)
    parser.add_argument(
        "file",
        metavar="FILE",
        type=_path,
        help="written by `pion-grpc export` or KV.PREFIX.SAVE",
    )
    parser.add_argument(
        "--data", metavar="DIR", type=_path, help="the data directory to restore a snapshot to"
    )
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        help="store it under this name (default: the one in the file)",
    )
    parser.add_argument("--replace", action="store_true", help="replace whatever has this name")


def add_verify(commands: Commands) -> None:
    """`pion-grpc verify`."""
    parser = _command(
        commands,
        "verify",
        "verify:verify",
        "re-read every stored page against its checksum",
        "Checks a data directory, whether a server is running on it or not, and changes nothing in it. "
        "Exit status 1 if something is damaged.",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        type=_path,
        default=os.environ.get("PION_DATA") or str(default_data()),
        help="the data directory (PION_DATA; default %(default)s)",
    )


def add_rebuild(commands: Commands) -> None:
    """`pion-grpc rebuild --data DIR`."""
    parser = _command(
        commands,
        "rebuild",
        "rebuild:rebuild_catalogue",
        "rebuild a lost or damaged catalogue from the segments",
        "Rebuilds the catalogue of a data directory from its segments, checking every page of them. No "
        "server may be running on the directory. A damaged catalogue, and files that cannot be adopted, "
        "are moved to DIR/not-adopted. Rows that were never sealed, keys and recurrent states are lost "
        "with a catalogue. Exit status 1 if a file was not adopted.",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        type=_path,
        required=True,
        help="the data directory",
    )
    parser.add_argument(
        "--tenant",
        metavar="NAME",
        default="",
        help="who gets all the prefixes, as segments name no owner (default: the administrator)",
    )


def add_doctor(commands: Commands) -> None:
    """`pion-grpc doctor`."""
    parser = _command(
        commands,
        "doctor",
        "doctor:doctor",
        "check this machine, and compute sizes",
        "Shows what is installed, which device computes, which limits are too low, and how many bytes a "
        "token takes. Exit status 1 if something would not work.",
    )
    add_connection(parser)
    # Whether a server runs is one question of many here.
    parser.set_defaults(timeout=os.environ.get("PION_TIMEOUT") or "1")
    layout = parser.add_argument_group(
        "the layout to compute sizes for (default: those of well-known models)"
    )
    layout.add_argument("--model", metavar="NAME", help="a well-known model, or part of its name")
    for flag, text in (
        ("--layers", "attention layers"),
        ("--kv-heads", "K/V heads per layer"),
        ("--head-dim", "values per head"),
    ):
        layout.add_argument(flag, type=_named(_positive, "number"), metavar="N", help=text)
    layout.add_argument(
        "--dtype",
        choices=("f32", "f16", "bf16"),
        default="bf16",
        help="data type of a value (default bf16)",
    )
    layout.add_argument("--codec", default="raw", help="how rows are stored (default raw)")


def add_connection(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that talks to a server."""
    group = parser.add_argument_group("the server")
    group.add_argument(
        "--address",
        metavar="ADDRESS",
        default=os.environ.get("PION_ADDRESS") or DEFAULT_ADDRESS,
        help="HOST:PORT or unix:PATH (PION_ADDRESS; default %(default)s)",
    )
    group.add_argument("--tenant", metavar="NAME", help="the tenant to act as (PION_TENANT)")
    group.add_argument(
        "--password-file",
        metavar="FILE",
        type=_path,
        default=os.environ.get("PION_PASSWORD_FILE") or None,
        help="file with the password (PION_PASSWORD_FILE, or the password itself in PION_PASSWORD)",
    )
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_named(_positive_s, "time"),
        default=os.environ.get("PION_TIMEOUT") or "5",
        help="how long to wait for an answer, or for a server that is away (PION_TIMEOUT; default "
        "%(default)s)",
    )
    for flag, text in (
        ("--tls-ca", "certificates of the authorities to trust (PION_TLS_CA)"),
        ("--tls-cert", "the client's own certificate, for mutual TLS (PION_TLS_CERT)"),
        ("--tls-key", "the key of that certificate (PION_TLS_KEY)"),
    ):
        variable = "PION_" + flag.removeprefix("--").replace("-", "_").upper()
        group.add_argument(
            flag,
            metavar="FILE",
            type=_path,
            default=os.environ.get(variable) or None,
            help=text,
        )


def _command(
    commands: Commands, name: str, where: str, summary: str, description: str
) -> argparse.ArgumentParser:
    """Adds a command; `where`, a `module:function` of this package, is imported when it is run."""

    def run(options: argparse.Namespace) -> int:
        command: Callable[[argparse.Namespace], int]
        command = pkgutil.resolve_name(f"{__package__}.{where}")
        return command(options)

    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)
    return parser


def _positive(text: str) -> int:
    number = parse_count(text)
    if number < 1:
        raise ValueError(f"{number} is below 1")
    return number


def _positive_s(text: str) -> float:
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if 0 < seconds < math.inf:
            return seconds
    raise ValueError(f"{text!r} is not a number of seconds above 0 (--timeout, or PION_TIMEOUT)")


def _named(parse: Any, name: str) -> Any:
    """Lets argparse show why a value is refused."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error) or f"{text!r} is not a {name}") from error

    return convert


_path = _named(parse_path, "path")

COMMANDS = (
    add_serve,
    add_demo,
    add_ls,
    add_stat,
    add_drop,
    add_export,
    add_import,
    add_verify,
    add_rebuild,
    add_bench,
    add_doctor,
    add_mesh,
)
"""One function per command, in the order of `--help`."""
