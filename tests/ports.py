"""Ports for servers that must know theirs before they start."""

import contextlib
import os
import random
import socket

_WORKERS_MAX = 4
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS_MAX
_PER_WORKER = 3_000
_FIRST = 20_000 + _WORKER * _PER_WORKER
"""Below those that systems give to whoever asks for any; each process of a run has its own."""
_given: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Ports one after the other that nobody has, and that nobody else is given."""
    while True:
        first = random.randrange(_FIRST, _FIRST + _PER_WORKER - count)
        ports = list(range(first, first + count))
        if _given.isdisjoint(ports) and all(map(_is_free, ports)):
            _given.update(ports)
            return ports


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False
