"""`pion-grpc mesh`: one small file becomes the configuration of a shelf of machines.

`nodes` reads the file, `envoy` and `services` say what follows from it, `certificates` signs, `render`
is the command. This module is imported whenever the command line is; the others when they are used.
"""

import argparse
from pathlib import Path
from typing import Any

Commands = Any  # argparse's subparsers action, which has no public name


def add_mesh(commands: Commands) -> None:
    """`pion-grpc mesh`."""
    parser = commands.add_parser(
        "mesh",
        help="make certificates, proxy configurations and services for several machines",
        description="Makes what the nodes of a mesh need, from one file that names them.",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(metavar="COMMAND", required=True)
    _add(
        kinds,
        "render",
        _render,
        "write proxy and service definitions",
        "Writes a directory per node: Envoy's configuration, and what starts server and proxy. What has "
        "not changed is left alone; Envoys that watch what has changed follow without a restart.",
    )
    certs = _add(
        kinds,
        "certs",
        _certs,
        "make the certificates of a private network",
        "Makes an authority, unless there is one, and a certificate for each node. What has a month "
        "left and the right names is kept.",
    )
    certs.add_argument(
        "--client",
        metavar="NAME",
        action="append",
        default=[],
        help="a client to make one for; as often as there are",
    )
    certs.add_argument(
        "--days", type=_days, default=397, metavar="N", help="valid for (default %(default)s)"
    )
    certs.add_argument("--renew", action="store_true", help="make them anew, good or not")


def _add(kinds: Commands, name: str, run: Any, summary: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(
        name, help=summary, description=text, allow_abbrev=False
    )
    parser.add_argument("nodes", metavar="NODES.toml", type=Path, help="what names the nodes")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where to")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)
    return parser


def _render(options: argparse.Namespace) -> int:
    from pion_grpc.cli.mesh.render import render

    return render(options)


def _certs(options: argparse.Namespace) -> int:
    from pion_grpc.cli.mesh.render import certs

    return certs(options)


def _days(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 3_650:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days, 1 to 3650")
    return int(text)
