"""Arriving chunks, held against what was declared: nothing out of order, left out, or damaged.

Knows layouts and chunks; not where the bytes go.
"""

from collections.abc import Sequence
from typing import NamedTuple

from crc32c import crc32c

from pion_grpc.errors import ChecksumMismatch, InvalidRequest
from pion_wire import limits
from pion_wire.framing import PartChunk, RowChunk
from pion_wire.layout import Layout


class _Expected(NamedTuple):
    """An array of which rows will come."""

    tensor_index: int
    array_index: int
    row_bytes: int
    first_row: int
    end_row: int


class RowOrder:
    """Holds arriving chunks against what was declared: by tensor, array and row, nothing left out."""

    def __init__(self, layout: Layout, first_row: int, end_row: int) -> None:
        self._arrays = [
            _Expected(tensor_index, array_index, array.row_bytes, first_row, end_row)
            for tensor_index, tensor in enumerate(layout.tensors)
            for array_index, array in enumerate(tensor.arrays)
            if array.row_bytes and end_row > first_row
        ]
        self._current = 0
        self._row = first_row

    @property
    def complete(self) -> bool:
        """Whether every declared row has come."""
        return self._current == len(self._arrays)

    def accept(self, chunk: RowChunk) -> None:
        """Checks the next chunk.

        Raises:
            InvalidRequest: it is not the next one, or has another size than its rows.
            ChecksumMismatch: its data is not what was sent.
        """
        if self.complete:
            raise InvalidRequest("rows", "more rows than were declared")
        array = self._arrays[self._current]
        got = chunk.tensor_index, chunk.array_index, chunk.first_row
        want = array.tensor_index, array.array_index, self._row
        if got != want:
            raise InvalidRequest(
                "rows",
                f"chunk of tensor, array, row {got} came out of order: {want} was to be next",
            )
        if not 1 <= chunk.row_count <= array.end_row - self._row:
            raise InvalidRequest(
                "rows.row_count",
                f"{chunk.row_count} rows from {self._row} on go beyond {array.end_row}",
            )
        _check_data("rows", chunk.data, chunk.row_count * array.row_bytes, chunk.crc32c)
        self._row += chunk.row_count
        if self._row == array.end_row:
            self._current += 1
            self._row = array.first_row


class PartOrder:
    """Holds arriving bytes of parts against their declared sizes: part by part, nothing left out."""

    def __init__(self, sizes: Sequence[int], field: str = "part") -> None:
        """Takes the bytes of each part, and what a request calls the chunks that bring them."""
        self._sizes = sizes
        self._field = field
        self._current = 0
        self._offset = 0
        self._skip_empty()

    @property
    def complete(self) -> bool:
        """Whether every declared byte has come."""
        return self._current == len(self._sizes)

    def accept(self, chunk: PartChunk) -> None:
        """Checks the next chunk; raises as `RowOrder.accept` does."""
        if self.complete:
            raise InvalidRequest(self._field, "more bytes than were declared")
        if (chunk.part_index, chunk.offset_bytes) != (self._current, self._offset):
            raise InvalidRequest(
                self._field,
                f"byte {chunk.offset_bytes} of part {chunk.part_index} came out of order: byte "
                f"{self._offset} of part {self._current} was to be next",
            )
        size, left = len(chunk.data), self._sizes[self._current] - self._offset
        if not 1 <= size <= left:
            raise InvalidRequest(f"{self._field}.data", f"{size} bytes where {left} are left")
        _check_data(self._field, chunk.data, size, chunk.crc32c)
        self._offset += size
        if size == left:
            self._current += 1
            self._offset = 0
            self._skip_empty()

    def _skip_empty(self) -> None:
        while not self.complete and not self._sizes[self._current]:
            self._current += 1


def _check_data(field: str, data: bytes | memoryview, size: int, checksum: int) -> None:
    """Checks the data of one chunk; raises as `RowOrder.accept` does."""
    if len(data) != size:
        raise InvalidRequest(f"{field}.data", f"{len(data)} bytes where {size} belong")
    if size > limits.CHUNK_BYTES_MAX:
        raise InvalidRequest(
            f"{field}.data",
            f"{size} bytes exceed a chunk's {limits.CHUNK_BYTES_MAX}",
            limit=limits.CHUNK_BYTES_MAX,
        )
    if crc32c(data) != checksum:
        raise ChecksumMismatch(
            f"the {field} do not have the checksum they were sent with", field=field
        )
