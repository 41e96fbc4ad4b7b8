"""`pion-server`: scripts written for another server start this one, and nothing starts by mistake."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pion_grpc.backends import Dense
from pion_grpc.backends.reference import attend as reference
from pion_grpc.cli.pion_server import config_of, parser
from pion_wire.v1 import prefix_store_pb2 as pb
from tests.ports import free_ports
from tests.resp.wire import Refused, Wire, fields
from tests.server.test_attend import normal, pair
from tests.server.wire import Wire as Grpc

COMMAND = [sys.executable, "-m", "pion_grpc.cli.pion_server"]


class PionServer:
    """A server started as scripts do it: in a working directory, on a port."""

    def __init__(self, directory: Path, *flags: str, **environment: str) -> None:
        self.port = free_port()
        self.log = directory / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "-p", str(self.port), *flags],
                cwd=directory,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
            )
        while True:
            try:
                self.wire = Wire(f"127.0.0.1:{self.port}")
                break
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
        self.wire("PING")  # answered once it serves

    def end(self, number: int = signal.SIGTERM) -> int:
        self.wire.close()
        self.process.send_signal(number)
        return self.process.wait(30)


def free_port() -> int:
    """A port with two free ones behind it."""
    return free_ports(3)[0]


@pytest.fixture
def start(short_tmp: Path) -> Iterator[Callable[..., PionServer]]:
    running: list[PionServer] = []

    def start(*flags: str, **environment: str) -> PionServer:
        running.append(PionServer(short_tmp, *flags, **environment))
        return running[-1]

    yield start
    for server in running:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


def test_the_usual_command_line_serves(start: Callable[..., PionServer], short_tmp: Path) -> None:
    server = start(
        "--kvcache", "--metal-attention", "-w", "1", "--no-auto-detect", "--no-auto-embed",
        "--no-crash-log", "--wal-size", "256", "--wal-full-policy", "drop", "--profile", "kv",
    )  # fmt: skip
    wire = server.wire
    assert wire("PING") == "PONG"
    info = fields(wire("INFO"))
    assert info["tcp_port"] == str(server.port)
    assert info["process_id"] == str(server.process.pid)
    assert fields(wire("KV.PREFIX.INFO"))["vstore_max_sessions"] == "256"
    assert (short_tmp / "pion-data" / "catalog.db").exists()
    assert {path.name for path in short_tmp.iterdir()} == {"pion-data", "log"}
    own = Wire(f"127.0.0.1:{server.port + 2}")
    assert own("PING") == "PONG"
    own.close()
    assert server.end() == 0


def test_nothing_acknowledged_is_lost_in_a_crash_and_the_log_says_so(
    start: Callable[..., PionServer],
) -> None:
    server = start("--kvcache")
    assert "replayed" not in server.log.read_text()
    server.wire("KV.PREFIX.REGISTER", "ns", 64, "fp16")
    server.wire("V.STOREBATCH", "ns_pk", 0, 0, 2, bytes(512))
    server.wire("SSM.PREFIX.STORE", "ns", 1, b"state")
    server.wire("SET", "k", "v")
    server.end(signal.SIGKILL)
    server = start("--kvcache")
    log = server.log.read_text()
    assert "WAL replayed" in log
    assert "SSM WAL replayed" not in log
    assert server.wire("KV.PREFIX.LOOKUP", "ns") == "HIT"
    assert server.wire("SSM.PREFIX.FETCH", "ns", 1) == b"state"
    assert server.wire("GET", "k") == b"v"
    assert int(fields(server.wire("KV.PREFIX.INFO"))["wal_replayed"]) >= 3


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--por", "5"], "--por"),
        (["-p", "x"], "-p"),
        (["--tenant", "blue=azure"], "--requirepass"),
        (["--requirepass", "s", "--tenant", "a:b=c"], "a:b"),
        (["--requirepass", "s", "--tenant", "blue"], "NAME=PASSWORD"),
        (["--requirepass", "s", "--tenant", "a=b", "--tenant", "a=c"], "twice"),
        (["--requirepass", ""], "empty"),
        (["--requirepass-file", "/nonexistent"], "/nonexistent"),
        (["--requirepass-file", "/dev/null"], "empty"),
        (["--bind", "not-an-address"], "not-an-address"),
        (["--bind", "not an address"], "--bind"),
        (["--port", "70000"], "--port"),
        (["--data", ""], "--data: the path is empty"),
        (["--data", "/dev/null"], "data directory /dev/null"),
        (["--data", "/dev/null/none"], "data directory /dev/null/none"),
        (["-w", "4"], "--independent-workers"),
        (["-w", "2", "--independent-workers", "--metal-attention"], "one owner"),
        (["-w", "2", "--independent-workers", "--metal-attention-fp16"], "one owner"),
        (["-w", "2", "--independent-workers", "--cuda-attention"], "one owner"),
        (["--metal-attention", "--fa-window", "-1"], "--fa-window"),
        (["--maxmemory", "x"], "--maxmemory: 'x' is not a size"),
        (["--maxmemory", "101%"], "--maxmemory: '101%' is not a size"),
        (["--maxmemory", "100k"], "--maxmemory: at least 16 MiB"),
        (["--maxmemory", "nan%"], "--maxmemory: 'nan%' is not a size"),
    ],
)
def test_what_it_does_not_understand_keeps_it_from_starting(
    short_tmp: Path, flags: list[str], complaint: str
) -> None:
    done = subprocess.run(
        [*COMMAND, "-p", str(free_port()), *flags], cwd=short_tmp, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "FATAL" in done.stderr
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_busy_port_is_named(start: Callable[..., PionServer], short_tmp: Path) -> None:
    server = start()
    command = [*COMMAND, "-p", str(server.port), "--data", "other"]
    done = subprocess.run(command, cwd=short_tmp, capture_output=True, text=True)
    assert done.returncode == 1
    assert "FATAL" in done.stderr
    assert str(server.port) in done.stderr


@pytest.mark.parametrize("how", ["flag", "file", "environment", "workers"])
def test_a_password_is_asked_for_however_it_was_given(
    start: Callable[..., PionServer], short_tmp: Path, how: str
) -> None:
    bind = ("--bind", "127.0.0.1")
    if how == "flag":
        server = start("--requirepass", "secret", *bind)
    elif how == "file":
        (short_tmp / "secret").write_text("secret \n")
        server = start("--requirepass-file", str(short_tmp / "secret"), *bind)
    elif how == "workers":
        server = start("--requirepass", "secret", *bind, "-w", "2", "--independent-workers")
    else:
        server = start(*bind, PION_REQUIREPASS="secret")
    assert server.wire("PING").text.startswith("NOAUTH")
    assert server.wire("AUTH", "secret") == "OK"
    assert "secret" not in server.log.read_text()


def test_the_environment_is_not_preferred_to_the_command_line_nor_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PION_PASSWORD", "another")
    monkeypatch.setenv("PION_PASSWORD_FILE", "/nonexistent")
    monkeypatch.setenv("PION_TENANTS", "blue=azure")
    (tmp_path / "pion-data").mkdir()
    for flags in (["--requirepass", "secret"], ["--requirepass-file", "file"]):
        (tmp_path / "file").write_text("secret\n")
        config = config_of(parser().parse_args(flags))
        assert config.access() == {"": "secret", "blue": "azure"}
        assert "secret" not in repr(config)
    assert os.environ["PION_PASSWORD"] == "another"


def test_a_commit_without_a_log_promises_nothing(start: Callable[..., PionServer]) -> None:
    server = start("--kvcache", "--no-wal")
    assert server.wire("KV.PREFIX.COMMIT") == Refused(
        "ERR KV.PREFIX.COMMIT: --no-wal, writes are not logged"
    )
    assert server.end() == 0


class Lane:
    """A connection of the binary lane."""

    def __init__(self, server: PionServer) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port + 1), 10)
        self.file = self.socket.makefile("rb")

    def ask(self, code: int, body: bytes = b"") -> tuple[int, bytes]:
        self.socket.sendall(b"\x5e\xca" + bytes([code]) + len(body).to_bytes(4, "little") + body)
        return self.answer()

    def answer(self) -> tuple[int, bytes]:
        header = self.file.read(7)
        assert header[:2] == b"\x5e\xca"
        return header[2], self.file.read(int.from_bytes(header[3:], "little"))

    def is_closed(self) -> bool:
        return self.file.read(1) == b""

    def close(self) -> None:
        self.file.close()
        self.socket.close()


OK, MISS, ERROR = (0, b""), (1, b""), (2, b"")
PING, QUERY, AUTH = 0xFF, 0x24, 0x37


def test_the_binary_lane_answers_and_keeps_its_rules(start: Callable[..., PionServer]) -> None:
    server = start("--kvcache")
    lane = Lane(server)
    assert lane.ask(PING) == OK
    assert lane.ask(PING, b"x") == MISS
    assert lane.ask(0x77) == MISS
    assert lane.ask(QUERY, b"\1\0") == MISS  # a body that ends at once
    lane.socket.sendall(b"\x5e\xca\x24\x64\0\0\0\1")  # and one of which nothing more comes
    assert lane.answer() == ERROR
    assert lane.is_closed()
    lane.close()
    lane = Lane(server)
    lane.socket.sendall(b"*1\r\n$4\r")  # as long as a header
    assert lane.is_closed()
    lane.close()


def test_strangers_get_nothing_on_the_binary_lane(start: Callable[..., PionServer]) -> None:
    server = start(
        "--requirepass", "secret", "--tenant", "blue=azure", "--bind", "127.0.0.1", "--kvcache"
    )  # fmt: skip
    lane = Lane(server)
    for secret, outcome in ((b"wrong", ERROR), (b"azure", ERROR), (b"secret", OK)):
        assert lane.ask(PING) == ERROR
        assert lane.ask(AUTH, secret) == outcome
    assert lane.ask(PING) == OK
    lane.close()


@pytest.mark.parametrize(
    ("flags", "refused", "bytes_per_value", "window"),
    [
        (["--metal-attention"], False, 4, 0),
        (["--cuda-attention", "--fa-window", "5"], False, 4, 5),
        (["--metal-attention-fp16"], False, 2, 0),
        (["--metal-attention", "--metal-attention-fp16", "--fa-window", "1"], False, 2, 1),
        ([], True, 0, 0),
        (["--fa-window", "5"], True, 0, 0),
    ],
)
def test_attention_flags_are_not_taken_for_others(
    start: Callable[..., PionServer],
    short_tmp: Path,
    flags: list[str],
    refused: bool,
    bytes_per_value: int,
    window: int,
) -> None:
    server = start("--kvcache", *flags)
    k, v = pair("flags")
    reply = server.wire("ATTEND.PREFIX.STORE", "s", 0, *k.shape, k.tobytes(), v.tobytes())
    if refused:
        assert reply.text.startswith("ERR attention engine not available")
        return
    assert reply == "OK"
    q = normal("flags")
    got = server.wire("ATTEND.PREFIX.QUERY", "s", 0, 2, 16, 1, q.tobytes())
    want = reference(k, v, Dense(q=q, window=window)).out
    tolerance = 1e-5 if bytes_per_value == 4 else 5e-3
    np.testing.assert_allclose(np.frombuffer(got, "<f4").reshape(2, 1, 16), want, atol=tolerance)
    with Grpc(f"unix:{short_tmp}/pion-data/grpc.sock") as rpc:
        described = rpc.prefixes.Describe(pb.PrefixStoreDescribeRequest())
    assert described.resident_used_bytes == 2 * k.size * bytes_per_value
