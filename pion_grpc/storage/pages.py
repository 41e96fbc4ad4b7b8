"""Reading and writing bytes under page checksums.

A *run* is a stretch of a file whose every 256 KiB page, counted from the start of the run, has a
CRC-32C: the data of a segment before its checksums, or one extent of a row file. A read fetches the
whole pages it touches with `os.pread`, checks each, and hands out a view: nothing unchecked leaves
this module, a short read is an error that names the file, and no mapping can kill the process.

Knows files, offsets and checksums; not what the bytes are.
"""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from crc32c import crc32c

from pion_grpc.errors import Corrupt, DiskFull, TooManyFiles, Unreadable
from pion_grpc.storage.files import DISK_FULL_ERRORS, Files
from pion_wire.limits import CHUNK_BYTES_MAX, PAGE_BYTES
from pion_wire.segment import PageChecksums, SegmentLayout, page_count


class OpenFile:
    """A descriptor for reading; it stays readable after its file is unlinked."""

    def __init__(self, path: Path) -> None:
        """Opens it.

        Raises:
            FileNotFoundError: it is gone.
            TooManyFiles: this process may not open more files.
            Unreadable: it is there, and the system does not let this process read it.
        """
        self.path = path
        self.descriptor = -1
        try:
            # Of a regular file O_NONBLOCK changes nothing; a FIFO in its place would wait for a writer.
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                problem = "no file descriptors are left: raise `ulimit -n`"
                raise TooManyFiles(problem, limit=most) from error
            raise Unreadable(path, error.strerror or str(error)) from error

    def read(self, offset: int, size: int) -> bytes:
        """Returns exactly `size` bytes.

        Raises:
            Corrupt: the file ends before, or cannot be read.
        """
        try:
            data = os.pread(self.descriptor, size, offset)
        except OSError as error:
            raise Corrupt(f"{self.path} cannot be read: {error.strerror}") from error
        if len(data) != size:
            raise Corrupt(f"{self.path} ends after {offset + len(data)} bytes")
        return data

    def close(self) -> None:
        """Closes it; twice is once."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        # For a stream that was planned, and given up before anybody began to read it.
        self.close()


class CheckedRun:
    """A run of an open file, with its checksums."""

    __slots__ = ("_checksums", "file", "offset", "size")

    def __init__(self, file: OpenFile, offset: int, size: int, checksums: bytes) -> None:
        self.file = file
        self.offset = offset
        self.size = size
        self._checksums = np.frombuffer(checksums, dtype="<u4").tolist()
        if len(self._checksums) != page_count(size):
            raise Corrupt(f"{file.path} has checksums of another size")

    def read(self, begin: int, end: int) -> memoryview:
        """Returns bytes `begin` to `end` of the run, every page they touch checked.

        Raises:
            Corrupt: a page does not have its checksum.
        """
        first = begin // PAGE_BYTES * PAGE_BYTES
        last = min(-(-end // PAGE_BYTES) * PAGE_BYTES, self.size)
        view = memoryview(self.file.read(self.offset + first, last - first))
        for page_begin in range(first, last, PAGE_BYTES):
            page = view[page_begin - first : page_begin - first + PAGE_BYTES]
            if crc32c(page) != self._checksums[page_begin // PAGE_BYTES]:
                raise Corrupt(
                    f"{self.file.path}: the page at byte {self.offset + page_begin} does not have its "
                    "checksum"
                )
        return view[begin - first : end - first]

    def chunks(self, begin: int, end: int, row_bytes: int) -> Iterator[memoryview]:
        """Yields bytes `begin` to `end` in chunks of whole rows, at most 1 MiB each.

        A chunk ends at the last whole row before a page boundary, so that few pages are read twice.
        """
        position = begin
        while position < end:
            limit = position + CHUNK_BYTES_MAX
            boundary = limit // PAGE_BYTES * PAGE_BYTES
            rows = (boundary - position) // row_bytes or CHUNK_BYTES_MAX // row_bytes
            stop = min(position + rows * row_bytes, end)
            yield self.read(position, stop)
            position = stop

    def check(self) -> None:
        """Reads every page.

        Raises:
            Corrupt: one does not have its checksum.
        """
        for begin in range(0, self.size, 4 * PAGE_BYTES):
            self.read(begin, min(begin + 4 * PAGE_BYTES, self.size))


def open_segment(path: Path, segment: SegmentLayout) -> CheckedRun:
    """Opens the data of a segment.

    Raises:
        FileNotFoundError: it is gone.
        Corrupt: its header is not that of `segment`, or its size is another.
    """
    file = OpenFile(path)
    try:
        actual = os.fstat(file.descriptor).st_size
        if actual != segment.file_bytes:
            raise Corrupt(f"{path} has {actual} bytes instead of {segment.file_bytes}")
        offset, size = segment.data_offset, segment.paged_bytes
        if file.read(0, offset) != segment.header:
            raise Corrupt(f"{path} has another header than it was written with")
        checksums = file.read(offset + size, segment.file_bytes - offset - size)
        return CheckedRun(file, offset, size, checksums)
    except BaseException:
        file.close()
        raise


class SegmentWriter:
    """Writes one segment under a temporary name, then gives it its own."""

    def __init__(self, files: Files, path: Path, segment: SegmentLayout) -> None:
        self._files = files
        self._path = path
        self._scratch = path.with_name(path.name + ".tmp")
        self._checksums = PageChecksums()
        self._missing = segment.paged_bytes
        self._descriptor = -1
        try:
            with disk_errors(path):
                self._descriptor = files.create(self._scratch)
                files.allocate(self._descriptor, segment.file_bytes)
                files.write(self._descriptor, segment.header)
        except BaseException:
            self.abandon()
            raise

    def write(self, data: bytes | memoryview) -> None:
        """Takes the next bytes of the data.

        Raises:
            DiskFull: they cannot be written.
        """
        self._missing -= len(data)
        assert self._missing >= 0, "more bytes than the segment has"
        self._checksums.update(data)
        with disk_errors(self._path):
            self._files.write(self._descriptor, data)

    def finish(self, *, on_disk: bool) -> bytes:
        """Adds the checksums and names the file; with `on_disk` it is on stable storage then.

        Returns the checksums.

        Raises:
            DiskFull: it cannot be written.
        """
        assert self._missing == 0, "bytes are missing"
        checksums = self._checksums.finish()
        with disk_errors(self._path):
            self._files.write(self._descriptor, checksums)
            if on_disk:
                self._files.sync(self._descriptor)
            self._files.rename(self._scratch, self._path)
            if on_disk:
                self._files.sync_directory(self._path.parent)
        self.close()
        return checksums

    def abandon(self) -> None:
        """Removes what was written; harmless after `finish` and if called twice."""
        if self._descriptor >= 0:
            self.close()
            self._files.unlink(self._scratch)
            self._files.unlink(self._path)

    def close(self) -> None:
        """Closes it; twice is once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class RowFile:
    """Appends one extent to a row file. Its bytes count only once the catalogue names them."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._path = path
        self._checksums = PageChecksums()
        self._new = False
        with disk_errors(path):
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            except FileNotFoundError:
                self._new, self._descriptor = True, files.create(path)
        self.offset = os.lseek(self._descriptor, 0, os.SEEK_END)

    def write(self, data: bytes | memoryview) -> None:
        """Takes the next bytes of the extent.

        Raises:
            DiskFull: they cannot be written.
        """
        self._checksums.update(data)
        with disk_errors(self._path):
            self._files.write(self._descriptor, data)

    def finish(self, *, on_disk: bool) -> bytes:
        """Returns the checksums of the extent's pages; with `on_disk` it is on stable storage then.

        Raises:
            DiskFull: it cannot be written.
        """
        if on_disk:
            with disk_errors(self._path):
                self._files.sync(self._descriptor)
                # Whoever made the file may not have needed its name on stable storage.
                self._files.sync_directory(self._path.parent)
        return self._checksums.finish()

    def abandon(self) -> None:
        """Takes the bytes of this extent back, and the file if it was made for them; closes it."""
        if self._descriptor >= 0:
            if self._new:
                self._files.unlink(self._path)
            else:
                os.ftruncate(self._descriptor, self.offset)
        self.close()

    def close(self) -> None:
        """Closes it; twice is once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class disk_errors:  # noqa: N801 - reads as a statement
    """Turns a full disk into `DiskFull` where it enters; other errors of the system pass."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
            raise DiskFull(
                f"no space for {self._path.name}: {os.strerror(error.errno or errno.ENOSPC)}; "
                "free some, or lower --disk-budget"
            ) from error
