"""The forms that calls take: one answer, asked once or again; a stream out; a stream in.

Knows deadlines, watchdogs and what may be tried again; not what the messages say.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc

from pion_client.arrays import Rows
from pion_client.connection import (
    STREAM_TIMEOUT_S,
    TRIES_MAX,
    Connection,
    Deadline,
    Watchdog,
    pause,
    retried,
)
from pion_client.errors import Unavailable
from pion_client.storing import Outgoing, Progress
from pion_client.values import Part

Answer = TypeVar("Answer")


class Calls:
    """The calls of one client."""

    def __init__(self, connection: Connection, timeout_s: float, stall_timeout_s: float) -> None:
        self.connection = connection
        self.timeout_s = timeout_s
        self.stall_timeout_s = stall_timeout_s

    def unary_deadline(self, timeout_s: float | None) -> Deadline:
        """Returns the deadline of a call with one answer."""
        return Deadline(self.timeout_s if timeout_s is None else timeout_s)

    def stream_deadline(self, timeout_s: float | None) -> Deadline:
        """Returns the deadline of a stream."""
        return Deadline(STREAM_TIMEOUT_S if timeout_s is None else timeout_s)

    def once(self, method: str, request: Any, route: str, timeout_s: float | None) -> Any:
        """Makes a call with one answer, once."""
        return self._call(method, request, route, self.unary_deadline(timeout_s))

    def ask(self, method: str, request: Any, route: str, timeout_s: float | None) -> Any:
        """Makes a call with one answer that changes nothing, so that it may be tried again."""
        deadline = self.unary_deadline(timeout_s)
        return retried(functools.partial(self._call, method, request, route, deadline), deadline)

    def send(
        self,
        method: str,
        header: bytes,
        tensors: Sequence[Rows],
        parts: Sequence[Part],
        *,
        first_row: int,
        progress: Progress | None,
        route: str,
        deadline: Deadline,
    ) -> bytes:
        """Sends one stream, once; returns the serialised answer.

        Raises:
            PionError: what the status of the call means.
            Whatever `progress` raises.
        """
        watchdog = Watchdog(self.stall_timeout_s)
        outgoing = Outgoing(
            header, tensors, parts, first_row=first_row, progress=progress, touch=watchdog.touch
        )
        with self.connection.calling() as stubs:
            call: Any = getattr(stubs, method).future(
                iter(outgoing),
                timeout=deadline.remaining_s,
                metadata=self.connection.metadata(route),
            )
            outgoing.bind(call)
            with watchdog.over(call):
                try:
                    answer: bytes = call.result()
                except (grpc.RpcError, grpc.FutureCancelledError):
                    if outgoing.error is not None:
                        raise outgoing.error from None
                    raise call from None  # it is the error that has the status
        return answer

    def send_whole(self, send: Callable[[], Answer], deadline: Deadline) -> Answer:
        """Repeats a stream that is idempotent as a whole, where only the transport failed."""
        for attempt in range(1, TRIES_MAX):
            try:
                return send()
            except Unavailable as error:
                if not error.from_transport or not pause(error, attempt, deadline):
                    raise
        return send()

    def receive(
        self,
        method: str,
        request: Any,
        take: Callable[[Any], None],
        *,
        route: str,
        deadline: Deadline,
    ) -> None:
        """Hands every message of one stream to `take`; whatever that raises ends the stream."""
        watchdog = Watchdog(self.stall_timeout_s)
        with self.connection.calling() as stubs:
            call: Any = getattr(stubs, method)(
                request,
                timeout=deadline.remaining_s,
                metadata=self.connection.metadata(route),
            )
            with watchdog.over(call):
                for message in call:
                    watchdog.touch()
                    take(message)

    def _call(self, method: str, request: Any, route: str, deadline: Deadline) -> Any:
        with self.connection.calling() as stubs:
            return getattr(stubs, method)(
                request,
                timeout=deadline.remaining_s,
                metadata=self.connection.metadata(route),
            )
