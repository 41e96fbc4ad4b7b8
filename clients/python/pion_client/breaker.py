"""A breaker: stops asking a server that fails, and asks again after a while.

Knows no server; it is told what happened, or sees how calls end (`guarding`). The one decision: when the
while is over, one caller is let through and the others are kept out until that one has reported, so a
server that is still down costs one caller one deadline, not each of them.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from pion_client.errors import DeadlineExceeded, PionError, Unavailable

FAILURES_MAX = 3
OPEN_S = 30.0


class NotAsked(Unavailable):
    """The breaker is open."""


class Breaker:
    """Closed until `failures_max` failures in a row, then open for `open_s`."""

    def __init__(
        self,
        *,
        failures_max: int = FAILURES_MAX,
        open_s: float = OPEN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures_max, self._open_s, self._clock = failures_max, open_s, clock
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was open when last asked or told."""
        return self._opened_at is not None

    def allow(self) -> bool:
        """Whether the server may be asked now; whoever asks it reports what happened."""
        with self._lock:
            if self._opened_at is None:
                return True
            if self._clock() - self._opened_at < self._open_s:
                return False
            self._opened_at = self._clock()  # for all others, until this caller has reported
            return True

    def succeeded(self) -> None:
        """The server answered: closes."""
        with self._lock:
            self._failures, self._opened_at = 0, None

    def failed(self, *, at_once: bool = False) -> None:
        """The server failed; `at_once` opens without waiting for more (a deadline was paid)."""
        with self._lock:
            self._failures += 1
            if at_once or self._failures >= self._failures_max:
                self._failures = self._failures_max
                self._opened_at = self._clock()

    @contextlib.contextmanager
    def guarding(self, alive: Callable[[PionError], bool]) -> Iterator[None]:
        """Lets the server be asked, and sees how that ends.

        Args:
            alive: whether a server that answers with this error is well.

        Raises:
            NotAsked: it is not to be asked now.
            PionError: what the body raised.
        """
        if not self.allow():
            raise NotAsked("the server did not answer lately; it is not asked")
        try:
            yield
        except PionError as error:
            if alive(error):
                self.succeeded()
            else:
                self.failed(at_once=isinstance(error, DeadlineExceeded))
            raise
        self.succeeded()
