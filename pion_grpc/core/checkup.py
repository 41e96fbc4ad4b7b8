"""Checking a data directory from outside: every page that is stored against its checksum.

Runs beside a server or without one, in a process of its own, and changes nothing that is stored: the
catalogue is opened for reading only, and what is damaged stays where it is. Knows nothing of a running
server, so everything is looked up anew when its turn comes: what has gone by then is no damage, and a
prefix whose files have been replaced is looked at again. Only what the catalogue names *and goes on
naming* is held against the disk.

Beyond the pages it compares what must agree: a segment's header with the catalogue, its token ids with
the ones that answer a match, and the catalogue's own pages with each other.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, cast

import apsw

from pion_grpc.core.reading import segment_layout
from pion_grpc.errors import CannotStart, Corrupt, TooManyFiles, Unreadable
from pion_grpc.storage.blobs import BlobRow, Blobs
from pion_grpc.storage.catalog import (
    APPLICATION_ID,
    BUSY_MS,
    SCHEMA_VERSION,
    DamagedCatalogue,
    ExtentRow,
    PrefixRow,
    Transaction,
)
from pion_grpc.storage.directory import rebuild_command
from pion_grpc.storage.pages import CheckedRun, OpenFile, open_segment
from pion_wire.layout import Layout
from pion_wire.limits import CHUNK_BYTES_MAX

Progress = Callable[[int, int], None]
"""Takes (bytes read, bytes in all)."""


class Damage(NamedTuple):
    """Something that cannot be read as it was stored."""

    kind: Literal["prefix", "value", "catalogue"]
    tenant: str
    name: str
    """Of the prefix, or of the key that has the value; else of the file."""
    visible: bool
    """False: a prefix whose name has been taken away, and whose rows others still need."""
    problem: str


class Checkup(NamedTuple):
    """What was found."""

    prefixes: int
    """Checked, those included that are kept only for others."""
    values: int
    """Checked: large values of keys, and whatever else has a file of its own."""
    bytes_read: int
    damaged: list[Damage]


def check_directory(path: Path, progress: Progress = lambda done, total: None) -> Checkup:
    """Reads everything that the catalogue of a data directory names.

    Raises:
        CannotStart: there is no catalogue, or none that this release reads, or a file of the
            directory may not be read.
    """
    catalog = path / "catalog.db"
    try:
        # Asked, not opened: closing it would end the locks that a server in this process has on it.
        if not catalog.stat().st_size:
            raise _no_catalogue(path)
        if not os.access(catalog, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(catalog))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_catalogue(path) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        return _check_directory(path, progress)
    except OSError as error:  # says nothing about what is stored
        raise _unreadable(path, error) from error
    except (TooManyFiles, Unreadable) as error:  # nor does this
        raise CannotStart(str(error)) from error


def _check_directory(path: Path, progress: Progress) -> Checkup:
    with _reading(path / "catalog.db") as catalogue:
        prefixes, values = catalogue.prefix_sizes(), catalogue.blob_sizes()
        read = PageReader(progress, sum(prefixes.values()) + sum(values.values()))
        damaged = [Damage("catalogue", "", "", True, text) for text in catalogue.problems()]
        damaged += _damaged_prefixes(path, catalogue, prefixes, read)
        damaged += _damaged_values(path, catalogue, values, read)
        return Checkup(len(prefixes), len(values), read.bytes, damaged)


def _unreadable(path: Path, error: OSError) -> CannotStart:
    return CannotStart(f"{error.filename or path} cannot be read: {error.strerror}")


def _no_catalogue(path: Path) -> CannotStart:
    problem = "there is no catalog.db in it, or an empty one"
    if any(path.glob("segments/*")):
        makes = f"{rebuild_command(path)} makes one from its segments"
        return CannotStart(f"{path} cannot be checked: {problem}; {makes}")
    return CannotStart(f"{path} is not a data directory: {problem}")


def _damaged_prefixes(
    path: Path, catalogue: "_Catalogue", sizes: dict[int, int], read: "PageReader"
) -> Iterator[Damage]:
    unsound: set[int] = set()
    for identity, size in sizes.items():
        row, problem = _check_prefix(path, catalogue, identity, read)
        if row is not None:
            if not problem and row.parent in unsound:  # parents come first: they are older
                problem = "rows that it takes from its parent are damaged"
            if problem:
                unsound.add(identity)
                yield Damage("prefix", row.tenant, row.namespace, row.visible, problem)
        read.finish(size)


def _damaged_values(
    path: Path, catalogue: "_Catalogue", sizes: dict[int, int], read: "PageReader"
) -> Iterator[Damage]:
    for identity, size in sizes.items():
        blob = catalogue.blob(identity)
        if blob is not None:
            problem = _check_blob(path, blob, read)
            if problem and catalogue.blob(identity) is not None:  # else it has gone meanwhile
                yield Damage("value", *catalogue.owner(blob), True, problem)
        read.finish(size)


class PageReader:
    """Reads pages against their checksums, and counts what it has read."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.bytes = 0
        self._before = 0  # this prefix
        self._done = 0
        self._total = total
        self._progress = progress

    def check(self, run: CheckedRun) -> None:
        """Reads a run, page by page.

        Raises:
            Corrupt: a page does not have its checksum.
        """
        for begin in range(0, run.size, CHUNK_BYTES_MAX):
            end = min(begin + CHUNK_BYTES_MAX, run.size)
            run.read(begin, end)
            self.bytes += end - begin
            self._progress(self._done + self.bytes - self._before, self._total)

    def finish(self, size: int) -> None:
        """Ends a prefix of this size, whatever of it needed no reading."""
        self._done += size
        self._before = self.bytes
        self._progress(self._done, self._total)


class _Plan(NamedTuple):
    """What the catalogue says about one prefix at one moment."""

    row: PrefixRow
    parent: str
    extents: list[ExtentRow]
    token_ids: bytes


class _Catalogue:
    """The catalogue, for reading only."""

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
        rows = self._connection.execute(
            "SELECT blob.tenant, key.name FROM blob LEFT JOIN key ON key.blob = blob.id"
            " WHERE blob.id = ?",
            (blob.id,),
        ).fetchall()
        tenant, name = rows[0] if rows else ("", None)
        if isinstance(name, bytes):
            return str(tenant), name.decode(errors="backslashreplace")
        return str(tenant), blob.file

    def plan(self, identity: int) -> _Plan | None:
        """Returns where a prefix lies now; None if it has gone."""
        self._connection.execute("BEGIN")
        try:
            transaction = Transaction(self._connection)
            row = transaction.by_id(identity)
            if row is None:
                return None
            parent = transaction.by_id(row.parent) if row.parent is not None else None
            name = parent.namespace if parent else ""
            extents = [extent for extent in transaction.extents(identity) if extent.file]
            return _Plan(row, name, extents, transaction.token_ids(identity))
        finally:
            self._connection.execute("ROLLBACK")

    def _sizes(self, question: str) -> dict[int, int]:
        return dict(cast("list[tuple[int, int]]", self._connection.execute(question).fetchall()))


def _check_blob(path: Path, blob: BlobRow, read: PageReader) -> str:
    """Returns what is wrong with a value, or nothing."""
    try:
        file = OpenFile(path / blob.file)
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    with contextlib.closing(file):
        try:
            read.check(blob.run_of(file))
        except Corrupt as error:
            return str(error)
    return ""


def _check_prefix(
    path: Path, catalogue: _Catalogue, identity: int, read: PageReader
) -> tuple[PrefixRow | None, str]:
    """Returns the prefix, unless it has gone, and what is wrong with it, or nothing."""
    before: _Plan | None = None
    while (plan := catalogue.plan(identity)) is not None:
        with contextlib.ExitStack() as stack:
            try:
                runs = _open(path, plan, stack)
            except FileNotFoundError as error:
                if plan == before:
                    return plan.row, f"{error.filename} is missing"
                before = plan  # replaced meanwhile, perhaps: look again
                continue
            except Corrupt as error:
                return plan.row, str(error)
            try:
                for run in runs:
                    read.check(run)
            except Corrupt as error:
                return plan.row, str(error)
            return plan.row, ""
    return None, ""


def _open(path: Path, plan: _Plan, stack: contextlib.ExitStack) -> list[CheckedRun]:
    """Opens every file of a prefix.

    Raises:
        FileNotFoundError: one is gone.
        Corrupt: one is not what the catalogue says.
    """
    runs = []
    if plan.row.file is not None:
        run = open_segment(path / plan.row.file, segment_layout(plan.row, plan.parent))
        stack.callback(run.file.close)
        _compare_token_ids(plan, run)
        runs.append(run)
    row_bytes = {t.key: t.row_bytes for t in Layout.from_json(plan.row.layout).tensors}
    files: dict[str, OpenFile] = {}
    for extent in plan.extents:
        if extent.file not in files:
            files[extent.file] = OpenFile(path / extent.file)
            stack.callback(files[extent.file].close)
        size = extent.row_count * row_bytes[extent.tensor]
        runs.append(CheckedRun(files[extent.file], extent.offset, size, extent.checksums))
    return runs


def _compare_token_ids(plan: _Plan, run: CheckedRun) -> None:
    """Raises Corrupt if the tokens that matches are answered with are not those of the segment."""
    count = plan.row.file_tokens
    if plan.row.state != "sealed" or not plan.token_ids or not count:
        return
    if run.read(run.size - 4 * count, run.size) != plan.token_ids:
        raise Corrupt(f"{run.file.path} holds other token ids than the catalogue")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[_Catalogue]:
    if not path.is_file():
        raise _no_catalogue(path.parent)
    try:
        connection = _connect(path)
        try:
            _check_version(path, connection)
            yield _Catalogue(connection)
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
