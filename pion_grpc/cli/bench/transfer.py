"""The rows that move one large prefix: fetch, redis, store, export, memory.

The one decision: our side is the client's public call, from its start until the caller has arrays, with
nothing left out. Peers get the same bytes, their memory is as fresh or as warm as ours, and the files of
both sides are in the page cache.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pion_client import Client
from pion_grpc.cli.bench.measuring import Context, timed
from pion_grpc.cli.bench.prefixes import MODEL, Large, large
from pion_grpc.cli.bench.processes import BareSocket, Redis, Server
from pion_grpc.cli.bench.results import Result, Samples, at_least, at_most, milliseconds, rates

NAME = "large"
VALUE_BYTES = 4 << 20
"""Of each value in redis."""
FETCHERS = 8


class _Stored(NamedTuple):
    """A server that holds the large prefix."""

    server: Server
    prefix: Large


def fetch(context: Context) -> list[Result]:
    """`Fetch` over loopback TCP into arrays, against a bare socket that moves the same bytes."""
    with (
        _stored(context) as (server, prefix),
        _streaming(server) as client,
        BareSocket(_file_of(prefix, context.scratch)) as bare,
    ):
        kept = np.zeros(prefix.size_bytes, np.uint8)
        samples = context.interleaved(
            {
                "Fetch": lambda: timed(lambda: client.fetch(NAME)),
                "new": lambda: timed(lambda: bare.receive(_new(prefix))),
                "kept": lambda: timed(lambda: bare.receive(kept)),
            },
            rounds=15,
            warm_ups=2,
        )
        assert np.array_equal(kept, prefix.data), "the bare socket moved other bytes"
    ours = rates("Fetch", prefix.size_bytes, samples["Fetch"])
    return [
        Result(
            f"Fetch of {prefix.size_text} over loopback TCP",
            "GB/s",
            ours,
            rates(f"bare socket into {name}", prefix.size_bytes, samples[key]),
            at_least(0.4, aim=0.6),
        )
        for key, name in (("new", "a new array"), ("kept", "an array it keeps"))
    ]


def redis(context: Context) -> list[Result]:
    """The same against redis-server and redis-py with hiredis, both into one new array."""
    with (
        Redis(context.scratch) as peer,
        _stored(context) as (server, prefix),
        _streaming(server) as client,
    ):
        peer.put(prefix.data.data, VALUE_BYTES)
        assert np.array_equal(peer.get(prefix.size_bytes), prefix.data)
        samples = context.interleaved(
            {
                "Fetch": lambda: timed(lambda: client.fetch(NAME)),
                "redis": lambda: timed(lambda: peer.get(prefix.size_bytes)),
            },
            rounds=15,
            warm_ups=2,
        )
    return [
        Result(
            f"Fetch of {prefix.size_text} over loopback TCP",
            "GB/s",
            rates("Fetch", prefix.size_bytes, samples["Fetch"]),
            rates(f"redis, {VALUE_BYTES >> 20} MiB values", prefix.size_bytes, samples["redis"]),
            at_least(0.7),
        )
    ]


def store(context: Context) -> list[Result]:
    """`Store` of the same prefix, against a file that is written and renamed."""
    prefix = large(quick=context.quick)
    head_major = [(k.copy(order="C"), v.copy(order="C")) for k, v in prefix.layers]
    ids = prefix.token_ids
    with Server(context.scratch / "data") as server, _streaming(server) as client:

        def stored(layers: list[tuple[np.ndarray, np.ndarray]]) -> float:
            elapsed = timed(lambda: client.store(NAME, layers=layers, token_ids=ids, model=MODEL))
            client.drop(NAME)
            return elapsed

        def written() -> float:
            elapsed = timed(lambda: _write(prefix, context.scratch))
            (context.scratch / "file").unlink()
            return elapsed

        samples = context.interleaved(
            {
                "Store": lambda: stored(prefix.layers),
                "head-major": lambda: stored(head_major),
                "file": written,
            },
            rounds=11,
            warm_ups=2,
        )
    peer = rates("file, written and renamed", prefix.size_bytes, samples["file"])
    what = f"Store of {prefix.size_text} over loopback TCP"
    return [
        Result(
            what, "GB/s", rates("Store", prefix.size_bytes, samples["Store"]), peer, at_least(0.4)
        ),
        Result(
            f"{what}, arrays head-major as in a model's cache",
            "GB/s",
            rates("Store", prefix.size_bytes, samples["head-major"]),
            peer,
        ),
    ]


def export(context: Context) -> list[Result]:
    """Same-host fetch until a cache's MLX arrays are evaluated, against `load_prompt_cache`."""
    import mlx.core as mx
    from mlx_lm.models import cache as caches

    from pion_client.caches import install

    kinds: Any = caches  # without types

    with _stored(context) as (server, prefix):
        file = str(context.scratch / "cache.safetensors")
        kinds.save_prompt_cache(file, _mlx_cache(prefix))
        tokens = len(prefix.token_ids)

        def load() -> list[Any]:
            cache: list[Any] = kinds.load_prompt_cache(file)
            mx.eval([slot.state for slot in cache])
            return cache

        def restore(client: Client, *, contiguous: bool = False) -> list[Any]:
            fetched = client.fetch(NAME, as_mlx=True)
            assert fetched is not None
            assert fetched.transport == "export", fetched.transport_reason
            layers = fetched.layers
            if contiguous:
                layers = [(mx.contiguous(k), mx.contiguous(v)) for k, v in layers]
            cache = [kinds.KVCache() for _ in layers]
            install(cache, layers, fetched.layout, tokens)
            return cache

        with Client(server.address) as plain, Client(server.address, verify=True) as verifying:
            _check_equal(load(), restore(plain))
            samples = context.interleaved(
                {
                    "export": lambda: timed(lambda: restore(plain)),
                    "verify": lambda: timed(lambda: restore(verifying)),
                    "head-major": lambda: timed(lambda: restore(plain, contiguous=True)),
                    "file": lambda: timed(load),
                },
                rounds=15,
                warm_ups=2,
            )
    mx.clear_cache()
    what = f"same-host fetch of {prefix.size_text} until MLX arrays are evaluated"
    peer = milliseconds("load_prompt_cache", samples["file"])
    return [
        Result(what, "ms", milliseconds("export", samples["export"]), peer, at_most(1.1)),
        Result(f"{what}, verify=True", "ms", milliseconds("export", samples["verify"]), peer),
        Result(
            f"{what}, made head-major", "ms", milliseconds("export", samples["head-major"]), peer
        ),
    ]


def memory(context: Context) -> list[Result]:
    """The server's memory beyond what is stored, with many concurrent fetches."""
    rounds = 2 if context.quick else 3
    stored, fresh = [], []
    with context.waiting(f"{FETCHERS} concurrent fetches", 2 * rounds) as advance:
        for number in range(rounds):
            directory = context.scratch / f"data{number}"
            with Server(directory) as server:
                idle = server.memory_bytes()
                prefix = _put_large(server, quick=context.quick)
                stored.append((_peak_while_fetching(server) - idle) / (1 << 20))
                advance()
            with Server(directory) as server:
                idle = server.memory_bytes()
                fresh.append((_peak_while_fetching(server) - idle) / (1 << 20))
                advance()
    return [
        Result(
            f"server memory over idle, {FETCHERS} concurrent fetches of {prefix.size_text}{after}",
            "MiB",
            Samples("server", tuple(growths)),
            bound=at_most(64, of_ratio=False),
            note=f"idle: {idle / (1 << 20):.0f} MiB",
        )
        for after, growths in (("", fresh), (", which it took in before", stored))
    ]


# What the rows share


@contextlib.contextmanager
def _stored(context: Context) -> Iterator[_Stored]:
    with Server(context.scratch / "data") as server:
        yield _Stored(server, _put_large(server, quick=context.quick))


def _put_large(server: Server, *, quick: bool) -> Large:
    prefix = large(quick=quick)
    with _streaming(server) as client:
        put(client, prefix)
    return prefix


def put(client: Client, prefix: Large) -> None:
    """Stores the large prefix, and fetches it once to check that no bit has changed."""
    client.store(NAME, layers=prefix.layers, token_ids=prefix.token_ids, model=MODEL)
    fetched = client.fetch(NAME)
    assert fetched is not None
    for pair, again in zip(prefix.layers, fetched.layers, strict=True):
        for side, other in zip(pair, again, strict=True):
            assert np.array_equal(_bits(side), _bits(other)), "other bits came back"


def _streaming(server: Server) -> Client:
    return Client(server.address, export=False)


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16)


def _new(prefix: Large) -> np.ndarray:
    return np.empty(prefix.size_bytes, np.uint8)


def _file_of(prefix: Large, directory: Path) -> Path:
    path = directory / "bytes"
    prefix.data.tofile(path)
    return path


def _write(prefix: Large, directory: Path) -> None:
    """Writes tensor by tensor, unbuffered, at the speed of the file itself."""
    tensors = prefix.data.reshape(2 * len(prefix.layers), -1)
    with (directory / "new").open("wb", buffering=0) as file:
        for tensor in tensors:
            assert file.write(tensor.data) == tensor.nbytes
    os.rename(directory / "new", directory / "file")


def _mlx_cache(prefix: Large) -> list[Any]:
    """The prefix as the model itself would have it in its cache, head-major."""
    import mlx.core as mx
    from mlx_lm.models import cache as caches

    kinds: Any = caches
    cache: list[Any] = []
    for k, v in prefix.layers:
        slot = kinds.KVCache()
        slot.keys, slot.values = mx.array(k)[None], mx.array(v)[None]
        slot.offset = k.shape[1]
        cache.append(slot)
    return cache


def _check_equal(expected: list[Any], got: list[Any]) -> None:
    import mlx.core as mx

    for theirs, ours in zip(expected, got, strict=True):
        for a, b in ((theirs.keys, ours.keys), (theirs.values, ours.values)):
            a, b = (mx.contiguous(array).view(mx.uint16) for array in (a, b))
            assert mx.array_equal(a, b).item(), "the cache holds other bits"


def _peak_while_fetching(server: Server) -> int:
    """Returns the peak memory while clients fetch, each twice and over its own connection."""
    done = threading.Event()
    peak = server.memory_bytes()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, server.memory_bytes())

    def fetch_twice(_: int) -> None:
        with _streaming(server) as client:
            for _ in range(2):
                assert client.fetch(NAME) is not None

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(FETCHERS) as pool:
            list(pool.map(fetch_twice, range(FETCHERS)))
    finally:
        done.set()
        watcher.join()
    return peak
