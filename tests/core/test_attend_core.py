"""Residency: what is held, what is pushed out, and that an answer is always of the right rows."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from crc32c import crc32c

from pion_grpc.backends import (
    Answer,
    Backend,
    Dense,
    Fused,
    Query,
    Resident,
    Unwanted,
    always,
    create,
)
from pion_grpc.backends.reference import attend as reference
from pion_grpc.core.attend import Attend
from pion_grpc.core.attend_query import Ask, BlockChoice, IndexBytes, SuffixBytes
from pion_grpc.core.attend_values import EntryState, Key, Shape, Source, Warmed
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.reading import Reading
from pion_grpc.core.storing import PrefixUpload
from pion_grpc.core.values import FetchQuery, StoreHeader, WriteRowsHeader
from pion_grpc.errors import (
    ChecksumMismatch,
    Cold,
    Corrupt,
    GenerationDiffers,
    InvalidRequest,
    Missing,
    NotStored,
    OverBudget,
    Stalled,
)
from pion_grpc.storage.directory import DataDirectory
from pion_wire.framing import PartChunk, RowChunk
from pion_wire.layout import DType, Layout, Side, TensorLayout
from pion_wire.rows import decode_rows, encode_rows

Array = npt.NDArray[Any]
Rows = list[tuple[Array, Array]]
"""K and V of each layer, f32 [heads][rows][dim]."""

HEADS, DIM = 2, 16
MODEL = "mlx1:00000000000000000000000000000000"
RESIDENT, COLD, MISSING = EntryState.RESIDENT, EntryState.COLD, EntryState.MISSING


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefixStore]:
    directory = DataDirectory(tmp_path_factory.mktemp("attend"))
    store = PrefixStore(directory, budget_bytes=1 << 30)
    yield store
    store.close()


@pytest.fixture
def store(shelf: PrefixStore) -> Iterator[PrefixStore]:
    """An empty store."""
    yield shelf
    shelf.drop("", [info.namespace for info in shelf.list_page("")])


@pytest.fixture
def make(store: PrefixStore) -> Iterator[Callable[..., Attend]]:
    made: list[Attend] = []

    def attend(budget_bytes: int = 1 << 24, backend: Backend | None = None, **more: Any) -> Attend:
        more = {"room_wait_s": 0} | more
        made.append(Attend(backend or create("numpy"), store, budget_bytes, **more))
        return made[-1]

    yield attend
    for one in made:
        one.close()


@pytest.fixture
def attend(make: Callable[..., Attend]) -> Attend:
    return make()


def rng(*seed: object) -> np.random.Generator:
    return np.random.default_rng(list("|".join(map(str, seed)).encode()))


def random_rows(
    name: str, layers: int = 2, rows: int = 100, heads: int = HEADS, dim: int = DIM
) -> Rows:
    noise = rng(name)
    shape = (heads, rows, dim)
    return [
        (noise.standard_normal(shape, np.float32), noise.standard_normal(shape, np.float32))
        for _ in range(layers)
    ]


def put(
    store: PrefixStore,
    namespace: str,
    rows: Rows,
    *,
    dtype: DType = DType.F32,
    codec: str = "raw",
    replace: bool = False,
) -> Rows:
    """Stores rows as a prefix; returns them as they come back."""
    tensors = tuple(
        TensorLayout(layer, side, k.shape[0], k.shape[2], dtype, codec)
        for layer, (k, _) in enumerate(rows)
        for side in Side
    )
    tokens = np.arange(rows[0][0].shape[1], dtype="<u4").tobytes()
    header = StoreHeader(namespace, MODEL, tokens, Layout(tensors), replace=replace)
    begun = store.store("", header)
    assert isinstance(begun, PrefixUpload)
    back = []
    for index, tensor in enumerate(tensors):
        side = rows[index // 2][index % 2]
        flat = np.ascontiguousarray(side.transpose(1, 0, 2)).astype(dtype.numpy)
        arrays = encode_rows(tensor, flat.reshape(-1).view(np.uint8).data, dtype)
        for array_index, data in enumerate(arrays):
            size = len(data) // side.shape[1]
            step = max(1, (1 << 20) // size)
            for first in range(0, side.shape[1], step):
                piece = data[first * size : (first + step) * size]
                count = len(piece) // size
                begun.write(RowChunk(index, array_index, first, count, crc32c(piece), piece))
        values = flat.astype(np.float32)
        if codec != "raw":
            values = np.frombuffer(decode_rows(tensor, arrays), "<f4").reshape(flat.shape)
        back.append(values.transpose(1, 0, 2))
    begun.publish()
    return list(zip(back[::2], back[1::2], strict=True))


def shape_of(k: Array) -> Shape:
    return Shape(*k.shape)


def view(a: Array) -> memoryview:
    return memoryview(np.ascontiguousarray(a, np.float32).tobytes())


def upload(attend: Attend, session: str, rows: Rows, layer: int = 0, tenant: str = "") -> Warmed:
    k, v = rows[layer]
    return attend.store_rows(Key(tenant, session, layer), shape_of(k), view(k), view(v))


def question(heads: int = HEADS, queries: int = 1, dim: int = DIM, **more: Any) -> Ask:
    q = rng("q", heads, queries).standard_normal((heads, queries, dim), np.float32)
    return Ask(heads, dim, q.tobytes(), **more)


def assert_answers(attend: Attend, session: str, rows: Rows, layer: int = 0) -> None:
    """The answer is the one over these rows, and over no others."""
    ask = question(dim=rows[layer][0].shape[2], log_sum_exp=True)
    got = attend.ask(Key("", session, layer), ask)
    assert_right(got, ask, rows[layer], attend.window)


def assert_right(
    got: Answer, ask: Ask, pair: tuple[Array, Array], window: int = 0, tolerance: float = 1e-5
) -> None:
    k, v = pair
    resident = Resident(heads=k.shape[0], tokens=k.shape[1], dim=k.shape[2], nbytes=0)
    want = reference(k, v, ask.query(resident, window))
    np.testing.assert_allclose(got.out, want.out, rtol=0, atol=tolerance)
    assert (got.lse is None) == (want.lse is None)
    if got.lse is not None and want.lse is not None:
        np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6, atol=tolerance)


def states(attend: Attend, session: str, layers: int = 2, tenant: str = "") -> list[EntryState]:
    return [info.state for info in attend.lookup(tenant, session, list(range(layers)))]


def refused(field: str, ask: Callable[[], object]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        ask()
    assert caught.value.field == field
    return caught.value


# What is answered


def test_uploaded_rows_are_not_answered_with_others(attend: Attend) -> None:
    rows, others = random_rows("mine"), random_rows("theirs")
    upload(attend, "mine", rows, 0)
    upload(attend, "mine", rows, 1)
    upload(attend, "theirs", others, 0)
    assert_answers(attend, "mine", rows, 0)
    assert_answers(attend, "mine", rows, 1)
    assert_answers(attend, "theirs", others, 0)


@pytest.mark.parametrize("heads", [1, 5, 64, 100])
def test_rows_do_not_go_with_the_bytes_they_came_in(attend: Attend, heads: int) -> None:
    rows = random_rows("gone", heads=heads)
    k, v = (memoryview(view(side).tobytes() + b"..")[:-2] for side in rows[0])
    attend.store_rows(Key("", "s", 0), shape_of(rows[0][0]), k, v)
    del k, v
    ask = question(heads)
    assert_right(attend.ask(Key("", "s", 0), ask), ask, rows[0])


def test_a_second_store_of_an_entry_replaces_it(attend: Attend) -> None:
    upload(attend, "s", random_rows("old"))
    new = random_rows("new", rows=7)
    upload(attend, "s", new)
    assert_answers(attend, "s", new)
    assert attend.telemetry().resident_bytes == 2 * new[0][0].nbytes
    assert attend.lookup("", "s", [0])[0].shape == Shape(HEADS, 7, DIM)


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "dense": lambda heads: {"queries": 1},
    "batched": lambda heads: {"queries": 5},
    "fused": lambda heads: {"queries": 3, "suffix": _suffix(4)},
    "empty suffix": lambda heads: {"queries": 1, "suffix": SuffixBytes(0, b"", b"")},
    "sparse": lambda heads: {
        "indices": IndexBytes(
            6,
            rng("i").integers(-1, 101, (heads, 6), np.int32).tobytes(),
            np.full(heads, 5, np.uint32).tobytes(),
        )
    },
    "mean": lambda heads: {"choice": BlockChoice(16, 2, "mean")},
    "quest": lambda heads: {"choice": BlockChoice(16, 2, "quest")},
    "auto fused": lambda heads: {"choice": BlockChoice(16, 2, "quest"), "suffix": _suffix(4)},
}


def _suffix(rows: int) -> SuffixBytes:
    k, v = random_rows("suffix", 1, rows)[0]
    return SuffixBytes(rows, view(k), view(v))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [HEADS, 3 * HEADS])
@pytest.mark.parametrize("more", [{}, {"window": 30}, {"scale": 0.5}, {"head_map": True}], ids=str)
def test_no_kind_of_query_is_answered_wrongly(
    attend: Attend, kind: str, heads: int, more: dict[str, Any]
) -> None:
    rows = random_rows("kinds")
    upload(attend, "kinds", rows)
    if "head_map" in more:
        more = {"head_map": bytes(reversed([h % HEADS for h in range(heads)]))}
    given = KINDS[kind](heads)
    queries = given.pop("queries", 1)
    for log_sum_exp in (False, True):
        ask = question(heads, queries, **given, **more, log_sum_exp=log_sum_exp)
        got = attend.ask(Key("", "kinds", 0), ask)
        assert_right(got, ask, rows[0])
        assert got.out.shape == (heads, queries, DIM)


@pytest.mark.parametrize("name", ["numpy", "mlx"])
@pytest.mark.parametrize("suffix", [0, 4])
@pytest.mark.parametrize("window", [0, 4_001])
@pytest.mark.parametrize(("block_rows", "blocks"), [(16, 3), (5, 700)])
def test_many_short_spans_are_not_answered_otherwise_than_few(
    make: Callable[..., Attend], name: Any, suffix: int, window: int, block_rows: int, blocks: int
) -> None:
    attend = make(backend=create(name))
    rows = random_rows("spans", 1, 10_000)
    upload(attend, "s", rows)
    choice = BlockChoice(block_rows, blocks, "quest")
    more = {"suffix": _suffix(suffix)} if suffix else {}
    ask = question(4, choice=choice, window=window, log_sum_exp=True, **more)
    assert_right(attend.ask(Key("", "s", 0), ask), ask, rows[0])


def test_dense_answers_do_not_differ_by_whether_the_log_sum_exp_was_asked_for(
    attend: Attend,
) -> None:
    upload(attend, "s", random_rows("s"))
    ask = question(queries=4)
    without = attend.ask(Key("", "s", 0), ask)
    given = attend.ask(Key("", "s", 0), dataclasses.replace(ask, log_sum_exp=True))
    assert without.lse is not None
    np.testing.assert_array_equal(without.out, given.out)


def test_a_query_without_a_window_does_not_escape_the_servers(make: Callable[..., Attend]) -> None:
    attend = make(window=10)
    rows = random_rows("w")
    upload(attend, "w", rows)
    assert_answers(attend, "w", rows)
    whole = question(window=0)
    assert_right(attend.ask(Key("", "w", 0), whole), whole, rows[0])


def test_computing_over_rows_that_come_along_leaves_nothing_resident(attend: Attend) -> None:
    k, v = random_rows("c")[0]
    ask = question(queries=3)
    assert_right(attend.compute(shape_of(k), view(k), view(v), ask), ask, (k, v))
    assert attend.telemetry() == (0, 0, 0, 0, 0)
    refused("k", lambda: attend.compute(shape_of(k), view(k)[4:], view(v), ask))
    refused("k", lambda: attend.compute(Shape(0, 0, 0), view(k)[:0], view(v)[:0], ask))


# What is refused


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("data", {"q": b""}),
        ("data", {"q": bytes(4 * HEADS * DIM - 4)}),
        ("data", {"heads": 0}),
        ("data", {"head_dim": 0}),
        ("data", {"head_dim": DIM // 2, "q": bytes(4 * HEADS * DIM // 2)}),
        ("data", {"heads": 3, "q": bytes(4 * 3 * DIM)}),
        ("data", {"queries": 0, "q": b""}),
        ("data", {"queries": 2}),
        ("kv_heads", {"kv_heads": HEADS + 1}),
        ("head_map", {"head_map": bytes(1)}),
        ("head_map", {"head_map": bytes([0, HEADS])}),
        ("scale", {"scale": float("nan")}),
        ("scale", {"scale": 0.0}),
        ("window_rows", {"window": -1}),
        ("suffix_k", {"suffix": SuffixBytes(1, b"", b"")}),
        ("suffix_v", {"suffix": SuffixBytes(1, bytes(4 * HEADS * DIM), bytes(4))}),
        ("indices", {"indices": IndexBytes(3, bytes(4), bytes(4 * HEADS))}),
        ("counts", {"indices": IndexBytes(1, bytes(4 * HEADS), bytes(4))}),
        ("counts", {"indices": IndexBytes(1, bytes(4 * HEADS), b"\2\0\0\0" * HEADS)}),
        ("block_rows", {"choice": BlockChoice(0, 1, "mean")}),
        ("blocks", {"choice": BlockChoice(1, 0, "mean")}),
        (
            "indices",
            {"indices": IndexBytes(0, b"", bytes(8)), "choice": BlockChoice(1, 1, "mean")},
        ),
        ("data", {"choice": BlockChoice(1, 1, "mean"), "q": bytes(8 * HEADS * DIM)}),
    ],
)
def test_a_query_that_does_not_fit_is_refused_and_changes_nothing(
    attend: Attend, field: str, change: dict[str, Any]
) -> None:
    rows = random_rows("s")
    upload(attend, "s", rows)
    before = attend.telemetry()
    refused(field, lambda: attend.ask(Key("", "s", 0), dataclasses.replace(question(), **change)))
    assert attend.telemetry() == before
    assert_answers(attend, "s", rows)


@pytest.mark.parametrize(
    ("shape", "k", "v"),
    [
        (Shape(2, 3, 4), 96, 92),
        (Shape(2, 3, 4), 92, 96),
        (Shape(2, 3, 4), 0, 0),
        (Shape(0, 3, 4), 0, 0),
        (Shape(2, 0, 4), 0, 0),
        (Shape(2, 3, 0), 0, 0),
        (Shape(2**32 - 1, 2**63, 2**32 - 1), 96, 96),
    ],
)
def test_rows_that_contradict_their_shape_leave_what_was_resident(
    attend: Attend, shape: Shape, k: int, v: int
) -> None:
    rows = random_rows("s")
    upload(attend, "s", rows)
    with pytest.raises(InvalidRequest):
        attend.store_rows(Key("", "s", 0), shape, memoryview(bytes(k)), memoryview(bytes(v)))
    assert_answers(attend, "s", rows)


def test_no_shape_is_believed_before_it_is_held_against_the_budget(attend: Attend) -> None:
    for shape in (Shape(2**31, 2**62, 2**31), Shape(1, 1 << 21, 2)):
        with pytest.raises(OverBudget):
            attend.begin_rows(Key("", "s", 0), shape)
    refused("rows", lambda: attend.begin_rows(Key("", "s", 0), Shape(1, 0, 1)))


@pytest.mark.parametrize("layer", [-1, 1 << 32])
def test_a_layer_beyond_any_is_refused_everywhere(attend: Attend, layer: int) -> None:
    key = Key("", "s", layer)
    rows = random_rows("s")[0]
    refused("layer", lambda: attend.ask(key, question()))
    refused("layer", lambda: attend.store_rows(key, shape_of(rows[0]), *map(view, rows)))
    refused("layer", lambda: attend.begin_rows(key, Shape(1, 1, 1)))
    refused("layer", lambda: attend.lookup("", "s", [0, layer]))
    refused("layer", lambda: attend.drop("", "s", layer))


@pytest.mark.parametrize("session", ["", "x" * 201, "a\nb"])
def test_a_session_that_is_no_name_is_refused_everywhere(attend: Attend, session: str) -> None:
    refused("session", lambda: attend.ask(Key("", session, 0), question()))
    refused("session", lambda: attend.begin_rows(Key("", session, 0), Shape(1, 1, 1)))
    refused("session", lambda: attend.store_prefix("", session, Source("x")))
    refused("session", lambda: attend.lookup("", session, [0]))
    refused("session", lambda: attend.drop("", session))


def test_more_layers_than_a_lookup_may_have_are_refused(attend: Attend) -> None:
    refused("layers", lambda: attend.lookup("", "s", [0] * 1_025))
    refused(
        "layers",
        lambda: attend.store_prefix("", "s", Source("x", layers=frozenset(range(1_025)))),
    )


def test_values_that_half_precision_cannot_hold_are_refused(make: Callable[..., Attend]) -> None:
    attend = make(backend=create("numpy", "f16"))
    rows = random_rows("s")
    upload(attend, "s", rows)
    large = [(rows[0][0] * 1e6, rows[0][1])]
    refused("k", lambda: upload(attend, "s", large))
    ask = question()
    assert_right(attend.ask(Key("", "s", 0), ask), ask, rows[0], tolerance=5e-3)
    assert attend.telemetry().resident_bytes == rows[0][0].nbytes


# Uploads in chunks


def chunks(rows: tuple[Array, Array], size: int = 1 << 20) -> list[PartChunk]:
    found = []
    for part, side in enumerate(rows):
        data = view(side)
        for offset in range(0, len(data), size):
            piece = data[offset : offset + size]
            found.append(PartChunk(part, offset, crc32c(piece), piece))
    return found


@pytest.mark.parametrize("size", [1, 777, 1 << 20])
def test_chunks_of_any_size_do_not_become_other_rows(attend: Attend, size: int) -> None:
    rows = random_rows("chunks", rows=5)
    begun = attend.begin_rows(Key("", "s", 0), shape_of(rows[0][0]))
    for chunk in chunks(rows[0], size):
        begun.write(chunk)
    assert states(attend, "s") == [MISSING, MISSING]
    assert begun.publish() == (1, 0, 2 * rows[0][0].nbytes)
    assert_answers(attend, "s", rows)


def test_a_chunk_that_is_not_the_next_is_refused(attend: Attend) -> None:
    rows = random_rows("chunks", rows=5)[0]
    good = chunks(rows, 320)
    for wrong, field in (
        (good[1], "bytes"),
        (good[0]._replace(part_index=1), "bytes"),
        (good[0]._replace(data=bytes(1 << 20), crc32c=0), "bytes.data"),
        (good[0]._replace(data=b""), "bytes.data"),
    ):
        begun = attend.begin_rows(Key("", "s", 0), shape_of(rows[0]))
        refused(field, functools.partial(begun.write, wrong))
        begun.abandon()
    begun = attend.begin_rows(Key("", "s", 0), shape_of(rows[0]))
    with pytest.raises(ChecksumMismatch):
        begun.write(good[0]._replace(crc32c=good[0].crc32c ^ 1))
    begun.abandon()


def test_an_upload_without_its_end_becomes_nothing(attend: Attend) -> None:
    rows = random_rows("chunks", rows=5)[0]
    for count in range(4):
        begun = attend.begin_rows(Key("", "s", 0), shape_of(rows[0]))
        for chunk in chunks(rows, 320)[:count]:
            begun.write(chunk)
        refused("bytes", begun.publish)
        begun.abandon()
    assert states(attend, "s") == [MISSING, MISSING]


def test_abandoned_uploads_do_not_keep_their_room(make: Callable[..., Attend]) -> None:
    rows = random_rows("room")[0]
    attend = make(2 * rows[0].nbytes)
    for _ in range(5):
        begun = attend.begin_rows(Key("", "s", 0), shape_of(rows[0]))
        begun.write(chunks(rows)[0])
        begun.abandon()
    begun = attend.begin_rows(Key("", "s", 0), shape_of(rows[0]))
    for chunk in chunks(rows):
        begun.write(chunk)
    with pytest.raises(OverBudget, match="being loaded"):
        upload(attend, "t", [rows])
    begun.publish()
    upload(attend, "t", [rows])
    assert_answers(attend, "t", [rows])


def test_rows_that_were_declared_and_do_not_come_take_no_room(
    store: PrefixStore, make: Callable[..., Attend]
) -> None:
    rows = put(store, "p", random_rows("p", 1))
    attend = make(3 * rows[0][0].nbytes)
    begun = attend.begin_rows(Key("", "greedy", 0), shape_of(rows[0][0]))
    begun.write(chunks(rows[0], 400)[0])
    assert attend.store_prefix("", "s", Source("p")).layers == 1
    upload(attend, "t", rows)
    begun.abandon()


def test_an_upload_does_not_keep_its_room_without_bringing_more(
    make: Callable[..., Attend],
) -> None:
    now = 0.0
    attend = make(clock=lambda: now)
    rows = random_rows("slow", rows=20_000)[0]
    begun = attend.begin_rows(Key("", "s", 0), shape_of(rows[0]))
    large, following = chunks(rows)[:2]
    begun.write(large)  # which earns no more time than there is anyway

    def drip() -> None:
        nonlocal now
        for index in range(20):
            now += 1
            piece = following.data[index : index + 1]
            begun.write(PartChunk(0, len(large.data) + index, crc32c(piece), piece))

    with pytest.raises(Stalled):
        drip()
    assert 9 < now < 13
    begun.abandon()


def test_an_upload_over_a_slow_line_is_not_cut_off(make: Callable[..., Attend]) -> None:
    now = 0.0
    attend = make(clock=lambda: now)
    rows = random_rows("slow", rows=20_000)
    begun = attend.begin_rows(Key("", "s", 0), shape_of(rows[0][0]))
    for chunk in chunks(rows[0], 1 << 20):
        now += 3.9
        begun.write(chunk)
    begun.publish()
    assert_answers(attend, "s", rows)


@pytest.mark.parametrize("how", ["uploaded", "stored"])
def test_half_precision_takes_no_more_room_while_it_comes(
    store: PrefixStore, make: Callable[..., Attend], how: str
) -> None:
    rows = put(store, "p", random_rows("p", 1))
    attend = make(rows[0][0].nbytes, create("numpy", "f16"))
    if how == "uploaded":
        begun = attend.begin_rows(Key("", "s", 0), shape_of(rows[0][0]))
        for chunk in chunks(rows[0], 777):
            begun.write(chunk)
        begun.publish()
    else:
        attend.store_prefix("", "s", Source("p"))
    ask = question()
    assert_right(attend.ask(Key("", "s", 0), ask), ask, rows[0], tolerance=5e-3)
    large = attend.begin_rows(Key("", "s", 0), Shape(1, 1, 2))
    piece = np.array([1, 1e6], np.float32).tobytes()
    refused("k", lambda: large.write(PartChunk(0, 0, crc32c(piece), piece)))
    large.abandon()


# From stored prefixes


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("residency", ["f32", "f16"])
def test_a_stored_prefix_becomes_resident_without_a_changed_value(
    store: PrefixStore, make: Callable[..., Attend], dtype: DType, residency: Any
) -> None:
    attend = make(backend=create("numpy", residency))
    # More than one chunk per tensor.
    rows = put(store, "p", random_rows("p", 3, 20_000), dtype=dtype)
    warmed = attend.store_prefix("", "s", Source("p"))
    width = 2 if residency == "f16" else 4
    assert warmed == (3, 0, 3 * 2 * 20_000 * HEADS * DIM * width)
    tolerance = 1e-5 if residency == "f32" or dtype is DType.F16 else 5e-3
    for layer in range(3):
        ask = question(log_sum_exp=True)
        assert_right(attend.ask(Key("", "s", layer), ask), ask, rows[layer], tolerance=tolerance)


@pytest.mark.parametrize("codec", ["int8", "fp16", "mlx4g32", "turbo4", "fp8"])
def test_a_lossy_prefix_becomes_resident_as_it_would_be_fetched(
    store: PrefixStore, attend: Attend, codec: str
) -> None:
    rows = put(store, "p", random_rows("p", 1, 3_000, dim=32), codec=codec)
    assert attend.store_prefix("", "s", Source("p")).layers == 1
    assert_answers(attend, "s", rows)


def test_a_child_becomes_resident_with_its_parents_rows(store: PrefixStore, attend: Attend) -> None:
    whole = random_rows("whole", 1, 120)
    put(store, "parent", [(k[:, :80], v[:, :80]) for k, v in whole])
    tokens = np.arange(120, dtype="<u4").tobytes()
    layout = Layout(tuple(TensorLayout(0, side, HEADS, DIM, DType.F32) for side in Side))
    begun = store.store("", StoreHeader("child", MODEL, tokens, layout, parent="parent", base=80))
    assert isinstance(begun, PrefixUpload)
    for index, side in enumerate(whole[0]):
        data = np.ascontiguousarray(side[:, 80:].transpose(1, 0, 2)).tobytes()
        begun.write(RowChunk(index, 0, 80, 40, crc32c(data), data))
    begun.publish()
    attend.store_prefix("", "s", Source("child"))
    assert_answers(attend, "s", whole)


def test_rows_that_only_one_side_has_are_left_out(store: PrefixStore, attend: Attend) -> None:
    """A live prefix whose V is behind its K is resident as far as both go."""
    rows = random_rows("live", 1, 60)
    layout = Layout(tuple(TensorLayout(0, side, HEADS, DIM, DType.F32) for side in Side))
    store.register("", "live", layout)
    with pytest.raises(NotStored):
        attend.store_prefix("", "s", Source("live"))
    for side, array, count in zip(Side, rows[0], (60, 45), strict=True):
        begun = store.write_rows("", WriteRowsHeader("live", 0, side, 0, count))
        data = np.ascontiguousarray(array[:, :count].transpose(1, 0, 2)).tobytes()
        begun.write(RowChunk(0, 0, 0, count, crc32c(data), data))
        begun.publish()
    assert attend.store_prefix("", "s", Source("live")).layers == 1
    assert attend.lookup("", "s", [0])[0].shape.rows == 45
    assert_answers(attend, "s", [(rows[0][0][:, :45], rows[0][1][:, :45])])


@pytest.mark.parametrize(
    ("heads", "head_dim", "fits"),
    [
        (0, 0, True),
        (2, 16, True),
        (8, 16, True),  # query heads of a grouped model
        (8, 0, True),
        (0, 16, True),
        (3, 16, False),
        (1, 16, False),
        (2, 24, False),
        (2, 5, False),
    ],
)
def test_no_shape_that_the_rows_do_not_have_becomes_resident(
    store: PrefixStore, attend: Attend, heads: int, head_dim: int, fits: bool
) -> None:
    rows = put(store, "p", random_rows("p"))
    warmed = attend.store_prefix("", "s", Source("p", heads, head_dim))
    assert (warmed.layers, warmed.skipped) == ((2, 0) if fits else (0, 2))
    if fits:
        assert_answers(attend, "s", rows, 1)


@pytest.mark.parametrize(
    ("field", "source"),
    [
        ("heads", Source("p", heads=-2)),
        ("head_dim", Source("p", head_dim=-16)),
        ("rows", Source("p", rows=-1)),
        ("layer", Source("p", layers=frozenset({-1, 0}))),
    ],
)
def test_numbers_below_zero_are_not_taken_for_shapes(
    store: PrefixStore, attend: Attend, field: str, source: Source
) -> None:
    put(store, "p", random_rows("p"))
    refused(field, lambda: attend.store_prefix("", "s", source))
    with pytest.raises(InvalidRequest):
        attend.begin_rows(Key("", "s", 0), Shape(-1, -1, 16))


def test_only_the_layers_asked_for_become_resident(store: PrefixStore, attend: Attend) -> None:
    rows = put(store, "p", random_rows("p", 4))
    assert attend.store_prefix("", "s", Source("p", layers=frozenset({1, 3}))).layers == 2
    assert states(attend, "s", 4) == [MISSING, RESIDENT, MISSING, RESIDENT]
    assert_answers(attend, "s", rows, 3)


def test_a_layer_that_the_prefix_does_not_have_is_not_passed_over(
    store: PrefixStore, attend: Attend
) -> None:
    put(store, "p", random_rows("p"))
    for layers in ({9}, {0, 9}):
        source = Source("p", layers=frozenset(layers))
        error = refused("layers", lambda source=source: attend.store_prefix("", "s", source))  # type: ignore[misc]
        assert "[9]" in str(error)
    assert states(attend, "s") == [MISSING, MISSING]


def test_rows_of_another_generation_do_not_become_resident(
    store: PrefixStore, attend: Attend
) -> None:
    rows = put(store, "p", random_rows("p"))
    (was,) = store.list_page("")
    attend.store_prefix("", "s", Source("p", generation=was.generation))
    put(store, "p", random_rows("changed"), replace=True)
    with pytest.raises(GenerationDiffers):
        attend.store_prefix("", "s", Source("p", generation=was.generation))
    assert_answers(attend, "s", rows)


def test_no_more_rows_become_resident_than_were_asked_for(
    store: PrefixStore, attend: Attend
) -> None:
    rows = put(store, "p", random_rows("p"))
    assert attend.store_prefix("", "s", Source("p", rows=40)).layers == 2
    assert_answers(attend, "s", [(k[:, :40], v[:, :40]) for k, v in rows])
    assert attend.store_prefix("", "s", Source("p", rows=100)).layers == 2
    assert_answers(attend, "s", rows)
    assert attend.store_prefix("", "s", Source("p", rows=101))[:2] == (0, 2)
    assert_answers(attend, "s", rows)


def test_what_is_not_stored_cannot_be_made_resident(store: PrefixStore, attend: Attend) -> None:
    with pytest.raises(NotStored):
        attend.store_prefix("", "s", Source("nothing"))
    put(store, "mine", random_rows("mine"))
    with pytest.raises(NotStored):
        attend.store_prefix("another tenant", "s", Source("mine"))


def test_a_damaged_prefix_leaves_none_of_its_layers_resident(
    store: PrefixStore, attend: Attend
) -> None:
    put(store, "p", random_rows("p", 2, 20_000))
    (segment,) = (store.directory.path / "segments").iterdir()
    with segment.open("r+b") as file:
        file.seek(-300_000, 2)
        byte = file.read(1)
        file.seek(-300_000, 2)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(Corrupt):
        attend.store_prefix("", "s", Source("p"))
    assert states(attend, "s") == [MISSING, MISSING]
    assert attend.telemetry().resident_bytes == 0
    upload(attend, "s", random_rows("room is free again"))
    with pytest.raises(NotStored):
        attend.store_prefix("", "s", Source("p"))


# Budgets


def test_resident_bytes_never_exceed_the_budget(make: Callable[..., Attend]) -> None:
    one = 2 * random_rows("size")[0][0].nbytes
    attend = make(3 * one + 100)
    for number in range(10):
        upload(attend, f"s{number}", random_rows(f"s{number}"))
        assert attend.telemetry().resident_bytes <= 3 * one
    found = [states(attend, f"s{number}", 1)[0] for number in range(10)]
    assert found == [COLD] * 7 + [RESIDENT] * 3
    assert attend.telemetry() == (3, 7, 7, 0, 3 * one)


def test_a_store_that_cannot_fit_leaves_what_was_resident(
    store: PrefixStore, make: Callable[..., Attend]
) -> None:
    rows = random_rows("small")
    put(store, "large", random_rows("large", 4))
    attend = make(4 * rows[0][0].nbytes)
    upload(attend, "a", rows, 0)
    upload(attend, "a", rows, 1)
    with pytest.raises(OverBudget) as caught:
        attend.store_prefix("", "s", Source("large"))
    assert int(caught.value.metadata["needed_bytes"]) == 8 * rows[0][0].nbytes
    with pytest.raises(OverBudget):
        upload(attend, "s", random_rows("too large", rows=300))
    assert states(attend, "a") == [RESIDENT, RESIDENT]
    assert_answers(attend, "a", rows, 0)
    assert_answers(attend, "a", rows, 1)
    assert attend.telemetry().demotions == 0


def test_more_layers_than_entries_push_nothing_out(
    store: PrefixStore, make: Callable[..., Attend]
) -> None:
    attend = make()
    rows = random_rows("a")
    upload(attend, "a", rows)
    put(store, "deep", random_rows("deep", 257, 1))
    with pytest.raises(OverBudget, match="257 layers"):
        attend.store_prefix("", "s", Source("deep"))
    assert_answers(attend, "a", rows)


def test_half_precision_residency_takes_half_the_room(make: Callable[..., Attend]) -> None:
    rows = random_rows("half")[0]
    attend = make(rows[0].nbytes, create("numpy", "f16"))
    upload(attend, "s", [rows])
    assert attend.telemetry().resident_bytes == rows[0].nbytes


def test_of_257_entries_the_least_recently_used_goes(attend: Attend) -> None:
    rows = random_rows("tiny", 1, 1)
    for number in range(256):
        upload(attend, f"s{number}", rows)
    attend.ask(Key("", "s0", 0), question())
    upload(attend, "one more", rows)
    assert attend.telemetry()[:3] == (256, 1, 1)
    assert states(attend, "s0", 1) == [RESIDENT]
    assert states(attend, "s1", 1) == [COLD]
    with pytest.raises(Cold) as caught:
        attend.ask(Key("", "s1", 0), question())
    assert caught.value.metadata == {"session": "s1", "layer": "0"}


def test_looking_does_not_count_as_use(attend: Attend) -> None:
    rows = random_rows("tiny", 1, 1)
    for number in range(256):
        upload(attend, f"s{number}", rows)
        attend.lookup("", "s0", [0])
    upload(attend, "one more", rows)
    assert states(attend, "s0", 1) == [COLD]


def test_cold_entries_are_not_remembered_for_ever(attend: Attend) -> None:
    rows = random_rows("tiny", 1, 1)
    for number in range(256 + 1_024 + 1):
        upload(attend, f"s{number}", rows)
    assert attend.telemetry()[:3] == (256, 1_024, 1_025)
    assert states(attend, "s0", 1) == [MISSING]
    assert states(attend, "s1", 1) == [COLD]
    assert attend.lookup("", "s1", [0])[0].shape == Shape(HEADS, 1, DIM)
    with pytest.raises(Missing):
        attend.ask(Key("", "s0", 0), question(), warm=True)


@pytest.fixture
def crowded(store: PrefixStore, make: Callable[..., Attend]) -> tuple[Attend, Rows]:
    """Room for two layers; both layers of session `s`, from prefix `p`, have just gone cold."""
    rows = put(store, "p", random_rows("p"))
    attend = make(4 * rows[0][0].nbytes)
    attend.store_prefix("", "s", Source("p"))
    others = random_rows("others")
    upload(attend, "o", others, 0)
    upload(attend, "o", others, 1)
    assert states(attend, "s") == [COLD, COLD]
    return attend, rows


def test_a_cold_entry_is_not_warmed_unasked(crowded: tuple[Attend, Rows]) -> None:
    attend, _ = crowded
    with pytest.raises(Cold):
        attend.ask(Key("", "s", 0), question())
    assert states(attend, "s") == [COLD, COLD]


def test_a_cold_entry_is_warmed_for_a_query_that_says_so(crowded: tuple[Attend, Rows]) -> None:
    attend, rows = crowded
    ask = question()
    assert_right(attend.ask(Key("", "s", 1), ask, warm=True), ask, rows[1])
    assert states(attend, "s") == [COLD, RESIDENT]
    assert attend.telemetry()[:4] == (2, 2, 3, 1)


def test_a_warmed_entry_is_not_the_next_victim(crowded: tuple[Attend, Rows]) -> None:
    attend, _ = crowded
    attend.store_prefix("", "s", Source("p", layers=frozenset({0})))
    upload(attend, "x", random_rows("x"))
    assert states(attend, "s") == [RESIDENT, COLD]
    assert states(attend, "o") == [COLD, COLD]


def test_rows_that_were_uploaded_cannot_be_warmed_from_nowhere(
    crowded: tuple[Attend, Rows],
) -> None:
    attend, _ = crowded
    attend.store_prefix("", "s", Source("p"))
    assert states(attend, "o") == [COLD, COLD]
    with pytest.raises(Cold):
        attend.ask(Key("", "o", 0), question(), warm=True)


def test_a_prefix_that_has_changed_does_not_answer_for_what_it_was(
    crowded: tuple[Attend, Rows], store: PrefixStore
) -> None:
    attend, _ = crowded
    changed = put(store, "p", random_rows("changed"), replace=True)
    with pytest.raises(Cold, match="not stored any more"):
        attend.ask(Key("", "s", 0), question(), warm=True)
    assert states(attend, "s") == [COLD, COLD]
    attend.store_prefix("", "s", Source("p"))
    assert_answers(attend, "s", changed)


class Restless:
    """A store in which something happens once a prefix has been opened, or once it has been read."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self.opened: Callable[[], object] = bool
        self.read: Callable[[], object] = bool

    def open_rows(self, tenant: str, query: FetchQuery) -> Reading | None:
        reading = self._store.open_rows(tenant, query)
        self.opened()
        return reading

    @contextlib.contextmanager
    def guarded(self, reading: Reading) -> Iterator[None]:
        with self._store.guarded(reading):
            yield
        self.read()


@pytest.fixture
def restless(store: PrefixStore) -> tuple[Attend, Restless, Rows]:
    """Room for one layer; that of session `s`, from prefix `p`, has just gone cold."""
    rows = put(store, "p", random_rows("p", 1))
    world = Restless(store)
    attend = Attend(create("numpy"), cast(PrefixStore, world), 2 * rows[0][0].nbytes)
    attend.store_prefix("", "s", Source("p"))
    upload(attend, "o", random_rows("others", 1))
    assert states(attend, "s", 1) == [COLD]
    return attend, world, rows


def test_an_entry_that_others_push_out_once_it_is_warm_answers_all_the_same(
    restless: tuple[Attend, Restless, Rows],
) -> None:
    attend, world, rows = restless
    world.read = lambda: upload(attend, "o", random_rows("others", 1))
    ask = question()
    assert_right(attend.ask(Key("", "s", 0), ask, warm=True), ask, rows[0])
    assert states(attend, "s", 1) == [COLD]


def test_warming_does_not_bring_back_what_was_stored_over_or_dropped_meanwhile(
    restless: tuple[Attend, Restless, Rows],
) -> None:
    attend, world, rows = restless
    newer, ask = random_rows("newer", 1), question()
    world.opened = lambda: upload(attend, "s", newer)
    assert_right(attend.ask(Key("", "s", 0), ask, warm=True), ask, rows[0])
    assert_right(attend.ask(Key("", "s", 0), ask), ask, newer[0])
    world.opened = bool
    attend.store_prefix("", "s", Source("p"))
    upload(attend, "o", random_rows("others", 1))
    world.opened = lambda: attend.drop("", "s")
    assert_right(attend.ask(Key("", "s", 0), ask, warm=True), ask, rows[0])
    assert states(attend, "s", 1) == [MISSING]


def test_a_dropped_prefix_does_not_answer_for_its_cold_entries(
    crowded: tuple[Attend, Rows], store: PrefixStore
) -> None:
    attend, _ = crowded
    store.drop("", ["p"])
    with pytest.raises(Cold, match="not stored any more"):
        attend.ask(Key("", "s", 0), question(), warm=True)


def test_a_prefix_that_has_grown_does_not_change_what_was_asked_about(
    store: PrefixStore, make: Callable[..., Attend]
) -> None:
    rows = random_rows("grows", 1, 60)
    attend = make(2 * rows[0][0][:, :40].nbytes)
    layout = Layout(tuple(TensorLayout(0, side, HEADS, DIM, DType.F32) for side in Side))
    store.register("", "live", layout)

    def append(begin: int, end: int) -> None:
        for side, array in zip(Side, rows[0], strict=True):
            begun = store.write_rows("", WriteRowsHeader("live", 0, side, begin, end - begin))
            data = np.ascontiguousarray(array[:, begin:end].transpose(1, 0, 2)).tobytes()
            begun.write(RowChunk(0, 0, begin, end - begin, crc32c(data), data))
            begun.publish()

    append(0, 40)
    attend.store_prefix("", "s", Source("live"))
    upload(attend, "o", random_rows("o", rows=40))
    assert states(attend, "s", 1) == [COLD]
    append(40, 60)
    ask = question()
    short = rows[0][0][:, :40], rows[0][1][:, :40]
    assert_right(attend.ask(Key("", "s", 0), ask, warm=True), ask, short)


# Dropping


def test_dropped_entries_are_forgotten_cold_or_not(attend: Attend) -> None:
    rows = random_rows("d", 3)
    for layer in range(3):
        upload(attend, "d", rows, layer)
    upload(attend, "other", rows)
    upload(attend, "d", rows, 0, tenant="t")
    assert attend.drop("", "d", 1) == 1
    assert states(attend, "d", 3) == [RESIDENT, MISSING, RESIDENT]
    assert attend.drop("", "d") == 2
    assert attend.drop("", "d") == 0
    assert states(attend, "d", 3) == [MISSING] * 3
    assert attend.telemetry() == (2, 0, 0, 0, 4 * rows[0][0].nbytes)
    assert states(attend, "d", 1, "t") == [RESIDENT]


def test_cold_entries_can_be_dropped(crowded: tuple[Attend, Rows]) -> None:
    attend, _ = crowded
    assert attend.drop("", "s") == 2
    assert states(attend, "s") == [MISSING, MISSING]
    assert attend.telemetry().cold == 0


def test_tenants_do_not_see_each_others_entries(attend: Attend) -> None:
    rows = random_rows("t")
    upload(attend, "s", rows, tenant="a")
    with pytest.raises(Missing):
        attend.ask(Key("b", "s", 0), question())
    assert states(attend, "s", 1, "b") == [MISSING]
    assert attend.drop("b", "s") == 0
    attend.ask(Key("a", "s", 0), question())


# At once


class SlowBackend:
    """Answers when it is told to."""

    name = "slow"
    dtype = "f32"

    def __init__(self) -> None:
        self._inner = create("numpy")
        self.asked = threading.Event()
        self.go = threading.Event()

    def load(self, k: Array, v: Array) -> Resident:
        return self._inner.load(k, v)

    def attend(
        self, resident: Resident, query: Query, wanted: Callable[[], bool] = always
    ) -> Answer:
        self.asked.set()
        assert self.go.wait(30)
        return self._inner.attend(resident, query)

    def close(self) -> None:
        self._inner.close()


class SlowLoader:
    """Counts what is loaded, and makes the first of it wait."""

    name = "slow"
    dtype = "f32"

    def __init__(self) -> None:
        self._inner = create("numpy")
        self.loads = 0
        self.begun = threading.Event()
        self.go = threading.Event()

    def load(self, k: Array, v: Array) -> Resident:
        self.loads += 1
        self.begun.set()
        assert self.go.wait(30)
        return self._inner.load(k, v)

    def attend(
        self, resident: Resident, query: Query, wanted: Callable[[], bool] = always
    ) -> Answer:
        return self._inner.attend(resident, query)

    def close(self) -> None:
        self._inner.close()


def in_threads(*work: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    return threads


def test_a_herd_over_one_prefix_does_not_load_it_twice_nor_is_it_refused(
    store: PrefixStore, make: Callable[..., Attend]
) -> None:
    rows = put(store, "p", random_rows("p"))
    backend = SlowLoader()
    attend = make(4 * rows[0][0].nbytes, backend)  # room for it once
    came = threading.Semaphore(0)
    warmed: list[Warmed] = []

    def warm() -> None:
        came.release()
        warmed.append(attend.store_prefix("", "s", Source("p")))

    threads = in_threads(*[warm] * 8)
    for _ in threads:
        assert came.acquire(timeout=30)
    backend.go.set()
    for thread in threads:
        thread.join()
    assert warmed == [(2, 0, 4 * rows[0][0].nbytes)] * 8
    assert backend.loads == 2, "one per layer"
    assert_answers(attend, "s", rows, 1)


def test_what_is_resident_of_other_rows_is_not_taken_for_the_prefix(
    store: PrefixStore, attend: Attend
) -> None:
    rows = put(store, "p", random_rows("p"))
    upload(attend, "s", random_rows("uploaded"))
    attend.store_prefix("", "s", Source("p"))
    assert_answers(attend, "s", rows)
    changed = put(store, "p", random_rows("changed"), replace=True)
    attend.store_prefix("", "s", Source("p"))
    assert_answers(attend, "s", changed)
    other = put(store, "other", random_rows("another name"))
    attend.store_prefix("", "s", Source("other"))
    assert_answers(attend, "s", other)


def test_prefixes_that_fit_one_by_one_are_not_refused_for_coming_at_once(
    store: PrefixStore, make: Callable[..., Attend]
) -> None:
    names = ["a", "b"]
    rows = {name: put(store, name, random_rows(name)) for name in names}
    backend = SlowLoader()
    attend = make(6 * rows["a"][0][0].nbytes, backend, room_wait_s=30)
    warmed: list[Warmed] = []

    def warm(name: str) -> None:
        warmed.append(attend.store_prefix("", name, Source(name)))

    (first,) = in_threads(lambda: warm("a"))
    assert backend.begun.wait(30)
    (second,) = in_threads(lambda: warm("b"))
    second.join(0.1)  # time to be refused, if it is
    backend.go.set()
    for thread in (first, second):
        thread.join()
    assert len(warmed) == 2
    assert_answers(attend, "b", rows["b"])


def test_a_load_that_fails_does_not_take_along_who_waits_for_it(
    store: PrefixStore, make: Callable[..., Attend]
) -> None:
    put(store, "p", random_rows("p"))
    attend = make(backend=create("numpy", "f16"))
    huge = put(store, "huge", [(k * 1e6, v) for k, v in random_rows("huge")])
    assert len(huge) == 2
    refused("k", lambda: attend.store_prefix("", "s", Source("huge")))
    assert attend.store_prefix("", "s", Source("p")).layers == 2


@pytest.mark.parametrize("how", ["dropped", "replaced", "pushed out"])
def test_an_entry_that_goes_while_a_query_runs_is_answered_all_the_same(
    make: Callable[..., Attend], how: str
) -> None:
    backend = SlowBackend()
    rows = random_rows("s")
    attend = make(2 * rows[0][0].nbytes, backend)
    upload(attend, "s", rows)
    ask = question()
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(attend.ask(Key("", "s", 0), ask)))
    thread.start()
    assert backend.asked.wait(30)
    if how == "dropped":
        attend.drop("", "s")
    else:
        upload(attend, "s" if how == "replaced" else "t", random_rows("other"))
    backend.go.set()
    thread.join()
    assert_right(answers[0], ask, rows[0])


@pytest.mark.parametrize("name", ["numpy", "mlx", "reference"])
def test_nothing_is_computed_for_those_who_have_gone(
    make: Callable[..., Attend], name: Any
) -> None:
    attend = make(backend=create(name))
    rows = random_rows("s")
    upload(attend, "s", rows)
    for kind in KINDS.values():
        ask = question(**{"queries": 1} | kind(HEADS))
        with pytest.raises(Stalled):
            attend.ask(Key("", "s", 0), ask, wanted=lambda: False)
    assert_answers(attend, "s", rows)


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_long_query_does_not_keep_others_waiting_for_its_end(with_lse: bool) -> None:
    """MLX has one compute thread. The long one is given up when the short one has its answer."""
    backend = create("mlx")
    k = random_rows("long", 1, 8_192, 1)[0][0]
    resident = backend.load(k, k)
    long = Dense(q=rng("q").standard_normal((1, 1 << 15, DIM), np.float32), with_lse=with_lse)
    short = Dense(q=long.q[:, :1])
    begun, answered = threading.Event(), threading.Event()
    given_up: list[bool] = []

    def wanted() -> bool:
        begun.set()
        return not answered.is_set()

    def ask_long() -> None:
        try:
            backend.attend(resident, long, wanted)
        except Unwanted:
            given_up.append(True)

    (thread,) = in_threads(ask_long)
    assert begun.wait(30)
    backend.attend(resident, short)
    answered.set()
    thread.join()
    backend.close()
    assert given_up


def test_steps_of_a_long_query_do_not_make_another_answer() -> None:
    backend = create("mlx")
    k, v = random_rows("long", 1, 8_192, 1)[0]
    suffix_k, suffix_v = random_rows("suffix", 1, 40, 1)[0]
    q = rng("q").standard_normal((1, 2_500, DIM), np.float32)
    query = Fused(q=q, k_suffix=suffix_k, v_suffix=suffix_v)
    got = backend.attend(backend.load(k, v), query)
    backend.close()
    np.testing.assert_allclose(got.out, reference(k, v, query).out, rtol=0, atol=1e-5)


def test_threads_that_store_ask_warm_and_drop_at_once_never_get_another_entrys_answer(
    store: PrefixStore, make: Callable[..., Attend]
) -> None:
    prefixes = {f"p{n}": put(store, f"p{n}", random_rows(f"p{n}", 2, 30)) for n in range(4)}
    attend = make(6 * 2 * prefixes["p0"][0][0].nbytes)
    ask = question()
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        dice = rng("threads", seed)
        try:
            for _ in range(150):
                name = f"p{dice.integers(4)}"
                layer = int(dice.integers(2))
                what = dice.integers(10)
                if what == 0:
                    attend.drop("", name)
                elif what < 3:
                    with contextlib.suppress(OverBudget):
                        attend.store_prefix("", name, Source(name))
                else:
                    try:
                        got = attend.ask(Key("", name, layer), ask, warm=True)
                    except (Cold, Missing, OverBudget):
                        continue
                    assert_right(got, ask, prefixes[name][layer])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    found = attend.telemetry()
    assert found.resident_bytes <= attend.budget_bytes
    for name in prefixes:
        attend.drop("", name)
    assert attend.telemetry()[:2] == (0, 0)
    assert attend.telemetry().resident_bytes == 0
    # Nothing of what was reserved while loading is left over.
    whole = Shape(1, attend.budget_bytes // 8, 1)
    attend.begin_rows(Key("", "all", 0), whole).abandon()
