"""Prefixes of one prompt cache that wait to be stored, and who waits for them.

Knows the background that they are stored in; not how. The one decision: whoever needs one of them waits
no longer than its prefill took, or a time of his own, if that is longer: by then he can have it himself.
"""

import functools
import time
from collections.abc import Callable

from pion_client.background import Abandoned, Background
from pion_client.exchange import Pending
from pion_client.tally import Tally

START_DELAY_S_MAX = 1.0
"""Storing starts as long after a prefill as that took, but no later than this: the caller's first token
comes first. Nobody waits it out: who asks for the prefix meanwhile, `flush` and the end start it."""


class StoreQueue:
    """What is being stored; what is not is counted as skipped, by reason."""

    def __init__(self, background: Background, tally: Tally) -> None:
        self._background, self._tally = background, tally
        self._pending: dict[int, Pending] = {}

    def put(self, pending: Pending, store: Callable[[], str], size_bytes: int) -> str:
        """Has a prefix stored in the background; returns why not, or nothing.

        Args:
            pending: the prefix.
            store: stores it; returns why it did not, or nothing.
            size_bytes: what that keeps in memory.
        """
        self._pending[id(pending)] = pending
        queued = self._background.put(
            functools.partial(self._run, pending, store),
            size_bytes=size_bytes,
            delay_s=min(pending.prefill_ms / 1e3, START_DELAY_S_MAX),
            abandoned=functools.partial(self._settle, pending, "abandoned"),
        )
        if queued:
            return ""
        self._settle(pending)
        return "closed" if self._background.ended else "queue_full"

    def wait_for(self, wanted: Callable[[Pending], bool], least_s: float) -> None:
        """Lets prefixes be stored first; not longer than their prefill took, or `least_s`."""
        own = [pending for pending in list(self._pending.values()) if wanted(pending)]
        if own:
            self._background.flush(max(least_s, *(pending.prefill_ms / 1e3 for pending in own)))

    def _run(self, pending: Pending, store: Callable[[], str]) -> None:
        started = time.perf_counter()
        reason = "error"
        try:
            reason = store()
        except Abandoned:
            reason = "abandoned"
        finally:
            self._tally.add("store_ms", (time.perf_counter() - started) * 1e3)
            self._settle(pending, reason)

    def _settle(self, pending: Pending, reason: str = "") -> None:
        """The end of a prefix that was to be stored, with the reason if it was not."""
        self._pending.pop(id(pending), None)
        if reason:
            self._tally.because("skipped", reason)
