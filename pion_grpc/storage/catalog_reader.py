"""The catalogue from outside: what it says of every file, beside a server or without one.

Opens the database for reading only, also on a medium that cannot be written. The one decision: each
question is a transaction of its own, as the answer may be another one by the time a file has been looked
at; so whoever checks asks again before calling anything damaged.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import apsw

from pion_grpc.errors import CannotStart
from pion_grpc.storage.blobs import BlobRow, Blobs
from pion_grpc.storage.catalog import BUSY_MS
from pion_grpc.storage.catalog_errors import DamagedCatalogue
from pion_grpc.storage.extents import ExtentRow, Extents
from pion_grpc.storage.match_index import MatchIndex
from pion_grpc.storage.schema import APPLICATION_ID, SCHEMA_VERSION, check_shape, shape_of
from pion_grpc.storage.transaction import PrefixRow, Transaction


class Located(NamedTuple):
    """Where a prefix lies at one moment."""

    row: PrefixRow
    parent: str
    extents: list[ExtentRow]
    """Those that have a file."""
    token_ids: bytes


class CatalogReader:
    """Answers about an opened catalogue."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def prefix_sizes(self) -> dict[int, int]:
        """Returns the bytes of every published prefix by its identity, the older ones first."""
        return self._sizes(
            "SELECT id, disk_bytes FROM prefix WHERE state IN ('live', 'sealed') ORDER BY id"
        )

    def blob_sizes(self) -> dict[int, int]:
        """Returns the bytes of every value that has a file of its own, by its identity."""
        return self._sizes("SELECT id, bytes FROM blob ORDER BY id")

    def problems(self) -> list[str]:
        """Returns what is wrong with the database's own pages."""
        rows = self._connection.execute("PRAGMA integrity_check(10)").fetchall()
        return [str(row[0]) for row in rows if row[0] != "ok"]

    def blob(self, identity: int) -> BlobRow | None:
        """Returns a value; None if it has gone."""
        return Blobs(Transaction(self._connection)).get(identity)

    def owner(self, blob: BlobRow) -> tuple[str, str]:
        """Returns the tenant of a value, and the name of its key, or else of its file."""
        rows = Transaction(self._connection).all(
            "SELECT blob.tenant, key.name FROM blob LEFT JOIN key ON key.blob = blob.id"
            " WHERE blob.id = ?",
            (blob.id,),
        )
        tenant, name = rows[0] if rows else ("", None)
        if isinstance(name, bytes):
            return str(tenant), name.decode(errors="backslashreplace")
        return str(tenant), blob.file

    def locate(self, identity: int) -> Located | None:
        """Returns where a prefix lies now; None if it has gone."""
        self._connection.execute("BEGIN")
        try:
            transaction = Transaction(self._connection)
            row = transaction.by_id(identity)
            if row is None:
                return None
            parent = transaction.by_id(row.parent) if row.parent is not None else None
            name = parent.namespace if parent else ""
            extents = [extent for extent in Extents(transaction).of(identity) if extent.file]
            return Located(row, name, extents, MatchIndex(transaction).token_ids(identity))
        finally:
            self._connection.execute("ROLLBACK")

    def _sizes(self, question: str) -> dict[int, int]:
        return dict(cast("list[tuple[int, int]]", self._connection.execute(question).fetchall()))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[CatalogReader]:
    """Opens the catalogue that lies at `path`.

    Raises:
        DamagedCatalogue: it is damaged, or no database.
        CannotStart: it cannot be read, or not by this version.
    """
    try:
        connection = _connect(path)
        try:
            _check_version(path, connection)
            yield CatalogReader(connection)
        finally:
            connection.close()
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise DamagedCatalogue(path, error) from error
    except apsw.Error as error:
        raise CannotStart(f"{path} cannot be read: {error}") from error


def _connect(path: Path) -> apsw.Connection:
    uri = path.absolute().as_uri()
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    connection = apsw.Connection(uri, flags=flags)
    connection.set_busy_timeout(BUSY_MS)
    try:
        connection.pragma("user_version")
    except (apsw.CantOpenError, apsw.ReadOnlyError):
        # A medium that cannot be written: SQLite has no place for the locks, and needs none.
        connection.close()
        if Path(f"{path}-wal").exists():
            raise
        connection = apsw.Connection(f"{uri}?immutable=1", flags=flags)
    return connection


def _check_version(path: Path, connection: apsw.Connection) -> None:
    if connection.pragma("application_id") != APPLICATION_ID:
        raise CannotStart(f"{path} belongs to another program")
    version = connection.pragma("user_version")
    if version != SCHEMA_VERSION:
        raise CannotStart(
            f"{path} has catalogue version {version}, this release reads {SCHEMA_VERSION}: use the "
            "release that wrote it"
        )
    check_shape(path, shape_of(connection))
