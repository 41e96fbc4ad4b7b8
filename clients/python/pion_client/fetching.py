"""Taking a Fetch stream in: what was announced is checked, then chunk after chunk is put in its place.

Knows the messages of the stream; neither calls nor channels. The one decision: the stream has one order,
so where it stands is one number per tensor, and the same number says what to ask for after a break.
A chunk is taken only if it is exactly the next one: place and size first, then its checksum, then the
copy. Memory is allocated once, after everything that was announced has been held against the layout and
the limits.
"""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from google.protobuf.message import DecodeError

from pion_client import answers
from pion_client.arrays import (
    Destination,
    Layers,
    MlxDestination,
    NumpyDestination,
    Taken,
    layers_of,
    taken,
)
from pion_client.errors import BadAnswer, ChecksumMismatch
from pion_client.values import Part, PrefixInfo, Progress
from pion_wire import limits
from pion_wire.framing import FrameError, HeaderBytes, PartChunk, RowChunk, parse_message
from pion_wire.layout import Layout, PartInfo, TensorLayout
from pion_wire.messages import part_from_message
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import types_pb2


class DamagedChunk(ChecksumMismatch):
    """A chunk arrived damaged: ask for it again."""


class Announced(NamedTuple):
    """What will come: the same after every break."""

    prefix: PrefixInfo
    layout: Layout
    """The tensors as they are streamed."""
    rows: tuple[int, int]
    token_ids: bytes
    parts: tuple[PartInfo, ...]
    shortened_by: str
    """The kind of part that cut the rows; what resumes names them, and does not hear it again."""

    @property
    def row_count(self) -> int:
        """Rows of each tensor."""
        return self.rows[1] - self.rows[0]

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows and parts."""
        parts = sum(part.size_bytes for part in self.parts)
        return self.row_count * self.layout.row_bytes + parts

    def check(self, bytes_max: int, keep: Container[str]) -> list[Taken]:
        """Refuses what contradicts itself, or is more than the caller wants; allocates nothing.

        Args:
            bytes_max: the most that the caller wants, as it comes and as it gets it.
            keep: codecs whose rows the caller wants as they are stored.

        Returns:
            How the caller gets the tensors.

        Raises:
            BadAnswer: it cannot be.
            InvalidRequest: decoded, a row would be too long.
        """
        begin, end = self.rows
        if not begin <= end <= limits.TOKENS_MAX:
            raise BadAnswer(f"rows {begin} to {end} were announced")
        if self.token_ids and len(self.token_ids) != 4 * end:
            raise BadAnswer(f"{len(self.token_ids)} bytes of token ids for {end} rows")
        if len(self.parts) > limits.PARTS_MAX:
            raise BadAnswer(f"{len(self.parts)} parts were announced")
        tensors = [taken(tensor, keep) for tensor in self.layout.tensors]
        decoded = sum(tensor.given.row_bytes - tensor.stored.row_bytes for tensor in tensors)
        total = self.total_bytes + max(0, decoded * self.row_count)
        if total > bytes_max:
            raise BadAnswer(f"{total} bytes were announced; fetch_bytes_max is {bytes_max}")
        return tensors


class _Piece(NamedTuple):
    """An array of a tensor, or a part, in the order of the stream."""

    tensor: Taken | None
    """None: a part."""
    number: int
    """Among the tensors, or among the parts."""
    array: int
    """Among the arrays of the tensor; 0 for a part."""
    size: int
    row_bytes: int
    """1 for a part."""
    first_row: int
    """What the first row counts as; 0 for a part."""


class Reception:
    """A fetch in progress, over as many streams as it takes."""

    def __init__(
        self,
        *,
        bytes_max: int,
        as_mlx: bool = False,
        keep: Container[str] = (),
        progress: Progress | None = None,
    ) -> None:
        self._bytes_max = bytes_max
        self._keep = keep
        self._as_mlx = as_mlx
        self._progress = progress
        self._missed = False
        self._headed = False
        self.restart()

    def restart(self) -> None:
        """Forgets everything: the rows have changed between two streams."""
        self.announced: Announced | None = None
        self.done_bytes = 0
        self._tensors: list[Taken] = []
        self._pieces: list[_Piece] = []
        self._parts: list[np.ndarray] = []
        self._destination: Destination | None = None
        self._room = np.empty(0, np.uint8)
        self._filled = 0

    def ended(self) -> bool:
        """Whether everything that was announced is here, or nothing was announced: a miss."""
        return self._missed or (self.announced is not None and not self._pieces)

    def begin_stream(self, request: pb.PrefixStoreFetchRequest) -> None:
        """Makes a request one for what is still missing. A header comes first again."""
        self._headed = False
        if self.announced is None:
            return
        request.generation = self.announced.prefix.generation
        # A live prefix may have got more rows meanwhile, under the same generation.
        request.rows.begin, request.rows.end = self.announced.rows
        piece = self._pieces[0]
        if piece.tensor is None:
            request.resume_part = piece.number + 1
            request.resume_part_offset_bytes = self._filled
        else:
            request.resume_tensor_index = piece.number
            request.resume_array_index = piece.array
            request.resume_row = self._next_row(piece)

    def take(self, message: bytes) -> None:
        """Takes the next message of a stream.

        Raises:
            BadAnswer: it is not the next one, or contradicts what was announced.
            DamagedChunk: its bytes are not those that were sent.
            InvalidRequest: decoded, a row would be too long.
        """
        try:
            parsed = parse_message(message)
        except FrameError as error:
            raise BadAnswer(str(error)) from error
        if isinstance(parsed, HeaderBytes):
            self._take_header(parsed)
        elif not self._headed or not self._pieces:
            raise BadAnswer("a chunk came that was not announced")
        else:
            self._take_chunk(self._pieces[0], parsed)

    def layers(self) -> Layers:
        """Returns the tensors by slot."""
        assert self.ended()
        assert self.announced is not None
        arrays = self._destination.arrays if self._destination is not None else {}
        row_count = self.announced.row_count
        return layers_of(self.layout, row_count, arrays, as_mlx=self._as_mlx)

    @property
    def layout(self) -> Layout:
        """The tensors as the caller gets them."""
        return Layout(tuple(tensor.given for tensor in self._tensors))

    def parts(self) -> tuple[Part, ...]:
        """Returns the parts."""
        assert self.ended()
        assert self.announced is not None
        return parts_of(self.announced.parts, [data.data for data in self._parts])

    # Headers

    def _take_header(self, header: HeaderBytes) -> None:
        if self._headed:
            raise BadAnswer("a second header came")
        self._headed = True
        message = pb.PrefixStoreFetchHeader()
        try:
            message.ParseFromString(bytes(header.message))
        except DecodeError as error:
            raise BadAnswer("the header is not a message") from error
        if not message.found:
            self.restart()  # dropped between two streams, or never there
            self._missed = True
            return
        announced = announced_by(message)
        if self.announced is None:
            self._begin(announced, message.total_bytes)
        elif not _same(announced, self.announced):
            raise BadAnswer("a resumed stream announces something else")

    def _begin(self, announced: Announced, total_bytes: int) -> None:
        tensors = announced.check(self._bytes_max, self._keep)
        if total_bytes != announced.total_bytes:
            raise BadAnswer(
                f"{total_bytes} bytes were announced, the layout makes {announced.total_bytes}"
            )
        self.announced, self._tensors = announced, tensors
        kind = MlxDestination if self._as_mlx else NumpyDestination
        self._destination = kind(tensors, announced.row_count)
        self._parts = [np.empty(part.size_bytes, np.uint8) for part in announced.parts]
        first_row, row_count = announced.rows[0], announced.row_count
        self._pieces = [
            _Piece(tensor, index, array, row_count * layout.row_bytes, layout.row_bytes, first_row)
            for index, tensor in enumerate(tensors)
            for array, layout in enumerate(tensor.stored.arrays)
        ]
        self._pieces += [
            _Piece(None, index, 0, part.size_bytes, 1, 0)
            for index, part in enumerate(announced.parts)
        ]
        self._open_piece()

    # Chunks

    def _take_chunk(self, piece: _Piece, chunk: RowChunk | PartChunk) -> None:
        size = len(chunk.data)
        if not 0 < size <= piece.size - self._filled:
            raise BadAnswer(f"{size} bytes came where {piece.size - self._filled} are missing")
        count, rest = divmod(size, piece.row_bytes)
        if piece.tensor is None:
            want: tuple[Any, ...] = ("part", piece.number, self._filled)
        else:
            want = ("rows", piece.number, piece.array, self._next_row(piece), count)
        got = ("rows", *chunk[:4]) if isinstance(chunk, RowChunk) else ("part", *chunk[:2])
        if got != want or rest:
            raise BadAnswer(f"{size} bytes of {got} came where {want} was to be next")
        if crc32c(chunk.data) != chunk.crc32c:
            raise DamagedChunk("a chunk arrived with another checksum than it was sent with")
        self._room[self._filled : self._filled + size] = np.frombuffer(chunk.data, np.uint8)
        self._filled += size
        self.done_bytes += size
        if self._filled == piece.size:
            self._close_piece()
        if self._progress is not None:
            assert self.announced is not None
            self._progress(self.done_bytes, self.announced.total_bytes)

    def _next_row(self, piece: _Piece) -> int:
        return piece.first_row + self._filled // piece.row_bytes

    def _open_piece(self) -> None:
        """Makes room for the next piece; those without bytes have no chunks."""
        assert self._destination is not None
        while self._pieces:
            piece = self._pieces[0]
            self._filled = 0
            self._room = (
                self._parts[piece.number]
                if piece.tensor is None
                else self._destination.room(piece.tensor, piece.array)
            )
            if piece.size:
                return
            self._finish(piece)

    def _close_piece(self) -> None:
        self._finish(self._pieces[0])
        self._open_piece()

    def _finish(self, piece: _Piece) -> None:
        if piece.tensor is not None and piece.array == len(piece.tensor.stored.arrays) - 1:
            assert self._destination is not None
            self._destination.finish(piece.tensor)
        del self._pieces[0]


class ScatteredRows:
    """Rows of one tensor, in the order asked, as they arrive."""

    def __init__(self, row_count: int) -> None:
        self._row_count = row_count
        self._tensor: TensorLayout | None = None
        self._data = np.empty(0, np.uint8)
        self._filled = 0
        self._nothing = False

    def take(self, message: pb.PrefixStoreReadRowsResponse) -> None:
        """Takes the next message; raises as `Reception.take` does."""
        if message.reason:
            self._nothing = True
        elif self._tensor is None:
            self._begin(message)
        else:
            self._fill(message)

    def array(self) -> np.ndarray | None:
        """Returns (kv_heads, rows, head_dim); None if none of the rows exists.

        Raises:
            BadAnswer: some have not come.
        """
        if self._nothing:
            return None
        if self._tensor is None or self._filled < len(self._data):
            raise BadAnswer("fewer rows came than were asked for")
        tensor = self._tensor
        values = self._data.view(tensor.dtype.numpy)
        return values.reshape(self._row_count, tensor.heads, tensor.head_dim).transpose(1, 0, 2)

    def _begin(self, message: pb.PrefixStoreReadRowsResponse) -> None:
        (tensor,) = answers.layout(types_pb2.Layout(tensors=[message.tensor])).tensors
        if tensor.codec != "raw":
            raise BadAnswer(f"{tensor.name} comes as {tensor.codec}, which nobody asked for")
        self._tensor = tensor
        self._data = np.empty(self._row_count * tensor.row_bytes, np.uint8)

    def _fill(self, message: pb.PrefixStoreReadRowsResponse) -> None:
        size = len(message.data)
        if size > len(self._data) - self._filled:
            raise BadAnswer("more rows came than were asked for")
        if crc32c(message.data) != message.crc32c:
            raise DamagedChunk("rows arrived with another checksum than they were sent with")
        self._data[self._filled : self._filled + size] = np.frombuffer(message.data, np.uint8)
        self._filled += size


def announced_by(message: pb.PrefixStoreFetchHeader) -> Announced:
    """Returns what a header announces, not yet checked."""
    return Announced(
        prefix=answers.prefix_info(message.prefix),
        layout=answers.layout(message.layout),
        rows=(message.rows.begin, message.rows.end),
        token_ids=message.token_ids,
        parts=tuple(part_from_message(part) for part in message.parts),
        shortened_by=message.shortened_by,
    )


def parts_of(infos: Sequence[PartInfo], memory: Sequence[memoryview]) -> tuple[Part, ...]:
    """Returns parts with their bytes."""
    return tuple(
        Part(info.kind, info.slot, info.boundary_tokens, data, info.description)
        for info, data in zip(infos, memory, strict=True)
    )


def _same(again: Announced, before: Announced) -> bool:
    mine, theirs = again.prefix, before.prefix
    same = (mine.generation, mine.model) == (theirs.generation, theirs.model)
    return same and again[1:-1] == before[1:-1]
