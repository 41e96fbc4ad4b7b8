"""Keys: named strings, hashes, lists, sets and sorted sets, one table each, in the catalogue.

A key has one row that says its kind, when it expires and its revision; a string is in that row, or in a
blob if it is large, and the items of everything else are rows of their own. Names, fields, members and
values are bytes, any bytes. Knows no command and no rule of Redis but the order of a sorted set: by
score, then by bytes.

Reading an expired key finds nothing; it is removed when somebody writes it, or by `expired`.

What is inside the database is counted with its file. For the quotas of tenants it is counted once more,
under a name that no tenant can have.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pion_grpc.storage.accounts import ROW_BYTES, counted
from pion_grpc.storage.blobs import Blobs
from pion_grpc.storage.transaction import Transaction

SCHEMA = """
CREATE TABLE key (
  id              INTEGER PRIMARY KEY AUTOINCREMENT,
  tenant          TEXT NOT NULL,
  name            BLOB NOT NULL,
  kind            INTEGER NOT NULL,
  string          BLOB,               -- of a string, unless it is in a blob
  blob            INTEGER,
  expires_unix_ms INTEGER,
  revision        INTEGER NOT NULL
);
CREATE UNIQUE INDEX key_name ON key (tenant, name);
CREATE INDEX key_tenant ON key (tenant);
CREATE INDEX key_blob ON key (blob) WHERE blob IS NOT NULL;
CREATE INDEX key_expiry ON key (expires_unix_ms) WHERE expires_unix_ms IS NOT NULL;
CREATE TABLE hash_field (
  key INTEGER NOT NULL, field BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (key, field)
) WITHOUT ROWID;
CREATE TABLE list_item (
  key INTEGER NOT NULL, position INTEGER NOT NULL, value BLOB NOT NULL, PRIMARY KEY (key, position)
) WITHOUT ROWID;
CREATE TABLE set_member (
  key INTEGER NOT NULL, member BLOB NOT NULL, PRIMARY KEY (key, member)
) WITHOUT ROWID;
CREATE TABLE sorted_member (
  key INTEGER NOT NULL, member BLOB NOT NULL, score REAL NOT NULL, PRIMARY KEY (key, member)
) WITHOUT ROWID;
CREATE INDEX sorted_score ON sorted_member (key, score, member);
"""

REMOVED_AT_ONCE = 500
"""Keys that one statement removes."""

_OWNER = "(SELECT tenant FROM key WHERE id = ROW.key)"
SCHEMA += (
    counted(
        "key",
        "length(ROW.name) + coalesce(length(ROW.string), 0)",
        "ROW.tenant",
        updated="name, string",
    )
    + counted("hash_field", "length(ROW.field) + length(ROW.value)", _OWNER, updated="value")
    + counted("list_item", "length(ROW.value)", _OWNER, updated="value")
    + counted("set_member", "length(ROW.member)", _OWNER)
    + counted("sorted_member", "length(ROW.member)", _OWNER)
)


class Kind(enum.IntEnum):
    """What a key holds."""

    STRING = 0
    LIST = 1
    SET = 2
    SORTED_SET = 3
    HASH = 4


_ITEMS = {
    Kind.LIST: "list_item",
    Kind.SET: "set_member",
    Kind.SORTED_SET: "sorted_member",
    Kind.HASH: "hash_field",
}
_BYTES = {
    Kind.LIST: ("value",),
    Kind.SET: ("member",),
    Kind.SORTED_SET: ("member",),
    Kind.HASH: ("field", "value"),
}
"""Where the bytes of an item are."""


class KeyRow(NamedTuple):
    """One key."""

    id: int
    name: bytes
    kind: Kind
    string: bytes | None
    blob: int | None
    expires_unix_ms: int | None
    revision: int


_COLUMNS = "id, name, kind, string, blob, expires_unix_ms, revision"


class KeyTable:
    """The keys of one tenant within one transaction, at one moment."""

    def __init__(self, transaction: Transaction, tenant: str, now_unix_ms: int) -> None:
        self._tenant = tenant
        self._now = now_unix_ms
        self._all = transaction.all
        self._run = transaction.run
        self._blobs = Blobs(transaction)
        self._next = transaction.next
        self._revision = 0

    # -- keys

    def get(self, name: bytes) -> KeyRow | None:
        """Returns a key, unless it has expired."""
        rows = self._all(
            f"SELECT {_COLUMNS} FROM key WHERE tenant = ? AND name = ?", (self._tenant, name)
        )
        return self._live(rows[0]) if rows else None

    def add(self, name: bytes, kind: Kind) -> int:
        """Adds an empty key in place of whatever has the name, and returns its id."""
        self.remove(name)
        rows = self._all(
            "INSERT INTO key (tenant, name, kind, revision) VALUES (?, ?, ?, ?) RETURNING id",
            (self._tenant, name, kind, self._revise()),
        )
        return int(rows[0][0])

    def remove(self, name: bytes) -> bool:
        """Removes a key with all it holds; says whether it was there and had not expired."""
        return bool(self.remove_all([name]))

    def remove_all(self, names: Iterable[bytes]) -> int:
        """Removes keys with all they hold; returns how many were there and had not expired.

        Many at once: what a statement costs grows with the number of those before it in a transaction.
        """
        wanted = sorted(set(names))  # neighbours are on the same pages
        return sum(
            self._remove_some(wanted[at : at + REMOVED_AT_ONCE])
            for at in range(0, len(wanted), REMOVED_AT_ONCE)
        )

    def inline_bytes(self, key: KeyRow) -> int:
        """Returns about how many bytes the database has of what a key holds; of a blob none."""
        if key.kind not in _ITEMS:
            return len(key.string or b"")
        size = " + ".join(f"length({column})" for column in _BYTES[key.kind])
        rows = self._all(
            f"SELECT coalesce(sum({size} + {ROW_BYTES}), 0) FROM {_ITEMS[key.kind]} WHERE key = ?",
            (key.id,),
        )
        return int(rows[0][0])

    def remove_if_empty(self, key: KeyRow) -> None:
        """Removes a key that has no items left."""
        if not self._all(f"SELECT 1 FROM {_ITEMS[key.kind]} WHERE key = ? LIMIT 1", (key.id,)):
            self._delete(key)

    def put_string(
        self, name: bytes, value: bytes | None, blob: int | None, expires_unix_ms: int | None
    ) -> None:
        """Sets a string, in bytes or as a blob, in place of whatever has the name."""
        rows = self._all(
            "SELECT id, kind, blob FROM key WHERE tenant = ? AND name = ?", (self._tenant, name)
        )
        if rows and rows[0][1] == Kind.STRING:
            identity, _, old_blob = rows[0]
            if old_blob is not None:
                self._blobs.remove(old_blob)
            self._run(
                "UPDATE key SET string = ?, blob = ?, expires_unix_ms = ?, revision = ? WHERE id = ?",
                (value, blob, expires_unix_ms, self._revise(), identity),
            )
            return
        if rows:
            self.remove(name)
        self._run(
            "INSERT INTO key (tenant, name, kind, string, blob, expires_unix_ms, revision)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self._tenant, name, Kind.STRING, value, blob, expires_unix_ms, self._revise()),
        )

    def set_expiry(self, key: int, expires_unix_ms: int | None) -> None:
        """Sets when a key expires."""
        self._run(
            "UPDATE key SET expires_unix_ms = ?, revision = ? WHERE id = ?",
            (expires_unix_ms, self._revise(), key),
        )

    def rename(self, key: KeyRow, name: bytes) -> None:
        """Gives a key another name; whatever had it goes."""
        self.remove(name)
        self._run(
            "UPDATE key SET name = ?, revision = ? WHERE id = ?", (name, self._revise(), key.id)
        )

    def touch(self, key: int) -> None:
        """Notes that the items of a key have changed."""
        self._run("UPDATE key SET revision = ? WHERE id = ?", (self._revise(), key))

    def page(self, after: int, count: int) -> list[KeyRow]:
        """Returns keys by id, those that follow `after`, expired ones included."""
        rows = self._all(
            f"SELECT {_COLUMNS} FROM key INDEXED BY key_tenant WHERE tenant = ? AND id > ?"
            " ORDER BY id LIMIT ?",
            (self._tenant, after, count),
        )
        return [_key(row) for row in rows]

    def names(self) -> list[bytes]:
        """Returns the names of all keys."""
        rows = self._all(
            "SELECT name FROM key WHERE tenant = ? AND coalesce(expires_unix_ms, ?) >= ?",
            (self._tenant, self._now + 1, self._now + 1),
        )
        return [bytes(row[0]) for row in rows]

    def random_name(self) -> bytes | None:
        """Returns the name of some key."""
        rows = self._all(
            "SELECT name FROM key WHERE tenant = ? AND coalesce(expires_unix_ms, ?) >= ?"
            " ORDER BY random() LIMIT 1",
            (self._tenant, self._now + 1, self._now + 1),
        )
        return bytes(rows[0][0]) if rows else None

    def count(self) -> tuple[int, int]:
        """Returns how many keys there are, and how many of them expire."""
        rows = self._all(
            "SELECT count(*), count(expires_unix_ms) FROM key"
            " WHERE tenant = ? AND coalesce(expires_unix_ms, ?) >= ?",
            (self._tenant, self._now + 1, self._now + 1),
        )
        return int(rows[0][0]), int(rows[0][1])

    def clear(self) -> None:
        """Removes every key."""
        mine = "(SELECT id FROM key WHERE tenant = ?)"
        for table in _ITEMS.values():
            self._run(f"DELETE FROM {table} WHERE key IN {mine}", (self._tenant,))
        self._run(
            "DELETE FROM blob WHERE id IN (SELECT blob FROM key WHERE tenant = ?)", (self._tenant,)
        )
        self._run("DELETE FROM key WHERE tenant = ?", (self._tenant,))

    # -- items: hashes

    def fields(self, key: int) -> list[tuple[bytes, bytes]]:
        """Returns the fields of a hash and their values."""
        return _pairs(self._all("SELECT field, value FROM hash_field WHERE key = ?", (key,)))

    def field(self, key: int, field: bytes) -> bytes | None:
        """Returns the value of one field."""
        rows = self._all("SELECT value FROM hash_field WHERE key = ? AND field = ?", (key, field))
        return bytes(rows[0][0]) if rows else None

    def set_field(self, key: int, field: bytes, value: bytes) -> bool:
        """Sets a field; says whether it is new."""
        known = self.field(key, field) is not None
        self._run(
            "INSERT INTO hash_field VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value",
            (key, field, value),
        )
        return not known

    def remove_field(self, key: int, field: bytes) -> bool:
        """Removes a field; says whether it was there."""
        return bool(
            self._all(
                "DELETE FROM hash_field WHERE key = ? AND field = ? RETURNING 1", (key, field)
            )
        )

    # -- items: lists

    def list_ends(self, key: int) -> tuple[int, int]:
        """Returns the position of the first item, and one past the last."""
        # Asked for both ends at once, SQLite reads all that is between them.
        rows = self._all(
            "SELECT coalesce((SELECT min(position) FROM list_item WHERE key = ?), 0),"
            " coalesce((SELECT max(position) + 1 FROM list_item WHERE key = ?), 0)",
            (key, key),
        )
        return int(rows[0][0]), int(rows[0][1])

    def set_item(self, key: int, position: int, value: bytes) -> None:
        """Sets the item at a position."""
        self._run(
            "INSERT INTO list_item VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value",
            (key, position, value),
        )

    def items(self, key: int, begin: int, end: int) -> list[bytes]:
        """Returns the items from one position to another."""
        rows = self._all(
            "SELECT value FROM list_item WHERE key = ? AND position >= ? AND position < ?"
            " ORDER BY position",
            (key, begin, end),
        )
        return [bytes(row[0]) for row in rows]

    def remove_items(self, key: int, begin: int, end: int) -> None:
        """Removes the items from one position to another, at one end of the list."""
        self._run(
            "DELETE FROM list_item WHERE key = ? AND position >= ? AND position < ?",
            (key, begin, end),
        )

    # -- items: sets

    def members(self, key: int, most: int) -> list[bytes]:
        """Returns the members of a set, so many at most; -1: all."""
        rows = self._all("SELECT member FROM set_member WHERE key = ? LIMIT ?", (key, most))
        return [bytes(row[0]) for row in rows]

    def has_member(self, key: int, member: bytes) -> bool:
        """Says whether a set has a member."""
        return bool(
            self._all("SELECT 1 FROM set_member WHERE key = ? AND member = ?", (key, member))
        )

    def add_member(self, key: int, member: bytes) -> bool:
        """Adds a member to a set; says whether it is new."""
        return bool(
            self._all("INSERT OR IGNORE INTO set_member VALUES (?, ?) RETURNING 1", (key, member))
        )

    def remove_member(self, key: int, member: bytes) -> bool:
        """Removes a member from a set; says whether it was there."""
        return bool(
            self._all(
                "DELETE FROM set_member WHERE key = ? AND member = ? RETURNING 1", (key, member)
            )
        )

    # -- items: sorted sets

    def score(self, key: int, member: bytes) -> float | None:
        """Returns the score of a member."""
        rows = self._all(
            "SELECT score FROM sorted_member WHERE key = ? AND member = ?", (key, member)
        )
        return float(rows[0][0]) if rows else None

    def set_score(self, key: int, member: bytes, score: float) -> None:
        """Sets the score of a member, new or not."""
        self._run(
            "INSERT INTO sorted_member VALUES (?, ?, ?)"
            " ON CONFLICT DO UPDATE SET score = excluded.score",
            (key, member, score),
        )

    def remove_scored(self, key: int, members: Iterable[bytes]) -> int:
        """Removes members of a sorted set; returns how many were there."""
        return sum(
            bool(
                self._all(
                    "DELETE FROM sorted_member WHERE key = ? AND member = ? RETURNING 1",
                    (key, member),
                )
            )
            for member in members
        )

    def by_rank(
        self, key: int, begin: int, count: int, *, reverse: bool
    ) -> list[tuple[bytes, float]]:
        """Returns so many members in order of score from a rank on."""
        order = "DESC" if reverse else "ASC"
        return _scored(
            self._all(
                f"SELECT member, score FROM sorted_member WHERE key = ?"
                f" ORDER BY score {order}, member {order} LIMIT ? OFFSET ?",
                (key, count, begin),
            )
        )

    def by_score(
        self, key: int, low: float, high: float, *, reverse: bool, begin: int = 0, count: int = -1
    ) -> list[tuple[bytes, float]]:
        """Returns members whose scores are `low` to `high`, in order."""
        order = "DESC" if reverse else "ASC"
        return _scored(
            self._all(
                f"SELECT member, score FROM sorted_member WHERE key = ? AND score >= ?"
                f" AND score <= ? ORDER BY score {order}, member {order} LIMIT ? OFFSET ?",
                (key, low, high, count, begin),
            )
        )

    def rank(self, key: int, member: bytes, score: float) -> int:
        """Returns how many members come before this one."""
        rows = self._all(
            "SELECT count(*) FROM sorted_member WHERE key = ?"
            " AND (score < ? OR (score = ? AND member < ?))",
            (key, score, score, member),
        )
        return int(rows[0][0])

    def item_count(self, key: KeyRow) -> int:
        """Returns how many items a key has that is no string."""
        rows = self._all(f"SELECT count(*) FROM {_ITEMS[key.kind]} WHERE key = ?", (key.id,))
        return int(rows[0][0])

    def is_expired(self, key: KeyRow) -> bool:
        """Says whether a key is past its time."""
        return key.expires_unix_ms is not None and key.expires_unix_ms <= self._now

    # -- helpers

    def _live(self, row: tuple[Any, ...]) -> KeyRow | None:
        key = _key(row)
        return None if self.is_expired(key) else key

    def _remove_some(self, names: Sequence[bytes]) -> int:
        rows = self._all(
            "SELECT id, kind, blob, expires_unix_ms FROM key"
            f" WHERE tenant = ? AND name IN ({_marks(names)})",
            (self._tenant, *names),
        )
        if not rows:
            return 0
        for kind, items in _ITEMS.items():
            keys = [row[0] for row in rows if row[1] == kind]
            if keys:
                self._run(f"DELETE FROM {items} WHERE key IN ({_marks(keys)})", tuple(keys))
        for row in rows:
            if row[2] is not None:
                self._blobs.remove(row[2])
        keys = [row[0] for row in rows]
        self._run(f"DELETE FROM key WHERE id IN ({_marks(keys)})", tuple(keys))
        return sum(row[3] is None or row[3] > self._now for row in rows)

    def _delete(self, key: KeyRow) -> None:
        if key.kind in _ITEMS:
            self._run(f"DELETE FROM {_ITEMS[key.kind]} WHERE key = ?", (key.id,))
        elif key.blob is not None:
            self._blobs.remove(key.blob)
        self._run("DELETE FROM key WHERE id = ?", (key.id,))

    def _revise(self) -> int:
        """One revision for all that a transaction changes: nobody sees anything in between."""
        if not self._revision:
            self._revision = self._next("clock")
        return self._revision


def expired(transaction: Transaction, now_unix_ms: int, count: int) -> list[tuple[str, bytes]]:
    """Returns keys that have expired, of all tenants, as tenant and name."""
    rows = transaction.all(
        "SELECT tenant, name FROM key WHERE expires_unix_ms <= ? LIMIT ?", (now_unix_ms, count)
    )
    return [(row[0], bytes(row[1])) for row in rows]


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _key(row: tuple[Any, ...]) -> KeyRow:
    return KeyRow(row[0], bytes(row[1]), Kind(row[2]), *row[3:])


def _pairs(rows: list[tuple[Any, ...]]) -> list[tuple[bytes, bytes]]:
    return [(bytes(first), bytes(second)) for first, second in rows]


def _scored(rows: list[tuple[Any, ...]]) -> list[tuple[bytes, float]]:
    return [(bytes(member), float(score)) for member, score in rows]
