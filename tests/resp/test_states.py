"""Recurrent states, over both wires: whole values, dropped for good, and never somebody else's."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from crc32c import crc32c

from pion_grpc.core.checkup import check_directory
from pion_grpc.core.states import RecurrentStates
from pion_grpc.errors import InvalidRequest
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.states import States
from pion_wire.v1 import ssm_state_pb2 as pb
from pion_wire.v1 import types_pb2
from tests.conftest import ServerProcess
from tests.resp.conftest import Resp
from tests.resp.wire import Refused, Wire
from tests.server.wire import Wire as Grpc
from tests.server.wire import refusal

MIB = 1 << 20


def test_values_come_back_whole(wire: Wire) -> None:
    for size in (0, 1, 65_536, 65_537, MIB, 16 * MIB):
        value = os.urandom(size)
        assert wire("SSM.PREFIX.STORE", "whole", 3, value) == "OK"
        assert wire("SSM.PREFIX.FETCH", "whole", 3) == value
    assert wire("SSM.PREFIX.FETCH", "whole", 4) is None
    assert wire("SSM.PREFIX.FETCH", "nobody", 3) is None


def test_a_state_is_no_prefix(wire: Wire) -> None:
    wire("SSM.PREFIX.STORE", "alone", 0, b"state")
    assert wire("KV.PREFIX.LOOKUP", "alone") == "MISS"
    wire("KV.PREFIX.REGISTER", "alone", 8, "fp16")
    wire("KV.PREFIX.DROP", "alone")
    assert wire("SSM.PREFIX.FETCH", "alone", 0) == b"state"


def test_dropped_layers_stay_dropped(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()
    for layer in (0, 1, 300, 2**32 - 1):
        assert wire("SSM.PREFIX.STORE", "drops", layer, b"%d" % layer) == "OK"
    assert wire("SSM.PREFIX.STORE", "all", 7, b"x") == "OK"
    assert wire("SSM.PREFIX.DROP", "drops", 1) == "OK"
    assert wire("SSM.PREFIX.DROP", "drops", 1) == "OK"
    assert wire("SSM.PREFIX.DROP", "all") == "OK"
    assert wire("SSM.PREFIX.DROP", "nobody") == "OK"
    resp.stop()
    resp = start_resp()
    wire = resp.connect()
    layers = (0, 1, 300, 2**32 - 1)
    found = [wire("SSM.PREFIX.FETCH", "drops", layer) for layer in layers]
    assert found == [b"0", None, b"300", b"4294967295"]
    assert wire("SSM.PREFIX.FETCH", "all", 7) is None
    assert len(list(resp.store.directory.blobs.iterdir())) == 3


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("SSM.PREFIX.STORE", "s", -1, ""), "ERR invalid layer_id (must be >= 0)"),
        (("SSM.PREFIX.STORE", "s", 2**32, ""), "ERR invalid layer_id (must be >= 0)"),
        (("SSM.PREFIX.FETCH", "s", "x"), "ERR invalid layer_id (must be >= 0)"),
        (("SSM.PREFIX.DROP", "s", -1), "ERR layer_id must be >= 0 (omit to drop all)"),
        (("SSM.PREFIX.STORE", "", 0, ""), "ERR session id must be 1..200 bytes of UTF-8"),
        (("SSM.PREFIX.STORE", "s" * 201, 0, ""), "ERR session id must be 1..200 bytes of UTF-8"),
        (("SSM.PREFIX.STORE", "s", 0), "ERR SSM.PREFIX.STORE requires: sid layer_id blob"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    wire: Wire, words: tuple[str | int, ...], refusal: str
) -> None:
    assert wire(*words) == Refused(refusal)


def test_there_is_no_limit_but_the_budget_and_the_least_used_go(
    start_resp: Callable[..., Resp],
) -> None:
    wire = start_resp(budget_bytes=24 << 20).connect()
    for number in range(400):
        assert wire("SSM.PREFIX.STORE", f"s{number % 40}", number, os.urandom(1_000)) == "OK"
    assert all(wire("SSM.PREFIX.FETCH", f"s{n % 40}", n) for n in range(400))
    for number in range(60):  # of 1 MiB each: more than there is room for
        assert wire("SSM.PREFIX.FETCH", "s5", 5) is not None
        assert wire("SSM.PREFIX.STORE", f"large{number}", 0, bytes(MIB)) == "OK"
    assert wire("SSM.PREFIX.FETCH", "large59", 0) == bytes(MIB)
    assert wire("SSM.PREFIX.FETCH", "large0", 0) is None
    assert wire("SSM.PREFIX.FETCH", "s6", 6) is None
    assert wire("SSM.PREFIX.STORE", "huge", 0, bytes(24 * MIB)).text.startswith("OOM ")


def test_a_damaged_value_is_a_miss_and_its_name_is_free(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()
    wire("SSM.PREFIX.STORE", "damaged", 0, bytes(100_000))
    wire("SET", "damaged", bytes(8 * MIB))
    for path in resp.store.directory.blobs.iterdir():
        with path.open("r+b") as file:
            file.seek(-50_000, os.SEEK_END)
            file.write(b"\x01")
    replies = wire.pipeline(("SSM.PREFIX.FETCH", "damaged", 0), ("PING",))
    assert replies[0].text.startswith("ERR ")
    assert "layer 0 of 'damaged'" in replies[0].text
    assert str(resp.store.directory.path) not in replies[0].text
    assert replies[1] == "PONG"
    broken = resp.connect()
    broken.send("GET", "damaged")  # the damage is met when most of it has been sent
    with pytest.raises((AssertionError, ConnectionError)):
        broken.read()
    assert len(resp.store.space.losses.report().troubles) == 2  # the operator learns of the files
    assert wire("SSM.PREFIX.FETCH", "damaged", 0) is None
    assert wire("GET", "damaged") is None
    assert wire("SSM.PREFIX.STORE", "damaged", 0, b"new") == "OK"
    assert wire("SSM.PREFIX.FETCH", "damaged", 0) == b"new"


def test_a_value_whose_file_is_gone_is_named_by_its_key(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()
    wire("SET", b"gone\xff\n", bytes(100_000))
    for path in resp.store.directory.blobs.iterdir():
        path.unlink()
    refusal = wire("GET", b"gone\xff\n").text
    assert "key 'gone\\\\xff\\n' is damaged" in refusal
    assert str(resp.store.directory.path) not in refusal
    assert wire("GET", b"gone\xff\n") is None


def test_damaged_rows_are_named_by_their_prefix(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()
    wire("V.CREATE", "rows", 8, "VQUANT", "fp16")
    wire("V.STOREBATCH", "rows", 0, 0, 4, bytes(64), "FMT", "F16")
    (path,) = resp.store.directory.rows.iterdir()
    path.write_bytes(b"\xff" * path.stat().st_size)
    refusal = wire("V.FETCH", "rows", "BATCH", 0, 4).text
    assert refusal.startswith("ERR 'rows' is damaged and has been taken out")
    assert str(resp.store.directory.path) not in refusal
    (problem,) = resp.store.space.losses.report().troubles
    assert problem.startswith(f"{path}: ")
    assert wire("V.FETCH", "rows", "BATCH", 0, 4).text == "ERR session not found"


# -- over gRPC


@pytest.fixture(scope="module")
def both() -> Iterator[ServerProcess]:
    """A server process with both wires."""
    path = Path(tempfile.mkdtemp(prefix="pion-", dir="/tmp"))
    server = ServerProcess(path / "data", "--resp", f"unix:{path}/resp")
    yield server
    assert server.stop() == 0
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def resp_wire(both: ServerProcess) -> Iterator[Wire]:
    wire = Wire(both.ready["resp"])
    yield wire
    wire.close()


@pytest.fixture
def rpc(both: ServerProcess) -> Iterator[Grpc]:
    with Grpc(both.address) as rpc:
        yield rpc


def stream(
    session: str, layer: int, value: bytes, size: int | None = None, **info: object
) -> Iterator[pb.SSMStateStoreRequest]:
    header = pb.SSMStateStoreHeader(
        session=session,
        layer=layer,
        info=pb.SSMStateInfo(size_bytes=len(value) if size is None else size, **info),  # type: ignore[arg-type]
    )
    yield pb.SSMStateStoreRequest(header=header)
    for start in range(0, len(value), MIB):
        data = value[start : start + MIB]
        chunk = types_pb2.PartChunk(offset_bytes=start, crc32c=crc32c(data), data=data)
        yield pb.SSMStateStoreRequest(bytes=chunk)


def fetched(
    rpc: Grpc, session: str, layer: int, **request: int
) -> tuple[pb.SSMStateFetchHeader, bytes]:
    answers = rpc.ssm.Fetch(pb.SSMStateFetchRequest(session=session, layer=layer, **request))
    header = next(answers).header
    value = b""
    for answer in answers:
        assert answer.bytes.offset_bytes == len(value) + request.get("offset_bytes", 0)
        assert answer.bytes.crc32c == crc32c(answer.bytes.data)
        value += answer.bytes.data
    return header, value


def test_each_wire_sees_what_the_other_stored(rpc: Grpc, resp_wire: Wire) -> None:
    value = os.urandom(3 * MIB + 17)
    stored = rpc.ssm.Store(
        stream("wires", 5, value, boundary_tokens=128, description="ArraysCache", model_id="m")
    )
    assert resp_wire("SSM.PREFIX.FETCH", "wires", 5) == value
    header, got = fetched(rpc, "wires", 5)
    assert got == value
    assert header.found
    assert header.generation == stored.generation
    assert header.info == pb.SSMStateInfo(
        size_bytes=len(value), boundary_tokens=128, description="ArraysCache", model_id="m"
    )
    assert resp_wire("SSM.PREFIX.STORE", "wires", 5, b"other") == "OK"
    header, got = fetched(rpc, "wires", 5)
    assert (got, header.info.boundary_tokens) == (b"other", 0)
    assert header.generation > stored.generation
    assert resp_wire("SSM.PREFIX.STORE", "wires", 6, b"") == "OK"
    assert fetched(rpc, "wires", 6)[1] == b""
    assert rpc.ssm.Drop(pb.SSMStateDropRequest(session="wires", layer=5)).dropped_count == 1
    assert resp_wire("SSM.PREFIX.FETCH", "wires", 5) is None
    assert rpc.ssm.Drop(pb.SSMStateDropRequest(session="wires")).dropped_count == 1
    assert not fetched(rpc, "wires", 6)[0].found


def test_a_fetch_goes_on_where_it_broke_off_or_is_refused(rpc: Grpc) -> None:
    value = os.urandom(2 * MIB + 5)
    first = rpc.ssm.Store(stream("resumed", 0, value))
    _, rest = fetched(rpc, "resumed", 0, offset_bytes=MIB + 3, generation=first.generation)
    assert rest == value[MIB + 3 :]
    assert fetched(rpc, "resumed", 0, offset_bytes=len(value))[1] == b""
    rpc.ssm.Store(stream("resumed", 0, os.urandom(10)))
    with pytest.raises(grpc.RpcError) as refused:
        fetched(rpc, "resumed", 0, offset_bytes=5, generation=first.generation)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(grpc.RpcError) as refused:
        fetched(rpc, "resumed", 0, offset_bytes=11)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_several_values_come_on_one_stream_in_the_order_asked(rpc: Grpc) -> None:
    values = {3: os.urandom(MIB + 1), 1: b"", 7: os.urandom(5)}
    for layer, value in values.items():
        rpc.ssm.Store(stream("several", layer, value))
    asked = pb.SSMStateFetchRequest(
        session="several", layer=7, more_layers=[2, 1, 3], offset_bytes=2
    )
    sizes: list[int | None] = []
    got = b""
    for answer in rpc.ssm.Fetch(asked):
        if answer.HasField("header"):
            sizes.append(answer.header.info.size_bytes if answer.header.found else None)
            offset = 2 if len(sizes) == 1 else 0
        else:
            assert answer.bytes.offset_bytes == offset
            offset += len(answer.bytes.data)
            got += answer.bytes.data
    assert sizes == [5, None, 0, MIB + 1]
    assert got == values[7][2:] + values[3]


@pytest.mark.parametrize(
    ("field", "ask"),
    [
        ("session", lambda ssm: ssm.Export(pb.SSMStateExportRequest(layers=[0]))),
        ("layers", lambda ssm: ssm.Export(pb.SSMStateExportRequest(session="s"))),
        ("layers", lambda ssm: ssm.Export(pb.SSMStateExportRequest(session="s", layers=[1, 1]))),
        ("layers", lambda ssm: ssm.Export(pb.SSMStateExportRequest(session="s", layers=range(1_001)))),
        ("layers", lambda ssm: list(
            ssm.Fetch(pb.SSMStateFetchRequest(session="s", more_layers=range(1, 1_001))))),
        ("layers", lambda ssm: list(
            ssm.Fetch(pb.SSMStateFetchRequest(session="s", layer=1, more_layers=[1])))),
    ],
)  # fmt: skip
def test_too_many_layers_or_one_twice_are_refused_by_their_field(
    rpc: Grpc, field: str, ask: Callable[..., object]
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        ask(rpc.ssm)
    told = refusal(refused.value)
    assert told.code is grpc.StatusCode.INVALID_ARGUMENT
    assert field in told.fields


def test_a_files_every_byte_is_counted_and_what_was_written_before_is_still_read(
    start_resp: Callable[..., Resp],
) -> None:
    resp = start_resp()
    states, directory = RecurrentStates(resp.store), resp.store.directory
    states.store("", "s", 0, bytes(1_000))
    states.store("", "s", 1, b"")
    files = list(directory.blobs.iterdir())
    with states.blobs.workshop.catalog.read() as transaction:
        assert Accounts(transaction).usage("") == sum(file.stat().st_size for file in files)
    named = states.export("", "s", [0, 1, 2], 0)
    assert [(state.layer, state.info.size_bytes) for state in named] == [(0, 1_000), (1, 0)]
    assert {state.file.file_name for state in named if state.file} == {
        directory.name_of(file) for file in files
    }
    # As a release wrote it whose files were not segments.
    written = states.blobs.write("", b"older")
    with states.blobs.workshop.catalog.write() as transaction:
        blob = states.blobs.publish(transaction, written)
        States(transaction).put("", "s", 0, blob, 5, "", "")
    (older,) = states.export("", "s", [0], 0)
    assert (older.info.size_bytes, older.file) == (5, None)
    assert resp.connect()("SSM.PREFIX.FETCH", "s", 0) == b"older"


def several(session: str, values: dict[int, bytes]) -> list[pb.SSMStateStoreRequest]:
    return [message for layer, value in values.items() for message in stream(session, layer, value)]


def test_the_values_of_one_stream_become_visible_together(rpc: Grpc, resp_wire: Wire) -> None:
    values = {4: os.urandom(MIB + 1), 0: b"", 2: os.urandom(3)}
    messages = several("together", values)

    def halting() -> Iterator[pb.SSMStateStoreRequest]:
        yield from messages
        for layer in values:
            assert resp_wire("SSM.PREFIX.FETCH", "together", layer) is None

    stored = rpc.ssm.Store(halting())
    generations = [stored.generation, *stored.more_generations]
    found = [fetched(rpc, "together", layer) for layer in values]
    assert [value for _, value in found] == list(values.values())
    assert [header.generation for header, _ in found] == generations


@pytest.mark.parametrize("what", ["short", "early", "session", "twice", "checksum", "too many"])
def test_a_broken_store_of_several_leaves_all_the_old_ones(
    both: ServerProcess, rpc: Grpc, what: str
) -> None:
    session = f"old/{what}"
    old = {layer: os.urandom(1_000) for layer in range(3)}
    rpc.ssm.Store(iter(several(session, old)))
    files = len(os.listdir(both.directory / "blobs"))
    messages = several(session, {layer: os.urandom(2 * MIB) for layer in range(3)})
    if what == "short":
        messages.pop()
    elif what == "early":
        del messages[2]
    elif what == "session":
        messages[3].header.session = "another"
    elif what == "twice":
        messages[6].header.layer = 0
    elif what == "checksum":
        messages[-1].bytes.crc32c ^= 1
    else:
        messages = several(session, dict.fromkeys(range(1_001), b""))
    with pytest.raises(grpc.RpcError) as refused:
        rpc.ssm.Store(iter(messages))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert {layer: fetched(rpc, session, layer)[1] for layer in old} == old
    assert len(os.listdir(both.directory / "blobs")) == files


@pytest.mark.parametrize("how", ["replaced", "dropped"])
def test_a_leased_file_stays_and_counts_until_the_lease_ends(
    start_resp: Callable[..., Resp], how: str
) -> None:
    resp = start_resp()
    states, directory = RecurrentStates(resp.store), resp.store.directory

    def used() -> int:
        with states.blobs.workshop.catalog.read() as transaction:
            return Accounts(transaction).stored_bytes()

    for layer in (0, 1):
        states.store("", "s", layer, bytes(MIB))
    (named,) = states.export("", "s", [0], 60_000)
    assert named.file is not None
    if how == "replaced":
        states.store("", "s", 0, b"")
    else:
        states.drop("", "s", 0)
    states.drop("", "s", 1)
    resp.store.tick()
    file = directory.resolve(named.file.file_name)
    assert file.exists()
    assert used() > MIB
    with states.blobs.workshop.catalog.write() as transaction:  # as time goes by
        transaction.run("UPDATE blob SET leased_until_unix_ms = 1", ())
    resp.store.tick()
    assert not file.exists()
    assert used() < MIB


def test_a_leased_session_is_not_evicted_though_it_was_used_least(
    start_resp: Callable[..., Resp],
) -> None:
    resp = start_resp(budget_bytes=16 << 20)
    states = RecurrentStates(resp.store)
    for name in ("leased", "free"):
        for layer in (0, 1):
            states.store("", name, layer, bytes(MIB))
    states.export("", "leased", [1], 60_000)
    for number in range(20):
        states.store("", f"more{number}", 0, bytes(MIB))
    assert states.open("", "free", 0) is None
    for layer in (0, 1):
        found = states.open("", "leased", layer)
        assert found is not None
        found.reading.close()
    with pytest.raises(InvalidRequest):
        states.export("", "leased", [1], 60_001)


def flipped(offset: int) -> Callable[[bytearray], None]:
    def damage(content: bytearray) -> None:
        content[offset] ^= 1

    return damage


def of_length(length: int) -> Callable[[bytearray], None]:
    def damage(content: bytearray) -> None:
        content[:8] = length.to_bytes(8, "little")

    return damage


DAMAGES: list[Callable[[bytearray], object]] = [
    *(of_length(length) for length in (0, 1, 100, 1 << 20, 1 << 40)),
    *(flipped(offset) for offset in (0, 8, 45, 200, -300, -1)),
    lambda content: content.clear(),
    lambda content: content.pop(),
    lambda content: content.append(0),
]


@pytest.mark.parametrize("size", [0, 100_000])
def test_whatever_changes_in_the_file_of_a_state_it_is_a_miss_and_no_other_bytes(
    start_resp: Callable[..., Resp], size: int
) -> None:
    resp = start_resp()
    wire = resp.connect()
    directory = resp.store.directory
    for number, damage in enumerate(DAMAGES):
        RecurrentStates(resp.store).store("", "s", 0, bytes(size))
        (path,) = directory.blobs.iterdir()
        assert check_directory(directory.path).damaged == []
        content = bytearray(path.read_bytes())
        damage(content)
        path.write_bytes(content)
        (found,) = check_directory(directory.path).damaged
        assert (found.kind, found.name) == ("value", directory.name_of(path)), number
        assert wire("SSM.PREFIX.FETCH", "s", 0).text.startswith("ERR "), number
        assert wire("SSM.PREFIX.FETCH", "s", 0) is None, number
        assert not path.exists()


@pytest.mark.parametrize("what", ["short", "long", "order", "checksum", "name", "no header"])
def test_a_broken_store_leaves_the_old_value(rpc: Grpc, what: str) -> None:
    old = os.urandom(1_000)
    rpc.ssm.Store(stream("kept", 1, old))
    messages = list(stream("kept", 1, os.urandom(2 * MIB)))
    if what == "short":
        messages.pop()
    elif what == "long":
        messages = list(stream("kept", 1, bytes(2 * MIB), size=MIB))
    elif what == "order":
        messages[1:] = messages[:0:-1]
    elif what == "checksum":
        messages[2].bytes.crc32c ^= 1
    elif what == "name":
        messages = list(stream("", 1, b"x"))
    else:
        messages = messages[1:]
    with pytest.raises(grpc.RpcError) as refused:
        rpc.ssm.Store(iter(messages))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fetched(rpc, "kept", 1)[1] == old


def test_an_absurd_size_allocates_nothing(rpc: Grpc) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        rpc.ssm.Store(stream("absurd", 0, b"x", size=1 << 60))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not fetched(rpc, "absurd", 0)[0].found
