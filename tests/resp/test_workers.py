"""Several workers are one server: each answers for everything, and one that dies takes nothing along."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pion_wire.v1 import prefix_store_pb2 as pb
from tests.conftest import ServerProcess
from tests.resp.wire import Refused, Wire, fields
from tests.server.wire import Wire as Grpc
from tests.server.wire import eventually

WORKERS = 4
FEW = 2
"""Enough where it is not their number that matters: each takes a second to start."""
ROWS = os.urandom(64 * 2 * 200)
UNKNOWN_SNAPSHOT = Refused("ERR V.RESTORE: unknown snap_id for this session")


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    """One server for tests that leave it as it is."""
    path = Path(tempfile.mkdtemp(prefix="pion-", dir="/tmp"))
    flags = ("--workers", str(WORKERS), "--resp", "127.0.0.1:0")
    server = ServerProcess(path / "data", *flags, listen="127.0.0.1:0")
    yield server
    server.stop()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    flags = ("--workers", str(FEW), "--resp", "127.0.0.1:0")
    return start_server(*flags, listen="127.0.0.1:0")


def stored(server: ServerProcess) -> None:
    wire = Wire(server.ready["resp"])
    assert wire("KV.PREFIX.REGISTER", "ns", 64, "fp16") == "OK"
    for layer in range(3):
        for side in ("pk", "pv"):
            assert wire("V.STOREBATCH", f"ns_{side}", layer, 0, 200, ROWS, "FMT", "F16") == "OK"
    assert wire("SET", "k", ROWS) == "OK"
    wire.close()


def connections(server: ServerProcess) -> list[Wire]:
    """Twelve fresh ones, and one to each worker's own port."""
    host, _, port = server.ready["resp"].rpartition(":")
    own = [f"{host}:{int(port) + 2 + worker}" for worker in range(WORKERS)]
    return [Wire(address) for address in [server.ready["resp"]] * 12 + own]


def pids(server: ServerProcess) -> set[int]:
    return {child.pid for child in psutil.Process(server.process.pid).children()}


def test_every_worker_answers_for_every_prefix(shared: ServerProcess) -> None:
    stored(shared)
    wires = connections(shared)
    workers = set()
    for number, wire in enumerate(wires):
        assert wire("KV.PREFIX.LOOKUP", "ns") == "HIT"
        assert wire("V.FETCH", "ns_pv", "BATCH", 0, 200, "FMT", "NATIVE") == [ROWS] * 3
        assert wire("GET", "k") == ROWS
        worker = int(fields(wire("INFO", "pion"))["worker_id"])
        workers.add(worker)
        if number >= 12:
            assert worker == number - 12, "not the worker that this port belongs to"
            assert wire("KV.PREFIX.OWNER", "ns") == str(worker)
    assert workers == set(range(WORKERS))
    assert pids(shared) == {int(fields(wire("INFO", "server"))["process_id"]) for wire in wires}
    for wire in wires:
        wire.close()
    with Grpc(shared.address) as rpc:
        listed = rpc.prefixes.List(pb.PrefixStoreListRequest())
        assert [info.namespace for info in listed.prefixes] == ["ns"]


def test_a_worker_that_dies_is_replaced_and_took_nothing_along(server: ServerProcess) -> None:
    stored(server)
    before = pids(server)
    host, _, port = server.ready["resp"].rpartition(":")
    victim = Wire(f"{host}:{int(port) + 2}")
    pid = int(fields(victim("INFO", "server"))["process_id"])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises((ConnectionError, OSError)):
        victim("PING")
    victim.close()
    other = Wire(f"{host}:{int(port) + 3}")
    assert other("V.FETCH", "ns_pk", "BATCH", 0, 200, "FMT", "NATIVE") == [ROWS] * 3
    replacement = Wire(f"{host}:{int(port) + 2}")  # the parent holds the address meanwhile
    assert replacement("KV.PREFIX.LOOKUP", "ns") == "HIT"
    assert pid not in pids(server)
    assert len(pids(server)) == len(before)
    other.close()
    replacement.close()


def test_no_connection_has_the_number_of_another(shared: ServerProcess) -> None:
    wires = connections(shared)
    numbers = [wire("CLIENT", "ID") for wire in wires]
    assert len(set(numbers)) == len(wires)
    assert numbers[-1] == wires[-1]("CLIENT", "ID") < 1 << 53
    for wire in wires:
        wire.close()


def worker(server: ServerProcess, index: int) -> Wire:
    """Returns a connection to one worker and no other."""
    host, _, port = server.ready["resp"].rpartition(":")
    return Wire(f"{host}:{int(port) + 2 + index}")


class Expected:
    """The sides that there should be, those that were used longest ago first."""

    def __init__(self, sides_max: int) -> None:
        self.sides: list[str] = []
        self.sides_max = sides_max

    def use(self, namespace: str, endings: tuple[str, ...]) -> None:
        for sid in (f"{namespace}_{ending}" for ending in endings):
            if sid in self.sides:
                self.sides.remove(sid)
                self.sides.append(sid)

    def register(self, namespace: str) -> None:
        self.use(namespace, BOTH)
        self.sides += [sid for ending in BOTH if (sid := f"{namespace}_{ending}") not in self.sides]
        del self.sides[: -self.sides_max]


BOTH = ("pk", "pv")
USES: dict[str, tuple[tuple[str, ...], Callable[[Wire, str], Any]]] = {
    "lookup": (BOTH, lambda wire, name: wire("KV.PREFIX.LOOKUP", name)),
    "k": (("pk",), lambda wire, name: wire("V.FETCH", f"{name}_pk", 0, "RANGE", 0, 1)),
    "v": (("pv",), lambda wire, name: wire("V.FETCH", f"{name}_pv", "BATCH", 0, 1)),
    "table": (("pk",), lambda wire, name: wire("KV.PREFIX.MEMBERSHIP", name, 1, bytes(8))),
    "store": (("pv",), lambda wire, name: wire("V.STOREBATCH", f"{name}_pv", 0, 0, 1, bytes(32))),
}


def test_the_limit_of_sessions_is_one_for_all_in_the_order_of_their_uses(
    start_server: Callable[..., ServerProcess],
) -> None:
    """Whichever worker was asked for what: nobody waits for another to write its uses down."""
    sides_max = 9
    flags = ("--workers", str(FEW), "--resp", "127.0.0.1:0", "--max-sessions", str(sides_max))
    server = start_server(*flags)
    wires = [worker(server, index) for index in range(FEW)]
    expected = Expected(sides_max)
    draw = random.Random(7)
    for number in range(60):
        for _ in range(draw.randrange(6)):
            namespace = f"ns{draw.randrange(max(number - 6, 0), number + 1)}"
            sides, use = USES[draw.choice(sorted(USES))]
            there = [ending for ending in sides if f"{namespace}_{ending}" in expected.sides]
            if there == list(sides):
                use(draw.choice(wires), namespace)
                expected.use(namespace, sides)
        namespace = f"ns{draw.randrange(max(number - 2, 0), number + 1)}"
        table = ("BLOCKS", 64, 1, bytes(8))
        draw.choice(wires)("KV.PREFIX.REGISTER", namespace, 8, "fp16", *table)
        expected.register(namespace)
        known = [f"ns{i}_{ending}" for i in range(number + 1) for ending in BOTH]
        infos = draw.choice(wires).pipeline(*(("V.INFO", sid) for sid in known))
        there = [sid for sid, info in zip(known, infos, strict=True) if info is not None]
        assert there == [sid for sid in known if sid in expected.sides]
    assert fields(wires[0]("KV.PREFIX.INFO"))["vstore_sessions"] == str(sides_max)
    for wire in wires:
        wire.close()


def test_a_snapshot_is_not_lost_on_the_worker_that_took_it(server: ServerProcess) -> None:
    stored(server)
    one, other = worker(server, 0), worker(server, 1)
    short = one("V.SNAPSHOT", "ns_pk")
    assert other("V.STOREBATCH", "ns_pk", 0, 200, 200, ROWS, "FMT", "F16") == "OK"
    long = other("V.SNAPSHOT", "ns_pk")
    assert long > short
    os.kill(int(fields(one("INFO", "server"))["process_id"]), signal.SIGKILL)
    assert other("V.RESTORE", "ns_pk", short) == "OK"
    assert fields(other("V.INFO", "ns_pk"))["layer_0_tokens"] == "200"
    one.close()
    one = worker(server, 0)  # started again meanwhile
    assert other("V.STOREBATCH", "ns_pk", 0, 200, 400, ROWS * 2, "FMT", "F16") == "OK"
    assert one("V.RESTORE", "ns_pk", long) == "OK"
    assert fields(other("V.INFO", "ns_pk"))["layer_0_tokens"] == "400"
    assert (one("V.COMMIT", "ns_pk", short), other("V.COMMIT", "ns_pk", short)) == (1, 0)
    assert other("V.RESTORE", "ns_pk", short) == UNKNOWN_SNAPSHOT
    assert other("V.RESTORE", "ns_pv", long) == UNKNOWN_SNAPSHOT
    slots = [one("V.SNAPSHOT", "ns_pk") for _ in range(8)]
    slots += [other("V.SNAPSHOT", "ns_pk") for _ in range(7)]
    assert len({long, *slots}) == 16
    assert one("V.SNAPSHOT", "ns_pk").text.startswith("ERR V.SNAPSHOT: no free snapshot slot")
    one.close()
    other.close()


def test_a_snapshot_of_one_worker_is_everyones_over_grpc(shared: ServerProcess) -> None:
    stored(shared)
    wire = worker(shared, 0)
    taken = set()
    with contextlib.ExitStack() as calls:
        # A connection is one worker's; the system deals them out.
        rpcs = [calls.enter_context(Grpc(shared.address)).prefixes for _ in range(8)]
        for rpc in rpcs:
            taken.add(rpc.Snapshot(pb.PrefixStoreSnapshotRequest(namespace="ns")).snapshot_id)
        assert wire("V.STOREBATCH", "ns_pv", 0, 200, 200, ROWS, "FMT", "F16") == "OK"
        for number, rpc in zip(sorted(taken), rpcs, strict=True):
            named: dict[str, Any] = {"namespace": "ns", "snapshot_id": number}
            rpc.Restore(pb.PrefixStoreRestoreRequest(**named))
            assert fields(wire("V.INFO", "ns_pv"))["layer_0_tokens"] == "200"
            assert rpc.Release(pb.PrefixStoreReleaseRequest(**named)).released
        assert wire("V.RESTORE", "ns_pk", max(taken)) == UNKNOWN_SNAPSHOT
    wire.close()


def test_workers_end_with_their_parent_however_it_ends(server: ServerProcess) -> None:
    workers = [psutil.Process(pid) for pid in pids(server)]
    assert len(workers) == FEW
    server.kill()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive


def test_all_stop_in_order(server: ServerProcess) -> None:
    stored(server)
    assert server.stop() == 0
    events = [json.loads(line)["event"] for line in server.output if line.startswith("{")]
    assert events.count("worker ready") == events.count("stopped") == FEW
    assert not list((server.directory / "run").glob("*.lock"))


def test_the_receipt_is_each_workers_own_and_summed(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--workers", str(FEW), "--resp", "127.0.0.1:0")
    one, other = worker(server, 0), worker(server, 1)
    one("KV.PREFIX.REGISTER", "ns", 8, "fp16", "PREFILL_MS", 1_500)
    for wire in (one, one, other):
        wire("KV.PREFIX.LOOKUP", "ns")
    other("KV.PREFIX.LOOKUP", "nobody")
    assert fields(one("INFO", "pion"))["kvprefix_hits"] == "2"
    assert fields(other("INFO", "pion"))["kvprefix_hits"] == "1"
    # A prefill time is known to everyone, whoever was told.
    for wire, measured_us in ((one, 3_000_000), (other, 1_500_000)):
        stats = wire("PION.STATS")
        place = stats.index(b"kvprefix_prefill_us_measured") + 1
        assert stats[place] == measured_us
    while (told := fields(one("INFO", "workers")))["server_kvprefix_misses"] != "1":
        pass  # the other worker tells once a second
    assert told["server_kvprefix_hits"] == "3"
    assert told["server_kvprefix_hits_measured"] == "3"
    assert told["server_prefill_seconds_avoided"] == told["server_prefill_seconds_avoided_measured"]
    assert told["server_prefill_seconds_avoided"] == "4.500"
    os.kill(int(fields(other("INFO", "server"))["process_id"]), signal.SIGKILL)
    other.close()
    other = worker(server, 1)  # once it serves again, it has cleaned up after the one before
    assert fields(other("INFO", "pion"))["kvprefix_hits"] == "0"
    assert fields(other("INFO", "workers")) == told, "what a worker has saved is not lost with it"
    one.close()
    other.close()


def test_what_ends_with_the_server_is_no_workers_own(
    start_server: Callable[..., ServerProcess],
) -> None:
    def counted(wire: Wire) -> tuple[str, ...]:
        told = fields(wire("KV.PREFIX.INFO"))
        return tuple(told[name] for name in ("wal_appended", "wal_replayed", "vstore_evictions"))

    flags = ("--workers", str(FEW), "--resp", "127.0.0.1:0", "--max-sessions", "4")
    server = start_server(*flags)
    one, other = worker(server, 0), worker(server, 1)
    for number, wire in enumerate((one, other, one)):
        wire("KV.PREFIX.REGISTER", f"ns{number}", 64, "fp16")
    assert other("V.STOREBATCH", "ns2_pk", 0, 0, 200, ROWS, "FMT", "F16") == "OK"
    assert one("KV.PREFIX.DROP", "ns1") == 1
    assert counted(one) == counted(other) == ("11", "0", "4")
    snapshots = [wire("V.SNAPSHOT", "ns2_pk") for wire in (one, other)]
    one.close()
    other.close()
    assert server.stop() == 0

    server = start_server(*flags)
    assert sum(entry["event"] == "WAL replayed" for entry in server.log) == 1
    one, other = worker(server, 0), worker(server, 1)
    assert counted(one) == counted(other) == ("0", "3", "0")
    for snapshot, wire in itertools.product(snapshots, (one, other)):
        assert wire("V.RESTORE", "ns2_pk", snapshot) == UNKNOWN_SNAPSHOT
    assert not {one("V.SNAPSHOT", "ns2_pk") for _ in range(16)} & set(snapshots)
    assert one("KV.PREFIX.DROP", "ns2") == 1
    assert counted(other) == ("2", "3", "2")
    assert other("KV.PREFIX.SAVE") != "OK", "there is nothing"
    assert counted(one) == ("0", "3", "2")
    assert one("LASTSAVE") == other("LASTSAVE")
    other.close()
    os.kill(int(fields(one("INFO", "server"))["process_id"]), signal.SIGKILL)
    one.close()
    one = worker(server, 0)
    assert counted(one) == ("0", "3", "2"), "a worker that is started again is no start"
    assert sum(entry["event"] == "WAL replayed" for entry in server.log) == 1
    one.close()


def test_a_worker_that_cannot_start_says_why_and_nothing_else(
    start_server: Callable[..., ServerProcess],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError) as failed:
            start_server("--workers", str(FEW), listen=address)
    said = str(failed.value)
    assert f"worker 0: cannot listen on {address}" in said
    assert "Fatal Python error" not in said
    assert "Traceback" not in said


def test_ctrl_c_while_workers_start_is_no_failure_of_theirs(short_tmp: Path) -> None:
    command = [sys.executable, "-m", "pion_grpc", "serve", "--data", short_tmp, "--workers", "2"]
    with subprocess.Popen(
        [*command, "--listen", f"unix:{short_tmp}/socket"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert eventually(psutil.Process(server.pid).children)
        os.killpg(server.pid, signal.SIGINT)  # as a terminal does it
        said = server.stdout.read()
    assert "attend is off" in said
    assert "did not come up" not in said
    assert "Traceback" not in said
    assert server.returncode == 0


def test_one_compute_device_does_not_get_two_owners(
    start_server: Callable[..., ServerProcess],
) -> None:
    sentence = "--workers above 1 and attend exclude each other: one compute device has one owner"
    for backend in ("numpy", "mlx"):
        with pytest.raises(RuntimeError, match=sentence):
            start_server("--workers", str(FEW), "--attend", backend)
    server = start_server("--workers", str(FEW), "--resp", "127.0.0.1:0")
    assert f"attend is off: {sentence}" in [entry.get("event") for entry in server.log]
    for _ in range(4):
        wire = Wire(server.ready["resp"])
        refused = wire("ATTEND.PREFIX.LOOKUP", "s", 0)
        assert refused.text.startswith("ERR attention engine not available")
        wire.close()
    with Grpc(server.address) as rpc:
        described = rpc.prefixes.Describe(pb.PrefixStoreDescribeRequest())
        assert described.attend_backend == ""
