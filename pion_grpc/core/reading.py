"""Reading a prefix: which bytes of which files its rows are, and handing them out checked.

A plan is made from one view of the catalogue. Every file of the plan is opened before the first byte is
handed out; what is open stays readable, whatever is evicted or replaced meanwhile. Rows of a chain lie
in several segments, rows of a live prefix in several extents over an older segment, where a later one
supersedes: both are the same list of pieces, in order of rows, without gaps.

A reader names the codecs that it decodes itself; rows in any other come as float32. Rows that a tensor
does not have are rows of zeros: a hole between two extents, or the end of a tensor shorter than others.
"""

import bisect
import functools
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pion_grpc.core.values import FetchQuery, Position, RowRange
from pion_grpc.errors import Corrupt
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.extents import ExtentRow
from pion_grpc.storage.pages import CheckedRun, OpenFile, open_segment
from pion_grpc.storage.transaction import PrefixRow
from pion_wire import limits
from pion_wire.codecs import ArrayLayout, parse
from pion_wire.layout import DType, Layout, LayoutError, PartInfo, TensorLayout
from pion_wire.rows import decode_rows, zero_row
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

    def checked(self, begin: int, end: int, row_bytes: int) -> Iterator[memoryview]:
        """Yields bytes of the run, in chunks of whole rows.

        Raises:
            CorruptPrefix: a page does not have its checksum.
        """
        assert self.run is not None, "a hole has no bytes"
        with naming(self.prefix, self.run.file.path):
            yield from self.run.chunks(begin, end, row_bytes)


def _begin(source: _Source) -> int:
    return source.begin


class _OpenSegment(NamedTuple):
    """The segment of a prefix of the chain."""

    prefix: PrefixRow
    run: CheckedRun
    layout: SegmentLayout
    last: int
    """Up to which row it counts."""


class _OpenExtent(NamedTuple):
    """Rows written into one tensor of a live prefix."""

    tensor_index: int
    extent: ExtentRow
    run: CheckedRun | None
    """None: a hole."""


class CorruptPrefix(Corrupt):
    """A file of this prefix is damaged or gone.

    It names the file, so it is for the log alone; whoever asked gets `damaged`.
    """

    def __init__(self, error: Corrupt, prefix: int, path: Path) -> None:
        super().__init__(str(error), **error.metadata)
        self.prefix = prefix
        self.path = path


def damaged(namespace: str) -> Corrupt:
    """Returns the error for whoever asked for a prefix that turned out to be damaged."""
    return Corrupt(
        f"{namespace!r} is damaged and has been taken out: a checksum differs, or bytes are missing",
        namespace=namespace,
    )


def segment_layout(prefix: PrefixRow, parent_namespace: str) -> SegmentLayout:
    """Returns where everything lies in the segment of a prefix, which may have outgrown it."""
    counts = tuple(json.loads(prefix.file_row_counts)) if prefix.file_layout else None
    return _segment_layout(
        prefix.file_layout or prefix.layout,
        own_row_counts(prefix) if counts is None else counts,
        prefix.file_tokens,
        prefix.model_id,
        prefix.base,
        parent_namespace,
        prefix.parts,
        prefix.namespace,
    )


@functools.lru_cache(maxsize=1024)
def _segment_layout(
    layout: str,
    row_counts: tuple[int, ...],
    token_count: int,
    model_id: str,
    base: int,
    parent: str,
    parts: str,
    namespace: str,
) -> SegmentLayout:
    """Segments are read many times, and deriving where everything lies costs more than opening one."""
    infos = tuple(PartInfo(*part) for part in json.loads(parts))
    return SegmentLayout(
        Layout.from_json(layout), row_counts, token_count, model_id, base, parent, infos, namespace
    )


def own_row_counts(prefix: PrefixRow) -> tuple[int, ...]:
    """Returns the rows that each tensor has without its parents' rows."""
    if prefix.row_counts:
        return tuple(json.loads(prefix.row_counts))
    tensors = len(Layout.from_json(prefix.layout).tensors)
    return (prefix.token_count - prefix.base,) * tensors


def sealed_row_counts(counts: Sequence[int]) -> str:
    """Returns a sealed prefix's rows by tensor, as the catalogue keeps them: empty if all are alike."""
    return json.dumps(list(counts)) if len(set(counts)) > 1 else ""


def parts_of(prefix: PrefixRow) -> tuple[PartInfo, ...]:
    """Returns the parts that are in a prefix's own segment."""
    return tuple(PartInfo(*part) for part in json.loads(prefix.parts))


def chain_parts(chain: list[PrefixRow], token_count: int) -> tuple[PartInfo, ...]:
    """Returns the parts that belong to the first tokens of a chain.

    Of a parent, those of tokens that its child shares; of the last prefix, those of `token_count`
    tokens: where rows have been overwritten, parts are no longer what comes after them.
    """
    counts = [*(child.base for child in chain[1:]), token_count]
    return tuple(
        part
        for prefix, end in zip(chain, counts, strict=True)
        for part in parts_of(prefix)
        if part.boundary_tokens <= end
    )


def ends(chain: list[PrefixRow]) -> list[int]:
    """Returns up to which row each prefix of a chain counts: its child's base, or all of its own."""
    return [child.base for child in chain[1:]] + [limits.TOKENS_MAX]


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
            if (not query.slots or tensor.slot in query.slots) and tensor.side in query.sides
        ]
        self.served_layout = _served_layout(
            self.layout, tuple(self.tensors), query.codecs, query.raw_types
        )
        """The tensors as they are handed out."""
        self.row_counts = tuple(chain[-1].base + count for count in own_row_counts(chain[-1]))
        """Rows of each tensor of the layout, those of parents included."""
        self._files: list[OpenFile] = []
        self._segments: list[_OpenSegment] = []
        self._extents: list[_OpenExtent] = []
        self._parts: list[tuple[PartInfo, int, CheckedRun, int]] = []
        self._own_parts: dict[PartInfo, tuple[CheckedRun, int, int]] = {}
        try:
            parent = ""
            for prefix, end in zip(chain, ends(chain), strict=True):
                if prefix.file is not None:
                    self._open_segment(directory, prefix, parent, query, end)
                parent = prefix.namespace
            self._open_extents(directory, chain[-1], extents)
        except BaseException:
            self.close()
            raise

    @property
    def parts(self) -> tuple[PartInfo, ...]:
        """The parts that are handed out after the rows."""
        return tuple(part for part, *_ in self._parts)

    @property
    def part_owners(self) -> frozenset[int]:
        """The prefixes of the chain in whose segments those parts are."""
        return frozenset(prefix for _, prefix, *_ in self._parts)

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
        for run, owner in self._runs():
            if prefix in (None, owner):
                with naming(owner, run.file.path):
                    run.check()

    def segment_status(self, prefix: int) -> os.stat_result:
        """Returns what the system knows of the segment of a sealed prefix of the chain."""
        (segment,) = (segment for segment in self._segments if segment.prefix.id == prefix)
        return os.fstat(segment.run.file.descriptor)

    def row(self, tensor_index: int, row: int) -> bytes:
        """Returns one row of a tensor that is handed out with one array; zeros beyond the end."""
        return b"".join(self.rows_of(tensor_index, row, row + 1))

    def rows_of(self, tensor_index: int, begin: int, end: int) -> Iterator[memoryview]:
        """Yields rows of a tensor that is handed out with one array, zeros where it has none."""
        for piece in self._served_array(tensor_index, 0, begin, end):
            yield piece.data

    def stream_own(self, segment: SegmentLayout) -> Iterator[memoryview]:
        """Yields what a new segment of the prefix has before its token ids: rows, then parts."""
        base = segment.base
        for index, count in enumerate(segment.row_counts):
            for array_index in range(len(self.layout.tensors[index].arrays)):
                for piece in self._array(index, index, array_index, base, base + count):
                    yield piece.data
        for run, begin, end in map(self._own_parts.__getitem__, segment.parts):
            with naming(self.chain[-1].id, run.file.path):
                yield from run.chunks(begin, end, 1)

    def stream(self, resume: Position) -> Iterator[Rows | PartBytes]:
        """Yields rows by tensor, array and row, then parts; each at most 1 MiB.

        `tensor_index` counts the tensors that are handed out.

        Raises:
            CorruptPrefix: a page does not have its checksum.
        """
        if not resume.part:
            for position, tensor in enumerate(self.served_layout.tensors):
                if position < resume.tensor_index:
                    continue
                for array_index in range(len(tensor.arrays)):
                    begin = self.rows.begin
                    if position == resume.tensor_index:
                        if array_index < resume.array_index:
                            continue
                        if array_index == resume.array_index:
                            begin = max(begin, resume.row)
                    yield from self._served_array(position, array_index, begin, self.rows.end)
        for part_index, (part, prefix, run, offset) in enumerate(self._parts):
            if part_index < resume.part - 1:
                continue
            start = resume.part_offset if part_index == resume.part - 1 else 0
            with naming(prefix, run.file.path):
                for data in run.chunks(offset + start, offset + part.size_bytes, 1):
                    yield PartBytes(part_index, start, data)
                    start += len(data)

    def _served_array(
        self, position: int, array_index: int, begin: int, stop: int
    ) -> Iterator[Rows]:
        index = self.tensors[position]
        if self.served_layout.tensors[position] == self.layout.tensors[index]:
            yield from self._array(position, index, array_index, begin, stop)
        else:
            yield from self._decoded(position, index, begin, stop)

    def _array(
        self, position: int, index: int, array_index: int, begin: int, stop: int
    ) -> Iterator[Rows]:
        """Yields rows of one array as they are stored."""
        arrays = self.layout.tensors[index].arrays
        row_bytes = arrays[array_index].row_bytes
        if not row_bytes:
            return
        for source, first, end in self._between(index, begin, stop):
            if source is None or source.run is None:
                zeros = zero_row(self.layout.tensors[index], array_index)
                chunks = _repeated(zeros, end - first)
            else:
                start, size = _within(source, arrays, array_index, first, end)
                chunks = source.checked(start, start + size, row_bytes)
            for data in chunks:
                count = len(data) // row_bytes
                yield Rows(position, array_index, first, count, data)
                first += count

    def _decoded(self, position: int, index: int, begin: int, stop: int) -> Iterator[Rows]:
        """Yields rows as float32, whatever they are stored in."""
        tensor, served = self.layout.tensors[index], self.served_layout.tensors[position]
        if not served.row_bytes:
            return
        step = max(1, limits.CHUNK_BYTES_MAX // served.row_bytes)
        for source, first, end in self._between(index, begin, stop):
            if source is None or source.run is None:
                for data in _repeated(bytes(served.row_bytes), end - first):
                    count = len(data) // served.row_bytes
                    yield Rows(position, 0, first, count, data)
                    first += count
                continue
            run = source.run
            for row in range(first, end, step):
                stretch = row, min(row + step, end)
                with naming(source.prefix, run.file.path):
                    arrays = [
                        run.read(start, start + size)
                        for start, size in (
                            _within(source, tensor.arrays, i, *stretch)
                            for i in range(len(tensor.arrays))
                        )
                    ]
                yield Rows(position, 0, row, stretch[1] - row, decode_rows(tensor, arrays))

    def _between(
        self, index: int, begin: int, stop: int
    ) -> Iterator[tuple[_Source | None, int, int]]:
        """Yields where the rows of a tensor come from, in order; None where it has none."""
        count = self.row_counts[index]
        row = begin
        sources = self._sources[index]
        first = max(bisect.bisect_right(sources, begin, key=_begin) - 1, 0)
        for source in itertools.islice(sources, first, None):
            if source.begin >= stop:
                break
            end = min(source.end, stop, count)
            if row < end:
                assert source.begin <= row, "sources are in order, without gaps"
                yield source, row, end
                row = end
        if row < stop:
            yield None, row, stop

    def _open_segment(
        self,
        directory: DataDirectory,
        prefix: PrefixRow,
        parent: str,
        query: FetchQuery,
        last: int,
    ) -> None:
        assert prefix.file is not None
        segment = segment_layout(prefix, parent)
        path = directory.resolve(prefix.file)
        with naming(prefix.id, path):
            run = open_segment(path, segment)
        self._files.append(run.file)
        self._segments.append(_OpenSegment(prefix, run, segment, last))
        for part_index, part in enumerate(segment.parts):
            place = segment.arrays[f"part.{part_index}"]
            if prefix is self.chain[-1]:
                self._own_parts[part] = run, place.begin, place.end
            if part.kind in query.part_kinds and part.boundary_tokens == self.rows.end <= last:
                self._parts.append((part, prefix.id, run, place.begin))

    def _open_extents(
        self, directory: DataDirectory, prefix: PrefixRow, extents: list[ExtentRow]
    ) -> None:
        opened: dict[str, OpenFile] = {}
        positions = {self.layout.tensors[index].key: index for index in self.tensors}
        for extent in extents:
            index = positions.get(extent.tensor)
            if index is None:
                continue
            run = None
            if extent.file:
                if extent.file not in opened:
                    opened[extent.file] = OpenFile(directory.resolve(extent.file))
                    self._files.append(opened[extent.file])
                size = extent.row_count * self.layout.tensors[index].row_bytes
                with naming(prefix.id, opened[extent.file].path):
                    run = CheckedRun(opened[extent.file], extent.offset, size, extent.checksums)
            self._extents.append(_OpenExtent(index, extent, run))

    def _runs(self) -> Iterator[tuple[CheckedRun, int]]:
        """Yields what is checked page by page, and the prefix that it is of."""
        for segment in self._segments:
            yield segment.run, segment.prefix.id
        for _, _, run in self._extents:
            if run is not None:
                yield run, self.chain[-1].id

    @functools.cached_property
    def _sources(self) -> dict[int, list[_Source]]:
        """Where the rows of each tensor come from; put together when they are read, if they are."""
        found: dict[int, list[_Source]] = {index: [] for index in self.tensors}
        for prefix, run, segment, last in self._segments:
            counts = dict(zip(segment.layout.tensors, segment.row_counts, strict=True))
            for index in self.tensors:
                tensor = self.layout.tensors[index]
                if tensor not in counts:
                    continue  # younger than the file, whatever that has under its name
                count, base = counts[tensor], prefix.base
                begin = segment.arrays[tensor.name + tensor.arrays[0].suffix].begin
                end = min(base + count, last)
                _lay_over(found[index], _Source(prefix.id, run, begin, base, count, base, end))
        live = self.chain[-1].id
        for index, extent, rows in self._extents:
            first, count = extent.first_row, extent.row_count
            _lay_over(found[index], _Source(live, rows, 0, first, count, first, first + count))
        return found


def _lay_over(sources: list[_Source], new: _Source) -> None:
    """Lays a source over the older ones; between them may be a gap, which reads as zeros."""
    if new.begin == new.end:
        return
    last = sources[-1].end if sources else 0
    if new.begin > last:
        sources.append(_Source(new.prefix, None, 0, last, 0, last, new.begin))
    first = max(bisect.bisect_right(sources, new.begin, key=_begin) - 1, 0)
    behind = bisect.bisect_left(sources, new.end, key=_begin)
    over = [new]
    for old in sources[first:behind]:
        if old.begin < new.begin:
            over.insert(0, old._replace(end=min(old.end, new.begin)))
        if old.end > new.end:
            over.append(old._replace(begin=max(old.begin, new.end)))
    sources[first:behind] = over


class naming:  # noqa: N801 - reads as a statement
    """Says whose file a damaged one is."""

    def __init__(self, prefix: int, path: Path) -> None:
        self._prefix = prefix
        self._path = path

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Corrupt) and not isinstance(error, CorruptPrefix):
            raise CorruptPrefix(error, self._prefix, self._path) from error


@functools.lru_cache(maxsize=128)
def _served_layout(
    layout: Layout,
    tensors: tuple[int, ...],
    codecs: frozenset[str] | None,
    raw_types: frozenset[DType],
) -> Layout:
    """Returns some tensors of a layout as they are handed out; raises as `_served_tensor` does."""
    stored = (layout.tensors[index] for index in tensors)
    return Layout(tuple(_served_tensor(tensor, codecs, raw_types) for tensor in stored))


def _served_tensor(
    tensor: TensorLayout, codecs: frozenset[str] | None, raw_types: frozenset[DType]
) -> TensorLayout:
    """Returns how a tensor is handed out to a reader of these codecs: as stored, or as float32.

    Raises:
        LayoutError: decoded, a row would exceed what a row may have.
    """
    if tensor.codec == "raw":
        known = tensor.dtype in raw_types
    else:
        names = {tensor.codec, parse(tensor.codec).name}
        known = codecs is None or not codecs.isdisjoint(names)
    if known:
        return tensor
    try:
        return TensorLayout(tensor.slot, tensor.side, tensor.heads, tensor.head_dim, DType.F32)
    except LayoutError as error:
        raise LayoutError(
            "codecs", f"rows of {tensor.name} are too long decoded: ask for {tensor.codec!r}"
        ) from error


def _within(
    source: _Source, arrays: tuple[ArrayLayout, ...], array_index: int, first: int, end: int
) -> tuple[int, int]:
    """Returns where rows of one array begin in the run of a source, and their bytes."""
    before = sum(array.row_bytes for array in arrays[:array_index])
    row_bytes = arrays[array_index].row_bytes
    start = source.run_offset + source.run_rows * before + (first - source.run_row) * row_bytes
    return start, (end - first) * row_bytes


def _repeated(row: bytes, count: int) -> Iterator[memoryview]:
    """Yields `count` times the same row, in chunks."""
    step = min(max(1, limits.CHUNK_BYTES_MAX // len(row)), count)
    rows = memoryview(row * step)
    while count > 0:
        yield rows[: min(step, count) * len(row)]
        count -= step
