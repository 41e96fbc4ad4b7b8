"""What storing works with: the directory, the catalogue, the files and the space, handed around as one.

And what all ways of storing have in common: which row files are being written, and bringing what was
written to stable storage.
"""

import contextlib
import threading
from typing import NamedTuple

from pion_grpc.core.reading import CorruptPrefix
from pion_grpc.core.recovery import Recovery
from pion_grpc.core.space import Space
from pion_grpc.storage.catalog import Catalog
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.extents import Extents
from pion_grpc.storage.files import Files
from pion_grpc.storage.pages import OpenFile
from pion_grpc.storage.transaction import PrefixRow


class OutOfDate(Exception):
    """What the catalogue said is no longer so, and files that it named have gone: ask it again."""


class Workshop(NamedTuple):
    """What storing needs of the store around it."""

    directory: DataDirectory
    catalog: Catalog
    files: Files
    space: Space
    row_files: "RowFileNames"
    recovery: Recovery
    boot: str


class RowFileNames:
    """Which row files are being written: each has one writer at a time."""

    def __init__(self, instance: str) -> None:
        self._prefix = f"rows/{instance}-"
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def take(self, known: list[str], reservation: int) -> str:
        """Returns a file of this process among the `known` ones that nobody writes, or a new name."""
        with self._lock:
            free = (f for f in known if f.startswith(self._prefix) and f not in self._busy)
            name = next(free, f"{self._prefix}{reservation}.rows")
            self._busy.add(name)
            return name

    def give_back(self, name: str) -> None:
        """Lets the next writer have it."""
        with self._lock:
            self._busy.discard(name)


def sync_prefixes(workshop: Workshop, prefixes: list[PrefixRow]) -> None:
    """Brings the files of prefixes to stable storage, and records it.

    The commit at the end also syncs every earlier one, whatever it was of. A prefix that changes
    meanwhile keeps its mark: what it has got since may not be on stable storage.
    """
    for prefix in prefixes:
        if workshop.recovery.is_due(prefix):
            _recover(workshop, prefix)
            continue
        with workshop.catalog.read() as transaction:
            names = Extents(transaction).files(prefix.id)
        sync_files(workshop, [*names, prefix.file or ""])
    workshop.files.sync_directory(workshop.directory.segments)
    workshop.files.sync_directory(workshop.directory.rows)
    with workshop.catalog.write(on_disk=True) as transaction:
        for prefix in prefixes:
            if workshop.recovery.is_due(prefix):
                continue
            now = transaction.by_id(prefix.id)
            unchanged = (prefix.generation, prefix.row_counts, prefix.state)
            if now is not None and (now.generation, now.row_counts, now.state) == unchanged:
                Extents(transaction).mark_synced(prefix.id)


def _recover(workshop: Workshop, prefix: PrefixRow) -> None:
    """Checks what was written under another boot: syncing what is lost would bring nothing back."""
    with workshop.catalog.read() as transaction:
        row = transaction.by_id(prefix.id)
        chain = transaction.chain(row) if row is not None else []
    try:
        workshop.recovery.check(chain)
    except CorruptPrefix as error:
        workshop.space.take_out(error)


def sync_files(workshop: Workshop, names: list[str]) -> None:
    """Brings files to stable storage; one that is gone belongs to a prefix that went meanwhile."""
    for name in filter(None, names):
        with contextlib.suppress(FileNotFoundError):
            file = OpenFile(workshop.directory.resolve(name))
            try:
                workshop.files.sync(file.descriptor)
            finally:
                file.close()
