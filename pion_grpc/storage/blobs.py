"""Blobs: opaque values in files of their own, under page checksums, named by one row each.

A blob is written whole, then named in the transaction that makes it somebody's value, and becomes
garbage in the transaction that replaces it; one that is leased, when the lease has ended, and counts
until then. Knows bytes and files; whose value it is, other tables say.

A file holds the value alone, or is a segment (see `pion_wire.segment`) whose only part it is: then other
programs can read it, too. Which of the two, the end of its name says.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from pion_grpc.errors import Corrupt
from pion_grpc.storage.pages import CheckedRun, OpenFile
from pion_grpc.storage.transaction import Transaction
from pion_wire.segment import SegmentError, check_header, header_length

SEGMENT_SUFFIX = ".safetensors"
LEASED = "blob.leased_until_unix_ms > CAST(unixepoch('subsec') * 1000 AS INTEGER)"
"""In a statement: whether a blob is leased."""

SCHEMA = """
CREATE TABLE blob (
  id        INTEGER PRIMARY KEY AUTOINCREMENT,
  tenant    TEXT NOT NULL,
  file      TEXT NOT NULL,
  bytes     INTEGER NOT NULL,
  checksums BLOB NOT NULL,
  boot      TEXT,              -- boot under which it was written unsynced; NULL: on disk
  leased_until_unix_ms INTEGER NOT NULL DEFAULT 0,
  removed   INTEGER NOT NULL DEFAULT 0  -- nobody's value any more, but leased
);
CREATE INDEX blob_file ON blob (file);
CREATE INDEX blob_unsynced ON blob (id) WHERE boot IS NOT NULL;
CREATE INDEX blob_removed ON blob (leased_until_unix_ms) WHERE removed;
CREATE TRIGGER blob_added AFTER INSERT ON blob BEGIN
  INSERT INTO usage VALUES (NEW.tenant, NEW.bytes) ON CONFLICT DO UPDATE SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER blob_deleted AFTER DELETE ON blob BEGIN
  UPDATE usage SET bytes = bytes - OLD.bytes WHERE tenant = OLD.tenant;
  INSERT OR IGNORE INTO garbage VALUES (OLD.file, OLD.bytes);
END;
"""


class BlobRow(NamedTuple):
    """One blob."""

    id: int
    file: str
    size: int
    """Of its file."""
    checksums: bytes
    boot: str | None

    @property
    def is_segment(self) -> bool:
        """Whether its file is a segment."""
        return self.file.endswith(SEGMENT_SUFFIX)

    def run_of(self, file: OpenFile) -> CheckedRun:
        """Returns where the value is in its file.

        Raises:
            Corrupt: what is around it is not what was written.
        """
        if not self.is_segment:
            return CheckedRun(file, 0, self.size, self.checksums)
        if os.fstat(file.descriptor).st_size != self.size:
            raise Corrupt(f"{file.path} does not have the size it was written with")
        try:
            length = header_length(file.read(0, 8))
            check_header(file.read(8, length))
        except SegmentError as error:
            raise Corrupt(f"{file.path} is not a segment: {error}") from error
        # Behind the value there is nothing but its checksums.
        offset, end = 8 + length, self.size - len(self.checksums)
        if file.read(end, len(self.checksums)) != self.checksums:
            raise Corrupt(f"{file.path} has other checksums than it was written with")
        return CheckedRun(file, offset, end - offset, self.checksums)


class Blobs:
    """The table of blobs within one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def add(self, tenant: str, file: str, size: int, checksums: bytes, boot: str | None) -> int:
        """Names a blob and returns its id."""
        rows = self._transaction.all(
            "INSERT INTO blob (tenant, file, bytes, checksums, boot) VALUES (?, ?, ?, ?, ?)"
            " RETURNING id",
            (tenant, file, size, checksums, boot),
        )
        return int(rows[0][0])

    def get(self, blob: int) -> BlobRow | None:
        """Returns a blob."""
        rows = self._transaction.all(
            "SELECT id, file, bytes, checksums, boot FROM blob WHERE id = ?", (blob,)
        )
        return BlobRow(*rows[0]) if rows else None

    def size(self, blob: int) -> int:
        """Returns the bytes of a blob."""
        rows = self._transaction.all("SELECT bytes FROM blob WHERE id = ?", (blob,))
        return int(rows[0][0])

    def is_named(self, file: str) -> bool:
        """Says whether a file is a blob's, or was until it became garbage."""
        return bool(
            self._transaction.all(
                "SELECT 1 FROM blob WHERE file = ? UNION ALL SELECT 1 FROM garbage WHERE file = ?",
                (file, file),
            )
        )

    def remove(self, blob: int) -> None:
        """Takes a blob away; its file becomes garbage, once no lease keeps it."""
        self._transaction.run("UPDATE blob SET removed = 1 WHERE id = ?", (blob,))
        self._transaction.run(f"DELETE FROM blob WHERE id = ? AND NOT {LEASED}", (blob,))

    def lease(self, blobs: Sequence[int], until_unix_ms: int) -> bool:
        """Leases blobs; False if one of them has been taken away meanwhile."""
        rows = [
            self._transaction.all(
                "UPDATE blob SET leased_until_unix_ms = max(leased_until_unix_ms, ?)"
                " WHERE id = ? AND NOT removed RETURNING id",
                (until_unix_ms, blob),
            )
            for blob in blobs
        ]
        return all(rows)

    def has_expired_leases(self) -> bool:
        """Says whether `collect` has something to do."""
        statement = f"SELECT 1 FROM blob WHERE removed AND NOT {LEASED} LIMIT 1"
        return bool(self._transaction.all(statement))

    def collect(self) -> None:
        """Makes garbage of the files that were kept by a lease only, and are not any more."""
        self._transaction.run(f"DELETE FROM blob WHERE removed AND NOT {LEASED}")

    def owner(self, blob: int) -> str:
        """Returns words for what a blob is the value of."""
        keys = self._transaction.all("SELECT substr(name, 1, 64) FROM key WHERE blob = ?", (blob,))
        for (name,) in keys:
            return f"the value of key {bytes(name).decode(errors='backslashreplace')!r}"
        states = self._transaction.all("SELECT layer, session FROM state WHERE blob = ?", (blob,))
        for layer, session in states:
            return f"layer {layer} of {session!r}"
        return "a value that was replaced meanwhile"

    def condemn(self, blob: int) -> None:
        """Takes a damaged blob away, and whatever it is the value of."""
        for table, column in (("key", "blob"), ("state", "blob"), ("blob", "id")):
            self._transaction.run(f"DELETE FROM {table} WHERE {column} = ?", (blob,))

    def unsynced(self) -> list[BlobRow]:
        """Returns what would not survive a power cut."""
        rows = self._transaction.all(
            "SELECT id, file, bytes, checksums, boot FROM blob WHERE boot IS NOT NULL", ()
        )
        return [BlobRow(*row) for row in rows]

    def synced(self, blob: int) -> None:
        """Notes that a blob is on stable storage."""
        self._transaction.run("UPDATE blob SET boot = NULL WHERE id = ?", (blob,))
