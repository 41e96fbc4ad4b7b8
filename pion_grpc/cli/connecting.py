"""The server that a command talks to, and what to do where it does not answer.

The one decision: every error of the client becomes one sentence that says what to do next, here and
nowhere else.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pion_client import Client, Tls, errors
from pion_client.connection import Connection
from pion_grpc.cli.arguments import DEFAULT_ADDRESS
from pion_grpc.cli.failure import CommandFailed
from pion_grpc.cli.output import printable


@contextlib.contextmanager
def connected(options: argparse.Namespace, *, timeout_s: float = 5.0) -> Iterator[Client]:
    """Lends a client of the server that `--address` names.

    Raises:
        CommandFailed: the server cannot be reached, or refuses.
    """
    try:
        client = Client(
            options.address,
            tenant=options.tenant,
            password=password(options),
            tls=tls(options),
            timeout_s=timeout_s,
        )
    except ValueError as error:
        raise CommandFailed(f"--address or --tls-…: {error}", reason="INVALID") from error
    with explained(options), client:
        yield client


class Wire(NamedTuple):
    """A bare connection, and who asks through it."""

    connection: Connection
    tenant: str


@contextlib.contextmanager
def wired(options: argparse.Namespace) -> Iterator[Wire]:
    """Lends a connection to the same server, for what moves bytes by itself.

    Raises:
        CommandFailed: as `connected` does.
    """
    tenant = os.environ.get("PION_TENANT", "") if options.tenant is None else options.tenant
    secret = password(options) or os.environ.get("PION_PASSWORD")
    try:
        connection = Connection(options.address, tenant=tenant, password=secret, tls=tls(options))
    except ValueError as error:
        raise CommandFailed(f"--address or --tls-…: {error}", reason="INVALID") from error
    with explained(options), contextlib.closing(connection):
        yield Wire(connection, tenant)


@contextlib.contextmanager
def explained(options: argparse.Namespace) -> Iterator[None]:
    """Turns errors of the client into what a person can act on."""
    try:
        yield
    except errors.PionError as error:
        raise CommandFailed(_advice(options.address, error), reason=error.reason) from error


def password(options: argparse.Namespace) -> str | None:
    """Returns the password from its file; None leaves it to the client, which asks the environment."""
    path: Path | None = options.password_file
    if path is None:
        return None
    try:
        return path.read_text().rstrip()
    except OSError as error:
        raise CommandFailed(f"--password-file: {error}", reason="INVALID") from error


def tls(options: argparse.Namespace) -> Tls | None:
    """Returns the certificates that the flags or the environment name; a Unix socket needs none."""
    given = Tls(options.tls_ca, options.tls_cert, options.tls_key)
    return given if given != Tls() and not options.address.startswith("unix:") else None


def one_node_asked(address: str) -> str:
    """What to say beside that nothing is there: through a proxy that is one node's answer."""
    if "," in address:
        return ""
    return (
        "through a mesh's proxy only the node that the name belongs to was asked: ask all of them with "
        "--address SERVER,SERVER,… (nodes.txt of the mesh)"
    )


def _advice(address: str, error: errors.PionError) -> str:
    if isinstance(error, errors.Unavailable) and error.from_transport:
        listen = "" if address == DEFAULT_ADDRESS else f" --listen {address}"
        return (
            f"no server answers at {address}: start one with `pion-grpc serve{listen}`, or name "
            "another with --address or PION_ADDRESS; one with TLS answers nobody who does not trust "
            "it, or whose certificate it does not know (--tls-ca, --tls-cert, --tls-key)"
        )
    if isinstance(error, errors.DeadlineExceeded):
        return f"the server at {address} did not answer in time: is it one of ours, and is it well?"
    if isinstance(error, errors.NotAuthenticated):
        return (
            f"the server at {address} wants a password: set PION_PASSWORD (and PION_TENANT where there "
            "are tenants), or use --password-file"
        )
    return printable(str(error))
