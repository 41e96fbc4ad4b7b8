"""Extents: where the rows of live prefixes lie in row files.

Knows rows by tensor and number, not what is in them. The one decision: nothing is overwritten; an extent
that is written later supersedes, and the serials, which are chosen here, say which is later.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pion_grpc.storage.transaction import Transaction

EXTENTS_AT_ONCE = 16
"""Extents that are read at once where the latest ones may be enough."""

SCHEMA = """
CREATE TABLE extent (
  prefix INTEGER NOT NULL REFERENCES prefix (id), tensor INTEGER NOT NULL, serial INTEGER NOT NULL,
  first_row INTEGER NOT NULL, row_count INTEGER NOT NULL,
  file TEXT NOT NULL, offset INTEGER NOT NULL, checksums BLOB NOT NULL,
  boot TEXT,                              -- boot under which it was written unsynced; NULL: on disk
  PRIMARY KEY (prefix, tensor, serial)
) WITHOUT ROWID;
CREATE INDEX extent_file ON extent (prefix, file);
"""


class ExtentRow(NamedTuple):
    """Rows of one tensor of a live prefix in a row file; a later serial supersedes.

    `tensor` is the tensor's key (`TensorLayout.key`), which stays while a layout grows. Without a file
    it is a hole: rows that were cut off, and read as zeros.
    """

    tensor: int
    serial: int
    first_row: int
    row_count: int
    file: str
    offset: int
    checksums: bytes
    boot: str | None = None
    """Boot under which it was written unsynced; None: on disk."""


class Extents:
    """The table of extents within one transaction."""

    def __init__(self, transaction: "Transaction") -> None:
        self._transaction = transaction

    def of(self, prefix: int) -> list[ExtentRow]:
        """Returns the extents of a live prefix, by tensor, in order of writing."""
        rows = self._transaction.all(
            f"SELECT {', '.join(ExtentRow._fields)} FROM extent"
            " WHERE prefix = ? ORDER BY tensor, serial",
            (prefix,),
        )
        return [ExtentRow(*row) for row in rows]

    def latest(self, prefix: int, tensor: int, begin: int, end: int) -> Iterator[ExtentRow]:
        """Yields the extents of a tensor with rows from `begin` to `end`, the latest first.

        There may be very many, of which the first few say it all: they are read a few at a time.
        """
        serial = 1 << 62
        while rows := self._transaction.all(
            f"SELECT {', '.join(ExtentRow._fields)} FROM extent WHERE prefix = ? AND tensor = ?"
            " AND serial < ? AND first_row < ? AND first_row + row_count > ?"
            f" ORDER BY serial DESC LIMIT {EXTENTS_AT_ONCE}",
            (prefix, tensor, serial, end, begin),
        ):
            for row in rows:
                extent = ExtentRow(*row)
                yield extent
                serial = extent.serial

    def files(self, prefix: int) -> list[str]:
        """Returns the row files of a live prefix; an empty name stands for holes.

        There are few files and may be very many extents, so each name is found from the one before.
        """
        rows = self._transaction.all(
            "WITH RECURSIVE found (file) AS (SELECT min(file) FROM extent WHERE prefix = ?1 UNION ALL"
            " SELECT (SELECT min(file) FROM extent WHERE prefix = ?1 AND file > found.file)"
            " FROM found WHERE found.file IS NOT NULL)"
            " SELECT file FROM found WHERE file IS NOT NULL",
            (prefix,),
        )
        return [row[0] for row in rows]

    def unsynced_files(self, prefix: int) -> list[str]:
        """Returns the row files of a prefix that may not be on stable storage."""
        rows = self._transaction.all(
            "SELECT DISTINCT file FROM extent WHERE prefix = ? AND boot IS NOT NULL", (prefix,)
        )
        return [row[0] for row in rows]

    def mark_synced(self, prefix: int) -> None:
        """Notes that all of a prefix is on stable storage."""
        self._transaction.update(prefix, boot=None)
        self._transaction.run(
            "UPDATE extent SET boot = NULL WHERE prefix = ? AND boot IS NOT NULL", (prefix,)
        )

    def add(self, prefix: int, extent: ExtentRow) -> None:
        """Adds an extent; its serial is chosen here, after all others of its tensor."""
        self._transaction.run(
            "INSERT INTO extent SELECT ?, ?, coalesce(max(serial), 0) + 1, ?, ?, ?, ?, ?, ?"
            " FROM extent WHERE prefix = ? AND tensor = ?",
            (prefix, extent.tensor, *extent[2:], prefix, extent.tensor),
        )

    def remove(self, prefix: int, tensor: int) -> None:
        """Removes the extents of one tensor."""
        self._transaction.run(
            "DELETE FROM extent WHERE prefix = ? AND tensor = ?", (prefix, tensor)
        )

    def count(self) -> int:
        """Returns the number of extents that have rows, of all prefixes."""
        return int(self._transaction.all("SELECT count(*) FROM extent WHERE file != ''")[0][0])

    def replace(self, prefix: int, extents: Iterable[ExtentRow]) -> None:
        """Sets the extents of a prefix anew."""
        self._transaction.run("DELETE FROM extent WHERE prefix = ?", (prefix,))
        self._transaction.run_many(
            "INSERT INTO extent VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            ((prefix, *extent) for extent in extents),
        )
