"""Losses: what went without anybody having asked for it, until the log has been told.

Knows names and numbers; not why something went, nor what a log is. Names are kept of the last few only,
numbers of all.
"""

import collections
import threading
from collections.abc import Iterable
from typing import NamedTuple

NAMES_MAX = 16
"""What went is told by name up to here, by number beyond."""
TROUBLES_MAX = 1_000
"""Files whose trouble is remembered, so that it is told once."""


class LossReport(NamedTuple):
    """What has been lost since the report before."""

    evicted: int
    evicted_names: tuple[str, ...]
    """Of the last ones."""
    corrupt: int
    corrupt_files: tuple[str, ...]
    troubles: tuple[str, ...]
    """Files that could not be read or removed, and why. Nothing is lost by it yet."""
    ownerless: int
    """Files of processes that are gone, which nothing named."""


class Losses:
    """The losses of one process; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._evicted = 0
        self._corrupt = 0
        self._ownerless = 0
        self._told = (0, 0)
        self._evicted_names: collections.deque[str] = collections.deque(maxlen=NAMES_MAX)
        self._corrupt_files: collections.deque[str] = collections.deque(maxlen=NAMES_MAX)
        self._troubles: dict[str, str] = {}
        self._told_troubles: set[str] = set()

    @property
    def evicted_count(self) -> int:
        """Prefixes evicted since the start."""
        return self._evicted

    @property
    def corrupt_count(self) -> int:
        """Prefixes found damaged since the start."""
        return self._corrupt

    def evicted(self, names: Iterable[str]) -> None:
        """Notes prefixes that were evicted."""
        names = list(names)
        with self._lock:
            self._evicted += len(names)
            self._evicted_names.extend(names)

    def corrupt(self, file: str) -> None:
        """Notes a prefix that was taken out because this file of it is damaged."""
        with self._lock:
            self._corrupt += 1
            self._corrupt_files.append(file)

    def ownerless(self, count: int) -> None:
        """Notes files that were removed because nothing named them."""
        with self._lock:
            self._ownerless += count

    def trouble(self, name: str, problem: str) -> None:
        """Notes that a file cannot be read or removed; it is told once."""
        with self._lock:
            self._troubles[name] = problem
            if len(self._troubles) > TROUBLES_MAX:
                del self._troubles[next(iter(self._troubles))]

    def report(self) -> LossReport:
        """Returns what has been lost since the last call."""
        with self._lock:
            evicted, corrupt = self._told
            report = LossReport(
                self._evicted - evicted,
                tuple(self._evicted_names),
                self._corrupt - corrupt,
                tuple(self._corrupt_files),
                tuple(
                    problem
                    for name, problem in self._troubles.items()
                    if name not in self._told_troubles
                ),
                self._ownerless,
            )
            self._told = self._evicted, self._corrupt
            self._told_troubles = set(self._troubles)
            self._ownerless = 0
            self._evicted_names.clear()
            self._corrupt_files.clear()
        return report
