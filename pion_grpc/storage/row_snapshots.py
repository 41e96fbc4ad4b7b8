"""Row snapshots: how many rows each tensor of a prefix had when a client said that it may go back.

They are numbers beside a prefix and keep none of its bytes. Whoever opens the directory sees them all;
they go with the prefix, with a side of it that goes, and with the last process of a server.
"""

import json

from pion_grpc.storage.transaction import Transaction

SCHEMA = """
CREATE TABLE row_snapshot (
  id         INTEGER PRIMARY KEY,  -- a generation: none is ever given twice
  prefix     INTEGER NOT NULL REFERENCES prefix (id),
  sides      TEXT NOT NULL CHECK (sides IN ('k', 'v', 'kv')),
  row_counts TEXT NOT NULL         -- [tensor's key, rows] each, JSON
);
CREATE INDEX row_snapshot_prefix ON row_snapshot (prefix);
"""

ID_MAX = (1 << 63) - 1
"""What a column holds; a client may ask for more."""


class RowSnapshotTable:
    """The table of row snapshots within one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def add(self, prefix: int, sides: str, row_counts: dict[int, int]) -> int:
        """Adds a snapshot of sides of a prefix, rows by the tensor's key; returns its id."""
        identity = self._transaction.next("generation")
        self._transaction.run(
            "INSERT INTO row_snapshot VALUES (?, ?, ?, ?)",
            (identity, prefix, sides, json.dumps(list(row_counts.items()))),
        )
        return identity

    def get(self, snapshot: int, prefix: int, sides: str) -> dict[int, int] | None:
        """Returns the rows by the tensor's key; None if it is no snapshot of just these sides."""
        if snapshot > ID_MAX:
            return None
        rows = self._transaction.all(
            "SELECT row_counts FROM row_snapshot WHERE id = ? AND prefix = ? AND sides = ?",
            (snapshot, prefix, sides),
        )
        return dict(json.loads(rows[0][0])) if rows else None

    def count(self, prefix: int, sides: str) -> int:
        """Returns how many there are of just these sides of a prefix."""
        statement = "SELECT count(*) FROM row_snapshot WHERE prefix = ? AND sides = ?"
        return int(self._transaction.all(statement, (prefix, sides))[0][0])

    def remove(self, snapshot: int, prefix: int, sides: str) -> bool:
        """Removes a snapshot; says whether it was one of just these sides of the prefix."""
        return snapshot <= ID_MAX and bool(
            self._transaction.all(
                "DELETE FROM row_snapshot WHERE id = ? AND prefix = ? AND sides = ? RETURNING id",
                (snapshot, prefix, sides),
            )
        )

    def remove_side(self, prefix: int, side: str) -> None:
        """Removes every snapshot that a side of a prefix is in."""
        self._transaction.run(
            "DELETE FROM row_snapshot WHERE prefix = ? AND instr(sides, ?)", (prefix, side)
        )

    def clear(self) -> None:
        """Removes all of them."""
        self._transaction.run("DELETE FROM row_snapshot")
