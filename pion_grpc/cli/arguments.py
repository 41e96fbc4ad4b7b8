"""The arguments of every command: quick to import, so that `--help` and errors are immediate."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pion_grpc.cli.bench import add_bench
from pion_grpc.cli.mesh import add_mesh
from pion_grpc.config import Config, default_data, environment_settings
from pion_grpc.errors import CannotStart

Commands = Any  # argparse's subparsers action, which has no public name

DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_serve(commands: Commands) -> None:
    """`pion-grpc serve`: every field of the configuration is a flag."""
    parser = commands.add_parser(
        "serve", help="run a server", description="Runs a server.", allow_abbrev=False
    )
    for field in dataclasses.fields(Config):
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
        default = field.default
        if default is dataclasses.MISSING and callable(field.default_factory):
            default = field.default_factory()
        shown = f" (default {default})" if default not in (None, 0, "") else ""
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
        _demo,
        "show the main job on a real model",
        "Starts a server of its own, lets one process prefill a prompt and store it, and a second one "
        "fetch it and answer; compares both answers. Exit status 1 if they differ.",
    )


def add_ls(commands: Commands) -> None:
    """`pion-grpc ls [PREFIX]`."""
    parser = _command(commands, "ls", _ls, "list what is stored", "Lists prefixes by name.")
    add_connection(parser)
    parser.add_argument("prefix", nargs="?", default="", help="only names that begin so")


def add_stat(commands: Commands) -> None:
    """`pion-grpc stat`."""
    parser = _command(
        commands,
        "stat",
        _stat,
        "show what the server saved, and what it holds",
        "Shows the receipt (hits, tokens, bytes, prefill time avoided) and the budgets in use.",
    )
    add_connection(parser)
    parser.add_argument(
        "--reset", action="store_true", help="show the receipt, and set its counters to zero"
    )


def add_drop(commands: Commands) -> None:
    """`pion-grpc drop NAME...`."""
    parser = _command(
        commands,
        "drop",
        _drop,
        "take prefixes out",
        "Takes names and their matches away at once. Exit status 1 if one was not stored.",
    )
    add_connection(parser)
    parser.add_argument("names", nargs="+", metavar="NAME", help="as `pion-grpc ls` shows it")


def add_export(commands: Commands) -> None:
    """`pion-grpc export NAME FILE`."""
    parser = _command(
        commands,
        "export",
        _export,
        "write one prefix to a safetensors file",
        "Writes a prefix, the rows of its parents included, to one safetensors file: complete under "
        "its name, or not there.",
    )
    add_connection(parser)
    parser.add_argument("name", metavar="NAME", help="as `pion-grpc ls` shows it")
    parser.add_argument("file", metavar="FILE", type=Path, help="where to")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def add_import(commands: Commands) -> None:
    """`pion-grpc import FILE`."""
    parser = _command(
        commands,
        "import",
        _import,
        "store a file that `export` wrote",
        "Stores the prefix of a file. Every page and the header are checked first; a file in which a "
        "bit has changed is refused. With --data, makes a data directory of a snapshot, for a server "
        "to be started on.",
    )
    add_connection(parser)
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="what `pion-grpc export` or KV.PREFIX.SAVE wrote"
    )
    parser.add_argument(
        "--data", metavar="DIR", type=Path, help="where a snapshot becomes a data directory"
    )
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        help="store it under this name (default: the one in the file)",
    )
    parser.add_argument(
        "--replace", action="store_true", help="replace what is stored under the name"
    )


def add_verify(commands: Commands) -> None:
    """`pion-grpc verify [DIR]`."""
    parser = _command(
        commands,
        "verify",
        _verify,
        "re-read every stored page against its checksum",
        "Checks a data directory, with or without a running server, and changes nothing in it. Exit "
        "status 1 if something is damaged.",
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=lambda text: Path(text).expanduser(),
        default=os.environ.get("PION_DATA") or str(default_data()),
        help="data directory (default %(default)s)",
    )


def add_rebuild(commands: Commands) -> None:
    """`pion-grpc rebuild --data DIR`."""
    parser = _command(
        commands,
        "rebuild",
        _rebuild,
        "make a lost or damaged catalogue anew from the segments",
        "Makes the catalogue of a data directory from its segments, of which every page is checked; "
        "no server may run on it. What cannot be adopted, and a damaged catalogue, is moved to "
        "DIR/not-adopted. Rows that were never sealed, keys and recurrent states are lost with a "
        "catalogue. Exit status 1 if something was not adopted.",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        type=lambda text: Path(text).expanduser(),
        required=True,
        help="the data directory",
    )
    parser.add_argument(
        "--tenant",
        metavar="NAME",
        default="",
        help="whose all prefixes become: segments do not say it (default: the administrator's)",
    )


def add_doctor(commands: Commands) -> None:
    """`pion-grpc doctor`."""
    parser = _command(
        commands,
        "doctor",
        _doctor,
        "check this machine, and compute sizes",
        "Says what is installed, what computes on what, which limits are too low, and how many bytes a "
        "token takes. Exit status 1 if something would not work.",
    )
    add_connection(parser)
    layout = parser.add_argument_group("a layout to compute sizes of (default: well-known models)")
    layout.add_argument("--model", metavar="NAME", help="a well-known model; a part of its name")
    for flag, text in (
        ("--layers", "attention layers"),
        ("--kv-heads", "K/V heads per layer"),
        ("--head-dim", "values per head"),
    ):
        layout.add_argument(flag, type=_named(_positive, "number"), metavar="N", help=text)
    layout.add_argument(
        "--dtype", choices=("f32", "f16", "bf16"), default="bf16", help="of a value (default bf16)"
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
    group.add_argument("--tenant", metavar="NAME", help="who asks (PION_TENANT)")
    group.add_argument(
        "--password-file",
        metavar="FILE",
        type=lambda text: Path(text).expanduser(),
        default=os.environ.get("PION_PASSWORD_FILE") or None,
        help="file with the password (or PION_PASSWORD)",
    )
    for flag, text in (
        ("--tls-ca", "certificates that the server's must come from (PION_TLS_CA)"),
        ("--tls-cert", "our own certificate, for mutual TLS (PION_TLS_CERT)"),
        ("--tls-key", "the key of that certificate (PION_TLS_KEY)"),
    ):
        variable = "PION_" + flag.removeprefix("--").replace("-", "_").upper()
        group.add_argument(
            flag,
            metavar="FILE",
            type=lambda text: Path(text).expanduser(),
            default=os.environ.get(variable) or None,
            help=text,
        )


def _command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)
    return parser


def _demo(options: argparse.Namespace) -> int:
    from pion_grpc.cli.demo import demo

    return demo(options)


def _ls(options: argparse.Namespace) -> int:
    from pion_grpc.cli.inspect import ls

    return ls(options)


def _stat(options: argparse.Namespace) -> int:
    from pion_grpc.cli.inspect import stat

    return stat(options)


def _drop(options: argparse.Namespace) -> int:
    from pion_grpc.cli.inspect import drop

    return drop(options)


def _export(options: argparse.Namespace) -> int:
    from pion_grpc.cli.transfer import export_prefix

    return export_prefix(options)


def _import(options: argparse.Namespace) -> int:
    if options.data is not None:
        from pion_grpc.cli.restoring import restore

        return restore(options)
    from pion_grpc.cli.transfer import import_prefix

    return import_prefix(options)


def _verify(options: argparse.Namespace) -> int:
    from pion_grpc.cli.verify import verify

    return verify(options)


def _rebuild(options: argparse.Namespace) -> int:
    from pion_grpc.cli.rebuild import rebuild_catalogue

    return rebuild_catalogue(options)


def _doctor(options: argparse.Namespace) -> int:
    from pion_grpc.cli.doctor import doctor

    return doctor(options)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is below 1")
    return number


def _named(parse: Any, name: str) -> Any:
    """Lets argparse show why a value is refused."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error) or f"{text!r} is no {name}") from error

    return convert


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
