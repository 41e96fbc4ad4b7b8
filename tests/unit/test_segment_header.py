"""A segment's header has one form: what differs from it by a bit, or by spelling, is refused."""

import json
import struct
from dataclasses import replace
from typing import Any

import pytest
from crc32c import crc32c

from pion_wire.layout import DType, Layout, PartInfo, Side, TensorLayout
from pion_wire.segment import (
    SegmentError,
    SegmentLayout,
    header_length,
    parse_header,
)

LAYOUT = Layout(
    (
        TensorLayout(0, Side.K, 2, 32, DType.BF16),
        TensorLayout(0, Side.V, 2, 32, DType.BF16, "int8"),
    )
)
SEGMENT = SegmentLayout(
    layout=LAYOUT,
    row_counts=(5, 5),
    token_count=7,
    model_id='mlx1:"ü"',
    base=2,
    parent="root",
    parts=(PartInfo("state", 3, 7, 11, "ArraysCache"),),
    namespace="child | one",
)


assert SEGMENT.header.endswith(b" "), "some of these tests need padding"


def text_of(segment: SegmentLayout) -> bytes:
    return segment.header[8:]


def forged(change: Any) -> bytes:
    """A header in canonical spelling, with a right checksum, of a table that `change` edited."""
    table = json.loads(text_of(SEGMENT))
    change(table)
    table["__metadata__"]["header_crc32c"] = "00000000"
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return text.replace(b"00000000", f"{crc32c(text):08x}".encode(), 1)


def test_nothing_is_lost_between_writing_and_reading():
    header = parse_header(text_of(SEGMENT))
    assert header == SEGMENT
    assert header.data_offset == len(SEGMENT.header)
    assert parse_header(text_of(replace(SEGMENT, namespace=""))).namespace == ""


def test_the_forgery_of_these_tests_is_one_without_a_change():
    assert forged(lambda table: None) == text_of(SEGMENT)


def test_no_flipped_bit_of_a_header_is_read():
    header = SEGMENT.header
    file = header + bytes(4096)
    for index in range(8 * len(header)):
        flipped = bytearray(file)
        flipped[index // 8] ^= 1 << index % 8
        with pytest.raises(SegmentError):
            read(bytes(flipped))
    assert read(file) == SEGMENT


def read(file: bytes) -> SegmentLayout:
    length = header_length(file[:8])
    if len(file) < 8 + length:
        raise SegmentError("the file ends before")
    return parse_header(file[8 : 8 + length])


def test_no_two_neighbouring_bytes_can_change_places_unnoticed():
    text = text_of(SEGMENT)
    for index in range(len(text) - 1):
        swapped = bytearray(text)
        swapped[index : index + 2] = reversed(text[index : index + 2])
        if bytes(swapped) != text:
            with pytest.raises(SegmentError):
                parse_header(bytes(swapped))


@pytest.mark.parametrize(
    "spelling",
    [
        lambda text: text.rstrip() + b" " * 16,
        lambda text: text.rstrip(),
        lambda text: text.replace(b'"base":"2"', b'"base":"02"'),
        lambda text: text.replace(b'"base":"2"', b'"base": "2"'),
        lambda text: text.replace(b"\\u00fc", "ü".encode()),
        lambda text: text.replace(b"[5,2,32]", b"[5,2.0,32]"),
    ],
)
def test_no_other_spelling_of_the_same_header_is_read(spelling):
    text = text_of(SEGMENT)
    assert spelling(text) != text
    with pytest.raises(SegmentError):
        parse_header(spelling(text))


def _shape(name: str, value: Any) -> Any:
    def change(table: dict[str, Any]) -> None:
        table[name]["shape"][0] = value

    return change


def _metadata(key: str, value: Any) -> Any:
    def change(table: dict[str, Any]) -> None:
        table["__metadata__"][key] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _shape("k.0", -5),
        _shape("k.0", 1 << 60),
        _shape("k.0", 5.0),
        _shape("k.0", True),
        _shape("k.0", "5"),
        _shape("token_ids", -1),
        _shape("token_ids", 1_000_001),
        _metadata("model_id", 7),
        _metadata("parent", None),
        _metadata("namespace", ["a"]),
        _metadata("base", "-2"),
        _metadata("base", 2),
        _metadata("base", "two"),
        _metadata("format", "pion-segment/2"),
        _metadata("layout", "[[0.0,\"k\",2,32,\"BF16\",\"raw\"]]"),
        _metadata("layout", "[[0,\"k\",true,32,\"BF16\",\"raw\"]]"),
        _metadata("layout", "{}"),
        _metadata("parts", '[["state",3,7,-11,""]]'),
        _metadata("parts", '[["state",3,7,11]]'),
        _metadata("parts", '[[null,3,7,11,""]]'),
        _metadata("parts", '[["state",3,7,1e3,""]]'),
        _metadata("parts", "[" * 100_000),
        lambda table: table.pop("crc32c"),
        lambda table: table["k.0"].update(data_offsets=[0]),
        lambda table: table.update({"k.9": table["k.0"]}),
        lambda table: table.pop("__metadata__") and table.update(__metadata__={}),
    ],
)  # fmt: skip
def test_a_forged_header_raises_nothing_but_a_segment_error(change):
    with pytest.raises(SegmentError):
        parse_header(forged(change))


@pytest.mark.parametrize("text", [b"", b"{}", b"null", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_header_raises_nothing_but_a_segment_error(text):
    with pytest.raises(SegmentError):
        parse_header(text)


def test_an_absurd_length_is_refused_before_it_is_read():
    with pytest.raises(SegmentError):
        header_length(struct.pack("<Q", 1 << 60))
    with pytest.raises(SegmentError):
        header_length(b"1234567")
