"""What the server remembers of each connected client, and of all of them together.

Knows no sockets and no commands. Everything here is touched on the event loop only, but for `gone`,
which others may look at.
"""

import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pion_grpc.resp.protocol import Request
from pion_grpc.resp.reply import Version

_FIRST_NUMBER_BITS = 52  # no number leaves what a double holds exactly


class Queued(NamedTuple):
    """What came between MULTI and EXEC."""

    requests: list[Request]
    spoiled: bool
    watched: dict[bytes, int]


@dataclass(slots=True)
class Client:
    """One connection, as commands see it."""

    number: int
    peer: str
    local: str
    is_local: bool
    """Whether the peer is this host: the only one that a path means something to."""
    abort: Callable[[], None]
    """Ends the connection at once: there are peers that never take what was replied."""
    tenant: str = ""
    authenticated: bool = False
    version: Version = 2
    name: str = ""
    library: str = ""
    library_version: str = ""
    queued: list[Request] | None = None
    """Commands between MULTI and EXEC; None outside."""
    spoiled: bool = False
    """Whether one of them was refused, so that EXEC will be."""
    watched: dict[bytes, int] = field(default_factory=dict)
    """Revisions of the keys that EXEC depends on."""
    replies: bool = True
    skip_replies: int = 0
    ending: bool = False
    """Whether it has said QUIT, or ended itself: nothing after that is executed, and it is closed."""
    gone: bool = False
    """Whether its connection is lost: nobody waits for an answer any more."""
    since: float = field(default_factory=time.monotonic)
    last_command: str = ""
    last_at: float = field(default_factory=time.monotonic)

    def forget(self) -> None:
        """Back to how a connection begins (RESET)."""
        self.tenant, self.authenticated, self.version = "", False, 2
        self.name = ""
        self.leave_transaction()
        self.replies, self.skip_replies = True, 0

    def leave_transaction(self) -> Queued:
        """Ends MULTI, forgets the watched keys, and returns what there was."""
        left = Queued(self.queued or [], self.spoiled, self.watched)
        self.queued, self.spoiled, self.watched = None, False, {}
        return left

    def line(self) -> str:
        """Returns the line of CLIENT LIST."""
        now = time.monotonic()
        queued = -1 if self.queued is None else len(self.queued)
        return (
            f"id={self.number} addr={self.peer} laddr={self.local} fd=-1 name={self.name} "
            f"age={int(now - self.since)} idle={int(now - self.last_at)} flags=N db=0 sub=0 psub=0 "
            f"multi={queued} qbuf=0 qbuf-free=0 argv-mem=0 obl=0 oll=0 omem=0 tot-mem=0 events=r "
            f"cmd={self.last_command or 'NULL'} user={self.tenant or 'default'} redir=-1 "
            f"resp={self.version} lib-name={self.library} lib-ver={self.library_version}"
        )


class Clients:
    """All connected clients of a process, by their number, which is never used again.

    With `shared`, other processes answer at the same address: so that no number of theirs is one of
    these, they are counted from a random one on.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._numbers = itertools.count(secrets.randbits(_FIRST_NUMBER_BITS) if shared else 1)
        self._clients: dict[int, Client] = {}
        self.accepted = 0

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._clients.values()))

    def __len__(self) -> int:
        return len(self._clients)

    def next_number(self) -> int:
        """Returns a number for a new client."""
        return next(self._numbers)

    def add(self, client: Client) -> None:
        """Remembers a client."""
        self._clients[client.number] = client
        self.accepted += 1

    def remove(self, client: Client) -> None:
        """Forgets a client."""
        self._clients.pop(client.number, None)

    def get(self, number: int) -> Client | None:
        """Returns the client of a number, if it is still connected."""
        return self._clients.get(number)
