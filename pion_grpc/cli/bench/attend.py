"""The rows about attention on the server: what a query costs and saves, and a model's first token.

The one decision: a query's cost is its round trip minus the computation itself, which this process does
with the same backend over the same arrays, in the same rounds. BLAS has one thread on both sides, as it
has in the server.
"""

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import threadpoolctl

from pion_client import Client
from pion_grpc.backends import Dense, Name, create
from pion_grpc.cli.bench.measuring import Context, Side, timed
from pion_grpc.cli.bench.models import QUESTION_TOKENS, Loaded, ModelProcess
from pion_grpc.cli.bench.processes import Server
from pion_grpc.cli.bench.results import Result, Samples, at_most, milliseconds

HEADS, ROWS = 8, 2_048
DIMS = (64, 128)
CALLS = 100
"""Calls per sample; the sample is their median."""
LONG_ROWS = 65_536
BATCH = 512
LAYERS, WIDTH = 16, 512
FIRST_TOKENS = (256, 1_024, 2_048)
NO_STREAM = "PION_PROMPT_CACHE_NO_STREAM"
NO_INPROC = "PION_PROMPT_CACHE_NO_INPROC"

Array = np.ndarray


class Entry(NamedTuple):
    """An attend entry, and a query of it."""

    k: Array
    v: Array
    q: Array

    @property
    def shape_text(self) -> str:
        """Its shape, as results name it."""
        heads, rows, dim = self.k.shape
        return f"H={heads} N={rows:,} D={dim} M={self.q.shape[1]}"


def calls(context: Context) -> list[Result]:
    """One query on a stream and as a call of its own, and while another client stores."""
    results = []
    with _attending(context) as (server, client):
        for dim in DIMS:
            entry = entry_of(ROWS, dim)
            client.attend_store("bench", 0, entry.k, entry.v)
            alone = bare(entry)
            agree(client.attend_query("bench", 0, entry.q), alone())
            ask = _asking(client, entry)
            samples = context.interleaved(
                {
                    "computation": partial(median, alone),
                    "stream": partial(median, ask),
                    "unary": partial(_unary, partial(median, ask)),
                },
                rounds=15,
            )
            computation = microseconds("computation alone", samples["computation"])
            for lane in ("stream", "unary"):
                beyond = tuple(
                    whole - inner
                    for whole, inner in zip(samples[lane], samples["computation"], strict=True)
                )
                what = f"query {entry.shape_text}, {lane}"
                bound = at_most(600, of_ratio=False) if lane == "stream" else None
                trip = microseconds(lane, samples[lane])
                results.append(Result(what, "µs", trip, computation))
                results.append(
                    Result(
                        f"{what}: beyond the computation",
                        "µs",
                        microseconds(lane, beyond),
                        None,
                        bound,
                    )
                )
        results.append(_while_storing(context, server, client))
    return results


def bulk(context: Context) -> list[Result]:
    """What residency saves (K and V sent once, many queries at once, few blocks of many), and its
    price."""
    with _attending(context) as (_, client):
        results = [
            measure(context, client, dim)
            for measure in (_sent_once, _at_once, _few_blocks)
            for dim in DIMS
        ]
        return [*results, *_made_resident(context, client)]


def backends(context: Context) -> list[Result]:
    """Each backend's computation, against the same one without the backend."""
    results = []
    with threadpoolctl.threadpool_limits(1, "blas"):
        for dim in DIMS:
            entry = entry_of(ROWS, dim)
            made_bare: dict[Name, Callable[[], Array]] = {
                "numpy": _plain_numpy(entry),
                "mlx": _plain_mlx(entry),
            }
            for name, plain in made_bare.items():
                ours = bare(entry, name)
                agree(ours(), plain())
                samples = context.interleaved(
                    {
                        "backend": partial(median, ours),
                        "bare": partial(median, plain),
                    },
                    rounds=15,
                )
                results.append(
                    Result(
                        f"backend {name}, {entry.shape_text}",
                        "µs",
                        microseconds("attend", samples["backend"]),
                        microseconds("the same made bare", samples["bare"]),
                        at_most(1.1),
                    )
                )
    return results


def first_token(context: Context) -> list[Result]:
    """A model's first token over a prefix on the server, by lane, against fetching it, and cold."""
    lengths = FIRST_TOKENS[:1] if context.quick else FIRST_TOKENS
    results = []
    with Server(context.scratch / "data") as server:
        with (
            context.waiting("the first process prefills and stores", len(lengths)) as advance,
            ModelProcess(server.address) as first,
        ):
            for length in lengths:
                first.do(_store_prefix, ids_of(length))
                advance()
        with ModelProcess(server.address) as second:
            for length in lengths:
                results += _of_length(context, second, length)
    return results


# Of `calls`


def while_storing(
    context: Context, what: str, ask: Callable[[], object], store: Callable[[Entry, int], None]
) -> Result:
    """A query's p99 while another client stores 64 MiB again and again, 1 GB in all."""
    alone = [timed(ask) for _ in range(1_000)]
    large = entry_of(16_384, 64)
    uploads = 4 if context.quick else 16
    thread = threading.Thread(target=store, args=(large, uploads))
    busy = []
    with context.waiting("queries while another client stores"):
        thread.start()
        while thread.is_alive():
            busy.append(timed(ask))
        thread.join()
    what = f"{what} while another client stores {uploads * 64} MiB: p99"
    sides = microseconds("meanwhile", busy), microseconds("alone", alone)
    return Result(what, "µs", *sides, fraction=0.99)


def _while_storing(context: Context, server: Server, client: Client) -> Result:
    entry = entry_of(ROWS, 64)
    client.attend_store("bench", 0, entry.k, entry.v)

    def store(large: Entry, uploads: int) -> None:
        with Client(server.address) as other:
            for _ in range(uploads):
                other.attend_store("large", 0, large.k, large.v)

    return while_storing(context, f"query {entry.shape_text}", _asking(client, entry), store)


# Of `bulk`


def _sent_once(context: Context, client: Client, dim: int) -> Result:
    entry = entry_of(ROWS, dim)

    def store() -> None:
        client.attend_store("bench", 0, entry.k, entry.v)

    def once() -> None:
        store()
        for _ in range(10):
            client.attend_query("bench", 0, entry.q)

    def each() -> None:
        for _ in range(10):
            store()
            client.attend_query("bench", 0, entry.q)

    samples = context.interleaved(
        {"once": lambda: timed(once), "each": lambda: timed(each)}, rounds=11
    )
    return Result(
        f"K and V sent once and 10 queries, {entry.shape_text}",
        "ms",
        milliseconds("sent once", samples["once"]),
        milliseconds("sent with every query", samples["each"]),
        at_most(0.25),
    )


def _at_once(context: Context, client: Client, dim: int) -> Result:
    entry = entry_of(ROWS, dim, queries=BATCH)
    client.attend_store("bench", 0, entry.k, entry.v)
    single = [np.ascontiguousarray(entry.q[:, n : n + 1]) for n in range(BATCH)]
    apart = [client.attend_query("bench", 0, q) for q in single]
    agree(client.attend_query("bench", 0, entry.q), np.concatenate(apart, axis=1))
    samples = context.interleaved(
        {
            "once": lambda: timed(lambda: client.attend_query("bench", 0, entry.q)),
            "apart": lambda: timed(lambda: [client.attend_query("bench", 0, q) for q in single]),
        },
        rounds=9,
    )
    return Result(
        f"{BATCH} queries at once, {entry.shape_text}",
        "ms",
        milliseconds("one call", samples["once"]),
        milliseconds(f"{BATCH} calls", samples["apart"]),
        at_most(1 / 3),
    )


def _few_blocks(context: Context, client: Client, dim: int) -> Result:
    entry = entry_of(LONG_ROWS, dim)
    client.attend_store("long", 0, entry.k, entry.v)
    samples = context.interleaved(
        {
            "blocks": lambda: median(
                lambda: client.attend_query_sparse_auto("long", 0, entry.q, 64, 8), 20
            ),
            "dense": lambda: median(lambda: client.attend_query("long", 0, entry.q), 5),
        },
        rounds=9,
    )
    client.attend_drop("long")
    return Result(
        f"8 blocks of 64, {entry.shape_text}",
        "ms",
        milliseconds("sparse-auto", samples["blocks"]),
        milliseconds("dense", samples["dense"]),
        at_most(0.1),
    )


def _made_resident(context: Context, client: Client) -> list[Result]:
    rng = np.random.default_rng(1)
    shape = (WIDTH // 64, ROWS, 64)
    layers = [
        (rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32))
        for _ in range(LAYERS)
    ]
    client.store("bench", layers=layers, token_ids=range(ROWS), model="bench")
    entry = entry_of(ROWS, 64)

    def warm() -> float:
        client.attend_drop("bench")
        elapsed = timed(lambda: client.warm("bench"))
        assert [e.rows for e in client.attend_lookup("bench", range(LAYERS))] == [ROWS] * LAYERS
        return elapsed

    samples = context.interleaved(
        {
            "warm": warm,
            "upload": lambda: timed(lambda: client.attend_store("upload", 0, entry.k, entry.v)),
        },
        rounds=9,
    )
    mib = 2 * entry.k.nbytes >> 20
    return [
        Result(
            f"{LAYERS} layers × {ROWS:,} × {WIDTH} made resident from a prefix",
            "ms",
            milliseconds("from_prefix", samples["warm"]),
        ),
        Result(f"{mib} MiB uploaded", "ms", milliseconds("upload", samples["upload"])),
    ]


# Of `first_token`

Way = Literal["same process", "stream", "unary", "local cache", "export", "cold"]
WAYS: tuple[Way, ...] = ("same process", "stream", "unary", "local cache", "export", "cold")


class _First(NamedTuple):
    seconds: float
    token: int
    calls: int
    call_ms: float


def _of_length(context: Context, second: ModelProcess, length: int) -> list[Result]:
    ids, question = ids_of(length), ids_of(QUESTION_TOKENS)
    got: dict[Way, _First] = {}

    def side(way: Way) -> Side:
        def measure() -> float:
            got[way] = second.do(_first, way, ids, question)
            return got[way].seconds

        return measure

    samples = context.interleaved(
        {way: side(way) for way in WAYS}, rounds=7, warm_ups=2, rarely={"cold": 1}
    )
    sides = {way: milliseconds(way, values) for way, values in samples.items()}
    what = f"first token over {length:,} tokens, SmolLM2-135M"
    wrong = [way for way in WAYS if got[way].token != got["cold"].token]
    assert not wrong, f"other tokens than cold: {wrong}"
    results = [
        Result(
            f"{what}: same process", "ms", sides["same process"], sides["local cache"], at_most(1.1)
        )
    ]
    for way in ("stream", "unary"):
        note = f"{got[way].calls} calls of {got[way].call_ms / got[way].calls:.2f} ms"
        results.append(Result(f"{what}: {way}", "ms", sides[way], sides["export"], note=note))
    results.append(Result(f"{what}: stream, against cold", "ms", sides["stream"], sides["cold"]))
    return results


def _name(ids: Sequence[int]) -> str:
    return f"{len(ids)} tokens"


def _prompt_cache(loaded: Loaded) -> Any:
    """The process's prompt cache of the second stage, made once."""
    from pion_client.mlx import PionPromptCache

    made = loaded.prompt_caches
    if "stage2" not in made:
        made["stage2"] = PionPromptCache(
            loaded.model, address=loaded.address, stage2=True, deadline_s=60.0
        )
    return made["stage2"]


def _store_prefix(loaded: Loaded, ids: Sequence[int]) -> None:
    prompt_cache = _prompt_cache(loaded)
    prompt_cache.get_or_prefill(ids, _name(ids))
    assert prompt_cache.flush()
    assert not prompt_cache.stats()["skipped"], prompt_cache.stats()


def _first(loaded: Loaded, way: Way, ids: Sequence[int], question: Sequence[int]) -> _First:
    """Runs in the model process."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from pion_client import caches
    from pion_client.mlx import install_pion_attention_patch, make_pion_prompt_cache
    from pion_grpc.cli.decode import greedy

    prompt_cache = _prompt_cache(loaded)
    residency = prompt_cache.residency
    kept = residency.kept(_name(ids), len(ids))
    if kept is None:
        prompt_cache.rows_for(_name(ids), len(ids))  # fetches them, so that they are at hand
        kept = residency.kept(_name(ids), len(ids))
        assert kept is not None
    install_pion_attention_patch()
    os.environ[NO_INPROC] = str(int(way != "same process"))
    os.environ[NO_STREAM] = str(int(way == "unary"))
    mx.clear_cache()
    before = residency.calls, residency.call_ms
    started = time.perf_counter()
    rest = question
    if way == "cold":
        cache, rest = make_prompt_cache(loaded.model), [*ids, *question]
    elif way == "local cache":
        cache = make_prompt_cache(loaded.model)
        caches.install(cache, kept.rows, caches.expected_layout(loaded.model), len(ids))
    elif way == "export":
        cache = loaded.prompt_caches["export"].get_or_prefill(ids, _name(ids))
    else:
        cache = make_pion_prompt_cache(loaded.model, _name(ids), prompt_cache, len(ids))
    token = greedy(loaded.model, rest, cache, 1).ids[0]
    seconds = time.perf_counter() - started
    if way in ("stream", "unary"):
        assert prompt_cache.stats()["lane"] == way, prompt_cache.stats()
    return _First(seconds, token, residency.calls - before[0], residency.call_ms - before[1])


def ids_of(tokens: int) -> list[int]:
    """A prompt of this many tokens, always the same."""
    ids: list[int] = np.random.default_rng(tokens).integers(20, 49_152, tokens).tolist()
    return ids


# Of all


@contextlib.contextmanager
def _attending(context: Context) -> Iterator[tuple[Server, Client]]:
    """A server that computes on NumPy, a client, and a BLAS as the server has it."""
    with (
        threadpoolctl.threadpool_limits(1, "blas"),
        Server(context.scratch / "data", "--attend", "numpy") as server,
        Client(server.address, timeout_s=60.0) as client,
    ):
        yield server, client


def entry_of(rows: int, dim: int, queries: int = 1) -> Entry:
    """Random K, V and questions."""
    rng = np.random.default_rng(rows + dim)
    k, v = (rng.standard_normal((HEADS, rows, dim), np.float32) for _ in range(2))
    return Entry(k, v, rng.standard_normal((HEADS, queries, dim), np.float32))


def _asking(client: Client, entry: Entry) -> Callable[[], object]:
    return lambda: client.attend_query("bench", 0, entry.q)


def bare(entry: Entry, name: Name = "numpy") -> Callable[[], Array]:
    """The computation alone, by a backend; by default the one that the server has."""
    backend = create(name)
    resident, query = backend.load(entry.k, entry.v), Dense(q=entry.q)
    return lambda: backend.attend(resident, query).out


def _plain_numpy(entry: Entry) -> Callable[[], Array]:
    scale = np.float32(entry.q.shape[2] ** -0.5)

    def attend() -> Array:
        scores = np.matmul(entry.q * scale, entry.k.swapaxes(1, 2))
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=2, keepdims=True)
        out: Array = np.matmul(scores, entry.v) / total
        return out

    return attend


def _plain_mlx(entry: Entry) -> Callable[[], Array]:
    import mlx.core as mx

    k, v = mx.array(entry.k)[None], mx.array(entry.v)[None]
    mx.eval(k, v)
    scale = entry.q.shape[2] ** -0.5

    def attend() -> Array:
        out = mx.fast.scaled_dot_product_attention(mx.array(entry.q)[None], k, v, scale=scale)
        return np.array(out[0])

    return attend


def agree(got: Array, want: Array) -> None:
    """Fails unless two answers are the same except for the last bits."""
    worst = float(np.abs(got - want).max())
    assert worst < 1e-4, f"answers differ by {worst}"


def median(action: Callable[[], object], calls: int = CALLS) -> float:
    """Seconds that an action takes, the median of this many."""
    return statistics.median(timed(action) for _ in range(calls))


def _unary(measure: Callable[[], float]) -> float:
    os.environ[NO_STREAM] = "1"
    try:
        return measure()
    finally:
        del os.environ[NO_STREAM]


def microseconds(name: str, seconds: Sequence[float]) -> Samples:
    """Samples in µs."""
    return Samples(name, tuple(s * 1e6 for s in seconds))
