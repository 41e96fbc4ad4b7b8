"""The rows about codecs: their speed, memory with 4 GB of codes, and what they do to a real model.

The one decision: what a codec costs a model is measured through the store, with `Client.store` and
`Client.fetch` in the model's own process, and compared with the same cache that was never stored.
"""

import importlib
import multiprocessing
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from pion_client import Client, Encoded
from pion_grpc.cli.bench import texts
from pion_grpc.cli.bench.measuring import Context
from pion_grpc.cli.bench.models import Loaded, ModelProcess
from pion_grpc.cli.bench.prefixes import MODEL
from pion_grpc.cli.bench.processes import Server
from pion_grpc.cli.bench.results import Result, Samples, at_least, at_most
from pion_wire.codecs.measure import measure

DECODE_GB_S_MIN = {"fp16": 1.0, "mlx_affine(4,32,f16)": 1.0}
LAYERS, HEADS, HEAD_DIM = 36, 8, 128
ROWS, QUICK_ROWS = 86_580, 4_096
"""The largest prompt of a model of 4 billion parameters that the product was described with."""
NAME = "codes"
FORMATS = ("fp16", "int8", "fp8", "turbo4", "turbo3", "turbo2", "mlx4g32")
PROMPTS = 20
PROTECTED = 2


def speed(context: Context) -> list[Result]:
    """How fast each codec encodes and decodes on one core, in bytes of float32."""
    results = []
    rounds = 2 if context.quick else 5
    with context.waiting("codecs", rounds) as advance:
        tables = []
        for _ in range(rounds):
            tables.append(measure(rows=1_024 if context.quick else 4_096))
            advance()
    for rates in zip(*tables, strict=True):
        codec, bits = rates[0].codec, rates[0].stored_bits
        for verb, values in (
            ("decode", [rate.decode_gb_s for rate in rates]),
            ("encode", [rate.encode_gb_s for rate in rates]),
        ):
            least = DECODE_GB_S_MIN.get(codec) if verb == "decode" else None
            results.append(
                Result(
                    f"{codec}: {verb}",
                    "GB/s",
                    Samples(codec, tuple(values)),
                    bound=at_least(least, of_ratio=False) if least else None,
                    note=f"{bits:g} bits a value, mean error {rates[0].mean_error:.4f} on N(0, 0.6)",
                )
            )
    return results


class _Held(NamedTuple):
    """How much memory a process needed at most beyond what it had before, and the bytes it had to
    hold."""

    growth_bytes: int
    codes_bytes: int


def memory(context: Context) -> list[Result]:
    """Memory of server and client beyond the codes of a long prompt, stored and fetched."""
    rows = QUICK_ROWS if context.quick else ROWS
    results = []
    with (
        Server(context.scratch / "data", "--disk-budget", "20GiB") as server,
        context.waiting("codes are stored and fetched", 3) as advance,
    ):
        before = server.memory_bytes()
        steps: tuple[tuple[str, Callable[..., _Held], tuple[Any, ...]], ...] = (
            ("stored", _store_codes, ()),
            ("fetched by stream", _fetch_codes, (False,)),
            ("fetched by export", _fetch_codes, (True,)),
        )
        for what, step, arguments in steps:
            peak = _Peak(server)
            with ProcessPoolExecutor(
                1, mp_context=multiprocessing.get_context("spawn")
            ) as alone:  # its peak is its own
                held = alone.submit(step, server.address, rows, *arguments).result()
            grown = {"client": held.growth_bytes - held.codes_bytes, "server": peak.end() - before}
            size = f"{held.codes_bytes / 1e9:.1f} GB of mlx4g32"
            results += [
                Result(
                    f"{size} {what}: {side}'s memory beyond",
                    "MiB",
                    Samples(side, (beyond / (1 << 20),)),
                    bound=at_most(256, of_ratio=False),
                )
                for side, beyond in grown.items()
            ]
            advance()
    return results


def formats(context: Context) -> list[Result]:
    """What each format does to a real model: first tokens that agree, and the distance of logits."""
    prompts = 4 if context.quick else PROMPTS
    agreed: dict[str, list[bool]] = {}
    distances: dict[str, list[float]] = {}
    with (
        Server(context.scratch / "data") as server,
        context.waiting("prompts", prompts) as advance,
        ModelProcess(server.address) as process,
    ):
        for number in range(prompts):
            for label, (agrees, distance) in process.do(_through_formats, number).items():
                agreed.setdefault(label, []).append(agrees)
                distances.setdefault(label, []).append(distance)
            advance()
    results = []
    for label, agreements in agreed.items():
        what = f"SmolLM2-135M, {label}"
        count = Samples(label, (float(sum(agreements)),))
        results += [
            Result(f"{what}: first tokens that agree", f"of {prompts}", count),
            Result(
                f"{what}: mean distance of logits, of their deviation",
                "%",
                Samples(label, tuple(distances[label])),
            ),
        ]
    return results


# Of `memory`


class _Peak:
    """Watches a server's memory."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._bytes = server.memory_bytes()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def end(self) -> int:
        self._done.set()
        self._watcher.join()
        return self._bytes

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self._bytes = max(self._bytes, self._server.memory_bytes())


def _store_codes(address: str, rows: int) -> _Held:
    """Runs in a process of its own."""
    import mlx.core as mx

    _warm_up(address)
    before = _bytes_now()
    layers, size = [], 0
    for layer in range(LAYERS):
        sides = [_codes(mx, rows, 2 * layer + side) for side in range(2)]
        k, v = (Encoded.quantized(*arrays, group=32, bits=4) for arrays in sides)
        layers.append((k, v))
        size += sum(array.nbytes for arrays in sides for array in arrays)
    with Client(address) as client:
        client.store(NAME, layers=layers, token_ids=range(rows), model=MODEL)
    return _Held(_peak_bytes() - before, size)


def _fetch_codes(address: str, rows: int, export: bool) -> _Held:
    """Runs in a process of its own; ends with caches that a model could continue."""
    import mlx.core as mx
    from mlx_lm.models.cache import QuantizedKVCache

    _warm_up(address)
    before = _bytes_now()
    with Client(address, export=export) as client:
        prefix = client.fetch(NAME, as_mlx=True, codecs=["mlx_affine"])
    assert prefix is not None
    assert prefix.transport == ("export" if export else "stream"), prefix.transport_reason
    caches: list[Any] = []
    for k, v in prefix.layers:
        cache: Any = QuantizedKVCache(group_size=32, bits=4)
        cache.keys, cache.values = (tuple(array[None] for array in side.arrays) for side in (k, v))
        cache.offset = rows
        caches.append(cache)
    size = sum(array.nbytes for c in caches for side in (c.keys, c.values) for array in side)
    peak = _peak_bytes() - before
    for layer in (0, LAYERS - 1):
        for got, expected in zip(
            caches[layer].values, _codes(mx, rows, 2 * layer + 1), strict=True
        ):
            assert mx.array_equal(got[0], expected).item(), "other codes came back"
    return _Held(peak, size)


def _codes(mx: Any, rows: int, number: int) -> tuple[Any, Any, Any]:
    """Codes, scales and biases of one side; equal numbers give equal bits."""
    random = np.random.default_rng(number)
    words = random.integers(0, 1 << 32, (HEADS, rows, HEAD_DIM // 8), np.uint32)
    scales = random.random((HEADS, rows, HEAD_DIM // 32), np.float32).astype(np.float16)
    arrays = mx.array(words), mx.array(scales), mx.array(-scales)
    mx.eval(arrays)
    return arrays


def _warm_up(address: str) -> None:
    """Loads everything that does not depend on the size."""
    import mlx.core as mx

    arrays = _codes(mx, 64, 0)
    side = Encoded.quantized(*arrays, group=32, bits=4)
    with Client(address) as client:
        client.store("warm-up", layers=[(side, side)], token_ids=range(64), model=MODEL)
        client.fetch("warm-up", as_mlx=True, codecs=["mlx_affine"])


def _bytes_now() -> int:
    """Memory that this process holds, in bytes."""
    psutil: Any = importlib.import_module("psutil")
    rss: int = psutil.Process().memory_info().rss
    return rss


def _peak_bytes() -> int:
    """The most memory that this process ever had; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


# Of `formats`


def _variants(layers: int) -> Iterator[tuple[str, dict[tuple[int, str], str]]]:
    """The formats by name, each with its codecs by (slot, side)."""
    inner = range(PROTECTED, layers - PROTECTED)
    for codec in FORMATS:
        yield f"K and V {codec}", {(slot, s): codec for slot in range(layers) for s in "kv"}
        if codec == "fp16":
            continue
        yield f"V {codec}", {(slot, "v"): codec for slot in range(layers)}
        name = f"V {codec} but for {PROTECTED} layers at both ends"
        yield name, {(slot, "v"): codec for slot in inner}


def _through_formats(loaded: Loaded, number: int) -> dict[str, tuple[bool, float]]:
    """Runs in the model process: whether the first token agrees, and the distance, for each format."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode(texts.prompt(number))
    question = loaded.tokenizer.encode(texts.question(number))
    cache: Any = make_prompt_cache(loaded.model)
    loaded.model(mx.array([ids]), cache=cache)
    mx.eval([slot.state for slot in cache])
    layers = [(slot.keys[0, :, : len(ids)], slot.values[0, :, : len(ids)]) for slot in cache]
    expected = _logits(loaded, layers, question)
    found = {}
    with Client(loaded.address) as client:
        for label, codecs in _variants(len(layers)):
            client.store(
                "format", layers=layers, codecs=codecs, token_ids=ids, model=MODEL, replace=True
            )
            prefix = client.fetch("format", as_mlx=True)
            assert prefix is not None
            got = _logits(loaded, prefix.layers, question)
            distance = float(np.abs(got - expected).mean() / expected.std())
            found[label] = bool(got.argmax() == expected.argmax()), 100 * distance
    return found


def _logits(
    loaded: Loaded, layers: Sequence[tuple[Any, Any]], question: Sequence[int]
) -> np.ndarray:
    """The logits after a question that follows a cache of these rows."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache: Any = make_prompt_cache(loaded.model)
    for slot, (k, v) in zip(cache, layers, strict=True):
        slot.update_and_fetch(k[None], v[None])
    logits = loaded.model(mx.array([question]), cache=cache)[0, -1]
    return np.array(logits.astype(mx.float32))
