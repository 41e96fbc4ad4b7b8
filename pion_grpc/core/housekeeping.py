"""What a store does unasked: at its start, about once a second, and every half minute.

Knows no requests and no clock: whoever runs the store calls these. The one decision: whatever is removed
has been taken out of the catalogue in a transaction before, so that ending in between loses nothing.
"""

import contextlib
from typing import NamedTuple

from pion_grpc.core.receipt import forget_left_behind
from pion_grpc.core.workshop import Workshop
from pion_grpc.errors import DiskFull, OverBudget
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.blobs import Blobs
from pion_grpc.storage.leases import Leases
from pion_grpc.storage.row_snapshots import RowSnapshotTable
from pion_grpc.storage.sides import Sides
from pion_grpc.storage.transaction import unix_ms


class Totals(NamedTuple):
    """What is stored, and what it takes."""

    prefixes: int
    rows: int
    disk_used_bytes: int
    live_bytes: int
    evicted: int
    corrupt: int


def begin_if_alone(workshop: Workshop) -> bool:
    """Forgets what lasts as long as a server, if no other process serves the directory.

    That is row snapshots, what sides are counted since the start, receipts of processes that are gone,
    and prefill times. On a full disk all of it stays, which does no harm.

    Returns whether a server begins with this process.
    """
    with contextlib.suppress(DiskFull), workshop.catalog.write() as transaction:
        # In here: who is there has its lock, and who comes later writes nothing before this ends.
        if workshop.directory.live_instances() == {workshop.directory.instance}:
            RowSnapshotTable(transaction).clear()
            Sides(transaction).begin_counting()
            forget_left_behind(transaction)
            transaction.forget_prefill_times()
            return True
    return False


def end_leases(workshop: Workshop) -> None:
    """Ends leases whose time is up, and removes what waited for them."""
    with workshop.catalog.read() as transaction:
        waiting = transaction.hidden()
        expired = Leases(transaction).has_expired(unix_ms())
        expired = expired or Blobs(transaction).has_expired_leases()
    if waiting or expired:
        with workshop.catalog.write() as transaction:
            Leases(transaction).end_expired(unix_ms())
            Blobs(transaction).collect()
            for row in waiting:
                workshop.space.collect(transaction, row.id)
    workshop.space.sweep()


def clean(workshop: Workshop) -> None:
    """Buries what is dead, holds the reserve again, counts foreign files, folds the log."""
    workshop.space.bury_dead_instances()
    workshop.catalog.hold_reserve()
    workshop.space.measure()
    workshop.space.forget_layouts()
    _keep_within_budget(workshop)
    workshop.catalog.checkpoint()


def totals(workshop: Workshop, tenant: str | None = None) -> Totals:
    """Returns what is stored, and what it takes: in all, or of one tenant."""
    with workshop.catalog.read() as transaction:
        counted = transaction.totals(tenant)
        live = sum(row.disk_bytes for row in transaction.live(tenant))
        if tenant:
            return Totals(
                counted.prefixes, counted.rows, Accounts(transaction).usage(tenant), live, 0, 0
            )
        used = workshop.space.used_bytes(transaction)
    lost = workshop.space.losses
    return Totals(
        counted.prefixes, counted.rows, used, live, lost.evicted_count, lost.corrupt_count
    )


def _keep_within_budget(workshop: Workshop) -> None:
    """Evicts what is too much, as after a start with a smaller budget."""
    with workshop.catalog.read() as transaction:
        too_much = workshop.space.used_bytes(transaction) > workshop.space.budget_bytes
    if too_much:
        # What is leased, or the catalogue alone, may be more than it should be.
        with contextlib.suppress(OverBudget), workshop.catalog.write() as transaction:
            workshop.space.make_room(transaction, "", 0)
        workshop.space.sweep()
