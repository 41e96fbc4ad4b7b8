"""Frames and query bodies of the binary lane, built here by hand and there by the encoder."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_grpc.resp.binary_lane import (
    BODY_BYTES_MAX,
    Command,
    Frame,
    FrameParser,
    FusedQuery,
    MalformedBodyError,
    Status,
    encode_frame,
    encode_fused_query,
    parse_fused_query,
)
from pion_grpc.resp.protocol import FIRST_STEP_BYTES, ProtocolError
from tests.memory import growth_bytes

WHOLE = 1 << 30
EVERY_BYTE = bytes(range(256))


def feed(parser: FrameParser, stream: bytes, step: int = WHOLE) -> list[tuple[int, bytes]]:
    """The frames that come out of a stream received in pieces of at most `step` bytes."""
    frames: list[tuple[int, bytes]] = []
    receive(parser, stream, step, frames)
    return frames


def receive(parser: FrameParser, stream: bytes, step: int, frames: list[tuple[int, bytes]]) -> None:
    """What a server does: read, then take every complete frame, until there is a complaint."""
    view = memoryview(stream)
    while view:
        room = parser.get_buffer(65536)
        taken = min(len(room), len(view), step)
        room[:taken] = view[:taken]
        parser.buffer_updated(taken)
        view = view[taken:]
        while (frame := parser.next_frame()) is not None:
            frames.append((frame.code, bytes(frame.body)))


# --- frames -------------------------------------------------------------------------------------

FRAMES: list[tuple[int, bytes, bytes]] = [
    (Command.PING, b"", b"\x5e\xca\xff\x00\x00\x00\x00"),
    (Command.AUTH, b"secret", b"\x5e\xca\x37\x06\x00\x00\x00secret"),
    (Command.ATTEND_PREFIX_QUERY_FUSED, EVERY_BYTE, b"\x5e\xca\x24\x00\x01\x00\x00" + EVERY_BYTE),
    (0x99, b"unknown", b"\x5e\xca\x99\x07\x00\x00\x00unknown"),
    (Status.OK, b"\0" * 70_000, b"\x5e\xca\x00\x70\x11\x01\x00" + b"\0" * 70_000),
    (Status.MISS, b"", b"\x5e\xca\x01\x00\x00\x00\x00"),
    (Status.ERROR, b"", b"\x5e\xca\x02\x00\x00\x00\x00"),
    (Status.COLDMISS, b"", b"\x5e\xca\x03\x00\x00\x00\x00"),
]


@pytest.mark.parametrize(("code", "body", "wire"), FRAMES)
def test_frame_has_no_other_form(code: int, body: bytes, wire: bytes) -> None:
    assert b"".join(encode_frame(code, [body])) == wire
    assert b"".join(encode_frame(code, [body[:3], memoryview(body)[3:]])) == wire


@pytest.mark.parametrize("step", [1, 5, WHOLE])
def test_no_frame_is_lost_changed_or_invented(step: int) -> None:
    stream = b"".join(wire for _, _, wire in FRAMES)
    assert feed(FrameParser(), stream, step) == [(code, body) for code, body, _ in FRAMES]


@pytest.mark.parametrize(
    "size", [FIRST_STEP_BYTES - 1, FIRST_STEP_BYTES, FIRST_STEP_BYTES + 1, 3_000_001]
)
def test_large_body_loses_no_byte_where_buffers_change(size: int) -> None:
    body = (EVERY_BYTE * (size // 256 + 1))[:size]
    stream = b"".join(encode_frame(0x24, [body]) + encode_frame(Command.PING))
    assert feed(FrameParser(), stream, 65_521) == [(0x24, body), (Command.PING, b"")]


def test_tensor_is_not_measured_in_items() -> None:
    floats = memoryview(bytes(80_000)).cast("f")
    [header, payload] = encode_frame(Status.OK, [floats])
    assert header == struct.pack("<HBI", 0xCA5E, 0, 80_000)
    assert len(payload) == 80_000
    assert isinstance(payload, memoryview)  # not copied


def test_received_body_cannot_be_written_to() -> None:
    parser = FrameParser()
    wire = b"".join(encode_frame(0x24, [b"abc"]))
    for index in range(len(wire)):
        parser.get_buffer(65536)[:1] = wire[index : index + 1]
        parser.buffer_updated(1)
        if (frame := parser.next_frame()) is not None:
            assert frame.body.readonly
    assert parser.next_frame() is None
    assert frame == Frame(0x24, memoryview(b"abc"))


@pytest.mark.parametrize("step", [1, WHOLE])
@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        (b"*1\r\n$4\r\nPING\r\n", "begins with 0x312a"),
        (b"\xca\x5e\xff\0\0\0\0", "begins with 0x5eca"),
        (b"\x5e\xca\x24\xff\xff\xff\xff", "4294967295 bytes"),
        (struct.pack("<HBI", 0xCA5E, 0x24, BODY_BYTES_MAX + 1), f"over {BODY_BYTES_MAX}"),
    ],
)
def test_broken_stream_is_not_read_on(stream: bytes, complaint: str, step: int) -> None:
    parser = FrameParser()
    ping = b"".join(encode_frame(Command.PING))
    assert feed(parser, ping, step) == [(Command.PING, b"")]
    with pytest.raises(ProtocolError, match=complaint):
        feed(parser, stream, step)
    for _ in range(3):
        with pytest.raises(ProtocolError, match=complaint):
            feed(parser, ping)
    assert parser.unfinished_bytes == 0


def test_limit_of_a_body_is_not_off_by_one() -> None:
    at_the_limit = b"".join(encode_frame(0x24, [b"x" * 10]))
    assert len(feed(FrameParser(body_bytes_max=10), at_the_limit)) == 1
    with pytest.raises(ProtocolError, match="11 bytes, over 10"):
        feed(FrameParser(body_bytes_max=10), b"".join(encode_frame(0x24, [b"x" * 11])))


def announced_bodies() -> list[FrameParser]:
    parsers = [FrameParser() for _ in range(256)]
    header = struct.pack("<HBI", 0xCA5E, 0x24, BODY_BYTES_MAX)
    for parser in parsers:
        assert feed(parser, header + b"some bytes") == []
        assert parser.unfinished_bytes == len(header) + 10
    return parsers


def test_announced_body_costs_nothing_before_it_comes() -> None:
    assert growth_bytes(announced_bodies) < 32 << 20  # of 16 GiB


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=20),
            st.tuples(st.integers(0, 255), st.binary(max_size=20)).map(
                lambda frame: b"".join(encode_frame(frame[0], [frame[1]]))
            ),
        ),
        max_size=6,
    ).map(b"".join),
    st.integers(2, 30),
)
def test_how_the_bytes_were_cut_never_shows(stream: bytes, step: int) -> None:
    """Also: nothing but ProtocolError is ever raised, whatever comes."""
    outcomes = []
    for size in (WHOLE, 1, step):
        parser = FrameParser(body_bytes_max=1000)
        frames: list[tuple[int, bytes]] = []
        complaint = ""
        try:
            receive(parser, stream, size, frames)
        except ProtocolError as error:
            complaint = str(error)
        outcomes.append((frames, complaint, parser.unfinished_bytes))
    assert outcomes[0] == outcomes[1] == outcomes[2]


# --- the fused query ----------------------------------------------------------------------------


def body_by_hand(
    sid: bytes = b"chat_attn", suffix_rows: int = 2, window: int | None = None
) -> tuple[FusedQuery, bytes]:
    query_heads, head_dim, kv_heads, query_count = 4, 8, 2, 3
    q = bytes(range(96)) * 4
    k_suffix = b"K" * (kv_heads * suffix_rows * head_dim * 4)
    v_suffix = b"V" * (kv_heads * suffix_rows * head_dim * 4)
    head_map = b"\0\0\1\1"
    body = struct.pack("<H", len(sid)) + sid
    body += struct.pack("<HHHH", 35, query_heads, head_dim, kv_heads)
    body += struct.pack("<II", query_count, suffix_rows)
    body += q + k_suffix + v_suffix + head_map
    if window is not None:
        body += struct.pack("<I", window)
    query = FusedQuery(
        sid=sid,
        layer=35,
        query_heads=query_heads,
        head_dim=head_dim,
        kv_heads=kv_heads,
        query_count=query_count,
        suffix_rows=suffix_rows,
        q=memoryview(q),
        k_suffix=memoryview(k_suffix),
        v_suffix=memoryview(v_suffix),
        head_map=memoryview(head_map),
        window=window,
    )
    return query, body


BODIES = [
    body_by_hand(),
    body_by_hand(sid=b""),
    body_by_hand(sid=EVERY_BYTE),
    body_by_hand(suffix_rows=0),
    body_by_hand(window=0),
    body_by_hand(window=512),
    body_by_hand(window=2**32 - 1),
]


@pytest.mark.parametrize(("query", "body"), BODIES)
def test_no_field_of_a_query_is_taken_for_another(query: FusedQuery, body: bytes) -> None:
    assert parse_fused_query(memoryview(body)) == query
    assert b"".join(encode_fused_query(query)) == body


@pytest.mark.parametrize(("query", "body"), BODIES)
def test_body_cut_anywhere_is_not_a_shorter_query(query: FusedQuery, body: bytes) -> None:
    for length in range(len(body)):
        if query.window is not None and length == len(body) - 4:
            continue  # the same query without a window
        with pytest.raises(MalformedBodyError):
            parse_fused_query(memoryview(body)[:length])


@pytest.mark.parametrize("extra", [1, 2, 3, 5, 8])
def test_bytes_behind_a_query_are_not_ignored(extra: int) -> None:
    _, body = body_by_hand()
    with pytest.raises(MalformedBodyError):
        parse_fused_query(memoryview(body + bytes(extra)))


def test_shape_beyond_the_body_is_not_allocated() -> None:
    """A shape whose tensors would take 2^90 bytes is found out by its length alone."""
    body = struct.pack("<HHHHHII", 0, 0, 65535, 65535, 65535, 2**32 - 1, 2**32 - 1)
    with pytest.raises(MalformedBodyError, match="too few"):
        parse_fused_query(memoryview(body))


def test_tensors_are_not_copied_out_of_the_body() -> None:
    _, body = body_by_hand()
    query = parse_fused_query(memoryview(body))
    for field in (query.q, query.k_suffix, query.v_suffix, query.head_map):
        assert field.obj is body


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120))
def test_arbitrary_bytes_are_a_query_only_to_the_last_byte(body: bytes) -> None:
    try:
        query = parse_fused_query(memoryview(body))
    except MalformedBodyError:
        return
    assert b"".join(encode_fused_query(query)) == body
