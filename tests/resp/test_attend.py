"""`ATTEND.*` and `KV.PREFIX.WARM`: the answers of the other wires, and what is refused."""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_grpc.backends import (
    Answer,
    Dense,
    Fused,
    Query,
    Resident,
    Sparse,
    SparseAuto,
    SparseAutoFused,
    always,
)
from pion_grpc.backends.fast import FastBackend
from pion_grpc.backends.reference import attend as reference
from pion_grpc.core.access import Access
from pion_grpc.core.attend_values import Key, Shape
from pion_grpc.resp.lane import attended
from pion_wire.v1 import attend_pb2 as pb
from tests.conftest import ServerProcess
from tests.resp.conftest import Resp
from tests.resp.lane import ERROR, FUSED, MISS, OK, Lane, framed, fused_body
from tests.resp.wire import Refused, Wire, Word, fields
from tests.server.test_attend import AttendWire, Case, normal, pair, query, rng, stored_floats

Array = npt.NDArray[Any]
ROOM = 1 << 28
COLD = Refused("COLDMISS session evicted to cold tier (call KV.PREFIX.WARM)")


@pytest.fixture(scope="module")
def resp() -> Iterator[Resp]:
    """One server with an engine for the tests of this module."""
    with tempfile.TemporaryDirectory(prefix="pion-", dir="/tmp") as path:
        resp = Resp(Path(path) / "data", resident_bytes=ROOM, listen="127.0.0.1:0")
        yield resp
        resp.stop()


@pytest.fixture
def lane(resp: Resp) -> Iterator[Lane]:
    lane = Lane(resp.address)
    yield lane
    lane.close()


def put(wire: Wire, sid: str, rows: tuple[Array, Array], layer: int = 0) -> None:
    k, v = rows
    assert wire("ATTEND.PREFIX.STORE", sid, layer, *k.shape, k.tobytes(), v.tobytes()) == "OK"


def floats(reply: Any, *shape: int) -> Array:
    assert isinstance(reply, bytes), reply
    assert len(reply) == 4 * int(np.prod(shape))
    return np.frombuffer(reply, "<f4").reshape(shape)


class Question(NamedTuple):
    """One query, as each wire has it and as the reference does."""

    over_grpc: Any
    words: list[Word]
    frame: bytes | None
    """Of the binary lane, which knows one kind."""
    reference: Query


def questions(case: Case) -> dict[str, Question]:
    """One query of each kind that RESP can ask; those without a head map have a query per K/V head."""
    sid, kv, dim, heads = str(case), case.kv_heads, case.dim, case.heads
    window, given = case.window, {"window_rows": case.window}
    rows = normal(f"{case}rows", kv, case.queries, dim)
    one = normal(f"{case}one", kv, 1, dim)
    fused = normal(f"{case}fused", heads, case.queries, dim)
    single = normal(f"{case}single", heads, 1, dim)
    suffix = pair(f"{case}suffix", kv, case.suffix, dim)
    k, v = (side.tobytes() for side in suffix)
    brought = {"suffix_rows": case.suffix, "suffix_k": k, "suffix_v": v}
    both = {"k_suffix": suffix[0], "v_suffix": suffix[1]}
    head_map = case.head_map or bytes(np.repeat(np.arange(kv, dtype=np.uint8), heads // kv))
    width = 2 * case.rows
    table = rng(case, "i").integers(-2, case.rows + 2, (kv, width), np.int32)
    counts = rng(case, "c").integers(0, width + 1, kv).astype(np.uint32)
    sparse = pb.AttendSparse(
        indices=table.tobytes(), counts=counts.tobytes(), indices_per_head=width
    )
    auto = pb.AttendSparseAuto(
        block_rows=case.block_rows, blocks=case.blocks, selector=case.selector
    )
    quest = case.selector == pb.ATTEND_SELECTOR_QUEST
    blocks: dict[str, Any] = {
        "block_tokens": case.block_rows,
        "blocks": case.blocks,
        "selector": "quest" if quest else "mean",
    }
    chosen: list[Word] = [heads, dim, case.block_rows, case.blocks, kv]
    mapped = {"head_map": head_map, "window": window}
    return {
        "dense": Question(
            query(sid, one, **given),
            ["QUERY", sid, 0, kv, dim, 1, one.tobytes(), window],
            None,
            Dense(q=one, window=window),
        ),
        "batched": Question(
            query(sid, rows, **given),
            ["QUERY", sid, 0, kv, dim, 1, rows.tobytes(), window],
            None,
            Dense(q=rows, window=window),
        ),
        "fused": Question(
            query(
                sid,
                fused,
                {"fused": pb.AttendFused(queries=case.queries, **brought)},
                head_map=head_map,
                **given,
            ),
            [
                *("QUERY_FUSED", sid, 0, heads, dim, case.suffix, kv),
                *(fused.tobytes(), k, v, head_map, window),
            ],
            fused_body(
                sid.encode(),
                0,
                fused.shape,
                (kv, case.suffix),
                fused.tobytes() + k + v + head_map,
                window,
            ),
            Fused(q=fused, **mapped, **both),
        ),
        "sparse": Question(
            query(sid, one, {"sparse": sparse}, **given),
            [
                *("QUERY_SPARSE", sid, 0, kv, dim, width),
                *(one.tobytes(), table.tobytes(), counts.tobytes(), window),
            ],
            None,
            Sparse(q=one, window=window, indices=table, counts=counts),
        ),
        "auto": Question(
            query(sid, single, {"sparse_auto": auto}, head_map=case.head_map, **given),
            ["QUERY_SPARSE_AUTO", sid, 0, *chosen, single.tobytes(), case.head_map, window, int(quest)],
            None,
            SparseAuto(q=single, window=window, head_map=case.head_map, **blocks),
        ),
        "auto fused": Question(
            query(
                sid,
                single,
                {"sparse_auto_fused": pb.AttendSparseAutoFused(choice=auto, **brought)},
                head_map=case.head_map,
                **given,
            ),
            [
                *("QUERY_SPARSE_AUTO_FUSED", sid, 0, *chosen, case.suffix),
                *(single.tobytes(), k, v, case.head_map, window, int(quest)),
            ],
            None,
            SparseAutoFused(q=single, window=window, head_map=case.head_map, **blocks, **both),
        ),
    }  # fmt: skip


def large(number: int) -> Case:
    """A case near the largest sizes that models have."""
    case, dice = Case(number), rng("large", number)
    case.number = 1_000 + number
    case.dim = int(dice.integers(256, 513))
    case.rows = int(dice.integers(2_000, 4_097))
    case.window = int(dice.choice([0, 1, case.rows - 1, case.rows, case.rows + 1]))
    case.block_rows = int(dice.integers(1, 200))
    return case


@pytest.mark.parametrize("case", [*map(Case, range(8)), *map(large, range(3))], ids=str)
def test_no_query_is_answered_wrongly_on_either_lane(wire: Wire, lane: Lane, case: Case) -> None:
    put(wire, str(case), case.pair)
    for kind, question in questions(case).items():
        want = reference(*case.pair, question.reference)
        reply = wire(f"ATTEND.PREFIX.{question.words[0]}", *question.words[1:])
        assert isinstance(reply, bytes), (kind, reply)
        size = want.out.nbytes
        got = floats(reply[:size], *want.out.shape)
        np.testing.assert_allclose(got, want.out, rtol=0, atol=1e-5, err_msg=kind)
        rows = question.reference.q.shape[1]
        assert len(reply) == size + (
            want.out[..., 0].nbytes if kind == "batched" and rows > 1 else 0
        )
        if question.frame is not None:
            assert lane(FUSED, question.frame) == (OK, reply)


@pytest.mark.parametrize(("backend", "dtype"), [("numpy", "f32"), ("numpy", "f16"), ("mlx", "f32")])
def test_the_four_lanes_do_not_differ_in_a_bit(
    start_server: Callable[..., ServerProcess], backend: str, dtype: str
) -> None:
    flags = ("--resp", "127.0.0.1:0", "--attend", backend, "--attend-dtype", dtype)
    server = start_server(*flags)
    with contextlib.ExitStack() as stack:
        grpc_wire = stack.enter_context(AttendWire(server.address))
        wire, lane = Wire(server.ready["resp"]), Lane(server.ready["resp"])
        stack.callback(wire.close)
        stack.callback(lane.close)
        for number in range(100, 108):
            case = Case(number)
            put(wire, str(case), case.pair)
            for kind, question in questions(case).items():
                unary = grpc_wire.ask(question.over_grpc)
                asked = pb.AttendStreamRequest(id=1, query=question.over_grpc)
                (streamed,) = grpc_wire.ask_stream([asked])
                reply = wire(f"ATTEND.PREFIX.{question.words[0]}", *question.words[1:])
                assert streamed.answer == unary, kind
                assert reply[: len(unary.data)] == unary.data, kind
                if question.frame is not None:
                    assert lane(FUSED, question.frame) == (OK, unary.data)
                if len(reply) > len(unary.data):
                    question.over_grpc.log_sum_exp = True
                    with_lse = grpc_wire.ask(question.over_grpc)
                    assert with_lse.data + with_lse.log_sum_exp == reply


def test_the_logarithm_of_the_sum_follows_several_rows_and_never_one(wire: Wire) -> None:
    k, v = np.zeros((2, 50, 16), np.float32), normal("v", 2, 50)
    put(wire, "zero", (k, v))
    for rows in (1, 2, 5):
        q = normal("trailer", 2, rows)
        reply = wire("ATTEND.PREFIX.QUERY", "zero", 0, 2, 16, 1, q.tobytes())
        assert len(reply) == q.nbytes + (0 if rows == 1 else 4 * 2 * rows)
        np.testing.assert_allclose(
            floats(reply[: q.nbytes], *q.shape),
            np.broadcast_to(v.mean(axis=1, keepdims=True), q.shape),
            rtol=0,
            atol=1e-5,
        )
        lse = np.frombuffer(reply[q.nbytes :], "<f4")
        np.testing.assert_allclose(lse, np.log(50), rtol=0, atol=1e-5)
        batch = wire("ATTEND.QUERYBATCH", 2, 50, 16, 1, q.tobytes(), k.tobytes(), v.tobytes())
        assert batch == reply, "a query that brings K and V is answered otherwise"
    assert wire("ATTEND.PREFIX.LOOKUP", "zero", 1) == "MISS", "something became resident"


def test_a_head_without_a_usable_index_gives_zeros(wire: Wire) -> None:
    rows, q = pair("none"), normal("none")
    put(wire, "none", rows)
    table, counts = np.array([[-1, 50], [3, 4]], np.int32), np.array([2, 2], np.uint32)
    sparse = ("ATTEND.PREFIX.QUERY_SPARSE", "none", 0, 2, 16, 2, q.tobytes())
    out = floats(wire(*sparse, table.tobytes(), counts.tobytes()), 2, 1, 16)
    assert not out[0].any()
    assert np.isfinite(out).all()
    assert out[1].any()
    nothing = floats(wire(*sparse, table.tobytes(), bytes(8)), 2, 1, 16)
    assert not nothing.any()


def test_without_a_suffix_a_fused_query_is_the_plain_one(wire: Wire) -> None:
    put(wire, "plain", pair("plain", rows=100))
    q = normal("plain").tobytes()
    auto = wire("ATTEND.PREFIX.QUERY_SPARSE_AUTO", "plain", 0, 2, 16, 16, 2, 2, q, b"")
    words = ("plain", 0, 2, 16, 16, 2, 2, 0, q, b"", b"", b"")
    assert wire("ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED", *words) == auto
    dense = wire("ATTEND.PREFIX.QUERY", "plain", 0, 2, 16, 1, q)
    assert wire("ATTEND.PREFIX.QUERY_FUSED", "plain", 0, 2, 16, 0, 2, q, b"", b"", MAP) == dense
    every = wire("ATTEND.PREFIX.QUERY_SPARSE_AUTO", "plain", 0, 2, 16, 16, 7, 2, q, b"")
    np.testing.assert_allclose(floats(every, 32), floats(dense, 32), rtol=0, atol=1e-6)


def test_a_window_is_the_callers_or_else_the_servers(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp(resident_bytes=ROOM, window=20, listen="127.0.0.1:0")
    wire, lane = resp.connect(), Lane(resp.address)
    rows, q, heads = pair("window"), normal("window"), bytes([0, 1])
    put(wire, "window", rows)
    for window, words, frame in (
        (20, [], None), (20, [-1], None), (0, [0], 0), (1, [1], 1), (60, [60], 60),
    ):  # fmt: skip
        want = reference(*rows, Dense(q=q, window=window)).out
        reply = wire("ATTEND.PREFIX.QUERY", "window", 0, 2, 16, 1, q.tobytes(), *words)
        np.testing.assert_allclose(floats(reply, 2, 1, 16), want, rtol=0, atol=1e-5)
        body = fused_body(b"window", 0, (2, 1, 16), (2, 0), q.tobytes() + heads, frame)
        status, out = lane(FUSED, body)
        assert status == OK
        np.testing.assert_allclose(floats(out, 2, 1, 16), want, rtol=0, atol=1e-5)
    lane.close()


def test_a_selector_without_a_window_is_not_lost(wire: Wire) -> None:
    rows, q = pair("selector", rows=512), normal("selector")
    put(wire, "selector", rows)
    blocks: Any = {"block_tokens": 16, "blocks": 2}
    outs = []
    for selector, name in ((None, "mean"), (0, "mean"), (7, "mean"), (1, "quest")):
        words = [] if selector is None else [-1, selector]
        got = wire(
            "ATTEND.PREFIX.QUERY_SPARSE_AUTO", "selector", 0, 2, 16, 16, 2, 2, q.tobytes(), b"", *words
        )  # fmt: skip
        want = reference(*rows, SparseAuto(q=q, selector=name, **blocks)).out  # type: ignore[arg-type]
        np.testing.assert_allclose(floats(got, 2, 1, 16), want, rtol=0, atol=1e-5)
        outs.append(got)
    assert outs[0] == outs[1] == outs[2] != outs[3]


# What is refused


Q, K, MAP = bytes(4 * 2 * 16), bytes(4 * 2 * 50 * 16), bytes([0, 1])
ROW = bytes(4 * 2 * 16)
"""A row of two heads."""
STORE = ("STORE", "bad", 0, 2, 50, 16, K, K)
DENSE = ("QUERY", "bad", 0, 2, 16, 1, Q)
FUSE = ("QUERY_FUSED", "bad", 0, 2, 16, 1, 2, Q, ROW, ROW, MAP)
SPARSE = ("QUERY_SPARSE", "bad", 0, 2, 16, 1, Q, bytes(8), bytes(8))
AUTO = ("QUERY_SPARSE_AUTO", "bad", 0, 2, 16, 8, 1, 2, Q, MAP)
AUTO_FUSE = ("QUERY_SPARSE_AUTO_FUSED", "bad", 0, 2, 16, 8, 1, 2, 1, Q, ROW, ROW, MAP)
NOT_A_NUMBER = "ERR value is not an integer or out of range"


def but(words: tuple[Word, ...], at: int, *others: Word) -> tuple[Word, ...]:
    return (*words[:at], *others, *words[at + len(others) :])


REFUSALS: list[tuple[tuple[Word, ...], str]] = [
    *[(but(STORE, at, bad), "ERR invalid H/N/D (must be > 0)")
      for at in (3, 4, 5) for bad in (0, -1, "x", "01", 1 << 31)],
    (but(STORE, 2, -1), "ERR invalid layer_id (must be >= 0)"),
    (but(STORE, 2, 1 << 32), "ERR invalid layer_id (must be >= 0)"),
    (but(STORE, 3, 3), "ERR K/V blob size mismatch (expected H*N*D*4 each)"),
    (but(STORE, 6, K[:-1]), "ERR K/V blob size mismatch (expected H*N*D*4 each)"),
    (but(STORE, 7, K + b"x"), "ERR K/V blob size mismatch (expected H*N*D*4 each)"),
    (but(STORE, 6, b"", b""), "ERR K/V blob size mismatch (expected H*N*D*4 each)"),
    (but(STORE, 1, b""), "ERR session"),
    (but(STORE, 1, b"\xff"), "ERR sid must be UTF-8"),
    (but(STORE, 1, "x" * 201), "ERR session"),
    ((*STORE, "more"), "ERR syntax error"),
    (STORE[:-1], "ERR ATTEND.PREFIX.STORE requires: sid layer H N D K V"),
    *[(but(DENSE, at, bad), "ERR invalid H/D/top_k (must be > 0)")
      for at in (3, 4, 5) for bad in (0, -1, "x")],
    (but(DENSE, 6, b""), "ERR Q blob size must be a positive multiple of H*D*4"),
    (but(DENSE, 6, Q[:-4]), "ERR Q blob size must be a positive multiple of H*D*4"),
    (but(DENSE, 3, 4, 8), "ERR kv_heads"),  # of the entry
    (but(DENSE, 4, 8), "ERR data"),
    (but(DENSE, 3, 1, 32), "ERR kv_heads"),
    (but(DENSE, 2, -1), "ERR invalid layer_id (must be >= 0)"),
    (but(DENSE, 2, 1), "ERR ATTEND.PREFIX.QUERY failed (session not found"),
    (but(DENSE, 1, "nothing"), "ERR ATTEND.PREFIX.QUERY failed (session not found"),
    ((*DENSE, "x"), NOT_A_NUMBER),
    ((*DENSE, 0, 0), "ERR syntax error"),
    *[(but(FUSE, at, bad), "ERR invalid H_q/D/H_kv (must be > 0)")
      for at in (3, 4, 6) for bad in (0, -1)],
    (but(FUSE, 5, -1), "ERR invalid S_suf"),
    (but(FUSE, 7, b""), "ERR Q blob size must be a positive multiple of H*D*4"),
    (but(FUSE, 3, 3), "ERR H_q must be a multiple of H_kv (GQA)"),
    (but(FUSE, 5, 2), "ERR K_suf / V_suf size mismatch (expected H_kv*S_suf*D*4 each)"),
    (but(FUSE, 8, b""), "ERR K_suf / V_suf size mismatch (expected H_kv*S_suf*D*4 each)"),
    (but(FUSE, 9, ROW[:-1]), "ERR K_suf / V_suf size mismatch (expected H_kv*S_suf*D*4 each)"),
    (but(FUSE, 6, 1, Q, ROW[:64], ROW[:64]), "ERR kv_heads"),
    (but(FUSE, 10, b""), "ERR head_map size mismatch (expected H_q bytes)"),
    (but(FUSE, 10, bytes(3)), "ERR head_map size mismatch (expected H_q bytes)"),
    (but(FUSE, 10, bytes([0, 2])), "ERR head_map"),
    (but(FUSE, 1, "nothing"), "ERR ATTEND.PREFIX.QUERY_FUSED failed (session not found"),
    *[(but(SPARSE, at, bad), "ERR invalid H/D/K_sparse_max (must be > 0)")
      for at in (3, 4, 5) for bad in (0, -1)],
    (but(SPARSE, 6, Q + Q), "ERR Q blob size must be H*D*4"),
    (but(SPARSE, 7, bytes(4)), "ERR indices blob size must be H*K_sparse_max*4"),
    (but(SPARSE, 8, bytes(4)), "ERR counts blob size must be H*4"),
    (but(SPARSE, 8, b"\2\0\0\0" + bytes(4)), "ERR counts"),
    *[(but(AUTO, at, bad), "ERR invalid H_q/D/B/K_top/H_kv (must be > 0)")
      for at in (3, 4, 5, 6, 7) for bad in (0, -1)],
    (but(AUTO, 8, Q + Q), "ERR Q blob size must be H*D*4"),
    (but(AUTO, 3, 3), "ERR H_q must be a multiple of H_kv (GQA)"),
    (but(AUTO, 7, 1), "ERR kv_heads"),
    (but(AUTO, 9, bytes(1)), "ERR head_map size must be 0 (identity) or H_q bytes"),
    (but(AUTO, 9, bytes([2, 0])), "ERR head_map"),
    ((*AUTO, 0, "x"), NOT_A_NUMBER),
    ((*AUTO, 0, 0, 0), "ERR syntax error"),
    *[(but(AUTO_FUSE, at, bad), "ERR invalid H_q/D/B/K_top/H_kv (must be > 0)")
      for at in (3, 4, 5, 6, 7) for bad in (0, -1)],
    (but(AUTO_FUSE, 8, 2), "ERR K_suf / V_suf size mismatch"),
    (but(AUTO_FUSE, 9, b""), "ERR Q blob size must be H*D*4"),
    (but(AUTO_FUSE, 12, bytes(1)), "ERR head_map size must be 0 (identity) or H_q bytes"),
    (("LOOKUP", "bad", -1), "ERR invalid layer_id (must be >= 0)"),
    (("LOOKUP", "bad"), "ERR ATTEND.PREFIX.LOOKUP requires: sid layer"),
    (("DROP", "bad", "x"), "ERR invalid layer_id (must be >= 0)"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "refusal"), REFUSALS)
def test_what_contradicts_itself_is_refused_and_changes_nothing(
    resp: Resp, wire: Wire, words: tuple[Word, ...], refusal: str
) -> None:
    assert resp.attend is not None
    rows, q = pair("bad"), normal("bad")
    put(wire, "bad", rows)
    before = resp.attend.telemetry()
    reply = wire(f"ATTEND.PREFIX.{words[0]}", *words[1:])
    assert isinstance(reply, Refused), reply
    assert reply.text.startswith(refusal)
    assert resp.attend.telemetry() == before
    got = wire("ATTEND.PREFIX.QUERY", "bad", 0, 2, 16, 1, q.tobytes())
    want = reference(*rows, Dense(q=q)).out
    np.testing.assert_allclose(floats(got, 2, 1, 16), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ((0, 50, 16, 1, Q, K, K), "ERR invalid H/N/D/top_k (must be > 0)"),
        ((2, 0, 16, 1, Q, b"", b""), "ERR invalid H/N/D/top_k (must be > 0)"),
        ((2, 50, 16, 0, Q, K, K), "ERR invalid H/N/D/top_k (must be > 0)"),
        ((2, 50, 16, 1, b"", K, K), "ERR Q blob size must be a positive multiple of H*D*4"),
        ((2, 50, 16, 1, Q, K, K[:-4]), "ERR K/V blob size mismatch (expected H*N*D*4 each)"),
        ((2, 51, 16, 1, Q, K, K), "ERR K/V blob size mismatch (expected H*N*D*4 each)"),
        ((2, 50, 16, 1, Q, K, K, 0), "ERR syntax error"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(
    wire: Wire, words: tuple[Word, ...], refusal: str
) -> None:
    assert wire("ATTEND.QUERYBATCH", *words).text.startswith(refusal)


NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 3, 4, 8, 16, 50, 256, 65_535, (1 << 31) - 1, 1 << 31, 1 << 63]
)
BLOBS = st.one_of(
    st.binary(max_size=9),
    st.sampled_from([4, 64, 128, 256, 1_024, 6_400]).map(bytes),
    st.sampled_from([2, 32, 1_600]).map(lambda n: np.full(n, 3e38, np.float32).tobytes()),
    st.sampled_from([2, 32, 1_600]).map(lambda n: np.full(n, np.nan, np.float32).tobytes()),
)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), base=st.sampled_from([STORE, DENSE, FUSE, SPARSE, AUTO, AUTO_FUSE]))
def test_no_words_end_in_an_internal_error(resp: Resp, data: st.DataObject, base: Any) -> None:
    """Words that fit, some of them replaced by any others: an answer or a refusal, in order."""
    words = [*base[:1], "fuzz", *base[2:], *data.draw(st.lists(NUMBERS, max_size=2))]
    for at in data.draw(st.lists(st.integers(2, len(words) - 1), max_size=4)):
        words[at] = data.draw(BLOBS if isinstance(words[at], bytes) else NUMBERS)
    wire = Wire(resp.address)
    reply, pong = wire.pipeline((f"ATTEND.PREFIX.{words[0]}", *words[1:]), ("PING",))
    wire.close()
    assert pong == "PONG"
    if isinstance(reply, Refused):
        assert "internal error" not in reply.text, words
    else:
        assert reply == "OK" or len(reply) % 4 == 0


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([b"fuzz", b"", b"\xff", b"x" * 300]),
    st.integers(0, 2),
    st.tuples(st.integers(0, 8), st.integers(0, 3), st.sampled_from([0, 1, 15, 16])),
    st.tuples(st.integers(0, 4), st.integers(0, 3)),
    st.binary(max_size=3),
    st.sampled_from([None, 0, 1, 50, 0xFFFFFFFF]),
)
def test_no_shape_of_a_frame_ends_in_an_internal_error(
    resp: Resp,
    sid: bytes,
    layer: int,
    shape: tuple[int, int, int],
    kv: tuple[int, int],
    rest: bytes,
    window: int | None,
) -> None:
    """Bodies as long as their numbers say, and a little longer."""
    assert resp.attend is not None
    resp.attend.store_rows(Key("", "fuzz", 0), Shape(2, 50, 16), memoryview(K), memoryview(K))
    heads, queries, dim = shape
    size = 4 * dim * (heads * queries + 2 * kv[0] * kv[1]) + heads
    body = fused_body(sid, layer, shape, kv, bytes(size) + rest, window)
    status, pieces = attended(resp.attend, memoryview(body), always)
    assert status in (OK, MISS, ERROR)
    answer = b"".join(bytes(piece) for piece in pieces)
    assert len(answer) == (4 * heads * queries * dim if status == OK else 0)


def test_an_option_is_not_read_out_of_the_next_command(wire: Wire) -> None:
    put(wire, "options", pair("options"))
    dense: tuple[Word, ...] = ("ATTEND.PREFIX.QUERY", "options", 0, 2, 16, 1, Q)
    assert len(wire.pipeline(dense, ("PING",))[0]) == len(Q)
    first, second = wire.pipeline(dense, ("GET", "1"))
    assert (len(first), second) == (len(Q), None)


def test_without_an_engine_everything_is_refused_in_words(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp(listen="127.0.0.1:0")
    wire, lane = resp.connect(), Lane(resp.address)
    for words in (STORE, ("LOOKUP", "a", 0), DENSE, FUSE, SPARSE, AUTO, AUTO_FUSE, ("DROP", "a")):
        reply = wire(f"ATTEND.PREFIX.{words[0]}", *words[1:])
        assert reply.text.startswith("ERR attention engine not available")
    batch = wire("ATTEND.QUERYBATCH", 2, 50, 16, 1, Q, K, K)
    assert batch.text.startswith("ERR attention engine not available")
    warm = wire("KV.PREFIX.WARM", "a", 1, 64)
    assert warm.text.startswith("ERR Metal attention not available")
    assert lane(FUSED, fused_body(b"a", 0, (2, 1, 16), (2, 0), Q + MAP)) == (ERROR, b"")
    assert fields(wire("KV.PREFIX.INFO"))["sdpa_warm"] == "0"
    lane.close()


def test_nobody_attends_to_a_tenants_entries_but_the_tenant(
    start_resp: Callable[..., Resp],
) -> None:
    access = Access({"": "secret", "blue": "azure", "red": "crimson"})
    resp = start_resp(resident_bytes=ROOM, access=access, listen="127.0.0.1:0")
    wires = {user: resp.connect() for user in ("default", "blue", "red", "nobody")}
    for user, password in (("default", "secret"), ("blue", "azure"), ("red", "crimson")):
        assert wires[user]("AUTH", user, password) == "OK"
    put(wires["blue"], "s", pair("s"))
    dense: tuple[Word, ...] = ("ATTEND.PREFIX.QUERY", "s", 0, 2, 16, 1, Q)
    assert len(wires["blue"](*dense)) == len(Q)
    for other in ("default", "red"):
        assert wires[other]("ATTEND.PREFIX.LOOKUP", "s", 0) == "MISS"
        assert wires[other]("ATTEND.PREFIX.DROP", "s") == 0
        assert "session not found" in wires[other](*dense).text
        put(wires[other], "s", pair("other"))
    assert wires["nobody"](*dense).text.startswith("NOAUTH")
    assert wires["blue"]("ATTEND.PREFIX.DROP", "s", 0) == 1
    assert wires["red"]("ATTEND.PREFIX.LOOKUP", "s", 0) == "HIT"


# Residency


ENTRY_BYTES = 2 * 2 * 50 * 16 * 4


@pytest.fixture
def small(start_resp: Callable[..., Resp]) -> Resp:
    """A server with room for four entries of 50 rows."""
    return start_resp(resident_bytes=4 * ENTRY_BYTES, listen="127.0.0.1:0")


def attention(wire: Wire, command: str = "KV.PREFIX.INFO") -> tuple[int, ...]:
    found = fields(wire(command))
    return tuple(int(found[f"sdpa_{name}"]) for name in ("warm", "cold", "demotions", "rehydrates"))


def store_rows(wire: Wire, namespace: str, layers: list[tuple[Array, Array]]) -> None:
    """Stores K and V of each layer as rows, the way clients of this wire do."""
    width = layers[0][0].shape[0] * layers[0][0].shape[2]
    assert wire("KV.PREFIX.REGISTER", namespace, width, "fp16") == "OK"
    for layer, sides in enumerate(layers):
        for suffix, side in zip(("_pk", "_pv"), sides, strict=True):
            rows = side.transpose(1, 0, 2).tobytes()
            count = side.shape[1]
            assert wire("V.STOREBATCH", namespace + suffix, layer, 0, count, rows) == "OK"


def halves(name: str, heads: int = 2) -> tuple[Array, Array]:
    """K and V that binary16 holds exactly."""
    k, v = pair(name, heads)
    return k.astype(np.float16).astype(np.float32), v.astype(np.float16).astype(np.float32)


def test_a_store_beyond_the_budget_leaves_what_was_resident(small: Resp) -> None:
    wire, rows, q = small.connect(), pair("stays"), normal("stays")
    put(wire, "stays", rows)
    k, v = pair("large", rows=300)
    refused = wire("ATTEND.PREFIX.STORE", "stays", 0, *k.shape, k.tobytes(), v.tobytes())
    assert refused.text.startswith("OOM ")
    store_rows(wire, "deep", [pair(f"deep{layer}") for layer in range(5)])
    assert wire("KV.PREFIX.WARM", "deep", 2, 16, "stays").text.startswith("OOM ")
    assert attention(wire) == attention(wire, "INFO") == (1, 0, 0, 0)
    got = wire("ATTEND.PREFIX.QUERY", "stays", 0, 2, 16, 1, q.tobytes())
    want = reference(*rows, Dense(q=q)).out
    np.testing.assert_allclose(floats(got, 2, 1, 16), want, rtol=0, atol=1e-5)


def test_a_cold_entry_is_said_to_be_cold_until_it_is_warmed(small: Resp) -> None:
    wire, lane = small.connect(), Lane(small.address)
    layers = [halves(f"cold{layer}") for layer in range(3)]
    store_rows(wire, "ns", layers)
    assert wire("KV.PREFIX.WARM", "ns", 2, 16, "ns_attn") == "3"
    for name in ("a", "b", "c"):
        put(wire, name, pair(name))
    states = [wire("ATTEND.PREFIX.LOOKUP", "ns_attn", layer) for layer in range(4)]
    assert states == ["COLD", "COLD", "HIT", "MISS"]
    q = normal("cold")
    fused = ("QUERY_FUSED", "ns_attn", 0, 2, 16, 0, 2, q.tobytes(), b"", b"", MAP)
    frame = fused_body(b"ns_attn", 0, (2, 1, 16), (2, 0), q.tobytes() + MAP)
    for words in (DENSE, fused, SPARSE, AUTO, AUTO_FUSE):
        assert wire(f"ATTEND.PREFIX.{words[0]}", "ns_attn", *words[2:]) == COLD
    assert lane(FUSED, frame) == (3, b"")
    assert attention(wire) == (4, 2, 2, 0)
    assert wire("KV.PREFIX.WARM", "ns", 2, 16, "ns_attn") == "3"
    assert attention(wire) == (4, 2, 4, 2)
    want = reference(*layers[0], Dense(q=q)).out
    reply = wire("ATTEND.PREFIX." + str(fused[0]), *fused[1:])
    np.testing.assert_allclose(floats(reply, 2, 1, 16), want, rtol=0, atol=1e-5)
    assert lane(FUSED, frame) == (OK, reply)
    lane.close()


def test_of_257_entries_one_is_cold(wire: Wire, start_resp: Callable[..., Resp]) -> None:
    wire = start_resp(resident_bytes=ROOM).connect()
    for layer in range(257):
        put(wire, "many", pair("many", 1, 1, 1), layer)
    assert attention(wire) == (256, 1, 1, 0)
    assert wire("ATTEND.PREFIX.LOOKUP", "many", 0) == "COLD"
    assert wire("ATTEND.PREFIX.DROP", "many") == 257
    assert attention(wire) == (0, 0, 1, 0)


@pytest.mark.parametrize("heads", [2, 8])
def test_warming_does_not_depend_on_which_heads_the_caller_counts(wire: Wire, heads: int) -> None:
    """Two K/V heads are stored; on a grouped model callers name their eight query heads."""
    namespace = f"warm{heads}"
    layers = [halves(f"{namespace}{layer}") for layer in range(3)]
    store_rows(wire, namespace, layers)
    assert wire("KV.PREFIX.WARM", namespace, heads, 16) == "3"
    q = normal(namespace, 8)
    head_map = bytes(np.repeat(np.arange(2, dtype=np.uint8), 4))
    for layer, rows in enumerate(layers):
        got = wire(
            "ATTEND.PREFIX.QUERY_FUSED", namespace, layer, 8, 16, 0, 2, q.tobytes(), b"", b"", head_map
        )  # fmt: skip
        want = reference(*rows, Dense(q=q)).out
        np.testing.assert_allclose(floats(got, 8, 1, 16), want, rtol=0, atol=1e-5)


def test_layers_of_another_width_are_counted_not_guessed(wire: Wire) -> None:
    store_rows(wire, "other", [halves("other")])
    wire("KV.PREFIX.REGISTER", "mixed", 32, "fp16")
    assert wire("KV.PREFIX.WARM", "other", 2, 15) == "0 skipped_dim=1"
    assert wire("KV.PREFIX.WARM", "other", 3, 16) == "0 skipped_dim=1"
    assert wire("ATTEND.PREFIX.LOOKUP", "other", 0) == "MISS"
    assert wire("KV.PREFIX.WARM", "mixed", 2, 16) == "0", "a prefix without rows"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("nothing", 2, 16), "ERR KV.PREFIX.WARM namespace not registered"),
        (("", 2, 16), "ERR ns_key length must be 1..200"),
        (("x" * 201, 2, 16), "ERR ns_key length must be 1..200"),
        (("ns", 0, 16), "ERR invalid H/D (1..256 / 1..512)"),
        (("ns", 257, 16), "ERR invalid H/D (1..256 / 1..512)"),
        (("ns", 2, 0), "ERR invalid H/D (1..256 / 1..512)"),
        (("ns", 2, 513), "ERR invalid H/D (1..256 / 1..512)"),
        (("ns", 2, 16, b"\xff"), "ERR attend_sid must be UTF-8"),
        (("ns", 2, 16, b""), "ERR session"),
        (("ns", 2), "ERR KV.PREFIX.WARM requires: ns_key H D [attend_sid]"),
    ],
)
def test_what_cannot_be_warmed_is_refused(
    wire: Wire, words: tuple[Word, ...], refusal: str
) -> None:
    store_rows(wire, "ns", [halves("ns")])
    assert wire("KV.PREFIX.WARM", *words).text.startswith(refusal)


def test_warming_keeps_to_the_prefix_rule(start_resp: Callable[..., Resp]) -> None:
    wire = start_resp(resident_bytes=ROOM, namespace_prefix="mine:").connect()
    assert wire("KV.PREFIX.WARM", "other", 2, 16) == Refused(
        "ERR namespace must start with required prefix 'mine:' (multi-tenant isolation)"
    )


def test_warming_is_a_use_and_changes_no_row(start_resp: Callable[..., Resp]) -> None:
    wire = start_resp(resident_bytes=ROOM, sides_max=4).connect()
    rows = halves("row")
    store_rows(wire, "first", [rows])
    store_rows(wire, "second", [rows])
    stored = wire("V.FETCH", "first_pk", 0, "RANGE", 0, 50, "FMT", "NATIVE")
    store_rows(wire, "second", [rows])
    assert wire("KV.PREFIX.WARM", "first", 2, 16) == "1"
    store_rows(wire, "third", [rows])
    assert [wire("KV.PREFIX.LOOKUP", ns) for ns in ("first", "second")] == ["HIT", "MISS"]
    assert wire("V.FETCH", "first_pk", 0, "RANGE", 0, 50, "FMT", "NATIVE") == stored


def test_rows_that_came_over_grpc_are_warmed_as_well(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--resp", "127.0.0.1:0")
    wire = Wire(server.ready["resp"])
    with AttendWire(server.address) as grpc_wire:
        layers = stored_floats(grpc_wire, "ns")
        assert wire("KV.PREFIX.WARM", "ns", 2, 16, "s") == "3"
        q = normal("ns")
        got = wire("ATTEND.PREFIX.QUERY", "s", 2, 2, 16, 1, q.tobytes())
        want = reference(*layers[2], Dense(q=q)).out
        np.testing.assert_allclose(floats(got, 2, 1, 16), want, rtol=0, atol=1e-5)
        described = grpc_wire.described()
        assert (described.attend_warm, described.attend_cold) == attention(wire)[:2] == (3, 0)
    wire.close()


def test_who_leaves_before_the_answer_takes_nobody_along(resp: Resp, wire: Wire) -> None:
    put(wire, "leave", pair("leave", 8, 4_000, 64))
    q = normal("leave", 8, 64, 64).tobytes()
    frame = fused_body(b"leave", 0, (8, 64, 64), (8, 0), q + bytes(range(8)))
    for _ in range(5):
        leaving, lane = resp.connect(), Lane(resp.address)
        leaving.send("ATTEND.PREFIX.QUERY", "leave", 0, 8, 64, 1, q)
        lane.socket.sendall(framed(FUSED, frame))
        leaving.close()
        lane.close()
    assert len(wire("ATTEND.PREFIX.QUERY", "leave", 0, 8, 64, 1, q)) == len(q) + 4 * 8 * 64


class Gate(FastBackend):
    """Lets the first query wait, and counts those that are computed to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.computed = 0

    def attend(
        self, resident: Resident, query: Query, wanted: Callable[[], bool] = always
    ) -> Answer:
        self.begun.set()
        assert self.may_go_on.wait(60)
        answer = super().attend(resident, query, wanted)
        self.computed += 1
        return answer


def test_nothing_is_computed_for_a_caller_who_has_gone(start_resp: Callable[..., Resp]) -> None:
    gate = Gate()
    resp = start_resp(backend=gate, resident_bytes=ROOM, listen="127.0.0.1:0")
    staying, leaving = resp.connect(), resp.connect()
    rows = pair("gone", 2, 100, 16)
    put(staying, "gone", rows)
    q = normal("gone", 2, 1, 16)
    dense = ("ATTEND.PREFIX.QUERY", "gone", 0, 2, 16, 1, q.tobytes())
    for _ in range(8):
        leaving.send(*dense)
    leaving.send("ATTEND.QUERYBATCH", 2, 100, 16, 1, q.tobytes(), *(r.tobytes() for r in rows))
    assert gate.begun.wait(60)
    leaving.break_off()
    while fields(staying("INFO", "clients"))["connected_clients"] != "1":
        pass
    gate.may_go_on.set()
    got = floats(staying(*dense), 2, 1, 16)
    np.testing.assert_allclose(got, reference(*rows, Dense(q=q)).out, rtol=0, atol=1e-5)
    resp.stop()
    assert gate.computed == 1


def test_clients_of_one_entry_do_not_get_each_others_answers(resp: Resp, wire: Wire) -> None:
    rows = pair("shared")
    put(wire, "shared", rows)
    wrong: list[str] = []

    def ask(number: int, connection: Wire) -> None:
        for turn in range(25):
            q = normal(f"shared{number}/{turn}")
            got = connection("ATTEND.PREFIX.QUERY", "shared", 0, 2, 16, 1, q.tobytes())
            want = reference(*rows, Dense(q=q)).out
            if not np.allclose(floats(got, 2, 1, 16), want, rtol=0, atol=1e-5):
                wrong.append(f"{number}/{turn}")

    connections = [resp.connect() for _ in range(4)]
    threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
