"""Saving all of the store at once: sealing what is live, and one file with everything in it.

Both are of all tenants, and of all that is stored, whatever kind it is. Refuses to know what is in the
file. The one decision: nothing waits for being saved. What was acknowledged survives a kill as it is;
saving makes it survive a power cut, too, and the file is a copy, which nothing depends on.
"""

import re
from contextlib import suppress
from pathlib import PurePosixPath

from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.errors import DiskFull, InvalidRequest, PionError
from pion_grpc.storage.directory import is_own
from pion_grpc.storage.sides import Sides
from pion_grpc.storage.store_snapshot import write_store_snapshot

_PATH = re.compile(r"(?![/~])(?!(?:.*/)?\.\.(?:/|\Z))[^\x00-\x1f\x7f]{1,1000}")


def save_all(store: PrefixStore) -> bool:
    """Seals what is live, of all tenants, on stable storage; False if there is nothing at all.

    What cannot be sealed, for want of room, say, is noted for the log, and stays as rows.

    Raises:
        DiskFull: not everything is on stable storage.
    """
    catalog = store.workshop.catalog
    with catalog.read() as transaction:
        before = Sides(transaction).counts().records
        anything = not transaction.is_empty()
    with suppress(PionError):  # one tenant's rows, whose sync below is as safe, fail nobody's
        store.save(None, [])
    store.sync()
    with catalog.write(on_disk=True) as transaction:
        Sides(transaction).saved()
        Sides(transaction).count_records(-before)
    return anything


def snapshot_to(store: PrefixStore, name: str) -> None:
    """Writes everything that is stored, of all tenants, to one file of the data directory.

    Nothing that is stored depends on it: the file is a copy, and may be taken anywhere.

    Raises:
        InvalidRequest: the name is not inside the directory, or is one of the server's own.
        OverBudget, DiskFull: there is no room for it.
    """
    path = PurePosixPath(name)  # without "." and empty components
    if not (_PATH.fullmatch(name) and path.parts) or is_own(path):
        raise InvalidRequest(
            "path", "must be relative to the data directory, and no name of its own"
        )
    workshop = store.workshop
    with workshop.catalog.read() as transaction:
        free = workshop.space.budget_bytes - workshop.space.used_bytes(transaction)
    target = workshop.directory.path / path
    try:
        write_store_snapshot(workshop.catalog, workshop.directory, workshop.files, target, free)
    except OSError as error:
        # Without its file names: they are this machine's, and nobody's on the wire.
        raise DiskFull(f"{name!r} cannot be written: {error.strerror or error}") from error
    workshop.space.measure()
