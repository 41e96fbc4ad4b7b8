"""Which tables the catalogue has, of this version and of those before it.

Each table's own part stands where its questions are. The one decision: a catalogue is of a version if it
has exactly the tables that the scripts up to that version make; a number alone proves nothing.
"""

from pathlib import Path
from typing import TypeAlias

import apsw

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
    transaction,
)
from pion_grpc.storage.catalog_errors import OtherCatalogue

APPLICATION_ID = 0x50494F4E  # "PION"
SCHEMA_VERSION = 1

MIGRATIONS = (
    "".join(
        (
            transaction.SCHEMA,
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


def check_shape(path: Path, shape: Shape, migrations: tuple[str, ...] = MIGRATIONS) -> None:
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
