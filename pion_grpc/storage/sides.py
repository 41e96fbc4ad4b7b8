"""Sides: which halves of a prefix a RESP client has declared, and in which order they were used.

A side is declared before its tensors exist, so what they will be is kept beside the prefix, as a text
that `core` writes and reads. A prefix stored over gRPC has no rows here: its layout says everything,
and the limit on the number of sides never counts it.

What became of sides is counted here, too, by all processes of a server together, from its start on.
"""

import time
from typing import NamedTuple

from pion_grpc.storage.extents import Extents
from pion_grpc.storage.transaction import Transaction

SCHEMA = """
CREATE TABLE side (
  prefix   INTEGER NOT NULL REFERENCES prefix (id),
  side     TEXT NOT NULL CHECK (side IN ('k', 'v')),
  declared TEXT NOT NULL,               -- what its tensors are or will be, JSON
  rows     INTEGER NOT NULL DEFAULT 0,  -- of all its tensors
  bytes    INTEGER NOT NULL DEFAULT 0,  -- of those that are no gaps, superseded ones left out
  unsaved  INTEGER NOT NULL DEFAULT 1,  -- declared since the last save
  last_use INTEGER NOT NULL,
  PRIMARY KEY (prefix, side)
) WITHOUT ROWID;
CREATE INDEX side_use ON side (last_use);
"""


_K_OF_PREFIX = "side = 'k' AND NOT json_extract(declared, '$[2]')"


class SideRow(NamedTuple):
    """One declared side."""

    prefix: int
    side: str
    declared: str


class SideTotals(NamedTuple):
    """What the declared sides hold."""

    sides: int
    rows: int
    bytes: int
    k_sides: int
    """Of prefixes: those that are sessions of the namespace's own name do not count."""
    k_rows: int


class SideCounts(NamedTuple):
    """What happened to sides since the server started."""

    gone: int
    """Sides dropped, for whatever reason."""
    records: int
    """Declarations, batches and drops since the start, or the last save."""
    recovered: int
    """Declarations and batches that were found unsaved at the start."""
    saved_unix_s: int
    """When everything was last saved; the start, if it has not been since."""


class Sides:
    """The table of sides within one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def of(self, prefix: int) -> dict[str, str]:
        """Returns what is declared of each side of a prefix."""
        rows = self._transaction.all("SELECT side, declared FROM side WHERE prefix = ?", (prefix,))
        return dict(rows)

    def add(self, prefix: int, side: str, declared: str) -> None:
        """Declares a side; it is the most recently used one then."""
        self._transaction.run(
            "INSERT INTO side (prefix, side, declared, last_use) VALUES (?, ?, ?, ?)",
            (prefix, side, declared, self._transaction.next("clock")),
        )

    def redeclare(self, prefix: int, side: str, declared: str) -> None:
        """Replaces what is declared of a side; its rows and its use stay."""
        self._transaction.run(
            "UPDATE side SET declared = ? WHERE prefix = ? AND side = ?", (declared, prefix, side)
        )

    def resized(self, prefix: int, side: str, rows: int, size: int) -> None:
        """Notes that a side has this many rows and bytes more, or fewer."""
        self._transaction.run(
            "UPDATE side SET rows = rows + ?, bytes = bytes + ? WHERE prefix = ? AND side = ?",
            (rows, size, prefix, side),
        )

    def sealed(self, prefix: int, side: str, size: int) -> None:
        """Notes how many bytes a segment has of a side: every row of it, with no gap left."""
        self._transaction.run(
            "UPDATE side SET bytes = ? WHERE prefix = ? AND side = ?", (size, prefix, side)
        )

    def totals(self, tenant: str | None = None) -> SideTotals:
        """Counts what is declared, of one tenant or of all."""
        of_tenant = (
            "" if tenant is None else " WHERE prefix IN (SELECT id FROM prefix WHERE tenant = ?)"
        )
        rows = self._transaction.all(
            "SELECT count(*), coalesce(sum(rows), 0), coalesce(sum(bytes), 0),"
            f" count(*) FILTER (WHERE {_K_OF_PREFIX}),"
            f" coalesce(sum(rows) FILTER (WHERE {_K_OF_PREFIX}), 0)"
            f" FROM side{of_tenant}",
            () if tenant is None else (tenant,),
        )
        return SideTotals(*rows[0])

    def remove(self, prefix: int, side: str) -> None:
        """Takes a declaration back."""
        self._transaction.run("DELETE FROM side WHERE prefix = ? AND side = ?", (prefix, side))

    def count(self) -> int:
        """Returns how many are declared, of all tenants."""
        return int(self._transaction.all("SELECT count(*) FROM side")[0][0])

    def least_used(self, prefix: int, sides: str) -> SideRow | None:
        """Returns the side that was not used for longest, and may go.

        None of these of a prefix, and none of a prefix that somebody is writing to.
        """
        rows = self._transaction.all(
            "SELECT prefix, side, declared FROM side WHERE NOT (prefix = ? AND instr(?, side))"
            " AND NOT EXISTS (SELECT 1 FROM reservation WHERE reservation.prefix = side.prefix)"
            " ORDER BY last_use LIMIT 1",
            (prefix, sides),
        )
        return SideRow(*rows[0]) if rows else None

    def begin_counting(self) -> None:
        """Counts anew: the server starts, with what it finds unsaved."""
        declared = int(self._transaction.all("SELECT count(*) FROM side WHERE unsaved")[0][0])
        begun = SideCounts(0, 0, Extents(self._transaction).count() + declared, int(time.time()))
        for name, value in begun._asdict().items():
            self._transaction.run(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"side {name}", value)
            )

    def counts(self) -> SideCounts:
        """Returns what was counted since then."""
        rows = self._transaction.all("SELECT key, value FROM meta WHERE key LIKE 'side %'")
        return SideCounts(
            **{"gone": 0, "records": 0, "recovered": 0, "saved_unix_s": 0}
            | {key.removeprefix("side "): value for key, value in rows}
        )

    def count_records(self, count: int) -> None:
        """Counts declarations or batches; those that have been saved are subtracted again."""
        self._add("records", count)

    def count_gone(self, sides: int) -> None:
        """Counts sides that were dropped."""
        self._add("gone", sides)
        self._add("records", sides)

    def saved(self) -> None:
        """Notes that all of them have been saved."""
        self._transaction.run("UPDATE side SET unsaved = 0 WHERE unsaved")
        self._transaction.run(
            "UPDATE meta SET value = ? WHERE key = 'side saved_unix_s'", (int(time.time()),)
        )

    def _add(self, name: str, count: int) -> None:
        self._transaction.run(
            "UPDATE meta SET value = max(value + ?, 0) WHERE key = ?", (count, f"side {name}")
        )
