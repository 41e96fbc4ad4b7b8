"""The server is killed at random moments of a mixed load, and what it acknowledged is there.

Every worker owns its names, so it knows what each of them holds: what was acknowledged last or, where
the server died before it could answer, that or what was asked for. Anything else is a lie.
"""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from pion_wire.framing import frame_header, frame_rows
from pion_wire.layout import DType, Layout, Side, TensorLayout
from pion_wire.messages import layout_to_message
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import types_pb2
from tests.conftest import ServerProcess
from tests.server.wire import Sample, Wire, eventually, layout_of

pytestmark = pytest.mark.faults

LAYOUT = layout_of(2, 4, 64)
"""2 KiB per token."""
ROWS = Layout((TensorLayout(0, Side.K, 1, 64, DType.F16),))
"""Rows of 128 bytes, written one batch after the other."""
NAMES = 4

Content = Sample | bytes | None
"""A stored prefix, the rows of a live one, or nothing."""


@dataclass
class Name:
    """What is known of one name."""

    holds: Content = None
    asked: list[Content] = field(default_factory=list)
    """What an operation without an answer would have left there."""

    @property
    def possible(self) -> list[Content]:
        return [self.holds, *self.asked]


class Worker:
    """Stores, replaces, extends, appends and drops under names of its own, until the server is gone."""

    def __init__(self, number: int, chance: random.Random) -> None:
        self.names = {f"kill/{number}/{index}": Name() for index in range(NAMES)}
        self.names |= {f"kill/{number}/live": Name(), f"kill/{number}/child": Name()}
        self.ghost = f"kill/{number}/ghost"
        self.acknowledged = 0
        self._version = 0
        self._number = number
        self._chance = chance

    def run(self, address: str) -> None:
        """Works until the server dies."""
        with Wire(address) as wire:
            try:
                while True:
                    self._chance.choice(self._operations())(wire)
                    self.acknowledged += 1
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise

    def _operations(self) -> list[Callable[[Wire], None]]:
        often = [self._store, self._store, self._store, self._fetch, self._fetch]
        return [
            *often,
            self._drop,
            self._append,
            self._append,
            self._save,
            self._haunt,
            self._extend,
        ]

    def _change(self, name: str, to: Content, act: Callable[[], object]) -> None:
        known = self.names[name]
        known.asked = [to]
        act()
        known.holds, known.asked = to, []

    def _name(self) -> str:
        return f"kill/{self._number}/{self._chance.randrange(NAMES)}"

    def _sample(self, name: str) -> Sample:
        self._version += 1
        tokens = self._chance.choice([1, 63, 64, 65, 300, 1_500])
        parts = (5_000,) if self._chance.random() < 0.3 else ()
        return Sample(name, tokens, LAYOUT, self._version, parts)

    def _store(self, wire: Wire) -> None:
        sample = self._sample(self._name())
        disk = types_pb2.DURABILITY_DISK if self._chance.random() < 0.2 else 0
        self._change(
            sample.namespace, sample, lambda: wire.store(sample, replace=True, durability=disk)
        )

    def _extend(self, wire: Wire) -> None:
        parent = self.names[self._name()].holds
        if isinstance(parent, Sample):
            child = parent.child(f"kill/{self._number}/child", 50)
            self._change(child.namespace, child, lambda: wire.store(child, replace=True))

    def _drop(self, wire: Wire) -> None:
        name = self._chance.choice(list(self.names))
        self._change(name, None, lambda: wire.call("Drop", namespaces=[name]))

    def _append(self, wire: Wire) -> None:
        name = f"kill/{self._number}/live"
        had = self.names[name].holds
        if had is None:
            wire.call("Register", namespace=name, layout=layout_to_message(ROWS))
        assert had is None or isinstance(had, bytes)
        old, new = had or b"", self._chance.randbytes(128 * self._chance.choice([1, 10, 5_000]))
        first, count = len(old) // 128, len(new) // 128
        header = pb.PrefixStoreWriteRowsHeader(
            namespace=name, side=types_pb2.SIDE_K, first_row=first, row_count=count
        )
        rows = frame_rows(0, 0, first, count, new)
        messages = [frame_header(header.SerializeToString()), rows]
        self._change(name, old + new, lambda: wire.send(messages, "WriteRows"))

    def _save(self, wire: Wire) -> None:
        if self.names[f"kill/{self._number}/live"].holds is not None:
            wire.call("Save", namespaces=[f"kill/{self._number}/live"])

    def _haunt(self, wire: Wire) -> None:
        """Stores all but the last chunk of a prefix, and lets it fall."""
        sample = Sample(self.ghost, 1_500, LAYOUT)

        def nearly_all() -> Iterator[bytes]:
            *messages, _ = sample.messages()
            yield from messages
            raise RuntimeError("given up")

        try:
            wire.send(nearly_all())
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNKNOWN:  # what gRPC makes of our own RuntimeError
                raise

    def _fetch(self, wire: Wire) -> None:
        name = self._chance.choice(list(self.names))
        check(wire, name, [self.names[name].holds])

    def verify(self, wire: Wire) -> None:
        """Holds what is there against what may be there, and takes it as known."""
        for name, known in self.names.items():
            known.holds, known.asked = check(wire, name, known.possible), []


def check(wire: Wire, name: str, possible: list[Content]) -> Content:
    """Fetches a name; returns which of the possible contents it has, bit for bit."""
    got = wire.fetch(name, part_kinds=["state"])
    if got.header.reason == types_pb2.MISS_REASON_PART_MISSING:
        got = wire.fetch(name)  # stored without parts
    for content in possible:
        if content is None and not got.header.found:
            return None
        if isinstance(content, bytes) and got.header.found and got.tensors == [content]:
            return content
        if (
            isinstance(content, Sample)
            and got.header.token_ids == content.token_ids
            and got.tensors == content.tensors
            and got.parts == [content.part(index) for index in range(len(content.part_sizes))]
        ):
            return content
    rows = got.header.rows
    raise AssertionError(
        f"{name} holds neither of {possible!r:.500}, but {rows} of {got.header!r:.500}"
    )


def named_files(wire: Wire) -> set[str]:
    """The segments that hold what is visible."""
    return {
        extent.file_name
        for info in wire.call("List", page_size=1_000).prefixes
        if info.state == types_pb2.PREFIX_STATE_SEALED
        for extent in wire.call("Export", namespace=info.namespace, lease_ms=0).extents
    }


def kill_often(start_server: Any, directory: Path, kills: int) -> None:
    chance = random.Random(kills)
    workers = [Worker(number, random.Random(number)) for number in range(4)]
    done_at_all = 0
    for _ in range(kills):
        server: ServerProcess = start_server(directory=directory)
        with Wire(server.address) as wire:
            for worker in workers:
                worker.verify(wire)
            known = {name for worker in workers for name in worker.names}
            assert set(wire.names()) <= known, "a ghost"
            before = sum(worker.acknowledged for worker in workers)
            threads = [
                threading.Thread(target=worker.run, args=[server.address]) for worker in workers
            ]
            for thread in threads:
                thread.start()
            enough = before + chance.randrange(60)
            eventually(
                lambda: sum(worker.acknowledged for worker in workers) >= enough  # noqa: B023
            )
            server.kill()
            for thread in threads:
                thread.join()
            done_at_all = sum(worker.acknowledged for worker in workers)
    assert done_at_all > kills * 10
    server = start_server(directory=directory)
    with Wire(server.address) as wire:
        for worker in workers:
            worker.verify(wire)
        wire.call("Save")  # so that every row is in a segment
        eventually(lambda: segments(directory) == named_files(wire))
        assert os.listdir(directory / "rows") == []
        assert len(list((directory / "run").glob("*.lock"))) == 1, "locks of the dead"
        wire.call("Drop", namespaces=[name for worker in workers for name in worker.names])
        eventually(lambda: not os.listdir(directory / "segments"))
    assert server.stop() == 0


def segments(directory: Path) -> set[str]:
    return {f"segments/{name}" for name in os.listdir(directory / "segments")}


def test_what_was_acknowledged_survives_twenty_kills(start_server, short_tmp: Path) -> None:
    kill_often(start_server, short_tmp / "data", 20)


@pytest.mark.soak
def test_what_was_acknowledged_survives_two_hundred_kills(start_server, short_tmp: Path) -> None:
    kill_often(start_server, short_tmp / "data", 200)


def bytes_read(server: ServerProcess) -> int:
    """Bytes that a process has asked the system for since it began."""
    (line,) = (
        line
        for line in Path(f"/proc/{server.process.pid}/io").read_text().splitlines()
        if line.startswith("rchar")
    )
    return int(line.split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a process reads")
def test_starting_after_a_kill_does_not_read_what_is_stored(start_server) -> None:
    server: ServerProcess = start_server()
    with Wire(server.address) as wire:
        for index in range(24):
            wire.store(Sample(f"kill/large/{index}", 2_000, LAYOUT))
    stored = sum(path.stat().st_size for path in (server.directory / "segments").iterdir())
    assert stored > 90 << 20
    assert server.stop() == 0
    server = start_server()
    after_a_stop = bytes_read(server)
    server.kill()
    server = start_server()
    assert bytes_read(server) - after_a_stop < stored / 20
    with Wire(server.address) as wire:
        sample = Sample("kill/large/7", 2_000, LAYOUT)
        assert wire.lookup(sample.namespace).hit
        assert bytes_read(server) - after_a_stop < stored / 20, "nor does the first answer"
        assert wire.fetch(sample.namespace).tensors == sample.tensors
