"""Connections: what was asked is answered in order, and nobody waits for somebody else."""

import contextlib
import socket
import threading
from collections.abc import Callable

import psutil
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pion_grpc.core.access import Access
from pion_grpc.errors import CannotStart
from pion_grpc.resp.commands.table import COMMANDS
from tests.conftest import ServerProcess
from tests.resp.conftest import Resp
from tests.resp.wire import Refused, Wire, encoded, fields

BIG = bytes(range(256)) * 4_096  # 1 MiB: larger than what is kept in the database


def test_a_pipeline_is_answered_in_order_and_exactly_once(wire: Wire) -> None:
    commands = [
        ("SET", "order", "1"),
        ("PING",),
        ("GET", "order"),
        ("KV.PREFIX.LOOKUP", "nobody"),
        ("KV.PREFIX.REGISTER", "order", 8, "fp16"),
        ("KV.PREFIX.LOOKUP", "order"),
        ("NOSUCH", "x"),
        ("V.STOREBATCH", "order_pk", 0, 0, 1, bytes(32)),
        ("V.FETCH", "order_pk", 0, "RANGE", 0, 1),
        ("INCR", "order"),
        ("ECHO", "last"),
    ]
    replies = wire.pipeline(*commands * 20)
    for start in range(0, len(replies), len(commands)):
        got = replies[start : start + len(commands)]
        assert got[:6] == ["OK", "PONG", b"1", "MISS" if start == 0 else got[3], "OK", "HIT"]
        assert got[6].text.startswith("ERR unknown command 'NOSUCH', with args beginning with: 'x'")
        assert got[7:] == ["OK", bytes(32), 2, b"last"]
    assert wire("PING") == "PONG"


@pytest.mark.parametrize(
    "first",
    [
        ("KV.PREFIX.SAVE",),
        ("KV.PREFIX.COMMIT",),
        ("PION.STATS",),
        ("KV.PREFIX.REGISTER", "options", 8, "fp16"),
        ("V.STOREBATCH", "options_pk", 0, 0, 1, bytes(32)),
        ("V.FETCH", "options_pk", 0, "RANGE", 0, 1, "FMT", "NATIVE"),
    ],
)
@pytest.mark.parametrize("second", ["PING", "PREFILL_MS", "FMT", "RESET_"])
def test_no_command_takes_the_next_one_for_its_option(
    wire: Wire, first: tuple[str | int | bytes, ...], second: str
) -> None:
    wire("KV.PREFIX.REGISTER", "options", 8, "fp16")
    wire("V.STOREBATCH", "options_pk", 0, 0, 1, bytes(32))
    one, other = wire.pipeline(first, (second,))
    assert not isinstance(one, Refused), one
    if second == "PING":
        assert other == "PONG"
    else:
        assert other.text.startswith("ERR unknown command")
    assert wire("ECHO", "x") == b"x"


def test_inline_commands_are_answered_too(wire: Wire) -> None:
    wire.socket.sendall(b'SET inline "a b\\x00"\r\nGET inline\r\n\r\nPING\n')
    assert [wire.read() for _ in range(3)] == ["OK", b"a b\0", "PONG"]


@pytest.mark.parametrize(
    "frame",
    [
        b"*3\r\n$3\r\nSET\r\n$x\r\n",
        b"*-5x\r\n",
        b"*99999999999\r\n",
        b"*1\r\n$600000000\r\n",
        b"*1\r\n+PING\r\n",
        b'GET "unbalanced\r\n',
        b"*1\r\n$4\r\nPINGxx",
        b"A" * 70_000,
    ],
)
def test_bytes_that_are_no_request_close_their_own_connection_only(
    resp: Resp, frame: bytes
) -> None:
    other = resp.connect()
    wire = resp.connect()
    wire.socket.sendall(encoded("PING") + frame)
    assert wire.read() == "PONG"
    assert wire.read().text.startswith("ERR Protocol error: ")
    assert wire.is_closed()
    assert other("PING") == "PONG"
    assert resp.connect()("PING") == "PONG"


def test_a_reader_who_does_not_read_blocks_nobody(resp: Resp) -> None:
    lazy, busy = resp.connect(), resp.connect()
    busy("KV.PREFIX.REGISTER", "lazy", 4_096, "fp16")
    busy("V.STOREBATCH", "lazy_pk", 0, 0, 4_096, bytes(4_096 * 4_096 * 2), "FMT", "F16")
    for _ in range(20):  # 32 MB each, of which nobody takes a byte
        lazy.send("V.FETCH", "lazy_pk", 0, "RANGE", 0, 4_096, "FMT", "NATIVE")
    for _ in range(200):
        assert busy("SET", "k", "v") == "OK"
        assert busy("GET", "k") == b"v"
    small = busy("V.FETCH", "lazy_pk", 0, "RANGE", 0, 1, "FMT", "NATIVE")
    assert small == bytes(4_096 * 2)
    for _ in range(20):
        assert len(lazy.read()) == 4_096 * 4_096 * 2
    assert lazy("PING") == "PONG"


def test_a_client_that_writes_before_it_reads_is_read_all_the_while(resp: Resp) -> None:
    wire = resp.connect()
    assert wire("KV.PREFIX.REGISTER", "writer", 4_096, "fp16") == "OK"
    rows = bytes(1_024 * 4_096 * 2)
    batches = 24  # 8 MiB each
    asked = encoded("V.FETCH", "writer_pk", 0, "RANGE", 0, 1_024, "FMT", "NATIVE")
    store = encoded("V.STOREBATCH", "writer_pk", 0, 0, 1_024, rows, "FMT", "F16")
    for _ in range(batches):
        wire.socket.sendall(store)
        wire.socket.sendall(asked)  # its answer is not read either
    for _ in range(batches):
        assert wire.read() == "OK"
        assert wire.read() == rows


def test_a_fetch_gives_the_rows_of_its_own_moment(resp: Resp) -> None:
    wire = resp.connect()
    wire("KV.PREFIX.REGISTER", "moment", 4_096, "fp16")
    old, new = b"\x01\x3c" * (512 * 4_096), b"\x02\x3c" * (512 * 4_096)
    wire("V.STOREBATCH", "moment_pk", 0, 0, 512, old, "FMT", "F16")
    fetch = ("V.FETCH", "moment_pk", 0, "RANGE", 0, 512, "FMT", "NATIVE")
    replies = wire.pipeline(
        fetch, ("V.STOREBATCH", "moment_pk", 0, 0, 512, new, "FMT", "F16"), fetch
    )
    assert replies == [old, "OK", new]


def test_a_client_that_goes_away_leaves_nothing_open(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()
    wire("KV.PREFIX.REGISTER", "gone", 4_096, "fp16")
    wire("V.STOREBATCH", "gone_pk", 0, 0, 1_024, bytes(1_024 * 4_096 * 2), "FMT", "F16")
    for _ in range(10):
        leaver = resp.connect()
        for _ in range(8):
            leaver.send("V.FETCH", "gone_pk", 0, "RANGE", 0, 1_024, "FMT", "NATIVE")
        leaver.socket.recv(1_000)
        leaver.socket.shutdown(socket.SHUT_RDWR)
        leaver.close()
    assert wire("V.FETCH", "gone_pk", 0, "RANGE", 0, 1, "FMT", "NATIVE") == bytes(8_192)
    resp.stop()
    data = str(resp.store.directory.path)
    assert not [file for file in psutil.Process().open_files() if file.path.startswith(data)]


def test_what_was_sent_before_the_end_is_answered(resp: Resp) -> None:
    wire = resp.connect()
    wire.socket.sendall(encoded("SET", "half", BIG) + encoded("GET", "half") + encoded("PING"))
    wire.socket.shutdown(socket.SHUT_WR)
    assert [wire.read() for _ in range(3)] == ["OK", BIG, "PONG"]
    assert wire.is_closed()


def test_nothing_is_executed_after_quit(wire: Wire, resp: Resp) -> None:
    wire.socket.sendall(encoded("QUIT") + encoded("SET", "after quit", "x"))
    assert wire.read() == "OK"
    assert wire.is_closed()
    assert resp.connect()("GET", "after quit") is None


def test_hello_says_what_it_speaks_in_what_it_speaks(wire: Wire) -> None:
    flat = wire("HELLO")
    assert flat[:6] == [b"server", b"pion", b"version", b"7.0.0", b"proto", 2]
    three = wire("HELLO", "3", "SETNAME", "somebody")
    assert list(three) == ["server", "version", "proto", "id", "mode", "role", "modules"]
    assert three["proto"] == 3
    assert three["modules"] == []
    assert wire("CLIENT", "GETNAME") == b"somebody"
    assert wire("GET", "no such key") is None
    assert wire("HELLO", "4") == Refused("NOPROTO unsupported protocol version")
    assert wire("HELLO", "2")[5] == 2


def test_client_numbers_are_never_used_again(resp: Resp) -> None:
    numbers = []
    for _ in range(5):
        wire = resp.connect()
        numbers.append(wire("CLIENT", "ID"))
        wire.close()
    assert numbers == sorted(set(numbers))


def test_client_list_shows_who_is_there_and_kill_ends_them(resp: Resp) -> None:
    one, other = resp.connect(), resp.connect()
    one("CLIENT", "SETNAME", "victim")
    number = one("CLIENT", "ID")
    listed = other("CLIENT", "LIST").decode()
    assert f"id={number} " in listed
    assert "name=victim " in listed
    assert other("CLIENT", "KILL", "ID", number) == 1
    assert one.is_closed()
    assert f"id={number} " not in other("CLIENT", "LIST").decode()
    assert other("CLIENT", "KILL", "ID", number) == 0


def test_who_kills_itself_is_told_so_and_gets_no_further(wire: Wire, resp: Resp) -> None:
    number = wire("CLIENT", "ID")
    assert wire("CLIENT", "KILL", "ID", number) == 0
    wire.socket.sendall(
        encoded("CLIENT", "KILL", "ID", number, "SKIPME", "no") + encoded("SET", "too", "late")
    )
    assert wire.read() == 1
    assert wire.is_closed()
    assert resp.connect()("EXISTS", "too") == 0


def test_who_never_reads_is_killed_all_the_same(resp: Resp) -> None:
    one, other = resp.connect(), resp.connect()
    number = one("CLIENT", "ID")
    other("SET", "unread", BIG)
    one.socket.sendall(encoded("GET", "unread") * 100)
    assert other("CLIENT", "KILL", "ID", number) == 1
    assert f"id={number} " not in other("CLIENT", "LIST").decode()


def test_a_pause_holds_everybody_and_ends(resp: Resp) -> None:
    wire, other = resp.connect(), resp.connect()
    for _ in range(100):  # now and then a timer comes early
        assert wire("CLIENT", "PAUSE", "1") == "OK"
        assert other("PING") == "PONG"
    assert wire("CLIENT", "PAUSE", "100000", "NONE") == Refused("ERR syntax error")
    assert wire("CLIENT", "PAUSE", "100000", "WRITE") == "OK"
    other.send("PING")
    other.socket.settimeout(0.1)
    with pytest.raises(TimeoutError):
        other.socket.recv(1)
    assert wire("CLIENT", "UNPAUSE") == "OK"
    other.socket.settimeout(10)
    assert other.socket.recv(7) == b"+PONG\r\n"


def test_replies_can_be_switched_off(wire: Wire) -> None:
    wire.send("CLIENT", "REPLY", "OFF")
    wire.send("SET", "silent", "1")
    assert wire("CLIENT", "REPLY", "ON") == "OK"
    wire.send("CLIENT", "REPLY", "SKIP")
    wire.send("INCR", "silent")
    assert wire("GET", "silent") == b"2"


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "OPTIONS"])
def test_a_page_in_a_browser_gets_nothing_executed(resp: Resp, wire: Wire, method: str) -> None:
    page = resp.connect()
    request = f"{method} /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n"
    page.socket.sendall(
        request.encode() + b"SET by-a-page 1\r\n" + encoded("SET", "by-a-page", "1")
    )
    with contextlib.suppress(ConnectionResetError):  # what it sent was not read to its end
        while page.file.read(1):
            pass
    assert wire("EXISTS", "by-a-page") == 0


def test_setting_what_cannot_be_set_is_never_acknowledged(wire: Wire) -> None:
    known = wire("CONFIG", "GET", "*")
    assert wire("CONFIG", "SET", *known) == "OK", "nothing changes by it"
    assert wire("CONFIG", "SET", "Save", "", "maxmemory-policy", "NoEviction") == "OK"
    for name, value in (
        ("maxmemory", "1"),
        ("maxmemory-policy", "allkeys-lru"),
        ("appendonly", "yes"),
        ("save", "60 1"),
        ("port", "1"),
    ):
        refused = wire("CONFIG", "SET", "save", "", name, value)
        assert refused.text.startswith(
            f"ERR CONFIG SET failed (possibly related to argument '{name}'"
        )
    assert wire("CONFIG", "SET", "nosuch", "1") == Refused(
        "ERR Unknown option or number of arguments for CONFIG SET - 'nosuch'"
    )
    assert wire("CONFIG", "SET", "save").text.startswith("ERR wrong number of arguments")
    assert wire("CONFIG", "GET", "*") == known


def test_select_knows_one_database(wire: Wire) -> None:
    assert wire("SELECT", "0") == "OK"
    assert wire("SELECT", "1") == Refused("ERR DB index is out of range")
    assert wire("SELECT", "x") == Refused("ERR invalid DB index")


def test_wrong_numbers_of_words_are_refused_by_name(wire: Wire) -> None:
    assert wire("GET") == Refused("ERR wrong number of arguments for 'get' command")
    assert wire("get", "a", "b") == Refused("ERR wrong number of arguments for 'get' command")
    assert wire("V.FETCH", "x").text.startswith("ERR V.FETCH requires: ")


def test_the_table_is_shown_as_redis_shows_it(wire: Wire) -> None:
    assert wire("COMMAND", "COUNT") == len(wire("COMMAND"))
    (entry,) = wire("COMMAND", "INFO", "get")
    assert entry[:6] == [b"get", 2, ["readonly"], 1, 1, 1]
    assert wire("COMMAND", "INFO", "nosuch") == [None]
    assert wire("COMMAND", "DOCS") == []


def test_info_tells_the_truth(resp: Resp, wire: Wire) -> None:
    wire("FLUSHALL")
    body = wire("INFO")
    assert b"# Pion\r\n" in body
    assert b"db0:" not in body
    info = fields(body)
    assert info["redis_version"] == "7.0.0"
    assert int(info["used_memory"]) > 4 << 20
    assert int(info["used_memory_peak"]) >= int(info["used_memory"])
    assert info["uptime_in_seconds"].isdigit()
    assert info["stats_scope"] == "worker"
    wire("SET", "a", "1")
    wire("SET", "b", "1", "EX", "1000")
    assert fields(wire("INFO", "keyspace"))["db0"].startswith("keys=2,expires=1,")
    assert set(fields(wire("INFO", "cluster"))) == {"cluster_enabled"}


def test_info_is_verbatim_in_version_three(wire: Wire) -> None:
    wire("HELLO", "3")
    wire.send("INFO", "server")
    assert wire.file.read(1) == b"="


@pytest.fixture
def guarded(start_resp: Callable[..., Resp]) -> Resp:
    return start_resp(access=Access({"": "secret", "blue": "azure"}))


def test_a_stranger_may_do_nothing_but_log_in(guarded: Resp) -> None:
    wire = guarded.connect()
    for command in (("PING",), ("GET", "a"), ("NOSUCH",), ("KV.PREFIX.INFO",), ("MULTI",)):
        assert wire(*command) == Refused("NOAUTH Authentication required.")
    assert wire("HELLO", "3").text.startswith("NOAUTH HELLO must be called")
    assert wire("AUTH", "wrong").text.startswith("WRONGPASS ")
    assert wire("AUTH", "secret") == "OK"
    assert wire("PING") == "PONG"
    assert wire("RESET") == "RESET"
    assert wire("PING").text.startswith("NOAUTH")


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (("secret",), True),
        (("anybody", "secret"), True),
        (("blue", "azure"), True),
        (("blue", "secret"), False),  # a tenant's name takes the tenant's password only
        (("azure",), False),
        (("red", "azure"), False),
        (("", ""), False),
        (("default", "secre"), False),
    ],
)
def test_no_password_opens_what_it_is_not_for(
    guarded: Resp, words: tuple[str, ...], right: bool
) -> None:
    expected = (
        "OK" if right else Refused("WRONGPASS invalid username-password pair or user is disabled.")
    )
    assert guarded.connect()("AUTH", *words) == expected
    hello = guarded.connect()("HELLO", "3", "AUTH", *(words if len(words) == 2 else ("x", *words)))
    assert isinstance(hello, Refused) is not right


def test_a_stranger_cannot_make_the_server_hold_much(guarded: Resp) -> None:
    wire = guarded.connect()
    wire.socket.sendall(b"*2\r\n$4\r\nAUTH\r\n$1000000\r\n")
    assert wire.read() == Refused("ERR Protocol error: invalid bulk length")
    assert wire.is_closed()


def test_logging_in_and_a_large_value_may_come_in_one_breath(guarded: Resp) -> None:
    wire = guarded.connect()
    wire.socket.sendall(encoded("AUTH", "secret") + encoded("SET", "large", BIG))
    assert [wire.read(), wire.read()] == ["OK", "OK"]


def test_without_a_password_auth_says_so(wire: Wire) -> None:
    assert wire("AUTH", "x").text.startswith("ERR AUTH <password> called without any password")
    assert wire("HELLO", "2", "AUTH", "default", "x").text.startswith("WRONGPASS")


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_connects_with_its_defaults(
    start_resp: Callable[..., Resp], protocol: int
) -> None:
    resp = start_resp(listen="127.0.0.1:0")
    port = int(resp.address.rpartition(":")[2])
    with redis.Redis(port=port, protocol=protocol) as client:
        assert client.ping()
        assert client.set("k", b"\xff\0v", ex=100)
        assert client.get("k") == b"\xff\0v"
        assert 0 < client.ttl("k") <= 100
        pipe = client.pipeline()
        pipe.incr("n")
        pipe.get("k")
        assert pipe.execute() == [1, b"\xff\0v"]
        assert client.info()["tcp_port"] == port
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.client_list()[0]["lib-name"].startswith("redis-py")


def test_a_busy_port_refuses_to_start(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp(listen="127.0.0.1:0")
    with pytest.raises(CannotStart, match="cannot listen"):
        start_resp(listen=resp.address)


def test_many_clients_get_their_own_answers(resp: Resp) -> None:
    failures: list[str] = []

    def talk(number: int) -> None:
        wire = Wire(resp.address)
        for turn in range(50):
            value = f"{number}:{turn}" * (1 + turn * 400)
            if wire("SET", f"own{number}", value) != "OK":
                failures.append("SET")
            if wire("GET", f"own{number}") != value.encode():
                failures.append(f"{number} got somebody else's")
        wire.close()

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_one_client_too_many_is_told_so_and_harms_nobody(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp(clients_max=3)
    wires = [resp.connect() for _ in range(3)]
    assert [wire("PING") for wire in wires] == ["PONG"] * 3
    surplus = resp.connect()
    assert surplus.read() == Refused("ERR max number of clients reached")
    assert surplus.is_closed()
    assert wires[0]("PING") == "PONG"
    wires[1].close()
    wires[0]("CLIENT", "LIST")
    assert wires[2]("PING") == "PONG"


def test_stopping_answers_what_has_come(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()
    assert wire("SET", "k", "v") == "OK"
    resp.stop()
    with pytest.raises((ConnectionError, OSError, ValueError)):
        wire("PING")
    again = start_resp()
    assert again.connect()("GET", "k") == b"v"


WORDS = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([c.name.encode() for c in COMMANDS]),
    st.integers(-(2**70), 2**70).map(lambda n: b"%d" % n),
    st.sampled_from([b"RANGE", b"BATCH", b"FMT", b"NATIVE", b"SCHEMA", b"BLOCKS", b"WITHSCORES"]),
)
FRAMES = st.one_of(
    st.lists(WORDS, min_size=1, max_size=9).map(lambda words: encoded(*words)),
    st.binary(max_size=60),
    st.sampled_from([b"*3\r\n$3\r\n", b"$5\r\nhello\r\n", b"*1\r\n$900000000\r\n", b"\xff" * 30]),
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(frames=st.lists(FRAMES, max_size=12), step=st.sampled_from([1, 7, 100_000]))
def test_no_bytes_kill_the_server_or_somebody_elses_connection(
    resp: Resp, frames: list[bytes], step: int
) -> None:
    hostile = socket.socket(socket.AF_UNIX)
    hostile.settimeout(10)
    hostile.connect(resp.address.removeprefix("unix:"))
    data = b"".join(frames)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for start in range(0, len(data), step):
            hostile.sendall(data[start : start + step])
    hostile.close()
    other = resp.connect()
    other("CLIENT", "UNPAUSE")
    assert other("PING") == "PONG"
    other.close()


def test_memory_follows_what_came_and_not_what_was_announced(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--resp", "127.0.0.1:0")
    first = Wire(server.ready["resp"])
    assert first("PING") == "PONG"
    before = server.rss_bytes
    liars = [Wire(server.ready["resp"]) for _ in range(64)]
    for liar in liars:
        liar.socket.sendall(b"*2\r\n$3\r\nSET\r\n$536870912\r\n" + bytes(1_000))
    assert first("PING") == "PONG"
    assert server.rss_bytes - before < 64 << 20, "32 GiB were announced, 64 KB came"
    for liar in liars:
        liar.close()
    first.close()
