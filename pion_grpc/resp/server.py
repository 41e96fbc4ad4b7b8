"""The server of this wire: its threads, its addresses, and stopping in order.

One thread runs the event loop, a handful of workers move bytes, one thread writes keys. Addresses are
bound before anything is served, so that a busy port refuses to start.
"""

import asyncio
import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

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
from pion_grpc.resp.client import Clients
from pion_grpc.resp.command import Facts, RespSettings, Services
from pion_grpc.resp.commands.table import COMMANDS
from pion_grpc.resp.connection import Connection, Engine
from pion_grpc.resp.dispatch import Dispatcher
from pion_grpc.resp.lane import LaneConnection, LaneEngine
from pion_grpc.resp.protocol import RequestLimits
from pion_grpc.resp.sockets import BACKLOG, Block, bind_blocks, bound_address, port_of

WORKERS = 8
"""Threads that move bytes: as many clients are served from disk at once."""
BUILD = "grpc"
"""What follows the version where clients expect a build."""

_log = structlog.get_logger()


class RespServer:
    """The RESP side of one server process."""

    def __init__(
        self,
        store: PrefixStore,
        states: RecurrentStates,
        access: Access,
        settings: RespSettings,
        attend: Attend | None = None,
        sockets: Block | None = None,
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
        self.address = str(bound_address(self._sockets.resp, settings.listen))
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
            settings,
            pause=self._pause,
            is_paused=lambda: self._loop.time() < self._paused_until,
            run_queued=lambda call: dispatcher.answer_queued(call),
        )
        dispatcher = Dispatcher(services, COMMANDS)
        limits = RequestLimits(request_bytes_max=settings.request_bytes_max)
        self._engine = Engine(
            self._loop,
            self._workers,
            self._writer,
            dispatcher,
            limits,
            self._connections,
            settings.clients_max,
        )
        self._lane_engine = LaneEngine(
            self._loop,
            self._workers,
            access,
            attend,
            set(),
            settings.clients_max,
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
        if self._settings.listen.path and self._owns_address:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._settings.listen.path)
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
