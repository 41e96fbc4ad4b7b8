"""Leases: until when a prefix stays readable, whatever happens to its name.

Knows no clock of its own: every question comes with the time. The one decision: a lease that has expired
keeps nothing from that moment on, whether or not its row is still here.
"""

from pion_grpc.storage.transaction import Transaction

SCHEMA = """
CREATE TABLE lease (
  id BLOB PRIMARY KEY, prefix INTEGER NOT NULL REFERENCES prefix (id), expires_unix_ms INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX lease_prefix ON lease (prefix);
"""


class Leases:
    """The table of leases within one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def add(self, lease: bytes, prefix: int, expires_unix_ms: int) -> None:
        """Keeps a prefix readable until then."""
        self._transaction.run(
            "INSERT INTO lease VALUES (?, ?, ?)", (lease, prefix, expires_unix_ms)
        )

    def end_expired(self, now_unix_ms: int) -> None:
        """Removes expired leases."""
        self._transaction.run("DELETE FROM lease WHERE expires_unix_ms <= ?", (now_unix_ms,))

    def has_expired(self, now_unix_ms: int) -> bool:
        """Says whether `end_expired` has something to do."""
        return bool(
            self._transaction.all(
                "SELECT 1 FROM lease WHERE expires_unix_ms <= ? LIMIT 1", (now_unix_ms,)
            )
        )

    def is_leased(self, prefix: int, now_unix_ms: int) -> bool:
        """Says whether a lease keeps a prefix."""
        return bool(
            self._transaction.all(
                "SELECT 1 FROM lease WHERE prefix = ? AND expires_unix_ms > ? LIMIT 1",
                (prefix, now_unix_ms),
            )
        )
