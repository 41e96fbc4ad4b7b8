"""The binary lane as a server's: what frames are answered with, and frames that never end."""

import contextlib
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_grpc.core.access import Access
from tests.conftest import ServerProcess
from tests.resp.conftest import Resp
from tests.resp.lane import AUTH, COLDMISS, ERROR, FUSED, MISS, OK, PING, Lane, framed, fused_body
from tests.resp.wire import Wire
from tests.server.test_attend import normal, pair
from tests.server.wire import eventually

HEADS, DIM = 2, 16
MAP = bytes(range(HEADS))
ROOM = 1 << 26
PING_FRAME = framed(PING)


def body(sid: bytes = b"s", q: bytes = b"", suffix: bytes = b"", **shape: int) -> bytes:
    """The body of a query of one row over two heads, or of another shape."""
    heads, dim = shape.get("heads", HEADS), shape.get("dim", DIM)
    numbers = (heads, shape.get("queries", 1), dim)
    return fused_body(
        sid,
        shape.get("layer", 0),
        numbers,
        (shape.get("kv_heads", HEADS), shape.get("suffix_rows", 0)),
        (q or bytes(4 * int(np.prod(numbers)))) + suffix + bytes(shape.get("map_bytes", heads)),
    )


@pytest.fixture(scope="module")
def resp() -> Iterator[Resp]:
    """One server with an entry `s`; frames stall quickly on it."""
    with tempfile.TemporaryDirectory(prefix="pion-", dir="/tmp") as path:
        resp = Resp(
            Path(path) / "data", resident_bytes=ROOM, listen="127.0.0.1:0", lane_stall_s=0.2
        )
        put(resp.connect(), pair("lane"))
        yield resp
        resp.stop()


def put(wire: Wire, rows: tuple[np.ndarray, np.ndarray], sid: str = "s") -> None:
    k, v = rows
    assert wire("ATTEND.PREFIX.STORE", sid, 0, *k.shape, k.tobytes(), v.tobytes()) == "OK"


@pytest.fixture
def connect(resp: Resp) -> Iterator[Callable[[], Lane]]:
    opened: list[Lane] = []

    def lane() -> Lane:
        opened.append(Lane(resp.address))
        return opened[-1]

    yield lane
    for one in opened:
        one.close()


@pytest.fixture
def lane(connect: Callable[[], Lane]) -> Lane:
    return connect()


def test_frames_are_answered_in_order(lane: Lane) -> None:
    frames = [framed(PING), framed(FUSED, body()), framed(0x99), framed(PING)] * 20
    lane.socket.sendall(b"".join(frames))
    assert [lane.read().status for _ in frames] == [OK, OK, MISS, OK] * 20


def test_a_ping_with_something_in_it_is_none(lane: Lane) -> None:
    assert lane(PING) == (OK, b"")
    assert lane(PING, b"x") == (MISS, b"")


@pytest.mark.parametrize("code", [0x00, 0x01, 0x02, 0x10, 0x20, 0x23, 0x25, 0x31, 0x36, 0xFE])
def test_what_the_lane_does_not_know_is_a_miss(lane: Lane, code: int) -> None:
    assert lane(code, b"anything") == (MISS, b"")
    assert lane(PING) == (OK, b"")


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (body(), OK),
        (body(suffix_rows=1, suffix=bytes(2 * 4 * HEADS * DIM)), OK),
        (body(heads=4), OK),
        (b"", MISS),
        (b"\xff\xff", MISS),
        (body()[:-1], MISS),
        (body() + b"x", MISS),
        (body(map_bytes=1), MISS),
        (body(suffix_rows=1), MISS),
        (body(suffix_rows=(1 << 32) - 1), MISS),
        (body(sid=b"unknown"), ERROR),
        (body(sid=b""), ERROR),
        (body(sid=b"\xff"), ERROR),
        (body(layer=1), ERROR),
        (body(layer=65_535), ERROR),
        (body(heads=0, map_bytes=0), ERROR),
        (body(heads=3), ERROR),
        (body(kv_heads=0), ERROR),
        (body(kv_heads=1), ERROR),
        (body(dim=0), ERROR),
        (body(dim=15), ERROR),
        (body(queries=0), ERROR),
        (body()[:-1] + b"\2", ERROR),  # the head map names a third head
    ],
)
def test_a_body_that_makes_no_sense_is_answered_and_changes_nothing(
    resp: Resp, lane: Lane, asked: bytes, status: int
) -> None:
    assert resp.attend is not None
    before = resp.attend.telemetry()
    assert lane(FUSED, asked).status == status
    assert resp.attend.telemetry() == before
    assert lane(FUSED, body()).status == OK


@pytest.mark.parametrize(
    "sent", [b"*1\r\n$4\r\nPING\r\n", b"\xca\x5e\xff\0\0\0\0", b"\x5e\xca\x24\xff\xff\xff\xff"]
)
def test_what_is_no_frame_closes_the_connection_without_a_word(lane: Lane, sent: bytes) -> None:
    assert lane(PING) == (OK, b"")
    lane.socket.sendall(sent[:7])
    assert lane.is_closed()


@pytest.mark.parametrize("size", [1, 6, 7, 8, 100_000])
def test_a_frame_that_stalls_is_not_waited_for(lane: Lane, size: int) -> None:
    """A client that sends once, and less than it announced, would wait for a minute."""
    frame = framed(FUSED, body(queries=1 << 16))
    lane.socket.sendall(frame[:size])
    assert lane.read() == (ERROR, b"")
    assert lane.is_closed()


def test_a_frame_that_trickles_is_not_waited_for(lane: Lane) -> None:
    """One whose every byte comes in time, and whose end would in days."""
    frame = framed(FUSED, body(queries=1 << 16))
    lane.socket.settimeout(0.05)
    answer = b""
    for index in range(100):
        lane.socket.sendall(frame[index : index + 1])
        with contextlib.suppress(TimeoutError):
            answer = lane.socket.recv(7)
            break
    assert answer == framed(ERROR)


def test_a_large_frame_in_many_pieces_is_not_taken_for_one_that_trickles(lane: Lane) -> None:
    frame = framed(FUSED, body(queries=1 << 12))
    for first in range(0, len(frame), 10_000):
        lane.socket.sendall(frame[first : first + 10_000])
    assert lane.read().status == OK


def test_a_frame_that_stalls_does_not_overtake_what_came_before(lane: Lane) -> None:
    frames = [framed(FUSED, body())] * 5
    lane.socket.sendall(b"".join([*frames, frames[0][:100]]))
    assert [lane.read().status for _ in range(6)] == [OK] * 5 + [ERROR]
    assert lane.is_closed()


def test_who_says_nothing_more_is_answered_all_the_same(lane: Lane) -> None:
    frames = [framed(FUSED, body())] * 20
    lane.socket.sendall(b"".join(frames))
    lane.socket.shutdown(socket.SHUT_WR)
    assert [lane.read().status for _ in frames] == [OK] * 20
    assert lane.is_closed()


def test_a_connection_without_a_frame_does_not_stall(connect: Callable[[], Lane]) -> None:
    quiet, stalling = connect(), connect()
    assert quiet(PING) == (OK, b"")
    stalling.socket.sendall(framed(FUSED, body())[:20])
    assert stalling.read() == (ERROR, b"")  # as long as the quiet one was quiet
    assert quiet(PING) == (OK, b"")


def test_who_has_not_logged_in_attends_to_nothing(start_resp: Callable[..., Resp]) -> None:
    access = Access({"": "secret", "blue": "azure"})
    resp = start_resp(resident_bytes=ROOM, access=access, listen="127.0.0.1:0")
    admin = resp.connect()
    admin("AUTH", "secret")
    put(admin, pair("lane"))
    lane = Lane(resp.address)
    for _ in range(2):
        assert lane(PING) == (ERROR, b"")
        assert lane(FUSED, body()) == (ERROR, b"")
        for wrong in (b"", b"wrong", b"azure", b"secret\0"):
            assert lane(AUTH, wrong) == (ERROR, b"")
    assert lane(AUTH, b"secret") == (OK, b"")
    assert lane(FUSED, body()).status == OK
    lane.close()
    large = Lane(resp.address)
    large.socket.sendall(framed(AUTH, bytes(5_000))[:7])
    assert large.is_closed(), "a stranger may announce what nobody needs to log in"
    large.close()


def test_more_connections_than_there_may_be_are_closed(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp(listen="127.0.0.1:0", clients_max=2)
    kept = [Lane(resp.address) for _ in range(2)]
    assert [lane(PING).status for lane in kept] == [OK, OK]
    beyond = Lane(resp.address)
    with pytest.raises(ConnectionError):
        beyond.read()
    for lane in (*kept, beyond):
        lane.close()


def test_a_cold_entry_is_not_called_an_error(start_resp: Callable[..., Resp]) -> None:
    k, v = pair("lane")
    resp = start_resp(resident_bytes=2 * k.nbytes, listen="127.0.0.1:0")
    wire = resp.connect()
    for sid in ("cold", "s"):
        put(wire, (k, v), sid)
    lane = Lane(resp.address)
    assert lane(FUSED, body(sid=b"cold")) == (COLDMISS, b"")
    assert lane(FUSED, body()).status == OK
    lane.close()


def test_a_sender_that_reads_nothing_does_not_fill_the_server(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--resp", "127.0.0.1:0")
    wire, lane = Wire(server.ready["resp"]), Lane(server.ready["resp"])
    put(wire, pair("lane", 8, 10, 64), "s")
    question = normal("lane", 8, 1_024, 64)  # 2 MiB, and so is its answer
    frame = framed(FUSED, body(q=question.tobytes(), heads=8, kv_heads=8, dim=64, queries=1_024))
    sent, total = 0, 150

    def send() -> None:
        nonlocal sent
        for _ in range(total):
            lane.socket.sendall(frame)
            sent += 1

    before = server.rss_bytes
    sender = threading.Thread(target=send)
    sender.start()
    seen, still = -1, threading.Event()

    def stuck() -> bool:
        nonlocal seen
        seen, was = sent, seen
        return sent > 0 and sent == was and not still.wait(0.3)

    eventually(stuck)
    assert sent < total
    assert server.rss_bytes - before < 100 << 20
    assert wire("PING") == "PONG"
    first = lane.read()
    assert first.status == OK
    assert all(lane.read() == first for _ in range(total - 1))
    sender.join()
    wire.close()
    lane.close()


WHOLE = framed(FUSED, body(suffix_rows=1, suffix=bytes(2 * 4 * HEADS * DIM)))


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Frames that are right, and frames in which something has been changed, cut out or put in."""
    stream = b""
    for _ in range(draw(st.integers(1, 4))):
        frame = bytearray(draw(st.sampled_from([WHOLE, PING_FRAME, framed(AUTH, b"x")])))
        for _ in range(draw(st.integers(0, 3))):
            at = draw(st.integers(0, len(frame)))
            match draw(st.integers(0, 3)):
                case 0:
                    frame[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
                case 1:
                    frame[at : at + draw(st.integers(1, 40))] = b""
                case 2:
                    frame[at:at] = draw(st.binary(max_size=40))
                case 3:
                    numbers = draw(st.sampled_from([0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF]))
                    frame[at : at + 4] = struct.pack("<I", numbers)
        stream += frame
    return stream


@settings(max_examples=150, deadline=None)
@given(stream=streams(), step=st.sampled_from([1, 3, 7, 1 << 20]))
def test_no_bytes_kill_the_server_or_another_connection(
    resp: Resp, stream: bytes, step: int
) -> None:
    lane, other = Lane(resp.address), Lane(resp.address)
    try:
        for first in range(0, len(stream), step):
            lane.socket.sendall(stream[first : first + step])
        lane.socket.shutdown(socket.SHUT_WR)
        while True:
            answer = lane.read()
            assert answer.status in (OK, MISS, ERROR)
            assert not answer.body or answer.status == OK
    except OSError:
        pass  # it closes on what is no frame, and at the end
    finally:
        lane.close()
    assert other(FUSED, body()).status == OK
    other.close()
