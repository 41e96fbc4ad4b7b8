"""Making a catalogue from the segments beside it, after it was lost or damaged.

A segment says everything about itself: its name, model, layout, parent, token ids and parts. So they are
stored once more, in the order in which they were stored first (their files are numbered), without a byte
of them being moved: each is read against its checksums, and named as a Store names it. A file whose
parent is not there, or has other tokens, other tensors or another model, is not adopted.

*Two segments of one name* are a prefix that was replaced, and the one before it, kept because a child
has its rows. As in life the younger one takes the name, even if it turns out to be damaged: a name never
goes back to what was replaced. The older one is adopted without a name if an adopted child extends it,
and not at all otherwise. A prefix that was *dropped*, and whose file a child kept, looks like any other:
it has its name again.

What no segment says is gone with the catalogue: rows that were never sealed (a live prefix is what it
was when it was sealed last), keys, recurrent states, callers' block tables, what RESP clients declared,
and whose a prefix was: all of them become the tenant's that the caller names.

Nothing is deleted. What is not adopted is moved to `not-adopted/`, and the reason is written beside it;
it counts against the disk budget until somebody takes it away.
The catalogue is made under another name and gets its own when everything else is done and on stable
storage, so a rebuild that was killed can be run again, and until it has ended no server starts.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pion_grpc.core.access import TENANT_NAME
from pion_grpc.core.checkup import PageReader, Progress
from pion_grpc.core.indexing import leave_index
from pion_grpc.core.reading import own_row_counts, sealed_row_counts
from pion_grpc.core.storing import SegmentFile, extends, name_segment
from pion_grpc.core.values import Durability, check_model_id, check_namespace
from pion_grpc.errors import (
    CannotStart,
    Corrupt,
    DiskFull,
    InvalidRequest,
    TooManyFiles,
    Unreadable,
)
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.catalog import Catalog
from pion_grpc.storage.catalog_errors import UnusableCatalogue
from pion_grpc.storage.directory import NOT_ADOPTED, DataDirectory
from pion_grpc.storage.files import Files
from pion_grpc.storage.match_index import MatchIndex
from pion_grpc.storage.pages import CheckedRun, OpenFile, disk_errors, open_segment
from pion_grpc.storage.transaction import NewPrefix, PrefixRow, Transaction
from pion_wire import limits
from pion_wire.blocks import common_tokens
from pion_wire.layout import Layout
from pion_wire.segment import SegmentError, SegmentLayout, header_length, parse_header

REASONS = "reasons.jsonl"
"""One line for each file that was set aside: where it was, where it is, and why."""
_NUMBERED = re.compile(r"[0-9a-f]{12}-(\d+)(?:-(\d+))?\.safetensors")
_LOGS = ("catalog.db-wal", "catalog.db-shm")
_LOST = {
    "rows": "rows that were never sealed: only the catalogue knew whose they are",
    "blobs": "a state, or the value of a key: only the catalogue knew whose it is",
}


class Adopted(NamedTuple):
    """A prefix that is stored again."""

    namespace: str
    parent: str
    token_count: int
    file: str
    file_bytes: int
    visible: bool
    """False: it was replaced, and others still need its rows."""


class SetAside(NamedTuple):
    """A file that was moved, and why."""

    file: str
    """Where it was, in the data directory."""
    moved_to: str
    """Where it is."""
    problem: str


class Rebuilt(NamedTuple):
    """What a rebuild has done."""

    adopted: list[Adopted]
    not_adopted: list[SetAside]
    catalogue: list[SetAside]
    """What there was of an old catalogue."""
    bytes_read: int


def rebuild(
    path: Path,
    tenant: str = "",
    progress: Progress = lambda done, total: None,
    files: Files | None = None,
) -> Rebuilt:
    """Makes the catalogue of a data directory from its segments.

    Args:
        path: the data directory.
        tenant: whose the prefixes become; empty for the administrator's.
        progress: told how many bytes have been read.
        files: the file layer.

    Raises:
        CannotStart: it is not a data directory, a server runs on it, it has a catalogue that names what
            is stored, or something in it cannot be read or moved.
        DiskFull: there is no room for a catalogue. Run it again when there is.
    """
    if tenant and not TENANT_NAME.fullmatch(tenant):
        raise CannotStart(f"{tenant!r} is not a tenant's name: 1 to 64 letters, digits, - and _")
    path = path.expanduser().resolve()
    try:
        if not (path / "segments").is_dir() and not (path / "catalog.db").exists():
            raise CannotStart(f"{path} is not a data directory: there are no segments in it")
    except OSError as error:
        raise CannotStart(f"{path} cannot be used: {error.strerror}") from error
    directory = DataDirectory(path, exclusive=True)
    try:
        return _Rebuild(directory, tenant, progress, files or Files()).run()
    except OSError as error:
        raise CannotStart(f"{error.filename or path} cannot be used: {error.strerror}") from error
    except Unreadable as error:  # says nothing about what is in it
        raise CannotStart(error.problem) from error
    except TooManyFiles as error:  # nor does this
        raise CannotStart(str(error)) from error
    finally:
        directory.close()


class _NotAdopted(Exception):
    """The message says why."""


class _NoCatalogue(Exception):
    """There is none, or one in which nothing was ever written."""


class _Rebuild:
    def __init__(
        self, directory: DataDirectory, tenant: str, progress: Progress, files: Files
    ) -> None:
        self._directory = directory
        self._tenant = tenant
        self._progress = progress
        self._files = files
        self._generations: dict[str, list[int | None]] = {}
        """By name, the prefixes that had it, the oldest first; None: one that was not adopted."""
        self._adopted: dict[int, Adopted] = {}
        self._problems: dict[Path, str] = {}

    def run(self) -> Rebuilt:
        old = self._old_catalogue()
        scratch = self._directory.run / f"{self._directory.instance}-catalog.db"
        try:
            read = self._write_catalogue(scratch)
            self._make_room_aside([*self._problems, *old])
            not_adopted = self._set_aside(self._problems)
            catalogue = self._set_aside(old)
            self._sync_moves()
            self._files.rename(scratch, self._directory.catalog)
            self._files.sync_directory(self._directory.path)
        finally:
            for suffix in ("", "-wal", "-shm"):
                self._files.unlink(scratch.with_name(scratch.name + suffix))
        return Rebuilt(list(self._adopted.values()), not_adopted, catalogue, read)

    # -- the old catalogue

    def _old_catalogue(self) -> dict[Path, str]:
        """Returns the files of the old catalogue to set aside, each with the reason.

        Raises:
            CannotStart: it names what is stored, or another program or release wrote it.
        """
        try:
            problem = self._problem_of_catalogue()
        except _NoCatalogue:
            problem = "of a catalogue that is gone"
        there = [self._directory.path / name for name in ("catalog.db", *_LOGS)]
        return {path: problem for path in there if path.exists() and path.stat().st_size}

    def _problem_of_catalogue(self) -> str:
        path = self._directory.catalog
        try:
            catalog = Catalog(path, self._files, before_new=_no_catalogue)
            try:
                # The same questions as at a start: what a server refuses must not be refused here.
                with catalog.read() as transaction:
                    transaction.owners()
                    transaction.files()
                    empty = transaction.is_empty()
            finally:
                catalog.close()
        except UnusableCatalogue as error:
            return error.problem
        if not empty:
            raise CannotStart(
                f"{path} names what is stored: there is nothing to rebuild. If it is damaged all the "
                f"same, move it away first, with {' and '.join(_LOGS)} if they are there; rows that "
                "were never sealed, keys and states are lost with it"
            )
        return "it named nothing"

    # -- the new one

    def _write_catalogue(self, scratch: Path) -> int:
        """Makes the catalogue of what can be adopted; returns how many bytes were read."""
        for path in self._directory.written_files():
            if path.parent.name in _LOST:
                self._problems[path] = _LOST[path.parent.name]
        segments = sorted(self._segments(), key=_age)
        sizes = {path: path.lstat().st_size for path in segments}
        read = PageReader(self._progress, sum(sizes.values()))
        catalog = Catalog(scratch, self._files)
        try:
            for path, size in sizes.items():
                try:
                    self._adopt(catalog, path, read)
                except (_NotAdopted, Corrupt, SegmentError, InvalidRequest) as error:
                    self._problems[path] = str(error).removeprefix(str(path)).lstrip(": ")
                read.finish(size)
            with catalog.write() as transaction:
                self._forget_unneeded(transaction)
                ages = [_age(path) for path in segments]
                transaction.number_from("prefix", max((age[0] for age in ages), default=0))
                transaction.number_from("reservation", max((age[1] for age in ages), default=0))
        finally:
            catalog.close()
        if scratch.with_name(scratch.name + "-wal").exists():
            raise DiskFull("the catalogue cannot be written")  # its log could not be folded
        self._sync(scratch)
        return read.bytes

    def _segments(self) -> Iterator[Path]:
        """Yields what lies there as segments do, and what an instance did not finish."""
        written = set(self._directory.written_files())
        for path in self._directory.segments.iterdir():
            if path in written or path.suffix == ".safetensors":
                yield path

    def _adopt(self, catalog: Catalog, path: Path, read: PageReader) -> None:
        """Names a segment in the catalogue.

        Raises:
            _NotAdopted, Corrupt, SegmentError, InvalidRequest: with the reason why it cannot be.
        """
        if path.suffix == ".tmp":
            raise _NotAdopted("was never finished")
        if path.is_symlink() or not path.is_file():
            raise _NotAdopted("is not a regular file")
        segment = _read_header(path)
        name = segment.namespace
        if not name:
            raise _NotAdopted("says no name: `pion-grpc import` stores it under one")
        had_name = self._generations.setdefault(name, [])
        if had_name:
            with catalog.write() as transaction:
                _take_name_away(transaction, self._tenant, name)
        had_name.append(None)  # so far
        check_namespace(name)
        if segment.model_id:  # not every prefix that RESP clients stored has one
            check_model_id(segment.model_id)
        run = open_segment(path, segment)
        with contextlib.closing(run.file):
            read.check(run)
            token_ids = _read_token_ids(segment, run)
            self._files.sync(run.file.descriptor)
            status = os.fstat(run.file.descriptor)
        with catalog.write() as transaction:
            parent = self._parent(transaction, segment, token_ids)
            file = SegmentFile(
                self._directory.name_of(path), segment.file_bytes, token_ids, boot=None
            )
            identity = self._insert(transaction, segment, parent, file)
            transaction.update(identity, created_unix_ms=status.st_mtime_ns // 1_000_000)
        had_name[-1] = identity

    def _parent(
        self, transaction: Transaction, segment: SegmentLayout, token_ids: bytes
    ) -> PrefixRow | None:
        """Returns the youngest prefix of the parent's name that this one can extend.

        Raises:
            _NotAdopted: there is none.
        """
        if not segment.parent:
            if segment.base:
                raise _NotAdopted(f"has no parent for its first {segment.base} rows")
            return None
        named = self._generations.get(segment.parent, [])
        if segment.parent == segment.namespace:
            named = named[:-1]  # itself
        for identity in reversed(named):
            row = transaction.by_id(identity) if identity is not None else None
            if row is None:
                raise _NotAdopted(f"its parent {segment.parent!r} was not adopted")
            if _fits(transaction, row, segment, token_ids):
                return row
        if named:
            raise _NotAdopted(
                f"its parent {segment.parent!r} is another now: its first {segment.base} tokens, its "
                "tensors or its model differ"
            )
        raise _NotAdopted(f"its parent {segment.parent!r} is not there")

    def _insert(
        self,
        transaction: Transaction,
        segment: SegmentLayout,
        parent: PrefixRow | None,
        file: SegmentFile,
    ) -> int:
        counts = segment.row_counts
        identity = transaction.insert(
            NewPrefix(
                tenant=self._tenant,
                namespace=segment.namespace,
                state="sealed",
                visible=False,
                owner=None,
                model_id=segment.model_id,
                fidelity=segment.layout.fidelity,
                layout=segment.layout.to_json(),
                token_count=segment.base + min(counts) if counts else segment.token_count,
                base=segment.base,
                parent=parent.id if parent else None,
                depth=parent.depth + 1 if parent else 0,
                parts=json.dumps([list(part) for part in segment.parts]),
                disk_bytes=file.size,
                durability=Durability.DISK.value,
            )
        )
        transaction.update(identity, row_counts=sealed_row_counts(counts))
        row = transaction.by_id(identity)
        assert row is not None, "it was inserted"
        name_segment(transaction, row, file)
        self._adopted[identity] = Adopted(
            row.namespace, segment.parent, row.token_count, file.name, file.size, visible=True
        )
        return identity

    def _forget_unneeded(self, transaction: Transaction) -> None:
        """Takes replaced prefixes out again that no child has turned out to need."""
        for row in transaction.hidden():  # children before their parents
            adopted = self._adopted[row.id]
            if transaction.children(row.id):
                self._adopted[row.id] = adopted._replace(visible=False)
                continue
            del self._adopted[row.id]
            transaction.delete(row.id)
            Accounts(transaction).forget_garbage([adopted.file])
            replaced = "was replaced by a younger one of its name, and no child needs it"
            self._problems[self._directory.resolve(adopted.file)] = replaced

    # -- what stays outside

    def _make_room_aside(self, paths: list[Path]) -> None:
        """Makes the directories to which files will be moved, on stable storage before any is."""
        aside = self._directory.path / NOT_ADOPTED
        for path in paths:
            target = aside / self._directory.name_of(path)
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if paths:
            self._files.sync_directory(self._directory.path)
            self._files.sync_directory(aside)

    def _set_aside(self, problems: dict[Path, str]) -> list[SetAside]:
        """Moves files to `not-adopted/`, each after its reason has been written there."""
        moved = []
        for path, problem in sorted(problems.items()):
            name = self._directory.name_of(path)
            target = _free(self._directory.path / NOT_ADOPTED / name)
            moved.append(SetAside(name, self._directory.name_of(target), problem))
            reasons = self._directory.path / NOT_ADOPTED / REASONS
            with disk_errors(reasons), reasons.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(moved[-1]._asdict(), ensure_ascii=False)}\n")
            self._files.rename(path, target)
        return moved

    def _sync_moves(self) -> None:
        """What was moved must not be back under its old name after a power cut: a start removes it."""
        aside = self._directory.path / NOT_ADOPTED
        if aside.exists():
            self._sync(aside / REASONS)
            for path in (aside, *(path for path in aside.iterdir() if path.is_dir())):
                self._files.sync_directory(path)
        for path in (self._directory.segments, self._directory.rows, self._directory.blobs):
            self._files.sync_directory(path)
        self._files.sync_directory(self._directory.path)

    def _sync(self, path: Path) -> None:
        with contextlib.closing(OpenFile(path)) as file:
            self._files.sync(file.descriptor)


def _no_catalogue() -> None:
    raise _NoCatalogue


def _age(path: Path) -> tuple[int, int, int, str]:
    """Returns what sorts the files of segments as they were stored.

    The catalogue numbered the prefixes, and what it reserved to seal one; other files come first.
    """
    numbers = _NUMBERED.fullmatch(path.name)
    prefix, reservation = numbers.groups(default="0") if numbers else ("0", "0")
    return int(prefix), int(reservation), path.lstat().st_mtime_ns, path.name


def _read_header(path: Path) -> SegmentLayout:
    with contextlib.closing(OpenFile(path)) as file:
        return parse_header(file.read(8, header_length(file.read(0, 8))))


def _read_token_ids(segment: SegmentLayout, run: CheckedRun) -> bytes:
    return bytes(run.read(run.size - 4 * segment.token_count, run.size))


def _take_name_away(transaction: Transaction, tenant: str, name: str) -> None:
    """Hides the prefix of a name from lookups and matches, as a replacement does."""
    row = transaction.by_name(tenant, name)
    if row is not None:
        leave_index(transaction, row)
        transaction.update(row.id, visible=0)


def _fits(
    transaction: Transaction, parent: PrefixRow, segment: SegmentLayout, token_ids: bytes
) -> bool:
    """Says whether a prefix has the rows before `base` that a segment leaves to its parent."""
    own = zip(Layout.from_json(parent.layout).tensors, own_row_counts(parent), strict=True)
    counts = {tensor: parent.base + count for tensor, count in own}
    return (
        parent.model_id == segment.model_id
        and parent.depth + 1 < limits.CHAIN_DEPTH_MAX
        and extends(parent, segment.base)
        and all(counts.get(tensor, 0) >= segment.base for tensor in segment.layout.tensors)
        and common_tokens(MatchIndex(transaction).token_ids(parent.id), token_ids) >= segment.base
    )


def _free(path: Path) -> Path:
    """Returns a path that nothing has: this one, or it with a number."""
    number, free = 2, path
    while os.path.lexists(free):
        free = path.with_name(f"{path.name}.{number}")
        number += 1
    return free
