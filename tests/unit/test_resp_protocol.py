"""The request parser and the reply encoder, as tables of bytes run in both directions.

Every table of requests is fed whole and one byte at a time; what we encode is read by hiredis, and
what redis-py packs is read by us, so that neither side can agree with its own mistakes.
"""

import math
import tracemalloc
from collections.abc import Callable

import hiredis
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_grpc.resp.protocol import (
    FIRST_STEP_BYTES,
    NOT_AN_INTEGER,
    SMALL_BYTES_MAX,
    STAGING_BYTES,
    UNAUTHENTICATED_LIMITS,
    Destination,
    ProtocolError,
    Request,
    RequestLimits,
    RequestParser,
    parse_int,
    split_inline,
)
from pion_grpc.resp.reply import (
    CRLF,
    JOINED_BYTES_MAX,
    NIL_ARRAY,
    OK,
    Error,
    Reply,
    ReplyError,
    Simple,
    Verbatim,
    Version,
    array_header,
    bulk_header,
    encode,
    join_small,
)
from tests.memory import growth_bytes

WHOLE = 1 << 30
EVERY_BYTE = bytes(range(256))
HUGE = b"*2\r\n$3\r\nSET\r\n$536870912\r\n"  # announces 512 MiB


def pack(*arguments: bytes) -> bytes:
    head = b"*%d\r\n" % len(arguments)
    return head + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in arguments)


def packed_by_redis_py(words: list[bytes]) -> bytes:
    return b"".join(redis.Connection().pack_command(*words))  # type: ignore[no-untyped-call]


def feed(parser: RequestParser, stream: bytes, step: int = WHOLE) -> list[Request]:
    """The requests that come out of a stream received in pieces of at most `step` bytes."""
    requests: list[Request] = []
    receive(parser, stream, step, requests)
    return requests


def receive(parser: RequestParser, stream: bytes, step: int, requests: list[Request]) -> None:
    """What a server does: read, then take every complete request, until there is a complaint."""
    view = memoryview(stream)
    while view:
        room = parser.get_buffer(65536)
        taken = min(len(room), len(view), step)
        room[:taken] = view[:taken]
        parser.buffer_updated(taken)
        view = view[taken:]
        while (request := parser.next_request()) is not None:
            requests.append(request)


def outcome(stream: bytes, step: int, limits: RequestLimits) -> tuple[list[Request], str]:
    """The requests that came out, and the complaint that ended them, if one did."""
    requests: list[Request] = []
    try:
        receive(RequestParser(limits), stream, step, requests)
    except ProtocolError as error:
        return requests, str(error)
    return requests, ""


# --- requests -----------------------------------------------------------------------------------

ARRAYS: list[tuple[bytes, list[list[bytes]]]] = [
    (b"", []),
    (b"*1\r\n$4\r\nPING\r\n", [[b"PING"]]),
    (b"*2\r\n$4\r\nECHO\r\n$0\r\n\r\n", [[b"ECHO", b""]]),
    (b"*2\r\n$4\r\nECHO\r\n$4\r\n\r\n\r\n\r\n", [[b"ECHO", b"\r\n\r\n"]]),
    (b"*2\r\n$4\r\nECHO\r\n$256\r\n" + EVERY_BYTE + b"\r\n", [[b"ECHO", EVERY_BYTE]]),
    (pack(b"ECHO", b"a" * 1023), [[b"ECHO", b"a" * 1023]]),
    (pack(b"ECHO", b"a" * 1024), [[b"ECHO", b"a" * 1024]]),
    (pack(b"MSET", *[b"%d" % n for n in range(3000)]), [[b"MSET", *[b"%d" % n for n in range(3000)]]]),
    (pack(b"A") + pack(b"B", b"1") + pack(b"C"), [[b"A"], [b"B", b"1"], [b"C"]]),
]  # fmt: skip

SKIPPED: list[tuple[bytes, list[list[bytes]]]] = [
    (b"*0\r\n" + pack(b"PING"), [[b"PING"]]),
    (b"*-1\r\n" + pack(b"PING"), [[b"PING"]]),
    (b"\r\n\n   \r\nPING\r\n", [[b"PING"]]),
    (b"PING\n" + pack(b"PING") + b"ping\r\n", [[b"PING"], [b"PING"], [b"ping"]]),
    (b"*2\r\n$3\r\nGET\r\n$3\r\nk", []),
    (b"PIN", []),
]


@pytest.mark.parametrize("step", [1, 7, WHOLE])
@pytest.mark.parametrize(("stream", "expected"), ARRAYS + SKIPPED)
def test_no_request_is_lost_changed_or_invented(
    stream: bytes, expected: list[list[bytes]], step: int
) -> None:
    assert outcome(stream, step, RequestLimits()) == (expected, "")


@pytest.mark.parametrize(("stream", "expected"), ARRAYS)
def test_what_redis_py_packs_is_not_read_otherwise(
    stream: bytes, expected: list[list[bytes]]
) -> None:
    assert b"".join(packed_by_redis_py(words) for words in expected) == stream


@pytest.mark.parametrize("value", range(256))
def test_no_byte_value_is_mangled(value: int) -> None:
    word = bytes([value])
    assert feed(RequestParser(), pack(word, word * 300)) == [[word, word * 300]]
    inline = b'ECHO "\\x%02x"\r\n' % value
    assert feed(RequestParser(), inline) == [[b"ECHO", word]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", []),
        (b" \t\v\f\r", []),
        (b"GET key", [b"GET", b"key"]),
        (b"  GET\t\t key \r", [b"GET", b"key"]),
        (b'SET k ""', [b"SET", b"k", b""]),
        (b"SET k ''", [b"SET", b"k", b""]),
        (b'SET k "a b"', [b"SET", b"k", b"a b"]),
        (b"SET k 'a \"b\"'", [b"SET", b"k", b'a "b"']),
        (b'pre"fix" x', [b"prefix", b"x"]),
        (rb'"\n\r\t\b\a\"\\\q\x41\xff\xZZ"', [b'\n\r\t\b\a"\\qA\xffxZZ']),
        (rb"'it\'s \n \\x'", [rb"it's \n \\x"]),
        (rb"a\nb", [rb"a\nb"]),
        (b"a\vb 'c'\vd", [b"a\vb", b"c", b"d"]),
        (b"nul\0 \xff\xfe", [b"nul\0", b"\xff\xfe"]),
    ],
)
def test_inline_words_are_not_split_unlike_redis(line: bytes, words: list[bytes]) -> None:
    assert split_inline(line) == words


@pytest.mark.parametrize("line", [b'"', b"'", b'a "b', b"a 'b", b'"a"b', b"'a'b", b'"a""b"', b"'a\\'",
                                  b'"a\\"', b'"\\', b'a\vb"c'])  # fmt: skip
def test_unbalanced_quotes_are_not_guessed_at(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="ERR Protocol error: unbalanced quotes"):
        split_inline(line)


# --- large payloads -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL_BYTES_MAX - 1, SMALL_BYTES_MAX])
def test_small_argument_is_not_a_view_of_a_buffer_that_will_change(size: int) -> None:
    [[_, payload]] = feed(RequestParser(), pack(b"ECHO", b"x" * size))
    assert payload == b"x" * size
    assert isinstance(payload, bytes)


@pytest.mark.parametrize("step", [4093, WHOLE])
@pytest.mark.parametrize(
    "size", [SMALL_BYTES_MAX + 1, STAGING_BYTES, FIRST_STEP_BYTES - 2, FIRST_STEP_BYTES - 1,
             FIRST_STEP_BYTES, FIRST_STEP_BYTES + 1, 3_000_001]
)  # fmt: skip
def test_large_argument_loses_no_byte_where_buffers_change(size: int, step: int) -> None:
    payload = (EVERY_BYTE * (size // 256 + 1))[:size]
    stream = pack(b"A") + pack(b"SET", b"k", payload, b"after") + pack(b"B") + b"C\r\n"
    first, request, *rest = feed(RequestParser(), stream, step)
    assert first == [b"A"]
    assert request[2] == payload
    assert isinstance(request[2], memoryview)
    assert request[2].readonly
    assert request[3:] == [b"after"]
    assert rest == [[b"B"], [b"C"]]


def test_large_payload_is_not_copied_out_of_a_shared_buffer() -> None:
    """Once its first step is full, all that is missing is one room in the destination itself."""
    size = 8 << 20
    parser = RequestParser()
    assert feed(parser, b"*1\r\n$%d\r\n" % size + bytes(FIRST_STEP_BYTES)) == []
    room = parser.get_buffer(65536)
    assert len(room) == size + len(CRLF) - FIRST_STEP_BYTES
    room[:-2] = b"\x07" * (len(room) - 2)
    room[-2:] = CRLF
    parser.buffer_updated(len(room))
    request = parser.next_request()
    assert request is not None
    [payload] = request
    assert payload[-1] == 7
    room[-3] = 9
    assert payload[-1] == 9  # the same memory


def announced_payloads() -> list[RequestParser]:
    parsers = [RequestParser() for _ in range(256)]
    for parser in parsers:
        assert feed(parser, HUGE + b"some bytes") == []
    return parsers


def test_announced_payload_costs_nothing_before_it_comes() -> None:
    assert growth_bytes(announced_payloads) < 32 << 20  # of 128 GiB


def test_memory_is_not_far_ahead_of_what_arrived() -> None:
    tracemalloc.start()
    try:
        destination = Destination(512 << 20)
        assert tracemalloc.get_traced_memory()[1] < FIRST_STEP_BYTES + (64 << 10)
        destination.received(FIRST_STEP_BYTES - 1)
        destination.room()
        assert tracemalloc.get_traced_memory()[1] < FIRST_STEP_BYTES + (64 << 10)
    finally:
        tracemalloc.stop()


def destination_after_its_first_step() -> Destination:
    destination = Destination(512 << 20)
    destination.received(FIRST_STEP_BYTES)
    destination.room()
    return destination


def test_room_for_all_costs_nothing_before_it_is_filled() -> None:
    assert growth_bytes(destination_after_its_first_step) < 16 << 20  # of 512


def test_want_of_memory_is_a_refusal_not_a_crash() -> None:
    limits = RequestLimits(bulk_bytes_max=1 << 62, request_bytes_max=1 << 63)
    parser = RequestParser(limits)
    with pytest.raises(ProtocolError, match="not enough memory for this request"):
        feed(parser, b"*1\r\n$%d\r\n" % (1 << 61) + bytes(FIRST_STEP_BYTES))
    assert parser.unfinished_bytes == 0


# --- protocol errors ----------------------------------------------------------------------------

INVALID_COUNT = "invalid multibulk length"
INVALID_BULK = "invalid bulk length"
ERRORS: list[tuple[bytes, str]] = [
    (b"*x\r\n", INVALID_COUNT),
    (b"*\r\n", INVALID_COUNT),
    (b"*+1\r\n", INVALID_COUNT),
    (b"*01\r\n", INVALID_COUNT),
    (b"* 1\r\n", INVALID_COUNT),
    (b"*1 \r\n", INVALID_COUNT),
    (b"*-0\r\n", INVALID_COUNT),
    (b"*1_0\r\n", INVALID_COUNT),
    (b"*1\n$4\r\n", INVALID_COUNT),
    (b"*1048577\r\n", INVALID_COUNT),
    (b"*9223372036854775808\r\n", INVALID_COUNT),
    (b"*" + b"9" * 5000 + b"\r\n", INVALID_COUNT),
    (b"*" + b"1" * (1 << 17), "too big mbulk count string"),
    (b"*1\r\nPING\r\n", "expected '$', got 'P'"),
    (b"*1\r\n\r\n", "expected '$', got '\\x0d'"),
    (b"*1\r\n*1\r\n", "expected '$', got '*'"),
    (b"*2\r\n$1\r\na\r\n:1\r\n", "expected '$', got ':'"),
    (b"*1\r\n\xff", "expected '$', got '\\xff'"),
    (b"*1\r\n$x\r\n", INVALID_BULK),
    (b"*1\r\n$\r\n", INVALID_BULK),
    (b"*1\r\n$-1\r\n", INVALID_BULK),
    (b"*1\r\n$+4\r\nPING\r\n", INVALID_BULK),
    (b"*1\r\n$04\r\nPING\r\n", INVALID_BULK),
    (b"*1\r\n$4 \r\nPING\r\n", INVALID_BULK),
    (b"*1\r\n$4\nPING\r\n", INVALID_BULK),
    (b"*1\r\n$536870913\r\n", INVALID_BULK),
    (b"*1\r\n$99999999999999999999\r\n", INVALID_BULK),
    (b"*1\r\n$" + b"1" * (1 << 17), "too big bulk count string"),
    (b"*1\r\n$4\r\nPINGPONG\r\n", "bulk does not end in CRLF"),
    (b"*1\r\n$4\r\nPING\n\r", "bulk does not end in CRLF"),
    (b"*1\r\n$2000\r\n" + b"x" * 2002, "bulk does not end in CRLF"),
    (b"*1\r\n$70000\r\n" + b"x" * 70002, "bulk does not end in CRLF"),
    (b"x" * ((64 << 10) + 1), "too big inline request"),
    (b"x" * ((64 << 10) + 1) + b"\r\n", "too big inline request"),
    (b'SET k "v\r\n', "unbalanced quotes in request"),
    (b"POST / HTTP/1.1\r\n", "HTTP is not spoken here"),
    (b"Host: localhost\r\n", "HTTP is not spoken here"),
]


@pytest.mark.parametrize("step", [1, WHOLE])
@pytest.mark.parametrize(("stream", "complaint"), ERRORS)
def test_bad_frame_is_not_taken_for_a_request(stream: bytes, complaint: str, step: int) -> None:
    """The requests before it still come out, whatever is behind it never does."""
    requests, text = outcome(pack(b"PING") + stream + pack(b"EVIL"), step, RequestLimits())
    assert requests == [[b"PING"]]
    assert text == f"ERR Protocol error: {complaint}"


def test_broken_stream_does_not_recover() -> None:
    parser = RequestParser()
    with pytest.raises(ProtocolError):
        feed(parser, pack(b"SET", bytes(100_000))[:-1] + b"?")
    for _ in range(3):
        with pytest.raises(ProtocolError, match="bulk does not end in CRLF"):
            feed(parser, pack(b"PING"))
    assert parser.unfinished_bytes == 0


TIGHT = RequestLimits(
    bulk_bytes_max=10, array_count_max=3, inline_bytes_max=20, request_bytes_max=48
)


@pytest.mark.parametrize("step", [1, WHOLE])
@pytest.mark.parametrize(
    ("at_the_limit", "beyond", "complaint"),
    [
        (pack(b"a" * 10), pack(b"a" * 11), INVALID_BULK),
        (pack(b"a", b"b", b"c"), pack(b"a", b"b", b"c", b"d"), INVALID_COUNT),
        (b"a" * 20 + b"\n", b"a" * 21 + b"\n", "too big inline request"),
        (b"*" + b"0" * 18 + b"1\r\n", b"*" + b"0" * 19 + b"1\r\n", "too big mbulk count string"),
        (pack(*[b"a" * 9] * 2, b"a" * 8), pack(*[b"a" * 9] * 3), "too big request"),
    ],
)
def test_limits_are_not_off_by_one(
    at_the_limit: bytes, beyond: bytes, complaint: str, step: int
) -> None:
    assert complaint not in outcome(at_the_limit * 3, step, TIGHT)[1]
    assert outcome(beyond, step, TIGHT) == ([], f"ERR Protocol error: {complaint}")


@pytest.mark.parametrize("step", [1, WHOLE])
def test_count_string_of_exactly_the_limit_is_not_called_too_big(step: int) -> None:
    stream = b"*" + b"1" * (64 * 1024 - 1) + b"\r\n"
    assert outcome(stream, step, RequestLimits())[1].endswith(INVALID_COUNT)
    stream = b"*" + b"1" * (64 * 1024) + b"\r\n"
    assert outcome(stream, step, RequestLimits())[1].endswith("too big mbulk count string")


def test_stranger_cannot_announce_more_than_a_login() -> None:
    parser = RequestParser(UNAUTHENTICATED_LIMITS)
    login = pack(b"HELLO", b"3", b"AUTH", b"user", b"password", b"SETNAME", b"name")
    assert len(feed(parser, login)) == 1
    parser.limits = RequestLimits()
    assert len(feed(parser, pack(b"SET", b"k", bytes(20_000)))) == 1
    parser.limits = UNAUTHENTICATED_LIMITS
    with pytest.raises(ProtocolError, match=INVALID_BULK):
        feed(parser, pack(b"SET", b"k", bytes(20_000)))


@pytest.mark.parametrize("begun", [b"*", b"*1\r\n", b"*1\r\n$3", b"*1\r\n$3\r\n", b"*1\r\n$3\r\nab",
                                   b"P", HUGE, HUGE + bytes(200_000)])  # fmt: skip
def test_request_in_progress_is_not_taken_for_idleness(begun: bytes) -> None:
    parser = RequestParser()
    assert parser.unfinished_bytes == 0
    feed(parser, pack(b"PING") + begun)
    assert parser.unfinished_bytes == len(begun)


def test_finished_requests_leave_nothing_behind() -> None:
    parser = RequestParser()
    for size in (0, 5, 2000, 70_000, 2_000_000):
        feed(parser, pack(b"SET", bytes(size)))
        assert parser.unfinished_bytes == 0


# --- properties ---------------------------------------------------------------------------------

FRAGMENTS = st.one_of(
    st.sampled_from([b"\r\n", b"\n", b"\r", b"*", b"$", b"*1\r\n", b"*2\r\n", b"$0\r\n\r\n", b"$5\r\n",
                     b"$3\r\nGET\r\n", b"-1", b"0", b"7", b'"', b"'", b"\\", b"\\x4", b" ", b"PING\r\n",
                     b"$1073741824\r\n", b"*1048576\r\n"]),
    st.binary(max_size=12),
    st.integers(-(2**70), 2**70).map(lambda number: b"%d\r\n" % number),
    st.lists(st.binary(max_size=20), min_size=1, max_size=4).map(lambda words: pack(*words)),
)  # fmt: skip
STREAMS = st.lists(FRAGMENTS, max_size=12).map(b"".join)


@settings(max_examples=500, deadline=None)
@given(STREAMS, st.integers(2, 40), st.sampled_from([RequestLimits(), TIGHT]))
def test_how_the_bytes_were_cut_never_shows(
    stream: bytes, step: int, limits: RequestLimits
) -> None:
    """Also: nothing but ProtocolError is ever raised, whatever comes."""
    whole = outcome(stream, WHOLE, limits)
    assert outcome(stream, 1, limits) == whole
    assert outcome(stream, step, limits) == whole


@settings(max_examples=200, deadline=None)
@given(STREAMS)
def test_parser_never_holds_more_than_it_was_given(stream: bytes) -> None:
    parser = RequestParser()
    try:
        feed(parser, stream)
    except ProtocolError:
        assert parser.unfinished_bytes == 0
    assert parser.unfinished_bytes <= len(stream)


WORDS = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 140_000).map(lambda size: (EVERY_BYTE * (size // 256 + 1))[:size]),
)
REQUESTS = st.lists(WORDS, max_size=5).map(lambda words: [b"SET", *words])


@settings(max_examples=100, deadline=None)
@given(st.lists(REQUESTS, max_size=4), st.integers(1, 200_000))
def test_packed_requests_never_come_out_changed(requests: list[list[bytes]], step: int) -> None:
    stream = b"".join(packed_by_redis_py(words) for words in requests)
    assert outcome(stream, max(step, len(stream) // 1000), RequestLimits()) == (requests, "")


# --- integers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"0", b"7", b"-1", b"1048576", b"9223372036854775807",
                                  b"-9223372036854775808"])  # fmt: skip
def test_integer_is_not_refused(text: bytes) -> None:
    assert parse_int(text) == int(text)
    assert parse_int(memoryview(text)) == int(text)


@pytest.mark.parametrize("text", [b"", b"-", b"+1", b"-0", b"00", b"01", b"-01", b" 1", b"1 ",
                                  b"1\n", b"1.0", b"1e3", b"0x1", b"1_0", b"\xd9\xa1", b"1\0", b"abc",
                                  b"9" * 70_000, b"9223372036854775808",
                                  b"-9223372036854775809"])  # fmt: skip
def test_what_redis_does_not_call_an_integer_is_not_one(text: bytes) -> None:
    with pytest.raises(ReplyError) as refusal:
        parse_int(text)
    assert str(refusal.value) == NOT_AN_INTEGER
    assert not isinstance(refusal.value, ProtocolError)  # the connection stays


def test_range_of_an_integer_is_not_off_by_one() -> None:
    assert [parse_int(b"%d" % n, 1, 3, "ERR kv_dim out of range") for n in (1, 2, 3)] == [1, 2, 3]
    for number in (b"0", b"4", b"x"):
        with pytest.raises(ReplyError, match="ERR kv_dim out of range"):
            parse_int(number, 1, 3, "ERR kv_dim out of range")


# --- replies ------------------------------------------------------------------------------------

REPLIES: list[tuple[Reply, bytes, bytes]] = [
    (OK, b"+OK\r\n", b"+OK\r\n"),
    (Simple("two\r\n-ERR forged"), b"+two  -ERR forged\r\n", b"+two  -ERR forged\r\n"),
    (Error("ERR no\r\n+OK"), b"-ERR no  +OK\r\n", b"-ERR no  +OK\r\n"),
    (Error("ERR '" + b"\xff\x00".decode(errors="surrogateescape") + "'"), b"-ERR '\xff\x00'\r\n",
     b"-ERR '\xff\x00'\r\n"),
    (7, b":7\r\n", b":7\r\n"),
    (-(2**63), b":-9223372036854775808\r\n", b":-9223372036854775808\r\n"),
    (b"", b"$0\r\n\r\n", b"$0\r\n\r\n"),
    (EVERY_BYTE, b"$256\r\n%b\r\n" % EVERY_BYTE, b"$256\r\n%b\r\n" % EVERY_BYTE),
    ("é", b"$2\r\n\xc3\xa9\r\n", b"$2\r\n\xc3\xa9\r\n"),
    (memoryview(b"abcdefgh").cast("f"), b"$8\r\nabcdefgh\r\n", b"$8\r\nabcdefgh\r\n"),
    (memoryview(b"").cast("f"), b"$0\r\n\r\n", b"$0\r\n\r\n"),
    (None, b"$-1\r\n", b"_\r\n"),
    (NIL_ARRAY, b"*-1\r\n", b"_\r\n"),
    ([], b"*0\r\n", b"*0\r\n"),
    ((b"a", None, [1]), b"*3\r\n$1\r\na\r\n$-1\r\n*1\r\n:1\r\n", b"*3\r\n$1\r\na\r\n_\r\n*1\r\n:1\r\n"),
    ([OK, Error("ERR x")], b"*2\r\n+OK\r\n-ERR x\r\n", b"*2\r\n+OK\r\n-ERR x\r\n"),
    ({}, b"*0\r\n", b"%0\r\n"),
    ({"proto": 3, "role": b"master"}, b"*4\r\n$5\r\nproto\r\n:3\r\n$4\r\nrole\r\n$6\r\nmaster\r\n",
     b"%2\r\n$5\r\nproto\r\n:3\r\n$4\r\nrole\r\n$6\r\nmaster\r\n"),
    ({b"a"}, b"*1\r\n$1\r\na\r\n", b"~1\r\n$1\r\na\r\n"),
    (frozenset(), b"*0\r\n", b"~0\r\n"),
    (1.0, b"$1\r\n1\r\n", b",1\r\n"),
    (-0.1, b"$4\r\n-0.1\r\n", b",-0.1\r\n"),
    (1e300, b"$6\r\n1e+300\r\n", b",1e+300\r\n"),
    (math.inf, b"$3\r\ninf\r\n", b",inf\r\n"),
    (-math.inf, b"$4\r\n-inf\r\n", b",-inf\r\n"),
    (-math.nan, b"$3\r\nnan\r\n", b",nan\r\n"),
    (True, b":1\r\n", b"#t\r\n"),
    (False, b":0\r\n", b"#f\r\n"),
    (Verbatim("a:1\r\n"), b"$5\r\na:1\r\n\r\n", b"=9\r\ntxt:a:1\r\n\r\n"),
]  # fmt: skip


@pytest.mark.parametrize(("reply", "resp2", "resp3"), REPLIES)
def test_reply_has_no_other_form(reply: Reply, resp2: bytes, resp3: bytes) -> None:
    assert b"".join(encode(reply, 2)) == resp2
    assert b"".join(encode(reply, 3)) == resp3


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("reply", [row[0] for row in REPLIES])
def test_one_reply_never_reads_as_two_or_as_none(reply: Reply, version: Version) -> None:
    """A client that miscounts replies gives one caller the answer of another."""
    nothing = object()
    reader = hiredis.Reader(notEnoughData=nothing)
    reader.feed(b"".join(encode(reply, version)))
    assert reader.gets() is not nothing
    assert reader.gets() is nothing


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.binary(max_size=30)
)
VALUES = st.recursive(
    SCALARS,
    lambda values: st.one_of(
        st.lists(values, max_size=4), st.dictionaries(st.binary(max_size=8), values, max_size=4)
    ),
    max_leaves=20,
)


def same(value: object, read: object) -> bool:
    """Equality under which nan equals itself and 1, 1.0 and True are three values."""
    return repr(value) == repr(read)


@settings(max_examples=200, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=3))
def test_resp3_values_are_never_read_as_others(values: list[Reply]) -> None:
    reader = hiredis.Reader()
    reader.feed(b"".join(piece for value in values for piece in encode(value, 3)))
    for value in values:
        assert same(value, reader.gets())
    assert not reader.has_data()


def as_resp2(value: Reply) -> object:
    """What is left of a value where the protocol has no booleans, doubles and maps."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return repr(value).removesuffix(".0").encode()
    if isinstance(value, list):
        return [as_resp2(item) for item in value]
    if isinstance(value, dict):
        return [as_resp2(word) for pair in value.items() for word in pair]
    return value


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_resp2_fallbacks_are_never_read_as_others(value: Reply) -> None:
    reader = hiredis.Reader()
    reader.feed(b"".join(encode(value, 2)))
    assert same(as_resp2(value), reader.gets())


@pytest.mark.parametrize("wrap", [bytes, memoryview])
def test_large_payload_is_not_copied_into_a_reply(
    wrap: Callable[[bytes], bytes | memoryview],
) -> None:
    large = bytes(JOINED_BYTES_MAX + 1)
    small = bytes(JOINED_BYTES_MAX)
    buffers = encode([b"a", wrap(large), None, wrap(small), wrap(large)], 3)
    assert [len(buffer) for buffer in buffers[1::2]] == [len(large), len(large)]
    for buffer in buffers[1::2]:
        assert (buffer.obj if isinstance(buffer, memoryview) else buffer) is large
    assert len(buffers) == 5  # what lies between is one buffer each
    assert buffers[0] == b"*5\r\n$1\r\na\r\n$65537\r\n"
    assert buffers[4] == CRLF


def test_reply_written_in_chunks_is_not_another_reply() -> None:
    chunks = [bytes([n]) * 1000 for n in range(5)]
    whole = encode([b"".join(chunks), None], 2)
    by_hand = [array_header(2), bulk_header(5000), *chunks, CRLF, *encode(None, 2)]
    assert join_small(by_hand) == whole


def test_value_without_a_form_is_not_guessed_at() -> None:
    with pytest.raises(AssertionError, match="bytearray"):
        encode([bytearray(b"x")], 2)
