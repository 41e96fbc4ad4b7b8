"""The rows about attention over RESP and over the binary lane beside it.

The client here is a socket and as little else as possible: it frames a query and looks at the bytes of
the answer. The first token is that of `pion-vllm-mlx`, unmodified. The one decision: as for gRPC, a
query's cost is its round trip minus the computation, which this process does in the same rounds.
"""

import contextlib
import importlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import threadpoolctl

from pion_grpc.cli.bench.attend import (
    DIMS,
    FIRST_TOKENS,
    ROWS,
    Entry,
    agree,
    bare,
    entry_of,
    ids_of,
    median,
    microseconds,
    while_storing,
)
from pion_grpc.cli.bench.measuring import Context, Side, timed
from pion_grpc.cli.bench.models import QUESTION_TOKENS, Loaded, ModelProcess
from pion_grpc.cli.bench.processes import PeerMissing, Server
from pion_grpc.cli.bench.results import Result, at_most, milliseconds

QUERIES = 10
"""Queries for K and V that are sent once."""


def calls(context: Context) -> list[Result]:
    """One query over RESP and over the lane, also during a store; K and V sent once, and each time."""
    with _attending(context) as (address, resp, lane):
        results = []
        for dim in DIMS:
            entry = entry_of(ROWS, dim)
            results += _beyond(context, resp, lane, entry)
            results += _sent_once(context, resp, entry)
        return [*results, _while_storing(context, address, resp, entry_of(ROWS, DIMS[0]))]


def first_token(context: Context) -> list[Result]:
    """A model's first token with `pion-vllm-mlx`, by lane, against its fetching the rows, and cold.

    Raises:
        PeerMissing: it is not installed.
    """
    try:
        importlib.import_module("pion_vllm_mlx")
    except ImportError:
        raise PeerMissing("pion-vllm-mlx is not installed: pip install pion-vllm-mlx") from None
    lengths = FIRST_TOKENS[:1] if context.quick else FIRST_TOKENS
    results = []
    with Server(context.scratch / "data", "--resp", "127.0.0.1:0") as server:
        port = int(resp_address(server).rpartition(":")[2])
        with (
            context.waiting("the first process prefills and stores", len(lengths)) as advance,
            ModelProcess(server.address) as first,
        ):
            for length in lengths:
                first.do(_store, port, ids_of(length))
                advance()
        with ModelProcess(server.address) as second:
            for length in lengths:
                results += _of_length(context, second, port, length)
    return results


# Of `calls`


class _Resp:
    """A client of one command at a time, whose reply is a line or a bulk string."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = _connected(host, int(port))
        self._file = self._socket.makefile("rb", 1 << 16)

    def call(self, *words: bytes | str | int) -> bytes:
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        framed = [b"*%d\r\n" % len(parts)]
        for part in parts:
            framed += (b"$%d\r\n" % len(part), part, b"\r\n")
        self._socket.sendall(b"".join(framed))
        line = self._file.readline()
        if line[:1] != b"$":
            assert line[:1] == b"+", line
            return line
        body: bytes = self._file.read(int(line[1:]) + 2)
        return body[:-2]

    def store(self, entry: Entry, session: str = "bench") -> None:
        sides = entry.k.tobytes(), entry.v.tobytes()
        self.call("ATTEND.PREFIX.STORE", session, 0, *entry.k.shape, *sides)

    def query(self, entry: Entry) -> bytes:
        heads, rows, dim = entry.k.shape
        return self.call("ATTEND.PREFIX.QUERY", "bench", 0, heads, dim, rows, entry.q.tobytes())

    def query_fused(self, entry: Entry) -> bytes:
        heads, _, dim = entry.k.shape
        q, head_map = entry.q.tobytes(), bytes(range(heads))
        return self.call(
            "ATTEND.PREFIX.QUERY_FUSED", "bench", 0, heads, dim, 0, heads, q, b"", b"", head_map
        )

    def query_batch(self, entry: Entry) -> bytes:
        tensors = entry.q.tobytes(), entry.k.tobytes(), entry.v.tobytes()
        return self.call("ATTEND.QUERYBATCH", *entry.k.shape, 1, *tensors)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class _Lane:
    """A client of the binary lane; see `resp/binary_lane.py` for the frames."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = _connected(host, int(port) + 1)
        self._file = self._socket.makefile("rb", 1 << 16)

    def query_fused(self, entry: Entry) -> bytes:
        heads, _, dim = entry.k.shape
        shape = struct.pack("<H5sHHHHII", 5, b"bench", 0, heads, dim, heads, entry.q.shape[1], 0)
        asked = shape + entry.q.tobytes() + bytes(range(heads))
        self._socket.sendall(struct.pack("<HBI", 0xCA5E, 0x24, len(asked)) + asked)
        _, status, size = struct.unpack("<HBI", self._file.read(7))
        assert status == 0, status
        body: bytes = self._file.read(size)
        return body

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def _beyond(context: Context, resp: _Resp, lane: _Lane, entry: Entry) -> list[Result]:
    resp.store(entry)
    alone = bare(entry)
    ask: dict[str, Callable[[], bytes]] = {
        "RESP": partial(resp.query_fused, entry),
        "binary lane": partial(lane.query_fused, entry),
    }
    for answer in (resp.query(entry), *(query() for query in ask.values())):
        agree(np.frombuffer(answer, "<f4").reshape(entry.q.shape), alone())
    sides: dict[str, Side] = {name: partial(median, query) for name, query in ask.items()}
    samples = context.interleaved({"computation": partial(median, alone), **sides}, rounds=15)
    results, beyond = [], {}
    for name in ask:
        what = f"query {entry.shape_text}, {name}"
        trips = microseconds(name, samples[name])
        computation = microseconds("computation alone", samples["computation"])
        results.append(Result(what, "µs", trips, computation))
        rounds = zip(samples[name], samples["computation"], strict=True)
        beyond[name] = microseconds(name, [whole - inner for whole, inner in rounds])
        bound = at_most(200, of_ratio=False)
        what = f"{what}: beyond the computation"
        results.append(Result(what, "µs", beyond[name], None, bound))
    what = f"query {entry.shape_text}: the lane's beyond against RESP's"
    results.append(Result(what, "µs", beyond["binary lane"], beyond["RESP"], at_most(0.9)))
    return results


def _sent_once(context: Context, resp: _Resp, entry: Entry) -> list[Result]:
    resp.store(entry)
    assert resp.query(entry) == resp.query_batch(entry)

    def queries() -> None:
        for _ in range(QUERIES):
            resp.query(entry)

    def once() -> None:
        resp.store(entry)
        queries()

    def each() -> None:
        for _ in range(QUERIES):
            resp.query_batch(entry)

    samples = context.interleaved(
        {name: partial(timed, action) for name, action in (
            ("once", once), ("queries", queries), ("each", each),
        )},
        rounds=11,
    )  # fmt: skip
    each_time = milliseconds(f"{QUERIES} × QUERYBATCH", samples["each"])
    what = f"{QUERIES} queries over RESP, {entry.shape_text}"
    sent = milliseconds("stored and asked", samples["once"])
    asked = milliseconds("asked", samples["queries"])
    return [
        Result(f"{what}: K and V sent once", "ms", sent, each_time, at_most(0.25)),
        Result(f"{what}: K and V there already", "ms", asked, each_time),
    ]


def _while_storing(context: Context, address: str, resp: _Resp, entry: Entry) -> Result:
    def store(large: Entry, uploads: int) -> None:
        with contextlib.closing(_Resp(address)) as other:
            for _ in range(uploads):
                other.store(large, "large")

    resp.store(entry)
    what = f"query {entry.shape_text}, RESP"
    return while_storing(context, what, partial(resp.query, entry), store)


# Of `first_token`

Way = Literal["binary lane", "RESP", "rows fetched", "cold"]
WAYS: tuple[Way, ...] = ("binary lane", "RESP", "rows fetched", "cold")


class _First(NamedTuple):
    seconds: float
    token: int
    calls: int
    call_ms: float


def _of_length(context: Context, second: ModelProcess, port: int, length: int) -> list[Result]:
    got: dict[Way, _First] = {}

    def measure(way: Way) -> float:
        got[way] = second.do(_first, port, way, ids_of(length), ids_of(QUESTION_TOKENS))
        return got[way].seconds

    samples = context.interleaved(
        {way: partial(measure, way) for way in WAYS}, rounds=7, warm_ups=2, rarely={"cold": 1}
    )
    wrong = [way for way in WAYS if got[way].token != got["cold"].token]
    assert not wrong, f"other tokens than cold: {wrong}"
    sides = {way: milliseconds(way, values) for way, values in samples.items()}
    what = f"first token over {length:,} tokens, SmolLM2-135M, pion-vllm-mlx"
    results = []
    for way in ("binary lane", "RESP"):
        note = f"{got[way].calls} calls of {got[way].call_ms / got[way].calls:.2f} ms"
        peer = sides["rows fetched"]
        results.append(Result(f"{what}: {way}", "ms", sides[way], peer, note=note))
    results.append(Result(f"{what}: RESP, against cold", "ms", sides["RESP"], sides["cold"]))
    return results


def _prompt_cache(loaded: Loaded, port: int, way: Way) -> Any:
    """The process's prompt cache for a lane, made once: it reads the environment only then."""
    if way not in loaded.prompt_caches:
        os.environ["PION_PROMPT_CACHE_NO_INPROC"] = "1"
        os.environ["PION_PROMPT_CACHE_NO_BINARY"] = str(int(way != "binary lane"))
        client: Any = importlib.import_module("pion_vllm_mlx")
        loaded.prompt_caches[way] = client.PionPromptCache(
            loaded.model, port=port, stage2=way != "rows fetched"
        )
    return loaded.prompt_caches[way]


def _store(loaded: Loaded, port: int, ids: Sequence[int]) -> None:
    """Runs in the model process."""
    _prompt_cache(loaded, port, "RESP").get_or_prefill(ids, str(len(ids)))


def _first(
    loaded: Loaded, port: int, way: Way, ids: Sequence[int], question: Sequence[int]
) -> _First:
    """Runs in the model process."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from pion_grpc.cli.decode import greedy

    patch: Any = importlib.import_module("pion_vllm_mlx.mlx_lm_patch")
    patch.install_pion_attention_patch()
    prompt_cache, name = _prompt_cache(loaded, port, way), str(len(ids))
    before = prompt_cache.attend_query_calls, prompt_cache.attend_query_ms_total
    mx.clear_cache()
    started = time.perf_counter()
    rest = question
    if way == "cold":
        cache, rest = make_prompt_cache(loaded.model), [*ids, *question]
    elif way == "rows fetched":
        cache = prompt_cache.get_or_prefill(ids, name)
    else:
        cache = patch.make_pion_prompt_cache(loaded.model, name, prompt_cache, len(ids))
    token = greedy(loaded.model, rest, cache, 1).ids[0]
    seconds = time.perf_counter() - started
    assert prompt_cache.misses == 0, "what was stored is not found"
    assert (prompt_cache._binary is not None) is (way == "binary lane"), "another lane answered"
    asked = prompt_cache.attend_query_calls - before[0]
    return _First(seconds, token, asked, prompt_cache.attend_query_ms_total - before[1])


# Of both


@contextlib.contextmanager
def _attending(context: Context) -> Iterator[tuple[str, _Resp, _Lane]]:
    """A server that computes on NumPy, connections to it, and a BLAS as it has it."""
    flags = ("--attend", "numpy", "--resp", "127.0.0.1:0")
    with contextlib.ExitStack() as stack:
        stack.enter_context(threadpoolctl.threadpool_limits(1, "blas"))
        address = resp_address(stack.enter_context(Server(context.scratch / "data", *flags)))
        yield (
            address,
            stack.enter_context(contextlib.closing(_Resp(address))),
            stack.enter_context(contextlib.closing(_Lane(address))),
        )


def resp_address(server: Server) -> str:
    """Returns where a server answers over RESP."""
    address: str = json.loads(server.ready_line)["resp"]
    return address


def _connected(host: str, port: int) -> socket.socket:
    connected = socket.create_connection((host, port))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected
