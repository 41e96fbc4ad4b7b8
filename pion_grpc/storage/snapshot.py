"""Snapshots: everything that is stored, in one file that a fresh directory can be made from.

::

    an uncompressed tar archive (POSIX.1-2001)
    pion-snapshot-1       the first member, empty: says what this is
    catalog.db            the catalogue at one moment, without leases, reservations and what was open
    segments/… rows/… blobs/…   every file that it names

The one decision: a snapshot *is* a data directory. Nothing is translated, so nothing can be lost on the
way, and restoring is unpacking. The catalogue is copied first and its files are linked at once; what was
evicted in between is taken out of the copy. Knows tables and files, not what they mean.
"""

import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import apsw

from pion_grpc.errors import CannotStart
from pion_grpc.storage.catalog import Catalog
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.files import Files

MARK = "pion-snapshot-1"
_DIRECTORIES = ("segments", "rows", "blobs")

_ONLY_WHAT_STAYS = """
DELETE FROM lease; DELETE FROM reservation; DELETE FROM garbage; DELETE FROM copy;
DELETE FROM prefix WHERE state = 'open';
DELETE FROM usage WHERE tenant = '#garbage';
UPDATE prefix SET boot = NULL, owner = NULL; UPDATE blob SET boot = NULL;
"""


def write_snapshot(
    catalog: Catalog, directory: DataDirectory, files: Files, target: Path, bytes_max: int
) -> int:
    """Writes a snapshot to `target`, on stable storage, and returns its bytes.

    An older snapshot there is replaced; anything else stays, whatever it is.

    Raises:
        OSError: it cannot be written, would replace something, or have more than `bytes_max` bytes.
    """
    if os.path.lexists(target) and not (target.is_file() and is_snapshot(target)):
        raise FileExistsError(f"{target.name} exists, and is no snapshot")
    links = directory.run / f"{directory.instance}-snapshot"
    scratch = directory.run / f"{directory.instance}-snapshot.tar"
    shutil.rmtree(links, ignore_errors=True)
    try:
        for name in _DIRECTORIES:
            (links / name).mkdir(parents=True)
        copy = links / "catalog.db"
        catalog.copy_to(copy)
        names = _link_files(copy, directory, links)
        size = sum((links / name).stat().st_size for name in [*names, "catalog.db"])
        if size > bytes_max:
            raise OSError(f"{size} bytes do not fit: {bytes_max} are free")
        with scratch.open("xb") as file:
            _archive(file, links, ["catalog.db", *names])
            file.flush()
            files.sync(file.fileno())
        files.rename(scratch, target)
        files.sync_directory(target.parent)
        return target.stat().st_size
    finally:
        scratch.unlink(missing_ok=True)
        shutil.rmtree(links, ignore_errors=True)


def is_snapshot(path: Path) -> bool:
    """Says whether a file begins as a snapshot does."""
    try:
        with tarfile.open(path, "r:") as archive:
            first = archive.next()
            return first is not None and first.name == MARK
    except (tarfile.TarError, OSError):
        return False


def restore_snapshot(snapshot: Path, directory: Path) -> None:
    """Makes a data directory of a snapshot.

    Raises:
        CannotStart: it is none, or the directory is not empty.
    """
    if not is_snapshot(snapshot):
        raise CannotStart(f"{snapshot} is no snapshot")
    if directory.exists() and any(directory.iterdir()):
        raise CannotStart(f"{directory} is not empty: a snapshot makes a directory of its own")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with tarfile.open(snapshot, "r:") as archive:
            for member in archive:
                if member.name == MARK:
                    continue
                if not member.isfile() or not _is_expected(member.name):
                    raise CannotStart(f"{snapshot} holds {member.name!r}, which no snapshot has")
                _unpack(archive, member, directory / member.name)
    except tarfile.TarError as error:
        raise CannotStart(f"{snapshot} is damaged: {error}") from error
    for name in (".", *_DIRECTORIES):
        if (directory / name).is_dir():
            Files().sync_directory(directory / name)


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    source = archive.extractfile(member)
    assert source is not None, "a file has content"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
        file.flush()
        Files().sync(file.fileno())


def _is_expected(name: str) -> bool:
    parent, _, rest = name.rpartition("/")
    return name == "catalog.db" or (parent in _DIRECTORIES and rest not in ("", ".", ".."))


def _archive(file: BinaryIO, links: Path, names: list[str]) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo(MARK))
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = (links / name).stat().st_size
            with (links / name).open("rb") as source:
                archive.addfile(member, source)  # row files may have grown: not beyond that size


def _link_files(copy: Path, directory: DataDirectory, links: Path) -> list[str]:
    """Links the files that a copy of the catalogue names, and takes out what is gone already."""
    connection = apsw.Connection(str(copy))
    try:
        connection.execute("PRAGMA journal_mode = DELETE").fetchall()
        connection.execute(_ONLY_WHAT_STAYS)
        linked = []
        for name in _named(connection):
            try:
                os.link(directory.resolve(name), links / name)
            except FileNotFoundError:
                _take_out(connection, name)
            else:
                linked.append(name)
        connection.execute("VACUUM").fetchall()
    finally:
        connection.close()
    return linked


def _named(connection: apsw.Connection) -> Iterator[str]:
    rows = connection.execute(
        "SELECT file FROM prefix WHERE file IS NOT NULL UNION SELECT file FROM extent WHERE file != ''"
        " UNION SELECT file FROM blob"
    ).fetchall()
    return (str(row[0]) for row in rows)


def _take_out(connection: apsw.Connection, name: str) -> None:
    """Removes what a file that was evicted meanwhile belonged to, children included."""
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
