"""Attention through the client: every kind, on both lanes, and what happens when a lane breaks."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from pion_client import AttendState, Client, attend_streams
from pion_client.errors import (
    ClientClosed,
    Cold,
    DeadlineExceeded,
    GenerationDiffers,
    InvalidRequest,
    NotStored,
    NotSupported,
    OverBudget,
    Unavailable,
)
from pion_client.residency import AttendByNamespace, Residency
from pion_grpc.backends import Dense, Fused, Query, Sparse, SparseAuto, SparseAutoFused
from pion_grpc.backends.reference import attend as reference
from pion_wire.softmax import merge
from tests.client.between import Between
from tests.conftest import ServerProcess
from tests.server.wire import eventually

Array = npt.NDArray[Any]
NO_STREAM = "PION_PROMPT_CACHE_NO_STREAM"
IDS = list(range(1, 41))


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


@pytest.fixture(params=["stream", "unary"])
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(NO_STREAM, "1" if request.param == "unary" else "0")
    name: str = request.param
    return name


def normal(seed: object, *shape: int) -> Array:
    noise = np.random.default_rng(list(str(seed).encode()))
    return noise.standard_normal(shape, np.float32)


K, V = normal("k", 2, 50, 16), normal("v", 2, 50, 16)
Q = normal("q", 2, 1, 16)
SUFFIX = normal("sk", 2, 3, 16), normal("sv", 2, 3, 16)
TABLE = np.array([[0, 1, 2], [49, 50, -1], [7, 7, 8], [9, 10, 11]])
COUNTS = np.array([3, 3, 3, 1])

Ask = Callable[[Client, str, Array], Array]

KINDS: dict[str, tuple[int, Ask, Callable[[Array], Query]]] = {
    "dense": (1, lambda c, s, q: c.attend_query(s, 0, q), lambda q: Dense(q=q)),
    "batched": (5, lambda c, s, q: c.attend_query(s, 0, q), lambda q: Dense(q=q)),
    "fused": (
        3,
        lambda c, s, q: c.attend_query_fused(s, 0, q, *SUFFIX),
        lambda q: Fused(q=q, k_suffix=SUFFIX[0], v_suffix=SUFFIX[1]),
    ),
    "sparse": (
        1,
        lambda c, s, q: c.attend_query_sparse(s, 0, q, TABLE, COUNTS),
        lambda q: Sparse(q=q, indices=TABLE.astype(np.int32), counts=COUNTS.astype(np.uint32)),
    ),
    "auto": (
        1,
        lambda c, s, q: c.attend_query_sparse_auto(s, 0, q, 8, 2),
        lambda q: SparseAuto(q=q, block_tokens=8, blocks=2),
    ),
    "auto fused": (
        1,
        lambda c, s, q: c.attend_query_sparse_auto_fused(s, 0, q, 8, 2, *SUFFIX, selector="quest"),
        lambda q: SparseAutoFused(
            q=q,
            block_tokens=8,
            blocks=2,
            selector="quest",
            k_suffix=SUFFIX[0],
            v_suffix=SUFFIX[1],
        ),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_query_is_answered_wrongly(client: Client, lane: str, kind: str) -> None:
    queries, ask, query = KINDS[kind]
    client.attend_store(kind, 0, K, V)
    q = normal(kind, 4, queries, 16)
    got = ask(client, kind, q)
    assert client.attend_lane == lane
    assert (got.dtype, got.shape) == (np.float32, q.shape)
    np.testing.assert_allclose(got, reference(K, V, query(q)).out, rtol=0, atol=1e-5)
    if queries == 1:
        flat = ask(client, kind, q[:, 0])
        np.testing.assert_array_equal(flat, got[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_do_not_differ_in_a_bit(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    queries, ask, _ = KINDS[kind]
    client.attend_store(kind, 0, K, V)
    q = normal(kind, 4, queries, 16)
    streamed = ask(client, kind, q)
    monkeypatch.setenv(NO_STREAM, "1")
    np.testing.assert_array_equal(ask(client, kind, q), streamed)


def test_options_of_a_query_are_not_lost(client: Client, lane: str) -> None:
    client.attend_store("options", 3, K, V)
    q = normal("options", 4, 2, 16)
    head_map = [1, 0, 1, 0]
    out, lse = client.attend_query(
        "options", 3, q, with_lse=True, head_map=head_map, window=9, scale=0.5
    )
    query = Dense(q=q, head_map=bytes(head_map), window=9, scale=0.5, with_lse=True)
    want = reference(K, V, query)
    assert want.lse is not None
    np.testing.assert_allclose(out, want.out, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-6, atol=1e-5)
    _, flat = client.attend_query("options", 3, q[:, 0], with_lse=True)
    assert flat.shape == (4,)


def test_two_halves_do_not_merge_to_something_else(client: Client) -> None:
    client.attend_store("left", 0, K[:, :20], V[:, :20])
    client.attend_store("right", 0, K[:, 20:], V[:, 20:])
    q = normal("halves", 2, 3, 16)
    left = client.attend_query("left", 0, q, with_lse=True)
    right = client.attend_query("right", 0, q, with_lse=True)
    out, _ = merge(*left, *right)
    np.testing.assert_allclose(out, reference(K, V, Dense(q=q)).out, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        lambda a: a,
        lambda a: a.astype(np.float16),
        lambda a: a.astype(ml_dtypes.bfloat16),
        lambda a: np.asfortranarray(a),
        lambda a: mx.array(a),
        lambda a: mx.array(a).astype(mx.bfloat16),
        lambda a: a.tolist(),
    ],
    ids=["f32", "f16", "bf16", "strided", "mlx", "mlx bf16", "list"],
)
def test_no_type_of_array_is_taken_for_other_numbers(
    client: Client, kind: Callable[[Array], Any]
) -> None:
    k, v, q = (kind(array) for array in (K, V, normal("types", 2, 2, 16)))
    exact = [
        np.asarray(a.astype(mx.float32) if isinstance(a, mx.array) else a, np.float32)
        for a in (k, v, q)
    ]
    client.attend_store("types", 0, k, v)
    got = client.attend_query("types", 0, q)
    want = reference(exact[0], exact[1], Dense(q=exact[2])).out
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_an_answer_larger_than_grpcs_own_limit_arrives(client: Client, lane: str) -> None:
    client.attend_store("large", 0, K, V)
    q = normal("large", 2, 300_000, 16)  # 38 MB
    got = client.attend_query("large", 0, q, timeout_s=60)
    some = slice(0, None, 3_000)
    want = reference(K, V, Dense(q=q[:, some])).out
    np.testing.assert_allclose(got[:, some], want, rtol=0, atol=1e-5)


# Entries


def store_prefix(client: Client, namespace: str) -> None:
    client.store(namespace, layers=[(K[:, :40], V[:, :40])] * 2, token_ids=IDS, model="m")


def test_a_stored_prefix_is_attended_to_by_name(client: Client, lane: str) -> None:
    store_prefix(client, f"by name {lane}")
    warmed = client.warm(f"by name {lane}", session=f"s {lane}", heads=8, head_dim=16)
    assert warmed == (2, 0, 2 * 2 * 2 * 40 * 16 * 4)
    q = normal("named", 2, 1, 16)
    want = reference(K[:, :40], V[:, :40], Dense(q=q)).out
    np.testing.assert_allclose(client.attend_query(f"s {lane}", 1, q), want, rtol=0, atol=1e-5)


def test_what_is_said_of_entries_is_true(client: Client) -> None:
    store_prefix(client, "entries")
    assert client.warm("entries", layers=[1]).layers == 1
    missing, resident = client.attend_lookup("entries", [0, 1])
    assert missing == (0, AttendState.MISSING, 0, 0, 0)
    assert resident == (1, AttendState.RESIDENT, 2, 40, 16)
    assert client.attend_drop("entries", 0) == 0
    assert client.attend_drop("entries", 1) == 1
    assert client.attend_drop("entries") == 0
    with pytest.raises(NotStored) as caught:
        client.attend_query("entries", 1, normal("q", 2, 1, 16))
    assert caught.value.reason == "MISSING"


class ByNamespace(AttendByNamespace):
    """Attention by namespace, of no model."""

    def __init__(self, client: Client) -> None:
        self._client, self.residency = client, Residency(client)


def test_a_name_that_is_taken_anew_before_its_rows_are_resident_means_the_new_ones(
    server: ServerProcess, client: Client
) -> None:
    def replace() -> None:
        layers = [(V[:, :40], K[:, :40])] * 2
        client.store("taken", layers=layers, token_ids=IDS, model="m", replace=True)

    store_prefix(client, "taken")
    q = normal("taken", 2, 1, 16)
    with Between(server.address) as between:
        between.happens = iter([replace] * 2)
        got = ByNamespace(between).attend_query("taken", 1, q)
        want = reference(V[:, :40], K[:, :40], Dense(q=q)).out
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
        between.happens = iter([replace] * 2)
        assert ByNamespace(between).warm("taken") == 2


def test_rows_of_another_generation_are_not_made_resident(client: Client) -> None:
    store_prefix(client, "pinned")
    (prefix,) = client.list("pinned")
    client.warm("pinned", generation=prefix.generation, rows=30)
    assert client.attend_lookup("pinned", [0])[0].rows == 30
    client.store(
        "pinned", layers=[(V[:, :40], K[:, :40])] * 2, token_ids=IDS[::-1], model="m", replace=True
    )
    with pytest.raises(GenerationDiffers):
        client.warm("pinned", generation=prefix.generation)
    q = normal("pinned", 2, 1, 16)
    want = reference(K[:, :30], V[:, :30], Dense(q=q)).out
    np.testing.assert_allclose(client.attend_query("pinned", 1, q), want, rtol=0, atol=1e-5)


def test_what_cannot_be_made_resident_says_why(client: Client) -> None:
    with pytest.raises(NotStored):
        client.warm("nothing")
    store_prefix(client, "shape")
    for field, wanted in (("heads", {"heads": 3}), ("layers", {"layers": [0, 9]})):
        with pytest.raises(InvalidRequest) as caught:
            client.warm("shape", **wanted)
        assert caught.value.field == field
    assert client.attend_drop("shape") == 0


@pytest.mark.parametrize(
    ("field", "ask"),
    [
        ("data", lambda c: c.attend_query("s", 0, normal("q", 3, 1, 16))),
        ("data", lambda c: c.attend_query("s", 0, normal("q", 2, 0, 16))),
        ("data", lambda c: c.attend_query("s", 0, normal("q", 2, 1, 8))),
        ("q", lambda c: c.attend_query("s", 0, normal("q", 2))),
        ("q", lambda c: c.attend_query("s", 0, "words")),
        ("q", lambda c: c.attend_query("s", 0, [["1"], ["2"]])),
        ("layer", lambda c: c.attend_query("s", -1, Q)),
        ("head_map", lambda c: c.attend_query("s", 0, Q, head_map=[300, 0])),
        ("head_map", lambda c: c.attend_query("s", 0, Q, head_map=4)),
        ("head_map", lambda c: c.attend_query("s", 0, Q, head_map=[0.0, 1.0])),
        ("window", lambda c: c.attend_query("s", 0, Q, window=-1)),
        ("window", lambda c: c.attend_query("s", 0, Q, window=1.5)),
        ("scale", lambda c: c.attend_query("s", 0, Q, scale="1")),
        ("head_map", lambda c: c.attend_query("s", 0, normal("q", 2, 1, 16), head_map=[2, 0])),
        ("scale", lambda c: c.attend_query("s", 0, normal("q", 2, 1, 16), scale=0)),
        ("session", lambda c: c.attend_query("", 0, normal("q", 2, 1, 16))),
        ("suffix_k", lambda c: c.attend_query_fused("s", 0, normal("q", 2, 1, 16), K[0], V[0])),
        (
            "suffix_k",
            lambda c: c.attend_query_fused("s", 0, normal("q", 2, 1, 16), K[:1], V[:1]),
        ),
        ("indices", lambda c: c.attend_query_sparse("s", 0, normal("q", 2, 1, 16), [[0.5], [1]])),
        ("indices", lambda c: c.attend_query_sparse("s", 0, normal("q", 2, 1, 16), [[0]])),
        (
            "counts",
            lambda c: c.attend_query_sparse("s", 0, normal("q", 2, 1, 16), [[0], [1]], [2, 1]),
        ),
        ("counts", lambda c: c.attend_query_sparse("s", 0, Q, [[0], [1]], ["a", "b"])),
        ("counts", lambda c: c.attend_query_sparse("s", 0, Q, [[0], [1]], [1, -1])),
        ("counts", lambda c: c.attend_query_sparse("s", 0, Q, [[0], [1]], [1, 0.5])),
        ("counts", lambda c: c.attend_query_sparse("s", 0, Q, [[0], [1]], [1])),
        ("blocks", lambda c: c.attend_query_sparse_auto("s", 0, normal("q", 2, 1, 16), 8, 0)),
        ("blocks", lambda c: c.attend_query_sparse_auto("s", 0, Q, 8, 1.5)),
        (
            "block_rows",
            lambda c: c.attend_query_sparse_auto("s", 0, normal("q", 2, 1, 16), -1, 1),
        ),
        (
            "selector",
            lambda c: c.attend_query_sparse_auto(
                "s", 0, normal("q", 2, 1, 16), 8, 1, selector="best"
            ),
        ),
        ("selector", lambda c: c.attend_query_sparse_auto("s", 0, Q, 8, 1, selector=["mean"])),
        ("layer", lambda c: c.attend_store("s", -1, K, V)),
        ("layer", lambda c: c.attend_store("s", 2**32, K, V)),
        ("layer", lambda c: c.attend_store("s", "0", K, V)),
        ("layer", lambda c: c.attend_drop("s", -1)),
        ("layers", lambda c: c.attend_lookup("s", [-1])),
        ("layers", lambda c: c.attend_lookup("s", 0)),
        ("layers", lambda c: c.warm("s", layers=[0.5])),
        ("heads", lambda c: c.warm("s", heads=-1)),
        ("k", lambda c: c.attend_store("s", 0, K * 1j, V)),
        ("v", lambda c: c.attend_store("s", 0, K, mx.array(V * 1j))),
        ("k", lambda c: c.attend_store("s", 0, K, V[:, :3])),
        ("k", lambda c: c.attend_store("s", 0, K[0], V[0])),
        ("rows", lambda c: c.attend_store("s", 0, K[:, :0], V[:, :0])),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    client: Client, lane: str, field: str, ask: Callable[[Client], object]
) -> None:
    client.attend_store("s", 0, K, V)
    with pytest.raises(InvalidRequest) as caught:
        ask(client)
    assert caught.value.field == field
    q = normal("q", 2, 1, 16)
    want = reference(K, V, Dense(q=q)).out
    np.testing.assert_allclose(client.attend_query("s", 0, q), want, rtol=0, atol=1e-5)


def test_a_cold_entry_is_told_from_a_missing_one_and_warmed_where_asked(
    start_server: Callable[..., ServerProcess], lane: str
) -> None:
    server = start_server("--resident-budget", str(2 * 2 * 2 * 40 * 16 * 4))
    with Client(server.address) as client:
        store_prefix(client, "p")
        client.warm("p")
        with pytest.raises(OverBudget):
            client.attend_store("s", 0, np.zeros((2, 81, 16)), np.zeros((2, 81, 16)))
        client.attend_store("other", 0, K[:, :40], V[:, :40])
        assert client.attend_lookup("p", [0])[0].state is AttendState.COLD
        q = normal("q", 2, 1, 16)
        with pytest.raises(Cold):
            client.attend_query("p", 0, q)
        want = reference(K[:, :40], V[:, :40], Dense(q=q)).out
        got = client.attend_query("p", 0, q, warm=True)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
        assert client.describe().attend_rehydrates == 1


def test_a_server_without_attend_says_so(
    start_server: Callable[..., ServerProcess], lane: str
) -> None:
    with Client(start_server("--attend", "off").address) as client:
        for ask in (
            lambda: client.attend_query("s", 0, normal("q", 2, 1, 16)),
            lambda: client.attend_store("s", 0, K, V),
            lambda: client.attend_lookup("s", [0]),
        ):
            with pytest.raises(NotSupported):
                ask()


# Streams


def ask_once(client: Client) -> None:
    q = normal("once", 2, 1, 16)
    want = reference(K, V, Dense(q=q)).out
    np.testing.assert_allclose(client.attend_query("s", 0, q), want, rtol=0, atol=1e-5)


def test_threads_do_not_get_each_others_answers(client: Client) -> None:
    wrong: list[BaseException] = []
    for number in range(8):
        client.attend_store(f"thread{number}", 0, K + number, V * number)

    def work(number: int) -> None:
        try:
            for turn in range(30):
                q = normal((number, turn), 2, 1, 16)
                got = client.attend_query(f"thread{number}", 0, q)
                want = reference(K + number, V * number, Dense(q=q)).out
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_server_that_was_restarted_is_asked_again(
    start_server: Callable[..., ServerProcess], lane: str
) -> None:
    server = start_server()
    with Client(server.address) as client:
        client.attend_store("s", 0, K, V)
        ask_once(client)
        server.kill()
        with pytest.raises(Unavailable):
            client.attend_query("s", 0, normal("once", 2, 1, 16))
        start_server()
        client.attend_store("s", 0, K, V)
        ask_once(client)
        assert client.attend_lane == lane


def test_a_restart_between_two_queries_is_not_an_error(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with Client(server.address) as client:
        store_prefix(client, "p")
        client.warm("p")
        q = normal("once", 2, 1, 16)
        before = client.attend_query("p", 0, q)
        assert server.stop() == 0
        start_server()
        with pytest.raises(NotStored):  # it holds nothing yet, and says so: the stream was renewed
            client.attend_query("p", 0, q)
        client.warm("p")
        np.testing.assert_array_equal(client.attend_query("p", 0, q), before)
        assert client.attend_lane == "stream"


def test_a_stream_that_the_server_cut_off_is_renewed(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--stall-ms", "1")
    with Client(server.address) as client:
        client.attend_store("s", 0, K, V)
        ask_once(client)
        eventually(lambda: any(entry["event"] == "streams cut off" for entry in server.log))
        ask_once(client)
        assert client.attend_lane == "stream"


def test_a_server_that_does_not_answer_costs_no_more_than_the_deadline(
    start_server: Callable[..., ServerProcess], lane: str
) -> None:
    server = start_server()
    with Client(server.address, timeout_s=1.0) as client:
        client.attend_store("s", 0, K, V)
        ask_once(client)
        with server.frozen(), pytest.raises(DeadlineExceeded):
            client.attend_query("s", 0, normal("once", 2, 1, 16))
        ask_once(client)
        assert client.attend_lane == lane


def test_a_server_without_a_stream_to_spare_answers_calls(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--streams-max", "1")
    with Client(server.address) as first, Client(server.address) as second:
        first.attend_store("s", 0, K, V)
        ask_once(first)
        ask_once(second)
        assert (first.attend_lane, second.attend_lane) == ("stream", "unary")
        second.attend_store("s", 0, K, V)  # what waits for queries takes nobody else's place


def test_streams_that_nobody_wants_are_given_back(
    start_server: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    def watches() -> int:
        return [thread.name for thread in threading.enumerate()].count("pion-attend")

    before = watches()
    monkeypatch.setattr(attend_streams, "IDLE_S", 0.1)
    server = start_server("--streams-max", "1")
    with Client(server.address) as first, Client(server.address) as second:
        first.attend_store("s", 0, K, V)
        ask_once(first)

        def has_a_stream() -> bool:
            ask_once(second)
            return second.attend_lane == "stream"

        eventually(has_a_stream)
        eventually(lambda: watches() <= before)


def test_more_sessions_than_streams_do_not_take_all_streams(
    start_server: Callable[..., ServerProcess],
) -> None:
    """A session has a stream of its own, because a mesh may send it elsewhere; the oldest goes."""
    server = start_server("--streams-max", str(attend_streams.IDLE_STREAMS_MAX + 1))
    with Client(server.address) as client, Client(server.address) as other:
        for number in range(30):
            client.attend_store(f"s{number}", 0, K, V)
        for number in range(30):
            client.attend_query(f"s{number}", 0, normal("q", 2, 1, 16))

        def one_is_left() -> bool:
            other.attend_query("s0", 0, normal("q", 2, 1, 16))
            return other.attend_lane == "stream"

        eventually(one_is_left)


def test_a_closed_client_asks_nothing(server: ServerProcess) -> None:
    client = Client(server.address)
    client.attend_store("closed", 0, K, V)
    client.attend_query("closed", 0, normal("q", 2, 1, 16))
    client.close()
    with pytest.raises(ClientClosed):
        client.attend_query("closed", 0, normal("q", 2, 1, 16))


def test_closing_ends_a_query_that_waits(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server()
    client = Client(server.address, timeout_s=60)
    client.attend_store("s", 0, K, V)
    ask_once(client)
    raised: list[BaseException] = []
    asking = threading.Event()

    def ask() -> None:
        asking.set()
        try:
            client.attend_query("s", 0, normal("once", 2, 1, 16))
        except BaseException as error:
            raised.append(error)

    with server.frozen():
        thread = threading.Thread(target=ask)
        thread.start()
        assert asking.wait(10)
        client.close()
        thread.join(30)
        assert not thread.is_alive()
    assert [type(error) for error in raised] == [ClientClosed]


FORKING = """
    import os, sys
    import numpy as np
    from pion_client import Client
    from pion_client.errors import Forked

    client = Client(sys.argv[1], timeout_s=5)
    q = np.zeros((2, 1, 16), np.float32)
    client.attend_query("fork", 0, q)
    if not (child := os.fork()):
        try:
            client.attend_query("fork", 0, q)
        except Forked:
            os._exit(7)
        os._exit(8)
    _, status = os.waitpid(child, 0)
    client.attend_query("fork", 0, q)  # the parent's stream is whole
    assert client.attend_lane == "stream"
    print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_neither_hangs_nor_takes_the_parents_stream(
    server: ServerProcess, client: Client
) -> None:
    import subprocess
    import textwrap

    client.attend_store("fork", 0, K, V)
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKING), server.address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[-1] in ("7", "8")


def test_no_environment_of_another_lane_is_obeyed(client: Client) -> None:
    assert os.environ.get(NO_STREAM) is None
    client.attend_store("env", 0, K, V)
    client.attend_query("env", 0, normal("q", 2, 1, 16))
    assert client.attend_lane == "stream"
