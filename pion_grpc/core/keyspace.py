"""The keyspace: the keys of all tenants, durable like everything else.

What clients keep beside their prefixes: lineages, journals, whole chunks of a cache.
Refuses to know what a piece of work does with its tenant's `Keys`.

The one decision to understand: **writes of many clients share a transaction**. A commit costs more than
what most commands do, so one thread takes all that waits and commits it at once. Each piece of work is
undone by itself if it fails; nobody is answered before the commit.
"""

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import structlog

from pion_grpc.core.blobs import BlobReading
from pion_grpc.core.key_values import LargeValue
from pion_grpc.core.keys import Keys
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.space import FREE_BYTES_MAX
from pion_grpc.core.workshop import OutOfDate, Workshop
from pion_grpc.errors import Corrupt, OverBudget, OverQuota, PionError
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.blobs import Blobs
from pion_grpc.storage.keyspace import KeyTable, expired
from pion_grpc.storage.transaction import Transaction, unix_ms

BATCH_MAX = 512
"""Pieces of work in one transaction."""
EXPIRED_AT_ONCE = 1_000
WRITTEN_TIMES = 4
"""How often what a key grows by is written, at most: to a table and its index, and both to the log."""

_log = structlog.get_logger()


class Work(NamedTuple):
    """Something to do in a write transaction."""

    tenant: str
    run: Callable[[Keys], Any]
    grows_bytes: int = 0
    """About how much larger it makes the database."""


Outcome: TypeAlias = Any
"""What a piece of work returned, or the exception that undid it."""


class Keyspace:
    """The keys of all tenants; safe to use from many threads, and from several processes at once."""

    def __init__(self, store: PrefixStore) -> None:
        self._workshop = store.workshop
        self.blobs = store.blobs

    def reading(self, tenant: str, run: Callable[[Keys], Any]) -> Any:
        """Returns what `run` makes of one tenant's keys, which it must not change.

        It is run again if a large value was replaced before its file could be opened.
        """
        try:
            while True:
                with (
                    contextlib.suppress(OutOfDate),
                    self._workshop.catalog.read() as transaction,
                ):
                    return run(Keys(transaction, tenant, self.blobs, unix_ms()))
        except Corrupt:
            self._workshop.space.sweep()
            raise

    def writing(self, batch: Sequence[Work]) -> list[Outcome]:
        """Does all work of a batch, in order, and returns when it is committed.

        Each has the room that those before it leave. What one piece raises is its outcome, and it has
        changed nothing then.
        """
        outcomes: list[Outcome] = []
        files: list[str] = []
        removing = not any(work.grows_bytes for work in batch)
        try:
            with self._workshop.catalog.write(removing=removing) as transaction:
                now = unix_ms()
                roomy = self._surely_fits(transaction, batch)
                growth = _Growth(self._workshop, transaction)
                for work in batch:
                    if roomy:
                        growth.byte_count += work.grows_bytes
                    elif work.grows_bytes:
                        try:
                            growth.make_room(work.tenant, work.grows_bytes)
                        except (OverBudget, OverQuota) as error:
                            outcomes.append(error)
                            continue
                    make_room = functools.partial(growth.make_room, work.tenant)
                    keys = Keys(transaction, work.tenant, self.blobs, now, make_room, files)
                    outcomes.append(_attempt(transaction, work, keys))
        except PionError as error:  # the commit failed: nothing of it happened
            outcomes = [error] * len(batch)
        finally:
            self.blobs.remove_unnamed(files)
            if self._workshop.space.has_damaged_blobs:
                self._workshop.space.sweep()
        return outcomes

    def open(self, value: LargeValue) -> BlobReading:
        """Opens a large value.

        Raises:
            OutOfDate: it was replaced meanwhile.
        """
        with self._workshop.catalog.read() as transaction:
            row = Blobs(transaction).get(value.blob)
        if row is None:
            raise OutOfDate
        return self.blobs.open(row)

    def expire(self) -> None:
        """Removes keys whose time has come, and gives back what removed ones took.

        Call it about once a second.
        """
        while True:
            now = unix_ms()
            with self._workshop.catalog.read() as transaction:
                due = expired(transaction, now, EXPIRED_AT_ONCE)
                free = transaction.free_bytes()
            if not due:
                if free > FREE_BYTES_MAX:
                    self._workshop.catalog.checkpoint()
                return
            with self._workshop.catalog.write() as transaction:
                for tenant, name in due:
                    table = KeyTable(transaction, tenant, now)
                    if table.get(name) is None:
                        table.remove(name)

    def _surely_fits(self, transaction: Transaction, batch: Sequence[Work]) -> bool:
        """Whether all that a batch adds fits, even if nothing of it removes anything."""
        total = sum(work.grows_bytes for work in batch)
        tenants = {work.tenant for work in batch if work.grows_bytes}
        beside = (WRITTEN_TIMES - 1) * total
        return all(
            self._workshop.space.has_room(transaction, one, total, beside) for one in tenants
        )


class _Growth:
    """How much larger one transaction makes the database."""

    def __init__(self, workshop: Workshop, transaction: Transaction) -> None:
        self.byte_count = 0
        self._workshop = workshop
        self._transaction = transaction

    def make_room(self, tenant: str, size: int) -> None:
        """Counts bytes that are about to come to it, and evicts until they fit.

        Raises:
            OverBudget, OverQuota: they do not.
        """
        transaction, space = self._transaction, self._workshop.space
        beside = WRITTEN_TIMES * (self.byte_count + size) - size
        if not space.has_room(transaction, tenant, size, beside):
            instance = self._workshop.directory.instance
            reservation = Accounts(transaction).reserve(instance, tenant, 0, size)
            try:
                space.make_room(transaction, tenant, size, grown_bytes=beside)
            finally:
                Accounts(transaction).release(reservation)
        self.byte_count += size


class KeyWriter:
    """The thread that does the work of many clients, as much as waits at a time."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._waiting: queue.SimpleQueue[
            tuple[Sequence[Work], Callable[[list[Outcome]], None]] | None
        ] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="keyspace")

    def start(self) -> None:
        """Begins to work."""
        self._thread.start()

    def stop(self) -> None:
        """Returns when everything submitted has been done."""
        self._waiting.put(None)
        self._thread.join()

    def submit(self, work: Sequence[Work], done: Callable[[list[Outcome]], None]) -> None:
        """Does work in order, then calls `done` with the outcomes, on the writer's thread."""
        self._waiting.put((work, done))

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            taken = [first]
            size = len(first[0])
            stopping = False
            while size < BATCH_MAX and not self._waiting.empty():
                following = self._waiting.get()
                if following is None:
                    stopping = True
                    break
                taken.append(following)
                size += len(following[0])
            self._do(taken)
            if stopping:
                return

    def _do(self, taken: list[tuple[Sequence[Work], Callable[[list[Outcome]], None]]]) -> None:
        batch = [work for works, _ in taken for work in works]
        try:
            outcomes = self._keyspace.writing(batch)
        except Exception as error:
            _log.exception("keyspace writer failed")
            outcomes = [error] * len(batch)
        for works, done in taken:
            done(outcomes[: len(works)])
            outcomes = outcomes[len(works) :]


def _attempt(transaction: Transaction, work: Work, keys: Keys) -> Outcome:
    try:
        with transaction.undone_on_error():
            return work.run(keys)
    except Exception as error:
        if not transaction.is_open:
            raise  # the database gave up on all of it
        return error
