"""Recurrent states: one blob for each layer of a session, and what its owner says of it."""

from collections.abc import Iterable
from typing import NamedTuple

from pion_grpc.storage.blobs import LEASED, Blobs
from pion_grpc.storage.transaction import Transaction

SCHEMA = """
CREATE TABLE state (
  tenant          TEXT NOT NULL,
  session         TEXT NOT NULL,
  layer           INTEGER NOT NULL,
  blob            INTEGER NOT NULL REFERENCES blob (id),
  boundary_tokens INTEGER NOT NULL,
  description     TEXT NOT NULL,
  model_id        TEXT NOT NULL,
  generation      INTEGER NOT NULL,
  last_use        INTEGER NOT NULL,  -- of the session: its layers are used together
  PRIMARY KEY (tenant, session, layer)
) WITHOUT ROWID;
CREATE INDEX state_use ON state (last_use);
CREATE INDEX state_blob ON state (blob);
"""


class StateRow(NamedTuple):
    """One state."""

    blob: int
    boundary_tokens: int
    description: str
    model_id: str
    generation: int
    last_use: int


class States:
    """The table of states within one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def get(self, tenant: str, session: str, layer: int) -> StateRow | None:
        """Returns a state."""
        rows = self._transaction.all(
            f"SELECT {', '.join(StateRow._fields)} FROM state"
            " WHERE tenant = ? AND session = ? AND layer = ?",
            (tenant, session, layer),
        )
        return StateRow(*rows[0]) if rows else None

    def put(
        self,
        tenant: str,
        session: str,
        layer: int,
        blob: int,
        boundary_tokens: int,
        description: str,
        model_id: str,
    ) -> int:
        """Sets a state in place of the one before, and returns its generation."""
        self.remove(tenant, session, layer)
        generation = self._transaction.next("generation")
        self._transaction.run(
            "INSERT INTO state VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                tenant,
                session,
                layer,
                blob,
                boundary_tokens,
                description,
                model_id,
                generation,
                self._transaction.next("clock"),
            ),
        )
        return generation

    def remove(self, tenant: str, session: str, layer: int | None = None) -> int:
        """Removes one layer of a session, or all; returns how many there were."""
        condition = "tenant = ? AND session = ?" + ("" if layer is None else " AND layer = ?")
        values = (tenant, session) if layer is None else (tenant, session, layer)
        rows = self._transaction.all(f"DELETE FROM state WHERE {condition} RETURNING blob", values)
        for row in rows:
            Blobs(self._transaction).remove(row[0])
        return len(rows)

    def stamp_past(self, uses: Iterable[tuple[tuple[str, str], int]]) -> None:
        """Records uses of sessions at their times of the clock; where a later one is known, it stays."""
        for (tenant, session), clock in uses:
            self._transaction.run(
                "UPDATE state SET last_use = max(last_use, ?) WHERE tenant = ? AND session = ?",
                (clock, tenant, session),
            )

    def least_used(self, tenant: str | None) -> tuple[str, str, int] | None:
        """Returns tenant, name and last use of the session that was not used for longest.

        Not one that is leased.
        """
        condition, values = ("AND tenant = ?", (tenant,)) if tenant is not None else ("", ())
        rows = self._transaction.all(
            "SELECT tenant, session, last_use FROM state WHERE NOT EXISTS ("
            "SELECT 1 FROM state AS layer JOIN blob ON blob.id = layer.blob"
            " WHERE layer.tenant = state.tenant AND layer.session = state.session"
            f" AND {LEASED}) {condition} ORDER BY last_use LIMIT 1",
            values,
        )
        return rows[0] if rows else None
