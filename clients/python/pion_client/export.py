"""The same-host lane: what is stored is read from the server's own files, no byte crosses the wire.

What the server names is not believed. A directory is taken for the server's only if its `host-token`, a
regular file and no link, holds exactly the token that the server sent: a server that does not share
this file system cannot know it, and a path that it makes up does not hold it. The token is compared
here and sent nowhere. A file is read only if it is reached from that directory without a link or a step
outside, and is the very one, by device, inode and size; its header must agree with what was announced.

The one decision: everything is opened before anything is read. What is open stays readable, whatever is
evicted or replaced meanwhile, so a short lease is enough. Whatever does not agree is not an error: the
caller streams instead, and says why.
"""

import contextlib
import functools
import os
import stat
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from crc32c import crc32c

from pion_client import answers
from pion_client.arrays import (
    Layers,
    MlxDestination,
    NumpyDestination,
    by_head,
    given,
    layers_of,
    mlx_core,
)
from pion_client.errors import BadAnswer
from pion_client.fetching import Announced, parts_of
from pion_client.values import Array, Encoded, Part, Progress
from pion_wire import limits
from pion_wire.layout import Layout, PartInfo, TensorLayout
from pion_wire.segment import SegmentError, SegmentLayout, header_length, parse_header
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import ssm_state_pb2 as ssm

LEASE_MS = 2_000
"""Until every file is open; leased files cannot be evicted, so not for longer."""
HOST_TOKEN = "host-token"
HOST_TOKEN_BYTES = 32
_IO_BYTES_MAX = 1 << 30
"""In one read: Linux moves less than 2 GiB at a time."""
_MLX_BYTES_MAX = (1 << 31) - 1
"""In one array: MLX counts in signed 32 bits."""
_MOSTLY = 0.5
"""`mx.load` takes half as long per byte as reading rows and having MLX copy them."""


class CannotExport(Exception):
    """Why the files cannot be used; `lasting` if they never can."""

    def __init__(self, reason: str, *, lasting: bool = False) -> None:
        super().__init__(reason)
        self.lasting = lasting


class Named(Protocol):
    """A file that the server names."""

    file_name: str
    device: int
    inode: int
    size_bytes: int
    data_offset_bytes: int


class Answer(Protocol):
    """Where the server says that they are."""

    directory: str
    host_token: bytes


class _Extent(NamedTuple):
    """Rows of one open segment."""

    descriptor: int
    header: SegmentLayout
    file_row: int
    row_count: int
    first_row: int


class _PartPlace(NamedTuple):
    """Where a part lies."""

    info: PartInfo
    descriptor: int
    name: str
    """In the header of the file."""
    offset: int


class OpenFiles:
    """The server's directory, and files in it that are open. Close it."""

    def __init__(self, answer: Answer) -> None:
        """Opens the directory.

        Raises:
            CannotExport: it is not this host's, or cannot be read.
        """
        self._segments: dict[int, SegmentLayout] = {}
        self._stack = contextlib.ExitStack()
        with self._stack:
            self._directory = self._keep(_open_directory(answer.directory))
            _check_token(self._directory, answer.host_token)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes everything."""
        self._stack.close()

    def open(self, named: Named) -> tuple[int, SegmentLayout]:
        """Opens a file, and returns its descriptor and header.

        Raises:
            CannotExport: it is not the one that was named, or no segment.
        """
        descriptor = self._keep(_open_inside(self._directory, named.file_name))
        status = os.fstat(descriptor)
        identity = named.device, named.inode, named.size_bytes
        if not stat.S_ISREG(status.st_mode):
            raise CannotExport(f"{named.file_name} is no regular file")
        if (status.st_dev, status.st_ino, status.st_size) != identity:
            raise CannotExport(f"{named.file_name} is another file than the server's")
        header = _read_header(descriptor, named.file_name)
        if (header.data_offset, header.file_bytes) != (named.data_offset_bytes, status.st_size):
            raise CannotExport(f"{named.file_name} is not laid out as announced")
        self._segments[descriptor] = header
        return descriptor, header

    def verify(self) -> None:
        """Reads every page of every file against its checksum.

        Raises:
            CannotExport: one differs; the server finds it too when it is asked to stream.
        """
        for descriptor, header in self._segments.items():
            _verify(descriptor, header)

    def _keep(self, descriptor: int) -> int:
        self._stack.callback(os.close, descriptor)
        return descriptor


class Exported:
    """The open files of a prefix. Close it."""

    def __init__(
        self,
        answer: pb.PrefixStoreExportResponse,
        *,
        slots: Sequence[int],
        part_kinds: Sequence[str],
        bytes_max: int,
        keep: Container[str] = (),
    ) -> None:
        """Opens everything and holds it against what was announced.

        Raises:
            CannotExport: it cannot be used; stream instead.
            BadAnswer: more bytes are announced than the caller wants.
            InvalidRequest: decoded, a row would be too long.
        """
        with contextlib.ExitStack() as stack:
            self._files = stack.enter_context(OpenFiles(answer))
            prefix = answers.prefix_info(answer.prefix)
            self._extents = [self._open(extent, prefix.layout) for extent in answer.extents]
            rows = answer.rows.begin, answer.rows.end
            _check_rows(self._extents, *rows)
            self._found_parts = self._find_parts(prefix.parts, rows[1], part_kinds)
            # Of a file without rows only the parts are used.
            self._extents = [extent for extent in self._extents if extent.row_count]
            layout = prefix.layout
            if slots:
                layout = Layout(tuple(t for t in layout.tensors if t.slot in slots))
            parts = tuple(place.info for place in self._found_parts)
            self.announced = Announced(
                prefix, layout, rows, answer.token_ids, parts, answer.shortened_by
            )
            self._tensors = self.announced.check(bytes_max, keep)
            stack.pop_all()

    def close(self) -> None:
        """Closes the files."""
        self._files.close()

    def verify(self) -> None:
        """Checks every page of the files; raises as `OpenFiles.verify` does."""
        self._files.verify()

    def layers(self, *, as_mlx: bool, progress: Progress | None = None) -> Layers:
        """Returns the tensors by slot; MLX arrays are evaluated.

        Raises:
            CannotExport: a file ends too early.
        """
        announced = self.announced
        if as_mlx and self._mostly_used() and not any(t.is_decoded for t in self._tensors):
            arrays = self._load_mlx()
        else:
            arrays = self._read_rows(as_mlx, progress)
        if progress is not None:
            progress(announced.total_bytes, announced.total_bytes)
        return layers_of(self.layout, announced.row_count, arrays, as_mlx=as_mlx)

    @property
    def layout(self) -> Layout:
        """The tensors as the caller gets them."""
        return Layout(tuple(tensor.given for tensor in self._tensors))

    def parts(self, *, as_mlx: bool) -> tuple[Part, ...]:
        """Returns the parts that were asked for; raises as `layers` does.

        With `as_mlx` their bytes are those of evaluated MLX arrays, which `memoryview.obj` is.
        """
        return parts_of(self.announced.parts, _part_bytes(self._found_parts, as_mlx=as_mlx))

    # Opening

    def _open(self, extent: pb.PrefixStoreExportResponse.Extent, layout: Layout) -> _Extent:
        descriptor, header = self._files.open(extent)
        if header.layout != layout:
            raise CannotExport(f"{extent.file_name} has another layout")
        rows_end = extent.file_row + extent.row_count
        if any(rows_end > row_count for row_count in header.row_counts):
            raise CannotExport(f"{extent.file_name} has fewer rows than announced")
        return _Extent(descriptor, header, extent.file_row, extent.row_count, extent.first_row)

    def _find_parts(
        self, known: Sequence[PartInfo], boundary: int, kinds: Sequence[str]
    ) -> list[_PartPlace]:
        # The last file's counts: a parent may have one like it beyond its child's base, where it is of
        # other tokens.
        held = {
            part: (extent, f"part.{index}")
            for extent in self._extents
            for index, part in enumerate(extent.header.parts)
        }
        found = []
        for part in known:
            if part.kind not in kinds or part.boundary_tokens != boundary:
                continue
            if part not in held:
                raise CannotExport(f"a part ({part.kind}) lies in a file that was not named")
            extent, name = held[part]
            offset = extent.header.data_offset + extent.header.arrays[name].begin
            found.append(_PartPlace(part, extent.descriptor, name, offset))
        return found

    # Reading

    def _mostly_used(self) -> bool:
        """Whether MLX, which loads whole tensors, would load little that is not asked for."""
        used = sum(extent.row_count for extent in self._extents)
        held = sum(max(extent.header.row_counts, default=0) for extent in self._extents)
        return bool(self._extents) and used >= held * _MOSTLY

    def _load_mlx(self) -> dict[TensorLayout, Array | Encoded]:
        mx = mlx_core()
        try:
            files = [
                mx.load(f"/dev/fd/{extent.descriptor}", format="safetensors")
                for extent in self._extents
            ]
            arrays = {
                tensor: [
                    by_head(self._joined(mx, files, tensor.name + layout.suffix))
                    for layout in tensor.arrays
                ]
                for tensor in self.announced.layout.tensors
            }
            mx.eval(list(arrays.values()))
        except RuntimeError as error:  # MLX's word for a file that ends too early
            raise CannotExport(f"MLX cannot read the files: {error}") from error
        return {tensor: given(tensor, loaded) for tensor, loaded in arrays.items()}

    def _joined(self, mx: Any, files: list[Any], name: str) -> Array:
        pieces = []
        for file, extent in zip(files, self._extents, strict=True):
            rows = file[name]
            if extent.row_count < len(rows):
                rows = rows[extent.file_row : extent.file_row + extent.row_count]
            pieces.append(rows)
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def _read_rows(
        self, as_mlx: bool, progress: Progress | None
    ) -> dict[TensorLayout, Array | Encoded]:
        announced = self.announced
        kind = MlxDestination if as_mlx else NumpyDestination
        destination = kind(self._tensors, announced.row_count)
        done = 0
        for tensor in self._tensors:
            for index, layout in enumerate(tensor.stored.arrays):
                room = destination.room(tensor, index)
                self._read_array(tensor.stored.name + layout.suffix, layout.row_bytes, room)
                done += len(room)
            destination.finish(tensor)
            if progress is not None:
                progress(done, announced.total_bytes)
        return destination.arrays

    def _read_array(self, name: str, row_bytes: int, room: np.ndarray) -> None:
        for extent in self._extents:
            begin = (extent.first_row - self.announced.rows[0]) * row_bytes
            end = begin + extent.row_count * row_bytes
            offset = extent.header.data_offset + extent.header.arrays[name].begin
            offset += extent.file_row * row_bytes
            _read_into(extent.descriptor, room[begin:end], offset)


class ExportedStates:
    """The open files of recurrent states, each the only part of its own. Close it."""

    def __init__(self, answer: ssm.SSMStateExportResponse, *, bytes_max: int) -> None:
        """Opens everything and holds it against what was announced.

        Raises:
            CannotExport: it cannot be used; stream instead.
            BadAnswer: more bytes are announced than the caller wants.
        """
        total = sum(value.info.size_bytes for value in answer.values)
        if total > bytes_max:
            raise BadAnswer(f"{total} bytes were announced, {bytes_max} are wanted")
        with contextlib.ExitStack() as stack:
            self._files = stack.enter_context(OpenFiles(answer))
            self._places = [self._open(value) for value in answer.values]
            stack.pop_all()

    def close(self) -> None:
        """Closes the files."""
        self._files.close()

    def verify(self) -> None:
        """Checks every page of the files; raises as `OpenFiles.verify` does."""
        self._files.verify()

    def data(self, *, as_mlx: bool) -> list[memoryview]:
        """Returns the bytes of each value, of MLX arrays as `Exported.parts` does.

        Raises:
            CannotExport: a file ends too early.
        """
        return _part_bytes(self._places, as_mlx=as_mlx)

    def _open(self, value: ssm.SSMStateExportResponse.Value) -> _PartPlace:
        if not value.file_name:
            raise CannotExport("a value lies in no file of its own")
        descriptor, header = self._files.open(value)
        info = value.info
        part = PartInfo(
            "state", value.layer, info.boundary_tokens, info.size_bytes, info.description
        )
        if (header.parts, header.model_id) != ((part,), info.model_id):
            raise CannotExport(f"{value.file_name} holds something else than announced")
        offset = header.data_offset + header.arrays["part.0"].begin
        return _PartPlace(part, descriptor, "part.0", offset)


def _part_bytes(places: Sequence[_PartPlace], *, as_mlx: bool) -> list[memoryview]:
    """Reads parts, each into memory of its own."""
    if as_mlx and all(place.info.size_bytes <= _MLX_BYTES_MAX for place in places):
        return _load_parts(places)
    memory = []
    for place in places:
        data = np.empty(place.info.size_bytes, np.uint8)
        _read_into(place.descriptor, data, place.offset)
        memory.append(data.data)
    return memory


def _load_parts(places: Sequence[_PartPlace]) -> list[memoryview]:
    mx = mlx_core()
    try:
        files = {
            descriptor: mx.load(f"/dev/fd/{descriptor}", format="safetensors")
            for descriptor in {place.descriptor for place in places}
        }
        arrays = [files[place.descriptor][place.name] for place in places]
        mx.eval(arrays)
    except RuntimeError as error:  # MLX's word for a file that ends too early
        raise CannotExport(f"MLX cannot read the files: {error}") from error
    return [memoryview(array) if array.size else memoryview(b"") for array in arrays]


_parsed = functools.lru_cache(maxsize=32)(parse_header)
"""Equal bytes mean equal headers; taking one of a large model apart costs a millisecond."""


def _open_directory(path: str) -> int:
    if not os.path.isabs(path):
        raise CannotExport("the server named no absolute directory", lasting=True)
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CannotExport(f"the server's directory is not here: {error}", lasting=True) from error


def _check_token(directory: int, token: bytes) -> None:
    """Raises CannotExport unless the directory's host token is this one."""
    if len(token) != HOST_TOKEN_BYTES:
        raise CannotExport("the server sent no host token", lasting=True)
    # Not blocking: a pipe under this name must not hold the caller up.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(HOST_TOKEN, flags, dir_fd=directory)
    except OSError as error:
        raise CannotExport(f"the host token cannot be read: {error}", lasting=True) from error
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        held = os.read(descriptor, HOST_TOKEN_BYTES + 1) if regular else b""
    finally:
        os.close(descriptor)
    if held != token:
        raise CannotExport("the directory holds another host token: another host's", lasting=True)


def _open_inside(directory: int, name: str) -> int:
    """Opens a file by a path relative to a directory, following no link."""
    steps = name.split("/")
    if not all(steps) or any(step in (".", "..") for step in steps) or "\0" in name:
        raise CannotExport(f"{name!r} leads outside the server's directory")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        try:
            for step in steps[:-1]:
                directory = os.open(step, flags | os.O_DIRECTORY, dir_fd=directory)
                stack.callback(os.close, directory)
            return os.open(steps[-1], flags, dir_fd=directory)
        except OSError as error:
            raise CannotExport(f"{name} cannot be opened: {error}") from error


def _read_header(descriptor: int, name: str) -> SegmentLayout:
    try:
        length = header_length(os.pread(descriptor, 8, 0))
        return _parsed(os.pread(descriptor, length, 8))
    except (SegmentError, OSError) as error:
        raise CannotExport(f"{name} is not a segment: {error}") from error


def _check_rows(extents: Sequence[_Extent], begin: int, end: int) -> None:
    at = begin
    for extent in extents:
        if extent.first_row != at:
            raise CannotExport("the server named rows with a gap")
        at += extent.row_count
    if at != end or begin > end:
        raise CannotExport("the server named other rows than it announced")


def _read_into(descriptor: int, memory: np.ndarray, offset: int) -> None:
    view = memory.data.cast("B")
    while len(view):
        count = _read_some(descriptor, view[:_IO_BYTES_MAX], offset)
        view, offset = view[count:], offset + count


def _read_some(descriptor: int, view: memoryview, offset: int) -> int:
    try:
        count = os.preadv(descriptor, [view], offset)
    except OSError as error:
        raise CannotExport(f"a file cannot be read: {error}") from error
    if not count:
        raise CannotExport("a file ends too early")
    return count


def _verify(descriptor: int, header: SegmentLayout) -> None:
    entry = header.arrays["crc32c"]
    checksums = np.empty(entry.shape, "<u4")
    _read_into(descriptor, checksums.view(np.uint8), header.data_offset + entry.begin)
    page = np.empty(limits.PAGE_BYTES, np.uint8)
    for index, (begin, size) in enumerate(_pages(header.paged_bytes)):
        _read_into(descriptor, page[:size], header.data_offset + begin)
        if crc32c(page[:size].data) != checksums[index]:
            raise CannotExport(f"page {index} of a file does not have its checksum")


def _pages(size: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, size, limits.PAGE_BYTES):
        yield begin, min(limits.PAGE_BYTES, size - begin)
