"""Tenants: what is one's own is usable by itself, and invisible to everybody else, on both wires."""

import contextlib
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from pion_grpc.resp.commands.table import COMMANDS
from pion_wire.messages import layout_to_message
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import ssm_state_pb2, types_pb2
from tests.conftest import ServerProcess
from tests.resp.wire import Refused, Wire, fields
from tests.server.wire import Sample, refused
from tests.server.wire import Wire as Grpc

NOT_ALLOWED = Refused("NOPERM this command is not allowed for tenant connections")
SERVER_WIDE = {
    "KV.PREFIX.INFO", "KV.PREFIX.SAVE", "PION.STATS", "CONFIG", "SAVE", "BGSAVE", "LASTSAVE",
    "FLUSHALL", "FLUSHDB", "DBSIZE", "RANDOMKEY", "TIME", "WAIT",
}  # fmt: skip
USERS = {"admin": ("default", "secret"), "blue": ("blue", "azure"), "red": ("red", "crimson")}


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    path = Path(tempfile.mkdtemp(prefix="pion-", dir="/tmp"))
    tenants = ("--tenant", "blue=azure", "--tenant", "red=crimson")
    server = ServerProcess(
        path / "data", "--resp", f"unix:{path}/resp", *tenants, PION_PASSWORD="secret"
    )
    yield server
    assert server.stop() == 0
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def as_user(shared: ServerProcess) -> Iterator[Callable[[str], Wire]]:
    opened: list[Wire] = []

    def connect(user: str) -> Wire:
        opened.append(Wire(shared.ready["resp"]))
        if user in USERS:
            assert opened[-1]("AUTH", *USERS[user]) == "OK"
        return opened[-1]

    yield connect
    for wire in opened:
        wire.close()


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> None:
    if "as_user" not in request.fixturenames:
        return
    for user in USERS:
        wire = request.getfixturevalue("as_user")(user)
        if user == "admin":
            wire("FLUSHALL")
        else:
            for key in wire("KEYS", "*"):
                wire("DEL", key)
        wire("KV.PREFIX.DROP", "ns", "bare")
        wire("SSM.PREFIX.DROP", "ns")


ROW = bytes(range(128))
MAKE: list[tuple[Any, ...]] = [
    ("KV.PREFIX.REGISTER", "ns", 64, "fp16", "BLOCKS", 64, 1, bytes(8)),
    ("V.STOREBATCH", "ns_pk", 0, 0, 1, ROW, "FMT", "F16"),
    ("V.CREATE", "bare", 64),
    ("SSM.PREFIX.STORE", "ns", 0, b"state"),
    ("SET", "string", "v"),
    ("SET", "large", bytes(100_000)),
    ("HSET", "hash", "f", "v"),
    ("RPUSH", "list", "v"),
    ("SADD", "set", "v"),
    ("ZADD", "zset", 1, "v"),
]
READ: list[tuple[tuple[Any, ...], Any, Any]] = [
    # what is asked, what the owner gets, what everybody else gets
    (("KV.PREFIX.LOOKUP", "ns"), "HIT", "MISS"),
    (("KV.PREFIX.OWNER", "ns"), "0", "-1"),
    (("KV.PREFIX.BLOCKS", "ns"), b"\x40\0\0\0\1\0\0\0" + bytes(8), "UNKNOWN"),
    (("KV.PREFIX.MEMBERSHIP", "ns", 1, bytes(8)), b"\1", "UNKNOWN"),
    (
        ("V.FETCH", "ns_pk", 0, "RANGE", 0, 1, "FMT", "NATIVE"),
        ROW,
        Refused("ERR session not found"),
    ),
    (("V.FETCH", "ns_pk", "BATCH", 0, 1, "FMT", "NATIVE"), [ROW], Refused("ERR session not found")),
    (("SSM.PREFIX.FETCH", "ns", 0), b"state", None),
    (("GET", "string"), b"v", None),
    (("GET", "large"), bytes(100_000), None),
    (("MGET", "string", "large"), [b"v", bytes(100_000)], [None, None]),
    (("EXISTS", "string"), 1, 0),
    (("TYPE", "hash"), "hash", "none"),
    (("HGETALL", "hash"), [b"f", b"v"], []),
    (("LRANGE", "list", 0, -1), [b"v"], []),
    (("SMEMBERS", "set"), [b"v"], []),
    (("ZRANGE", "zset", 0, -1), [b"v"], []),
    (("KEYS", "h*"), [b"hash"], []),
    (("SCAN", 0, "MATCH", "h*"), [b"0", [b"hash"]], [b"0", []]),
]


@pytest.mark.parametrize("owner", list(USERS))
def test_nobody_but_the_owner_sees_or_takes_anything(
    as_user: Callable[[str], Wire], owner: str
) -> None:
    mine = as_user(owner)
    for command in MAKE:
        assert not isinstance(mine(*command), Refused), command
    for user in (*USERS, "nobody"):
        wire = as_user(user)
        for command, own, other in READ:
            expected = own if user == owner else other
            if user == "nobody":
                expected = Refused("NOAUTH Authentication required.")
            assert wire(*command) == expected, (user, command)
        if user == owner:
            continue
        for command in (
            ("KV.PREFIX.DROP", "ns", "bare"),
            ("SSM.PREFIX.DROP", "ns"),
            ("DEL", "string", "hash"),
            ("V.STOREBATCH", "ns_pk", 0, 0, 1, bytes(128), "FMT", "F16"),
            ("EXPIRE", "large", 0),
            ("RENAME", "list", "mine"),
        ):
            wire(*command)
    for command, own, _ in READ:
        assert mine(*command) == own, command


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_is_for_tenants_or_is_refused_to_them(
    as_user: Callable[[str], Wire], command: Any
) -> None:
    assert command.for_tenants is not (command.name in SERVER_WIDE)
    words = [command.name, *["1"] * (abs(command.arity) - 1)]
    stranger = as_user("nobody")(*words[:10])  # more words a stranger may not send
    if command.before_login:
        assert stranger != Refused("NOAUTH Authentication required.")
    else:
        assert stranger == Refused("NOAUTH Authentication required.")
    if not command.for_tenants:
        assert as_user("blue")(*words) == NOT_ALLOWED


def test_the_same_names_are_different_things_to_different_tenants(
    as_user: Callable[[str], Wire],
) -> None:
    wires = {user: as_user(user) for user in USERS}
    for number, wire in enumerate(wires.values()):
        wire("KV.PREFIX.REGISTER", "ns", 64, "fp16")
        wire("V.STOREBATCH", "ns_pk", 0, 0, 1, bytes([number]) * 128, "FMT", "F16")
        wire("SET", "k", str(number))
        wire("SSM.PREFIX.STORE", "ns", 0, str(number))
    for number, wire in enumerate(wires.values()):
        assert wire("V.FETCH", "ns_pk", 0, "RANGE", 0, 1, "FMT", "NATIVE") == bytes([number]) * 128
        assert wire("GET", "k") == str(number).encode()
        assert wire("SSM.PREFIX.FETCH", "ns", 0) == str(number).encode()
    wires["blue"]("KV.PREFIX.DROP", "ns")
    assert wires["red"]("KV.PREFIX.LOOKUP", "ns") == "HIT"


def test_a_transaction_of_a_tenant_is_its_own(as_user: Callable[[str], Wire]) -> None:
    blue, red = as_user("blue"), as_user("red")
    red("SET", "k", "red's")
    blue("WATCH", "k")
    red("SET", "k", "changed")
    blue("MULTI")
    blue("INCR", "n")
    assert blue("CONFIG", "GET", "port") == NOT_ALLOWED
    assert blue("EVAL", "return 1", 0) == NOT_ALLOWED, "what there is not is as little allowed"
    assert blue("EXEC").text.startswith("EXECABORT")
    blue("MULTI")
    blue("SET", "k", "blue's")
    assert blue("EXEC") == ["OK"]
    assert red("GET", "k") == b"changed"


def test_a_tenant_sees_its_own_connections_only(as_user: Callable[[str], Wire]) -> None:
    blue, red = as_user("blue"), as_user("red")
    number = red("CLIENT", "ID")
    assert "user=red" not in blue("CLIENT", "LIST").decode()
    assert blue("CLIENT", "KILL", "ID", number) == 0
    assert red("PING") == "PONG"
    assert blue("CLIENT", "PAUSE", 1_000_000) == NOT_ALLOWED
    assert blue("CLIENT", "UNPAUSE") == NOT_ALLOWED
    assert fields(blue("INFO"))["redis_version"] == "7.0.0"


def test_no_number_tells_a_tenant_what_another_does(as_user: Callable[[str], Wire]) -> None:
    red, blue = as_user("red"), as_user("blue")
    uptime = {"server_time_usec", "uptime_in_seconds", "uptime_in_days"}

    def seen() -> dict[str, str]:
        everything = fields(blue("INFO", "everything")) | fields(blue("V.INFO"))
        return {name: value for name, value in everything.items() if name not in uptime}

    before = seen()
    as_user("red")
    for command in MAKE:
        assert not isinstance(red(*command), Refused), command
    for command, own, _ in READ:
        assert red(*command) == own
    assert seen() == before
    assert not {"used_memory", "kvprefix_hits", "server_kvprefix_hits"} & before.keys()
    blue("KV.PREFIX.REGISTER", "ns", 64, "fp16")
    blue("V.STOREBATCH", "ns_pk", 0, 0, 1, ROW, "FMT", "F16")
    blue("V.FETCH", "ns_pk", 0, "RANGE", 0, 1)
    own = fields(blue("V.INFO"))
    fetched = int(own["total_fetches"]) - int(before["total_fetches"])
    assert (own["sessions"], own["total_tokens"], fetched) == ("2", "1", 1)
    admin = fields(as_user("admin")("V.INFO"))
    assert (admin["sessions"], admin["total_tokens"]) == ("5", "2")


def test_the_same_credentials_guard_both_wires(
    shared: ServerProcess, as_user: Callable[[str], Wire]
) -> None:
    blue = as_user("blue")
    blue("KV.PREFIX.REGISTER", "ns", 64, "fp16")
    blue("V.STOREBATCH", "ns_pk", 0, 0, 1, ROW, "FMT", "F16")
    blue("SSM.PREFIX.STORE", "ns", 3, b"state")
    for tenant, password, sees in (
        ("blue", "azure", True),
        ("red", "crimson", False),
        ("", "secret", False),
    ):
        with Grpc(shared.address, tenant=tenant, password=password) as rpc:
            listed = rpc.prefixes.List(pb.PrefixStoreListRequest(), metadata=rpc.metadata)
            assert ("ns" in [info.namespace for info in listed.prefixes]) is sees
            request = ssm_state_pb2.SSMStateFetchRequest(session="ns", layer=3)
            first = next(iter(rpc.ssm.Fetch(request, metadata=rpc.metadata)))
            assert first.header.found is sees
            described = rpc.prefixes.Describe(
                pb.PrefixStoreDescribeRequest(), metadata=rpc.metadata
            )
            assert not described.export_enabled, "tenants share this host"
            named = ssm_state_pb2.SSMStateExportRequest(session="ns", layers=[3])
            with pytest.raises(grpc.RpcError) as refused:
                rpc.ssm.Export(named, metadata=rpc.metadata)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    for tenant, password in (("blue", "crimson"), ("blue", "secret"), ("", "azure"), ("green", "")):
        with Grpc(shared.address, tenant=tenant, password=password) as rpc:
            with pytest.raises(grpc.RpcError) as refused:
                rpc.prefixes.List(pb.PrefixStoreListRequest(), metadata=rpc.metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_no_secret_reaches_the_log(shared: ServerProcess, as_user: Callable[[str], Wire]) -> None:
    wire = as_user("nobody")
    wire("AUTH", "blue", "a guess")
    wire("HELLO", "3", "AUTH", "blue", "another guess")
    log = "".join(shared.output)
    for secret in ("secret", "azure", "crimson", "guess"):
        assert secret not in log


def test_keys_that_are_gone_leave_nothing_to_count(
    shared: ServerProcess, as_user: Callable[[str], Wire]
) -> None:
    blue = as_user("blue")

    def used() -> int:
        with Grpc(shared.address, tenant="blue", password="azure") as rpc:
            return int(rpc.call("Describe").disk_used_bytes)

    empty = used()
    blue("SET", "short", "v")
    blue("RENAME", "short", "n" * 5_000)
    assert used() > empty + 5_000
    draw = random.Random(1)
    keys = [*(f"k{number}" for number in range(8)), "k" * 500]
    words = ["a", "b" * 30, "c" * 300]

    def command() -> tuple[Any, ...]:
        name, *fixed = draw.choice(CHANGES)
        drawn = {"key": keys, "word": words}
        return name, *(draw.choice(drawn[word]) if word in drawn else word for word in fixed)

    blue.pipeline(*(command() for _ in range(600)))
    assert used() > empty
    blue("DEL", *blue("KEYS", "*"))
    assert used() == empty


CHANGES: list[tuple[Any, ...]] = [
    ("SET", "key", "word"), ("APPEND", "key", "word"), ("SETRANGE", "key", 100, "word"),
    ("GETSET", "key", "word"), ("INCR", "key"), ("MSET", "key", "word", "key", "word"),
    ("RENAME", "key", "key"), ("RENAMENX", "key", "key"), ("COPY", "key", "key", "REPLACE"),
    ("EXPIRE", "key", 0), ("DEL", "key"), ("HSET", "key", "word", "word"), ("HDEL", "key", "word"),
    ("HINCRBY", "key", "word", 12_345), ("RPUSH", "key", "word", "word"), ("LPOP", "key"),
    ("LSET", "key", 0, "word"), ("LTRIM", "key", 0, 1), ("LREM", "key", 0, "word"),
    ("LMOVE", "key", "key", "LEFT", "RIGHT"), ("SADD", "key", "word", "word"), ("SPOP", "key"),
    ("SREM", "key", "word"), ("SMOVE", "key", "key", "word"), ("SUNIONSTORE", "key", "key", "key"),
    ("ZADD", "key", 1, "word"), ("ZINCRBY", "key", 1, "word"), ("ZREM", "key", "word"),
    ("ZPOPMIN", "key"),
]  # fmt: skip


class Limited(NamedTuple):
    """A server whose tenants may have 4 MiB each, and a connection of two of them."""

    server: ServerProcess
    blue: Wire
    red: Wire


@pytest.fixture
def limited(start_server: Callable[..., ServerProcess]) -> Iterator[Limited]:
    server = start_server(
        "--resp", "127.0.0.1:0", "--tenant", "blue=azure", "--tenant", "red=crimson",
        "--tenant-budget", "4MiB", PION_PASSWORD="secret",
    )  # fmt: skip
    with (
        contextlib.closing(Wire(server.ready["resp"])) as blue,
        contextlib.closing(Wire(server.ready["resp"])) as red,
    ):
        blue("AUTH", *USERS["blue"])
        red("AUTH", *USERS["red"])
        yield Limited(server, blue, red)


def test_quotas_count_everything_a_tenant_keeps(limited: Limited) -> None:
    _, blue, red = limited
    red("SET", "k", bytes(1 << 20))
    answers = [blue("SET", f"k{number}", bytes(1 << 20)) for number in range(6)]
    assert answers[:3] == ["OK"] * 3
    assert answers[-1].text.startswith("OOM ")
    blue("DEL", *(f"k{number}" for number in range(6)))
    answers = [blue("HSET", f"h{number}", "f", bytes(50_000)) for number in range(100)]
    assert answers[:50] == [1] * 50
    assert answers[-1].text.startswith("OOM "), "what is kept in the database is not counted"
    assert blue("HGET", "h0", "f") == bytes(50_000)
    assert blue("SSM.PREFIX.STORE", "s", 0, bytes(3 << 20)).text.startswith("OOM ")
    assert red("SET", "k2", bytes(1 << 20)) == "OK"
    small = [("SET", f"s{number}", bytes(50_000)) for number in range(100)]
    answers = blue.pipeline(*[("DEL", f"h{number}") for number in range(100)], *small)
    accepted = answers[100:].count("OK")
    assert 50 <= accepted < 100, "what fits is refused for what follows, or the quota does not hold"
    again = [("SET", f"l{number}", bytes(1 << 20)) for number in range(3)]
    answers = blue.pipeline(*[("DEL", f"s{number}") for number in range(100)], *again)
    assert answers[100:] == ["OK"] * 3, "what is deleted first makes no room for large values"
    blue("DEL", *(f"l{number}" for number in range(3)))
    assert blue("SSM.PREFIX.STORE", "s", 0, bytes(3 << 20)) == "OK"
    blue("KV.PREFIX.REGISTER", "ns", 64, "fp16")
    assert blue("V.STOREBATCH", "ns_pk", 0, 0, 20_000, bytes(20_000 * 128), "FMT", "F16") == "OK"
    assert blue("SSM.PREFIX.FETCH", "s", 0) is None, "what was not used for longest goes"


def test_quotas_count_tables_of_hashes(limited: Limited) -> None:
    server, blue, red = limited
    count = 1 << 17
    table = ("BLOCKS", 64, count, bytes(8 * count))  # 1 MiB

    def declare(wire: Wire, name: str) -> Any:
        return wire("KV.PREFIX.REGISTER", name, 64, "fp16", *table)

    assert blue("KV.PREFIX.REGISTER", "rows", 64, "fp16") == "OK"
    assert blue("V.STOREBATCH", "rows_pk", 0, 0, 20_000, bytes(20_000 * 128), "FMT", "F16") == "OK"
    assert [declare(blue, "again") for _ in range(6)] == ["OK"] * 6, "what was replaced counts"
    assert fields(blue("V.INFO"))["total_tokens"] == "20000"
    assert [declare(blue, f"t{number}") for number in range(2)] == ["OK"] * 2
    assert fields(blue("V.INFO"))["total_tokens"] == "0", "what was not used for longest goes"
    assert declare(blue, "t2").text.startswith("OOM "), "tables are not counted"
    sample = Sample("grpc", 1)
    hashes = types_pb2.BlockTable(block_tokens=64, hashes=bytes(8 * count))
    with Grpc(server.address, tenant="blue", password="azure") as rpc:
        layout = layout_to_message(sample.layout)
        said = refused(lambda: rpc.call("Register", namespace="grpc", layout=layout, table=hashes))
        assert (said.reason, said.metadata["needed_bytes"]) == ("QUOTA", str(8 * count))
        assert refused(lambda: rpc.store(sample, table=hashes)).reason == "QUOTA"
    assert declare(red, "t") == "OK"
    assert blue("KV.PREFIX.DROP", "t0") > 0
    assert declare(blue, "t2") == "OK", "what is gone is counted"
