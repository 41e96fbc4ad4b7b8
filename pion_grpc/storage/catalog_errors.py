"""What goes wrong with the catalogue's file, in words of `errors`.

Knows SQLite's errors; not what was asked. The one decision: an `apsw.Error` that leaves this package is
a programmer's error, so whatever reads or writes the database does it inside `translated`.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import apsw

from pion_grpc.errors import Busy, CannotStart, DiskFull
from pion_grpc.storage.directory import rebuild_command


class UnusableCatalogue(CannotStart):
    """It cannot be used, but be made anew (`rebuild`). `problem` says in few words what is wrong."""

    def __init__(self, message: str, problem: str) -> None:
        super().__init__(message)
        self.problem = problem


class DamagedCatalogue(UnusableCatalogue):
    """The database's own pages are not what was written."""

    def __init__(self, path: Path, error: Exception) -> None:
        super().__init__(
            f"{path} is damaged ({error}): {rebuild_command(path.parent)} sets it aside and makes a "
            "new one from the segments; or move it away, and segments, rows and blobs too, to start "
            "empty",
            f"damaged: {error}",
        )


class OtherCatalogue(UnusableCatalogue):
    """Its tables are not those of its version: a program between two releases made it."""

    def __init__(self, path: Path, difference: str) -> None:
        super().__init__(
            f"{path} has other tables than this version of pion-grpc ({difference}): use the version "
            f"that wrote it, or choose another --data; or {rebuild_command(path.parent)} sets it aside "
            "and makes a new one from the segments, without keys, states and rows never sealed",
            f"of another version: {difference}",
        )


@contextlib.contextmanager
def translated(what: str, path: Path) -> Iterator[None]:
    """Says in words of the domain why the catalogue at `path` cannot be read, written or copied.

    Raises:
        DiskFull: the database cannot grow, its disk fails, or the system does not let this process
            open or write it any more.
        DamagedCatalogue: a page is not what was written.
        Busy: another process held the lock for all of `BUSY_MS`.
    """
    try:
        yield
    except (apsw.FullError, apsw.IOError, apsw.CantOpenError, apsw.ReadOnlyError) as error:
        raise DiskFull(f"the catalogue cannot be {what}: {error}") from error
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise DamagedCatalogue(path, error) from error
    except apsw.BusyError as error:
        raise Busy(f"the catalogue cannot be {what}: another process holds it") from error
