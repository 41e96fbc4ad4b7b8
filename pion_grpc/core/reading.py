"""Reading a prefix: which bytes of which files its rows are, and handing them out checked.

A plan is made from one view of the catalogue. Every file of the plan is opened before the first byte is
handed out; what is open stays readable, whatever is evicted or replaced meanwhile. Rows of a chain lie
in several segments, rows of a live prefix in several extents over an older segment, where a later one
supersedes: both are the same list of pieces, in order of rows, without gaps.
"""

import json
from collections.abc import Iterator
from typing import NamedTuple

from pion_grpc.core.values import FetchQuery, Position, RowRange
from pion_grpc.errors import Corrupt
from pion_grpc.storage.catalog import ExtentRow, PrefixRow
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.pages import CheckedRun, OpenFile, open_segment
from pion_wire.codecs import ArrayLayout
from pion_wire.layout import Layout, PartInfo
from pion_wire.limits import CHUNK_BYTES_MAX
from pion_wire.segment import SegmentLayout


class Rows(NamedTuple):
    """Consecutive rows of one array of one tensor; `data` is checked."""

    tensor_index: int
    array_index: int
    first_row: int
    row_count: int
    data: memoryview


class PartBytes(NamedTuple):
    """Consecutive bytes of one part; `data` is checked."""

    part_index: int
    offset: int
    data: memoryview


class _Source(NamedTuple):
    """A stretch of rows of one tensor that lie behind each other in one run."""

    prefix: int
    run: CheckedRun | None
    """None: a hole, rows of zeros."""
    run_offset: int
    """Where row `run_row` begins in the run, for the tensor's first array."""
    run_row: int
    run_rows: int
    """Rows of this tensor in the run; the arrays of a tensor lie behind each other."""
    begin: int
    end: int


class CorruptPrefix(Corrupt):
    """A page of this prefix does not have its checksum."""

    def __init__(self, error: Corrupt, prefix: int) -> None:
        super().__init__(str(error), **error.metadata)
        self.prefix = prefix


def segment_layout(prefix: PrefixRow, parent_namespace: str) -> SegmentLayout:
    """Returns where everything lies in the segment of a sealed prefix."""
    layout = Layout.from_json(prefix.layout)
    return SegmentLayout(
        layout=layout,
        row_counts=own_row_counts(prefix),
        token_count=prefix.file_tokens,
        model_id=prefix.model_id,
        base=prefix.base,
        parent=parent_namespace,
        parts=parts_of(prefix),
    )


def own_row_counts(prefix: PrefixRow) -> tuple[int, ...]:
    """Returns the rows that each tensor has without its parents' rows."""
    if prefix.row_counts:
        return tuple(json.loads(prefix.row_counts))
    tensors = len(Layout.from_json(prefix.layout).tensors)
    return (prefix.token_count - prefix.base,) * tensors


def parts_of(prefix: PrefixRow) -> tuple[PartInfo, ...]:
    """Returns the parts that are in a prefix's own segment."""
    return tuple(PartInfo(*part) for part in json.loads(prefix.parts))


class Reading:
    """Open files and the rows in them. Close it."""

    def __init__(
        self,
        directory: DataDirectory,
        chain: list[PrefixRow],
        extents: list[ExtentRow],
        query: FetchQuery,
        rows: RowRange,
    ) -> None:
        """Opens every file of a plan.

        Raises:
            FileNotFoundError: one is gone.
            CorruptPrefix: one is not what was written.
        """
        self.chain = chain
        self.rows = rows
        self.layout = Layout.from_json(chain[-1].layout)
        self.tensors = [
            index
            for index, tensor in enumerate(self.layout.tensors)
            if not query.slots or tensor.slot in query.slots
        ]
        self._files: list[OpenFile] = []
        self._runs: list[tuple[CheckedRun, int]] = []
        self._sources: dict[int, list[_Source]] = {index: [] for index in self.tensors}
        self._parts: list[tuple[PartInfo, int, CheckedRun, int]] = []
        try:
            parent = ""
            for prefix in chain:
                if prefix.file is not None:
                    self._open_segment(directory, prefix, parent, query)
                parent = prefix.namespace
            self._open_extents(directory, chain[-1], extents)
        except BaseException:
            self.close()
            raise

    @property
    def served_layout(self) -> Layout:
        """The layout of the tensors that are handed out."""
        return Layout(tuple(self.layout.tensors[index] for index in self.tensors))

    @property
    def parts(self) -> tuple[PartInfo, ...]:
        """The parts that are handed out after the rows."""
        return tuple(part for part, *_ in self._parts)

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows and parts."""
        rows = self.rows.end - self.rows.begin
        return rows * self.served_layout.row_bytes + sum(part.size_bytes for part in self.parts)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()

    def check(self, prefix: int | None = None) -> None:
        """Reads every page of every run, or of those of one prefix.

        Raises:
            CorruptPrefix: one does not have its checksum.
        """
        for run, owner in self._runs:
            if prefix in (None, owner):
                with _naming(owner):
                    run.check()

    def row(self, tensor_index: int, row: int) -> memoryview:
        """Returns one row of a tensor that is handed out and has one array; zeros beyond the end."""
        index = self.tensors[tensor_index]
        row_bytes = self.layout.tensors[index].row_bytes
        for source in self._sources[index]:
            if source.begin <= row < min(source.end, self.rows.end) and source.run is not None:
                start = source.run_offset + (row - source.run_row) * row_bytes
                with _naming(source.prefix):
                    return source.run.read(start, start + row_bytes)
        return memoryview(bytes(row_bytes))

    def stream_own(self, base: int, row_counts: tuple[int, ...]) -> Iterator[memoryview]:
        """Yields the bytes of the rows from `base` on, as a segment with these row counts has them."""
        for index, count in enumerate(row_counts):
            arrays = self.layout.tensors[index].arrays
            for array_index in range(len(arrays)):
                end = base + count
                for piece in self._array(index, index, array_index, arrays, base, end):
                    yield piece.data

    def stream(self, resume: Position) -> Iterator[Rows | PartBytes]:
        """Yields rows by tensor, array and row, then parts; each at most 1 MiB.

        `tensor_index` counts the tensors that are handed out.

        Raises:
            CorruptPrefix: a page does not have its checksum.
        """
        if not resume.part:
            for position, index in enumerate(self.tensors):
                if position < resume.tensor_index:
                    continue
                arrays = self.layout.tensors[index].arrays
                for array_index in range(len(arrays)):
                    begin = self.rows.begin
                    if position == resume.tensor_index:
                        if array_index < resume.array_index:
                            continue
                        if array_index == resume.array_index:
                            begin = max(begin, resume.row)
                    yield from self._array(
                        position, index, array_index, arrays, begin, self.rows.end
                    )
        for part_index, (part, prefix, run, offset) in enumerate(self._parts):
            if part_index < resume.part - 1:
                continue
            start = resume.part_offset if part_index == resume.part - 1 else 0
            with _naming(prefix):
                for data in run.chunks(offset + start, offset + part.size_bytes, 1):
                    yield PartBytes(part_index, start, data)
                    start += len(data)

    def _array(
        self,
        position: int,
        index: int,
        array_index: int,
        arrays: tuple[ArrayLayout, ...],
        begin: int,
        stop: int,
    ) -> Iterator[Rows]:
        row_bytes = arrays[array_index].row_bytes
        if not row_bytes:
            return
        before = sum(array.row_bytes for array in arrays[:array_index])
        for source in self._sources[index]:
            first, end = max(source.begin, begin), min(source.end, stop)
            if first >= end:
                continue
            if source.run is None:
                chunks = _zeros((end - first) * row_bytes, row_bytes)
            else:
                start = source.run_offset + source.run_rows * before - source.run_row * row_bytes
                chunks = source.run.chunks(
                    start + first * row_bytes, start + end * row_bytes, row_bytes
                )
            with _naming(source.prefix):
                for data in chunks:
                    count = len(data) // row_bytes
                    yield Rows(position, array_index, first, count, data)
                    first += count

    def _open_segment(
        self, directory: DataDirectory, prefix: PrefixRow, parent: str, query: FetchQuery
    ) -> None:
        assert prefix.file is not None
        segment = segment_layout(prefix, parent)
        with _naming(prefix.id):
            run = open_segment(directory.resolve(prefix.file), segment)
        self._files.append(run.file)
        self._runs.append((run, prefix.id))
        counts = own_row_counts(prefix)
        entries = {entry.name: entry for entry in segment.entries()}
        for index in self.tensors:
            tensor = segment.layout.tensors[index]
            entry = entries[tensor.name + tensor.arrays[0].suffix]
            self._add(
                index,
                _Source(
                    prefix.id,
                    run,
                    entry.begin,
                    prefix.base,
                    counts[index],
                    prefix.base,
                    prefix.base + counts[index],
                ),
            )
        for part_index, part in enumerate(segment.parts):
            if part.kind in query.part_kinds and part.boundary_tokens == self.rows.end:
                offset = entries[f"part.{part_index}"].begin
                self._parts.append((part, prefix.id, run, offset))

    def _open_extents(
        self, directory: DataDirectory, prefix: PrefixRow, extents: list[ExtentRow]
    ) -> None:
        opened: dict[str, OpenFile] = {}
        for extent in extents:
            if extent.tensor not in self._sources:
                continue
            end = extent.first_row + extent.row_count
            run = None
            if extent.file:
                if extent.file not in opened:
                    opened[extent.file] = OpenFile(directory.resolve(extent.file))
                    self._files.append(opened[extent.file])
                size = extent.row_count * self.layout.tensors[extent.tensor].row_bytes
                with _naming(prefix.id):
                    run = CheckedRun(opened[extent.file], extent.offset, size, extent.checksums)
                self._runs.append((run, prefix.id))
            self._add(
                extent.tensor,
                _Source(
                    prefix.id, run, 0, extent.first_row, extent.row_count, extent.first_row, end
                ),
            )

    def _add(self, tensor: int, new: _Source) -> None:
        """Lays a source over the older ones; between them may be a gap, which reads as zeros."""
        over: list[_Source] = []
        last = max((source.end for source in self._sources[tensor]), default=0)
        if new.begin > last:
            self._sources[tensor].append(_Source(new.prefix, None, 0, last, 0, last, new.begin))
        for old in self._sources[tensor]:
            if old.begin < new.begin:
                over.append(old._replace(end=min(old.end, new.begin)))
            if old.end > new.end:
                over.append(old._replace(begin=max(old.begin, new.end)))
        over.append(new)
        over.sort(key=lambda source: source.begin)
        self._sources[tensor] = over


class _naming:  # noqa: N801 - reads as a statement
    """Says whose page a corrupt one is."""

    def __init__(self, prefix: int) -> None:
        self._prefix = prefix

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Corrupt) and not isinstance(error, CorruptPrefix):
            raise CorruptPrefix(error, self._prefix) from error


def _zeros(size: int, row_bytes: int) -> Iterator[memoryview]:
    chunk = CHUNK_BYTES_MAX // row_bytes * row_bytes
    zeros = memoryview(bytes(min(chunk, size)))
    while size > 0:
        yield zeros[: min(len(zeros), size)]
        size -= len(zeros)
