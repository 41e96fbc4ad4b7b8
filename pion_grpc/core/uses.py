"""Uses: what was used when, by all processes on a directory, in the order in which it happened.

Reads never write. A use is noted where the other processes can read it, and written into the
catalogue about once a second. The one decision: **whoever evicts asks first**, so that what goes is what
nobody has used for longest, whichever process was asked for it. Uses of states alone are this process's
own for up to a second; no limit on a number goes by them.
"""

import threading
import time

from pion_grpc.storage.catalog import Catalog
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.states import States
from pion_grpc.storage.transaction import Transaction
from pion_grpc.storage.uses import Use, UseFile

_SIDES = ("", "k", "v", "kv")
"""By the two low bits of a key; the others are the prefix. No side means all of it."""


class Uses:
    """The uses that one process notes, and those of all that it looks at; safe for many threads."""

    def __init__(self, directory: DataDirectory, catalog: Catalog) -> None:
        self._catalog = catalog
        self._file = UseFile(directory)
        self._lock = threading.Lock()
        self._states: dict[tuple[str, str], int] = {}

    def note(self, prefix: int, sides: str = "") -> None:
        """Notes that a prefix, or these sides of it, was used now."""
        self._file.note(prefix << 2 | ("v" in sides) << 1 | ("k" in sides))

    def note_state(self, tenant: str, session: str) -> None:
        """Notes that the states of a session were used now."""
        with self._lock:
            self._states[tenant, session] = time.time_ns()

    def flush(self) -> None:
        """Writes down what was used in this process since the last time.

        Raises:
            DiskFull: the catalogue cannot be written; it will be the next time.
        """
        uses = self._file.unwritten()
        with self._lock:
            states = dict(self._states)
        if not uses and not states:
            return
        with self._catalog.write() as transaction:
            _stamp(transaction, uses)
            States(transaction).stamp_past(states.items())
        if uses:
            self._file.written(uses[-1][1])
        with self._lock:
            self._states = dict(self._states.items() - states.items())

    def gather(self, transaction: Transaction) -> None:
        """Stamps in a transaction what any process has used up to now: call it before what evicts."""
        for uses in (self._file.unwritten(), *self._file.of_others()):
            _stamp(transaction, uses)
        with self._lock:
            states = dict(self._states)
        States(transaction).stamp_past(states.items())

    def inherit(self, transaction: Transaction, instance: str) -> None:
        """Stamps what a process that is gone has used and not written down."""
        _stamp(transaction, self._file.of_dead(instance))


def _stamp(transaction: Transaction, uses: list[Use]) -> None:
    transaction.stamp_past(((key >> 2, _SIDES[key & 3]), clock) for key, clock in uses)
