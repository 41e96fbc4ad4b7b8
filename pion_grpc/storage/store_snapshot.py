"""Snapshots of a store: everything that is stored, in one file that a fresh directory can be made from.

::

    an uncompressed tar archive (POSIX.1-2001)
    pion-snapshot-1       the first member, empty: says what this is
    catalog.db            the catalogue at one moment, without leases, reservations and what was open
    segments/… rows/… blobs/…   every file that it names
    sha256sums            what all of them are, as `sha256sum --check` reads it

The one decision: a snapshot *is* a data directory. Nothing is translated, so nothing can be lost on the
way, and restoring is unpacking. Files are linked, the last of them while nobody writes the catalogue,
which is copied as it is then: what is replaced or sealed meanwhile is there, as it was before or after.
Nothing is restored of a snapshot that is not, byte for byte, the one that was saved. Knows tables and
files, not what they mean.
"""

import contextlib
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import IO, BinaryIO

import apsw

from pion_grpc.errors import CannotStart
from pion_grpc.storage.catalog import Catalog
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.files import Files
from pion_grpc.storage.transaction import Transaction

MARK = "pion-snapshot-1"
SUMS = "sha256sums"
_DIRECTORIES = ("segments", "rows", "blobs")

_ONLY_WHAT_STAYS = """
DELETE FROM lease; DELETE FROM reservation; DELETE FROM garbage; DELETE FROM copy;
DELETE FROM prefix WHERE state = 'open';
DELETE FROM usage WHERE tenant = '#garbage';
UPDATE prefix SET boot = NULL, owner = NULL; UPDATE blob SET boot = NULL;
"""


def write_store_snapshot(
    catalog: Catalog, directory: DataDirectory, files: Files, target: Path, bytes_max: int
) -> int:
    """Writes a snapshot to `target`, on stable storage, and returns its bytes.

    An older snapshot there is replaced; anything else stays, whatever it is. No directory is made.

    Raises:
        OSError: it cannot be written, would replace something, or have more than `bytes_max` bytes.
    """
    if os.path.lexists(target) and not (target.is_file() and is_store_snapshot(target)):
        raise FileExistsError(f"{target.name} exists and is not a snapshot")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {directory.name_of(target.parent)!r}")
    # Beginning with the instance, so that whoever cleans up after this process knows it.
    with tempfile.TemporaryDirectory(
        prefix=f"{directory.instance}-snapshot-", dir=directory.run, ignore_cleanup_errors=True
    ) as lent:
        links = Path(lent)
        for name in _DIRECTORIES:
            (links / name).mkdir()
        with catalog.read() as transaction:
            names = _named(transaction)
        linked = _link(names, directory, links)  # most of them, while others go on

        def link_others(transaction: Transaction) -> None:
            linked.update(_link(_named(transaction) - linked, directory, links))

        copy = links / "catalog.db"
        catalog.copy_to(copy, link_others)
        members = ["catalog.db", *_only_what_stays(copy, linked)]
        size = sum((links / name).stat().st_size for name in members)
        if size > bytes_max:
            raise OSError(f"{size} bytes do not fit: {bytes_max} are free")
        scratch = links / f"{directory.instance}-snapshot.tar"
        with scratch.open("xb") as file:
            _archive(file, links, members)
            file.flush()
            files.sync(file.fileno())
        files.rename(scratch, target)
        files.sync_directory(target.parent)
        return target.stat().st_size


def is_store_snapshot(path: Path) -> bool:
    """Says whether a file begins as a snapshot does."""
    try:
        with tarfile.open(path, "r:") as archive:
            first = archive.next()
            return first is not None and first.name == MARK
    except (tarfile.TarError, OSError):
        return False


def restore_store_snapshot(snapshot: Path, directory: Path) -> None:
    """Makes a data directory of a snapshot, or leaves it as it was.

    Raises:
        CannotStart: it is not a snapshot, is damaged, cannot be unpacked, or the directory is not empty.
    """
    try:
        snapshot.open("rb").close()
    except OSError as error:
        raise CannotStart(f"{snapshot} cannot be opened: {error.strerror}") from error
    if not is_store_snapshot(snapshot):
        raise CannotStart(
            f"{snapshot} is not a snapshot of a store; what `pion-grpc export` wrote is imported "
            "without --data, by a running server"
        )
    # Inside, because a directory that something is mounted on cannot be renamed.
    scratch = directory / "unfinished-import"
    try:
        is_new = not directory.exists()
        if not is_new and set(directory.iterdir()) - {scratch}:
            raise CannotStart(f"{directory} is not empty: a snapshot makes a directory of its own")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)  # of one that was killed
        scratch.mkdir(mode=0o700)
        try:
            _unpack(snapshot, scratch)
            _move_in(scratch, directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if is_new and not any(directory.iterdir()):
                directory.rmdir()
    except (tarfile.TarError, OSError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise CannotStart(f"{snapshot} was not restored to {directory}: {problem}") from error


def _unpack(snapshot: Path, scratch: Path) -> None:
    """Unpacks every member, and compares it with what was saved."""
    sums: set[str] = set()
    said = None
    with tarfile.open(snapshot, "r:") as archive:
        for member in archive:
            if member.name == MARK:
                continue
            if not member.isfile() or not _is_expected(member.name):
                raise CannotStart(f"{snapshot} holds {member.name!r}, which no snapshot has")
            source = archive.extractfile(member)
            assert source is not None, "a file has content"
            if member.name == SUMS:
                said = source.read().decode(errors="replace").splitlines()
            else:
                sums.add(_sum_line(_copied(source, scratch / member.name), member.name))
    if said is None:
        raise CannotStart(f"{snapshot} is damaged: its end is missing")
    for line in said:
        if line not in sums:
            raise CannotStart(f"{snapshot} is damaged: {line[66:]!r} is not what was saved")
    if len(said) != len(sums) or not (scratch / "catalog.db").exists():
        raise CannotStart(f"{snapshot} is damaged: it does not hold what was saved")


def _copied(source: IO[bytes], path: Path) -> str:
    """Copies a file to stable storage, and returns the hash of its bytes."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        while piece := source.read(1 << 20):
            digest.update(piece)
            file.write(piece)
        file.flush()
        Files().sync(file.fileno())
    return digest.hexdigest()


def _move_in(scratch: Path, directory: Path) -> None:
    """Gives what was unpacked its names; no server starts on the files without the catalogue."""
    for name in _DIRECTORIES:
        if (scratch / name).is_dir():
            Files().sync_directory(scratch / name)
            (scratch / name).rename(directory / name)
    Files().sync_directory(directory)
    (scratch / "catalog.db").rename(directory / "catalog.db")
    Files().sync_directory(directory)


def _is_expected(name: str) -> bool:
    parent, _, rest = name.rpartition("/")
    return name in ("catalog.db", SUMS) or (parent in _DIRECTORIES and rest not in ("", ".", ".."))


def _archive(file: BinaryIO, links: Path, names: list[str]) -> None:
    sums = []
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo(MARK))
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = (links / name).stat().st_size
            with (links / name).open("rb") as source:
                hashed = _Hashed(source)
                archive.addfile(member, hashed)  # row files may have grown: not beyond that size
            sums.append(_sum_line(hashed.digest.hexdigest(), name) + "\n")
        content = "".join(sums).encode()
        member = tarfile.TarInfo(SUMS)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))


class _Hashed(io.RawIOBase):
    """A file that hashes what is read of it.

    One that ends early goes on with zeros: where a row file was cut, nothing was named.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self._file = file

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size).ljust(size, b"\0")
        self.digest.update(data)
        return data


def _sum_line(digest: str, name: str) -> str:
    return f"{digest}  {name}"


def _link(names: set[str], directory: DataDirectory, links: Path) -> set[str]:
    """Links files of the directory, and returns those that were there."""
    linked = set()
    for name in sorted(names):
        with contextlib.suppress(FileNotFoundError):
            os.link(directory.resolve(name), links / name)
            linked.add(name)
    return linked


def _named(transaction: Transaction) -> set[str]:
    rows = transaction.all(
        "SELECT file FROM prefix WHERE file IS NOT NULL UNION SELECT file FROM extent WHERE file != ''"
        " UNION SELECT file FROM blob"
    )
    return {str(row[0]) for row in rows}


def _only_what_stays(copy: Path, linked: set[str]) -> list[str]:
    """Takes what is of the moment out of a copy of the catalogue, and what has no file any more.

    Returns the files that it names then.
    """
    connection = apsw.Connection(str(copy))
    try:
        connection.execute("PRAGMA journal_mode = DELETE").fetchall()
        connection.execute(_ONLY_WHAT_STAYS)
        names = _named(Transaction(connection))
        for name in names - linked:
            _take_out(connection, name)
        connection.execute("VACUUM").fetchall()
    finally:
        connection.close()
    return sorted(names & linked)


def _take_out(connection: apsw.Connection, name: str) -> None:
    """Removes what a file that is gone belonged to, children included."""
    rows = connection.execute(
        "WITH RECURSIVE gone (id) AS ("
        " SELECT id FROM prefix WHERE file = ?1 OR id IN (SELECT prefix FROM extent WHERE file = ?1)"
        " UNION SELECT prefix.id FROM prefix JOIN gone ON prefix.parent = gone.id)"
        " SELECT id FROM gone",
        (name,),
    ).fetchall()
    for prefix in (row[0] for row in rows):
        for table in ("tokens", "node", "block_table", "side", "extent"):
            connection.execute(f"DELETE FROM {table} WHERE prefix = ?", (prefix,)).fetchall()
        connection.execute("DELETE FROM prefix WHERE id = ?", (prefix,)).fetchall()
    blobs = [row[0] for row in connection.execute("SELECT id FROM blob WHERE file = ?", (name,))]
    for blob in blobs:
        connection.execute("DELETE FROM key WHERE blob = ?", (blob,)).fetchall()
        connection.execute("DELETE FROM state WHERE blob = ?", (blob,)).fetchall()
        connection.execute("DELETE FROM blob WHERE id = ?", (blob,)).fetchall()
    connection.execute("DELETE FROM garbage").fetchall()
    connection.execute("DELETE FROM usage WHERE tenant = '#garbage'").fetchall()
