"""Keys: Redis's answers, byte-exact values, and nothing that was acknowledged is lost."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pion_grpc.core.patterns import matches
from tests.resp.conftest import Resp
from tests.resp.wire import Refused, Wire

EVERY_BYTE = bytes(range(256))
LARGE = EVERY_BYTE * 1_024  # 256 KiB: in a file of its own
WRONG_TYPE = Refused("WRONGTYPE Operation against a key holding the wrong kind of value")


def scanned(wire: Wire, *words: Any) -> list[bytes]:
    cursor, found = b"0", []
    while True:
        cursor, names = wire("SCAN", cursor, *words)
        found += names
        if cursor == b"0":
            return found


@pytest.fixture(autouse=True)
def _empty(resp: Resp) -> None:
    wire = resp.connect()
    assert wire("FLUSHALL") == "OK"
    wire.close()


@pytest.mark.parametrize("value", [b"", b"v", EVERY_BYTE, b"\r\n$5\r\n", LARGE, LARGE[:65_537]])
def test_values_come_back_byte_for_byte_by_every_way(wire: Wire, value: bytes) -> None:
    for command in (
        ("SET", "k", value),
        ("SET", "k", value, "EX", 100),
        ("SET", "k", value, "PX", 100_000, "GET"),
        ("SETEX", "k", 100, value),
        ("MSET", "x", "1", "k", value),
        ("GETSET", "k", value),
    ):
        wire("SET", "k", "before")
        wire(*command)
        assert wire("GET", "k") == value, command[0]
        assert wire("STRLEN", "k") == len(value)
        assert wire("MGET", "k", "none", "k") == [value, None, value]
    assert wire("GETDEL", "k") == value
    assert wire("GET", "k") is None
    wire("HSET", "h", value, value, "f", value)
    assert wire("HGET", "h", value) == value
    assert wire("HMGET", "h", "f", "none") == [value, None]
    wire("RPUSH", "l", value)
    assert wire("LRANGE", "l", 0, -1) == [value]
    wire("SADD", "s", value)
    assert wire("SMEMBERS", "s") == [value]
    wire("ZADD", "z", 1, value)
    assert wire("ZRANGE", "z", 0, -1) == [value]
    wire("SET", value, "named")
    assert wire("GET", value) == b"named"
    assert value in wire("KEYS", "*")


def test_a_large_value_is_replaced_whole_and_its_file_goes(resp: Resp, wire: Wire) -> None:
    blobs = resp.store.directory.blobs
    for number in range(20):
        assert wire("SET", "replaced", LARGE + b"%d" % number) == "OK"
    assert wire("GET", "replaced") == LARGE + b"19"
    assert wire("APPEND", "replaced", b"+") == len(LARGE) + 3
    assert wire("GETRANGE", "replaced", -4, -1) == b"\xff19+"
    resp.store.tick()
    assert len(list(blobs.iterdir())) == 1
    wire("SET", "replaced", "small")
    wire("SET", "nx", LARGE)
    assert wire("SET", "nx", LARGE * 2, "NX") is None
    assert wire("SETNX", "nx", LARGE * 2) == 0
    assert wire("MSETNX", "nx2", LARGE, "nx", LARGE) == 0
    assert wire("SET", "nx", LARGE, "EX", "x") == Refused(
        "ERR value is not an integer or out of range"
    )
    assert wire("GET", "nx") == LARGE
    wire("DEL", "nx")
    resp.store.tick()
    assert list(blobs.iterdir()) == []


def test_options_of_set_hold(wire: Wire) -> None:
    assert wire("SET", "k", "1", "XX") is None
    assert wire("SET", "k", "1", "NX") == "OK"
    assert wire("SET", "k", "2", "NX") is None
    assert wire("SET", "k", "2", "XX", "GET") == b"1"
    assert wire("SET", "k", "3", "EX", 100) == "OK"
    assert 99 <= wire("TTL", "k") <= 100
    assert wire("SET", "k", "4", "KEEPTTL") == "OK"
    assert wire("TTL", "k") > 0
    assert wire("SET", "k", "5") == "OK"
    assert wire("TTL", "k") == -1
    for words in (("EX",), ("EX", 1, "PX", 1), ("NX", "XX"), ("WHAT",), ("KEEPTTL", "EX", 1)):
        assert wire("SET", "k", "6", *words) == Refused("ERR syntax error"), words
    for seconds in (0, -1, 2**62):
        assert wire("SET", "k", "6", "EX", seconds) == Refused(
            "ERR invalid expire time in 'set' command"
        )
    assert wire("GET", "k") == b"5"


def test_keys_go_when_their_time_comes(resp: Resp, wire: Wire) -> None:
    wire("SET", "k", LARGE, "PX", 1)
    wire("HSET", "h", "f", "v")
    assert wire("PEXPIRE", "h", 1) == 1
    wire("SET", "stays", "v", "EX", 1_000)
    while wire("EXISTS", "k") or wire("EXISTS", "h"):
        pass  # a millisecond
    assert wire("GET", "k") is None
    assert wire("TTL", "k") == -2
    assert wire("HGETALL", "h") == []
    assert wire("TYPE", "h") == "none"
    assert wire("DBSIZE") == 1
    assert wire("KEYS", "*") == [b"stays"]
    resp.server.tick()
    assert wire("HSET", "h", "g", "w") == 1, "fields of the one before came back"
    assert wire("PERSIST", "stays") == 1
    assert wire("PERSIST", "stays") == 0
    assert wire("EXPIREAT", "stays", 1) == 1
    assert wire("EXISTS", "stays") == 0
    assert wire("EXPIRE", "none", 10) == 0


def test_expiry_options_hold(wire: Wire) -> None:
    wire("SET", "k", "v")
    assert wire("EXPIRE", "k", 100, "XX") == 0
    assert wire("EXPIRE", "k", 100, "GT") == 0
    assert wire("EXPIRE", "k", 100, "NX") == 1
    assert wire("EXPIRE", "k", 200, "NX") == 0
    assert wire("EXPIRE", "k", 50, "GT") == 0
    assert wire("EXPIRE", "k", 50, "LT") == 1
    assert wire("PEXPIRETIME", "k") // 1_000 in (
        wire("EXPIRETIME", "k"),
        wire("EXPIRETIME", "k") - 1,
    )
    assert wire("EXPIRE", "k", 2**60).text.startswith("ERR invalid expire time")


def test_counters_refuse_what_is_no_number(wire: Wire) -> None:
    assert wire("INCR", "n") == 1
    assert wire("DECRBY", "n", 11) == -10
    assert wire("INCRBYFLOAT", "n", "10.5") == b"0.5"
    assert wire("INCRBYFLOAT", "m", "0.0000001") == b"0.0000001", "readers of it know no exponents"
    assert wire("INCRBYFLOAT", "sum", "0.1") == b"0.1"
    assert wire("INCRBYFLOAT", "sum", "0.2") == b"0.3"
    assert wire("INCRBYFLOAT", "sum", "inf").text.endswith("would produce NaN or Infinity")
    assert wire("INCRBYFLOAT", "m", "1e21") == b"1000000000000000000000"
    assert wire("INCR", "n") == Refused("ERR value is not an integer or out of range")
    wire("SET", "n", 2**63 - 1)
    assert wire("INCR", "n") == Refused("ERR increment or decrement would overflow")
    assert wire("GET", "n") == b"%d" % (2**63 - 1)
    for text in ("", " 1", "1 ", "01", "+1", "-0", "1.0", "x"):
        wire("SET", "n", text)
        assert isinstance(wire("INCRBY", "n", 1), Refused), text
    wire("SET", "t", "5", "EX", 100)
    wire("INCR", "t")
    assert wire("TTL", "t") > 0
    assert wire("HINCRBY", "h", "f", 5) == 5
    wire("HSET", "h", "g", "x")
    assert wire("HINCRBY", "h", "g", 5) == Refused("ERR hash value is not an integer")


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        *(((f"FLUSH{what}", *words), "ERR syntax error")
          for what in ("ALL", "DB")
          for words in (("JUNK",), ("",), ("ASYNC", "SYNC"), ("SYNC", "x"), ("x" * 100,))),
        (("LPOP", "l", 1, 1), "ERR wrong number of arguments for 'lpop' command"),
        (("RPOP", "l", 1, "x"), "ERR wrong number of arguments for 'rpop' command"),
        (("SPOP", "s", 1, 1), "ERR syntax error"),
        (("ZPOPMIN", "z", 1, 1), "ERR syntax error"),
        (("ZPOPMAX", "z", 1, "x"), "ERR syntax error"),
    ],
)  # fmt: skip
def test_a_word_too_many_takes_nothing_away(
    wire: Wire, words: tuple[Any, ...], refusal: str
) -> None:
    wire.pipeline(("RPUSH", "l", 1, 2), ("SADD", "s", 1, 2), ("ZADD", "z", 1, "a", 2, "b"))
    assert wire(*words) == Refused(refusal)
    assert wire.pipeline(("LLEN", "l"), ("SCARD", "s"), ("ZCARD", "z")) == [2, 2, 2]
    for word in ("ASYNC", "sync"):
        wire("SET", "k", 1)
        assert wire(words[0] if "FLUSH" in words[0] else "FLUSHDB", word) == "OK"
        assert wire("DBSIZE") == 0


def test_another_kind_is_refused_and_left_alone(wire: Wire) -> None:
    wire("SET", "s", "v")
    wire("RPUSH", "l", "v")
    for command in (
        ("HSET", "s", "f", "v"),
        ("HGET", "l", "f"),
        ("LPUSH", "s", "v"),
        ("SADD", "l", "v"),
        ("ZADD", "s", 1, "v"),
        ("GET", "l"),
        ("INCR", "l"),
        ("APPEND", "l", "x"),
        ("ZRANGE", "l", 0, -1),
        ("SMEMBERS", "s"),
        ("LRANGE", "s", 0, -1),
        ("RPOPLPUSH", "l", "s"),
    ):
        assert wire(*command) == WRONG_TYPE, command
    assert wire("GET", "s") == b"v"
    assert wire("LRANGE", "l", 0, -1) == [b"v"]
    assert wire("MGET", "s", "l") == [b"v", None]
    assert wire("SET", "l", "now a string") == "OK"


def test_scan_finds_every_key_once_and_ends(wire: Wire) -> None:
    names = {b"pps:%d" % number for number in range(137)}
    for name in names:
        wire("SET", name, "v")
    wire("HSET", "other", "f", "v")
    found = scanned(wire, "MATCH", "pps:*", "COUNT", 10)
    assert len(found) == len(names)
    assert set(found) == names
    assert scanned(wire, "TYPE", "hash") == [b"other"]
    assert set(scanned(wire)) == names | {b"other"}
    cursor, first = wire("SCAN", 0, "COUNT", 20)
    for name in first[:5]:
        wire("DEL", name)
    rest = []
    while cursor != b"0":
        cursor, more = wire("SCAN", cursor, "COUNT", 20)
        rest += more
    assert set(rest) >= names - set(first), "a deletion hid keys that stayed"
    assert wire("SCAN", "x") == Refused("ERR invalid cursor")
    assert wire("SCAN", 0, "COUNT", 0) == Refused("ERR syntax error")


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (b"*", b"", None),
        (b"a*c", b"abbc", b"abcd"),
        (b"a?c", b"a\nc", b"ac"),
        (b"[a-c]x", b"bx", b"dx"),
        (b"[c-a]x", b"bx", b"dx"),
        (b"[^a]x", b"bx", b"ax"),
        (b"\\*", b"*", b"x"),
        (b"[\\]]", b"]", b"x"),
        (b"a[", None, b"a"),
        (b"h*l*o*", b"hello world", b"hell"),
        (b"*b", b"ab\nb", b"ba"),
        (b"\xff*", b"\xff\0", b"\xfe"),
        (b"a.c", b"a.c", b"abc"),
    ],
)
def test_patterns_mean_what_they_mean_in_redis(
    pattern: bytes, matching: bytes | None, other: bytes | None
) -> None:
    assert matching is None or matches(pattern, matching)
    assert other is None or not matches(pattern, other)


def test_a_hostile_pattern_costs_no_time() -> None:
    assert not matches(b"*a" * 40 + b"b", b"a" * 5_000)
    assert matches(b"*a" * 40, b"a" * 5_000)


def test_hashes_hold_many_fields(wire: Wire) -> None:
    words = [word for number in range(1_000) for word in (f"f{number}", f"v{number}")]
    assert wire("HSET", "h", *words) == 1_000
    assert wire("HSET", "h", "f0", "", "new", "x") == 1
    assert wire("HLEN", "h") == 1_001
    asked = [f"f{number}" for number in range(999)]
    assert wire("HMGET", "h", *asked)[:2] == [b"", b"v1"]
    assert wire("HMGET", "nobody", "a", "b") == [None, None]
    assert wire("HDEL", "h", *asked, "none") == 999
    assert dict(zip(*[iter(wire("HGETALL", "h"))] * 2, strict=True)) == {
        b"f999": b"v999",
        b"new": b"x",
    }
    assert wire("HDEL", "h", "f999", "new") == 2
    assert wire("EXISTS", "h") == 0
    assert wire("HSET", "h", "f").text.startswith("ERR wrong number of arguments for 'hset'")
    wire("HELLO", "3")
    wire("HSET", "h", "f", "v")
    assert wire("HGETALL", "h") == {"f": b"v"}


def test_sorted_sets_are_in_order(wire: Wire) -> None:
    assert wire("ZADD", "z", "3", "c", "1", "a", "2.5", "b", "1", "A") == 4
    assert wire("ZRANGE", "z", 0, -1, "WITHSCORES") == [
        b"A", b"1", b"a", b"1", b"b", b"2.5", b"c", b"3",
    ]  # fmt: skip
    assert wire("ZADD", "z", "NX", "9", "a", "9", "d") == 1
    assert wire("ZADD", "z", "XX", "CH", "8", "a", "9", "e") == 1
    assert wire("ZADD", "z", "GT", "CH", "7", "a", "10", "d") == 1
    assert wire("ZSCORE", "z", "a") == b"8"
    assert wire("ZADD", "z", "INCR", "-0.5", "a") == b"7.5"
    assert wire("ZADD", "z", "NX", "INCR", "1", "a") is None
    assert wire("ZRANGEBYSCORE", "z", "(1", "7.5") == [b"b", b"c", b"a"]
    assert wire("ZRANGE", "z", "+inf", "(3", "BYSCORE", "REV", "LIMIT", 0, 1) == [b"d"]
    assert wire("ZRANK", "z", "c") == 2
    assert wire("ZREVRANK", "z", "c") == 2
    assert wire("ZCOUNT", "z", "-inf", "3") == 3
    assert wire("ZREM", "z", "a", "none") == 1
    assert wire("ZPOPMIN", "z") == [b"A", b"1"]
    assert wire("ZADD", "z", "nan", "x") == Refused("ERR value is not a valid float")
    assert wire("ZADD", "z", "XX", "NX", "1", "x").text.startswith("ERR XX and NX")
    assert wire("ZADD", "z", "1") == Refused("ERR wrong number of arguments for 'zadd' command")
    assert wire("ZADD", "z", "XX", "1", "x") == 0
    wire("DEL", "z")
    assert wire("ZADD", "z", "XX", "1", "x") == 0
    assert wire("EXISTS", "z") == 0
    stamp = "1764449877.123456"
    wire("ZADD", "pps:lru", stamp, "m:1")
    assert wire("ZRANGE", "pps:lru", 0, 511, "WITHSCORES") == [b"m:1", stamp.encode()]
    wire("HELLO", "3")
    assert wire("ZRANGE", "pps:lru", 0, -1, "WITHSCORES") == [[b"m:1", float(stamp)]]


def test_a_transaction_is_all_or_nothing(resp: Resp, wire: Wire) -> None:
    assert wire("MULTI") == "OK"
    assert wire("SET", "a", "1") == "QUEUED"
    assert wire("INCR", "a") == "QUEUED"
    assert wire("PING") == "QUEUED"
    assert wire("LPUSH", "a", "x") == "QUEUED"
    assert wire("INCR", "a") == "QUEUED"
    assert resp.connect()("GET", "a") is None
    assert wire("EXEC") == ["OK", 2, "PONG", WRONG_TYPE, 3]
    assert wire("EXEC") == Refused("ERR EXEC without MULTI")
    wire("MULTI")
    wire("SET", "a", LARGE)
    wire("GET", "a")
    assert wire("EXEC") == ["OK", LARGE]
    wire("MULTI")
    wire("SET", "a", "spoiled")
    assert wire("NOSUCH").text.startswith("ERR unknown command")
    assert wire("EXEC") == Refused("EXECABORT Transaction discarded because of previous errors.")
    wire("MULTI")
    assert wire("MULTI") == Refused("ERR MULTI calls can not be nested")
    assert wire("SET", "a", "discarded") == "QUEUED"
    assert wire("DISCARD") == "OK"
    assert wire("DISCARD") == Refused("ERR DISCARD without MULTI")
    assert wire("GET", "a") == LARGE
    wire("MULTI")
    assert wire("KV.PREFIX.SAVE") == Refused("ERR KV.PREFIX.SAVE is not allowed inside MULTI")
    assert wire("EXEC").text.startswith("EXECABORT")


def test_watched_keys_that_change_stop_a_transaction(resp: Resp, wire: Wire) -> None:
    other = resp.connect()
    wire("SET", "w", "1")
    for change in (("SET", "w", "2"), ("DEL", "w"), ("EXPIRE", "w", 100)):
        wire("SET", "w", "1")
        wire("WATCH", "w", "none")
        other(*change)
        wire("MULTI")
        wire("SET", "w", "lost")
        assert wire("EXEC") is None, change
    wire("WATCH", "w")
    wire("MULTI")
    wire("SET", "w", "mine")
    assert wire("EXEC") == ["OK"]
    wire("WATCH", "w")
    assert wire("EXEC") == Refused("ERR EXEC without MULTI")
    other("SET", "w", "x")
    wire("MULTI")
    wire("SET", "w", "lost")
    assert wire("EXEC") is None, "what is refused forgets nothing"
    wire("WATCH", "w")
    other("SET", "w", "x")
    wire("UNWATCH")
    wire("MULTI")
    wire("GET", "w")
    assert wire("EXEC") == [b"x"]


def test_the_keys_of_a_full_server_are_refused_and_reads_go_on(
    start_resp: Callable[..., Resp],
) -> None:
    wire = start_resp(budget_bytes=24 << 20).connect()
    value = bytes(1 << 20)
    stored = 0
    for number in range(100):
        answer = wire("SET", f"k{number}", value)
        if answer != "OK":
            break
        stored += 1
    assert answer.text.startswith("OOM ")
    assert 5 < stored < 24
    assert wire("HSET", "h", "f", bytes(60_000 * 400)).text.startswith("OOM ")
    assert wire("GET", "k0") == value
    assert wire("DEL", "k0", "k1", "k2") == 3
    assert wire("SET", "again", value) == "OK"


BEYOND_ANY_BUDGET: dict[str, list[tuple[Any, ...]]] = {
    "a long name": [("SET", "a", "v"), ("RENAME", "a", "n" * (10 << 20))],
    "a long new name": [("SET", "a", "v"), ("RENAMENX", "a", "n" * (10 << 20))],
    "a long field": [("HSET", "h", "f" * (10 << 20), "v")],
    "a long member": [("ZADD", "z", 1, "m" * (10 << 20))],
    "large strings": [("SETRANGE", f"k{n}", 8 << 20, "x") for n in range(5)],
    "appended strings": [("APPEND", f"k{n % 5}", "x" * (2 << 20)) for n in range(20)],
    "strings": [("SETRANGE", f"k{n}", 60_000, "x") for n in range(600)],
    "copies": [("SET", "a", "v" * 60_000), *(("COPY", "a", f"k{n}") for n in range(600))],
    "copies of a hash": [
        *(("HSET", "a", f"f{n}", "v" * 1_000_000) for n in range(2)),
        *(("COPY", "a", f"k{n}") for n in range(40)),
    ],
    "unions": [
        *(("SADD", "a", f"{n}" * 50_000) for n in range(10)),
        *(("SUNIONSTORE", f"k{n}", "a") for n in range(80)),
    ],
}


@pytest.mark.parametrize("what", BEYOND_ANY_BUDGET)
def test_keys_never_take_more_than_the_budget(start_resp: Callable[..., Resp], what: str) -> None:
    resp = start_resp(budget_bytes=24 << 20)
    wire = resp.connect()
    answers = wire.pipeline(*BEYOND_ANY_BUDGET[what])
    assert "OOM " in str(answers[-1])
    files = [path for path in resp.store.directory.path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 24 << 20
    wire("FLUSHALL")
    resp.server.tick()
    assert wire("SET", "again", "v") == "OK", "what is gone is not given back"


def test_of_many_keys_removed_at_once_none_is_left_and_none_counted_twice(wire: Wire) -> None:
    names = [f"many{i}" for i in range(1_200)]
    wire("MSET", *[word for name in names for word in (name, "v")])
    wire("DEL", "many3", "many4", "many5", "many600")
    wire("SET", "many3", LARGE)
    wire("RPUSH", "many4", "x")
    wire("ZADD", "many5", 1, "x")
    wire("HSET", "stays", "f", "v")
    assert wire("DEL", *names, "many7", "nosuch", *names) == 1_199
    assert wire("KEYS", "*") == [b"stays"]
    assert wire("RPUSH", "many4", "y") == 1, "nothing of what it held comes back"
    assert wire("ZADD", "many5", 1, "x") == 1


def test_no_reply_has_more_in_memory_than_is_allowed(start_resp: Callable[..., Resp]) -> None:
    wire = start_resp(reply_bytes_max=1 << 20).connect()
    small = EVERY_BYTE * 128
    wire("MSET", "large", LARGE, "small", small)
    wire("HSET", "h", "f", small)
    too_much = Refused("OOM the reply would exceed 1048576 bytes: ask for less at once")
    assert wire("MGET", *["large"] * 4) == [LARGE] * 4
    assert wire("MGET", *["large"] * 5) == too_much
    assert wire("MGET", *["small"] * 33) == too_much
    assert wire("HMGET", "h", *["f"] * 33) == too_much
    wire("MULTI")
    wire("SET", "small", "undone")
    for _ in range(5):
        wire("GET", "large")
    assert wire("EXEC") == too_much
    assert wire("GET", "small") == small
    assert wire("GET", "large") == LARGE


def test_what_many_large_replies_leave_undone_is_done_in_order(wire: Wire) -> None:
    value = EVERY_BYTE * (64 << 10)  # 16 MiB
    wire("SET", "k", value)
    asked = [word for i in range(12) for word in (("MGET", "k"), ("MGET", f"none{i}", "k"))]
    answers = wire.pipeline(*asked, ("GETEX", "k"), ("GETEX", "k"), ("APPEND", "k", "!"))
    assert answers == [[value], [None, value]] * 12 + [value, value, len(value) + 1]


def test_what_was_acknowledged_is_there_after_a_restart(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()
    wire("MSET", "a", "1", "b", LARGE)
    wire("SET", "t", "v", "EX", 1_000)
    wire("HSET", "h", "f", EVERY_BYTE)
    wire("RPUSH", "l", "x", "y")
    wire("LPUSH", "l", "w")
    wire("SADD", "s", "m")
    wire("ZADD", "z", "1.5", "m")
    wire("DEL", "a")
    resp.stop()
    wire = start_resp().connect()
    assert wire("MGET", "a", "b") == [None, LARGE]
    assert 0 < wire("TTL", "t") <= 1_000
    assert wire("HGET", "h", "f") == EVERY_BYTE
    assert wire("LRANGE", "l", 0, -1) == [b"w", b"x", b"y"]
    assert wire("SMEMBERS", "s") == [b"m"]
    assert wire("ZSCORE", "z", "m") == b"1.5"
    assert len(wire("KEYS", "*")) == 6


# -- the same commands to a real Redis

NAMES = st.sampled_from([b"a", b"b", b"c"])
VALUES = st.sampled_from([b"", b"1", b"-7", b"x", b"3.5", b"10"])
INDEX = st.integers(-4, 4)
SCORES = st.sampled_from([b"1", b"-2.5", b"inf", b"0", b"x"])
COMMAND = st.one_of(
    st.tuples(st.just(b"SET"), NAMES, VALUES),
    st.tuples(st.just(b"SET"), NAMES, VALUES, st.sampled_from([b"NX", b"XX", b"GET"])),
    st.tuples(st.sampled_from([b"GET", b"STRLEN", b"TYPE", b"EXISTS", b"GETDEL", b"INCR"]), NAMES),
    st.tuples(st.sampled_from([b"APPEND", b"SETNX", b"GETSET", b"INCRBY"]), NAMES, VALUES),
    st.tuples(st.just(b"GETRANGE"), NAMES, INDEX, INDEX),
    st.tuples(st.just(b"SETRANGE"), NAMES, st.integers(0, 5), VALUES),
    st.tuples(st.sampled_from([b"DEL", b"MGET", b"SUNION", b"SINTER", b"SDIFF"]), NAMES, NAMES),
    st.tuples(st.sampled_from([b"RENAME", b"RENAMENX", b"COPY", b"RPOPLPUSH"]), NAMES, NAMES),
    st.tuples(st.just(b"HSET"), NAMES, VALUES, VALUES),
    st.tuples(st.sampled_from([b"HGET", b"HDEL", b"HEXISTS", b"HSTRLEN"]), NAMES, VALUES),
    st.tuples(st.just(b"HINCRBY"), NAMES, VALUES, VALUES),
    st.tuples(st.sampled_from([b"HLEN", b"LLEN", b"SCARD", b"ZCARD", b"LPOP", b"RPOP"]), NAMES),
    st.tuples(st.sampled_from([b"RPUSH", b"LPUSH", b"LPUSHX"]), NAMES, VALUES, VALUES),
    st.tuples(st.sampled_from([b"LRANGE", b"LTRIM", b"ZRANGE", b"ZREVRANGE"]), NAMES, INDEX, INDEX),
    st.tuples(st.just(b"ZRANGE"), NAMES, INDEX, INDEX, st.just(b"WITHSCORES")),
    st.tuples(st.sampled_from([b"LINDEX", b"LPOP"]), NAMES, INDEX),
    st.tuples(st.sampled_from([b"LSET", b"LREM"]), NAMES, INDEX, VALUES),
    st.tuples(st.sampled_from([b"SADD", b"SREM", b"SISMEMBER", b"ZSCORE", b"ZRANK"]), NAMES, VALUES),
    st.tuples(st.just(b"SMOVE"), NAMES, NAMES, VALUES),
    st.tuples(st.just(b"ZADD"), NAMES, SCORES, VALUES),
    st.tuples(st.just(b"ZADD"), NAMES, st.sampled_from([b"NX", b"XX", b"GT", b"LT", b"CH", b"INCR"]),
              SCORES, VALUES),
    st.tuples(st.just(b"ZINCRBY"), NAMES, SCORES, VALUES),
    st.tuples(st.sampled_from([b"ZRANGEBYSCORE", b"ZCOUNT"]), NAMES, SCORES, SCORES),
    st.tuples(st.sampled_from([b"ZREMRANGEBYRANK"]), NAMES, INDEX, INDEX),
    st.tuples(st.just(b"ZPOPMAX"), NAMES),
)  # fmt: skip
UNORDERED = (b"SUNION", b"SINTER", b"SDIFF", b"SMEMBERS", b"KEYS")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server to compare with")
    directory = tmp_path_factory.mktemp("redis")
    path = directory / "s"
    command = [
        program,
        "--port",
        "0",
        "--unixsocket",
        str(path),
        "--save",
        "",
        "--dir",
        str(directory),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if "eady to accept connections" in line:
            break
    wire = Wire(f"unix:{path}")
    yield wire
    wire.close()
    server.terminate()
    server.wait()
    server.stdout.close()


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(commands=st.lists(COMMAND, min_size=5, max_size=40))
def test_no_answer_differs_from_redis(
    wire: Wire, redis_server: Wire, commands: list[tuple[Any, ...]]
) -> None:
    prepared = [("FLUSHALL",), *commands]
    ours, theirs = wire.pipeline(*prepared), redis_server.pipeline(*prepared)
    for command, mine, its in zip(prepared, ours, theirs, strict=True):
        if command[0] in UNORDERED and isinstance(mine, list):
            mine, its = sorted(mine), sorted(its)
        assert mine == its, command
