"""The data directory: where things lie, and which process they belong to.

::

    catalog.db        what there is (SQLite, with its -wal and -shm)
    segments/         one immutable file per sealed prefix
    rows/             rows of live prefixes, appended
    blobs/            one immutable file per opaque value: recurrent states, large values of keys
    export/           files written for clients that want another layout
    not-adopted/      what a rebuild of the catalogue has set aside; nobody removes anything there
    run/<id>.lock     held with flock for the life of the process with that instance id
    run/<id>-counters what that process has counted, for the others to add up
    run/<id>-uses     what it has used, and has not written down yet
    host-token        32 random bytes that prove to a client that both see this directory

Every file in `segments/`, `rows/` and `blobs/` begins with the instance id of the process that wrote
it, so what a dead process left behind is known by its name, and only a process that holds the dead
one's lock may remove it. A lock on `segments/` itself is shared by all processes that use the
directory, so one that rebuilds it has it alone. Knows no keys and no rows.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pion_grpc.errors import CannotStart, DiskFull

HOST_TOKEN_BYTES = 32
NOT_ADOPTED = "not-adopted"
OWN_NAMES = frozenset({"segments", "rows", "blobs", "export", "run", NOT_ADOPTED, "host-token"})
"""What belongs to the server in its directory, beside all names that begin with `catalog.db`."""
_DATABASE = ("catalog.db", "catalog.db-wal", "catalog.db-shm", "catalog.db-reserve")
_WRITTEN = re.compile("[0-9a-f]{12}-")
NETWORK_FILE_SYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "afpfs", "webdav", "9p", "fuse.sshfs", "ceph", "afs",
}  # fmt: skip


class DataDirectory:
    """One process's view of the data directory; holds its lock until closed."""

    def __init__(self, path: Path, *, exclusive: bool = False) -> None:
        """Makes the directory if there is none; with `exclusive` no other process can use it.

        Raises:
            CannotStart: it cannot be used, or not in this way while others use it.
        """
        self.path = path.expanduser().resolve()
        self.segments = self.path / "segments"
        self.rows = self.path / "rows"
        self.blobs = self.path / "blobs"
        self.run = self.path / "run"
        self.catalog = self.path / "catalog.db"
        self._database = [str(self.path / name) for name in _DATABASE]  # asked for at every write
        try:
            for directory in (
                self.path,
                self.segments,
                self.rows,
                self.blobs,
                self.path / "export",
                self.run,
            ):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(self.path, error) from error
        kind = file_system_type(self.path)
        if kind in NETWORK_FILE_SYSTEMS:
            raise CannotStart(
                f"{self.path} is on a network file system ({kind}); locks and mapped databases are "
                "not safe there: choose a local directory with --data"
            )
        self.instance = secrets.token_hex(6)
        try:
            self._use = self._enter(exclusive=exclusive)
            try:
                self._lock = self._take_lock()
            except BaseException:
                os.close(self._use)
                raise
            try:
                self.host_token = self._read_or_make_token()
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise _unusable(self.path, error) from error

    def close(self) -> None:
        """Gives the locks back."""
        for kind in ("counters", "uses"):
            (self.run / f"{self.instance}-{kind}").unlink(missing_ok=True)
        (self.run / f"{self.instance}.lock").unlink(missing_ok=True)
        self.let_go()

    def let_go(self) -> None:
        """Lets go of the locks and leaves everything else, as the system does for who is killed."""
        held, self._lock, self._use = (self._lock, self._use), -1, -1
        for descriptor in held:
            if descriptor >= 0:
                os.close(descriptor)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until nobody else opens the directory: SQLite refuses two at once."""
        descriptor = os.open(self.run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def live_instances(self) -> set[str]:
        """Returns the instances that have a lock file; whoever has none is gone for certain."""
        return {path.stem for path in self.run.glob("*.lock")}

    def dead_instances(self) -> Iterator[str]:
        """Yields the instances whose process is gone, each while its lock is held here.

        The lock file goes after the caller has cleaned up, so a crash in between leaves it for the
        next one.
        """
        for path in sorted(self.run.glob("*.lock")):
            if path.stem == self.instance:
                continue
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            try:
                yield path.stem
                path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)

    def files_of(self, instance: str) -> Iterator[Path]:
        """Yields the files that an instance wrote."""
        for directory in (self.segments, self.rows, self.blobs, self.path / "export", self.run):
            for path in directory.glob(f"{instance}-*"):
                yield from (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]

    def remove_scratch(self) -> None:
        """Removes what processes that are gone made in `run/`, for their own use or the others'."""
        # In this order: who makes it has a lock before.
        made = [path for path in self.run.iterdir() if path.is_dir() or _WRITTEN.match(path.name)]
        live = self.live_instances()
        for path in made:
            if path.name.partition("-")[0] in live:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def written_files(self) -> Iterator[Path]:
        """Yields the files that any instance wrote."""
        for directory in (self.segments, self.rows, self.blobs, self.path / "export"):
            yield from (path for path in directory.iterdir() if _WRITTEN.match(path.name))

    def refuse_new_catalogue(self) -> None:
        """Refuses to make a catalogue that would not name what is stored here.

        Nothing that it does not name outlives a start. Call it before the catalogue is made, inside
        `alone`: of several processes that start at once, only the first finds none.

        Raises:
            CannotStart: there are files of rows or values.
        """
        counts: dict[str, int] = {}
        for path in self.written_files():
            counts[path.parent.name] = counts.get(path.parent.name, 0) + 1
        counts.pop("export", None)  # made of stored rows, and made again at need
        if counts:
            total, names = sum(counts.values()), " and ".join(sorted(counts))
            lie = "1 file lies" if total == 1 else f"{total:,} files lie"
            raise CannotStart(
                f"{self.catalog} is missing or empty, but {lie} in {names} beside it: "
                f"{rebuild_command(self.path)} makes a catalogue from the segments; or move {names} "
                "away to start empty"
            )

    def resolve(self, name: str) -> Path:
        """Returns the path of a file that the catalogue names, such as `segments/x.safetensors`."""
        return self.path / name

    def name_of(self, path: Path) -> str:
        """Returns the name under which the catalogue knows a file; the inverse of `resolve`."""
        return path.relative_to(self.path).as_posix()

    def foreign_bytes(self, named: set[str], instances: set[str]) -> int:
        """Returns the bytes of all files but the database, the `named` ones and those being written.

        Files that a live instance writes are reserved in the catalogue before they grow, but for what
        it notes for the others.
        """
        total = 0
        for parent, _, names in os.walk(self.path):
            for path in (Path(parent, name) for name in names):
                if path.name in _DATABASE:
                    continue
                instance, _, kind = path.name.partition("-")
                if self.name_of(path) in named or (instance in instances and kind != "uses"):
                    continue
                try:
                    total += path.lstat().st_size
                except FileNotFoundError:
                    continue
        return total

    def catalog_bytes(self) -> int:
        """Returns the bytes of the database, its log and its reserve."""
        total = 0
        for path in self._database:
            try:
                total += os.stat(path).st_size
            except FileNotFoundError:
                continue
        return total

    def publish(self, counters: str) -> None:
        """Lets the other processes of this directory read what this one has counted.

        Raises:
            DiskFull: it cannot be written.
        """
        self._note(counters, self.run / f"{self.instance}-counters")

    def note_reset(self) -> None:
        """Lets all processes of this directory know that counting begins anew.

        Raises:
            DiskFull: it cannot be written.
        """
        self._note("", self.run / "counters-reset")

    def reset_unix_ms(self) -> int:
        """Returns when counting last began anew for all; 0 if it never did."""
        with contextlib.suppress(FileNotFoundError):
            return int((self.run / "counters-reset").stat().st_mtime * 1_000)
        return 0

    def published(self) -> Iterator[str]:
        """Yields what each of the other processes has published last."""
        for instance in self.live_instances() - {self.instance}:
            if text := self.published_by(instance):
                yield text

    def published_by(self, instance: str) -> str:
        """Returns what a process has published last, also one that is gone; empty if nothing."""
        with contextlib.suppress(FileNotFoundError):
            return (self.run / f"{instance}-counters").read_text(errors="replace")
        return ""

    def rows_bytes(self) -> int:
        """Returns the bytes of the row files."""
        total = 0
        for entry in os.scandir(self.rows):
            try:
                total += entry.stat().st_size
            except FileNotFoundError:
                continue
        return total

    def _note(self, text: str, path: Path) -> None:
        # Of a name of its own: several threads may do this at once.
        scratch = self.run / f"{self.instance}-{secrets.token_hex(6)}.new"
        try:
            scratch.write_text(text)
            scratch.rename(path)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise DiskFull(f"what was counted cannot be written: {error.strerror}") from error

    def _enter(self, *, exclusive: bool) -> int:
        descriptor = os.open(self.segments, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            problem = "a server runs on it: stop it first" if exclusive else "it is being rebuilt"
            raise CannotStart(f"{self.path} cannot be used now: {problem}") from error
        return descriptor

    def _take_lock(self) -> int:
        # Locked before it has the name that others look for: nobody ever sees it unlocked.
        unnamed = self.run / f"{self.instance}.new"
        lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unnamed.rename(self.run / f"{self.instance}.lock")
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _read_or_make_token(self) -> bytes:
        path = self.path / "host-token"
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)  # of processes that start at once, one makes it
            # A power cut may have left its name without its bytes: any 32 random ones are as good.
            if not path.exists() or path.stat().st_size != HOST_TOKEN_BYTES:
                scratch = self.run / f"{self.instance}.token"
                scratch.touch(mode=0o600)
                scratch.write_bytes(secrets.token_bytes(HOST_TOKEN_BYTES))
                scratch.rename(path)
            return path.read_bytes()
        finally:
            os.close(directory)


def _unusable(path: Path, error: OSError) -> CannotStart:
    where = "" if error.filename in (None, str(path)) else f" ({error.filename})"
    return CannotStart(f"cannot use the data directory {path}: {error.strerror}{where}")


def is_own(path: PurePosixPath) -> bool:
    """Says whether a path inside a data directory is the server's, or leads through what is."""
    # File systems may fold case, so that CATALOG.DB is the catalogue.
    first = path.parts[0].casefold()
    return first in OWN_NAMES or first.startswith(_DATABASE[0])


def rebuild_command(path: Path) -> str:
    """Returns the command that makes a catalogue anew, as one types it."""
    return f"`pion-grpc rebuild --data {shlex.quote(str(path))}`"


def file_system_type(path: Path) -> str:
    """Returns the type of the file system that holds `path`, or `unknown`."""
    holding = [(mount, kind) for mount, kind in _mounts() if path.is_relative_to(mount)]
    return max(holding, key=lambda mount: len(mount[0]))[1] if holding else "unknown"


def boot_id() -> str:
    """Returns a text that changes with every boot of this machine."""
    if sys.platform == "darwin":
        identity = _output("/usr/sbin/sysctl", "-n", "kern.bootsessionuuid")
    else:
        identity = Path("/proc/sys/kernel/random/boot_id").read_text()
    return identity.strip()


def _mounts() -> Iterator[tuple[str, str]]:
    if sys.platform == "darwin":
        # /dev/disk3s1 on /System/Volumes/Data (apfs, local, journaled)
        for line in _output("/sbin/mount").splitlines():
            mount, _, options = line.partition(" on ")[2].rpartition(" (")
            yield mount, options.split(",")[0].rstrip(")")
    else:
        for line in Path("/proc/self/mounts").read_text().splitlines():
            fields = line.split()
            yield fields[1].replace("\\040", " "), fields[2]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
