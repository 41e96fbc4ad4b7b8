"""The file layer: the few file operations that durability depends on, real and fake.

`Files` is the real one. `PowerCut` is a real one, too, that remembers what has been flushed: after
`cut()` a directory holds exactly what a disk would hold that drops everything not flushed, and it can
fail at a given byte as a full disk does. Storage code takes a `Files` and never calls `os.write`,
`os.fsync` or `os.rename` itself, so that tests prove what would survive.

Knows paths and bytes, nothing of what is in them.
"""

import errno
import os
import sys
import threading
from pathlib import Path

import apsw

if sys.platform == "darwin":
    import fcntl

_JOURNAL, _WAL = apsw.SQLITE_OPEN_MAIN_JOURNAL, apsw.SQLITE_OPEN_WAL
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Files:
    """Operations on files of the data directory."""

    vfs: str | None = None
    """Name of the SQLite file layer to use with it."""

    def create(self, path: Path) -> int:
        """Creates a file that must not exist and returns its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def allocate(self, descriptor: int, size: int) -> None:
        """Claims the blocks of a new file: a full disk shows at once, and writing is quicker."""
        if sys.platform == "linux":
            os.posix_fallocate(descriptor, 0, size)

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        """Writes all of `data` at the end of the file."""
        view = memoryview(data)
        while len(view):
            view = view[os.write(descriptor, view) :]

    def write_at(self, descriptor: int, data: bytes | memoryview, offset: int) -> None:
        """Writes all of `data` at a place in the file."""
        view = memoryview(data)
        while len(view):
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written

    def sync(self, descriptor: int) -> None:
        """Returns when the file's bytes are on stable storage."""
        if sys.platform == "darwin":
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Returns when the names in a directory are on stable storage."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file its final name."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Removes a file; that it is gone already is fine."""
        path.unlink(missing_ok=True)


class PowerCut(Files):
    """A file layer over a directory whose power can be cut, and whose disk can be full.

    It counts every byte written through it and, from `fail_after_bytes` on, raises ENOSPC. SQLite's
    own writes go through an apsw VFS of the same object, so that a commit that was not synced is lost
    like any other bytes.
    """

    _serial = 0

    def __init__(self, root: Path) -> None:
        PowerCut._serial += 1
        self.vfs = f"power-cut-{PowerCut._serial}"
        self._root = root
        self._lock = threading.RLock()
        self._contents: dict[int, bytes] = {}
        self._names: dict[Path, int] = {}
        for path in root.rglob("*"):
            if path.is_file():  # what is there already is on the disk
                self._names[path] = path.stat().st_ino
                self._contents[path.stat().st_ino] = path.read_bytes()
        self.written_bytes = 0
        self.fail_after_bytes: int | None = None
        self._vfs = _RecordingVFS(self, self.vfs)

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        """Writes, unless the disk is full: then writes what still fits and raises ENOSPC."""
        self.count(len(data))
        super().write(descriptor, data)

    def write_at(self, descriptor: int, data: bytes | memoryview, offset: int) -> None:
        """As `write`, but at a place."""
        self.count(len(data))
        super().write_at(descriptor, data, offset)

    def count(self, size: int) -> None:
        """Counts bytes about to be written; raises ENOSPC beyond the limit."""
        with self._lock:
            self.written_bytes += size
            if self.fail_after_bytes is not None and self.written_bytes > self.fail_after_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self, descriptor: int) -> None:
        """Remembers the file as it is now."""
        status = os.fstat(descriptor)
        with self._lock:
            self._contents[status.st_ino] = os.pread(descriptor, status.st_size, 0)

    def sync_directory(self, path: Path) -> None:
        """Remembers the names as they are now."""
        with self._lock:
            self._names = {p: i for p, i in self._names.items() if p.parent != path}
            self._names.update({p: p.stat().st_ino for p in path.iterdir() if p.is_file()})

    def sync_database(self, path: Path, *, directory: bool) -> None:
        """Remembers a database file, and with `directory` the names beside it."""
        if path.exists():
            with self._lock:
                inode = path.stat().st_ino
                self._contents[inode] = path.read_bytes()
                self._names[path] = inode
                if directory:
                    self.sync_directory(path.parent)

    def cut(self, target: Path) -> None:
        """Writes to the new directory `target` what a disk would hold now."""
        with self._lock:
            target.mkdir()
            for directory in (p for p in self._root.rglob("*") if p.is_dir()):
                (target / directory.relative_to(self._root)).mkdir(parents=True)
            for path, inode in self._names.items():
                survivor = target / path.relative_to(self._root)
                survivor.write_bytes(self._contents.get(inode, b""))


class _RecordingVFS(apsw.VFS):
    def __init__(self, files: PowerCut, name: str) -> None:
        self.files = files
        super().__init__(name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> "_RecordingFile":  # noqa: N802
        return _RecordingFile(self.files, name, flags)


class _RecordingFile(apsw.VFSFile):
    def __init__(
        self, files: PowerCut, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> None:
        super().__init__("", name, flags)
        self._files = files
        self._path = Path(name.filename() if isinstance(name, apsw.URIFilename) else name or "")
        # As SQLite does: the first sync of a log or journal also syncs the directory. So a journal
        # that was deleted before does not come back with the power, and undoes nothing.
        self._sync_directory = bool(flags[0] & (_JOURNAL | _WAL))

    def xSync(self, flags: int) -> None:  # noqa: N802
        super().xSync(flags)
        self._files.sync_database(self._path, directory=self._sync_directory)
        self._sync_directory = False

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        try:
            self._files.count(len(data))
        except OSError as error:
            raise apsw.FullError(str(error)) from error
        super().xWrite(data, offset)
