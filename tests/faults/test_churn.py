"""One name dropped, stored and replaced over and over under clients that fetch it without pause."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from tests.conftest import ServerProcess
from tests.server.wire import MODEL, Sample, Wire, eventually, layout_of, refusal

pytestmark = pytest.mark.faults

VERSIONS = [
    Sample("churn/one", 400 + 7 * version, layout_of(2, 4, 64), version) for version in range(4)
]
"""Not only other rows, but more of them: a mixture would have a wrong size as well."""
WHOLE = {sample.token_ids: sample.tensors for sample in VERSIONS}
CLIENTS = 8


def churn(start_server: Any, cycles: int) -> None:
    server: ServerProcess = start_server()
    over = threading.Event()
    seen: Counter[str] = Counter()

    def fetch(number: int) -> None:
        chance = random.Random(number)
        with Wire(server.address) as wire:
            while not over.is_set():
                sample = chance.choice(VERSIONS)
                match = wire.call("Match", model_id=MODEL, token_ids=sample.token_ids, lease_ms=0)
                assert match.served_tokens in (0, sample.token_count)
                assert wire.lookup("churn/one").reason in (0, 1), "there, or not"
                assert exported(wire) in ("", "NOT_STORED")
                got = wire.fetch("churn/one")
                if got.header.found:
                    assert got.tensors == WHOLE[got.header.token_ids]
                seen["whole" if got.header.found else "miss"] += 1

    def cycle(wire: Wire, number: int) -> None:
        sample = VERSIONS[number % len(VERSIONS)]
        if number % 2:
            assert wire.store(sample, replace=True).token_count == sample.token_count
        else:
            wire.call("Drop", namespaces=["churn/one"])
            assert not wire.store(sample).already_stored

    with ThreadPoolExecutor(CLIENTS) as pool, Wire(server.address) as wire:
        fetching = [pool.submit(fetch, number) for number in range(CLIENTS)]
        try:
            for number in range(50):
                cycle(wire, number)
            memory, disk = server.rss_bytes, disk_bytes(server)
            for number in range(cycles):
                cycle(wire, number)
                assert all(not client.done() or client.result() is None for client in fetching)
        finally:
            over.set()
        for client in fetching:
            client.result()
        assert seen["whole"] > cycles / 10, seen
        assert server.rss_bytes - memory < 32 << 20
        assert disk_bytes(server) - disk < 4 << 20
        last = VERSIONS[(cycles - 1) % len(VERSIONS)]
        assert wire.fetch("churn/one").tensors == last.tensors
        eventually(lambda: len(list((server.directory / "segments").iterdir())) == 1)
        assert wire.call("Describe").corrupt_count == 0
    assert server.stop() == 0
    assert not [entry for entry in server.log if entry["level"] != "info"]


def exported(wire: Wire) -> str:
    """Returns why the prefix is not exported; nothing if it is."""
    try:
        wire.call("Export", namespace="churn/one", lease_ms=1)
    except grpc.RpcError as error:
        return refusal(error).reason
    return ""


def disk_bytes(server: ServerProcess) -> int:
    """Size of everything but the segments, of which there are few and always others."""
    paths = (path for path in server.directory.rglob("*") if path.parent.name != "segments")
    return sum(path.stat().st_size for path in paths if path.is_file())


def test_a_hundred_cycles_mix_nothing_and_grow_nothing(start_server) -> None:
    churn(start_server, 100)


@pytest.mark.soak
def test_a_thousand_cycles_mix_nothing_and_grow_nothing(start_server) -> None:
    churn(start_server, 1_000)
