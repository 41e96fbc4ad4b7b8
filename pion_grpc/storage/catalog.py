"""The catalogue: what is stored, in one SQLite database that arbitrates between threads and processes.

A commit is the moment at which a write is acknowledged; opening the database is the recovery. The
rules of the domain run in `core` between the calls of one `Transaction`; this module knows tables,
keys and bytes. The prefixes are here; what else there is has a file of its own each, with its part of
the schema and its questions. Three promises are kept for all of them:

* every write transaction is `BEGIN IMMEDIATE`, and every result is read to its end before anything
  else happens: deferred ones fail when they meet, and a half-read cursor keeps the log from shrinking;
* what lies on disk is counted by triggers, in the transaction that changes it;
* what goes wrong with the file is told in words of `errors`: a full disk is `DiskFull`, a page that is
  not as written `DamagedCatalogue`, a lock that is never given `Busy`. An `apsw.Error` that leaves is a
  programmer's error.
"""

import contextlib
import os
import queue
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import apsw

from pion_grpc.errors import Busy, CannotStart, DiskFull
from pion_grpc.storage import (
    accounts,
    blobs,
    copies,
    extents,
    keyspace,
    leases,
    match_index,
    row_snapshots,
    sides,
    states,
)
from pion_grpc.storage.directory import rebuild_command
from pion_grpc.storage.files import Files

APPLICATION_ID = 0x50494F4E  # "PION"
SCHEMA_VERSION = 1
SQLITE_OLDEST = (3, 51, 3)
"""Earlier ones can lose a committed transaction when a WAL is reset under several connections."""
BUSY_MS = 60_000
LOG_PAGES = 500
"""Length of the log from which on a commit copies it into the database."""
LONG_LOG_PAGES = 2_000
RESTART_MS = 100
"""Length of the log from which on a commit waits until nobody reads it, and for how long."""
RESERVE_BYTES = 1 << 20
"""Held in a file beside the database. Taking something out of a full disk needs space too, for the log."""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE layout (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE prefix (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  tenant      TEXT NOT NULL,
  namespace   TEXT NOT NULL,
  state       TEXT NOT NULL CHECK (state IN ('open', 'registered', 'live', 'sealed')),
  visible     INTEGER NOT NULL,
  owner       TEXT,                       -- instance that stores it, while open
  model_id    TEXT NOT NULL,
  fidelity    TEXT NOT NULL,
  layout      INTEGER NOT NULL REFERENCES layout (id),
  row_counts  TEXT NOT NULL DEFAULT '',   -- live: rows of each tensor, JSON; else token_count - base
  token_count INTEGER NOT NULL,           -- rows of the whole chain
  base        INTEGER NOT NULL DEFAULT 0, -- rows that belong to the parent
  parent      INTEGER REFERENCES prefix (id),
  depth       INTEGER NOT NULL DEFAULT 0,
  parts       TEXT NOT NULL DEFAULT '[]',
  generation  INTEGER NOT NULL,
  file        TEXT,                       -- the segment, relative to the directory
  file_tokens INTEGER NOT NULL DEFAULT 0, -- token ids in it
  file_layout INTEGER REFERENCES layout (id), -- of the segment, once the prefix has outgrown it
  file_row_counts TEXT NOT NULL DEFAULT '',   -- likewise
  disk_bytes  INTEGER NOT NULL,           -- segment and row files; while open, the reservation
  durability  TEXT NOT NULL,
  boot        TEXT,                       -- boot under which it was written unsynced; NULL: on disk
  created_unix_ms INTEGER NOT NULL,
  last_use    INTEGER NOT NULL,
  prefill_ms  REAL NOT NULL DEFAULT 0     -- measured by who computed it; 0: not
);
CREATE UNIQUE INDEX prefix_name ON prefix (tenant, namespace) WHERE visible;
CREATE INDEX prefix_parent ON prefix (parent) WHERE parent IS NOT NULL;
CREATE INDEX prefix_use ON prefix (last_use);
CREATE INDEX prefix_owner ON prefix (owner) WHERE owner IS NOT NULL;
CREATE INDEX prefix_hidden ON prefix (id) WHERE NOT visible AND state != 'open';

CREATE TRIGGER prefix_added AFTER INSERT ON prefix BEGIN
  INSERT INTO usage VALUES (NEW.tenant, NEW.disk_bytes)
    ON CONFLICT DO UPDATE SET bytes = bytes + NEW.disk_bytes;
END;
CREATE TRIGGER prefix_resized AFTER UPDATE OF disk_bytes ON prefix BEGIN
  UPDATE usage SET bytes = bytes + NEW.disk_bytes - OLD.disk_bytes WHERE tenant = NEW.tenant;
END;
CREATE TRIGGER prefix_removed AFTER DELETE ON prefix BEGIN
  UPDATE usage SET bytes = bytes - OLD.disk_bytes WHERE tenant = OLD.tenant;
END;
"""


class PrefixRow(NamedTuple):
    """One prefix as the catalogue has it."""

    id: int
    tenant: str
    namespace: str
    state: str
    visible: bool
    owner: str | None
    model_id: str
    fidelity: str
    layout: str
    row_counts: str
    token_count: int
    base: int
    parent: int | None
    depth: int
    parts: str
    generation: int
    file: str | None
    file_tokens: int
    file_layout: str | None
    file_row_counts: str
    disk_bytes: int
    durability: str
    boot: str | None
    created_unix_ms: int
    last_use: int
    prefill_ms: float


class NewPrefix(NamedTuple):
    """What is known of a prefix before its first row is written."""

    tenant: str
    namespace: str
    state: str
    visible: bool
    owner: str | None
    model_id: str
    fidelity: str
    layout: str
    token_count: int
    base: int
    parent: int | None
    depth: int
    parts: str
    disk_bytes: int
    durability: str

    @classmethod
    def registered(
        cls, tenant: str, namespace: str, layout: str, *, model_id: str = "", fidelity: str = ""
    ) -> "NewPrefix":
        """Returns a prefix that is declared and has no rows yet: visible, and nobody's to publish."""
        return cls(
            tenant,
            namespace,
            state="registered",
            visible=True,
            owner=None,
            model_id=model_id,
            fidelity=fidelity,
            layout=layout,
            token_count=0,
            base=0,
            parent=None,
            depth=0,
            parts="[]",
            disk_bytes=0,
            durability="process",
        )


class Totals(NamedTuple):
    """What the catalogue counts."""

    prefixes: int
    rows: int
    bytes: int


_COLUMNS = ", ".join(
    f"(SELECT text FROM layout WHERE layout.id = prefix.{field})"
    if field in ("layout", "file_layout")
    else field
    for field in PrefixRow._fields
)


_UNUSED = (
    "id NOT IN (SELECT layout FROM prefix UNION"
    " SELECT file_layout FROM prefix WHERE file_layout IS NOT NULL)"
)


class DamagedCatalogue(CannotStart):
    """The database's own pages are not what was written."""

    def __init__(self, path: Path, error: Exception) -> None:
        super().__init__(
            f"{path} is damaged ({error}): {rebuild_command(path.parent)} sets it aside and makes a "
            "new one from the segments; or move it away, and segments, rows and blobs too, to start "
            "empty"
        )
        self.problem = f"damaged: {error}"


class OtherCatalogue(DamagedCatalogue):
    """Its tables are not those of its version: a program between two releases made it."""

    def __init__(self, path: Path, difference: str) -> None:
        CannotStart.__init__(
            self,
            f"{path} has other tables than this version of pion-grpc ({difference}): use the version "
            f"that wrote it, or choose another --data; or {rebuild_command(path.parent)} sets it aside "
            "and makes a new one from the segments, without keys, states and rows never sealed",
        )
        self.problem = f"of another version: {difference}"


@contextlib.contextmanager
def _translated(what: str, path: Path) -> Iterator[None]:
    """Says in words of the domain why the catalogue at `path` cannot be read, written or copied.

    Raises:
        DiskFull: the database cannot grow, its disk fails, or the system does not let this process
            open or write it any more.
        DamagedCatalogue: a page is not what was written.
        Busy: another process held the lock for all of `BUSY_MS`.
    """
    try:
        yield
    except (apsw.FullError, apsw.IOError, apsw.CantOpenError, apsw.ReadOnlyError) as error:
        raise DiskFull(f"the catalogue cannot be {what}: {error}") from error
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise DamagedCatalogue(path, error) from error
    except apsw.BusyError as error:
        raise Busy(f"the catalogue cannot be {what}: another process holds it") from error


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
        self._migrations = migrations or _MIGRATIONS
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
    def read(self) -> Iterator["Transaction"]:
        """A consistent view of the catalogue; nothing may be written.

        Raises:
            DiskFull, DamagedCatalogue, Busy: it cannot be read.
        """
        with _translated("read", self._path), self._connection() as connection:
            connection.execute("BEGIN")
            try:
                yield Transaction(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def write(self, *, on_disk: bool = False, removing: bool = False) -> Iterator["Transaction"]:
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
        with _translated("written", self._path), self._connection() as connection:
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

    def copy_to(self, path: Path) -> None:
        """Writes the catalogue as it is now to a file that must not exist.

        Raises:
            DiskFull: there is no room for it.
            DamagedCatalogue, Busy: it cannot be read.
        """
        with _translated("copied", self._path), self._connection() as connection:
            connection.execute("VACUUM INTO ?", (str(path),)).fetchall()

    def checkpoint(self) -> None:
        """Gives free pages back and truncates the log, as far as nobody is reading it.

        Raises:
            DiskFull, DamagedCatalogue: it cannot be written.
        """
        with (
            _translated("written", self._path),
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
        source, copy = self._connect(), apsw.Connection(str(target), vfs=self._vfs)
        try:
            with copy.backup("main", source, "main") as backup:
                backup.step()
        finally:
            source.close()
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


_MIGRATIONS = (
    "".join(
        (
            _SCHEMA,
            accounts.SCHEMA,
            match_index.SCHEMA,
            extents.SCHEMA,
            leases.SCHEMA,
            sides.SCHEMA,
            row_snapshots.SCHEMA,
            blobs.SCHEMA,
            keyspace.SCHEMA,
            states.SCHEMA,
            copies.SCHEMA,
        )
    ),
)
"""Script i brings version i to i + 1."""

Shape: TypeAlias = frozenset[tuple[str, ...]]
"""What a database consists of: (kind, name) of an index or trigger, (kind, name, column) of a table."""


def shape_of(connection: apsw.Connection) -> Shape:
    """Returns the shape of a database; what SQLite makes for itself is no part of it."""
    rows = connection.execute(
        "SELECT made.type, made.name, has.name FROM sqlite_schema AS made"
        " LEFT JOIN pragma_table_info(made.name) AS has WHERE substr(made.name, 1, 7) != 'sqlite_'"
    ).fetchall()
    return frozenset(tuple(str(text) for text in row if text is not None) for row in rows)


def check_shape(path: Path, shape: Shape, migrations: tuple[str, ...] = _MIGRATIONS) -> None:
    """Raises OtherCatalogue if the shape of a catalogue is not what the scripts make."""
    made = apsw.Connection(":memory:")
    for script in migrations:
        made.execute(script)
    expected = shape_of(made)
    made.close()
    missing, unknown = (
        sorted(map(_described, group)) for group in (expected - shape, shape - expected)
    )
    differences = [f"without {name}" for name in missing] + [f"with {name}" for name in unknown]
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise OtherCatalogue(path, ", ".join(differences[:3]) + more)


def _described(item: tuple[str, ...]) -> str:
    return ".".join(item[1:])


def _remedy(error: apsw.Error) -> str:
    """Returns what to do about a database that cannot be opened, if that is known."""
    if isinstance(error, apsw.CantOpenError | apsw.ReadOnlyError):
        return ": see who may read and write it and its directory"
    if isinstance(error, apsw.FullError | apsw.IOError):
        return ": see whether its disk is full"
    return ""


class Transaction:
    """Reads and writes of one transaction: prefixes here, the other tables through accessors."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed; an error of the database may have ended it."""
        return self._connection.in_transaction

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Undoes what is done inside, and nothing before it, if it raises.

        Raises:
            DiskFull, DamagedCatalogue: it cannot be written.
        """
        with _translated("written", Path(self._connection.filename)):
            self.run("SAVEPOINT piece", ())
            try:
                yield
            except BaseException:
                if self.is_open:
                    self.run("ROLLBACK TO piece", ())
                    self.run("RELEASE piece", ())
                raise
            self.run("RELEASE piece", ())

    # -- prefixes

    def by_name(self, tenant: str, namespace: str) -> PrefixRow | None:
        """Returns the visible prefix of that name."""
        return self.find("visible AND tenant = ? AND namespace = ?", (tenant, namespace))

    def by_id(self, prefix: int) -> PrefixRow | None:
        """Returns a prefix, visible or not."""
        return self.find("id = ?", (prefix,))

    def by_lease(self, lease: bytes, now_unix_ms: int) -> PrefixRow | None:
        """Returns what an unexpired lease keeps readable."""
        return self.find(
            "id = (SELECT prefix FROM lease WHERE id = ? AND expires_unix_ms > ?)",
            (lease, now_unix_ms),
        )

    def chain(self, prefix: PrefixRow) -> list[PrefixRow]:
        """Returns a prefix and its parents, the root first."""
        rows = [prefix]
        while rows[-1].parent is not None:
            parent = self.by_id(rows[-1].parent)
            assert parent is not None, "a parent outlives its children"
            rows.append(parent)
        return rows[::-1]

    def children(self, prefix: int) -> list[PrefixRow]:
        """Returns the prefixes that extend this one, open and hidden ones included."""
        return self._prefixes("parent = ? ORDER BY id", (prefix,))

    def page(self, tenant: str, prefix: str, after: str, count: int) -> list[PrefixRow]:
        """Returns visible prefixes whose names begin with `prefix` and follow `after`, by name."""
        return self._prefixes(
            "visible AND tenant = ? AND namespace > ? AND substr(namespace, 1, ?) = ?"
            " ORDER BY namespace LIMIT ?",
            (tenant, after, len(prefix), prefix, count),
        )

    def live(self, tenant: str | None = None) -> list[PrefixRow]:
        """Returns the live prefixes, of one tenant or of all."""
        if tenant is None:
            return self._prefixes("visible AND state = 'live' ORDER BY id", ())
        return self._prefixes("visible AND state = 'live' AND tenant = ? ORDER BY id", (tenant,))

    def unsynced(self) -> list[PrefixRow]:
        """Returns what would not survive a power cut."""
        return self._prefixes("boot IS NOT NULL AND state IN ('live', 'sealed')", ())

    def hidden(self) -> list[PrefixRow]:
        """Returns dropped prefixes that something still kept when they were dropped."""
        return self._prefixes("NOT visible AND state != 'open' ORDER BY id DESC", ())

    def open_of(self, owner: str) -> list[PrefixRow]:
        """Returns the prefixes that an instance was storing."""
        return self._prefixes("owner = ?", (owner,))

    def owners(self) -> set[str]:
        """Returns the instances that hold open prefixes or reservations."""
        rows = self.all(
            "SELECT owner FROM prefix WHERE owner IS NOT NULL UNION SELECT owner FROM reservation",
            (),
        )
        return {row[0] for row in rows}

    def insert(self, new: NewPrefix) -> int:
        """Adds a prefix, with the prefill time that was declared of its name; returns its id."""
        layout = self._layout(new.layout)
        values = new._replace(layout=layout)  # type: ignore[arg-type]
        self.run(
            f"INSERT INTO prefix ({', '.join(NewPrefix._fields)}, generation, created_unix_ms,"
            f" last_use, prefill_ms) VALUES ({', '.join('?' * len(values))}, ?, ?, ?, coalesce(("
            "SELECT prefill_ms FROM prefix WHERE visible AND tenant = ? AND namespace = ?"
            " AND state = 'registered'), 0))",
            (
                *values,
                self.next("generation"),
                unix_ms(),
                self.next("clock"),
                new.tenant,
                new.namespace,
            ),
        )
        return self._connection.last_insert_rowid()

    def update(self, prefix: int, **columns: Any) -> None:
        """Sets columns of a prefix."""
        for name in ("layout", "file_layout"):
            if columns.get(name) is not None:
                columns[name] = self._layout(columns[name])
        self.run(
            f"UPDATE prefix SET {', '.join(f'{name} = ?' for name in columns)} WHERE id = ?",
            (*columns.values(), prefix),
        )

    def new_generation(self, prefix: int) -> int:
        """Gives a prefix the next generation."""
        generation = self.next("generation")
        self.update(prefix, generation=generation)
        return generation

    def delete(self, prefix: int) -> None:
        """Removes a prefix and all that belongs to it; its files become garbage."""
        row = self.by_id(prefix)
        if row is None:
            return
        files = [row.file] if row.file else []
        files += [name for name in extents.Extents(self).files(prefix) if name]
        for table in (
            "tokens",
            "block_table",
            "extent",
            "lease",
            "reservation",
            "side",
            "row_snapshot",
        ):
            self.run(f"DELETE FROM {table} WHERE prefix = ?", (prefix,))
        self.run("DELETE FROM prefix WHERE id = ?", (prefix,))
        # All bytes are counted with the first file; they are one number in the budget.
        for index, file in enumerate(files):
            accounts.Accounts(self).add_garbage(file, 0 if index else row.disk_bytes)

    def victim(self, now_unix_ms: int, tenant: str | None) -> PrefixRow | None:
        """Returns the least recently used prefix that may go: no child, no lease, not open."""
        condition, values = ("AND tenant = ?", (tenant,)) if tenant is not None else ("", ())
        return self.find(
            f"state != 'open' {condition}"
            " AND NOT EXISTS (SELECT 1 FROM prefix AS child WHERE child.parent = prefix.id)"
            " AND NOT EXISTS (SELECT 1 FROM lease WHERE lease.prefix = prefix.id"
            " AND expires_unix_ms > ?)"
            " AND NOT EXISTS (SELECT 1 FROM reservation WHERE reservation.prefix = prefix.id)"
            " AND disk_bytes > 0 ORDER BY last_use LIMIT 1",
            (*values, now_unix_ms),
        )

    def stamp(self, uses: Iterable[tuple[int, str]]) -> None:
        """Records uses now, the earliest first, each of a prefix and its whole chain.

        Each names the sides that were used, such as `k`; of none, or of `kv`, both.
        """
        self.stamp_past(((prefix, sides), self.next("clock")) for prefix, sides in uses)

    def stamp_past(self, uses: Iterable[tuple[tuple[int, str], int]]) -> None:
        """Records uses at their times of the clock; where a later one is known, it stays."""
        for (prefix, used_sides), clock in uses:
            self.run(
                "WITH RECURSIVE up (id) AS (VALUES (?) UNION ALL SELECT parent FROM prefix JOIN up"
                " USING (id) WHERE parent IS NOT NULL)"
                " UPDATE prefix SET last_use = max(last_use, ?) WHERE id IN (SELECT id FROM up)",
                (prefix, clock),
            )
            self.run(
                "UPDATE side SET last_use = max(last_use, ?) WHERE prefix = ? AND instr(?, side)",
                (clock, prefix, used_sides or "kv"),
            )

    # -- the whole catalogue

    def is_empty(self) -> bool:
        """Says whether nothing is stored: no prefix, no key, no value."""
        rows = self.all(
            "SELECT 1 FROM prefix UNION ALL SELECT 1 FROM key UNION ALL SELECT 1 FROM blob LIMIT 1",
            (),
        )
        return not rows

    def number_from(self, table: str, last: int) -> None:
        """Makes the numbers of the next rows of a table greater than `last`."""
        self.run("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
        self.run("INSERT INTO sqlite_sequence VALUES (?, ?)", (table, last))

    def files(self) -> set[str]:
        """Returns every file that the catalogue names."""
        rows = self.all(
            "SELECT file FROM prefix WHERE file IS NOT NULL UNION ALL SELECT file FROM extent"
            " UNION ALL SELECT file FROM blob UNION ALL SELECT file FROM copy"
            " UNION ALL SELECT file FROM garbage",
            (),
        )
        return {row[0] for row in rows}

    def free_bytes(self) -> int:
        """Returns the bytes of the database's own pages that hold nothing."""
        pages = int(self.all("PRAGMA freelist_count", ())[0][0])
        return pages * int(self.all("PRAGMA page_size", ())[0][0])

    def totals(self, tenant: str | None = None) -> Totals:
        """Counts visible prefixes, their own rows and their bytes."""
        condition, values = ("AND tenant = ?", (tenant,)) if tenant is not None else ("", ())
        row = self.all(
            "SELECT count(*), coalesce(sum(token_count - base), 0), coalesce(sum(disk_bytes), 0)"
            f" FROM prefix WHERE visible {condition}",
            values,
        )[0]
        return Totals(*row)

    # -- helpers

    def find(self, condition: str, values: tuple[Any, ...]) -> PrefixRow | None:
        """Returns the first prefix of which a condition holds; for the tables of this package."""
        rows = self._prefixes(condition, values)
        return rows[0] if rows else None

    def _prefixes(self, condition: str, values: tuple[Any, ...]) -> list[PrefixRow]:
        return [
            PrefixRow(*row)
            for row in self.all(f"SELECT {_COLUMNS} FROM prefix WHERE {condition}", values)
        ]

    def unused_layouts(self) -> int:
        """Counts the layouts that no prefix has."""
        return int(self.all(f"SELECT count(*) FROM layout WHERE {_UNUSED}", ())[0][0])

    def forget_layouts(self) -> None:
        """Removes the layouts that no prefix has."""
        self.run(f"DELETE FROM layout WHERE {_UNUSED}", ())

    def _layout(self, text: str) -> int:
        self.run("INSERT OR IGNORE INTO layout (text) VALUES (?)", (text,))
        return int(self.all("SELECT id FROM layout WHERE text = ?", (text,))[0][0])

    def next(self, counter: str) -> int:
        """Returns the next value of a counter: `clock` or `generation`.

        Generations go up by random steps: after a power cut the counter may be an older one, and what
        was handed out since must not come to mean something else. The clock is in unix nanoseconds, so
        that a use which another process writes down later has its place in the order; it never goes
        back, whatever the system's does.
        """
        if counter == "clock":
            statement = "UPDATE meta SET value = max(value + 1, ?) WHERE key = ? RETURNING value"
            return int(self.all(statement, (time.time_ns(), counter))[0][0])
        step = 1 + secrets.randbelow(1 << 20)
        statement = "UPDATE meta SET value = value + ? WHERE key = ? RETURNING value"
        return int(self.all(statement, (step, counter))[0][0])

    def remember(self, name: str, text: str) -> None:
        """Keeps a text under a name, in place of the one before."""
        self.run("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, text))

    def remembered(self, name: str) -> str:
        """Returns what is kept under a name; empty if nothing is."""
        rows = self.all("SELECT value FROM meta WHERE key = ?", (name,))
        return str(rows[0][0]) if rows else ""

    def all(self, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Runs a statement and returns every row; for the tables of this package.

        Raises:
            DamagedCatalogue: a text is not UTF-8, which SQLite itself does not notice.
        """
        try:
            return self._connection.execute(statement, values).fetchall()
        except UnicodeDecodeError as error:
            raise DamagedCatalogue(Path(self._connection.filename), error) from error

    def run(self, statement: str, values: tuple[Any, ...]) -> None:
        """Runs a statement to its end; for the tables of this package."""
        self._connection.execute(statement, values).fetchall()

    def run_many(self, statement: str, values: Iterable[tuple[Any, ...]]) -> None:
        """Runs a statement for each of the values; for the tables of this package."""
        self._connection.executemany(statement, values).fetchall()


def unix_ms() -> int:
    """Returns the time of day in milliseconds."""
    return time.time_ns() // 1_000_000
