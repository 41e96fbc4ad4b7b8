"""Two servers on one directory: what one does the other sees, and neither cleans up what is alive."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pion_wire.messages import layout_to_message
from pion_wire.v1 import types_pb2
from tests.conftest import ServerProcess
from tests.server.wire import MODEL, Sample, Wire, eventually, layout_of, refused

pytestmark = pytest.mark.faults

Start = Callable[[str], ServerProcess]


@pytest.fixture
def start(start_server: Callable[..., ServerProcess], short_tmp: Path) -> Start:
    """Starts servers on one directory, each with a socket of its own."""

    def start(name: str) -> ServerProcess:
        return start_server(directory=short_tmp / "data", listen=f"unix:{short_tmp}/{name}.sock")

    return start


class Halfway:
    """A Store that has sent half of a sample and waits."""

    def __init__(self, wire: Wire, sample: Sample) -> None:
        self.sample = sample
        self._wire = wire
        self._half, self._go_on = threading.Event(), threading.Event()
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._half.wait()

    def finish(self) -> Any:
        """Sends the rest; returns the answer, or the error."""
        self._go_on.set()
        self._thread.join()
        return self._outcome[0]

    def _run(self) -> None:
        try:
            self._outcome.append(self._wire.send(self._messages()))
        except grpc.RpcError as error:
            self._outcome.append(error)

    def _messages(self) -> Iterator[bytes]:
        header, *chunks = self.sample.messages()
        yield header
        middle = len(chunks) // 2
        yield from chunks[:middle]
        self._half.set()
        self._go_on.wait()
        yield from chunks[middle:]


LARGE = layout_of(4, 8, 64)
"""8 KiB per token."""


def test_what_one_server_does_the_other_sees_at_once(start: Start) -> None:
    with Wire(start("a").address) as one, Wire(start("b").address) as other:
        sample = Sample("two/one", 100, part_sizes=(50,))
        one.store(sample)
        assert other.fetch("two/one").tensors == sample.tensors
        assert other.call("Match", model_id=MODEL, token_ids=sample.token_ids).served_tokens == 100
        child = sample.child("two/child", 30)
        other.store(child)
        assert one.fetch("two/child").tensors == child.tensors
        assert one.store(sample).already_stored
        assert other.store(sample.at(1), replace=True).token_count == 100
        assert one.fetch("two/one").tensors == sample.at(1).tensors
        assert one.fetch("two/child").tensors == child.tensors, "rows of the old one stay"
        assert other.call("Drop", namespaces=["two/one", "two/child"]).results[0].dropped
        assert one.names() == other.names() == []
        assert not one.fetch("two/one").header.found
        one.call("Register", namespace="two/declared", layout=layout_to_message(layout_of()))
        found = other.lookup("two/declared")
        assert found.prefix.state == types_pb2.PREFIX_STATE_REGISTERED


def test_a_lease_of_one_server_holds_for_the_other(start: Start) -> None:
    with Wire(start("a").address) as one, Wire(start("b").address) as other:
        sample = Sample("two/leased", 100)
        one.store(sample)
        lease = one.lookup("two/leased", lease_ms=60_000).lease_id
        other.call("Drop", namespaces=["two/leased"])
        assert one.fetch(lease_id=lease).tensors == sample.tensors
        assert other.fetch(lease_id=lease).tensors == sample.tensors


def test_of_two_stores_of_one_name_one_wins_and_the_other_is_told(start: Start) -> None:
    a, b = start("a"), start("b")
    with Wire(a.address) as one, Wire(b.address) as other:

        def halfway(first: Sample, second: Sample) -> list[Halfway]:
            segments = a.directory / "segments"
            there = len(os.listdir(segments))
            stores = [Halfway(one, first), Halfway(other, second)]
            eventually(lambda: len(os.listdir(segments)) == there + 2)  # both have been begun
            return stores

        same = halfway(Sample("two/same", 500, LARGE), Sample("two/same", 500, LARGE))
        answers = [store.finish() for store in same]
        assert sorted(answer.already_stored for answer in answers) == [False, True]
        eventually(lambda: len(os.listdir(a.directory / "segments")) == 1)
        different = halfway(
            Sample("two/other", 500, LARGE), Sample("two/other", 500, LARGE, version=1)
        )
        first, second = (store.finish() for store in different)
        assert not first.already_stored
        assert refused(lambda: raising(second)).reason == "CONFLICT"
        for wire in (one, other):
            assert wire.fetch("two/same").tensors == Sample("two/same", 500, LARGE).tensors
            assert wire.fetch("two/other").tensors == Sample("two/other", 500, LARGE).tensors


def raising(error: Exception) -> None:
    raise error


def test_a_server_that_is_killed_harms_nothing_that_another_stores(start: Start) -> None:
    alive, dying = start("a"), start("b")
    with Wire(alive.address) as one, Wire(dying.address) as other:
        mine = Halfway(one, Sample("two/alive", 1_000, LARGE))
        lost = Halfway(other, Sample("two/lost", 1_000, LARGE))
        eventually(lambda: len(os.listdir(alive.directory / "segments")) == 2)
        dying.kill()
        assert isinstance(lost.finish(), grpc.RpcError)
        assert one.names() == [], "neither is complete"
        with Wire(start("c").address) as third:  # cleans up after the dead, and only after it
            assert len(os.listdir(alive.directory / "segments")) == 1
            assert len(list((alive.directory / "run").glob("*.lock"))) == 2
            assert mine.finish().token_count == 1_000
            for wire in (one, third):
                assert wire.names() == ["two/alive"]
                assert wire.fetch("two/alive").tensors == mine.sample.tensors
            used = third.call("Describe").disk_used_bytes
            assert used < mine.sample.row_bytes + (8 << 20), "no reservation of the dead is left"


def test_servers_that_come_and_go_harm_nothing(start: Start) -> None:
    """One server stores and fetches without pause while others start, stop and die beside it."""
    steady = start("steady")
    over = threading.Event()

    def work(number: int) -> int:
        count = 0
        with Wire(steady.address) as wire:
            while not over.is_set():
                sample = Sample(f"two/steady/{number}", 300, LARGE, version=count)
                wire.store(sample, replace=True)
                assert wire.fetch(sample.namespace).tensors == sample.tensors
                count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        working = [pool.submit(work, number) for number in range(3)]
        try:
            for index in range(8):
                visitor = start(f"visitor-{index}")
                with Wire(visitor.address) as wire:
                    wire.store(Sample(f"two/visitor/{index}", 50))
                if index % 2:
                    visitor.kill()
                else:
                    assert visitor.stop() == 0
        finally:
            over.set()
        assert all(done.result() > 3 for done in working)
    with Wire(steady.address) as wire:
        names = [f"two/steady/{number}" for number in range(3)]
        names += [f"two/visitor/{index}" for index in range(8)]
        assert wire.names() == sorted(names)
        for index in range(8):
            sample = Sample(f"two/visitor/{index}", 50)
            assert wire.fetch(sample.namespace).tensors == sample.tensors
        eventually(lambda: len(os.listdir(steady.directory / "segments")) == len(names))
    assert not [entry for entry in steady.log if entry["level"] != "info"]
