"""The forms that calls take: one answer, asked once or again; a stream out; a stream in.

Knows deadlines, watchdogs and what may be tried again; not what the messages say.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import grpc

from pion_client.arrays import invalid
from pion_client.connection import (
    STREAM_TIMEOUT_S,
    TRIES_ENDLESS,
    TRIES_MAX,
    Connection,
    Deadline,
    Watchdog,
    pause,
    retried,
)
from pion_client.errors import Unavailable
from pion_client.storing import Content, Outgoing
from pion_client.values import Progress


class Calls:
    """The calls of one client."""

    def __init__(self, connection: Connection, timeout_s: float, stall_timeout_s: float) -> None:
        self.connection = connection
        self.timeout_s = _positive("timeout_s", timeout_s)
        self.stall_timeout_s = _positive("stall_timeout_s", stall_timeout_s)

    def unary_deadline(self, timeout_s: float | None, tries: int | None = None) -> Deadline:
        """Returns the deadline of a call with one answer; raises InvalidRequest if it is not a time."""
        return self._deadline(timeout_s, self.timeout_s, tries)

    def stream_deadline(self, timeout_s: float | None, tries: int | None = None) -> Deadline:
        """Returns the deadline of a stream; raises as `unary_deadline` does."""
        return self._deadline(timeout_s, STREAM_TIMEOUT_S, tries)

    def once(self, method: str, request: Any, route: str, timeout_s: float | None) -> Any:
        """Makes a call with one answer, once."""
        return self.call(method, request, route, self.unary_deadline(timeout_s))

    def ask(
        self,
        method: str,
        request: Any,
        route: str,
        timeout_s: float | None,
        tries: int | None = None,
    ) -> Any:
        """Makes a call with one answer that changes nothing, so that it may be tried again."""
        deadline = self.unary_deadline(timeout_s, tries)
        return retried(functools.partial(self.call, method, request, route, deadline), deadline)

    def send(
        self,
        method: str,
        content: Content,
        *,
        route: str,
        deadline: Deadline,
        progress: Progress | None = None,
        stall_timeout_s: float | None = None,
        may_repeat: bool = False,
    ) -> bytes:
        """Sends one stream; returns the serialised answer.

        Args:
            method: of the stubs.
            content: what it brings.
            route: where to.
            deadline: of all of it.
            progress: called with (bytes sent, bytes in all), on another thread.
            stall_timeout_s: how long it may make no progress; None: as long as any stream may.
            may_repeat: whether to send it again, as a whole, where only the transport failed.

        Raises:
            PionError: what the status of the call means.
            Whatever `progress`, or making the messages, raises.
        """
        if stall_timeout_s is None:
            stall_timeout_s = self.stall_timeout_s
        for attempt in itertools.count(1):
            watchdog = Watchdog(stall_timeout_s)
            outgoing = Outgoing(content, progress, watchdog.touch)
            try:
                return self._send(method, outgoing, watchdog, route, deadline)
            except Unavailable as error:
                # To a caller with time, a server that restarts is one that is not there yet.
                waits = may_repeat and (error.from_transport or deadline.tries == TRIES_ENDLESS)
                if not waits or not pause(error, attempt, deadline):
                    raise
        raise AssertionError("the loop ends by itself")

    def _send(
        self, method: str, outgoing: Outgoing, watchdog: Watchdog, route: str, deadline: Deadline
    ) -> bytes:
        """Makes one attempt."""
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

    def call(self, method: str, request: Any, route: str, deadline: Deadline) -> Any:
        """Makes a call with one answer, once, within what is left of a deadline."""
        with self.connection.calling() as stubs:
            return getattr(stubs, method)(
                request,
                timeout=deadline.remaining_s,
                metadata=self.connection.metadata(route),
            )

    def _deadline(self, timeout_s: float | None, default_s: float, tries: int | None) -> Deadline:
        """Returns a deadline: one that the caller gave is used up before a server is given up."""
        if tries is not None and tries < 1:
            raise invalid("tries", f"{tries} is less than once")
        if timeout_s is not None:
            return Deadline(_positive("timeout_s", timeout_s), tries or TRIES_ENDLESS)
        if tries is not None:
            return Deadline(default_s, tries)
        return Deadline(default_s, TRIES_MAX, max(self.timeout_s - self.connection.away_s, 0.0))


def _positive(field: str, seconds: float) -> float:
    if not 0 < seconds < math.inf:  # NaN neither
        raise invalid(field, f"{seconds} is no number of seconds above 0")
    return seconds
