"""The match index: by which tokens a prefix is found, and the hashes that a caller gave it.

Knows entries as pairs of bytes, a parent and the tokens under it, not how `core` makes them of ids. The
one decision: an entry only finds; whoever asks compares the token ids, which are kept here whole.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pion_grpc.storage.accounts import counted
from pion_grpc.storage.transaction import PrefixRow, Transaction

EQUALS_MAX = 64
"""Equal matches among which the most recently used is chosen."""
_AFTER_ANY_TOKENS = b"\xff" * 257
"""Behind a beginning, an upper bound of every entry that begins so: a block has 256 bytes."""

SCHEMA = """
CREATE TABLE tokens (prefix INTEGER PRIMARY KEY REFERENCES prefix (id), token_ids BLOB NOT NULL);
CREATE TABLE node (
  parent BLOB NOT NULL, tokens BLOB NOT NULL, prefix INTEGER NOT NULL REFERENCES prefix (id),
  PRIMARY KEY (parent, tokens, prefix)
) WITHOUT ROWID;
CREATE TABLE block_table (
  prefix INTEGER PRIMARY KEY REFERENCES prefix (id), block_tokens INTEGER NOT NULL, hashes BLOB NOT NULL
);
"""
SCHEMA += counted(
    "block_table",
    "length(ROW.hashes)",
    "(SELECT tenant FROM prefix WHERE id = ROW.prefix)",
    updated="hashes",
)


class BlockTableRow(NamedTuple):
    """The caller's hashes of one prefix."""

    block_tokens: int
    hashes: bytes


class MatchIndex:
    """The tables of entries, token ids and hashes within one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def add(self, prefix: int, nodes: Iterable[tuple[bytes, bytes]]) -> None:
        """Adds (parent, tokens) entries of a prefix to the match index; twice is once."""
        self._transaction.run_many(
            "INSERT OR IGNORE INTO node VALUES (?, ?, ?)", ((*node, prefix) for node in nodes)
        )

    def remove(self, prefix: int, nodes: Iterable[tuple[bytes, bytes]]) -> None:
        """Removes entries of a prefix from the match index, where they are there."""
        self._transaction.run_many(
            "DELETE FROM node WHERE parent = ? AND tokens = ? AND prefix = ?",
            ((*node, prefix) for node in nodes),
        )

    def has(self, parent: bytes, tokens: bytes) -> bool:
        """Says whether any prefix has this entry."""
        return bool(
            self._transaction.all(
                "SELECT 1 FROM node WHERE parent = ? AND tokens = ? LIMIT 1", (parent, tokens)
            )
        )

    def neighbours(self, parent: bytes, tokens: bytes) -> list[bytes]:
        """Returns the entries under `parent` just before and just after `tokens`, itself included."""
        after = self._transaction.all(
            "SELECT tokens FROM node WHERE parent = ? AND tokens >= ? ORDER BY tokens LIMIT 1",
            (parent, tokens),
        )
        before = self._transaction.all(
            "SELECT tokens FROM node WHERE parent = ? AND tokens < ? ORDER BY tokens DESC LIMIT 1",
            (parent, tokens),
        )
        return [bytes(row[0]) for row in after + before]

    def most_recent(self, parent: bytes, beginning: bytes) -> PrefixRow | None:
        """Returns the most recently used prefix with an entry that begins so; a few are looked at."""
        return self._transaction.find(
            "id IN (SELECT prefix FROM node WHERE parent = ? AND tokens BETWEEN ? AND ?"
            f" ORDER BY tokens DESC, prefix DESC LIMIT {EQUALS_MAX}) ORDER BY last_use DESC LIMIT 1",
            (parent, beginning, beginning + _AFTER_ANY_TOKENS),
        )

    def having(self, parent: bytes, entries: Sequence[bytes], *, limit: int) -> list[int]:
        """Returns the ids of prefixes with any of these entries under `parent`, the youngest first."""
        marks = ", ".join("?" * len(entries))
        rows = self._transaction.all(
            f"SELECT prefix FROM node WHERE parent = ? AND tokens IN ({marks})"
            " ORDER BY prefix DESC LIMIT ?",
            (parent, *entries, limit),
        )
        return [prefix for (prefix,) in rows]

    def token_ids(self, prefix: int) -> bytes:
        """Returns the token ids of a prefix, those of its parents included; empty if it has none."""
        rows = self._transaction.all("SELECT token_ids FROM tokens WHERE prefix = ?", (prefix,))
        return bytes(rows[0][0]) if rows else b""

    def token_count(self, prefix: int) -> int:
        """Returns how many token ids a prefix has, without reading them."""
        rows = self._transaction.all(
            "SELECT length(token_ids) FROM tokens WHERE prefix = ?", (prefix,)
        )
        return int(rows[0][0]) // 4 if rows else 0

    def set_token_ids(self, prefix: int, token_ids: bytes) -> None:
        """Sets the token ids of a prefix; none forgets them."""
        if token_ids:
            self._transaction.run(
                "INSERT OR REPLACE INTO tokens VALUES (?, ?)", (prefix, token_ids)
            )
        else:
            self._transaction.run("DELETE FROM tokens WHERE prefix = ?", (prefix,))

    def block_table(self, prefix: int) -> BlockTableRow | None:
        """Returns the caller's hashes of a prefix."""
        rows = self._transaction.all(
            "SELECT block_tokens, hashes FROM block_table WHERE prefix = ?", (prefix,)
        )
        return BlockTableRow(*rows[0]) if rows else None

    def set_block_table(self, prefix: int, block_tokens: int, hashes: bytes) -> None:
        """Sets the caller's hashes of a prefix."""
        self._transaction.run(
            "INSERT INTO block_table VALUES (?, ?, ?) ON CONFLICT DO UPDATE"
            " SET block_tokens = excluded.block_tokens, hashes = excluded.hashes",
            (prefix, block_tokens, hashes),
        )
