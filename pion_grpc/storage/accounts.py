"""Accounts: which bytes count, of whom, and those that are only reserved or not yet removed.

Knows sizes and names of files, not what is in them. The one decision: `usage` is written by triggers
alone, here and beside every other table whose rows have bytes, so that no code can forget to count.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pion_grpc.storage.transaction import Transaction

SCHEMA = """
CREATE TABLE reservation (
  id INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, tenant TEXT NOT NULL,
  prefix INTEGER NOT NULL, bytes INTEGER NOT NULL
);
CREATE TABLE garbage (file TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE usage (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;

CREATE TRIGGER reservation_added AFTER INSERT ON reservation BEGIN
  INSERT INTO usage VALUES (NEW.tenant, NEW.bytes) ON CONFLICT DO UPDATE SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER reservation_removed AFTER DELETE ON reservation BEGIN
  UPDATE usage SET bytes = bytes - OLD.bytes WHERE tenant = OLD.tenant;
END;
CREATE TRIGGER garbage_added AFTER INSERT ON garbage BEGIN
  INSERT INTO usage VALUES ('#garbage', NEW.bytes) ON CONFLICT DO UPDATE SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER garbage_removed AFTER DELETE ON garbage BEGIN
  UPDATE usage SET bytes = bytes - OLD.bytes WHERE tenant = '#garbage';
END;
"""

ROW_BYTES = 64
"""What a row costs beside its values, about."""


def counted(table: str, size: str, tenant: str, *, updated: str = "") -> str:
    """Returns the triggers that keep the count of what tenants keep in one table of the database.

    In `size` and `tenant`, ROW stands for the row that comes, goes or changes.
    """

    def change(name: str, event: str, row: str, difference: str) -> str:
        of = tenant.replace("ROW", row)
        return (
            f"CREATE TRIGGER {table}_{name} AFTER {event} ON {table} WHEN {of} != '' BEGIN\n"
            f"  INSERT INTO usage VALUES ('#keys:' || {of}, {difference})\n"
            f"    ON CONFLICT DO UPDATE SET bytes = bytes + {difference};\n"
            "END;\n"
        )

    new, old = (f"({size.replace('ROW', row)} + {ROW_BYTES})" for row in ("NEW", "OLD"))
    triggers = change("kept", "INSERT", "NEW", new) + change("gone", "DELETE", "OLD", f"-{old}")
    if updated:
        triggers += change("resized", f"UPDATE OF {updated}", "NEW", f"{new} - {old}")
    return triggers


class Accounts:
    """The tables of reservations, garbage and usage within one transaction."""

    def __init__(self, transaction: "Transaction") -> None:
        self._transaction = transaction

    def reserve(self, owner: str, tenant: str, prefix: int, size: int) -> int:
        """Counts bytes that are about to be written to a live prefix; returns the reservation."""
        rows = self._transaction.all(
            "INSERT INTO reservation (owner, tenant, prefix, bytes) VALUES (?, ?, ?, ?) RETURNING id",
            (owner, tenant, prefix, size),
        )
        return int(rows[0][0])

    def is_reserved(self, prefix: int) -> bool:
        """Says whether somebody is writing to a live prefix."""
        return bool(
            self._transaction.all("SELECT 1 FROM reservation WHERE prefix = ? LIMIT 1", (prefix,))
        )

    def release(self, reservation: int) -> bool:
        """Ends a reservation; says whether it was still there."""
        return bool(
            self._transaction.all(
                "DELETE FROM reservation WHERE id = ? RETURNING 1", (reservation,)
            )
        )

    def release_all(self, owner: str) -> None:
        """Ends the reservations of an instance."""
        self._transaction.run("DELETE FROM reservation WHERE owner = ?", (owner,))

    def add_garbage(self, file: str, size: int) -> None:
        """Counts a file that nobody names any more until it is removed."""
        self._transaction.run("INSERT OR IGNORE INTO garbage VALUES (?, ?)", (file, size))

    def garbage(self) -> list[str]:
        """Returns the files that may be removed."""
        return [row[0] for row in self._transaction.all("SELECT file FROM garbage")]

    def forget_garbage(self, files: Iterable[str]) -> None:
        """Stops counting files that have been removed."""
        self._transaction.run_many("DELETE FROM garbage WHERE file = ?", ((f,) for f in files))

    def stored_bytes(self) -> int:
        """Returns the bytes that count once the garbage is removed."""
        return int(
            self._transaction.all(
                "SELECT coalesce(sum(bytes), 0) FROM usage WHERE tenant NOT LIKE '#%'", ()
            )[0][0]
        )

    def usage(self, tenant: str | None = None) -> int:
        """Returns the bytes of segments, row files and reservations, of one tenant or of all."""
        values: tuple[str, ...] = ()
        condition = "tenant NOT LIKE '#keys:%'"  # those are in the database's own file
        if tenant is not None:
            condition, values = "tenant IN (?, '#keys:' || ?)", (tenant, tenant)
        statement = f"SELECT coalesce(sum(bytes), 0) FROM usage WHERE {condition}"
        return int(self._transaction.all(statement, values)[0][0])
