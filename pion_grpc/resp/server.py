"""The server of this wire: its threads, its addresses, and stopping in order.

One thread runs the event loop, a handful of workers move bytes, one thread writes keys. Addresses are
bound before anything is served, so that a busy port refuses to start.
"""

import asyncio
import contextlib
import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import structlog
import uvloop

from pion_grpc import __version__
from pion_grpc.core.access import Access
from pion_grpc.core.attend import Attend
from pion_grpc.core.copying import Copier
from pion_grpc.core.keyspace import Keyspace, KeyWriter
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.sessions import Sessions
from pion_grpc.core.states import RecurrentStates
from pion_grpc.errors import CannotStart
from pion_grpc.resp.client import Clients
from pion_grpc.resp.command import Facts, Options, Services
from pion_grpc.resp.commands.table import COMMANDS
from pion_grpc.resp.connection import Connection, Engine
from pion_grpc.resp.dispatch import Dispatcher
from pion_grpc.resp.lane import RECEIVE_BUFFER_BYTES, LaneConnection, LaneEngine
from pion_grpc.resp.protocol import RequestLimits

WORKERS = 8
"""Threads that move bytes: as many clients are served from disk at once."""
BACKLOG = 1_024
FILES_MAX = 65_536
"""Open files that a server can make use of."""
DRAWS_MAX = 64
"""Attempts to find a block of free ports."""
TICK_S = 1.0
BUILD = "grpc"
"""What stands behind the version where clients expect a build."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RespSettings:
    """What can be set about this wire."""

    listen: str
    """HOST:PORT, or unix:PATH; port 0 picks one."""
    sides_max: int = 0
    """Sides that may be declared, the least recently used going first; 0: no limit."""
    namespace_prefix: str = ""
    request_bytes_max: int = 1 << 30
    reply_bytes_max: int = 1 << 30
    """Of values that a reply has in memory; single ones and rows are streamed and not bounded by it."""
    memory_max: int = 0
    """What clients are told that this server may use."""
    export: bool = True
    """Whether clients on this host get files of their own."""
    logged: bool = True
    """Whether a commit promises anything."""
    worker: int = 0
    clients_max: int = 10_000
    """Connections at once; fewer where the system allows fewer open files."""
    lane_stall_s: float = 2.0
    """A frame of the binary lane of which nothing more comes for so long will not be finished."""


class RespServer:
    """The RESP side of one server process."""

    def __init__(
        self,
        store: PrefixStore,
        states: RecurrentStates,
        access: Access,
        settings: RespSettings,
        attend: Attend | None = None,
        sockets: "Block | None" = None,
    ) -> None:
        """Binds the address, without serving yet.

        Raises:
            CannotStart: the address cannot be bound.
        """
        self._settings = settings
        self.sessions = Sessions(store, sides_max=settings.sides_max)
        self.keyspace = Keyspace(store)
        self._owns_address = sockets is None
        self._sockets = sockets or bind_blocks(settings.listen, 1)[0]
        self.address = address_of(self._sockets.resp, settings.listen)
        self._paused_until = 0.0
        self._loop = uvloop.new_event_loop()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="resp")
        self._writer = KeyWriter(self.keyspace)
        self._connections: set[Connection] = set()
        self._thread = threading.Thread(target=self._run, name="resp-loop")
        self._started = threading.Event()
        self._servers: list[asyncio.AbstractServer] = []
        services = Services(
            COMMANDS,
            store,
            self.sessions,
            states,
            Copier(store, self.sessions),
            self.keyspace,
            access,
            attend,
            Clients(shared=not self._owns_address),
            Facts(__version__, BUILD, port_of(self._sockets.resp), settings.worker),
            Options(
                settings.namespace_prefix,
                settings.memory_max,
                settings.export,
                settings.logged,
                settings.reply_bytes_max,
            ),
            pause=self._pause,
            is_paused=lambda: self._loop.time() < self._paused_until,
            run_queued=lambda call: dispatcher.answer_queued(call),
        )
        dispatcher = Dispatcher(services, COMMANDS)
        limits = RequestLimits(request_bytes_max=settings.request_bytes_max)
        clients_max = min(settings.clients_max, raise_files_limit() // 2)
        self._engine = Engine(
            self._loop,
            self._workers,
            self._writer,
            dispatcher,
            limits,
            self._connections,
            clients_max,
        )
        self._lane_engine = LaneEngine(
            self._loop,
            self._workers,
            access,
            attend,
            set(),
            clients_max,
            settings.lane_stall_s,
        )
        recovered = self.sessions.totals().since_start.recovered
        if recovered and store.is_first:
            _log.info("WAL replayed", records=recovered)

    @property
    def is_running(self) -> bool:
        """Whether it has been started, and not stopped."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begins to serve; returns when clients can connect."""
        self._writer.start()
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        """Accepts nobody more, answers what has come, and returns when everything is closed."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._writer.stop()
        self._workers.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def tick(self) -> None:
        """Removes keys whose time has come: call it about once a second."""
        self.keyspace.expire()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._servers = self._loop.run_until_complete(self._listen())
        self._loop.call_soon(self._started.set)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _listen(self) -> list[asyncio.AbstractServer]:
        def connection() -> Connection:
            return Connection(self._engine)

        def frames() -> LaneConnection:
            return LaneConnection(self._lane_engine)

        resp, lane, affinity = self._sockets
        if resp.family == socket.AF_UNIX:
            return [await self._loop.create_unix_server(connection, sock=resp, backlog=BACKLOG)]
        servers = [await self._loop.create_server(connection, sock=resp, backlog=BACKLOG)]
        if lane is not None:
            servers.append(await self._loop.create_server(frames, sock=lane, backlog=BACKLOG))
        if affinity is not None:
            servers.append(
                await self._loop.create_server(connection, sock=affinity, backlog=BACKLOG)
            )
        return servers

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for frames in list(self._lane_engine.connections):
            frames.abort()
        if self._settings.listen.startswith("unix:") and self._owns_address:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._settings.listen.removeprefix("unix:"))
        for connection in list(self._connections):
            connection.finish()
        deadline = self._loop.time() + 1.0
        while self._connections and self._loop.time() < deadline:
            await asyncio.sleep(0.01)  # what was being executed is answered
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)

    def _pause(self, seconds: float) -> None:
        self._paused_until = self._loop.time() + seconds
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        remaining = self._paused_until - self._loop.time()
        if remaining > 0:  # paused anew, or called a little early, as this loop does
            self._loop.call_later(remaining, self._resume)
            return
        for connection in list(self._connections):
            connection.go_on()


def raise_files_limit() -> int:
    """Asks the system for as many open files as it allows, and returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


class Block(NamedTuple):
    """The sockets of one worker: RESP, and with TCP the binary lane and this worker's own."""

    resp: socket.socket
    lane: socket.socket | None = None
    affinity: socket.socket | None = None


def bind_blocks(listen: str, workers: int) -> list[Block]:
    """Returns the sockets of each worker; with port 0 a run of ports that are all free.

    RESP and the binary lane are the same sockets for all of them. The ports behind a given one may be
    taken: clients do without them.

    Raises:
        CannotStart: the address itself cannot be bound.
    """
    any_port = listen.endswith(":0")
    for _ in range(DRAWS_MAX if any_port else 1):
        resp = bind(listen)
        if resp.family == socket.AF_UNIX:
            return [Block(resp)] * workers
        host, port = listen.rpartition(":")[0], port_of(resp)
        lane = _bound_if_free(host, port + 1)
        own = [_bound_if_free(host, port + 2 + worker) for worker in range(workers)]
        if not any_port or None not in (lane, *own):
            if lane is not None:
                lane.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            return [Block(resp, lane, affinity) for affinity in own]
        for bound in filter(None, [resp, lane, *own]):
            bound.close()
    raise CannotStart(f"cannot listen on {listen} (RESP): no {2 + workers} free ports in a row")


def _bound_if_free(host: str, port: int) -> socket.socket | None:
    try:
        return bind(f"{host}:{port}")
    except CannotStart as problem:
        _log.warning("a port beside the RESP port stays closed", port=port, problem=str(problem))
        return None


def bind(listen: str) -> socket.socket:
    """Returns a socket bound to HOST:PORT or unix:PATH.

    Raises:
        CannotStart: it cannot be bound.
    """
    try:
        if listen.startswith("unix:"):
            path = Path(listen.removeprefix("unix:"))
            remove_dead_socket(path)
            return _bound(socket.AF_UNIX, str(path))
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        return _bound(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise CannotStart(f"cannot listen on {listen} (RESP): {error}") from error


def _bound(family: socket.AddressFamily, address: str | tuple[str, int]) -> socket.socket:
    bound = socket.socket(family)
    try:
        if family != socket.AF_UNIX:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound


def address_of(bound: socket.socket, listen: str) -> str:
    """Returns the address that a socket got, as it was asked for."""
    if listen.startswith("unix:"):
        return listen
    return f"{listen.rpartition(':')[0]}:{port_of(bound)}"


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
            raise CannotStart(f"another server listens on {path}")
    path.unlink()
