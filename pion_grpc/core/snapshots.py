"""Row snapshots of live prefixes, for speculative decoding: how long each tensor was, kept in memory.

Going back does not touch bytes: what is cut off is covered by a hole, which later rows cover in turn.
A snapshot is known to the process that took it, and to no other; so that another's id never means one
of its own, each process counts from a random number on.
"""

import json
import secrets
import threading
from typing import NamedTuple

from pion_grpc.core.live import check_not_shared, outgrown
from pion_grpc.core.reading import own_row_counts
from pion_grpc.core.space import keep_tokens
from pion_grpc.core.values import (
    check_namespace,
)
from pion_grpc.errors import (
    NotStored,
    OverBudget,
)
from pion_grpc.storage.catalog import (
    Catalog,
    ExtentRow,
    PrefixRow,
)
from pion_grpc.storage.sides import Sides
from pion_wire.layout import Layout

SNAPSHOTS_MAX = 16
"""Row snapshots of one prefix."""


_FIRST_ID_BITS = 52  # no id leaves what a double holds exactly


class _Snapshot(NamedTuple):
    prefix: int
    sides: str
    row_counts: dict[int, int]
    """By the tensor's key; one that has come since had none."""


class Snapshots:
    """The snapshots of one process."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._snapshots: dict[int, _Snapshot] = {}
        self._serial = secrets.randbits(_FIRST_ID_BITS)

    @property
    def count(self) -> int:
        """Snapshots that are remembered."""
        return len(self._snapshots)

    def take(self, tenant: str, namespace: str, sides: str = "kv") -> int:
        """Remembers how many rows each tensor of these sides has; returns the snapshot's id.

        Raises:
            NotStored: the prefix is not stored.
            OverBudget: it has 16 snapshots of these sides already.
        """
        row = self._named(tenant, namespace)
        with self._lock:
            held = sum(
                (snapshot.prefix, snapshot.sides) == (row.id, sides)
                for snapshot in self._snapshots.values()
            )
            if held >= SNAPSHOTS_MAX:
                raise OverBudget(f"{namespace!r} has {SNAPSHOTS_MAX} snapshots: release one")
            self._serial += 1
            counts = {
                tensor.key: count
                for tensor, count in zip(
                    Layout.from_json(row.layout).tensors, own_row_counts(row), strict=True
                )
                if tensor.side.value in sides
            }
            self._snapshots[self._serial] = _Snapshot(row.id, sides, counts)
            return self._serial

    def forget_gone(self) -> None:
        """Forgets the snapshots of prefixes that are gone."""
        with self._lock:
            prefixes = {snapshot.prefix for snapshot in self._snapshots.values()}
        with self._catalog.read() as transaction:
            gone = {prefix for prefix in prefixes if transaction.by_id(prefix) is None}
        with self._lock:
            kept = [item for item in self._snapshots.items() if item[1].prefix not in gone]
            self._snapshots = dict(kept)

    def restore(self, tenant: str, namespace: str, snapshot_id: int, sides: str = "kv") -> int:
        """Cuts every tensor that has grown since back to a snapshot; returns the generation.

        Raises:
            NotStored: the prefix, or the snapshot, is unknown.
            InvalidRequest: a child shares rows that would go.
        """
        check_namespace(namespace)
        with self._lock:
            snapshot = self._snapshots.get(snapshot_id)
        with self._catalog.write() as transaction:
            row = transaction.by_name(tenant, namespace)
            if row is None:
                raise NotStored(f"{namespace!r} is not stored", namespace=namespace)
            if snapshot is None or (snapshot.prefix, snapshot.sides) != (row.id, sides):
                raise NotStored(f"{namespace!r} has no snapshot {snapshot_id}", namespace=namespace)
            kept = []
            counts = own_row_counts(row)
            sides_table = Sides(transaction)
            for tensor, now in zip(Layout.from_json(row.layout).tensors, counts, strict=True):
                mine = tensor.side.value in sides
                kept.append(min(now, snapshot.row_counts.get(tensor.key, 0)) if mine else now)
                if now > kept[-1]:
                    begin = row.base + kept[-1]
                    hole = ExtentRow(tensor.key, 0, begin, now - kept[-1], "", 0, b"")
                    transaction.add_extent(row.id, hole)
                    cut = now - kept[-1]
                    sides_table.resized(row.id, tensor.side.value, -cut, -cut * tensor.row_bytes)
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
        """Forgets a snapshot and keeps the rows; says whether it was known."""
        row = self._named(tenant, namespace)
        with self._lock:
            known = self._snapshots.get(snapshot_id)
            if known is None or (known.prefix, known.sides) != (row.id, sides):
                return False
            del self._snapshots[snapshot_id]
            return True

    def _named(self, tenant: str, namespace: str) -> PrefixRow:
        check_namespace(namespace)
        with self._catalog.read() as transaction:
            row = transaction.by_name(tenant, namespace)
        if row is None:
            raise NotStored(f"{namespace!r} is not stored", namespace=namespace)
        return row
