"""The sockets of the RESP side: bound before anything is served, so that a busy port refuses to start.

They know nothing of what is spoken on them: one process binds them, and may hand them to others.
"""

import errno
import socket
from pathlib import Path
from typing import NamedTuple

import structlog

from pion_grpc.config import Address
from pion_grpc.errors import CannotStart
from pion_grpc.resp.lane import RECEIVE_BUFFER_BYTES

BACKLOG = 1_024
DRAWS_MAX = 64
"""Attempts to find a block of free ports."""

UNBOUND = (OSError, ValueError, OverflowError)
"""What is raised where an address cannot be bound."""

_log = structlog.get_logger()


class Block(NamedTuple):
    """The sockets of one worker: RESP, and with TCP the binary lane and this worker's own."""

    resp: socket.socket
    lane: socket.socket | None = None
    affinity: socket.socket | None = None


def bind_blocks(listen: Address, workers: int) -> list[Block]:
    """Returns the sockets of each worker; with port 0 a run of ports that are all free.

    RESP and the binary lane are the same sockets for all of them. The ports after a given one may be
    taken: clients do without them.

    Raises:
        CannotStart: the address itself cannot be bound.
    """
    any_port = not listen.path and listen.port == 0
    for _ in range(DRAWS_MAX if any_port else 1):
        resp = bind(listen)
        if resp.family == socket.AF_UNIX:
            return [Block(resp)] * workers
        port = port_of(resp)
        lane = _bound_if_free(listen._replace(port=port + 1))
        own = [_bound_if_free(listen._replace(port=port + 2 + worker)) for worker in range(workers)]
        if not any_port or None not in (lane, *own):
            if lane is not None:
                lane.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            return [Block(resp, lane, affinity) for affinity in own]
        for bound in filter(None, [resp, lane, *own]):
            bound.close()
    raise CannotStart(f"cannot listen on {listen} (RESP): no {2 + workers} free ports in a row")


def _bound_if_free(listen: Address) -> socket.socket | None:
    try:
        return bind(listen)
    except CannotStart as problem:
        _log.warning(
            "a port beside the RESP port stays closed", port=listen.port, problem=str(problem)
        )
        return None


def bind(listen: Address) -> socket.socket:
    """Returns a socket that listens on an address.

    Raises:
        CannotStart: it cannot be bound.
    """
    try:
        if listen.path:
            remove_dead_socket(Path(listen.path))
        return bound(listen)
    except UNBOUND as error:
        raise CannotStart(
            f"cannot listen on {listen} (RESP): {why_not_bound(listen, error)}"
        ) from error


def bound(listen: Address) -> socket.socket:
    """Returns a socket that listens on an address.

    Raises:
        OSError, ValueError, OverflowError: it cannot be bound; `why_not_bound` says why.
    """
    bound = socket.socket(listen.family)
    try:
        if not listen.path:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(listen.path or (listen.host, listen.port))
        bound.listen(BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound


def why_not_bound(listen: Address, error: Exception) -> str:
    """Says in words why an address could not be bound, and what to do where that is known."""
    if isinstance(error, socket.gaierror | UnicodeError):
        return "this machine does not know that name"
    if not isinstance(error, OSError):
        return str(error)
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine does not have that address, or not yet"
    if error.errno != errno.EADDRINUSE:
        return error.strerror or str(error)
    if listen.path:
        return "a file is there that is no socket: choose another path"
    return "another program listens there: stop it, or choose another port"


def bound_address(bound: socket.socket, listen: Address) -> Address:
    """Returns the address that a socket got, of the one that was asked for."""
    return listen._replace(port=port_of(bound))


def port_of(bound: socket.socket) -> int:
    """Returns the port of a socket; 0 for a Unix socket."""
    return 0 if bound.family == socket.AF_UNIX else int(bound.getsockname()[1])


def remove_dead_socket(path: Path) -> None:
    """Removes a socket that nobody listens on any more.

    Raises:
        CannotStart: somebody does.
    """
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise CannotStart(f"another server listens on {path}: stop it, or choose another path")
    path.unlink()
