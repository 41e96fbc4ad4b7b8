"""How many streams run at once, and which of them are cut off because their peer does nothing.

Knows whose turn it is on a stream; not what is sent. The one decision: a permit is taken before anything
else, so that streams never use up the threads that other calls need.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import grpc

from pion_grpc.errors import TooManyStreams


class _Stream(NamedTuple):
    context: grpc.ServicerContext
    is_conversation: bool
    waits_since: float
    """Since when its peer should have sent or taken something; infinite while the server works."""


class StreamPermits:
    """Permits for streams, and a watch over those whose peer does nothing.

    Bidirectional streams are conversations: their clients keep them open between two questions. They
    have as many permits of their own, so that they cannot use up those of streams that end.
    """

    def __init__(
        self, streams_max: int, stall_ms: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._streams_max = streams_max
        self._stall_s = stall_ms / 1_000
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[int, _Stream] = {}
        self._serial = 0

    @contextlib.contextmanager
    def running(
        self, context: grpc.ServicerContext, *, is_conversation: bool = False
    ) -> Iterator[int]:
        """Holds a permit, and yields the number of the stream, on which it is the server's turn.

        Raises:
            TooManyStreams: no permit is left.
        """
        with self._lock:
            kind = [one for one in self._running.values() if one.is_conversation is is_conversation]
            if len(kind) >= self._streams_max:
                raise TooManyStreams(
                    f"{self._streams_max} streams are running: try again in a moment",
                    limit=self._streams_max,
                )
            self._serial += 1
            stream = self._serial
            self._running[stream] = _Stream(context, is_conversation, float("inf"))
        try:
            yield stream
        finally:
            with self._lock:
                del self._running[stream]

    def waits(self, stream: int) -> None:
        """Notes that it is the peer's turn."""
        self._note(stream, self._clock())

    def works(self, stream: int) -> None:
        """Notes that it is the server's turn."""
        self._note(stream, float("inf"))

    def _note(self, stream: int, waits_since: float) -> None:
        with self._lock:
            self._running[stream] = self._running[stream]._replace(waits_since=waits_since)

    def cut_stalled(self) -> int:
        """Cancels the streams whose peer did nothing for too long; returns how many."""
        if not self._stall_s:
            return 0
        oldest = self._clock() - self._stall_s
        with self._lock:
            stalled = [one.context for one in self._running.values() if one.waits_since < oldest]
        for context in stalled:
            context.cancel()
        return len(stalled)
