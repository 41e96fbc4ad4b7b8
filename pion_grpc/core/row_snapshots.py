"""Row snapshots of live prefixes, for speculative decoding: how long each tensor was, and back to that.

Going back does not touch bytes: what is cut off is covered by a hole, which later rows cover in turn.

The one decision: a snapshot is a row of the catalogue, so every process of the server knows it, and
that which took it may die. It ends with its prefix or with the server.
"""

import json

from pion_grpc.core.gaps import written_rows
from pion_grpc.core.indexing import keep_tokens
from pion_grpc.core.live import check_not_shared, outgrown
from pion_grpc.core.reading import own_row_counts
from pion_grpc.core.values import check_namespace
from pion_grpc.core.workshop import Workshop
from pion_grpc.errors import NotStored, OverBudget
from pion_grpc.storage.extents import ExtentRow, Extents
from pion_grpc.storage.row_snapshots import RowSnapshotTable
from pion_grpc.storage.sides import Sides
from pion_grpc.storage.transaction import PrefixRow, Transaction
from pion_wire.layout import Layout

SNAPSHOTS_MAX = 16
"""Row snapshots of the same sides of one prefix."""
SNAPSHOT_BYTES = 64
"""What one takes in the catalogue, beside as much again for every tensor, generously."""


class NoFreeSnapshot(OverBudget):
    """These sides of the prefix have as many snapshots as they may have."""


class RowSnapshots:
    """All row snapshots of a data directory, for one process."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._catalog = workshop.catalog

    def take(self, tenant: str, namespace: str, sides: str = "kv") -> int:
        """Remembers how many rows each tensor of these sides has; returns the snapshot's id.

        Raises:
            NotStored: the prefix is not stored.
            NoFreeSnapshot: it has 16 snapshots of these sides already.
            OverBudget: the catalogue has reached the budget.
        """
        check_namespace(namespace)
        with self._catalog.write() as transaction:
            row = _named(transaction, tenant, namespace)
            snapshots = RowSnapshotTable(transaction)
            if snapshots.count(row.id, sides) >= SNAPSHOTS_MAX:
                raise NoFreeSnapshot(f"{namespace!r} has {SNAPSHOTS_MAX} snapshots: release one")
            tensors = Layout.from_json(row.layout).tensors
            self._workshop.space.check_declared(SNAPSHOT_BYTES * (1 + len(tensors)))
            counts = {
                tensor.key: count
                for tensor, count in zip(tensors, own_row_counts(row), strict=True)
                if tensor.side.value in sides
            }
            return snapshots.add(row.id, sides, counts)

    def restore(self, tenant: str, namespace: str, snapshot_id: int, sides: str = "kv") -> int:
        """Cuts every tensor that has grown since back to a snapshot; returns the generation.

        Raises:
            NotStored: the prefix, or the snapshot, is unknown.
            InvalidRequest: a child shares rows that would go.
        """
        check_namespace(namespace)
        with self._catalog.write() as transaction:
            row = _named(transaction, tenant, namespace)
            snapshot = RowSnapshotTable(transaction).get(snapshot_id, row.id, sides)
            if snapshot is None:
                raise NotStored(f"{namespace!r} has no snapshot {snapshot_id}", namespace=namespace)
            kept = []
            counts = own_row_counts(row)
            sides_table = Sides(transaction)
            for tensor, now in zip(Layout.from_json(row.layout).tensors, counts, strict=True):
                mine = tensor.side.value in sides
                # One that has come since had none.
                kept.append(min(now, snapshot.get(tensor.key, 0)) if mine else now)
                if now > kept[-1]:
                    cut = now - kept[-1]
                    begin = row.base + kept[-1]
                    extents = Extents(transaction).latest(row.id, tensor.key, begin, begin + cut)
                    written = written_rows(row, tensor, extents, begin, begin + cut)
                    size = written * tensor.row_bytes
                    sides_table.resized(row.id, tensor.side.value, -cut, -size)
                    hole = ExtentRow(tensor.key, 0, begin, cut, "", 0, b"")
                    Extents(transaction).add(row.id, hole)
            if tuple(kept) == counts:
                return row.generation
            count = row.base + min(kept, default=0)
            check_not_shared(transaction, row, count)
            keep_tokens(transaction, row, count, row.fidelity)
            transaction.update(
                row.id,
                state="live",
                row_counts=json.dumps(kept),
                token_count=count,
                **outgrown(row),
            )
            return transaction.new_generation(row.id)

    def release(self, tenant: str, namespace: str, snapshot_id: int, sides: str = "kv") -> bool:
        """Forgets a snapshot and keeps the rows; says whether it was known.

        Raises:
            NotStored: the prefix is not stored.
        """
        check_namespace(namespace)
        with self._catalog.write() as transaction:
            row = _named(transaction, tenant, namespace)
            return RowSnapshotTable(transaction).remove(snapshot_id, row.id, sides)


def _named(transaction: Transaction, tenant: str, namespace: str) -> PrefixRow:
    row = transaction.by_name(tenant, namespace)
    if row is None:
        raise NotStored(f"{namespace!r} is not stored", namespace=namespace)
    return row
