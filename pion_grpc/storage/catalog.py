"""The catalogue: what is stored, in one SQLite database that arbitrates between threads and processes.

A commit is the moment at which a write is acknowledged; opening the database is the recovery. What is
asked and changed in a transaction is `transaction`'s and the other tables' affair; this module knows the
database's file, its log and its connections. Three promises are kept for all tables:

* every write transaction is `BEGIN IMMEDIATE`: deferred ones fail when they meet;
* what lies on disk is counted by triggers, in the transaction that changes it;
* what goes wrong with the file is told in words of `errors`: a full disk is `DiskFull`, a page that is
  not as written `DamagedCatalogue`, a lock that is never given `Busy` (see `catalog_errors`).
"""

import contextlib
import os
import queue
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw

from pion_grpc.errors import CannotStart
from pion_grpc.storage.catalog_errors import DamagedCatalogue, translated
from pion_grpc.storage.files import Files
from pion_grpc.storage.schema import APPLICATION_ID, MIGRATIONS, check_shape, shape_of
from pion_grpc.storage.transaction import Transaction

SQLITE_OLDEST = (3, 51, 3)
"""Earlier ones can lose a committed transaction when a WAL is reset under several connections."""
BUSY_MS = 60_000
LOG_PAGES = 500
"""Length of the log from which on a commit copies it into the database."""
LONG_LOG_PAGES = 2_000
RESTART_MS = 100
"""Length of the log from which on a commit waits until nobody reads it, and for how long."""
RESERVE_BYTES = 1 << 20
"""Held in a file beside the database: taking something out of a full disk needs space for the log."""


class Catalog:
    """The database, with a pool of connections; safe to use from many threads."""

    def __init__(
        self,
        path: Path,
        files: Files | None = None,
        migrations: tuple[str, ...] = (),
        before_new: Callable[[], None] = lambda: None,
    ) -> None:
        """Opens the catalogue, makes it if there is none, and brings an older one up to date.

        A new one is on stable storage before this returns: where files lie beside none, it was lost.

        Args:
            path: of the database.
            files: the file layer.
            migrations: the scripts that make it, for tests.
            before_new: called if there is none, or an empty one; what it raises is raised, and
                nothing has been made then.

        Raises:
            CannotStart: it cannot be used; nothing of it has been changed.
        """
        version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
        if version < SQLITE_OLDEST:
            raise CannotStart(f"SQLite {apsw.sqlite_lib_version()} is too old: upgrade apsw")
        self._path = path
        self._reserve = path.with_name(f"{path.name}-reserve")
        self._migrations = migrations or MIGRATIONS
        self._before_new = before_new
        self._vfs = (files or Files()).vfs
        self._idle: queue.LifoQueue[apsw.Connection] = queue.LifoQueue()
        try:
            self._prepare()
        except (apsw.CorruptError, apsw.NotADBError) as error:
            raise DamagedCatalogue(path, error) from error
        except apsw.Error as error:
            raise CannotStart(f"cannot open {path}: {error}{_remedy(error)}") from error

    def close(self) -> None:
        """Closes every idle connection; the last one folds the log into the database."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    @contextlib.contextmanager
    def read(self) -> Iterator[Transaction]:
        """A consistent view of the catalogue; nothing may be written.

        Raises:
            DiskFull, DamagedCatalogue, Busy: it cannot be read.
        """
        with translated("read", self._path), self._connection() as connection:
            connection.execute("BEGIN")
            try:
                yield Transaction(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def write(self, *, on_disk: bool = False, removing: bool = False) -> Iterator[Transaction]:
        """A write transaction: committed as a whole at the end, or not at all.

        Args:
            on_disk: the commit is on stable storage when it returns, and every earlier one too: also
                if this one has nothing else to write.
            removing: it gives space back, so on a full disk it may use the reserve.

        Raises:
            DiskFull, DamagedCatalogue, Busy: it cannot be written.
        """
        if removing:
            self._give_up_reserve_on_full_disk()
        with translated("written", self._path), self._connection() as connection:
            connection.execute("PRAGMA synchronous = " + ("FULL" if on_disk else "NORMAL"))
            connection.execute("BEGIN IMMEDIATE")
            try:
                transaction = Transaction(connection)
                if on_disk:
                    transaction.next("clock")  # a commit that writes nothing would sync nothing
                yield transaction
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def hold_reserve(self) -> None:
        """Takes `RESERVE_BYTES` of the disk, unless they are held already, or are not there."""
        if self._reserve.exists() or _free_bytes(self._path.parent) < 2 * RESERVE_BYTES:
            return
        try:
            self._reserve.write_bytes(os.urandom(RESERVE_BYTES))  # zeros may take no space
        except OSError:
            self._reserve.unlink(missing_ok=True)

    def _give_up_reserve_on_full_disk(self) -> None:
        if _free_bytes(self._path.parent) < RESERVE_BYTES:
            self._reserve.unlink(missing_ok=True)

    def copy_to(
        self, path: Path, beside: Callable[[Transaction], None] = lambda transaction: None
    ) -> None:
        """Writes the catalogue as it is at one moment to a file that must not exist.

        Args:
            path: of the file.
            beside: called with the catalogue as it is copied; until it returns nobody writes.

        Raises:
            DiskFull: there is no room for it.
            DamagedCatalogue, Busy: it cannot be read.
        """
        with translated("copied", self._path), self._connection() as connection:
            connection.execute("BEGIN")
            try:
                with self.write() as transaction:
                    connection.execute("SELECT 1 FROM meta").fetchall()  # from now on it sees this
                    beside(transaction)
                _back_up(connection, path, self._vfs)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def checkpoint(self) -> None:
        """Gives free pages back and truncates the log, as far as nobody is reading it.

        Raises:
            DiskFull, DamagedCatalogue: it cannot be written.
        """
        with (
            translated("written", self._path),
            self._connection() as connection,
            contextlib.suppress(apsw.BusyError),
        ):
            free = 1
            while free:
                # Step by step, because pages that are moved go through the log.
                before = connection.pragma("freelist_count")
                connection.execute(f"PRAGMA incremental_vacuum({LOG_PAGES})").fetchall()
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
                free = connection.pragma("freelist_count")
                if free >= before:
                    break

    @contextlib.contextmanager
    def _connection(self) -> Iterator[apsw.Connection]:
        try:
            connection = self._idle.get_nowait()
        except queue.Empty:
            connection = self._connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle.put(connection)

    def _connect(self, *, new: bool = False) -> apsw.Connection:
        connection = apsw.Connection(str(self._path), vfs=self._vfs)
        connection.set_busy_timeout(BUSY_MS)
        if new:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        for pragma in (
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "fullfsync = 1",
            f"journal_size_limit = {16 << 20}",
            "foreign_keys = OFF",  # references document; `core` removes in the right order
            "temp_store = MEMORY",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.set_wal_hook(_fold)
        return connection

    def _prepare(self) -> None:
        version = self._found_version()
        if version == len(self._migrations):
            return
        if version == 0:
            self._before_new()
        self._idle.put(self._connect(new=version == 0))
        with self._connection() as connection:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE")
            try:
                # Another process may have been quicker.
                version = connection.pragma("user_version")
                if version < len(self._migrations):
                    self._migrate(connection, version)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _found_version(self) -> int:
        """Returns the version of what lies there, 0 for nothing, without changing a byte of it."""
        if not self._path.exists() or not self._path.stat().st_size:
            return 0
        connection = apsw.Connection(
            str(self._path), flags=apsw.SQLITE_OPEN_READWRITE, vfs=self._vfs
        )
        try:
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            connection.set_busy_timeout(BUSY_MS)
            application = connection.pragma("application_id")
            version = int(connection.pragma("user_version"))
            shape = shape_of(connection)
            read_only = connection.readonly("main")
        finally:
            connection.close()
        if application != APPLICATION_ID and (application or version or shape):
            raise CannotStart(f"{self._path} belongs to another program: choose another --data")
        if version > len(self._migrations):
            raise CannotStart(
                f"{self._path} has catalogue version {version}, written by a newer release; this one "
                f"reads up to {len(self._migrations)}: upgrade pion-grpc, or choose another --data"
            )
        if version:
            check_shape(self._path, shape, self._migrations[:version])
        if read_only:
            raise CannotStart(f"{self._path} may only be read: see who may write it")
        return version

    def _migrate(self, connection: apsw.Connection, version: int) -> None:
        if version > 0:  # version 0 is an empty database: nothing to lose, nothing to copy
            self._copy(Path(f"{self._path}.v{version}"))
        for script in self._migrations[version:]:
            connection.execute(script)
        # Where several machines answer for a name, equal generations must mean equal rows.
        start = secrets.randbits(52)
        counters = "INSERT OR IGNORE INTO meta VALUES ('clock', 0), ('generation', ?)"
        connection.execute(counters, (start,))
        connection.pragma("application_id", APPLICATION_ID)
        connection.pragma("user_version", len(self._migrations))

    def _copy(self, target: Path) -> None:
        """Copies the catalogue as it was last committed, its log included."""
        target.unlink(missing_ok=True)
        source = self._connect()
        try:
            _back_up(source, target, self._vfs)
        finally:
            source.close()


def _back_up(source: apsw.Connection, path: Path, vfs: str | None) -> None:
    """Copies a database as a connection sees it."""
    copy = apsw.Connection(str(path), vfs=vfs)
    try:
        with copy.backup("main", source, "main") as backup:
            backup.step()
    finally:
        copy.close()


def _free_bytes(directory: Path) -> int:
    """Returns how much more an ordinary user can write there."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _fold(connection: apsw.Connection, name: str, pages: int) -> int:
    """Copies a log that has grown into the database; after a commit, which it never takes back."""
    if pages >= LOG_PAGES:
        with contextlib.suppress(apsw.Error):  # on a full disk the log stays, and works on
            connection.wal_checkpoint(name)
    if pages >= LONG_LOG_PAGES:
        # Readers one after the other keep it from starting anew: this one waits until none is left.
        connection.set_busy_timeout(RESTART_MS)
        with contextlib.suppress(apsw.Error):
            connection.wal_checkpoint(name, apsw.SQLITE_CHECKPOINT_RESTART)
        connection.set_busy_timeout(BUSY_MS)
    return apsw.SQLITE_OK


def _remedy(error: apsw.Error) -> str:
    """Returns what to do about a database that cannot be opened, if that is known."""
    if isinstance(error, apsw.CantOpenError | apsw.ReadOnlyError):
        return ": see who may read and write it and its directory"
    if isinstance(error, apsw.FullError | apsw.IOError):
        return ": see whether its disk is full"
    return ""
