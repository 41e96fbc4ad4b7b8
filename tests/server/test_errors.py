"""Every error that can cross the wire: its code, its reason, what programs and people are told.

One table says what each reason looks like, the other how to run into it; together they cover all of
`error_reason.proto` but what this server never sends.
"""

import itertools
import resource
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from pion_grpc.rpc.errors import CODES
from pion_wire.framing import frame_header, frame_rows
from pion_wire.layout import PartInfo
from pion_wire.messages import layout_to_message, part_to_message
from pion_wire.v1 import error_reason_pb2, types_pb2
from pion_wire.v1 import prefix_store_pb2 as pb
from tests.conftest import ServerProcess
from tests.server.wire import MODEL, Refusal, Sample, Wire, layout_of, refusal, refused

Start = Callable[..., ServerProcess]


class Shape(NamedTuple):
    """What every failure with one reason has."""

    code: grpc.StatusCode
    metadata: frozenset[str] = frozenset()
    retry: bool = False
    fields: bool = False


Code = grpc.StatusCode
SHAPES = {
    "INVALID": Shape(Code.INVALID_ARGUMENT, frozenset({"field"}), fields=True),
    "CHECKSUM": Shape(Code.INVALID_ARGUMENT, frozenset({"field"})),
    "ROWS": Shape(Code.OUT_OF_RANGE, frozenset({"rows"})),
    "LAYOUT": Shape(Code.FAILED_PRECONDITION, frozenset({"namespace"})),
    "GENERATION": Shape(Code.FAILED_PRECONDITION, frozenset({"namespace", "generation"})),
    "OTHER_CONTENT": Shape(Code.FAILED_PRECONDITION, frozenset({"namespace"})),
    "NOT_STORED": Shape(Code.NOT_FOUND, frozenset({"namespace"})),
    "EVICTED": Shape(Code.NOT_FOUND),
    "BUDGET": Shape(Code.RESOURCE_EXHAUSTED, retry=True),
    "QUOTA": Shape(Code.RESOURCE_EXHAUSTED, retry=True),
    "DISK_FULL": Shape(Code.RESOURCE_EXHAUSTED, retry=True),
    "TOO_MANY_STREAMS": Shape(Code.RESOURCE_EXHAUSTED, frozenset({"limit"}), retry=True),
    "NO_BACKEND": Shape(Code.UNIMPLEMENTED),
    "CORRUPT": Shape(Code.DATA_LOSS, frozenset({"namespace"})),
    "NOT_AUTHENTICATED": Shape(Code.UNAUTHENTICATED),
    "INTERNAL": Shape(Code.INTERNAL),
    "CONFLICT": Shape(Code.ABORTED, frozenset({"namespace"})),
}
NEVER_SENT = {
    "STARTING",  # the address is bound when everything is there
    "DRAINING",  # calls are served until the transport turns them away
    "STALLED",  # whoever reads nothing does not read this either: the call is cancelled
    "NOT_ALLOWED",
    "COLD",
    "MISSING",
}


def test_no_reason_is_left_out() -> None:
    reasons = {name.removeprefix("ERROR_REASON_") for name in error_reason_pb2.ErrorReason.keys()}  # noqa: SIM118
    assert set(CODES) == reasons - {"UNSPECIFIED"}
    assert set(SHAPES) == set(CODES) - NEVER_SENT
    assert {reason: shape.code for reason, shape in SHAPES.items()} == {
        reason: CODES[reason] for reason in SHAPES
    }
    provoked = {reason for reason, _ in AS_THEY_COME + WITH_A_SERVER_OF_THEIR_OWN}
    assert provoked == set(SHAPES)


def check(reason: str, told: Refusal) -> None:
    shape = SHAPES[reason]
    assert (told.code, told.reason) == (shape.code, reason), told
    assert shape.metadata <= told.metadata.keys()
    assert (told.retry_ms > 0) == shape.retry
    assert bool(told.fields) == shape.fields
    if shape.fields:
        assert told.fields == [told.metadata["field"]]
        assert told.message.startswith(told.fields[0])
    assert len(told.message) > 10, "says what is wrong"
    assert "Traceback" not in told.message
    assert "segments/" not in told.message, "where a file lies is for the log"


# -- what any server answers

_serial = itertools.count()


def fresh() -> Sample:
    return Sample(f"errors/{next(_serial)}", 50)


def stored(wire: Wire) -> Sample:
    sample = fresh()
    wire.store(sample)
    return sample


def invalid(wire: Wire) -> Refusal:
    return refused(lambda: wire.lookup(""))


def invalid_layout(wire: Wire) -> Refusal:
    layout = layout_to_message(layout_of())
    layout.tensors[1].heads = 0
    return refused(lambda: wire.store(fresh(), layout=layout))


def invalid_order(wire: Wire) -> Refusal:
    sample = fresh()
    header, first, *rest = sample.messages()
    return refused(lambda: wire.send([header, *rest, first]))


def checksum_of_rows(wire: Wire) -> Refusal:
    header, first, *rest = fresh().messages()
    flipped = bytearray(first)
    flipped[-1] ^= 1
    told = refused(lambda: wire.send([header, bytes(flipped), *rest]))
    assert told.metadata == {"field": "rows"}
    return told


def checksum_of_a_part(wire: Wire) -> Refusal:
    sample = Sample(fresh().namespace, 5, part_sizes=(10,))
    *rest, last = sample.messages()
    flipped = bytearray(last)
    flipped[-1] ^= 1
    told = refused(lambda: wire.send([*rest, bytes(flipped)]))
    assert told.metadata == {"field": "part"}
    return told


def rows_beyond_the_end(wire: Wire) -> Refusal:
    sample = stored(wire)
    told = refused(lambda: wire.fetch(sample.namespace, rows={"end": 51}))
    assert told.metadata["rows"] == "50"
    return told


def rows_backwards(wire: Wire) -> Refusal:
    sample = stored(wire)
    return refused(lambda: wire.fetch(sample.namespace, rows={"begin": 40, "end": 30}))


def rows_of_an_export(wire: Wire) -> Refusal:
    sample = stored(wire)
    return refused(lambda: wire.call("Export", namespace=sample.namespace, rows={"end": 51}))


def layout_of_a_store(wire: Wire) -> Refusal:
    layout = layout_to_message(layout_of(3))
    sample = stored(wire)
    return refused(lambda: wire.store(Sample(sample.namespace, 50, layout_of(3)), layout=layout))


def layout_of_a_registration(wire: Wire) -> Refusal:
    sample = stored(wire)
    other = layout_to_message(layout_of(3))
    return refused(lambda: wire.call("Register", namespace=sample.namespace, layout=other))


def layout_of_rows(wire: Wire) -> Refusal:
    sample = stored(wire)
    header = pb.PrefixStoreWriteRowsHeader(
        namespace=sample.namespace, slot=7, side=types_pb2.SIDE_K, first_row=50, row_count=1
    )
    return refused(lambda: wire.send([frame_header(header.SerializeToString())], "WriteRows"))


def generation(wire: Wire) -> Refusal:
    sample = stored(wire)
    return refused(lambda: wire.fetch(sample.namespace, generation=1 << 62))


def other_tokens(wire: Wire) -> Refusal:
    sample = stored(wire)
    told = refused(lambda: wire.store(sample.at(1)))
    assert told.metadata["first_difference"] == "0"
    return told


def other_model(wire: Wire) -> Refusal:
    sample = stored(wire)
    return refused(lambda: wire.store(sample, model_id="another"))


def model_of_the_parent(wire: Wire) -> Refusal:
    child = stored(wire).child(fresh().namespace, 10)
    return refused(lambda: wire.store(child, model_id="another"))


def no_parent(wire: Wire) -> Refusal:
    child = fresh().child(fresh().namespace, 10)
    told = refused(lambda: wire.store(child))
    assert told.metadata["namespace"] == child.parent.namespace
    return told


def nothing_to(method: str) -> Callable[[Wire], Refusal]:
    def ask(wire: Wire) -> Refusal:
        names = (
            {"namespaces": ["errors/none"]} if method == "Save" else {"namespace": "errors/none"}
        )
        return refused(lambda: wire.call(method, **names))

    return ask


def no_snapshot(wire: Wire) -> Refusal:
    sample = stored(wire)
    return refused(lambda: wire.call("Restore", namespace=sample.namespace, snapshot_id=1 << 63))


def no_lease(wire: Wire) -> Refusal:
    return refused(lambda: wire.fetch(lease_id=b"0123456789abcdef"))


def lease_that_has_ended(wire: Wire) -> Refusal:
    sample = stored(wire)
    lease = wire.lookup(sample.namespace, lease_ms=1).lease_id
    while True:  # the lease ends by the clock
        try:
            wire.fetch(lease_id=lease)
        except grpc.RpcError:
            return refused(lambda: wire.fetch(lease_id=lease))


def too_many_snapshots(wire: Wire) -> Refusal:
    sample = stored(wire)
    for _ in range(16):
        wire.call("Snapshot", namespace=sample.namespace)
    return refused(lambda: wire.call("Snapshot", namespace=sample.namespace))


def another_was_quicker(wire: Wire) -> Refusal:
    sample = fresh()
    begun, go_on = threading.Event(), threading.Event()

    def slowly() -> "itertools.chain[bytes]":
        header, *chunks = sample.at(1).messages()
        yield header
        begun.set()
        go_on.wait()
        yield from chunks

    refusals: list[Refusal] = []
    slow = threading.Thread(target=lambda: refusals.append(refused(lambda: wire.send(slowly()))))
    slow.start()
    begun.wait()
    wire.store(sample)
    go_on.set()
    slow.join()
    assert wire.fetch(sample.namespace).tensors == sample.tensors
    return refusals[0]


AS_THEY_COME: list[tuple[str, Callable[[Wire], Refusal]]] = [
    ("INVALID", rows_backwards),
    ("INVALID", invalid),
    ("INVALID", invalid_layout),
    ("INVALID", invalid_order),
    ("CHECKSUM", checksum_of_rows),
    ("CHECKSUM", checksum_of_a_part),
    ("ROWS", rows_beyond_the_end),
    ("ROWS", rows_of_an_export),
    ("LAYOUT", layout_of_a_store),
    ("LAYOUT", layout_of_a_registration),
    ("LAYOUT", layout_of_rows),
    ("GENERATION", generation),
    ("OTHER_CONTENT", other_tokens),
    ("OTHER_CONTENT", other_model),
    ("OTHER_CONTENT", model_of_the_parent),
    ("NOT_STORED", no_parent),
    ("NOT_STORED", nothing_to("Export")),
    ("NOT_STORED", nothing_to("Save")),
    ("NOT_STORED", nothing_to("Snapshot")),
    ("NOT_STORED", nothing_to("Restore")),
    ("NOT_STORED", nothing_to("Release")),
    ("NOT_STORED", no_snapshot),
    ("EVICTED", no_lease),
    ("EVICTED", lease_that_has_ended),
    ("BUDGET", too_many_snapshots),
    ("CONFLICT", another_was_quicker),
]


@pytest.mark.parametrize(("reason", "provoke"), AS_THEY_COME)
def test_no_refusal_leaves_its_shape(
    server: ServerProcess, reason: str, provoke: Callable[[Wire], Refusal]
) -> None:
    with Wire(server.address) as wire:
        check(reason, provoke(wire))
        assert wire.healthy() == 1


# -- what needs a server of its own


def over_budget(start: Start) -> Refusal:
    with Wire(start("--disk-budget", "16MiB").address) as wire:
        wide = Sample("errors/wide", 4_000, layout_of(8, 8, 64))
        return refusal_of_bytes(refused(lambda: wire.store(wide)))


def refusal_of_bytes(told: Refusal) -> Refusal:
    assert int(told.metadata["needed_bytes"]) > 0
    assert int(told.metadata["budget_bytes"]) > 0
    return told


def over_budget_by_leases(start: Start) -> Refusal:
    with Wire(start("--disk-budget", "16MiB").address) as wire:
        for index in range(20):
            sample = Sample(f"errors/leased/{index}", 1_000, layout_of(2, 4, 64))
            try:
                wire.store(sample)
            except grpc.RpcError as error:
                names = [f"errors/leased/{earlier}" for earlier in range(index)]
                assert wire.names() == sorted(names), "what is leased stays"
                return refusal_of_bytes(refusal(error))
            assert wire.lookup(sample.namespace, lease_ms=60_000).hit
    raise AssertionError("leased prefixes went")


def over_quota(start: Start) -> Refusal:
    with Wire(start("--tenant-budget", "1MiB").address) as wire:
        large = Sample("errors/quota", 3_000, layout_of(4, 4, 32))
        return refusal_of_bytes(refused(lambda: wire.store(large)))


def disk_full(start: Start) -> Refusal:
    if sys.platform != "linux":
        pytest.skip("only Linux limits the files of a running process")
    server = start()
    with Wire(server.address) as wire:
        wire.store(fresh())  # its database has grown beyond what a first write needs
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        return refused(lambda: wire.store(Sample("errors/full", 4_000, layout_of(4, 4, 64))))


def too_many_streams(start: Start) -> Refusal:
    with Wire(start("--streams-max", "1").address) as wire:
        begun, go_on = threading.Event(), threading.Event()

        def slowly() -> "itertools.chain[bytes]":
            header, *chunks = fresh().messages()
            yield header
            begun.set()
            go_on.wait()
            yield from chunks

        first = threading.Thread(target=lambda: wire.send(slowly()))
        first.start()
        begun.wait()
        told = Refusal(Code.OK, "", {}, [], 0, "")
        while told.reason != "TOO_MANY_STREAMS":  # until the first one's header is there
            try:
                wire.fetch("errors/none")
            except grpc.RpcError:
                told = refused(lambda: wire.fetch("errors/none"))
        assert wire.lookup("errors/none").reason == types_pb2.MISS_REASON_NOT_STORED
        go_on.set()
        first.join()
        return told


def no_export(start: Start) -> Refusal:
    with Wire(start("--no-export").address) as wire:
        assert not wire.call("Describe").export_enabled
        sample = stored(wire)
        return refused(lambda: wire.call("Export", namespace=sample.namespace))


def damage(server: ServerProcess, at: int) -> None:
    (segment,) = Path(server.directory, "segments").iterdir()
    with segment.open("r+b") as file:
        file.seek(at, 0 if at >= 0 else 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def corrupt_in_mid_stream(start: Start) -> Refusal:
    server = start()
    with Wire(server.address) as wire:
        sample = Sample("errors/corrupt", 2_000, layout_of(2, 4, 64))
        wire.store(sample)
        damage(server, 3_500_000)
        told = refused(lambda: wire.fetch(sample.namespace))
        assert not wire.fetch(sample.namespace).header.found, "everyone after is told of a miss"
        assert wire.lookup(sample.namespace).reason == types_pb2.MISS_REASON_NOT_STORED
        assert wire.call("Describe").corrupt_count == 1
        wire.store(sample)
        assert wire.fetch(sample.namespace).tensors == sample.tensors, "the name is free"
        return told


def corrupt_export(start: Start) -> Refusal:
    server = start()
    with Wire(server.address) as wire:
        sample = stored(wire)
        damage(server, -1_000)
        return refused(lambda: wire.call("Export", namespace=sample.namespace))


def truncated(start: Start) -> Refusal:
    server = start()
    with Wire(server.address) as wire:
        sample = stored(wire)
        (segment,) = Path(server.directory, "segments").iterdir()
        with segment.open("r+b") as file:
            file.truncate(1_000)
        return refused(lambda: wire.fetch(sample.namespace))


def file_gone(start: Start) -> Refusal:
    server = start()
    with Wire(server.address) as wire:
        sample = stored(wire)
        (segment,) = Path(server.directory, "segments").iterdir()
        segment.unlink()
        return refused(lambda: wire.fetch(sample.namespace))


def unreadable(start: Start) -> Refusal:
    server = start()
    with Wire(server.address) as wire:
        sample = stored(wire)
        (segment,) = Path(server.directory, "segments").iterdir()
        segment.rename(segment.with_suffix(".aside"))
        segment.symlink_to(segment)  # a loop, which nobody can open
        return refused(lambda: wire.fetch(sample.namespace))


def no_password(start: Start) -> Refusal:
    with Wire(start(PION_PASSWORD="open sesame").address) as wire:
        return refused(lambda: wire.lookup("errors/none"))


def fault_of_the_server(start: Start) -> Refusal:
    server = start()
    shutil.rmtree(server.directory / "segments")
    with Wire(server.address) as wire:
        told = refused(lambda: wire.store(fresh()))
        assert "segments" not in told.message, "nothing leaks"
        assert told.metadata == {}
        assert wire.names() == []
    server.stop()
    assert [entry for entry in server.log if "FileNotFoundError" in entry.get("exception", "")]
    return told


WITH_A_SERVER_OF_THEIR_OWN: list[tuple[str, Callable[[Start], Refusal]]] = [
    ("BUDGET", over_budget),
    ("BUDGET", over_budget_by_leases),
    ("QUOTA", over_quota),
    ("DISK_FULL", disk_full),
    ("TOO_MANY_STREAMS", too_many_streams),
    ("NO_BACKEND", no_export),
    ("CORRUPT", corrupt_in_mid_stream),
    ("CORRUPT", corrupt_export),
    ("CORRUPT", truncated),
    ("CORRUPT", file_gone),
    ("CORRUPT", unreadable),
    ("NOT_AUTHENTICATED", no_password),
    ("INTERNAL", fault_of_the_server),
]


@pytest.mark.parametrize(("reason", "provoke"), WITH_A_SERVER_OF_THEIR_OWN)
def test_no_refusal_of_a_special_server_leaves_its_shape(
    start_server: Start, reason: str, provoke: Callable[[Start], Refusal]
) -> None:
    check(reason, provoke(start_server))


def test_a_method_that_does_not_exist_is_unimplemented(server: ServerProcess) -> None:
    with Wire(server.address) as wire:
        assert refused(lambda: wire.raw("Nonsense", b"")).code == Code.UNIMPLEMENTED
        assert refused(lambda: wire.raw("Lookup", b"", "Nonsense")).code == Code.UNIMPLEMENTED


def test_a_failed_store_of_parts_leaves_no_name(server: ServerProcess) -> None:
    part = part_to_message(PartInfo("state", 0, 10, 100))
    with Wire(server.address) as wire:
        sample = Sample("errors/parts", 10, layout_of())
        told = refused(lambda: wire.store(sample, parts=[part]))
        assert (told.reason, told.fields) == ("INVALID", ["rows"])
        early = [frame_header(sample.header(parts=[part]).SerializeToString())]
        early += [frame_rows(0, 0, 0, 10, sample.rows(0))]
        assert refused(lambda: wire.send(early)).reason == "INVALID"
        assert (
            wire.lookup("errors/parts", model_id=MODEL).reason == types_pb2.MISS_REASON_NOT_STORED
        )
