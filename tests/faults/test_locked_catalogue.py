"""Somebody else holds the database: what only reads is answered, what writes waits, nothing breaks."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import apsw
import grpc
import pytest
from grpc_health.v1 import health_pb2

from pion_wire.v1 import prefix_store_pb2 as pb
from tests.conftest import ServerProcess
from tests.server.wire import MODEL, Sample, Wire, eventually

pytestmark = pytest.mark.faults

SAMPLE = Sample("locked/one", 200)


@contextmanager
def locked(server: ServerProcess) -> Iterator[None]:
    """Holds the catalogue's only write lock, as a stuck process would."""
    connection = apsw.Connection(str(server.directory / "catalog.db"))
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


def test_reading_does_not_wait_for_who_writes(start_server) -> None:
    server = start_server()
    with Wire(server.address) as wire:
        wire.store(SAMPLE)
        with locked(server):
            for _ in range(20):
                assert wire.lookup("locked/one").hit
                assert wire.fetch("locked/one").tensors == SAMPLE.tensors
            ask = {"model_id": MODEL, "token_ids": SAMPLE.token_ids, "lease_ms": 0}
            assert wire.call("Match", **ask).served_tokens == 200
            assert wire.names() == ["locked/one"]
            assert wire.call("Describe").prefix_count == 1


def test_a_write_that_waits_is_done_when_the_lock_is_gone(start_server) -> None:
    server = start_server()
    with Wire(server.address) as wire, ThreadPoolExecutor(8) as pool:
        wire.store(SAMPLE)
        with locked(server):
            stores = [pool.submit(wire.store, Sample(f"locked/{index}", 50)) for index in range(6)]
            dropped = pool.submit(wire.call, "Drop", namespaces=["locked/one"])
            assert wire.lookup("locked/one").hit
            assert not any(done.done() for done in (*stores, dropped))
        assert all(done.result().token_count == 50 for done in stores)
        assert dropped.result().results[0].dropped
        assert wire.names() == [f"locked/{index}" for index in range(6)]


def test_callers_that_give_up_leave_nothing_and_health_answers_all_the_while(start_server) -> None:
    server = start_server("--streams-max", "4")
    with Wire(server.address) as wire, locked(server):
        many: list[Any] = [
            wire.prefixes.Drop.future(
                pb.PrefixStoreDropRequest(namespaces=[f"locked/{index}"]), timeout=1
            )
            for index in range(100)  # more than there are threads
        ]
        codes = set()
        for call in many:
            assert wire.healthy() == health_pb2.HealthCheckResponse.SERVING
            codes.add(call.exception().code())
        assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
    with Wire(server.address) as wire:
        eventually(lambda: wire.lookup("locked/none").reason == 1)
        wire.store(SAMPLE)
        assert wire.fetch("locked/one").tensors == SAMPLE.tensors


def test_a_store_whose_caller_gave_up_is_not_there_later(start_server) -> None:
    server = start_server()
    begun = threading.Event()

    def messages() -> Iterator[bytes]:
        yield from SAMPLE.messages()
        begun.set()

    with Wire(server.address) as wire:
        with locked(server):
            call = wire.channel.stream_unary("/pion.v1.PrefixStore/Store")
            storing = call.future(messages(), timeout=1)
            begun.wait()
            assert storing.exception().code() == grpc.StatusCode.DEADLINE_EXCEEDED
        wire.store(Sample("locked/after", 50))  # whatever waited for the lock came before it
        eventually(lambda: len(list((server.directory / "segments").iterdir())) == 1)
        assert wire.names() == ["locked/after"]
