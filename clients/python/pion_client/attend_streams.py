"""Open streams to Attend: the fast lane of queries.

Knows how a query gets its answer on a stream; not what it asks. The one decision: a thread that asks
takes a stream that nobody uses, or opens one, waits for its one answer there, and gives it back. So
there are as many streams as threads that ask at once, and no thread stands between the caller and gRPC.
What gRPC lacks is a deadline for one answer of a stream: one thread per client, alive as long as there
are streams, cuts off the stream whose query has had its time, and those that nobody wanted for a while.
"""

import collections
import os
import queue
import threading
import time
import weakref
from contextlib import ExitStack
from typing import Any

import grpc

from pion_client.connection import Connection, Deadline
from pion_client.errors import (
    BY_REASON,
    BadAnswer,
    DeadlineExceeded,
    InvalidRequest,
    PionError,
    Unavailable,
)
from pion_wire.v1 import attend_pb2 as pb

IDLE_S = 20.0
"""A stream that nobody used for so long is closed; the server would cut it off later."""
IDLE_STREAMS_MAX = 4
REST_S = 1.0
"""How long no stream is tried after the server had none to spare."""
_TICK_S = 1.0


class AttendStream:
    """One open stream; one query at a time."""

    def __init__(self, connection: Connection, route: str) -> None:
        self.route = route
        self.expires_s = time.monotonic() + IDLE_S
        """When it is cut off: its query has had its time, or nobody wanted it for too long."""
        self.expired = False
        self.usable = True
        """Whether it waits for another query; not while one is on its way, nor when the stream broke."""
        self._id = 0
        self._queue: queue.SimpleQueue[pb.AttendStreamRequest | None] = queue.SimpleQueue()
        # Held as long as the stream is open: a fork meanwhile finds a call in flight.
        self._held = ExitStack()
        stubs = self._held.enter_context(connection.calling())
        self._call: Any = stubs.attend_stream(
            iter(self._queue.get, None), metadata=connection.metadata(route)
        )

    def exchange(self, query: pb.AttendQueryRequest, deadline: Deadline) -> pb.AttendQueryResponse:
        """Asks, and waits for the answer.

        Raises:
            PionError: what the server says about this query, if the stream is usable afterwards.
            Unavailable, DeadlineExceeded, BadAnswer: it is not.
            grpc.RpcError: nor then; not yet translated.
        """
        self.usable = False
        self._id += 1
        self.expires_s = time.monotonic() + deadline.remaining_s
        self._queue.put(pb.AttendStreamRequest(id=self._id, query=query))
        try:
            response: pb.AttendStreamResponse = next(self._call)
        except StopIteration:
            raise Unavailable("the server ended the stream", from_transport=True) from None
        except grpc.RpcError:
            if self.expired:
                raise DeadlineExceeded(
                    f"no answer within {deadline.timeout_s:g} s", from_transport=True
                ) from None
            raise
        if response.id != self._id:
            raise BadAnswer(f"query {self._id} was answered as {response.id}")
        self.usable = True
        self.expires_s = time.monotonic() + IDLE_S
        if response.WhichOneof("outcome") == "error":
            raise _error_of(response.error)
        return response.answer

    def cut(self) -> None:
        """Ends it, whatever it is doing."""
        self._queue.put(None)  # ends the thread that sends
        self._call.cancel()
        self._held.close()


def _error_of(error: pb.AttendStreamError) -> PionError:
    kind = BY_REASON.get(error.reason, PionError)
    # A message about a field begins with its name; a call has it in its details as well.
    metadata = {"field": error.message.partition(":")[0]} if kind is InvalidRequest else {}
    return kind(error.message, reason=error.reason, metadata=metadata)


class AttendStreams:
    """The open streams of one client: those that nobody uses at the moment, and a watch over all."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inherited: list[AttendStream] = []
        self._not_before_s = 0.0
        self._forget()
        _all.add(self)

    def usable(self) -> bool:
        """Whether streams are to be tried at all."""
        off = os.environ.get("PION_PROMPT_CACHE_NO_STREAM") == "1"
        return not off and time.monotonic() >= self._not_before_s

    def rest(self) -> None:
        """Tries no stream for a while."""
        self._not_before_s = time.monotonic() + REST_S

    def exchange(
        self, query: pb.AttendQueryRequest, route: str, deadline: Deadline
    ) -> pb.AttendQueryResponse:
        """Asks on a stream that is free, or on a new one."""
        while True:
            stream = self._idle_one(route, deadline)
            fresh = stream is None
            stream = stream or self._new_one(route)
            try:
                with self._connection.calling():  # translates what the transport raises
                    return stream.exchange(query, deadline)
            except Unavailable as error:
                # One that was idle may have been cut off meanwhile: nothing is wrong with the server.
                if fresh or not error.from_transport:
                    raise
            finally:
                self._give_back(stream)

    def close(self) -> None:
        """Cuts all of them off."""
        with self._lock:
            streams = list(self._open)
            self._open.clear()
            self._idle.clear()
        for stream in streams:
            stream.cut()

    def forked(self) -> None:
        """In the child: the streams are the parent's, and not even freed here."""
        self._inherited += self._open
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._open: set[AttendStream] = set()
        self._idle: collections.deque[AttendStream] = collections.deque()
        self._minding = False

    def _idle_one(self, route: str, deadline: Deadline) -> AttendStream | None:
        with self._lock:
            for stream in reversed(self._idle):
                if stream.route == route:
                    self._idle.remove(stream)
                    stream.expires_s = time.monotonic() + deadline.remaining_s
                    return stream
        return None

    def _new_one(self, route: str) -> AttendStream:
        with self._connection.calling():
            stream = AttendStream(self._connection, route)
        with self._lock:
            self._open.add(stream)
            if not self._minding:
                self._minding = True
                threading.Thread(target=self._mind, name="pion-attend", daemon=True).start()
        return stream

    def _give_back(self, stream: AttendStream) -> None:
        surplus = None if stream.usable else stream
        with self._lock:
            if stream.usable and stream in self._open:
                self._idle.append(stream)
                if len(self._idle) > IDLE_STREAMS_MAX:
                    surplus = self._idle.popleft()
            if surplus is not None:
                self._open.discard(surplus)
        if surplus is not None:
            surplus.cut()

    def _mind(self) -> None:
        """Cuts off what has expired; ends with the last stream."""
        while True:
            time.sleep(_TICK_S)
            with self._lock:
                now = time.monotonic()
                expired = [stream for stream in self._open if stream.expires_s <= now]
                for stream in expired:
                    stream.expired = True
                    self._open.remove(stream)
                    if stream in self._idle:
                        self._idle.remove(stream)
                self._minding = minding = bool(self._open)
            for stream in expired:
                stream.cut()
            if not minding:
                return


_all: "weakref.WeakSet[AttendStreams]" = weakref.WeakSet()


def _forked() -> None:
    for streams in list(_all):
        streams.forked()


os.register_at_fork(after_in_child=_forked)
