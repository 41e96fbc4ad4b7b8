"""One store, two wires: what one side stores the other fetches, bit for bit."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from crc32c import crc32c
from safetensors import safe_open

from pion_wire import codecs
from pion_wire.layout import DType, Layout, Side, TensorLayout
from pion_wire.messages import layout_to_message
from pion_wire.rows import decode_rows, encode_rows
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import types_pb2
from tests.conftest import ServerProcess
from tests.resp.wire import Refused, Wire, fields
from tests.server.wire import Wire as Grpc

HEADS, DIM, SLOTS, ROWS = 2, 32, 3, 150
WIDTH = HEADS * DIM
RNG = np.random.default_rng(3)
NUMPY = {DType.F16: np.float16, DType.BF16: ml_dtypes.bfloat16, DType.F32: np.float32}


@pytest.fixture(scope="module")
def both() -> Iterator[ServerProcess]:
    path = Path(tempfile.mkdtemp(prefix="pion-", dir="/tmp"))
    server = ServerProcess(path / "data", "--resp", f"unix:{path}/resp")
    yield server
    assert server.stop() == 0
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def wire(both: ServerProcess) -> Iterator[Wire]:
    wire = Wire(both.ready["resp"])
    yield wire
    wire.close()


@pytest.fixture
def rpc(both: ServerProcess) -> Iterator[Grpc]:
    with Grpc(both.address) as rpc:
        yield rpc


def layout(dtype: DType, codec: str = "raw") -> Layout:
    return Layout(
        tuple(
            TensorLayout(slot, side, HEADS, DIM, dtype, codec)
            for slot in range(SLOTS)
            for side in Side
        )
    )


def values(dtype: DType, rows: int = ROWS) -> Any:
    return RNG.standard_normal((rows, WIDTH)).astype(NUMPY[dtype])


def store(
    rpc: Grpc, name: str, shape: Layout, tensors: list[Any], tokens: bytes, **header: Any
) -> None:
    """Stores rows from `base` on, over gRPC."""

    def messages() -> Iterator[pb.PrefixStoreStoreRequest]:
        yield pb.PrefixStoreStoreRequest(
            header=pb.PrefixStoreStoreHeader(
                namespace=name,
                model_id="m",
                token_ids=tokens,
                layout=layout_to_message(shape),
                **header,
            )
        )
        for index, (tensor, rows) in enumerate(zip(shape.tensors, tensors, strict=bool(tensors))):
            arrays = encode_rows(
                tensor, np.ascontiguousarray(rows).view(np.uint8).data, tensor.dtype
            )
            for array_index, data in enumerate(arrays):
                chunk = types_pb2.RowChunk(
                    tensor_index=index,
                    array_index=array_index,
                    first_row=header.get("base", 0),
                    row_count=len(rows),
                    crc32c=crc32c(data),
                    data=bytes(data),
                )
                yield pb.PrefixStoreStoreRequest(rows=chunk)

    rpc.prefixes.Store(messages())


def fetch(
    rpc: Grpc, name: str, *spoken: str
) -> tuple[pb.PrefixStoreFetchHeader, dict[tuple[int, int], bytes]]:
    """Fetches over gRPC: the header, and the bytes of each array of each tensor."""
    request = pb.PrefixStoreFetchRequest(namespace=name, codecs=spoken)
    arrays: dict[tuple[int, int], bytes] = {}
    header = pb.PrefixStoreFetchHeader()
    total = 0
    for message in rpc.prefixes.Fetch(request):
        if message.HasField("header"):
            header = message.header
            continue
        chunk = message.rows
        assert crc32c(chunk.data) == chunk.crc32c
        key = chunk.tensor_index, chunk.array_index
        arrays[key] = arrays.get(key, b"") + chunk.data
        total += len(chunk.data)
    assert total == header.total_bytes
    return header, arrays


def tokens(count: int, first: int = 0) -> bytes:
    return np.arange(first, first + count, dtype="<u4").tobytes()


def over_resp(wire: Wire, sid: str, *options: str, rows: int = ROWS) -> list[bytes]:
    answer: list[bytes] = wire("V.FETCH", sid, "BATCH", 0, rows, *options)
    return answer


@pytest.mark.parametrize("dtype", list(DType))
def test_raw_rows_of_grpc_are_a_hit_over_resp_exact_as_float32(
    rpc: Grpc, wire: Wire, dtype: DType
) -> None:
    name = f"raw {dtype.value}"
    stored = [values(dtype) for _ in range(2 * SLOTS)]
    store(rpc, name, layout(dtype), stored, tokens(ROWS, 1_000 * list(DType).index(dtype)))
    assert wire("KV.PREFIX.LOOKUP", name) == "HIT"
    for side in range(2):
        got = over_resp(wire, f"{name}_p{'kv'[side]}")
        expected = [rows.astype(np.float32).tobytes() for rows in stored[side::2]]
        assert got == expected
    native = over_resp(wire, f"{name}_pk", "FMT", "NATIVE")
    if dtype is DType.F16:
        assert native == [rows.tobytes() for rows in stored[::2]]
    else:
        assert native == over_resp(wire, f"{name}_pk")
    info = fields(wire("V.INFO", f"{name}_pk"))
    assert info["value_dim"] == str(WIDTH)
    assert info["v_format"] == {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}[dtype.value]
    assert info["schema"] == "uniform"
    assert info["layer_2_tokens"] == str(ROWS)


@pytest.mark.parametrize(
    "codec",
    ["fp16", "int8", "fp8", "turbo4", "turbo3", "turbo2", "mlx4g32", "bf16_rope_fp8_body(32)"],
)
def test_a_codec_is_the_same_over_both_wires(rpc: Grpc, wire: Wire, codec: str) -> None:
    name = f"lossy {codec}"
    shape = layout(DType.BF16, codec)
    stored = [values(DType.BF16) for _ in range(2 * SLOTS)]
    store(rpc, name, shape, stored, tokens(ROWS, 77))
    header, arrays = fetch(rpc, name, str(codecs.parse(codec)))
    assert {t.codec for t in header.layout.tensors} == {str(codecs.parse(codec))}
    decoded = [
        bytes(decode_rows(tensor, [arrays[i, a] for a in range(len(tensor.arrays))]))
        for i, tensor in enumerate(shape.tensors)
    ]
    # A client that does not speak it gets values, and so do clients of the other wire.
    plain, floats = fetch(rpc, name)
    assert {(t.codec, t.data_type) for t in plain.layout.tensors} == {
        ("raw", types_pb2.DATA_TYPE_F32)
    }
    assert [floats[i, 0] for i in range(2 * SLOTS)] == decoded
    assert over_resp(wire, f"{name}_pk") == decoded[::2]
    assert over_resp(wire, f"{name}_pv") == decoded[1::2]
    assert wire("KV.PREFIX.LOOKUP", name) == "HIT"


def test_a_fetch_of_decoded_rows_resumes_anywhere(rpc: Grpc) -> None:
    stored = [values(DType.F32, 9_000) for _ in range(2 * SLOTS)]
    store(rpc, "resumed", layout(DType.F32, "int8"), stored, tokens(9_000, 5))
    _, whole = fetch(rpc, "resumed")
    request = pb.PrefixStoreFetchRequest(
        namespace="resumed", resume_tensor_index=3, resume_row=4_567
    )
    got = b"".join(m.rows.data for m in rpc.prefixes.Fetch(request) if m.HasField("rows"))
    rest = b"".join(whole[i, 0] for i in range(3, 2 * SLOTS))
    assert got == rest[4_567 * WIDTH * 4 :]
    part = pb.PrefixStoreFetchRequest(
        namespace="resumed", slots=[1], rows=types_pb2.RowRange(begin=100, end=8_200)
    )
    got = b"".join(m.rows.data for m in rpc.prefixes.Fetch(part) if m.HasField("rows"))
    cut = slice(100 * WIDTH * 4, 8_200 * WIDTH * 4)
    assert got == whole[2, 0][cut] + whole[3, 0][cut]


@pytest.mark.parametrize("dtype", list(DType))
def test_a_chain_has_all_its_rows_over_resp(rpc: Grpc, wire: Wire, dtype: DType) -> None:
    name, first = f"chain {dtype.value}", 10_000 * (1 + list(DType).index(dtype))
    parent = [values(dtype, 100) for _ in range(2 * SLOTS)]
    own = [values(dtype, ROWS - 80) for _ in range(2 * SLOTS)]
    store(rpc, f"{name} parent", layout(dtype), parent, tokens(100, first))
    ids = tokens(80, first) + tokens(ROWS - 80, first + 5_000)
    store(rpc, name, layout(dtype), own, ids, parent_namespace=f"{name} parent", base=80)
    expected = [
        np.concatenate((p[:80], o)).astype(np.float32) for p, o in zip(parent, own, strict=True)
    ]
    assert wire("KV.PREFIX.LOOKUP", name) == "HIT"
    assert over_resp(wire, f"{name}_pv") == [rows.tobytes() for rows in expected[1::2]]
    got = wire("V.FETCH", f"{name}_pk", 1, "RANGE", 79, 82)
    assert got == expected[2][79:82].tobytes()
    assert wire("V.STOREBATCH", f"{name}_pk", 0, 10, 1, bytes(WIDTH * 4)).text.startswith(
        "ERR V.STOREBATCH failed (first_row"
    )
    drop = pb.PrefixStoreDropRequest(namespaces=[f"{name} parent"])
    rpc.prefixes.Drop(drop)
    assert over_resp(wire, f"{name}_pv") == [rows.tobytes() for rows in expected[1::2]]


def test_a_child_without_rows_of_its_own_has_its_parents_over_resp(rpc: Grpc, wire: Wire) -> None:
    parent = [values(DType.F16, 100) for _ in range(2 * SLOTS)]
    ids = tokens(100, 60_000)
    store(rpc, "rowless parent", layout(DType.F16), parent, ids)
    shared = {"parent_namespace": "rowless parent", "base": 64}
    store(rpc, "rowless", layout(DType.F16), [], ids[: 4 * 64], **shared)
    expected = [rows[:64].astype(np.float32).tobytes() for rows in parent]
    assert wire("KV.PREFIX.LOOKUP", "rowless") == "HIT"
    assert over_resp(wire, "rowless_pk", rows=64) == expected[::2]
    more = values(DType.F16, 1)
    for slot in range(SLOTS):
        for sid in ("rowless_pk", "rowless_pv"):
            assert wire("V.STOREBATCH", sid, slot, 64, 1, more.tobytes(), "FMT", "F16") == "OK"
    for saved in (False, True):
        if saved:
            assert wire("KV.PREFIX.SAVE") == "OK"
        own = more.astype(np.float32).tobytes()
        assert over_resp(wire, "rowless_pv", rows=65) == [rows + own for rows in expected[1::2]]
        assert over_resp(wire, "rowless parent_pv", rows=100) == [
            rows.astype(np.float32).tobytes() for rows in parent[1::2]
        ]


def test_rows_of_resp_come_back_over_grpc_as_they_were_stored(rpc: Grpc, wire: Wire) -> None:
    wire("KV.PREFIX.REGISTER", "halves", WIDTH, "fp16")
    found = rpc.prefixes.Lookup(
        pb.PrefixStoreLookupRequest(queries=[pb.PrefixStoreLookupRequest.Query(namespace="halves")])
    ).results[0]
    assert (found.hit, found.reason) == (False, types_pb2.MISS_REASON_NO_ROWS)
    stored = [values(DType.F16) for _ in range(2 * SLOTS)]
    for slot in range(SLOTS):
        for side in (1, 0):
            sid = f"halves_p{'kv'[side]}"
            rows = stored[2 * slot + side].tobytes()
            assert wire("V.STOREBATCH", sid, slot, 0, ROWS, rows, "FMT", "F16") == "OK"
    for save in (False, True):
        if save:
            assert wire("KV.PREFIX.SAVE") == "OK"
        header, arrays = fetch(rpc, "halves", "fp16")
        assert header.prefix.token_count == ROWS
        assert header.prefix.state == (
            types_pb2.PREFIX_STATE_SEALED if save else types_pb2.PREFIX_STATE_LIVE
        )
        assert [(t.slot, t.side, t.heads, t.head_dim, t.codec) for t in header.layout.tensors] == [
            (slot, side, 1, WIDTH, "fp16") for slot in range(SLOTS) for side in (1, 2)
        ]
        assert [arrays[i, 0] for i in range(2 * SLOTS)] == [rows.tobytes() for rows in stored]
        _, floats = fetch(rpc, "halves")
        assert floats[0, 0] == stored[0].astype(np.float32).tobytes()


@pytest.mark.parametrize("codec", ["int8", "fp8", "turbo4", "mlx4g32"])
def test_a_gap_reads_as_zeros_by_every_road(rpc: Grpc, wire: Wire, codec: str) -> None:
    name = f"gap {codec}"
    wire("KV.PREFIX.REGISTER", name, WIDTH, codec)
    rows = values(DType.F32, 10).tobytes()
    for side in ("pk", "pv"):
        wire("V.STOREBATCH", f"{name}_{side}", 0, 50, 10, rows)
    expected = wire("V.FETCH", f"{name}_pk", 0, "RANGE", 0, 60)
    assert not any(expected[: 50 * WIDTH * 4])
    for save in (False, True):
        if save:
            wire("KV.PREFIX.SAVE")
        assert fetch(rpc, name)[1][0, 0] == expected
        header, arrays = fetch(rpc, name, str(codecs.parse(codec)))
        tensor = TensorLayout(0, Side.K, 1, WIDTH, DType.F32, codec)
        stored = [arrays[0, a] for a in range(len(tensor.arrays))]
        assert bytes(decode_rows(tensor, stored)) == expected
        assert header.prefix.fidelity != "raw"


@pytest.mark.parametrize("dtype", list(DType))
def test_a_batch_never_rounds_rows_that_were_stored_exactly(
    rpc: Grpc, wire: Wire, dtype: DType
) -> None:
    name = f"exactly {dtype.value}"
    stored = [values(dtype) for _ in range(2 * SLOTS)]
    store(rpc, name, layout(dtype), stored, tokens(ROWS, 90_000 + list(DType).index(dtype)))
    fits = values(dtype, 5).astype(np.float32)
    assert wire("V.STOREBATCH", f"{name}_pk", 0, ROWS, 5, fits.tobytes()) == "OK"
    assert wire("V.FETCH", f"{name}_pk", 0, "RANGE", ROWS, ROWS + 5) == fits.tobytes()
    awkward = np.full((1, WIDTH), 1 + 2**-20, np.float32)
    answer = wire("V.STOREBATCH", f"{name}_pk", 0, ROWS + 5, 1, awkward.tobytes())
    assert (answer == "OK") is (dtype is DType.F32)
    assert over_resp(wire, f"{name}_pk")[0] == stored[0].astype(np.float32).tobytes()
    assert wire("V.STOREBATCH", f"{name}_pk", SLOTS, 0, 1, bytes(WIDTH * 4)).text.startswith(
        "ERR V.STOREBATCH failed ("
    )
    # It was sealed, and is live again with the rows of both.
    assert fields(wire("V.INFO", f"{name}_pk"))["layer_0_tokens"] == str(
        ROWS + 5 + (dtype is DType.F32)
    )


def test_what_binary16_cannot_hold_is_not_exported(rpc: Grpc, wire: Wire) -> None:
    for dtype, fits in ((DType.F16, True), (DType.BF16, False), (DType.F32, False)):
        name = f"exported {dtype.value}"
        stored = [values(dtype) * NUMPY[dtype](1e-6) for _ in range(2 * SLOTS)]
        store(rpc, name, layout(dtype), stored, tokens(ROWS, 70_000 + list(DType).index(dtype)))
        answer = wire("V.EXPORT", f"{name}_pk", f"{name}_pv", 0, ROWS, SLOTS, HEADS, DIM)
        assert isinstance(answer, bytes) is fits, answer
    zeros = [np.zeros((ROWS, WIDTH), np.float32)] * (2 * SLOTS)
    store(rpc, "exported zeros", layout(DType.F32), zeros, tokens(ROWS, 80_000))
    answer = wire("V.EXPORT", "exported zeros_pk", "exported zeros_pv", 0, ROWS, SLOTS, HEADS, DIM)
    assert isinstance(answer, bytes), "these can be held exactly"


@pytest.mark.parametrize("dtype", list(DType))
def test_what_binary16_keeps_of_any_type_is_exported_as_it_is(
    rpc: Grpc, wire: Wire, dtype: DType
) -> None:
    name = f"halves of {dtype.value}"
    stored = [values(dtype) for _ in range(2 * SLOTS)]
    tokens_of = tokens(ROWS, 110_000 + list(DType).index(dtype))
    store(rpc, name, layout(dtype, "fp16"), stored, tokens_of)
    path = wire("V.EXPORT", f"{name}_pk", f"{name}_pv", 0, ROWS, SLOTS, HEADS, DIM).decode()
    with safe_open(path, "np") as file:
        for side in "kv":
            for slot, rows in enumerate(over_resp(wire, f"{name}_p{side}", "FMT", "NATIVE")):
                by_head = np.frombuffer(rows, np.float16).reshape(ROWS, HEADS, DIM)
                expected = by_head.transpose(1, 0, 2)[None]
                assert np.array_equal(file.get_tensor(f"{side}.{slot}"), expected)


def test_each_wire_drops_what_the_other_stored(rpc: Grpc, wire: Wire) -> None:
    store(rpc, "grpc's", layout(DType.F16), [values(DType.F16)] * 6, tokens(ROWS, 60_000))
    assert wire("KV.PREFIX.DROP", "grpc's") == 1
    assert not fetch(rpc, "grpc's")[0].found
    wire("KV.PREFIX.REGISTER", "resp's", WIDTH, "fp16")
    wire("V.STOREBATCH", "resp's_pk", 0, 0, 1, bytes(WIDTH * 4))
    answer = rpc.prefixes.Drop(pb.PrefixStoreDropRequest(namespaces=["resp's"]))
    assert answer.results[0].dropped
    assert wire("KV.PREFIX.LOOKUP", "resp's") == "MISS"
    assert wire("V.FETCH", "resp's_pk", 0, 0) == Refused("ERR session not found")


def test_registering_over_resp_leaves_a_prefix_of_grpc_alone(rpc: Grpc, wire: Wire) -> None:
    stored = [values(DType.BF16) for _ in range(2 * SLOTS)]
    store(rpc, "theirs", layout(DType.BF16), stored, tokens(ROWS, 65_000))
    assert wire("KV.PREFIX.REGISTER", "theirs", 8, "int8", "BLOCKS", 64, 1, bytes(8)) == "OK"
    assert over_resp(wire, "theirs_pk") == [r.astype(np.float32).tobytes() for r in stored[::2]]
    assert rpc.prefixes.Blocks(pb.PrefixStoreBlocksRequest(namespace="theirs")).known
    header, arrays = fetch(rpc, "theirs")
    assert header.prefix.state == types_pb2.PREFIX_STATE_SEALED
    assert arrays[0, 0] == stored[0].tobytes()


def test_rows_written_over_grpc_follow_what_resp_declared(rpc: Grpc, wire: Wire) -> None:
    wire("KV.PREFIX.REGISTER", "written", WIDTH, "fp16")
    rows = values(DType.F16, 10)

    def messages(slot: int) -> Iterator[pb.PrefixStoreWriteRowsRequest]:
        yield pb.PrefixStoreWriteRowsRequest(
            header=pb.PrefixStoreWriteRowsHeader(
                namespace="written", slot=slot, side=types_pb2.SIDE_V, first_row=0, row_count=10
            )
        )
        data = rows.tobytes()
        chunk = types_pb2.RowChunk(row_count=10, crc32c=crc32c(data), data=data)
        yield pb.PrefixStoreWriteRowsRequest(rows=chunk)

    assert rpc.prefixes.WriteRows(messages(4)).row_count == 10
    assert wire("V.FETCH", "written_pv", 4, "RANGE", 0, 10, "FMT", "NATIVE") == rows.tobytes()
    read = pb.PrefixStoreReadRowsRequest(
        namespace="written",
        slot=4,
        side=types_pb2.SIDE_V,
        rows=np.array([9, 50, 0], "<u4").tobytes(),
    )
    first, *rest = rpc.prefixes.ReadRows(read)
    assert first.tensor.data_type == types_pb2.DATA_TYPE_F32
    expected = np.zeros((3, WIDTH), np.float32)
    expected[[0, 2]] = rows[[9, 0]]
    assert b"".join(message.data for message in rest) == expected.tobytes()
