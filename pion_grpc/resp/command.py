"""What a command is: a name, how many words it takes, a handler, and where that may run.

The table of all commands is in `resp/commands`. A handler takes a `Call` and returns a reply, or raises
what `resp/errors.py` turns into one. It never sees a socket, and the arguments of its own command only.

The one decision to understand: *where* a handler runs. On the event loop only what touches the
connection itself, and quick keyed reads; nothing there ever writes to the database or moves bytes. A
handler that finds on the loop that it needs more than that raises `Elsewhere`, and is run again on a
worker thread. Commands that change the keyspace run on one thread of their own, many in a transaction.
"""

import enum
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pion_grpc.config import Address
from pion_grpc.core.access import Access
from pion_grpc.core.attend import Attend
from pion_grpc.core.blobs import WrittenBlob
from pion_grpc.core.copying import Copier
from pion_grpc.core.keys import Keys
from pion_grpc.core.keyspace import Keyspace
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.sessions import Sessions
from pion_grpc.core.states import RecurrentStates
from pion_grpc.resp.client import Client, Clients, Queued
from pion_grpc.resp.protocol import NOT_AN_INTEGER, Argument, parse_int
from pion_grpc.resp.reply import CRLF, Buffer, Reply, ReplyError, bulk_header

CLIENTS_MAX = 10_000
STEP_BYTES = 2 << 20
"""What a streamed reply has in memory at once, twice: one step is read while the other is sent."""


class Where(enum.Enum):
    """Where a handler may run."""

    LOOP = "loop"
    """On the event loop and nowhere else: it touches the connection."""
    QUICK = "quick"
    """On the event loop if nothing is under way for the connection, else on a worker."""
    WORKER = "worker"
    """On a worker thread."""


class Uses(enum.Enum):
    """What a handler needs of the keyspace."""

    NOTHING = "nothing"
    READS = "reads"
    WRITES = "writes"


class Elsewhere(Exception):
    """This cannot be answered on the event loop; it has to be asked again on a worker."""


class Streamed:
    """A reply that is produced while the peer takes it, and closed at the end whatever happens."""

    def __init__(self, pieces: Iterator[Buffer], close: Callable[[], None]) -> None:
        self.started = False
        """Whether some of it may be on its way already: then an error can only cut it off."""
        self._pieces = pieces
        self._close = close

    def step(self) -> list[Buffer]:
        """Returns the next pieces, none at the end. Raises what reading raises."""
        pieces: list[Buffer] = []
        size = 0
        for piece in self._pieces:
            pieces.append(piece)
            size += len(piece)
            if size >= STEP_BYTES:
                break
        self.started = True
        return pieces

    def close(self) -> None:
        """Gives back what it holds; twice is once."""
        self._close()


class StreamedValue(Streamed):
    """One bulk string of known size."""

    def __init__(
        self, size: int, pieces: Callable[[], Iterator[Buffer]], close: Callable[[], None]
    ) -> None:
        self._payload = pieces
        super().__init__(self._framed(size), close)

    def joined(self) -> bytes:
        """Returns the value, to be part of a larger reply."""
        try:
            return b"".join(self._payload())
        finally:
            self.close()

    def _framed(self, size: int) -> Iterator[Buffer]:
        yield bulk_header(size)
        yield from self._payload()
        yield CRLF


Answer: TypeAlias = Reply | Streamed


@dataclass(frozen=True, slots=True)
class Facts:
    """What INFO and HELLO say of the server."""

    version: str
    build: str
    port: int
    worker: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def uptime_s(self) -> int:
        """Whole seconds since the start."""
        return int(time.monotonic() - self.started)


@dataclass(frozen=True, slots=True)
class RespSettings:
    """What can be set about this wire."""

    listen: Address
    """Port 0 picks one."""
    sides_max: int = 0
    """Sides that may be declared, the least recently used going first; 0: no limit."""
    namespace_prefix: str = ""
    """Names must begin so."""
    request_bytes_max: int = 1 << 30
    reply_bytes_max: int = 1 << 30
    """Of values that a reply has in memory: a request of a few bytes can ask for any number. Single
    ones and rows are streamed and not bounded by it."""
    memory_max: int = 0
    """What CONFIG GET maxmemory says: the budget on disk, which is what bounds this server."""
    export: bool = True
    """Whether clients on this host get files of their own."""
    logged: bool = True
    """Whether COMMIT promises anything."""
    worker: int = 0
    clients_max: int = CLIENTS_MAX
    """Connections at once; fewer where the system allows fewer open files."""
    lane_stall_s: float = 2.0
    """A frame of the binary lane of which nothing more comes for so long will not be finished."""


@dataclass(frozen=True, slots=True)
class Services:
    """What handlers work with."""

    commands: "Sequence[Command]"
    """The table itself."""
    store: PrefixStore
    sessions: Sessions
    states: RecurrentStates
    copier: Copier
    keyspace: Keyspace
    access: Access
    attend: Attend | None
    """None: this server does not compute attention."""
    clients: Clients
    facts: Facts
    settings: RespSettings
    pause: Callable[[float], None]
    """Executes nothing for so many seconds."""
    is_paused: Callable[[], bool]
    run_queued: "Callable[[Call], Answer]"
    """Executes what came between MULTI and EXEC."""


@dataclass(slots=True)
class Call:
    """One command of one client, about to be executed."""

    services: Services
    client: Client
    command: "Command"
    arguments: list[Argument]
    """The words after the name."""
    on_loop: bool = False
    keys: Keys | None = None
    """The keyspace, for commands that use it."""
    large: dict[int, WrittenBlob] = field(default_factory=dict)
    """Arguments that are in files of their own already, by their index."""
    queued: Queued | None = None
    """What EXEC executes."""
    inside: bool = False
    """Whether EXEC executes it: then only its transaction sees what was written before."""
    held_bytes: int = 0
    """Of values that the reply has in memory so far."""

    def wanted(self) -> bool:
        """Says whether anybody waits for the answer."""
        return not self.client.gone

    @property
    def tenant(self) -> str:
        """Whose prefixes and keys these are."""
        return self.client.tenant

    @property
    def keyspace(self) -> Keys:
        """The keys of the client's tenant, inside a transaction."""
        assert self.keys is not None, "a command that uses keys says so in its entry"
        return self.keys

    def value(self, index: int) -> bytes | WrittenBlob:
        """Returns an argument as the value of a key: bytes, or a file that has them."""
        return self.large.get(index) or self.raw(index)

    def hold(self, size: int) -> None:
        """Counts bytes of values that the reply will have in memory, or refuses to answer."""
        self.held_bytes += size
        most = self.services.settings.reply_bytes_max
        if self.held_bytes > most:
            raise ReplyError(f"OOM the reply would exceed {most} bytes: ask for less at once")

    @property
    def count(self) -> int:
        """Number of arguments."""
        return len(self.arguments)

    def raw(self, index: int) -> bytes:
        """Returns an argument as bytes."""
        return bytes(self.arguments[index])

    def word(self, index: int) -> str:
        """Returns an argument in upper case, to be compared with keywords; empty if it cannot be one."""
        if index >= len(self.arguments) or len(self.arguments[index]) > 64:
            return ""
        return self.raw(index).decode("latin-1").upper()

    def text(self, index: int) -> str:
        """Returns an argument as text; `is_text` tells whether the bytes were."""
        return self.raw(index).decode("utf-8", "surrogateescape")

    def integer(
        self,
        index: int,
        minimum: int = -(2**63),
        maximum: int = 2**63 - 1,
        refusal: str = NOT_AN_INTEGER,
    ) -> int:
        """Returns an argument as an integer, or raises a ReplyError with the text `refusal`."""
        return parse_int(self.arguments[index], minimum, maximum, refusal)


@dataclass(frozen=True, slots=True)
class Command:
    """One entry of the table."""

    name: str
    arity: int
    """Words, the name included; negative: at least so many."""
    run: Callable[[Call], Answer]
    where: Where = Where.WORKER
    uses: Uses = Uses.NOTHING
    usage: str = ""
    """What follows `requires:` when arguments are missing; without it Redis's own words."""
    keys: tuple[int, int, int] = (0, 0, 0)
    """First key, last key and step, as COMMAND says it."""
    large_values: tuple[int, int] = (0, 0)
    """First argument, after the name, that may be a large value, and the step to the next; 0: it is
    the only one."""
    reads_back: "Callable[[Call], bool]" = lambda _call: False
    """Whether it answers with what a key held, be it large: then nothing is executed along with it."""
    grows: bool = False
    """Whether it makes the keyspace larger: refused when there is no room."""
    for_tenants: bool = False
    """Whether tenants may use it."""
    before_login: bool = False
    """Whether a client may use it that has not said who it is."""

    def takes(self, words: int) -> bool:
        """Whether so many words, the name included, are right."""
        return words == self.arity if self.arity > 0 else words >= -self.arity

    def refusal_of_words(self) -> str:
        """Returns what to say when they are not."""
        if self.usage:
            return f"ERR {self.name} requires: {self.usage}"
        return f"ERR wrong number of arguments for '{self.name.lower()}' command"


for_all = functools.partial(Command, for_tenants=True)
"""An entry that tenants may use as well."""
reader = functools.partial(for_all, uses=Uses.READS, keys=(1, 1, 1))
"""One that reads the key which is its first argument; `keys` names others."""
writer = functools.partial(for_all, uses=Uses.WRITES, keys=(1, 1, 1))
"""One that changes that key."""


def is_text(text: str) -> bool:
    """Whether what `Call.text` returned was UTF-8."""
    return text.isascii() or not any("\udc80" <= character <= "\udcff" for character in text)


def syntax_error() -> ReplyError:
    """What Redis says of options that make no sense."""
    return ReplyError("ERR syntax error")
