"""Counters behind one lock: sums by name, and how often something happened for which reason."""

import collections
import threading


class Tally:
    """What happened so far. Usable from several threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last_prefill_ms = 0.0
        self._sums: dict[str, float] = collections.defaultdict(int)
        self._reasons: dict[str, dict[str, int]] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Adds to a sum."""
        with self.lock:
            self._sums[name] += amount

    def because(self, name: str, reason: str) -> None:
        """Counts a reason."""
        with self.lock:
            counts = self._reasons.setdefault(name, {})
            counts[reason] = counts.get(reason, 0) + 1

    def of(self, name: str) -> float:
        """Returns a sum."""
        with self.lock:
            return self._sums[name]

    def reasons(self, name: str) -> dict[str, int]:
        """Returns how often each reason was counted."""
        with self.lock:
            return dict(self._reasons.get(name, {}))
