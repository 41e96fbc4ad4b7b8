"""Clients that read slowly, or not at all, or go away: nobody else notices, and nothing grows.

Memory is the server's peak between two looks (`VmHWM`), so that what is freed at once is seen, too.
"""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2

from pion_grpc.server import UNARY_THREADS
from pion_wire.layout import DType, Layout, Side, TensorLayout
from tests.conftest import ServerProcess
from tests.memory import clear_peak, peak_bytes
from tests.server.wire import Sample, Wire, eventually, refused

pytestmark = pytest.mark.faults

WIDE = Layout((TensorLayout(0, Side.K, 16, 1_024, DType.F16),))
"""Rows of 32 KiB."""
BIG = Sample("streams/big", 2_000, WIDE)
"""64 MB."""
SMALL = Sample("streams/small", 100)


def filled(server: ServerProcess) -> Wire:
    wire = Wire(server.address)
    wire.store(BIG)
    wire.store(SMALL)
    assert wire.fetch(BIG.namespace).tensors == BIG.tensors  # everything is warm
    return wire


def shape(server: ServerProcess) -> tuple[int, int]:
    """Threads and open files of a server."""
    process = psutil.Process(server.process.pid)
    return process.num_threads(), process.num_fds()


def open_segments(server: ServerProcess) -> list[str]:
    """The segments that a server has open."""
    files = psutil.Process(server.process.pid).open_files()
    return [file.path for file in files if file.path.endswith(".safetensors")]


class SlowRoad:
    """A relay in front of a server that lets so many bytes per second through to its client."""

    def __init__(self, address: str, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        host, _, port = address.rpartition(":")
        self._server = socket.create_connection((host, int(port)))
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed_bytes = 0
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def close(self) -> None:
        for end in (self._listener, self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        self._client, _ = self._listener.accept()
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        there = threading.Thread(target=self._there)
        self._threads.append(there)
        there.start()
        step = self._rate // 20
        with contextlib.suppress(OSError):
            while data := self._server.recv(step):
                self._client.sendall(data)
                self.passed_bytes += len(data)
                time.sleep(len(data) / self._rate)  # this is the slowness itself

    def _there(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(1 << 16):
                self._server.sendall(data)


def read_slowly(start_server: Any, seconds: float) -> None:
    server = start_server(listen="127.0.0.1:0")
    with filled(server) as wire:
        roads = [SlowRoad(server.address, 100_000) for _ in range(4)]
        readers = [Wire(road.address) for road in roads]
        clear_peak(server.process.pid)
        before = server.rss_bytes
        calls = [reader.streaming(namespace=BIG.namespace, timeout_s=None) for reader in readers]
        for call in calls:
            threading.Thread(target=drain, args=[call]).start()
        enough = 100_000 * seconds
        others = 0
        while min(road.passed_bytes for road in roads) < enough:
            assert wire.fetch(SMALL.namespace).tensors == SMALL.tensors
            others += 1
        assert others > 10
        grown = peak_bytes(server.process.pid) - before
        assert grown < 48 << 20, f"{grown} bytes for {len(roads)} readers"
        assert all(call.is_active() for call in calls), "slow is not stalled"
        for call, road, reader in zip(calls, roads, readers, strict=True):
            call.cancel()
            road.close()
            reader.close()


def drain(call: Any) -> None:
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            pass


def test_slow_readers_do_not_grow_the_server(start_server) -> None:
    read_slowly(start_server, 5)


@pytest.mark.soak
def test_slow_readers_do_not_grow_the_server_for_long(start_server) -> None:
    read_slowly(start_server, 20)


def test_a_reader_that_stops_is_cut_off_and_others_are_served(start_server) -> None:
    # Longer than this process, on a busy machine, goes without sending or taking anything.
    server = start_server("--stall-ms", "3000", "--streams-max", "2")
    with filled(server) as wire, Wire(server.address) as stopped:
        threads, _ = shape(server)
        assert not open_segments(server)
        call = stopped.streaming(namespace=BIG.namespace, timeout_s=None)
        next(call)
        assert open_segments(server)
        while not (cut := [entry for entry in server.log if entry["event"] == "streams cut off"]):
            assert wire.fetch(SMALL.namespace).tensors == SMALL.tensors
        assert (cut[0]["count"], cut[0]["level"]) == (1, "warning")
        assert refused(lambda: list(call)).code == grpc.StatusCode.CANCELLED
        eventually(lambda: not open_segments(server))
        assert shape(server)[0] <= threads + 4
        eventually(lambda: all_at_once(wire, 2))
        assert wire.receipt().tokens_served % SMALL.token_count == 0, "the cut one saved nothing"


def all_at_once(wire: Wire, permits: int) -> bool:
    """Whether every permit of a server is there."""
    calls = [wire.streaming(namespace=BIG.namespace) for _ in range(permits)]
    try:
        for call in calls:
            next(call)
    except grpc.RpcError:
        return False
    finally:
        for call in calls:
            call.cancel()
    return True


def test_a_writer_that_stops_is_cut_off_and_leaves_nothing(start_server) -> None:
    server = start_server("--stall-ms", "1000")
    begun, over = threading.Event(), threading.Event()

    def half() -> Iterator[bytes]:
        messages = BIG.messages()
        for _ in range(10):
            yield next(messages)
        begun.set()
        over.wait()

    with Wire(server.address) as wire:
        refusals: list[Any] = []
        storing = threading.Thread(
            target=lambda: refusals.append(refused(lambda: wire.send(half())))
        )
        storing.start()
        begun.wait()
        eventually(lambda: list((server.directory / "segments").iterdir()))
        eventually(lambda: not list((server.directory / "segments").iterdir()))
        assert wire.names() == []
        eventually(lambda: wire.call("Describe").disk_used_bytes < 8 << 20)
        over.set()
        storing.join()
        assert refusals[0].code == grpc.StatusCode.CANCELLED


def cancel_fetches(start_server: Any, count: int) -> None:
    server = start_server("--streams-max", "16")
    chance = random.Random(count)
    with filled(server) as wire:

        def cancel_some(share: int) -> None:
            for _ in range(share):
                with contextlib.suppress(grpc.RpcError):
                    call = wire.streaming(namespace=BIG.namespace)
                    for _ in range(chance.randrange(3)):
                        next(call)
                    call.cancel()

        def cancel_with_eight_clients(share: int) -> None:
            with ThreadPoolExecutor(8) as pool:
                for done in [pool.submit(cancel_some, share // 8) for _ in range(8)]:
                    done.result()

        cancel_with_eight_clients(400)
        before, (_, descriptors) = server.rss_bytes, shape(server)
        cancel_with_eight_clients(count)
        # The pools of threads and of connections to the catalogue may still grow to their size.
        eventually(lambda: shape(server)[1] < descriptors + 64)
        assert shape(server)[0] <= 16 + UNARY_THREADS + 16
        eventually(lambda: all_at_once(wire, 16))
        grown = server.rss_bytes - before
        assert grown < 48 << 20, f"{grown} bytes after {count} cancelled fetches"
        eventually(lambda: not_refused(wire))
    server.stop()
    assert not [entry for entry in server.log if entry.get("level") == "error"]
    assert "Traceback" not in "".join(server.output)


def test_cancelled_fetches_leave_neither_memory_nor_threads_nor_permits(start_server) -> None:
    cancel_fetches(start_server, 1_000)


@pytest.mark.soak
def test_ten_thousand_cancelled_fetches_leave_nothing(start_server) -> None:
    cancel_fetches(start_server, 10_000)


def test_more_streams_than_permits_are_refused_and_unary_calls_are_not(start_server) -> None:
    server = start_server("--streams-max", "4")
    with filled(server) as wire, Wire(server.address) as other:
        running = [wire.streaming(namespace=BIG.namespace) for _ in range(4)]
        for call in running:
            next(call)
        with ThreadPoolExecutor(32) as pool:
            tries = [pool.submit(refused, lambda: wire.fetch(SMALL.namespace)) for _ in range(200)]
            for _ in range(100):
                assert other.lookup(SMALL.namespace).hit
                assert other.healthy() == health_pb2.HealthCheckResponse.SERVING
            told = [done.result() for done in tries]
        assert {refusal.reason for refusal in told} == {"TOO_MANY_STREAMS"}
        assert all(refusal.retry_ms > 0 for refusal in told)
        running[0].cancel()
        eventually(lambda: not_refused(other))
        for call in running:
            call.cancel()


def not_refused(wire: Wire) -> bool:
    try:
        return wire.fetch(SMALL.namespace).tensors == SMALL.tensors
    except grpc.RpcError:
        return False


def silent_calls(wire: Wire, over: threading.Event, count: int, path: str) -> list[Any]:
    """Calls that promise a message and never send it."""

    def never() -> Iterator[bytes]:
        over.wait()
        yield from ()

    method = wire.channel.stream_unary(path)
    return [method.future(never(), metadata=wire.metadata) for _ in range(count)]


@pytest.mark.parametrize(
    ("path", "count"),
    [
        ("/pion.v1.PrefixStore/Lookup", 60),
        ("/pion.v1.PrefixStore/Lookup", 600),
        ("/pion.v1.PrefixStore/Fetch", 60),
    ],
)
def test_calls_that_ask_nothing_do_not_hold_every_thread(
    start_server, path: str, count: int
) -> None:
    server = start_server("--streams-max", "64" if count > 100 else "8")
    over = threading.Event()
    with Wire(server.address) as silent, Wire(server.address) as wire:
        calls = silent_calls(silent, over, count, path)
        for _ in range(20):
            assert wire.healthy() == health_pb2.HealthCheckResponse.SERVING
        assert not wire.lookup("streams/none").hit
        wire.store(SMALL)
        assert wire.fetch(SMALL.namespace).tensors == SMALL.tensors
        over.set()
        for call in calls:
            call.cancel()


def test_strangers_hold_no_thread_at_all(start_server) -> None:
    server = start_server("--streams-max", "1", PION_PASSWORD="secret")
    over = threading.Event()
    with Wire(server.address) as strange, Wire(server.address, password="secret") as friend:
        calls = [
            call
            for path in (
                "/pion.v1.PrefixStore/Lookup",
                "/pion.v1.PrefixStore/Fetch",
                "/pion.v1.PrefixStore/Store",
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            )
            for call in silent_calls(strange, over, 50, path)
        ]
        codes = {refused(call.result).code for call in calls}
        assert codes == {grpc.StatusCode.UNAUTHENTICATED}
        friend.store(SMALL)
        assert friend.fetch(SMALL.namespace).tensors == SMALL.tensors
        over.set()


def test_connections_that_say_nothing_or_nonsense_are_no_burden(start_server) -> None:
    server = start_server(listen="127.0.0.1:0")
    host, _, port = server.address.rpartition(":")
    with filled(server) as wire, contextlib.ExitStack() as stack:
        before = server.rss_bytes
        for index in range(200):
            peer = stack.enter_context(socket.create_connection((host, int(port))))
            if index % 2:
                peer.sendall(random.Random(index).randbytes(10_000))
        assert wire.fetch(SMALL.namespace).tensors == SMALL.tensors
        assert server.rss_bytes - before < 64 << 20
