"""Chunk messages of streams, framed and parsed by hand.

What gRPC in Python costs per byte is copies. Streams have one of two shapes: `header` 1, `rows` 2,
`part` 3 (PrefixStore), or `header` 1, `bytes` 2 (SSMState, Attend). Every chunk has its `data` last, so
a message is a few bytes of varints followed by the data, and the data of a received message is a view
of its tail: one copy less on each side than with generated code, which takes and returns owned `bytes`.
The bytes are exactly those that generated code of any language writes and reads; a test holds the two
against each other.

Knows the protobuf encoding of chunks, and nothing of what is in them.
"""

from typing import NamedTuple

from crc32c import crc32c

_HEADER, _ROWS, _PART = 1, 2, 3
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DATA = 15
_DATA_TAG = bytes([_DATA << 3 | _BYTES])


class FrameError(ValueError):
    """The bytes are not a message of a chunk stream."""


class RowChunk(NamedTuple):
    """Rows `first_row` to `first_row + row_count` of one array of one tensor, as stored."""

    tensor_index: int
    array_index: int
    first_row: int
    row_count: int
    crc32c: int
    data: bytes | memoryview


class PartChunk(NamedTuple):
    """Bytes of one part from `offset_bytes` on."""

    part_index: int
    offset_bytes: int
    crc32c: int
    data: bytes | memoryview


class HeaderBytes(NamedTuple):
    """The header of a stream, still serialised."""

    message: memoryview


def frame_header(header: bytes) -> bytes:
    """Wraps a serialised header into a stream message."""
    return b"\x0a" + _varint(len(header)) + header


def frame_rows(
    tensor_index: int, array_index: int, first_row: int, row_count: int, data: bytes | memoryview
) -> bytes:
    """Returns a stream message with rows and the CRC-32C of `data`."""
    fields = (
        _number(b"\x08", tensor_index) + _number(b"\x10", array_index)
        + _number(b"\x18", first_row) + _number(b"\x20", row_count) + _checksum(b"\x2d", data)
    )  # fmt: skip
    return _frame(b"\x12", fields, data)


def frame_part(part_index: int, offset_bytes: int, data: bytes | memoryview) -> bytes:
    """Returns a stream message with bytes of a part and their CRC-32C."""
    return _framed_part(b"\x1a", part_index, offset_bytes, data)


def frame_bytes(part_index: int, offset_bytes: int, data: bytes | memoryview) -> bytes:
    """Returns a message of a stream that has bytes only (SSMState, Attend), with their CRC-32C."""
    return _framed_part(b"\x12", part_index, offset_bytes, data)


def parse_message(message: bytes) -> HeaderBytes | RowChunk | PartChunk:
    """Takes a stream message apart; `data` is a view into it, its checksum not yet checked.

    Raises:
        FrameError: these bytes are not such a message, or hold nothing.
    """
    number, value = _only_field(memoryview(message), _PART)
    if number == _HEADER:
        return HeaderBytes(value)
    if number == _ROWS:
        numbers, data = _chunk_fields(value, 5)
        return RowChunk(numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], data)
    return _part_chunk(value)


def parse_bytes_message(message: bytes) -> HeaderBytes | PartChunk:
    """Takes a message of a stream apart that has bytes only; otherwise as `parse_message`."""
    number, value = _only_field(memoryview(message), _ROWS)
    return HeaderBytes(value) if number == _HEADER else _part_chunk(value)


def _only_field(view: memoryview, last: int) -> tuple[int, memoryview]:
    """Returns number and bytes of the one field that a message has, of those up to `last`."""
    found: tuple[int, memoryview] | None = None
    for number, wire_type, value in _fields(view):
        if number > last:
            continue
        if found is not None:
            raise FrameError("a stream message holds two things")
        if wire_type != _BYTES or not isinstance(value, memoryview):
            raise FrameError(f"field {number} of a stream message has wire type {wire_type}")
        found = number, value
    if found is None:
        raise FrameError("a stream message holds nothing")
    return found


def _part_chunk(value: memoryview) -> PartChunk:
    numbers, data = _chunk_fields(value, 3)
    return PartChunk(numbers[1], numbers[2], numbers[3], data)


def _framed_part(tag: bytes, part_index: int, offset_bytes: int, data: bytes | memoryview) -> bytes:
    fields = _number(b"\x08", part_index) + _number(b"\x10", offset_bytes)
    return _frame(tag, fields + _checksum(b"\x1d", data), data)


def _frame(tag: bytes, fields: bytes, data: bytes | memoryview) -> bytes:
    size = len(data)
    prefix = fields + _DATA_TAG + _varint(size) if size else fields
    return b"".join((tag, _varint(len(prefix) + size), prefix, data))


def _number(tag: bytes, value: int) -> bytes:
    """Returns a field; zeros are left out, as generated code leaves them out."""
    return tag + _varint(value) if value else b""


def _checksum(tag: bytes, data: bytes | memoryview) -> bytes:
    checksum = crc32c(data)
    return tag + checksum.to_bytes(4, "little") if checksum else b""


def _chunk_fields(view: memoryview, checksum: int) -> tuple[list[int], memoryview]:
    """Returns the numbers of a chunk by field, and its data; `checksum` is the last number."""
    numbers = [0] * 6
    data = view[:0]
    for number, wire_type, value in _fields(view):
        if isinstance(value, memoryview):
            if number == _DATA:
                data = value
        elif number <= checksum and (wire_type == _FIXED32) == (number == checksum):
            numbers[number] = value
    return numbers, data


def _fields(view: memoryview) -> "list[tuple[int, int, int | memoryview]]":
    fields: list[tuple[int, int, int | memoryview]] = []
    position, end = 0, len(view)
    while position < end:
        tag, position = _read_varint(view, position)
        wire_type = tag & 7
        if not 8 <= tag < 1 << 32:
            raise FrameError(f"field {tag >> 3} does not exist")
        if wire_type == _VARINT:
            number, position = _read_varint(view, position)
            fields.append((tag >> 3, wire_type, number))
            continue
        if wire_type == _BYTES:
            size, position = _read_varint(view, position)
        elif wire_type == _FIXED32:
            size = 4
        elif wire_type == _FIXED64:
            size = 8
        else:
            raise FrameError(f"wire type {wire_type} does not exist")
        if size > end - position:
            raise FrameError("a stream message ends inside a field")
        value = view[position : position + size]
        position += size
        if wire_type == _BYTES:
            fields.append((tag >> 3, wire_type, value))
        else:
            fields.append((tag >> 3, wire_type, int.from_bytes(value, "little")))
    return fields


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        if position >= len(view) or shift > 63:
            raise FrameError("a stream message has a broken number")
        byte = view[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            if result >> 64:
                raise FrameError("a stream message has a broken number")
            return result, position
        shift += 7


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
