"""One connection: requests in, replies out, in order, and neither side waits for the other.

Runs on the event loop and owns no thread. Requests are parsed as bytes come and wait in a queue; the
first of it is refused, answered on the loop, or handed to a worker together with those after it that
may go along. Replies are queued in the same order and written when the peer takes them.

The one decision to understand: **reading, executing and writing are three**. A client may write hundreds
of megabytes before it reads its first reply, so reading goes on while replies wait; and a reply of
gigabytes is a `Streamed` that holds open files and two steps of bytes, so executing goes on as well.
What is bounded is what would have to be in memory: requests that wait, replies that wait, and streamed
replies that are open. A peer that drives all of them to their limits is not read any further.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, cast

import structlog

from pion_grpc.core.blobs import INLINE_BYTES_MAX, WrittenBlob
from pion_grpc.core.keyspace import KeyWriter, Outcome, Work
from pion_grpc.resp.client import Client
from pion_grpc.resp.command import Answer, Call, Command, Elsewhere, Streamed, Uses, Where
from pion_grpc.resp.dispatch import Dispatcher
from pion_grpc.resp.errors import refusal
from pion_grpc.resp.protocol import (
    UNAUTHENTICATED_LIMITS,
    ProtocolError,
    Request,
    RequestLimits,
    RequestParser,
)
from pion_grpc.resp.reply import Buffer, Error, Version, encode, join_small

WAITING_BYTES_MAX = 64 << 20
"""Arguments of requests that wait to be executed, above which no more are read."""
WAITING_MAX = 10_000
"""Requests that wait."""
REPLY_BYTES_MAX = 64 << 20
"""Replies in memory that the peer has not taken, above which nothing more is executed."""
STREAMED_MAX = 128
"""Streamed replies that wait or run; each holds open files."""
BATCH_MAX = 64
"""Requests that a worker executes at once."""
BATCH_BYTES_MAX = 8 << 20

_LOCAL_ADDRESSES = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})

_log = structlog.get_logger()


class Engine(NamedTuple):
    """What connections share."""

    loop: asyncio.AbstractEventLoop
    workers: Executor
    writer: KeyWriter
    dispatcher: Dispatcher
    limits: RequestLimits
    connections: "set[Connection]"
    clients_max: int


class Connection(asyncio.BufferedProtocol):
    """A client of this wire."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._dispatcher = engine.dispatcher
        self._parser = RequestParser(self._limits(authenticated=False))
        self._waiting: deque[Request] = deque()
        self._waiting_bytes = 0
        self._busy = False
        self._broken: Error | None = None  # the last reply, once what came before is answered
        self._at_end = False  # the peer sends nothing more
        self._lost = False
        self._output: deque[list[Buffer] | Streamed] = deque()
        self._output_bytes = 0
        self._streamed = 0
        self._may_write = True
        self._may_read = True
        self._step: list[Buffer] | None = None  # of the first streamed reply, ready to be written
        self._stepping = False
        self._transport: asyncio.Transport
        self.client: Client

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins."""
        self._transport = cast(asyncio.Transport, transport)
        self.client = self._introduce(transport)
        if len(self._engine.connections) >= self._engine.clients_max:
            self._write(encode(Error("ERR max number of clients reached"), 2))
            self.client.ending = True
            self._transport.close()
        self._engine.connections.add(self)
        self._dispatcher.services.clients.add(self.client)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._parser.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Takes the requests that are complete now."""
        self._parser.buffer_updated(nbytes)
        try:
            while self._broken is None:
                request = self._parser.next_request()
                if request is None:
                    break
                self._waiting.append(request)
                self._waiting_bytes += sum(map(len, request))
                self._execute()
        except ProtocolError as error:
            self._broken = Error(str(error))
            self._execute()
        self._flush()
        self._regulate()

    def eof_received(self) -> bool:
        """Answers what has come, then closes."""
        self._at_end = True
        self._execute()
        self._flush()
        return True

    def pause_writing(self) -> None:
        """The peer does not take more for now."""
        self._may_write = False

    def resume_writing(self) -> None:
        """It does again."""
        self._may_write = True
        self._flush()
        self.go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives everything back."""
        self._lost = self.client.gone = True
        self._engine.connections.discard(self)
        self._dispatcher.services.clients.remove(self.client)
        self._waiting.clear()
        for item in self._output:
            if isinstance(item, Streamed) and not (item is self._output[0] and self._stepping):
                self._give_back(item)
        if not self._stepping:
            self._output.clear()

    # -- what others call

    def go_on(self) -> None:
        """Executes what may be executed now."""
        self._execute()
        self._flush()
        self._regulate()

    def finish(self) -> None:
        """Executes nothing more, and closes once everything answered has been sent."""
        self.client.ending = True
        self._waiting.clear()
        self._flush()

    def abort(self) -> None:
        """Closes at once, whatever is under way."""
        self._transport.abort()

    # -- executing

    def _execute(self) -> None:
        while self._waiting and self._may_execute():
            request = self._waiting[0]
            command = self._dispatcher.find(request)
            refused = self._dispatcher.before(self.client, request, command)
            if refused is not None:
                self._take()
                self._note(command)
                self._reply(refused)
                continue
            assert command is not None
            self._note(command)
            if not self._answered_on_loop(request, command):
                self._hand_over(command)

    def _may_execute(self) -> bool:
        return not (
            self._busy
            or self._lost
            or self.client.ending
            or self._streamed >= STREAMED_MAX
            or self._output_bytes >= REPLY_BYTES_MAX
            or (self._engine.dispatcher.services.is_paused() and not self._may_end_a_pause())
        )

    def _may_end_a_pause(self) -> bool:
        command = self._dispatcher.find(self._waiting[0])
        return command is not None and command.name == "CLIENT"

    def _answered_on_loop(self, request: Request, command: Command) -> bool:
        if command.where is Where.WORKER:
            return False
        call = self._dispatcher.call(self.client, request, on_loop=True)
        try:
            if command.uses is Uses.READS:
                answer = self._read_keys(call)
            else:
                answer = self._dispatcher.answer(call)
        except Elsewhere:
            return False
        self._take()
        self._reply(answer)
        self._parser.limits = self._limits(authenticated=self.client.authenticated)
        return True

    def _read_keys(self, call: Call) -> Answer:
        """Runs a handler that reads keys, with the keys as they are now."""
        try:
            return cast(
                Answer,
                call.services.keyspace.reading(call.tenant, lambda keys: _run_with(call, keys)),
            )
        except Elsewhere:
            raise
        except Exception as error:
            return refusal(error, call.command.name)

    def _hand_over(self, command: Command) -> None:
        """Gives the first requests of the queue to whoever executes such."""
        calls = self._take_batch(command)
        self._busy = True
        version = self.client.version
        if command.uses is Uses.NOTHING:
            self._engine.workers.submit(self._work, calls, version)
        elif command.uses is Uses.READS:
            self._engine.workers.submit(self._work_reading, calls, version)
        elif any(map(_has_large_values, calls)):
            self._engine.workers.submit(self._write_large_values, calls, version)
        else:
            self._submit_keys(calls, version, [])

    def _take_batch(self, first: Command) -> list[Call]:
        calls: list[Call] = []
        size = 0
        while self._waiting and len(calls) < BATCH_MAX and size < BATCH_BYTES_MAX:
            request = self._waiting[0]
            if calls:
                command = self._dispatcher.find(request)
                if command is None or command.where is Where.LOOP or command.uses != first.uses:
                    break
                if self._dispatcher.before(self.client, request, command) is not None:
                    break  # it is refused when its turn comes, and not before
            call = self._dispatcher.call(self.client, request)
            by_itself = call.command.reads_back(call) or (
                first.uses is Uses.WRITES and _has_large_values(call)
            )
            if by_itself and calls:
                break  # the room for what it brings or takes is asked for after those before it
            size += sum(map(len, request))
            self._take()
            calls.append(call)
            if by_itself:
                break
        return calls

    def _take(self) -> Request:
        request = self._waiting.popleft()
        self._waiting_bytes -= sum(map(len, request))
        return request

    def _take_back(self, call: Call) -> None:
        request: Request = [call.command.name.encode(), *call.arguments]
        self._waiting.appendleft(request)
        self._waiting_bytes += sum(map(len, request))

    # -- on worker threads

    def _work(self, calls: Sequence[Call], version: Version) -> None:
        self._answer_with(self._dispatcher.answer, calls, version)

    def _work_reading(self, calls: Sequence[Call], version: Version) -> None:
        self._answer_with(self._read_keys, calls, version)

    def _answer_with(
        self, answer: Callable[[Call], Answer], calls: Sequence[Call], version: Version
    ) -> None:
        """Delivers the answers; once they fill what may be in memory, the rest wait again."""
        replies: list[list[Buffer] | Streamed] = []
        size = 0
        while len(replies) < len(calls) and size < REPLY_BYTES_MAX:
            replies.append(_encoded(answer(calls[len(replies)]), version))
            size += _bytes_of(replies[-1])
        self._deliver(replies, calls[len(replies) :])

    def _write_large_values(self, calls: Sequence[Call], version: Version) -> None:
        """Puts large values into files of their own, before the keyspace is locked for writing."""
        written: list[WrittenBlob] = []
        try:
            for call in calls:
                _write_large(call, written)
        except Exception as error:
            for blob in written:
                self._dispatcher.services.keyspace.blobs.abandon(blob)
            refused = [_encoded(refusal(error, call.command.name), version) for call in calls]
            self._deliver(refused)
            return
        self._submit_keys(calls, version, written)

    def _submit_keys(
        self, calls: Sequence[Call], version: Version, written: Sequence[WrittenBlob]
    ) -> None:
        def done(outcomes: list[Outcome]) -> None:
            answers = [
                refusal(outcome, call.command.name) if isinstance(outcome, Exception) else outcome
                for call, outcome in zip(calls, outcomes, strict=True)
            ]
            failed = any(isinstance(outcome, Exception) for outcome in outcomes)
            if failed and written:
                self._engine.workers.submit(self._abandon_unpublished, written)
            self._deliver([_encoded(answer, version) for answer in answers])

        self._engine.writer.submit([_work_of(call) for call in calls], done)

    def _abandon_unpublished(self, written: Sequence[WrittenBlob]) -> None:
        self._dispatcher.services.keyspace.blobs.abandon_unpublished(written)

    def _deliver(self, replies: list[list[Buffer] | Streamed], left: Sequence[Call] = ()) -> None:
        try:
            self._engine.loop.call_soon_threadsafe(self._delivered, replies, left)
        except RuntimeError:  # the loop is closed: the server has stopped
            for reply in replies:
                if isinstance(reply, Streamed):
                    reply.close()

    # -- replying

    def _delivered(self, replies: list[list[Buffer] | Streamed], left: Sequence[Call]) -> None:
        self._busy = False
        for reply in replies:
            self._queue(reply)
        if not (self._lost or self.client.ending):
            for call in reversed(left):
                self._take_back(call)
        self.go_on()

    def _reply(self, answer: Answer) -> None:
        self._queue(_encoded(answer, self.client.version))

    def _queue(self, reply: list[Buffer] | Streamed) -> None:
        if self._lost or self._is_silent():
            if isinstance(reply, Streamed):
                self._give_back(reply)
            return
        if isinstance(reply, Streamed):
            self._streamed += 1
        self._output_bytes += _bytes_of(reply)
        self._output.append(reply)

    def _is_silent(self) -> bool:
        """Whether the client wants no reply to this command (CLIENT REPLY)."""
        if self.client.skip_replies:
            self.client.skip_replies -= 1
            return True
        return not self.client.replies

    def _flush(self) -> None:
        if self._lost:
            return
        ready: list[Buffer] = []
        while self._output and self._may_write:
            item = self._output[0]
            if isinstance(item, Streamed):
                self._write(ready)
                ready = []
                self._stream(item)
                return
            self._output.popleft()
            self._output_bytes -= sum(map(len, item))
            ready += item
        self._write(ready)
        self._close_if_done()

    def _write(self, pieces: list[Buffer]) -> None:
        if pieces:
            self._transport.writelines(join_small(pieces))

    def _stream(self, reply: Streamed) -> None:
        """Writes the step that is ready, and has the next one read meanwhile."""
        if self._step is not None and self._may_write:
            pieces, self._step = self._step, None
            if not pieces:
                self._end_stream(reply)
                self._flush()
                return
            self._write(pieces)
        if self._step is None and not self._stepping:
            self._stepping = True
            self._engine.workers.submit(self._read_step, reply)

    def _read_step(self, reply: Streamed) -> None:
        try:
            pieces = reply.step()
        except Exception as error:
            self._tell(self._step_failed, reply, error)
        else:
            self._tell(self._step_ready, reply, pieces)

    def _tell(self, what: Callable[..., None], reply: Streamed, *values: Any) -> None:
        try:
            self._engine.loop.call_soon_threadsafe(what, reply, *values)
        except RuntimeError:  # the loop is closed
            reply.close()

    def _step_ready(self, reply: Streamed, pieces: list[Buffer]) -> None:
        self._stepping = False
        if self._lost:
            self._give_back(reply)
            self._output.clear()
            return
        self._step = pieces
        self._stream(reply)

    def _step_failed(self, reply: Streamed, error: Exception) -> None:
        """Says so if nothing was said yet; what would be said in the middle nobody could tell apart."""
        self._stepping = False
        self._give_back(reply)
        if self._lost:
            return
        if reply.started:
            _log.warning("a reply broke off", client=self.client.number, problem=str(error))
            self._transport.abort()
            return
        said = encode(refusal(error, self.client.last_command), self.client.version)
        self._output[0] = said
        self._output_bytes += sum(map(len, said))
        self._streamed -= 1
        self._flush()
        self._engine.loop.call_soon(self.go_on)

    def _end_stream(self, reply: Streamed) -> None:
        self._output.popleft()
        self._streamed -= 1
        self._give_back(reply)
        self._engine.loop.call_soon(self.go_on)

    def _give_back(self, reply: Streamed) -> None:
        """Closes a streamed reply, on a worker as long as there are any."""
        try:
            self._engine.workers.submit(reply.close)
        except RuntimeError:  # the server is stopping
            reply.close()

    def _close_if_done(self) -> None:
        if self._output or self._busy or self._transport.is_closing():
            return
        if self._broken is not None and not self._waiting and not self.client.ending:
            self._write(encode(self._broken, 2))
            self.client.ending = True
        nothing_left = self._at_end and not self._waiting
        if self.client.ending or nothing_left:
            self._transport.close()

    # -- parts of the above

    def _regulate(self) -> None:
        """Reads on, or stops reading, by what waits."""
        full = self._waiting_bytes > WAITING_BYTES_MAX or len(self._waiting) > WAITING_MAX
        empty = (
            self._waiting_bytes <= WAITING_BYTES_MAX // 2 and len(self._waiting) <= WAITING_MAX // 2
        )
        if self._lost or self._transport.is_closing():
            return
        if self._may_read and full:
            self._may_read = False
            self._transport.pause_reading()
        elif not self._may_read and empty:
            self._may_read = True
            self._transport.resume_reading()

    def _limits(self, *, authenticated: bool) -> RequestLimits:
        if authenticated or not self._dispatcher.services.access.required:
            return self._engine.limits
        return UNAUTHENTICATED_LIMITS

    def _note(self, command: Command | None) -> None:
        self.client.last_command = command.name.lower() if command else "NULL"
        self.client.last_at = self._engine.loop.time()

    def _introduce(self, transport: asyncio.BaseTransport) -> Client:
        connected = transport.get_extra_info("socket")
        peer, local = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        unix = connected is not None and connected.family == socket.AF_UNIX
        if connected is not None and not unix:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Client(
            number=self._dispatcher.services.clients.next_number(),
            peer=_address(peer),
            local=_address(local),
            is_local=unix or (isinstance(peer, tuple) and peer[0] in _LOCAL_ADDRESSES),
            abort=self.abort,
        )


def _run_with(call: Call, keys: Any) -> Answer:
    call.keys, call.held_bytes = keys, 0  # it may be run again
    try:
        return call.command.run(call)
    finally:
        call.keys = None


def _work_of(call: Call) -> Work:
    grows = 0
    if call.command.grows:
        inline = (len(a) for i, a in enumerate(call.arguments) if i not in call.large)
        grows = 64 + sum(inline)
    return Work(call.tenant, lambda keys: _run_with(call, keys), grows)


def _has_large_values(call: Call) -> bool:
    return any(len(call.arguments[i]) > INLINE_BYTES_MAX for i in _large_value_places(call))


def _large_value_places(call: Call) -> range:
    first, step = call.command.large_values
    if not first:
        return range(0)
    return range(first, min(call.count, first + 1) if not step else call.count, step or 1)


def _write_large(call: Call, written: list[WrittenBlob]) -> None:
    blobs = call.services.keyspace.blobs
    for place in _large_value_places(call):
        value = call.arguments[place]
        if len(value) > INLINE_BYTES_MAX:
            written.append(blobs.write(call.tenant, value))
            call.large[place] = written[-1]


def _bytes_of(reply: list[Buffer] | Streamed) -> int:
    """What a reply has in memory."""
    return 0 if isinstance(reply, Streamed) else sum(map(len, reply))


def _encoded(answer: Answer, version: Version) -> list[Buffer] | Streamed:
    return answer if isinstance(answer, Streamed) else encode(answer, version)


def _address(name: Any) -> str:
    if isinstance(name, tuple):
        host, port = name[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"unix:{name}" if name else "unix:"
