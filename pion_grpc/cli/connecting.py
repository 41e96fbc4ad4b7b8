"""The server that a command talks to, and what to do when it does not answer.

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
from pion_grpc.config import parse_address


@contextlib.contextmanager
def connected(options: argparse.Namespace) -> Iterator[Client]:
    """Yields a client of the server that `--address` names.

    Raises:
        CommandFailed: the server cannot be reached, or refuses.
    """
    try:
        client = Client(
            options.address,
            tenant=options.tenant,
            password=password(options),
            tls=tls(options),
            timeout_s=options.timeout,
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
    """Yields a connection to the same server, for code that reads and writes its streams itself.

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
        raise CommandFailed(_advice(options, error), reason=error.reason) from error


def password(options: argparse.Namespace) -> str | None:
    """Returns the password from its file; None leaves it to the client, which asks the environment."""
    path: Path | None = options.password_file
    if path is None:
        return None
    try:
        return path.read_text().rstrip()
    except OSError as error:
        raise CommandFailed(
            f"--password-file: {path} cannot be read: {error.strerror}", reason="INVALID"
        ) from error
    except UnicodeDecodeError as error:
        raise CommandFailed(f"--password-file: {path} is no text", reason="INVALID") from error


def tls(options: argparse.Namespace) -> Tls | None:
    """Returns the certificates that the flags or the environment name; a Unix socket needs none."""
    given = Tls(options.tls_ca, options.tls_cert, options.tls_key)
    return given if given != Tls() and not options.address.startswith("unix:") else None


def one_node_asked(options: argparse.Namespace) -> str:
    """Returns what "nothing is there" may mean through the proxy of a mesh; empty outside of one.

    In a mesh clients show a certificate, and a proxy passes on the answer of a single node.
    """
    if "," in options.address or options.tls_cert is None:
        return ""
    return (
        "through a mesh's proxy only the node that the name belongs to was asked: to ask all of them, "
        "use --address SERVER,SERVER,… (the mesh's nodes.txt lists them)"
    )


def _advice(options: argparse.Namespace, error: errors.PionError) -> str:
    address: str = options.address
    if isinstance(error, errors.Unavailable) and error.from_transport:
        problem = str(error).rpartition("last error: ")[2]
        nobody = "refused" in problem or "No such file" in problem
        if "," in address:
            return f"one or more of {address} do not answer: {printable(problem)}"
        text = (
            f"no server answers at {address}{'' if nobody else f' ({printable(problem)})'}: "
            f"{how_to_start(address)}name another with --address or PION_ADDRESS"
        )
        if tls(options) is not None:
            text += (
                "; if one is running there, it may have no TLS, or one side does not accept the other's "
                "certificate (--tls-ca, --tls-cert, --tls-key)"
            )
        elif not nobody:
            text += "; if one is running there, it may have TLS: --tls-ca (PION_TLS_CA)"
        return text
    if isinstance(error, errors.DeadlineExceeded):
        return f"the server at {address} did not answer in time: is it busy, or another program?"
    if isinstance(error, errors.NotAuthenticated):
        return (
            f"the server at {address} did not accept the password, or needs one: set PION_PASSWORD (and "
            "PION_TENANT, if there are tenants), or use --password-file"
        )
    if error.from_transport:
        told = printable(str(error))
        return f"what answers at {address} is no pion-grpc server, or a proxy without one: {told}"
    return printable(str(error))


def how_to_start(address: str) -> str:
    """Returns how to start a server at an address, if that is one of this machine."""
    if address == DEFAULT_ADDRESS:
        return "start one with `pion-grpc serve`, or "
    try:
        here = parse_address(address).is_local
    except ValueError:  # several, or one without a port
        here = False
    return f"start one with `pion-grpc serve --listen {address}`, or " if here else ""
