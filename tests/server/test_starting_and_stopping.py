"""Starting with what was said and nothing else, and stopping without cutting anybody off."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2

from pion_grpc.cli.main import main
from pion_grpc.config import (
    SETTINGS,
    Config,
    environment_settings,
    parse_address,
    variable_of,
)
from pion_grpc.server import CHANNEL_OPTIONS
from pion_wire.layout import DType, Layout, Side, TensorLayout
from pion_wire.v1 import prefix_store_pb2 as pb
from tests.conftest import ServerProcess
from tests.server.wire import Sample, Wire, collect, eventually, layout_of, refused

WIDE = Layout((TensorLayout(0, Side.K, 16, 1_024, DType.F16),))
"""Rows of 32 KiB."""


def cannot_start(start_server, *flags: str, **options: str) -> str:
    with pytest.raises(RuntimeError) as failed:
        start_server(*flags, **options)
    output = str(failed.value)
    assert "Traceback" not in output
    return output


@pytest.mark.parametrize(
    "flags",
    [
        ("--no-such-option",),
        ("--disk", "1GiB"),  # no abbreviations: a later option could make them mean another
        ("--disk-budget", "much"),
        ("--disk-budget", "-1"),
        ("--disk-budget", "1KiB"),
        ("--streams-max", "0"),
        ("--streams-max", "many"),
        ("--stall-ms", "-5"),
        ("--grace-ms", "1e9"),
        ("leftover",),
    ],
)
def test_no_server_starts_with_what_it_does_not_understand(start_server, flags) -> None:
    output = cannot_start(start_server, *flags)
    assert flags[0] in output


def test_no_server_starts_with_an_environment_it_does_not_understand(start_server) -> None:
    assert "PION_DISK_BUDGET" in cannot_start(start_server, PION_DISK_BUDGET="much")
    assert "PION_NO_EXPORT" in cannot_start(start_server, PION_NO_EXPORT="perhaps")


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("garbage", "write HOST:PORT"),
        ("127.0.0.1", "write HOST:PORT"),
        (":50051", "write HOST:PORT"),
        ("::1:50051", "write HOST:PORT"),
        ("[127.0.0.1]:50051", "write HOST:PORT"),
        ("http://localhost:50051", "write HOST:PORT"),
        ("127.0.0.1:0,0.0.0.0:0", "write HOST:PORT"),
        ("localhost:http", "write HOST:PORT"),
        ("127.0.0.1:-1", "write HOST:PORT"),
        ("127.0.0.1:70000", "0 to 65535"),
        ("unix:", "unix:PATH"),
        (f"unix:/tmp/{'x' * 99}", "at most 103"),
        ("unix:/no/such/directory/socket", "no directory /no/such/directory"),
    ],
)
def test_an_address_is_not_guessed_at(address: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=re.escape(wanted)) as refused_as_flag:
        Config(listen=address)
    assert str(refused_as_flag.value).startswith("--listen")
    with pytest.raises(ValueError, match=re.escape(wanted)) as refused_as_flag:
        Config(resp=address)
    assert str(refused_as_flag.value).startswith("--resp")


def test_an_address_that_can_be_is_not_refused(short_tmp: Path) -> None:
    for address, local in (
        ("127.0.0.1:65535", True),
        ("localhost:0", True),
        ("[::1]:0", True),
        ("[::]:0", False),
        ("example.invalid:1", False),
        (f"unix:{short_tmp}/{'x' * (102 - len(str(short_tmp)))}", True),
    ):
        assert Config(listen=address).listen == address == str(parse_address(address))
        assert parse_address(address).is_local == local
    inside = short_tmp / "made by the server"
    assert Config(data=inside, listen=f"unix:{inside}/socket").resp == ""


def test_a_server_says_which_address_it_does_not_understand(start_server, short_tmp: Path) -> None:
    for flags, environment, named in (
        (("--resp", "garbage"), {}, "--resp"),
        ((), {"PION_RESP": "127.0.0.1:70000"}, "PION_RESP"),
    ):
        output = cannot_start(start_server, *flags, **environment)
        assert named in output
        assert "other hosts" not in output
    assert "at most 103" in cannot_start(start_server, listen=f"unix:{short_tmp}/{'x' * 103}")


def test_what_is_empty_is_not_set() -> None:
    empty = {variable_of(field): "" for field in SETTINGS}
    assert environment_settings(empty) == {}
    with pytest.raises(ValueError, match="PION_STREAMS_MAX: 'abc' is not a whole number"):
        environment_settings({"PION_STREAMS_MAX": "abc"})


def test_help_does_not_show_defaults_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "(default 64)" in shown
    assert "(default )" not in shown


def test_a_flag_wins_over_the_environment(start_server) -> None:
    environment = {"PION_DISK_BUDGET": "100MiB", "PION_STREAMS_MAX": "7"}
    server = start_server("--disk-budget", "50MiB", **environment)
    with Wire(server.address) as wire:
        answer = wire.call("Describe")
    assert answer.disk_budget_bytes == 50 << 20
    assert {limit.name: limit.value for limit in answer.limits}["streams_max"] == 7


def test_port_0_is_answered_with_the_real_one(start_server) -> None:
    server = start_server(listen="127.0.0.1:0")
    host, _, port = server.address.rpartition(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    (ready,) = [entry for entry in server.log if entry["event"] == "ready"]
    assert ready["pid"] == server.process.pid
    with Wire(server.address) as wire:
        assert wire.names() == []


def test_a_busy_port_refuses_to_start(start_server, short_tmp: Path) -> None:
    first = start_server(listen="127.0.0.1:0")
    output = cannot_start(start_server, directory=short_tmp / "other", listen=first.address)
    assert f"{first.address}: another program listens there" in output
    with Wire(first.address) as wire:
        assert wire.names() == []


def test_an_address_that_is_not_there_is_not_taken_for_another_server(start_server) -> None:
    output = cannot_start(start_server, "--insecure-bind", listen="192.0.2.1:50051")
    assert "192.0.2.1:50051: this machine does not have that address" in output
    assert "another" not in output


def test_a_name_that_nobody_knows_is_not_taken_for_another_server(start_server) -> None:
    for more in ([], ["--workers", "2"]):
        output = cannot_start(start_server, "--insecure-bind", *more, listen="host.invalid:0")
        assert "host.invalid:0: this machine does not know that name" in output


def test_a_busy_socket_is_not_taken_away(start_server, short_tmp: Path) -> None:
    first = start_server(directory=short_tmp / "data")
    output = cannot_start(start_server, directory=short_tmp / "other", listen=first.address)
    assert "another server" in output
    with Wire(first.address) as wire:
        assert wire.names() == []


def test_a_dead_servers_socket_is_no_obstacle(start_server) -> None:
    first = start_server()
    first.kill()
    assert Path(first.address.removeprefix("unix:")).is_socket()
    with Wire(start_server().address) as wire:
        assert wire.names() == []


def test_a_file_in_the_place_of_the_socket_is_not_removed(start_server, short_tmp: Path) -> None:
    path = short_tmp / "precious"
    path.write_text("do not remove")
    assert "no socket" in cannot_start(start_server, listen=f"unix:{path}")
    assert "no socket" in cannot_start(start_server, "--resp", f"unix:{path}")
    assert path.read_text() == "do not remove"


def test_the_data_directory_is_not_taken_where_it_cannot_be(start_server, short_tmp: Path) -> None:
    path = short_tmp / "file"
    path.write_text("")
    assert str(path) in cannot_start(start_server, directory=path)


def test_a_data_directory_that_cannot_be_used_is_no_traceback(
    start_server, short_tmp: Path
) -> None:
    data = short_tmp / "data"
    (data / "host-token").mkdir(parents=True)
    assert f"cannot use the data directory {data}" in cannot_start(start_server, directory=data)
    assert list((data / "run").glob("*.lock")) == []


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a file system")
def test_a_read_only_data_directory_is_no_traceback(start_server, short_tmp: Path) -> None:
    assert start_server().stop() == 0
    data = str(short_tmp / "data")
    done = subprocess.run(["mount", "--bind", "-o", "ro", data, data], capture_output=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr!r}")
    try:
        output = cannot_start(start_server)
    finally:
        subprocess.run(["umount", "-l", data], check=True)
    assert f"cannot use the data directory {data}: Read-only file system" in output


def test_no_channel_option_is_ignored_for_its_name() -> None:
    core = Path(cygrpc.__file__).read_bytes()
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in core, "the test can fail"
    for name, _ in CHANNEL_OPTIONS:
        assert re.search(rb"(?<![a-z_.])" + re.escape(name.encode()) + rb"\0", core), name


def test_pings_of_proxies_are_no_reason_to_hang_up(start_server) -> None:
    server = start_server(listen="127.0.0.1:0")
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0))
        for number in range(50):  # HTTP/2 allows two without data
            peer.sendall(frame(6, 0, number.to_bytes(8, "big")))
        answered, settings = set(), b""
        while len(answered) < 50:
            kind, flags, payload = read_frame(peer)
            assert kind != 7, "GOAWAY"
            settings += payload if (kind, flags) == (4, 0) else b""
            if (kind, flags) == (6, 1):
                answered.add(payload)
        assert (3).to_bytes(2, "big") + (2_048).to_bytes(4, "big") in settings, "streams at once"


def frame(kind: int, flags: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2 on no stream."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + payload


def read_frame(peer: socket.socket) -> tuple[int, int, bytes]:
    head = peer.recv(9, socket.MSG_WAITALL)
    assert len(head) == 9, "hung up"
    return head[3], head[4], peer.recv(int.from_bytes(head[:3], "big"), socket.MSG_WAITALL)


# -- stopping


def ended(server: ServerProcess) -> int:
    """Waits for the end of a server that has been told; returns its exit status."""
    status = server.process.wait(30)
    server.stop()  # closes what is left of it here
    return status


def test_a_stopped_server_keeps_everything(start_server) -> None:
    server = start_server()
    sample = Sample("stop/kept", 100)
    with Wire(server.address) as wire:
        wire.store(sample)
    assert server.stop() == 0
    assert list((server.directory / "run").glob("*.lock")) == []
    with Wire(start_server().address) as wire:
        assert wire.fetch("stop/kept").tensors == sample.tensors


def test_a_draining_server_says_so_and_finishes_what_runs(start_server) -> None:
    server = start_server("--drain-ms", "60000", "--grace-ms", "60000")
    sample = Sample("stop/running", 2_000, WIDE)
    with Wire(server.address) as wire:
        wire.store(sample)
        watch = wire.health.Watch(health_pb2.HealthCheckRequest(service="pion.v1.PrefixStore"))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        running = wire.streaming(namespace="stop/running")
        first = next(running)
        server.process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", "pion.v1.PrefixStore", "pion.v1.Stats"):
            assert wire.healthy(service) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert wire.lookup("stop/running").hit, "proxies have not noticed yet"
        watch.cancel()
        got = collect([first, *running])
        assert got.tensors == sample.tensors
        server.process.send_signal(signal.SIGTERM)  # no need to wait a minute
    assert ended(server) == 0


def test_what_runs_when_the_drain_is_over_is_finished(start_server) -> None:
    server = start_server("--grace-ms", "60000")
    sample = Sample("stop/grace", 2_000, WIDE)
    half, go_on = threading.Event(), threading.Event()

    def slowly():
        for index, message in enumerate(sample.messages()):
            if index == 10:
                half.set()
                go_on.wait()
            yield message

    with Wire(server.address) as wire, Wire(server.address) as other:
        stored: list[object] = []
        storing = threading.Thread(target=lambda: stored.append(wire.send(slowly())))
        storing.start()
        half.wait()
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: turned_away(other))
        go_on.set()
        storing.join()
        assert stored[0].token_count == 2_000  # type: ignore[attr-defined]
    assert ended(server) == 0
    with Wire(start_server().address) as wire:
        assert wire.fetch("stop/grace").tensors == sample.tensors


def turned_away(wire: Wire) -> bool:
    try:
        # A call that meets the stop may be left without any answer by gRPC itself: the next one is not.
        wire.prefixes.Describe(pb.PrefixStoreDescribeRequest(), timeout=1)
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


def test_a_second_signal_does_not_wait_for_what_runs(start_server) -> None:
    server = start_server("--drain-ms", "3600000", "--grace-ms", "3600000")
    sample = Sample("stop/hurry", 4_000, WIDE)
    with Wire(server.address) as wire:
        wire.store(Sample("stop/kept", 10))
        wire.store(sample)
        running = wire.streaming(namespace="stop/hurry", timeout_s=None)
        next(running)
        for _ in range(2):
            server.process.send_signal(signal.SIGTERM)
            # Two signals that meet are one.
            eventually(lambda: any(entry["event"] == "draining" for entry in server.log))
        assert ended(server) == 0
        assert refused(lambda: list(running)).code != grpc.StatusCode.OK
    with Wire(start_server().address) as wire:
        assert wire.names() == ["stop/hurry", "stop/kept"]
        assert wire.fetch("stop/hurry").tensors == sample.tensors


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a thread from outside")
def test_a_signal_that_a_thread_is_handed_is_not_lost(start_server) -> None:
    server = start_server()
    with Wire(server.address) as wire:
        wire.lookup("stop/none")  # threads of every kind are up
    threads = {int(name) for name in os.listdir(f"/proc/{server.process.pid}/task")}
    last = max(threads - {server.process.pid})
    assert ctypes.CDLL(None).tgkill(server.process.pid, last, signal.SIGTERM) == 0
    assert ended(server) == 0


def test_a_server_that_is_interrupted_stops_as_well(start_server) -> None:
    server = start_server()
    server.process.send_signal(signal.SIGINT)
    assert ended(server) == 0


def test_a_store_that_never_ends_does_not_hold_a_server_up(start_server) -> None:
    server = start_server("--grace-ms", "100")
    begun, over = threading.Event(), threading.Event()

    def endless():
        yield next(Sample("stop/endless", 10, layout_of()).messages())
        begun.set()
        over.wait()

    with Wire(server.address) as wire:
        storing = threading.Thread(target=lambda: refused(lambda: wire.send(endless())))
        storing.start()
        begun.wait()
        assert server.stop() == 0
        over.set()
        storing.join()
    assert os.listdir(server.directory / "segments") == []


def test_memory_locks_and_descriptors_of_a_stopped_server_are_gone(start_server) -> None:
    server: ServerProcess = start_server()
    assert server.stop() == 0
    assert not (server.directory / "catalog.db-wal").exists(), "the log is folded in"
