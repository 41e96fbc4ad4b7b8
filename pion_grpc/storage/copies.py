"""Copies: files made of stored rows for clients on this host, in a form that those ask for.

They can be made again at any time, so they are the first to go, the one that was not used for longest
before the others. No name is used twice: a file that is about to be removed is never a new one.
"""

from pion_grpc.storage.transaction import Transaction

SCHEMA = """
CREATE TABLE copy (
  file     TEXT PRIMARY KEY,
  tenant   TEXT NOT NULL,
  request  TEXT NOT NULL,       -- what was asked, whatever it was made of
  made_of  TEXT NOT NULL,       -- says whether these are still the rows
  bytes    INTEGER NOT NULL,
  last_use INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX copy_request ON copy (tenant, request);
CREATE INDEX copy_use ON copy (last_use);
CREATE TRIGGER copy_added AFTER INSERT ON copy BEGIN
  INSERT INTO usage VALUES (NEW.tenant, NEW.bytes) ON CONFLICT DO UPDATE SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER copy_removed AFTER DELETE ON copy BEGIN
  UPDATE usage SET bytes = bytes - OLD.bytes WHERE tenant = OLD.tenant;
  INSERT OR IGNORE INTO garbage VALUES (OLD.file, OLD.bytes);
END;
"""


class Copies:
    """The table of copies within one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def find(self, tenant: str, request: str, made_of: str) -> str | None:
        """Returns the copy that was made for a request of these rows."""
        rows = self._transaction.all(
            "SELECT file FROM copy WHERE tenant = ? AND request = ? AND made_of = ?",
            (tenant, request, made_of),
        )
        return rows[0][0] if rows else None

    def use(self, file: str) -> None:
        """Notes that a copy was used now."""
        clock = self._transaction.next("clock")
        self._transaction.run("UPDATE copy SET last_use = ? WHERE file = ?", (clock, file))

    def add(self, file: str, tenant: str, request: str, made_of: str, size: int) -> None:
        """Names a copy; what was made for the same request before goes."""
        self._transaction.run(
            "DELETE FROM copy WHERE tenant = ? AND request = ?", (tenant, request)
        )
        self._transaction.run(
            "INSERT INTO copy VALUES (?, ?, ?, ?, ?, ?)",
            (file, tenant, request, made_of, size, self._transaction.next("clock")),
        )

    def remove_least_used(self, tenant: str | None) -> bool:
        """Removes the copy that was not used for longest; says whether there was one."""
        condition, values = ("WHERE tenant = ?", (tenant,)) if tenant is not None else ("", ())
        rows = self._transaction.all(
            f"DELETE FROM copy WHERE file = (SELECT file FROM copy {condition}"
            " ORDER BY last_use LIMIT 1) RETURNING 1",
            values,
        )
        return bool(rows)
