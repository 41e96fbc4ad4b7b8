"""Checking a data directory from outside: every page that is stored against its checksum.

Runs beside a server or without one, in a process of its own, and changes nothing that is stored: the
catalogue is opened for reading only, and what is damaged stays where it is. Knows nothing of a running
server, so everything is looked up anew when its turn comes: what has gone by then is no damage, and a
prefix whose files have been replaced is looked at again. Only what the catalogue names *and goes on
naming* is held against the disk.

Beyond the pages it compares what must agree: a segment's header with the catalogue, its token ids with
the ones that answer a match, and the catalogue's own pages with each other.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from pion_grpc.core.reading import segment_layout
from pion_grpc.errors import CannotStart, Corrupt, TooManyFiles, Unreadable
from pion_grpc.storage.blobs import BlobRow
from pion_grpc.storage.catalog_reader import CatalogReader, Located, reading
from pion_grpc.storage.directory import rebuild_command
from pion_grpc.storage.pages import CheckedRun, OpenFile, open_segment
from pion_grpc.storage.transaction import PrefixRow
from pion_wire.layout import Layout
from pion_wire.limits import CHUNK_BYTES_MAX

Progress = Callable[[int, int], None]
"""Takes (bytes read, bytes in all)."""


class Damage(NamedTuple):
    """Something that cannot be read as it was stored."""

    kind: Literal["prefix", "value", "catalogue"]
    tenant: str
    name: str
    """Of the prefix, or of the key that has the value; else of the file."""
    visible: bool
    """False: a prefix whose name has been taken away, and whose rows others still need."""
    problem: str


class Checkup(NamedTuple):
    """What was found."""

    prefixes: int
    """Checked, those included that are kept only for others."""
    values: int
    """Checked: large values of keys, and whatever else has a file of its own."""
    bytes_read: int
    damaged: list[Damage]


def check_directory(path: Path, progress: Progress = lambda done, total: None) -> Checkup:
    """Reads everything that the catalogue of a data directory names.

    Raises:
        CannotStart: there is no catalogue, or none that this release reads, or a file of the
            directory may not be read.
    """
    catalog = path / "catalog.db"
    try:
        # Asked, not opened: closing it would end the locks that a server in this process has on it.
        if not catalog.stat().st_size or not catalog.is_file():
            raise _no_catalogue(path)
        if not os.access(catalog, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(catalog))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_catalogue(path) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        return _check_directory(path, progress)
    except OSError as error:  # says nothing about what is stored
        raise _unreadable(path, error) from error
    except Unreadable as error:  # nor does this
        raise CannotStart(error.problem) from error
    except TooManyFiles as error:  # nor does this
        raise CannotStart(str(error)) from error


def _check_directory(path: Path, progress: Progress) -> Checkup:
    with reading(path / "catalog.db") as catalogue:
        prefixes, values = catalogue.prefix_sizes(), catalogue.blob_sizes()
        read = PageReader(progress, sum(prefixes.values()) + sum(values.values()))
        damaged = [Damage("catalogue", "", "", True, text) for text in catalogue.problems()]
        damaged += _damaged_prefixes(path, catalogue, prefixes, read)
        damaged += _damaged_values(path, catalogue, values, read)
        return Checkup(len(prefixes), len(values), read.bytes, damaged)


def _unreadable(path: Path, error: OSError) -> CannotStart:
    return CannotStart(f"{error.filename or path} cannot be read: {error.strerror}")


def _no_catalogue(path: Path) -> CannotStart:
    problem = "there is no catalog.db in it, or an empty one"
    if any(path.glob("segments/*")):
        makes = f"{rebuild_command(path)} makes one from its segments"
        return CannotStart(f"{path} cannot be checked: {problem}; {makes}")
    return CannotStart(f"{path} is not a data directory: {problem}")


def _damaged_prefixes(
    path: Path, catalogue: CatalogReader, sizes: dict[int, int], read: "PageReader"
) -> Iterator[Damage]:
    unsound: set[int] = set()
    for identity, size in sizes.items():
        row, problem = _check_prefix(path, catalogue, identity, read)
        if row is not None:
            if not problem and row.parent in unsound:  # parents come first: they are older
                problem = "rows that it takes from its parent are damaged"
            if problem:
                unsound.add(identity)
                yield Damage("prefix", row.tenant, row.namespace, row.visible, problem)
        read.finish(size)


def _damaged_values(
    path: Path, catalogue: CatalogReader, sizes: dict[int, int], read: "PageReader"
) -> Iterator[Damage]:
    for identity, size in sizes.items():
        blob = catalogue.blob(identity)
        if blob is not None:
            problem = _check_blob(path, blob, read)
            if problem and catalogue.blob(identity) is not None:  # else it has gone meanwhile
                yield Damage("value", *catalogue.owner(blob), True, problem)
        read.finish(size)


class PageReader:
    """Reads pages against their checksums, and counts what it has read."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.bytes = 0
        self._before = 0  # this prefix
        self._done = 0
        self._total = total
        self._progress = progress

    def check(self, run: CheckedRun) -> None:
        """Reads a run, page by page.

        Raises:
            Corrupt: a page does not have its checksum.
        """
        for begin in range(0, run.size, CHUNK_BYTES_MAX):
            end = min(begin + CHUNK_BYTES_MAX, run.size)
            run.read(begin, end)
            self.bytes += end - begin
            self._progress(self._done + self.bytes - self._before, self._total)

    def finish(self, size: int) -> None:
        """Ends a prefix of this size, whatever of it needed no reading."""
        self._done += size
        self._before = self.bytes
        self._progress(self._done, self._total)


def _check_blob(path: Path, blob: BlobRow, read: PageReader) -> str:
    """Returns what is wrong with a value, or nothing."""
    try:
        file = OpenFile(path / blob.file)
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    with contextlib.closing(file):
        try:
            read.check(blob.run_of(file))
        except Corrupt as error:
            return str(error)
    return ""


def _check_prefix(
    path: Path, catalogue: CatalogReader, identity: int, read: PageReader
) -> tuple[PrefixRow | None, str]:
    """Returns the prefix, unless it has gone, and what is wrong with it, or nothing."""
    before: Located | None = None
    while (located := catalogue.locate(identity)) is not None:
        with contextlib.ExitStack() as stack:
            try:
                runs = _open(path, located, stack)
            except FileNotFoundError as error:
                if located == before:
                    return located.row, f"{error.filename} is missing"
                before = located  # replaced meanwhile, perhaps: look again
                continue
            except Corrupt as error:
                return located.row, str(error)
            try:
                for run in runs:
                    read.check(run)
            except Corrupt as error:
                return located.row, str(error)
            return located.row, ""
    return None, ""


def _open(path: Path, located: Located, stack: contextlib.ExitStack) -> list[CheckedRun]:
    """Opens every file of a prefix.

    Raises:
        FileNotFoundError: one is gone.
        Corrupt: one is not what the catalogue says.
    """
    runs = []
    if located.row.file is not None:
        run = open_segment(path / located.row.file, segment_layout(located.row, located.parent))
        stack.callback(run.file.close)
        _compare_token_ids(located, run)
        runs.append(run)
    row_bytes = {t.key: t.row_bytes for t in Layout.from_json(located.row.layout).tensors}
    files: dict[str, OpenFile] = {}
    for extent in located.extents:
        if extent.file not in files:
            files[extent.file] = OpenFile(path / extent.file)
            stack.callback(files[extent.file].close)
        size = extent.row_count * row_bytes[extent.tensor]
        runs.append(CheckedRun(files[extent.file], extent.offset, size, extent.checksums))
    return runs


def _compare_token_ids(located: Located, run: CheckedRun) -> None:
    """Raises Corrupt if the tokens that matches are answered with are not those of the segment."""
    count = located.row.file_tokens
    if located.row.state != "sealed" or not located.token_ids or not count:
        return
    if run.read(run.size - 4 * count, run.size) != located.token_ids:
        raise Corrupt(f"{run.file.path} holds other token ids than the catalogue")
