"""Every method of Attend over the wire, asked as a stranger would who has only the protos."""

import contextlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from crc32c import crc32c
from grpc_health.v1 import health_pb2

from pion_grpc.backends import Dense, Fused, Query, Sparse, SparseAuto, SparseAutoFused
from pion_grpc.backends.reference import attend as reference
from pion_wire.layout import DType, Layout, Side, TensorLayout
from pion_wire.softmax import merge
from pion_wire.v1 import attend_pb2 as pb
from pion_wire.v1 import types_pb2
from tests.conftest import ServerProcess
from tests.server.wire import TIMEOUT_S, Sample, Wire, eventually, refused

Array = npt.NDArray[Any]
Pair = tuple[Array, Array]
LARGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
RESIDENT, COLD = pb.ATTEND_STATE_RESIDENT, pb.ATTEND_STATE_COLD
MISSING = pb.ATTEND_STATE_UNSPECIFIED


def rng(*seed: object) -> np.random.Generator:
    return np.random.default_rng(list("|".join(map(str, seed)).encode()))


def pair(name: str, heads: int = 2, rows: int = 50, dim: int = 16) -> Pair:
    noise = rng(name)
    shape = (heads, rows, dim)
    return noise.standard_normal(shape, np.float32), noise.standard_normal(shape, np.float32)


def upload_messages(
    session: str, sides: Pair, layer: int = 0, chunk_bytes: int = 1 << 20, **declared: int
) -> Iterator[bytes]:
    heads, count, dim = sides[0].shape
    shape = {"layer": layer, "heads": heads, "rows": count, "head_dim": dim} | declared
    header = pb.AttendStoreHeader(session=session, rows=pb.AttendRows(**shape))
    yield pb.AttendStoreRequest(header=header).SerializeToString()
    for part, side in enumerate(sides):
        data = side.tobytes()
        for offset in range(0, len(data), chunk_bytes):
            piece = data[offset : offset + chunk_bytes]
            chunk = types_pb2.PartChunk(
                part_index=part, offset_bytes=offset, crc32c=crc32c(piece), data=piece
            )
            yield pb.AttendStoreRequest(bytes=chunk).SerializeToString()


def prefix_message(session: str, namespace: str, **fields: Any) -> Iterator[bytes]:
    source = pb.AttendFromPrefix(namespace=namespace, **fields)
    header = pb.AttendStoreHeader(session=session, from_prefix=source)
    yield pb.AttendStoreRequest(header=header).SerializeToString()


class AttendWire(Wire):
    """One channel, and what tests of Attend send over it."""

    def __init__(self, address: str, **more: Any) -> None:
        super().__init__(address, options=LARGE, **more)
        self.address = address

    def store_entry(self, messages: Iterable[bytes]) -> pb.AttendStoreResponse:
        answer = pb.AttendStoreResponse.FromString
        call = self.channel.stream_unary("/pion.v1.Attend/Store", None, answer)
        found: pb.AttendStoreResponse = call(
            iter(messages), timeout=TIMEOUT_S, metadata=self.metadata
        )
        return found

    def upload(self, session: str, rows: Pair, layer: int = 0) -> pb.AttendStoreResponse:
        return self.store_entry(upload_messages(session, rows, layer))

    def states(self, session: str, layers: int = 1) -> list[int]:
        request = pb.AttendLookupRequest(session=session, layers=range(layers))
        answer = self.attend.Lookup(request, timeout=TIMEOUT_S, metadata=self.metadata)
        return [entry.state for entry in answer.entries]

    def ask(self, request: pb.AttendQueryRequest) -> pb.AttendQueryResponse:
        answer: pb.AttendQueryResponse = self.attend.Query(
            request, timeout=TIMEOUT_S, metadata=self.metadata
        )
        return answer

    def ask_stream(
        self, requests: Iterable[pb.AttendStreamRequest]
    ) -> list[pb.AttendStreamResponse]:
        call = self.attend.Stream(iter(requests), timeout=TIMEOUT_S, metadata=self.metadata)
        return list(call)

    def described(self) -> Any:
        return self.call("Describe")


@pytest.fixture(scope="module")
def wire(server: ServerProcess) -> Iterator[AttendWire]:
    with AttendWire(server.address) as wire:
        yield wire


def query(session: str, q: Array, kind: dict[str, Any] | None = None, **more: Any) -> Any:
    given = kind or {"dense": pb.AttendDense(queries=q.shape[1])}
    heads, _, dim = q.shape
    fields: dict[str, Any] = {"session": session, "heads": heads, "head_dim": dim}
    return pb.AttendQueryRequest(**fields | {"data": q.tobytes()} | given | more)


def normal(name: str, heads: int = 2, queries: int = 1, dim: int = 16) -> Array:
    return rng("q", name).standard_normal((heads, queries, dim), np.float32)


def out_of(answer: pb.AttendQueryResponse, q: Array) -> Array:
    return np.frombuffer(answer.data, "<f4").reshape(q.shape)


def lse_of(answer: pb.AttendQueryResponse, q: Array) -> Array:
    return np.frombuffer(answer.log_sum_exp, "<f4").reshape(q.shape[:2])


class Asked:
    """One query of each kind over a wire, and the same for the reference."""

    def __init__(self, kind: str, case: "Case") -> None:
        rows = case.queries if kind in ("dense", "fused") else 1
        self.q = normal(f"{case}{kind}", case.heads, rows, case.dim)
        suffix = pair(f"{case}suffix", case.kv_heads, case.suffix, case.dim)
        auto = pb.AttendSparseAuto(
            block_rows=case.block_rows, blocks=case.blocks, selector=case.selector
        )
        selector = "quest" if case.selector == pb.ATTEND_SELECTOR_QUEST else "mean"
        width = 2 * case.rows
        table = rng(case, "i").integers(-2, case.rows + 2, (case.heads, width), np.int32)
        counts = rng(case, "c").integers(0, width + 1, case.heads).astype(np.uint32)
        brought = {
            "suffix_rows": case.suffix,
            "suffix_k": suffix[0].tobytes(),
            "suffix_v": suffix[1].tobytes(),
        }
        self.message: dict[str, dict[str, Any]] = {
            "dense": {"dense": pb.AttendDense(queries=rows)},
            "fused": {"fused": pb.AttendFused(queries=rows, **brought)},
            "sparse": {
                "sparse": pb.AttendSparse(
                    indices=table.tobytes(), counts=counts.tobytes(), indices_per_head=width
                )
            },
            "sparse_auto": {"sparse_auto": auto},
            "sparse_auto_fused": {
                "sparse_auto_fused": pb.AttendSparseAutoFused(choice=auto, **brought)
            },
        }
        common: dict[str, Any] = {
            "q": self.q,
            "window": case.window,
            "scale": case.scale,
            "head_map": case.head_map,
            "with_lse": True,
        }
        blocks: dict[str, Any] = {
            "block_tokens": case.block_rows,
            "blocks": case.blocks,
            "selector": selector,
        }
        with_suffix = {"k_suffix": suffix[0], "v_suffix": suffix[1]}
        make: dict[str, Callable[[], Query]] = {
            "dense": lambda: Dense(**common),
            "fused": lambda: Fused(**common, **with_suffix),
            "sparse": lambda: Sparse(**common, indices=table, counts=counts),
            "sparse_auto": lambda: SparseAuto(**common, **blocks),
            "sparse_auto_fused": lambda: SparseAutoFused(**common, **blocks, **with_suffix),
        }
        self.reference = make[kind]()
        options: dict[str, Any] = {"window_rows": case.window, "log_sum_exp": True}
        if case.scale is not None:
            options["scale"] = case.scale
        self.request = query(
            str(case), self.q, self.message[kind], head_map=case.head_map, **options
        )


class Case:
    """A random prefix and the shape of what is asked about it."""

    def __init__(self, number: int) -> None:
        dice = rng("case", number)
        self.number = number
        self.kv_heads = int(dice.integers(1, 9))
        self.heads = self.kv_heads * int(dice.integers(1, 5))
        self.dim = int(dice.integers(16, 129))
        self.rows = int(dice.integers(1, 300))
        self.queries = int(dice.integers(1, 65))
        self.suffix = int(dice.integers(0, 65))
        windows = [0, 1, self.rows - 1, self.rows, self.rows + 1]
        self.window = int(dice.choice(windows))
        self.scale = 0.25 if dice.integers(2) else None  # exact in float32, as the wire has it
        self.block_rows = int(dice.integers(1, self.rows + 1))
        self.blocks = int(dice.integers(1, 5))
        self.selector = int(dice.integers(0, 3))
        self.head_map = b""
        if dice.integers(2):
            self.head_map = dice.integers(0, self.kv_heads, self.heads, np.uint8).tobytes()

    def __str__(self) -> str:
        return f"case/{self.number}"

    @property
    def pair(self) -> Pair:
        return pair(str(self), self.kv_heads, self.rows, self.dim)


KINDS = ("dense", "fused", "sparse", "sparse_auto", "sparse_auto_fused")


@pytest.mark.parametrize("number", range(12))
def test_no_kind_of_query_is_answered_wrongly_on_any_lane(wire: AttendWire, number: int) -> None:
    case = Case(number)
    wire.upload(str(case), case.pair)
    asked = [Asked(kind, case) for kind in KINDS]
    alone = [wire.ask(one.request) for one in asked]
    stream = wire.ask_stream(
        pb.AttendStreamRequest(id=index + 7, query=one.request) for index, one in enumerate(asked)
    )
    for index, (one, answer) in enumerate(zip(asked, alone, strict=True)):
        want = reference(*case.pair, one.reference)
        assert want.lse is not None
        np.testing.assert_allclose(out_of(answer, one.q), want.out, rtol=0, atol=1e-5)
        np.testing.assert_allclose(lse_of(answer, one.q), want.lse, rtol=1e-6, atol=1e-5)
        assert stream[index].id == index + 7
        assert stream[index].answer == answer, "the lanes differ in a bit"


def test_what_was_not_asked_for_is_not_sent(wire: AttendWire) -> None:
    wire.upload("lean", pair("lean"))
    for queries in (1, 5):
        q = normal("lean", queries=queries)
        assert wire.ask(query("lean", q)).log_sum_exp == b""


def test_merging_two_halves_does_not_differ_from_the_whole(wire: AttendWire) -> None:
    k, v = pair("halves", rows=70)
    q = normal("halves", queries=3)
    for name, rows in (("left", slice(0, 31)), ("right", slice(31, 70)), ("both", slice(0, 70))):
        wire.upload(f"halves/{name}", (k[:, rows].copy(), v[:, rows].copy()))
    answers = [
        wire.ask(query(f"halves/{name}", q, log_sum_exp=True)) for name in ("left", "right", "both")
    ]
    parts = [(out_of(answer, q), lse_of(answer, q)) for answer in answers]
    out, lse = merge(*parts[0], *parts[1])
    np.testing.assert_allclose(out, parts[2][0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, parts[2][1], rtol=0, atol=1e-5)


def test_equal_keys_give_the_logarithm_of_their_number(wire: AttendWire) -> None:
    k, v = pair("equal", rows=64)
    k[:] = k[:, :1]
    wire.upload("equal", (k, v))
    q = normal("equal")
    answer = wire.ask(query("equal", q, log_sum_exp=True))
    score = np.einsum("hqd,hd->hq", q, k[:, 0]) / 4
    np.testing.assert_allclose(lse_of(answer, q), np.log(64) + score, rtol=0, atol=1e-5)


def test_all_blocks_are_not_less_than_dense(wire: AttendWire) -> None:
    wire.upload("all", pair("all", rows=100))
    q = normal("all")
    dense = out_of(wire.ask(query("all", q)), q)
    every = pb.AttendSparseAuto(block_rows=16, blocks=7)
    sparse = out_of(wire.ask(query("all", q, {"sparse_auto": every})), q)
    np.testing.assert_allclose(sparse, dense, rtol=0, atol=1e-6)


def test_a_head_without_a_usable_index_gives_zeros(wire: AttendWire) -> None:
    wire.upload("none", pair("none"))
    q = normal("none")
    table, counts = np.array([[-1, 50], [3, 4]], np.int32), np.array([2, 2], np.uint32)
    kind = pb.AttendSparse(indices=table.tobytes(), counts=counts.tobytes(), indices_per_head=2)
    out = out_of(wire.ask(query("none", q, {"sparse": kind})), q)
    assert not out[0].any()
    assert np.isfinite(out).all()
    assert out[1].any()


def test_huge_and_tiny_values_do_not_overflow(wire: AttendWire) -> None:
    k, v = pair("huge")
    wire.upload("huge", (k * np.float32(1e25), v))
    wire.upload("tiny", (k * np.float32(1e-44), v))
    q = normal("huge") * np.float32(1e25)
    for session in ("huge", "tiny"):
        answer = wire.ask(query(session, q, log_sum_exp=True))
        assert np.isfinite(out_of(answer, q)).all()
        assert np.isfinite(lse_of(answer, q)).all()


@pytest.mark.parametrize(
    ("selector", "strength"), [(pb.ATTEND_SELECTOR_QUEST, 2.5), (pb.ATTEND_SELECTOR_MEAN, 8.0)]
)
def test_a_needle_is_not_overlooked_at_any_depth(
    wire: AttendWire, selector: int, strength: float
) -> None:
    """One key that the query matches, in 65,536 rows of noise of the same kind as the query.

    Quest sees what dense attention sees; of a block's mean a single key is a 64th part, so there the
    needle must be as large as needles seldom are.
    """
    rows, dim = 65_536, 64
    k, v = pair("needle", heads=1, rows=rows, dim=dim)
    needles = [int(rows * (depth + 0.5) / 10) for depth in range(10)]
    queries = rng("queries").standard_normal((10, 1, 1, dim), np.float32)
    k[0, needles] = np.float32(strength) * queries[:, 0, 0]
    session = f"needle/{selector}"
    wire.upload(session, (k, v))
    choice = pb.AttendSparseAuto(block_rows=64, blocks=8, selector=selector)
    for needle, q in zip(needles, queries, strict=True):
        dense, sparse = (
            out_of(wire.ask(query(session, q, kind)), q) for kind in ({}, {"sparse_auto": choice})
        )
        for out in (dense, sparse):
            assert np.abs(out[0, 0] - v[0, needle]).max() < 0.05


# Making resident


def test_an_uploaded_entry_is_not_resident_before_its_last_byte(wire: AttendWire) -> None:
    rows = pair("upload", rows=20_000)
    messages = list(upload_messages("upload", rows))
    refusal = refused(lambda: wire.store_entry(messages[:-1]))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID")
    assert wire.states("upload") == [MISSING]
    answer = wire.store_entry(messages)
    assert (answer.layer_count, answer.skipped_count) == (1, 0)
    assert answer.resident_bytes == 2 * rows[0].nbytes
    assert wire.states("upload", 2) == [RESIDENT, MISSING]
    request = pb.AttendLookupRequest(session="upload", layers=[0])
    (entry,) = wire.attend.Lookup(request).entries
    assert (entry.layer, entry.heads, entry.rows, entry.head_dim) == (0, 2, 20_000, 16)


def stored_floats(wire: Wire, namespace: str, layers: int = 3) -> list[Pair]:
    """Stores a prefix of f32 rows; returns them head-major."""
    layout = Layout(
        tuple(TensorLayout(slot, side, 2, 16, DType.F32) for slot in range(layers) for side in Side)
    )
    sample = FloatSample(namespace, 60, layout)
    wire.store(sample)
    sides = [
        np.frombuffer(rows, "<f4").reshape(60, 2, 16).transpose(1, 0, 2) for rows in sample.tensors
    ]
    return list(zip(sides[::2], sides[1::2], strict=True))


class FloatSample(Sample):
    """A sample whose rows are numbers one can compute with."""

    def rows(self, tensor: int) -> bytes:
        size = self.token_count * self.layout.tensors[tensor].row_bytes
        return self._noise("rows", tensor).standard_normal(size // 4, np.float32).tobytes()


def assert_session(wire: AttendWire, session: str, layer: int, rows: Pair) -> None:
    q = normal(session)
    got = out_of(wire.ask(query(session, q, layer=layer)), q)
    np.testing.assert_allclose(got, reference(*rows, Dense(q=q)).out, rtol=0, atol=1e-5)


@pytest.mark.parametrize("heads", [0, 2, 8])
def test_a_stored_prefix_becomes_resident_by_name(wire: AttendWire, heads: int) -> None:
    namespace = f"from/{heads}"
    layers = stored_floats(wire, namespace)
    answer = wire.store_entry(prefix_message(namespace, namespace, heads=heads, head_dim=16))
    assert (answer.layer_count, answer.skipped_count) == (3, 0)
    assert answer.resident_bytes == 3 * 2 * 60 * 32 * 4
    for layer, rows in enumerate(layers):
        assert_session(wire, namespace, layer, rows)


def test_layers_of_another_shape_are_counted_not_guessed(wire: AttendWire) -> None:
    tensors = (
        TensorLayout(slot, side, 2, dim, DType.F32)
        for slot, dim in ((0, 16), (1, 24))
        for side in Side
    )
    wire.store(FloatSample("mixed", 60, Layout(tuple(tensors))))
    answer = wire.store_entry(prefix_message("mixed", "mixed", heads=2, head_dim=16))
    assert (answer.layer_count, answer.skipped_count) == (1, 1)
    assert wire.states("mixed", 2) == [RESIDENT, MISSING]


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("head_dim", {"heads": 3, "head_dim": 16}),
        ("head_dim", {"head_dim": 5}),
        ("heads", {"heads": 3}),
        ("layers", {"layers": [9]}),
        ("layers", {"layers": [0, 9]}),
    ],
)
def test_what_fits_no_layer_of_a_prefix_is_refused_and_changes_nothing(
    wire: AttendWire, field: str, shape: dict[str, Any]
) -> None:
    stored_floats(wire, "shape")
    refusal = refused(lambda: wire.store_entry(prefix_message("shape", "shape", **shape)))
    assert (refusal.reason, refusal.fields) == ("INVALID", [field])
    assert wire.states("shape", 3) == [MISSING] * 3


def test_bytes_behind_the_name_of_a_prefix_are_not_swallowed(wire: AttendWire) -> None:
    stored_floats(wire, "followed")
    header = prefix_message("followed", "followed")
    _, *following = upload_messages("followed", pair("followed"))
    refusal = refused(lambda: wire.store_entry([*header, *following]))
    assert (refusal.reason, refusal.fields) == ("INVALID", ["bytes"])
    assert wire.states("followed", 3) == [MISSING] * 3


def test_generation_and_rows_that_a_caller_names_are_kept_to(wire: AttendWire) -> None:
    stored_floats(wire, "named")
    generation = wire.lookup("named").prefix.generation
    messages = prefix_message("named", "named", generation=generation + 1)
    refusal = refused(lambda: wire.store_entry(messages))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "GENERATION")
    assert wire.states("named", 3) == [MISSING] * 3
    for rows, layers in ((60, 3), (20, 3), (61, 0)):
        messages = prefix_message("named", "named", generation=generation, rows=rows)
        answer = wire.store_entry(messages)
        assert (answer.layer_count, answer.skipped_count) == (layers, 3 - layers)
        (entry,) = wire.attend.Lookup(pb.AttendLookupRequest(session="named", layers=[0])).entries
        assert entry.rows == (rows if layers else 20)


def test_a_prefix_that_is_not_stored_is_said_to_be_so(wire: AttendWire) -> None:
    refusal = refused(lambda: wire.store_entry(prefix_message("s", "nothing here")))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "NOT_STORED")
    assert refusal.metadata == {"namespace": "nothing here"}


def test_dropped_entries_are_gone(wire: AttendWire) -> None:
    for layer in range(3):
        wire.upload("drop", pair("drop"), layer)
    one = wire.attend.Drop(pb.AttendDropRequest(session="drop", layer=1))
    assert one.dropped_count == 1
    assert wire.states("drop", 3) == [RESIDENT, MISSING, RESIDENT]
    assert wire.attend.Drop(pb.AttendDropRequest(session="drop")).dropped_count == 2
    refusal = refused(lambda: wire.ask(query("drop", normal("drop"))))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "MISSING")
    assert refusal.metadata == {"session": "drop", "layer": "0"}


# What is refused


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("data", {"data": b""}),
        ("data", {"data": bytes(4)}),
        ("data", {"heads": 0}),
        ("data", {"heads": 3}),
        ("data", {"heads": 2**32 - 1}),
        ("data", {"head_dim": 0}),
        ("data", {"head_dim": 8}),
        ("data", {"dense": pb.AttendDense(queries=0)}),
        ("data", {"dense": pb.AttendDense(queries=2**32 - 1)}),
        ("kind", {"dense": None}),
        ("session", {"session": ""}),
        ("head_map", {"head_map": bytes(3)}),
        ("head_map", {"head_map": bytes([0, 2])}),
        ("scale", {"scale": -1.0}),
        ("suffix_k", {"fused": pb.AttendFused(queries=1, suffix_rows=1)}),
        ("suffix_v", {"fused": pb.AttendFused(queries=1, suffix_rows=1, suffix_k=bytes(128))}),
        ("indices", {"sparse": pb.AttendSparse(indices_per_head=2**31)}),
        ("counts", {"sparse": pb.AttendSparse(indices=bytes(8), indices_per_head=1)}),
        ("block_rows", {"sparse_auto": pb.AttendSparseAuto(blocks=1)}),
        ("blocks", {"sparse_auto": pb.AttendSparseAuto(block_rows=1)}),
        ("selector", {"sparse_auto": pb.AttendSparseAuto(block_rows=1, blocks=1, selector=9)}),
    ],
)
def test_a_query_that_does_not_fit_is_refused_alike_on_both_lanes(
    wire: AttendWire, field: str, change: dict[str, Any]
) -> None:
    wire.upload("refuse", pair("refuse"))
    before = wire.described()
    fields: dict[str, Any] = {"session": "refuse", "heads": 2, "head_dim": 16, "data": bytes(128)}
    if not {"fused", "sparse", "sparse_auto"} & set(change):
        fields["dense"] = pb.AttendDense(queries=1)
    request = pb.AttendQueryRequest(**fields | change)
    refusal = refused(lambda: wire.ask(request))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID")
    assert refusal.fields == [field]
    good = query("refuse", normal("refuse"))
    requests = [pb.AttendStreamRequest(id=n, query=request if n == 1 else good) for n in range(3)]
    first, failed, last = wire.ask_stream(requests)
    assert (failed.id, failed.error.reason) == (1, "INVALID")
    assert failed.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert failed.error.message == refusal.message
    assert first.answer == last.answer == wire.ask(good)
    now = wire.described()
    for field in ("attend_warm", "attend_cold", "resident_used_bytes"):
        assert getattr(now, field) == getattr(before, field), field


@pytest.mark.parametrize(
    "declared",
    [
        {"heads": 0},
        {"rows": 0},
        {"head_dim": 0},
        {"heads": 3},
        {"rows": 49},
        {"rows": 51},
        {"head_dim": 15},
    ],
)
def test_an_upload_that_contradicts_itself_leaves_what_was_resident(
    wire: AttendWire, declared: dict[str, int]
) -> None:
    rows = pair("contradiction")
    wire.upload("contradiction", rows)
    messages = list(upload_messages("contradiction", pair("other"), **declared))
    refusal = refused(lambda: wire.store_entry(messages))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID")
    assert_session(wire, "contradiction", 0, rows)


def test_damaged_bytes_do_not_become_resident(wire: AttendWire) -> None:
    header, chunk, *rest = upload_messages("damaged", pair("damaged"))
    flipped = bytearray(chunk)
    flipped[-1] ^= 1
    refusal = refused(lambda: wire.store_entry([header, bytes(flipped), *rest]))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CHECKSUM")
    assert wire.states("damaged") == [MISSING]


def test_messages_that_are_none_are_refused(wire: AttendWire) -> None:
    header, chunk, *rest = upload_messages("odd", pair("odd"))
    source = pb.AttendStoreRequest(header=pb.AttendStoreHeader(session="odd")).SerializeToString()
    for messages in (
        [],
        [chunk],
        [b"\xff"],
        [b""],
        [source],
        [header, header],
        [header, b""],
        [header, b"\xff"],
        [header, b"\x12" + b"\x80\x80\xc0\x00" + bytes(1 << 21)],
        [header, *rest, chunk],
    ):
        refusal = refused(lambda messages=messages: wire.store_entry(messages))  # type: ignore[misc]
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID")
    assert wire.states("odd") == [MISSING]


def test_a_stream_that_is_none_ends_with_the_reason(wire: AttendWire) -> None:
    call = wire.channel.stream_stream("/pion.v1.Attend/Stream")
    refusal = refused(lambda: list(call(iter([b"\xff"]), timeout=TIMEOUT_S)))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID")


def test_a_message_of_63_mib_is_answered_and_a_larger_one_refused(wire: AttendWire) -> None:
    rows = pair("large", heads=1, rows=4, dim=64)
    wire.upload("large", rows)
    queries = 63 * (1 << 20) // 256
    q = normal("large", 1, queries, 64)
    got = out_of(wire.ask(query("large", q)), q)
    some = np.linspace(0, queries - 1, 100, dtype=int)
    want = reference(*rows, Dense(q=q[:, some].copy())).out
    np.testing.assert_allclose(got[:, some], want, rtol=0, atol=1e-5)
    too_large = query("large", normal("large", 1, 66 * (1 << 20) // 256, 64))
    refusal = refused(lambda: wire.ask(too_large))
    assert refusal.code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # by the transport
    )


def test_a_list_of_layers_is_counted_before_it_is_taken_in(wire: AttendWire) -> None:
    """Sixty megabytes of numbers would be half a gigabyte of objects."""
    many = pb.AttendLookupRequest(session="s", layers=range(1_025))
    refusal = refused(lambda: wire.attend.Lookup(many))
    assert (refusal.reason, refusal.fields) == ("INVALID", ["layers"])
    stored_floats(wire, "many layers")
    messages = prefix_message("s", "many layers", layers=range(1_025))
    refusal = refused(lambda: wire.store_entry(messages))
    assert (refusal.reason, refusal.fields) == ("INVALID", ["layers"])


def test_limits_of_attend_are_told(wire: AttendWire) -> None:
    limits = {limit.name: limit.value for limit in wire.described().limits}
    assert limits["attend_entries_max"] == 256
    assert limits["attend_cold_max"] == limits["attend_layers_max"] == 1_024


# Budgets


@pytest.fixture
def small(start_server: Callable[..., ServerProcess]) -> Iterator[AttendWire]:
    """A server with room for four entries of 50 rows."""
    server = start_server("--resident-budget", str(4 * 2 * 2 * 50 * 16 * 4))
    with AttendWire(server.address) as wire:
        yield wire


def test_a_cold_entry_is_said_to_be_cold_and_warmed_where_asked(small: AttendWire) -> None:
    layers = stored_floats(small, "p", 3)
    small.store_entry(prefix_message("s", "p"))
    small.upload("other", pair("other"))
    assert small.states("s", 3) == [COLD, RESIDENT, RESIDENT]
    request = query("s", normal("cold"))
    refusal = refused(lambda: small.ask(request))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "COLD")
    assert refusal.metadata == {"session": "s", "layer": "0"}
    (answer,) = small.ask_stream([pb.AttendStreamRequest(id=1, query=request)])
    assert answer.error.reason == "COLD"
    request.warm = True
    q = normal("cold")
    got = out_of(small.ask(request), q)
    np.testing.assert_allclose(got, reference(*layers[0], Dense(q=q)).out, rtol=0, atol=1e-5)
    described = small.described()
    assert described.attend_backend == "numpy"
    assert (described.attend_warm, described.attend_cold) == (3, 1)
    assert (described.attend_demotions, described.attend_rehydrates) == (2, 1)
    assert 0 < described.resident_used_bytes <= described.resident_budget_bytes


def test_a_store_beyond_the_budget_leaves_what_was_resident(small: AttendWire) -> None:
    rows = pair("stays")
    small.upload("stays", rows)
    for messages in (
        upload_messages("s", pair("large", rows=300)),
        upload_messages("s", pair("tiny", rows=1), rows=2**40),
    ):
        refusal = refused(lambda messages=messages: small.store_entry(messages))  # type: ignore[misc]
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BUDGET")
        assert refusal.retry_ms > 0
    stored_floats(small, "deep", 5)
    refusal = refused(lambda: small.store_entry(prefix_message("s", "deep")))
    assert refusal.reason == "BUDGET"
    assert_session(small, "stays", 0, rows)
    assert small.described().attend_demotions == 0


def test_what_was_resident_does_not_survive_a_restart_as_something_else(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with AttendWire(server.address) as wire:
        stored_floats(wire, "p")
        wire.store_entry(prefix_message("s", "p"))
    assert server.stop() == 0
    with AttendWire(start_server().address) as wire:
        assert wire.states("s", 3) == [MISSING] * 3
        assert wire.lookup("p").hit


# Switches


def test_a_server_without_attend_says_so(start_server: Callable[..., ServerProcess]) -> None:
    with AttendWire(start_server("--attend", "off").address) as wire:
        for ask in (
            lambda: wire.ask(query("s", normal("s"))),
            lambda: wire.states("s"),
            lambda: wire.ask_stream([pb.AttendStreamRequest(id=1)]),
            lambda: wire.upload("s", pair("s")),
            lambda: wire.attend.Drop(pb.AttendDropRequest(session="s")),
        ):
            refusal = refused(ask)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NO_BACKEND")
        assert wire.described().attend_backend == ""
        status = health_pb2.HealthCheckResponse
        assert wire.healthy("pion.v1.Attend") == status.NOT_SERVING
        assert wire.healthy("pion.v1.PrefixStore") == status.SERVING


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_no_backend_answers_otherwise_than_the_reference(
    start_server: Callable[..., ServerProcess], backend: str, dtype: str
) -> None:
    server = start_server("--attend", backend, "--attend-dtype", dtype, "--fa-window", "20")
    with AttendWire(server.address) as wire:
        assert wire.described().attend_backend == backend
        assert wire.healthy("pion.v1.Attend") == health_pb2.HealthCheckResponse.SERVING
        rows = pair("b")
        answer = wire.upload("b", rows)
        assert answer.resident_bytes == 2 * rows[0].size * (4 if dtype == "f32" else 2)
        tolerance = 1e-5 if dtype == "f32" else 5e-3
        for queries in (1, 7):
            q = normal("b", 4, queries)
            want = reference(*rows, Dense(q=q, window=20)).out
            request = query("b", q)
            got = out_of(wire.ask(request), q)
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)
            (streamed,) = wire.ask_stream([pb.AttendStreamRequest(query=request)])
            assert streamed.answer.data == wire.ask(request).data
            request.window_rows = 0
            want = reference(*rows, Dense(q=q)).out
            got = out_of(wire.ask(request), q)
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "flags",
    [("--attend", "metal"), ("--attend-dtype", "bf16"), ("--fa-window", "-1")],
    ids=" ".join,
)
def test_a_switch_that_means_nothing_is_not_ignored(
    start_server: Callable[..., ServerProcess], flags: tuple[str, str]
) -> None:
    with pytest.raises(RuntimeError, match=flags[0]):
        start_server(*flags)


def test_mlx_is_not_loaded_unless_it_computes(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--attend", "numpy")
    maps = f"/proc/{server.process.pid}/maps"
    with contextlib.suppress(FileNotFoundError), open(maps) as file:
        assert "mlx" not in file.read()


def test_who_has_no_password_attends_to_nothing(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server(PION_PASSWORD="secret")
    with AttendWire(server.address, password="secret") as known:
        known.upload("s", pair("s"))
        known.ask(query("s", normal("s")))
    with AttendWire(server.address) as stranger:
        for ask in (
            lambda: stranger.ask(query("s", normal("s"))),
            lambda: stranger.ask_stream([pb.AttendStreamRequest(query=query("s", normal("s")))]),
            lambda: stranger.upload("s", pair("s")),
        ):
            assert refused(ask).code == grpc.StatusCode.UNAUTHENTICATED


# Streams


def test_many_queries_in_flight_are_answered_in_order(wire: AttendWire) -> None:
    for session in ("a", "b"):
        wire.upload(f"order/{session}", pair(f"order/{session}"))
    questions = [normal(f"order{n}") for n in range(300)]
    requests = [
        pb.AttendStreamRequest(id=n, query=query(f"order/{'ab'[n % 2]}", q))
        for n, q in enumerate(questions)
    ]
    answers = wire.ask_stream(requests)
    assert [answer.id for answer in answers] == list(range(300))
    for n in (0, 1, 150, 299):
        want = reference(*pair(f"order/{'ab'[n % 2]}"), Dense(q=questions[n])).out
        got = out_of(answers[n].answer, questions[n])
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_a_sender_that_reads_nothing_does_not_fill_the_server(
    start_server: Callable[..., ServerProcess],
) -> None:
    """In flight is what one stream's window holds, however much is sent."""
    server = start_server("--stall-ms", "3600000")
    taken = threading.Event()
    sent = 0

    def requests() -> Iterator[pb.AttendStreamRequest]:
        nonlocal sent
        request = query("s", normal("s", 16, 64, 256))
        for number in range(2_000):  # 2 GB
            sent = number
            yield pb.AttendStreamRequest(id=number, query=request)
        taken.set()

    with AttendWire(server.address) as wire:
        wire.upload("s", pair("s", 16, 10, 256))
        before = server.rss_bytes
        call = wire.attend.Stream(requests())
        seen = -1

        def stuck() -> bool:
            nonlocal seen
            seen, was = sent, seen
            return sent > 5 and sent == was and not taken.wait(0.3)

        eventually(stuck)
        assert server.rss_bytes - before < 200 << 20
        # Whoever begins to read gets everything, in order.
        for expected, answer in enumerate(call):
            assert answer.id == expected
            if expected == sent:
                break
        call.cancel()


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_cancelled_streams_leave_neither_memory_nor_places_behind(
    start_server: Callable[..., ServerProcess], count: int
) -> None:
    server = start_server("--streams-max", "4")
    with AttendWire(server.address) as wire:
        wire.upload("s", pair("s", 8, 512, 64))
        request = pb.AttendStreamRequest(id=1, query=query("s", normal("s", 8, 1, 64)))

        def one(number: int) -> None:
            go = threading.Event()

            def requests() -> Iterator[pb.AttendStreamRequest]:
                yield request
                yield request
                go.wait(30)

            call = wire.attend.Stream(requests())
            if number % 2:
                next(call)
            call.cancel()
            go.set()

        def eventually_answered() -> bool:
            try:
                return len(wire.ask_stream([request])) == 1
            except grpc.RpcError:  # all places taken for a moment
                return False

        def batch(count: int) -> None:
            for number in range(count):
                with contextlib.suppress(grpc.RpcError):  # all places taken for a moment
                    one(number)
            eventually(eventually_answered)

        batch(300)
        before = server.rss_bytes
        batch(count)
        assert server.rss_bytes - before < 8 << 20
        # All four places are free again.
        gates = [threading.Event() for _ in range(4)]

        def held(gate: threading.Event) -> Iterator[pb.AttendStreamRequest]:
            yield request
            gate.wait(30)

        def all_open() -> bool:
            calls = [wire.attend.Stream(held(gate)) for gate in gates]
            try:
                return all(next(call).id == 1 for call in calls)
            except grpc.RpcError:
                return False
            finally:
                for call in calls:
                    call.cancel()

        eventually(all_open)
        for gate in gates:
            gate.set()


HOLDING = """
    import sys, threading
    from tests.server.test_attend import AttendWire, normal, pb, query

    def requests():
        yield pb.AttendStreamRequest(id=1, query=query("s", normal("s")))
        threading.Event().wait()

    wire = AttendWire(sys.argv[1])
    call = wire.attend.Stream(requests())
    print(next(call).id, flush=True)
    threading.Event().wait()
"""


def test_a_client_that_dies_does_not_keep_its_place(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--streams-max", "1")
    command = [sys.executable, "-c", textwrap.dedent(HOLDING), server.address]
    request = pb.AttendStreamRequest(id=2, query=query("s", normal("s")))
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with AttendWire(server.address) as wire, contextlib.ExitStack() as stack:
        stack.callback(holder.wait)
        stack.callback(holder.kill)
        assert holder.stdout is not None
        with holder.stdout:
            assert holder.stdout.readline() == "1\n"
        refusal = refused(lambda: wire.ask_stream([request]))
        assert (refusal.reason, refusal.retry_ms > 0) == ("TOO_MANY_STREAMS", True)
        holder.kill()

        def answered() -> bool:
            try:
                return wire.ask_stream([request])[0].id == 2
            except grpc.RpcError:
                return False

        eventually(answered)


def test_streams_that_are_open_do_not_take_the_places_of_others(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--streams-max", "2")
    request = pb.AttendStreamRequest(id=1, query=query("s", normal("s")))
    gate = threading.Event()

    def held() -> Iterator[pb.AttendStreamRequest]:
        yield request
        gate.wait(30)

    with AttendWire(server.address) as wire:
        calls = [wire.attend.Stream(held()) for _ in range(2)]
        for call in calls:
            assert next(call).id == 1
        refusal = refused(lambda: wire.ask_stream([request]))
        assert refusal.reason == "TOO_MANY_STREAMS"
        stored_floats(wire, "p")
        assert wire.store_entry(prefix_message("s", "p")).layer_count == 3
        for call in calls:
            call.cancel()
        gate.set()


def test_uploads_that_break_off_do_not_keep_their_room(small: AttendWire) -> None:
    rows = pair("room", rows=200)  # all there is
    messages = list(upload_messages("room", rows, chunk_bytes=10_000))
    for _ in range(10):
        sent, gate = threading.Event(), threading.Event()

        def half(sent: threading.Event = sent, gate: threading.Event = gate) -> Iterator[bytes]:
            yield from messages[:6]
            sent.set()
            gate.wait(30)

        call = small.channel.stream_unary("/pion.v1.Attend/Store").future(half())
        assert sent.wait(30)
        small.states("room")  # behind it on the same connection
        call.cancel()
        gate.set()
    small.store_entry(messages)
    assert_session(small, "room", 0, rows)


def test_memory_of_entries_that_are_gone_is_not_kept(
    start_server: Callable[..., ServerProcess],
) -> None:
    """Entries of many sizes that push each other out do not leave holes in a heap."""
    server = start_server("--resident-budget", "96MB")
    with AttendWire(server.address) as wire:
        ones = np.ones((1, 16_384, 128), np.float32)
        wire.upload("warm up", (ones, ones))
        wire.attend.Drop(pb.AttendDropRequest(session="warm up"))
        before = server.rss_bytes
        for number in range(40):
            rows = ones[:, : 1_000 + 7_919 * number % 15_000]
            wire.upload("s", (rows, rows), number)
        slack = 24 << 20  # messages on their way
        assert server.rss_bytes - before < wire.described().resident_used_bytes + slack
        wire.attend.Drop(pb.AttendDropRequest(session="s"))
        assert server.rss_bytes - before < slack


def test_an_upload_that_says_nothing_takes_nobodys_room(small: AttendWire) -> None:
    messages = list(upload_messages("greedy", pair("greedy", rows=200), chunk_bytes=1_000))
    gate = threading.Event()

    def first_two() -> Iterator[bytes]:
        yield from messages[:2]
        gate.wait(30)

    call = small.channel.stream_unary("/pion.v1.Attend/Store").future(first_two())
    stored_floats(small, "p")
    assert small.store_entry(prefix_message("s", "p")).layer_count == 3
    small.upload("u", pair("u", rows=190))
    call.cancel()
    gate.set()


def test_an_open_stream_does_not_hold_a_shutdown_up(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--grace-ms", "600000")
    gate = threading.Event()

    def requests() -> Iterator[pb.AttendStreamRequest]:
        yield pb.AttendStreamRequest(id=1, query=query("s", normal("s")))
        gate.wait(60)

    with AttendWire(server.address) as wire:
        call = wire.attend.Stream(requests())
        assert next(call).error.reason == "MISSING"
        assert server.stop() == 0
        with pytest.raises(grpc.RpcError):
            next(call)
        gate.set()


def test_queries_are_answered_while_another_client_stores(wire: AttendWire) -> None:
    rows = pair("busy", 8, 2_048, 64)
    wire.upload("busy", rows)
    large = pair("bulk", 8, 16_384, 64)  # 64 MiB at a time
    q = normal("busy", 8, 1, 64)
    want = reference(*rows, Dense(q=q)).out
    stop = threading.Event()
    stored = 0

    def storing() -> None:
        nonlocal stored
        with AttendWire(wire_address) as other:
            while not stop.is_set():
                other.upload("bulk", large)
                stored += 1

    wire_address = wire.address
    thread = threading.Thread(target=storing)
    thread.start()
    try:
        answered = 0
        while stored < 4 or answered < 50:
            got = out_of(wire.ask(query("busy", q)), q)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
            answered += 1
    finally:
        stop.set()
        thread.join()


def test_eight_clients_over_one_prefix_do_not_take_eight_times_its_memory(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    rows = pair("shared", 8, 32_768, 64)  # 128 MiB
    q = normal("shared", 8, 1, 64)

    def ask(wire: AttendWire) -> None:
        wire.ask_stream(pb.AttendStreamRequest(id=n, query=query("shared", q)) for n in range(20))

    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(AttendWire(server.address)) for _ in range(8)]
        wires[0].upload("shared", rows)
        ask(wires[0])
        one = server.rss_bytes
        threads = [threading.Thread(target=ask, args=(wire,)) for wire in wires]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.rss_bytes < 1.1 * one
        assert wires[0].described().resident_used_bytes == 2 * rows[0].nbytes
