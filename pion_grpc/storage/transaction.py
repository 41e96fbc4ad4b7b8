"""One transaction of the catalogue: its prefixes, and what the other tables ask and change it with.

Knows tables, keys and bytes; the rules of the domain run in `core` between the calls. What else there is
beside prefixes has a file of its own each, with its part of the schema and its questions. The one
decision: every result is read to its end before anything else happens, because a half-read cursor keeps
the log from shrinking.
"""

import contextlib
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import apsw

from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.catalog_errors import DamagedCatalogue, translated
from pion_grpc.storage.extents import Extents

SCHEMA = """
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
        with translated("written", Path(self._connection.filename)):
            self.run("SAVEPOINT piece")
            try:
                yield
            except BaseException:
                if self.is_open:
                    self.run("ROLLBACK TO piece")
                    self.run("RELEASE piece")
                raise
            self.run("RELEASE piece")

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
            return self._prefixes("visible AND state = 'live' ORDER BY id")
        return self._prefixes("visible AND state = 'live' AND tenant = ? ORDER BY id", (tenant,))

    def unsynced(self) -> list[PrefixRow]:
        """Returns what would not survive a power cut."""
        return self._prefixes("boot IS NOT NULL AND state IN ('live', 'sealed')")

    def hidden(self) -> list[PrefixRow]:
        """Returns dropped prefixes that something still kept when they were dropped."""
        return self._prefixes("NOT visible AND state != 'open' ORDER BY id DESC")

    def open_of(self, owner: str) -> list[PrefixRow]:
        """Returns the prefixes that an instance was storing."""
        return self._prefixes("owner = ?", (owner,))

    def owners(self) -> set[str]:
        """Returns the instances that hold open prefixes or reservations."""
        rows = self.all(
            "SELECT owner FROM prefix WHERE owner IS NOT NULL UNION SELECT owner FROM reservation"
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

    def forget_prefill_times(self) -> None:
        """Forgets of every prefix how long its prefill took."""
        self.run("UPDATE prefix SET prefill_ms = 0 WHERE prefill_ms != 0")

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
        files += [name for name in Extents(self).files(prefix) if name]
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
            Accounts(self).add_garbage(file, 0 if index else row.disk_bytes)

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
            "SELECT 1 FROM prefix UNION ALL SELECT 1 FROM key UNION ALL SELECT 1 FROM blob LIMIT 1"
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
            " UNION ALL SELECT file FROM garbage"
        )
        return {row[0] for row in rows}

    def free_bytes(self) -> int:
        """Returns the bytes of the database's own pages that hold nothing."""
        pages = int(self.all("PRAGMA freelist_count")[0][0])
        return pages * int(self.all("PRAGMA page_size")[0][0])

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

    def _prefixes(self, condition: str, values: tuple[Any, ...] = ()) -> list[PrefixRow]:
        return [
            PrefixRow(*row)
            for row in self.all(f"SELECT {_COLUMNS} FROM prefix WHERE {condition}", values)
        ]

    def unused_layouts(self) -> int:
        """Counts the layouts that no prefix has."""
        return int(self.all(f"SELECT count(*) FROM layout WHERE {_UNUSED}")[0][0])

    def forget_layouts(self) -> None:
        """Removes the layouts that no prefix has."""
        self.run(f"DELETE FROM layout WHERE {_UNUSED}")

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

    def all(self, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Runs a statement and returns every row; for the tables of this package.

        Raises:
            DamagedCatalogue: a text is not UTF-8, which SQLite itself does not notice.
        """
        try:
            return self._connection.execute(statement, values).fetchall()
        except UnicodeDecodeError as error:
            raise DamagedCatalogue(Path(self._connection.filename), error) from error

    def run(self, statement: str, values: tuple[Any, ...] = ()) -> None:
        """Runs a statement to its end; for the tables of this package."""
        self._connection.execute(statement, values).fetchall()

    def run_many(self, statement: str, values: Iterable[tuple[Any, ...]]) -> None:
        """Runs a statement for each of the values; for the tables of this package."""
        self._connection.executemany(statement, values).fetchall()


def unix_ms() -> int:
    """Returns the time of day in milliseconds."""
    return time.time_ns() // 1_000_000
