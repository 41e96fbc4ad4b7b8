"""Chunks framed by hand are exactly what generated code writes, and are read as it reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from pion_wire.framing import (
    FrameError,
    HeaderBytes,
    PartChunk,
    RowChunk,
    frame_bytes,
    frame_header,
    frame_part,
    frame_rows,
    parse_bytes_message,
    parse_message,
)
from pion_wire.v1 import attend_pb2, ssm_state_pb2, types_pb2
from pion_wire.v1 import prefix_store_pb2 as pb

VECTORS = Path(__file__).parents[1] / "vectors" / "framing.json"

index = st.integers(0, 2**32 - 1) | st.integers(0, 3)
place = st.integers(0, 2**64 - 1) | st.integers(0, 300)
data = st.binary(max_size=300)


@given(index, index, place, index, data)
@example(0, 0, 0, 0, b"")
@example(0, 0, 0, 1, bytes(4))
def test_row_chunks_are_those_of_generated_code(
    tensor: int, array: int, first: int, count: int, content: bytes
) -> None:
    framed = frame_rows(tensor, array, first, count, content)
    chunk = types_pb2.RowChunk(
        tensor_index=tensor, array_index=array, first_row=first, row_count=count,
        crc32c=crc32c(content), data=content,
    )  # fmt: skip
    assert framed == pb.PrefixStoreFetchResponse(rows=chunk).SerializeToString()
    assert framed == pb.PrefixStoreStoreRequest(rows=chunk).SerializeToString()
    assert pb.PrefixStoreStoreRequest.FromString(framed).rows == chunk
    parsed = parse_message(framed)
    assert parsed == RowChunk(tensor, array, first, count, crc32c(content), content)
    assert isinstance(parsed, RowChunk)
    assert isinstance(parsed.data, memoryview), "a copy was made"


@given(index, place, data)
@example(0, 0, b"")
def test_chunks_of_bytes_are_those_of_generated_code(
    part: int, offset: int, content: bytes
) -> None:
    chunk = types_pb2.PartChunk(
        part_index=part, offset_bytes=offset, crc32c=crc32c(content), data=content
    )
    parsed = PartChunk(part, offset, crc32c(content), content)

    beside_rows = frame_part(part, offset, content)
    assert beside_rows == pb.PrefixStoreFetchResponse(part=chunk).SerializeToString()
    assert beside_rows == pb.PrefixStoreStoreRequest(part=chunk).SerializeToString()
    assert parse_message(beside_rows) == parsed

    alone = frame_bytes(part, offset, content)
    assert alone == ssm_state_pb2.SSMStateFetchResponse(bytes=chunk).SerializeToString()
    assert alone == attend_pb2.AttendStoreRequest(bytes=chunk).SerializeToString()
    assert parse_bytes_message(alone) == parsed


@given(st.text(max_size=40), st.binary(max_size=200))
def test_headers_are_those_of_generated_code(name: str, ids: bytes) -> None:
    header = pb.PrefixStoreStoreHeader(namespace=name, token_ids=ids)
    framed = frame_header(header.SerializeToString())
    assert framed == pb.PrefixStoreStoreRequest(header=header).SerializeToString()
    parsed = parse_message(framed)
    assert isinstance(parsed, HeaderBytes)
    assert pb.PrefixStoreStoreHeader.FromString(bytes(parsed.message)) == header


@given(st.permutations(range(6)), st.binary(min_size=1, max_size=20))
def test_fields_may_come_in_any_order_and_unknown_ones_between_them(
    order: list[int], content: bytes
) -> None:
    fields = [
        b"\x08\x03", b"\x18\x07", b"\x20\x01", b"\x2d" + crc32c(content).to_bytes(4, "little"),
        b"\x7a" + bytes([len(content)]) + content,
        b"\xa0\x06\x09\xa9\x06" + bytes(8),  # fields 100 and 101, of a later release
    ]  # fmt: skip
    body = b"".join(fields[i] for i in order)
    message = b"\x12" + bytes([len(body)]) + body + b"\xc2\x3e\x01x"
    chunk = pb.PrefixStoreStoreRequest.FromString(message).rows
    assert (chunk.tensor_index, chunk.first_row, chunk.data) == (3, 7, content)
    assert parse_message(message) == RowChunk(3, 0, 7, 1, crc32c(content), content)


def generated(message: bytes) -> Any:
    """Returns what generated code reads: the header's bytes, a chunk, or None."""
    try:
        parsed = pb.PrefixStoreStoreRequest.FromString(message)
    except DecodeError:
        return None
    kind = parsed.WhichOneof("message")
    if kind == "rows":
        rows = parsed.rows
        return RowChunk(
            rows.tensor_index, rows.array_index, rows.first_row, rows.row_count, rows.crc32c, rows.data
        )  # fmt: skip
    if kind == "part":
        part = parsed.part
        return PartChunk(part.part_index, part.offset_bytes, part.crc32c, part.data)
    return kind


pieces = st.sampled_from(
    [b"\x0a", b"\x12", b"\x1a", b"\x08", b"\x10", b"\x18", b"\x20", b"\x2d", b"\x7a", b"\x00", b"\x01",
     b"\x02", b"\x04", b"\xff", b"\x80", b"\x1d", b"\x0b", b"\x0c", b"\x07", b"\x09"]
)  # fmt: skip


@given(st.lists(pieces, max_size=24).map(b"".join) | st.binary(max_size=40))
@example(b"\x02\x00")  # field 0
@example(b"\x12\x02\x08\xff")  # a number that never ends
@example(b"\x12\x0b\x08" + b"\xff" * 9 + b"\x7f")  # a number of 70 bits
@example(b"\x12\x00\x1a\x00")  # two things
def test_no_bytes_are_taken_for_a_chunk_that_generated_code_does_not_see(message: bytes) -> None:
    try:
        parsed = parse_message(message)
    except FrameError:
        return
    if isinstance(parsed, HeaderBytes):
        return  # generated code reads the header itself, too, and that may be wrong
    expected = generated(message)
    numbers = [value for value in parsed if isinstance(value, int)]
    if max(numbers) < 1 << 32:  # generated code cuts off what does not fit
        assert parsed == expected


@pytest.mark.parametrize("cut", range(1, 24))
def test_no_beginning_of_a_message_is_a_message(cut: int) -> None:
    message = frame_rows(3, 1, 300, 2, b"0123456789")
    assert len(message) > 23
    with pytest.raises(FrameError):
        parse_message(message[:cut])


@pytest.mark.parametrize("message", [b"", b"\xc2\x3e\x01x"])
def test_a_message_that_holds_nothing_is_refused(message: bytes) -> None:
    with pytest.raises(FrameError, match="holds nothing"):
        parse_message(message)


def test_the_shared_vectors_hold() -> None:
    vectors = json.loads(VECTORS.read_text())
    kinds = set()
    for vector in vectors["messages"]:
        kinds.add(vector["kind"])
        content = bytes.fromhex(vector["data"])
        message = bytes.fromhex(vector["message"])
        if vector["kind"] == "rows":
            numbers = [vector[n] for n in ("tensor_index", "array_index", "first_row", "row_count")]
            assert frame_rows(*numbers, content) == message
            assert parse_message(message) == RowChunk(*numbers, vector["crc32c"], content)
        elif vector["kind"] == "part":
            numbers = [vector[n] for n in ("part_index", "offset_bytes")]
            assert frame_part(*numbers, content) == message
            assert parse_message(message) == PartChunk(*numbers, vector["crc32c"], content)
        else:
            assert frame_header(content) == message
            assert parse_message(message) == HeaderBytes(memoryview(content))
        assert pb.PrefixStoreStoreRequest.FromString(message).SerializeToString() == message
    assert kinds == {"rows", "part", "header"}
