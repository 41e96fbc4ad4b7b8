"""The binary lane: one connection of frames beside RESP, for attention queries.

Runs on the event loop like RESP; a query is answered on a worker. One frame is answered after the other,
in order. A client of this lane may send less than it announced and wait for an answer: it ignores how
much a send took. So a frame that stalls in the middle is answered with ERROR, and the connection ends.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, TypeAlias, cast

import structlog

from pion_grpc.core.access import Access
from pion_grpc.resp.binary_lane import (
    BODY_BYTES_MAX,
    Command,
    Frame,
    FrameParser,
    FusedQuery,
    MalformedBodyError,
    Status,
    encode_frame,
    parse_fused_query,
)
from pion_grpc.resp.protocol import ProtocolError
from pion_grpc.resp.reply import Buffer

STALL_S = 2.0
"""A frame of which nothing more comes for so long will not be finished."""
BODY_BYTES_BEFORE_LOGIN = 4 << 10
RECEIVE_BUFFER_BYTES = 8 << 20
"""Asked of the kernel: the more it takes at once, the less a client's single send is cut."""

FusedAnswer: TypeAlias = tuple[Status, Sequence[Buffer]]
Fused: TypeAlias = Callable[[FusedQuery], FusedAnswer]
"""Answers a query; raises nothing."""

_log = structlog.get_logger()


class LaneEngine(NamedTuple):
    """What connections of the lane share."""

    loop: asyncio.AbstractEventLoop
    workers: Executor
    access: Access
    fused: Fused
    connections: "set[LaneConnection]"


class LaneConnection(asyncio.BufferedProtocol):
    """A client of the binary lane."""

    def __init__(self, engine: LaneEngine) -> None:
        self._engine = engine
        self._authenticated = not engine.access.required
        self._parser = FrameParser(
            BODY_BYTES_MAX if self._authenticated else BODY_BYTES_BEFORE_LOGIN
        )
        self._waiting: deque[Frame] = deque()
        self._busy = False
        self._ending = False
        self._watch: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins."""
        self._transport = cast(asyncio.Transport, transport)
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._engine.connections.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._parser.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Takes the frames that are complete now."""
        self._parser.buffer_updated(nbytes)
        try:
            while (frame := self._parser.next_frame()) is not None:
                self._waiting.append(frame)
        except ProtocolError:
            self._ending = True  # what came is no frame, and there is nothing to say to it
        self._answer_next()
        self._watch_over()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives everything back."""
        self._ending = True
        self._waiting.clear()
        self._engine.connections.discard(self)
        if self._watch is not None:
            self._watch.cancel()

    def abort(self) -> None:
        """Closes at once."""
        self._transport.abort()

    def _answer_next(self) -> None:
        while self._waiting and not self._busy:
            frame = self._waiting.popleft()
            if frame.code == Command.AUTH:
                self._reply(Status.OK if self._log_in(frame) else Status.ERROR)
            elif not self._authenticated:
                self._reply(Status.ERROR)
            elif frame.code == Command.PING:
                self._reply(Status.MISS if len(frame.body) else Status.OK)
            elif frame.code == Command.ATTEND_PREFIX_QUERY_FUSED:
                self._busy = True
                self._engine.workers.submit(self._answer_query, frame.body)
            else:
                self._reply(Status.MISS)
        if self._ending and not self._busy:
            self._transport.close()

    def _log_in(self, frame: Frame) -> bool:
        """The administrator's password, and no other: the lane knows no tenants."""
        if (
            self._engine.access.required
            and self._engine.access.tenant(None, bytes(frame.body)) != ""
        ):
            return False
        self._authenticated = True
        self._parser.body_bytes_max = BODY_BYTES_MAX
        return True

    def _answer_query(self, body: memoryview) -> None:
        try:
            answer = self._engine.fused(parse_fused_query(body))
        except MalformedBodyError:
            answer = Status.MISS, ()
        except Exception:
            _log.exception("internal error", command="binary lane")
            answer = Status.ERROR, ()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
            self._engine.loop.call_soon_threadsafe(self._answered, *answer)

    def _answered(self, status: Status, body: Sequence[Buffer]) -> None:
        self._busy = False
        self._reply(status, body)
        self._answer_next()

    def _reply(self, status: Status, body: Sequence[Buffer] = ()) -> None:
        if not self._transport.is_closing():
            self._transport.writelines(encode_frame(status, body))

    def _watch_over(self) -> None:
        """Looks again in a while whether a frame that has begun has come any further."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._parser.unfinished_bytes and not self._ending:
            self._watch = self._engine.loop.call_later(STALL_S, self._stalled)

    def _stalled(self) -> None:
        self._ending = True
        if not self._busy:
            self._reply(Status.ERROR)
        self._answer_next()


def no_engine(query: FusedQuery) -> FusedAnswer:
    """Answers where there is no attention engine."""
    return Status.ERROR, ()
