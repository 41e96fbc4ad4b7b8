"""The binary lane: one connection of frames beside RESP, for attention queries.

Runs on the event loop like RESP; a query is answered on a worker. One frame is answered after the other,
in order. A client of this lane may send less than it announced and wait for an answer: it ignores how
much a send took. So a frame that stalls in the middle, or comes more slowly than over any line, is
answered with ERROR, and the connection ends.

The one decision: as long as a frame waits for the one before it, or an answer for the peer to take it,
no more is read. So a connection holds three bodies and one answer at most, whatever is sent.
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
from pion_grpc.core.attend import Attend
from pion_grpc.core.attend_query import Ask, SuffixBytes
from pion_grpc.core.attend_values import Key
from pion_grpc.errors import Cold, PionError
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

BODY_BYTES_BEFORE_LOGIN = 4 << 10
RECEIVE_BUFFER_BYTES = 8 << 20
"""Asked of the kernel: the more it takes at once, the less a client's single send is cut."""
FRAME_BYTES_PER_S = 256 << 10
"""What must come of a frame, on the average since its begin, so that it is waited for."""

FusedAnswer: TypeAlias = tuple[Status, Sequence[Buffer]]

_log = structlog.get_logger()


class LaneEngine(NamedTuple):
    """What connections of the lane share."""

    loop: asyncio.AbstractEventLoop
    workers: Executor
    access: Access
    attend: Attend | None
    connections: "set[LaneConnection]"
    connections_max: int
    stall_s: float


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
        self._may_read = True
        self._may_write = True
        self._stalled = False  # to be answered with an error, after what came before
        self._ending = False
        self._heard_at = 0.0
        self._frame_began_at = 0.0
        self._watch: asyncio.TimerHandle | None = None  # runs on from frame to frame
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins."""
        self._transport = cast(asyncio.Transport, transport)
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._engine.connections) >= self._engine.connections_max:
            self._transport.abort()
        self._engine.connections.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._parser.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Takes the frames that are complete now."""
        self._heard_at = self._engine.loop.time()
        if not self._parser.unfinished_bytes:
            self._frame_began_at = self._heard_at
        self._parser.buffer_updated(nbytes)
        try:
            while (frame := self._parser.next_frame()) is not None:
                self._waiting.append(frame)
                self._frame_began_at = self._heard_at
        except ProtocolError:
            self._ending = True  # what came is not a frame, and there is nothing to say to it
        self._go_on()

    def eof_received(self) -> bool:
        """Answers what has come, then closes."""
        self._ending = True
        self._go_on()
        return True

    def pause_writing(self) -> None:
        """The peer does not take more for now."""
        self._may_write = False

    def resume_writing(self) -> None:
        """It does again."""
        self._may_write = True
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives everything back."""
        self._ending = True
        self._waiting.clear()
        self._engine.connections.discard(self)
        self._unwatch()

    def abort(self) -> None:
        """Closes at once."""
        self._transport.abort()

    def _go_on(self) -> None:
        """Answers what can be answered now, then reads on or waits, or closes."""
        while self._waiting and not self._busy and self._may_write:
            self._answer(self._waiting.popleft())
        idle = not self._waiting and not self._busy
        if idle and (self._stalled or self._ending):
            if self._stalled:
                self._reply(Status.ERROR)
            self._transport.close()
        if self._ending or self._stalled:
            self._unwatch()
            return
        self._regulate(may_read=not self._waiting and self._may_write)

    def _answer(self, frame: Frame) -> None:
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

    def _log_in(self, frame: Frame) -> bool:
        """The administrator's password, and no other: the lane knows no tenants."""
        access = self._engine.access
        if access.required and access.tenant(None, bytes(frame.body)) != "":
            return False
        self._authenticated = True
        self._parser.body_bytes_max = BODY_BYTES_MAX
        return True

    def _answer_query(self, body: memoryview) -> None:
        """Runs on a worker."""
        try:
            answer = attended(self._engine.attend, body, lambda: not self._transport.is_closing())
        except Exception:
            _log.exception("internal error", command="binary lane")
            answer = Status.ERROR, ()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
            self._engine.loop.call_soon_threadsafe(self._answered, *answer)

    def _answered(self, status: Status, body: Sequence[Buffer]) -> None:
        self._busy = False
        self._reply(status, body)
        self._go_on()

    def _reply(self, status: Status, body: Sequence[Buffer] = ()) -> None:
        if not self._transport.is_closing():
            self._transport.writelines(encode_frame(status, body))

    def _regulate(self, *, may_read: bool) -> None:
        """Reads on, or stops; has an eye on the frame that has begun."""
        if may_read != self._may_read:
            self._may_read = may_read
            # It could not be heard before.
            self._heard_at = self._frame_began_at = self._engine.loop.time()
            (self._transport.resume_reading if may_read else self._transport.pause_reading)()
        if self._watch is None and may_read and self._parser.unfinished_bytes:
            self._look_again_in(self._engine.stall_s)

    def _look_again_in(self, seconds: float) -> None:
        self._watch = self._engine.loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        """Gives a frame up of which nothing has come for too long, or too little on the whole."""
        self._watch = None
        if not (self._may_read and self._parser.unfinished_bytes):
            return
        paid_until = self._frame_began_at + self._parser.unfinished_bytes / FRAME_BYTES_PER_S
        since = min(self._heard_at, paid_until)
        left_s = since + self._engine.stall_s - self._engine.loop.time()
        if left_s > 0:
            self._look_again_in(left_s)
            return
        self._stalled = True
        self._go_on()

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


def attended(attend: Attend | None, body: memoryview, wanted: Callable[[], bool]) -> FusedAnswer:
    """Returns the answer to the body of a query; the lane's words for what is wrong with it."""
    try:
        query = parse_fused_query(body)
        if attend is None:
            return Status.ERROR, ()
        key = Key("", query.sid.decode(), query.layer)
        return Status.OK, (attend.ask(key, _ask(query), wanted=wanted).out.data,)
    except MalformedBodyError:
        return Status.MISS, ()
    except Cold:
        return Status.COLDMISS, ()
    except (PionError, UnicodeDecodeError):
        return Status.ERROR, ()


def _ask(query: FusedQuery) -> Ask:
    return Ask(
        query.query_heads,
        query.head_dim,
        query.q,
        query.query_count,
        kv_heads=query.kv_heads,
        head_map=bytes(query.head_map),
        window=query.window,
        suffix=SuffixBytes(query.suffix_rows, query.k_suffix, query.v_suffix),
    )
