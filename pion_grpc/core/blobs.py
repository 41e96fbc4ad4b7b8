"""Opaque values of any size: written whole under a budget, then published by whoever owns them.

The three steps of every write, for values that the store does not look into: *plan* reserves the bytes,
*write* puts them into a file of their own, *publish* names it inside the owner's transaction. Owners are
the keyspace (values above `INLINE_BYTES_MAX`) and the recurrent states, whose files are segments that
clients on the same host read themselves. A file that is never published is removed at once, or when its
process is found gone.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from pion_grpc.core.exporting import Exports
from pion_grpc.core.values import ExportedFile
from pion_grpc.core.workshop import OutOfDate, Workshop
from pion_grpc.errors import Corrupt, Unreadable
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.blobs import SEGMENT_SUFFIX, BlobRow, Blobs
from pion_grpc.storage.pages import CheckedRun, OpenFile, RowFile, SegmentWriter
from pion_grpc.storage.transaction import Transaction
from pion_wire.segment import SegmentLayout

INLINE_BYTES_MAX = 64 << 10
"""Smaller values are kept in the database: a file of their own would cost more."""
SYNC_THREADS = 8
"""Files brought to stable storage side by side: a disk, or its journal, takes several at once."""


class WrittenBlob(NamedTuple):
    """A value in its file, which nothing names yet. Publish or abandon it."""

    tenant: str
    file: str
    size: int
    """Of the file."""
    checksums: bytes
    reservation: int
    on_disk: bool


class BlobWriter:
    """A value on its way into its file. Finish or abandon it."""

    def __init__(
        self,
        store: "BlobStore",
        tenant: str,
        size: int,
        reservation: int,
        segment: SegmentLayout | None,
    ) -> None:
        self._store = store
        self._size = size
        self._file_bytes = segment.file_bytes if segment else size
        self._written = 0
        self._tenant = tenant
        self._reservation = reservation
        self._name = store.new_name(SEGMENT_SUFFIX if segment else ".blob")
        files, path = store.workshop.files, store.workshop.directory.resolve(self._name)
        try:
            self._file: RowFile | SegmentWriter = (
                SegmentWriter(files, path, segment) if segment else RowFile(files, path)
            )
        except BaseException:
            store.release(reservation)
            raise

    @property
    def complete(self) -> bool:
        """Whether every planned byte has come."""
        return self._written == self._size

    def write(self, data: bytes | memoryview) -> None:
        """Takes the next bytes.

        Raises:
            DiskFull: they cannot be written.
        """
        self._written += len(data)
        assert self._written <= self._size, "more bytes than were planned"
        self._file.write(data)

    def finish(self, *, on_disk: bool = False) -> WrittenBlob:
        """Returns the value, ready to be published; with `on_disk` it is on stable storage."""
        assert self.complete, "bytes are missing"
        checksums = self._file.finish(on_disk=on_disk)
        self._file.close()
        return WrittenBlob(
            self._tenant, self._name, self._file_bytes, checksums, self._reservation, on_disk
        )

    def abandon(self) -> None:
        """Removes what was written."""
        self._file.abandon()
        self._store.discard(self._name, self._reservation)


class BlobStore:
    """Writes and reads blobs; safe to use from many threads."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self._serial = itertools.count(1)

    def begin(self, tenant: str, size: int, segment: SegmentLayout | None = None) -> BlobWriter:
        """Plans a value of so many bytes; with `segment` as the only part of such a file.

        Raises:
            OverBudget, OverQuota: there is no room.
        """
        workshop = self.workshop
        needed = segment.file_bytes if segment else size
        with workshop.catalog.write() as transaction:
            reservation = workshop.space.reserve(transaction, tenant, needed)
        workshop.space.sweep()
        return BlobWriter(self, tenant, size, reservation, segment)

    def write(self, tenant: str, data: bytes | memoryview) -> WrittenBlob:
        """Writes a value that is all there.

        Raises:
            OverBudget, OverQuota, DiskFull: there is no room.
        """
        writer = self.begin(tenant, len(data))
        try:
            writer.write(data)
            return writer.finish()
        except BaseException:
            writer.abandon()
            raise

    def write_inside(
        self, transaction: Transaction, tenant: str, data: bytes, names: list[str]
    ) -> int:
        """Writes and names a value inside its owner's transaction; for values that are computed there.

        Its file is added to `names`, for `remove_unnamed`.

        Raises:
            OverBudget, OverQuota, DiskFull: there is no room.
        """
        reservation = self.workshop.space.reserve(transaction, tenant, len(data))
        names.append(name := self.new_name())
        file = RowFile(self.workshop.files, self.workshop.directory.resolve(name))
        try:
            file.write(data)
            checksums = file.finish(on_disk=False)
        finally:
            file.close()
        Accounts(transaction).release(reservation)
        return Blobs(transaction).add(tenant, name, len(data), checksums, self.workshop.boot)

    def remove_unnamed(self, names: Sequence[str]) -> None:
        """Removes what was written inside a transaction and undone with it; call it after that."""
        if not names:
            return
        with self.workshop.catalog.read() as transaction:
            unnamed = [name for name in names if not Blobs(transaction).is_named(name)]
        for name in unnamed:
            self.workshop.files.unlink(self.workshop.directory.resolve(name))

    def publish(self, transaction: Transaction, written: WrittenBlob) -> int:
        """Names a value inside its owner's transaction, and returns its id."""
        Accounts(transaction).release(written.reservation)
        boot = None if written.on_disk else self.workshop.boot
        return Blobs(transaction).add(
            written.tenant, written.file, written.size, written.checksums, boot
        )

    def abandon(self, written: WrittenBlob) -> None:
        """Removes a value that was not published."""
        self.discard(written.file, written.reservation)

    def abandon_unpublished(self, written: Sequence[WrittenBlob]) -> None:
        """Removes those of several values that were not published after all."""
        with self.workshop.catalog.read() as transaction:
            left = [blob for blob in written if not Blobs(transaction).is_named(blob.file)]
        for blob in left:
            self.abandon(blob)

    def open(self, blob: BlobRow) -> "BlobReading":
        """Opens a value.

        Raises:
            OutOfDate: it was replaced meanwhile.
            Corrupt: it is damaged, or its file is gone; it has been taken out.
        """
        try:
            return BlobReading(self, blob, self._opened(blob))
        except Corrupt as error:
            raise self.condemned(blob, str(error)) from error

    def read_inside(self, blob: BlobRow) -> bytes:
        """Returns a value inside a transaction, which may be a writing one: `sweep` after it.

        Raises:
            OutOfDate: it was replaced meanwhile.
            Corrupt: it is damaged, or its file is gone; the sweep takes it out.
        """
        try:
            run = self._opened(blob)
            try:
                return b"".join(run.chunks(0, run.size, 1))
            finally:
                run.file.close()
        except Corrupt as error:
            raise self._to_be_taken_out(blob, str(error)) from error

    def condemned(self, blob: BlobRow, problem: str) -> Corrupt:
        """Takes a damaged value out: whoever asks next finds nothing. Returns the error for who asked.

        It names the value; what its file is called is for the log alone.
        """
        error = self._to_be_taken_out(blob, problem)
        self.workshop.space.sweep()
        return error

    def sync(self) -> None:
        """Brings every published value to stable storage; one that is gone meanwhile is left out."""
        with self.workshop.catalog.read() as transaction:
            unsynced = Blobs(transaction).unsynced()
        if not unsynced:
            return
        with ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="sync") as threads:
            kept = list(threads.map(self._synced, unsynced))
        synced = list(itertools.compress(unsynced, kept))
        self.sync_directory()
        with self.workshop.catalog.write(on_disk=True) as transaction:
            for blob in synced:
                Blobs(transaction).synced(blob.id)

    def sync_directory(self) -> None:
        """Brings the names of blobs to stable storage."""
        self.workshop.files.sync_directory(self.workshop.directory.blobs)

    def new_name(self, suffix: str = ".blob") -> str:
        """Returns a name that no file has."""
        return f"blobs/{self.workshop.directory.instance}-{next(self._serial)}{suffix}"

    def release(self, reservation: int) -> None:
        """Ends a reservation; on a full disk the next sweep that can does."""
        self.workshop.space.end_reservation(reservation)

    def discard(self, file: str, reservation: int) -> None:
        """Removes a file that nothing names, and ends its reservation."""
        self.workshop.files.unlink(self.workshop.directory.resolve(file))
        self.release(reservation)

    def _opened(self, blob: BlobRow) -> CheckedRun:
        """Opens a value; raises as `open` does, and a Corrupt that names the file."""
        try:
            file = OpenFile(self.workshop.directory.resolve(blob.file))
        except FileNotFoundError as error:
            with self.workshop.catalog.read() as transaction:
                replaced = Blobs(transaction).get(blob.id) is None
            if replaced:
                raise OutOfDate from error
            raise Corrupt(f"{blob.file} is gone") from error
        except Unreadable as error:
            self.workshop.space.losses.trouble(blob.file, error.problem)
            raise
        try:
            run = blob.run_of(file)
            if blob.boot not in (None, self.workshop.boot):
                run.check()
        except BaseException:
            file.close()
            raise
        return run

    def _to_be_taken_out(self, blob: BlobRow, problem: str) -> Corrupt:
        """Leaves a damaged value to the next sweep, and returns the error for who asked."""
        with self.workshop.catalog.read() as transaction:
            owner = Blobs(transaction).owner(blob.id)
        self.workshop.space.losses.trouble(blob.file, problem)
        self.workshop.space.end_blob(blob.id)
        return Corrupt(
            f"{owner} is damaged and has been taken out: a checksum differs, or bytes are missing"
        )

    def _synced(self, blob: BlobRow) -> bool:
        try:
            file = OpenFile(self.workshop.directory.resolve(blob.file))
        except FileNotFoundError:
            return False
        try:
            self.workshop.files.sync(file.descriptor)
        finally:
            file.close()
        return True


class BlobReading:
    """An open value. Close it."""

    def __init__(self, store: BlobStore, blob: BlobRow, run: CheckedRun) -> None:
        self._store = store
        self._blob = blob
        self._run = run

    @property
    def size(self) -> int:
        """Its bytes."""
        return self._run.size

    def pieces(self, begin: int = 0) -> Iterator[memoryview]:
        """Yields its bytes from `begin` on, at most 1 MiB at a time.

        Raises:
            Corrupt: a page does not have its checksum; the value has been taken out.
        """
        with self._condemning():
            yield from self._run.chunks(begin, self._run.size, 1)

    def exported(self, exports: Exports) -> ExportedFile | None:
        """Returns its file, every page checked, for a client that reads it; None if it is no segment.

        Raises:
            Corrupt: a page does not have its checksum; the value has been taken out.
        """
        if not self._blob.is_segment:
            return None
        status = os.fstat(self._run.file.descriptor)
        with self._condemning():
            return exports.checked(self._blob.file, status, self._run.offset, self._run.check)

    @property
    def id(self) -> int:
        """Of the value in its file."""
        return self._blob.id

    @contextlib.contextmanager
    def _condemning(self) -> Iterator[None]:
        try:
            yield
        except Corrupt as error:
            raise self._store.condemned(self._blob, str(error)) from error

    def close(self) -> None:
        """Closes the file; twice is once."""
        self._run.file.close()
