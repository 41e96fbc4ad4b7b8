"""The rows about the RESP wire: large reads and writes, small values, Membership, a first token.

The peers are redis-server, spoken to by the same client library as ours, and a bare socket. The one
decision: if a client library is measured, both sides go through it; if the server is measured, both
sides are read by the same bare code. So a row never compares a client with a server.
"""

import contextlib
import csv
import importlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pion_grpc.cli.bench.attend_resp import resp_address
from pion_grpc.cli.bench.first_token import REAL_TOKENS, ids_of
from pion_grpc.cli.bench.measuring import Context, Side, timed
from pion_grpc.cli.bench.models import QUESTION_TOKENS, Loaded, ModelProcess
from pion_grpc.cli.bench.prefixes import HEAD_DIM, HEADS, LAYERS, Large, hashes, large
from pion_grpc.cli.bench.processes import BareSocket, PeerMissing, Redis, Server
from pion_grpc.cli.bench.results import Result, Samples, at_least, at_most, milliseconds, rates
from pion_grpc.cli.bench.scale import HASHES
from pion_grpc.cli.bench.transfer import VALUE_BYTES

WIDTH = HEADS * HEAD_DIM
NAME = "large"
SIDES = ("pk", "pv")
TABLE = "table"
BLOCK_TOKENS = 64


def fetch(context: Context) -> list[Result]:
    """`V.FETCH … BATCH FMT NATIVE` against `GET` of redis-server, and against a bare socket."""
    prefix = large(quick=context.quick)
    tokens = len(prefix.token_ids)
    asked = [
        ("V.FETCH", f"{NAME}_{side}", "BATCH", 0, tokens, LAYERS, "FMT", "NATIVE") for side in SIDES
    ]
    with (
        Redis(context.scratch) as peer,
        _serving(context) as (address, ours),
        contextlib.closing(_Reader(address)) as reader,
        BareSocket(_file_of(prefix, context.scratch)) as bare,
    ):
        _register(ours)
        for command, blob in _batches(prefix):
            ours.execute_command(*command, blob, "FMT", "F16")
        peer.put(prefix.data.data, VALUE_BYTES)
        values = prefix.size_bytes // VALUE_BYTES
        reply_bytes = _reply_bytes(prefix)
        kept = np.zeros(reply_bytes * len(SIDES), np.uint8)
        sent = np.zeros(prefix.size_bytes, np.uint8)

        def batch() -> list[Any]:
            return [ours.execute_command(*command) for command in asked]

        def barely() -> None:
            for command, buffer in zip(asked, np.split(kept, len(SIDES)), strict=True):
                reader.ask(command, buffer)

        _check(prefix, batch())
        samples = context.interleaved(
            {
                "ours": lambda: timed(batch),
                "redis": lambda: timed(lambda: [peer.value(n) for n in range(values)]),
                "read": lambda: timed(barely),
                "bare": lambda: timed(lambda: bare.receive(sent)),
            },
            rounds=11,
            warm_ups=2,
        )
        last = kept[reply_bytes - 2 - tokens * WIDTH * 2 : reply_bytes - 2]
        assert np.array_equal(last, _tensors(prefix)[-1][0]), "other rows came over the bare socket"
    what = f"V.FETCH BATCH FMT NATIVE of {prefix.size_text}"
    size = prefix.size_bytes
    return [
        Result(
            f"{what}, redis-py and hiredis", "GB/s", rates("V.FETCH", size, samples["ours"]),
            rates(f"redis GET, {VALUE_BYTES >> 20} MiB values", size, samples["redis"]),
            at_least(0.9),
        ),
        Result(
            f"{what}, read by a bare socket", "GB/s", rates("V.FETCH", size, samples["read"]),
            rates("bare socket", size, samples["bare"]), at_least(0.8),
        ),
    ]  # fmt: skip


def store(context: Context) -> list[Result]:
    """`V.STOREBATCH` of f16 rows against `SET` of the same bytes, appended to redis-server's file."""
    prefix = large(quick=context.quick)
    batches = list(_batches(prefix))
    with Redis(context.scratch, appendonly=True) as peer, _serving(context) as (_, ours):

        def store_ours() -> None:
            for command, blob in batches:
                ours.execute_command(*command, blob, "FMT", "F16")

        def store_peers() -> None:
            for number, (_, blob) in enumerate(batches):
                peer.set(str(number), blob)

        def ours_dropped() -> float:
            _register(ours)
            seconds = timed(store_ours)
            ours.execute_command("KV.PREFIX.DROP", NAME)
            return seconds

        def peers_dropped() -> float:
            seconds = timed(store_peers)
            peer.clear()
            return seconds

        samples = context.interleaved(
            {"ours": ours_dropped, "redis": peers_dropped}, rounds=9, warm_ups=2
        )
    return [
        Result(
            f"V.STOREBATCH of {prefix.size_text} of f16, redis-py",
            "GB/s",
            rates("V.STOREBATCH", prefix.size_bytes, samples["ours"]),
            rates("redis SET, appendonly yes", prefix.size_bytes, samples["redis"]),
            at_least(1.1),
        )
    ]


def small(context: Context) -> list[Result]:
    """GET and SET of small values with redis-benchmark, by one connection and by 50."""
    program = shutil.which("redis-benchmark")
    if program is None:
        raise PeerMissing("redis-benchmark is not installed: apt-get install redis-tools")
    calls = 5_000 if context.quick else 50_000
    results = []
    with Redis(context.scratch) as peer, _serving(context) as (address, _):
        ports = {"ours": int(address.rpartition(":")[2]), "redis": peer.port}
        for connections in (1, 50):
            got: dict[tuple[str, str], list[float]] = {}

            def measure(
                side: str, connections: int, got: dict[tuple[str, str], list[float]]
            ) -> float:
                started = time.perf_counter()
                for command, rate in _benchmarked(program, ports[side], connections, calls):
                    got.setdefault((side, command), []).append(rate)
                return time.perf_counter() - started

            sides: dict[str, Side] = {s: partial(measure, s, connections, got) for s in ports}
            context.interleaved(sides, rounds=5, warm_ups=0, rounds_when_quick=2)
            results += [
                Result(
                    f"{command} of 3 bytes, redis-benchmark, {connections} connections",
                    "1/s",
                    Samples(command, tuple(got["ours", command])),
                    Samples("redis-server", tuple(got["redis", command])),
                )
                for command in ("SET", "GET")
            ]
    return results


def membership(context: Context) -> list[Result]:
    """`KV.PREFIX.MEMBERSHIP` over a socket, beyond a PING, and in the core alone."""
    from pion_grpc.core.membership import membership as bitmap

    probes = hashes(HASHES)
    with _serving(context) as (address, ours), contextlib.closing(_Reader(address)) as reader:
        ours.execute_command(
            "KV.PREFIX.REGISTER", TABLE, WIDTH, "fp16", "BLOCKS", BLOCK_TOKENS, HASHES, probes
        )
        ask = ("KV.PREFIX.MEMBERSHIP", TABLE, HASHES, probes)
        expected = bitmap(probes, probes)
        assert ours.execute_command(*ask) == expected
        answer = np.zeros(len(f"${len(expected)}\r\n") + len(expected) + 2, np.uint8)
        pong = np.zeros(len("+PONG\r\n"), np.uint8)
        samples = context.interleaved(
            {
                "MEMBERSHIP": lambda: timed(lambda: reader.ask(ask, answer)),
                "PING": lambda: timed(lambda: reader.ask(("PING",), pong)),
                "core": lambda: timed(lambda: bitmap(probes, probes)),
            },
            rounds=3_000,
            warm_ups=100,
            rounds_when_quick=300,
        )
    over = {name: _microseconds(name, values) for name, values in samples.items()}
    what = f"MEMBERSHIP, {HASHES:,} in {HASHES:,}"
    results = [
        Result(f"{what}, end to end", "µs", over["MEMBERSHIP"], over["PING"]),
        Result(f"{what}, in the core", "µs", over["core"], None, at_most(100, of_ratio=False)),
    ]
    for quantile, name, limit in ((0.5, "p50", 125), (0.99, "p99", 200)):
        beyond = over["MEMBERSHIP"].quantile(quantile) - over["PING"].quantile(quantile)
        bound = at_most(limit, of_ratio=False)
        sides = Samples("MEMBERSHIP less PING", (beyond,))
        results.append(Result(f"{what}, {name} over PING's", "µs", sides, None, bound))
    return results


def first_token(context: Context) -> list[Result]:
    """The first token of a second process with `pion-vllm-mlx`, with `pion_client`, from a file.

    Raises:
        PeerMissing: pion-vllm-mlx is not installed.
    """
    try:
        importlib.import_module("pion_vllm_mlx")
    except ImportError:
        raise PeerMissing("pion-vllm-mlx is not installed: pip install pion-vllm-mlx") from None
    lengths = REAL_TOKENS[:1] if context.quick else REAL_TOKENS[:2]
    results = []
    with Server(context.scratch / "data", "--resp", "127.0.0.1:0") as server:
        port = int(resp_address(server).rpartition(":")[2])
        files = {length: str(context.scratch / f"{length}.safetensors") for length in lengths}
        with ModelProcess(server.address) as first:
            for length in lengths:
                first.do(Loaded.keep, ids_of(length), files[length])
                first.do(_theirs, port, ids_of(length), ids_of(QUESTION_TOKENS))
        with ModelProcess(server.address) as second:
            for length in lengths:
                results += _first_tokens(context, second, port, length, files[length])
    return results


# Of `fetch` and `store`


@contextlib.contextmanager
def _serving(context: Context) -> Iterator[tuple[str, Any]]:
    """A server's RESP address, and redis-py connected to it."""
    try:
        client: Any = importlib.import_module("redis")
    except ImportError:
        raise PeerMissing("redis-py is not installed: pip install 'redis[hiredis]'") from None
    with Server(context.scratch / "data", "--resp", "127.0.0.1:0") as server:
        address = resp_address(server)
        with contextlib.closing(client.Redis(port=int(address.rpartition(":")[2]))) as redis:
            yield address, redis


def _register(redis: Any) -> None:
    redis.execute_command("KV.PREFIX.REGISTER", NAME, WIDTH, "fp16")


def _tensors(prefix: Large) -> np.ndarray:
    """The bytes of (layer, side)."""
    return prefix.data.reshape(LAYERS, len(SIDES), -1)


def _batches(prefix: Large) -> Iterator[tuple[tuple[Any, ...], bytes]]:
    tokens = len(prefix.token_ids)
    for layer, pair in enumerate(_tensors(prefix)):
        for side, rows in zip(SIDES, pair, strict=True):
            yield ("V.STOREBATCH", f"{NAME}_{side}", layer, 0, tokens), rows.tobytes()


def _check(prefix: Large, fetched: Sequence[Sequence[bytes]]) -> None:
    for number, layers in enumerate(fetched):
        for layer, rows in enumerate(layers):
            got = np.frombuffer(rows, np.uint8)
            assert np.array_equal(got, _tensors(prefix)[layer, number]), "other bits came back"


def _reply_bytes(prefix: Large) -> int:
    """The size of a reply with one side of all layers: an array of bulk strings."""
    size = len(prefix.token_ids) * WIDTH * 2
    return len(f"*{LAYERS}\r\n") + LAYERS * (len(f"${size}\r\n") + size + 2)


def _file_of(prefix: Large, directory: Path) -> Path:
    path = directory / "bytes"
    prefix.data.tofile(path)
    return path


class _Reader:
    """A bare socket that knows how long the reply will be."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, words: Sequence[bytes | str | int], buffer: np.ndarray) -> None:
        """Sends a command and fills the buffer with the whole reply, framing included."""
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        framed = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
        self._socket.sendall(b"*%d\r\n%b" % (len(parts), framed))
        view = buffer.data
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise RuntimeError("the server closed the connection")
            view = view[count:]

    def close(self) -> None:
        self._socket.close()


# Of the others


def _benchmarked(
    program: str, port: int, connections: int, calls: int
) -> Iterator[tuple[str, float]]:
    command = [program, "-p", str(port), "-t", "set,get", "-n", str(calls), "-c", str(connections)]
    done = subprocess.run([*command, "--csv"], capture_output=True, text=True, check=True)
    for line in csv.reader(done.stdout.splitlines()):
        if line[0] in ("SET", "GET"):
            yield line[0], float(line[1])


def _microseconds(name: str, seconds: Sequence[float]) -> Samples:
    return Samples(name, tuple(s * 1e6 for s in seconds))


def _first_tokens(
    context: Context, second: ModelProcess, port: int, length: int, file: str
) -> list[Result]:
    ids, question = ids_of(length), ids_of(QUESTION_TOKENS)
    tokens = {}

    def ours(way: str) -> float:
        got = second.do(Loaded.first_token, way, ids, question, file)
        tokens[way] = got.token
        return got.seconds

    def theirs() -> float:
        seconds, tokens["pion-vllm-mlx"] = second.do(_theirs, port, ids, question)
        return seconds

    sides: dict[str, Side] = {way: partial(ours, way) for way in ("export", "stream", "file")}
    samples = context.interleaved({"pion-vllm-mlx": theirs, **sides}, rounds=7, warm_ups=2)
    measured = {name: milliseconds(name, values) for name, values in samples.items()}
    what = f"first token after {length:,} tokens, SmolLM2-135M: pion-vllm-mlx over RESP"
    same = sum(token == tokens["file"] for token in tokens.values()) - 1
    return [
        Result(what, "ms", measured["pion-vllm-mlx"], measured[way], note=f"{same} of 3 agree")
        for way in ("export", "stream", "file")
    ]


def _theirs(
    loaded: Loaded, port: int, ids: Sequence[int], question: Sequence[int]
) -> tuple[float, int]:
    """Runs in a model process: the first token after what is stored under the prompt's length."""
    import mlx.core as mx

    from pion_grpc.cli.decode import greedy

    client: Any = importlib.import_module("pion_vllm_mlx")
    make: Callable[..., Any] = client.PionPromptCache
    prompt_cache = loaded.prompt_caches.setdefault("pion-vllm-mlx", make(loaded.model, port=port))
    mx.clear_cache()
    started = time.perf_counter()
    cache = prompt_cache.get_or_prefill(ids, f"resp{len(ids)}")
    token = greedy(loaded.model, question, cache, 1).ids[0]
    return time.perf_counter() - started, token
