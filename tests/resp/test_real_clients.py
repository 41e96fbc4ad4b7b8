"""Clients from PyPI, unmodified: what they store they find again, in the next process, after a crash."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_next
from mlx_lm.models.cache import make_prompt_cache

from pion_grpc.cli.smollm2 import random_llama
from tests.conftest import ServerProcess
from tests.resp.wire import Wire, fields

client = pytest.importorskip("pion_vllm_mlx", reason="pion-vllm-mlx is not installed")

PEERS = Path(sys.prefix) / "peers"
TOKENS = 70
SUFFIX = [5, 6, 7, 8]


def prompt(seed: int = 0, count: int = TOKENS) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 500, count)]


def prefilled(model: Any, ids: list[int]) -> Any:
    cache = make_prompt_cache(model)
    model(mx.array([ids]), cache=cache)
    mx.eval([slot.state for slot in cache])
    return cache


def rounded(model: Any, cache: Any, count: int = TOKENS) -> Any:
    """The same cache as binary16, which is what this client makes of a hit."""
    halves = make_prompt_cache(model)
    for slot, whole in zip(halves, cache, strict=True):
        slot.update_and_fetch(
            whole.keys[:, :, :count].astype(mx.float16),
            whole.values[:, :, :count].astype(mx.float16),
        )
    return halves


def decoded(model: Any, cache: Any, count: int = 50) -> tuple[list[int], Any]:
    """Greedy tokens after a suffix, and the first logits."""
    ids, out, first = SUFFIX, [], None
    for _ in range(count):
        logits = model(mx.array([ids]), cache=cache)[0, -1]
        first = np.array(logits) if first is None else first
        ids = [int(mx.argmax(logits))]
        out += ids
    return out, first


def same_run(model: Any, one: Any, other: Any) -> None:
    tokens, logits = decoded(model, one)
    expected_tokens, expected_logits = decoded(model, other)
    assert np.array_equal(logits, expected_logits)
    assert tokens == expected_tokens


@pytest.fixture(scope="module")
def model() -> Any:
    return random_llama()


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    return start_server("--resp", "127.0.0.1:0")


def port(server: ServerProcess) -> int:
    return int(server.ready["resp"].rpartition(":")[2])


OPENED: list[Any] = []
"""What these clients leave open: they close nothing themselves."""


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        opened = OPENED.pop()
        socket = opened.resp.sock if hasattr(opened, "resp") else opened.conn.sock
        socket.close()


def prompt_cache(model: Any, server: ServerProcess, **options: Any) -> Any:
    OPENED.append(client.PionPromptCache(model, port=port(server), **options))
    return OPENED[-1]


def commands(server: ServerProcess) -> Wire:
    return Wire(server.ready["resp"])


@pytest.mark.parametrize("lane", ["export", "batch", "range"])
def test_a_hit_continues_as_the_rounded_cache_does(
    model: Any, server: ServerProcess, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lane != "export":
        monkeypatch.setenv("PION_PROMPT_CACHE_NO_EXPORT", "1")
    if lane == "range":
        monkeypatch.setenv("PION_PROMPT_CACHE_NO_BATCH", "1")
    first = prompt_cache(model, server)
    assert not first.lookup("ns")
    same_run(model, first.get_or_prefill(prompt(), "ns"), prefilled(model, prompt()))
    assert first.stats()["misses"] == 1
    second = prompt_cache(model, server)
    hit = second.get_or_prefill(prompt(), "ns")
    assert second.stats()["hits"] == 1
    same_run(model, hit, rounded(model, prefilled(model, prompt())))
    if lane == "export":
        exports = list((server.directory / "export").iterdir())
        assert len(exports) == 1, "the lane was not used"
        arrays = mx.load(str(exports[0]))
        whole = prefilled(model, prompt())
        for layer, slot in enumerate(whole):
            expected = slot.keys[:, :, :TOKENS].astype(mx.float16)
            assert np.array_equal(np.array(arrays[f"k.{layer}"]), np.array(expected))
    wire = commands(server)
    assert fields(wire("INFO", "pion"))["kvprefix_hits"] == "1"
    wire.close()


def test_a_prefix_whose_client_died_is_stored_again(model: Any, server: ServerProcess) -> None:
    first = prompt_cache(model, server)
    call, batches = first.resp.call, []

    def dying(*words: Any) -> Any:
        if words[0] == "V.STOREBATCH" and len(batches) == 3:
            raise KeyboardInterrupt
        batches.extend(words[:1] if words[0] == "V.STOREBATCH" else ())
        return call(*words)

    first.resp.call = dying
    with pytest.raises(KeyboardInterrupt):
        first.get_or_prefill(prompt(), "ns")
    second = prompt_cache(model, server)
    same_run(model, second.get_or_prefill(prompt(), "ns"), prefilled(model, prompt()))
    assert second.stats()["misses"] == 1, "it would miss rows, and whoever asks an answer"
    third = prompt_cache(model, server)
    same_run(
        model, third.get_or_prefill(prompt(), "ns"), rounded(model, prefilled(model, prompt()))
    )
    assert third.stats()["hits"] == 1


def test_a_second_process_decodes_the_same_fifty_tokens(model: Any, server: ServerProcess) -> None:
    prompt_cache(model, server).get_or_prefill(prompt(), "shared")
    expected, _ = decoded(model, rounded(model, prefilled(model, prompt())))
    program = f"""
        from pion_vllm_mlx import PionPromptCache
        from pion_grpc.cli.smollm2 import random_llama
        from tests.resp.test_real_clients import decoded, prompt
        model = random_llama()
        cache = PionPromptCache(model, port={port(server)})
        assert cache.lookup("shared")
        kv = cache.get_or_prefill(prompt(), "shared")
        assert cache.stats()["hits"] == 1
        print(decoded(model, kv)[0])
    """
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, cwd=root, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == str(expected)


@pytest.mark.parametrize("save", [False, True])
def test_boundary_layers_survive_a_crash(
    start_server: Callable[..., ServerProcess], save: bool
) -> None:
    model = random_llama(layers=6)
    server = start_server("--resp", "127.0.0.1:0")
    options = {"vquant": "fp8", "boundary_protect": 2}
    prompt_cache(model, server, **options).get_or_prefill(prompt(), "guarded")
    wire = commands(server)
    layers = len(make_prompt_cache(model))
    before = [wire("V.FETCH", f"guarded_{s}", "BATCH", 0, TOKENS, layers) for s in ("pk", "pv")]
    info = fields(wire("V.INFO", "guarded_pv"))
    formats = [info[f"layer_{layer}_fmt"] for layer in range(layers)]
    assert formats == ["fp16", "fp16", "fp8", "fp8", "fp16", "fp16"]
    assert info["schema"] == "heterogeneous"
    if save:
        assert wire("KV.PREFIX.SAVE") == "OK"
    wire.close()
    server.kill()
    server = start_server("--resp", "127.0.0.1:0")
    wire = commands(server)
    after = [wire("V.FETCH", f"guarded_{s}", "BATCH", 0, TOKENS, layers) for s in ("pk", "pv")]
    assert after == before
    second = prompt_cache(model, server, **options)
    hit = second.get_or_prefill(prompt(), "guarded")
    assert second.stats()["hits"] == 1
    whole = prefilled(model, prompt())
    for layer in (0, 1, 4, 5):
        expected = np.array(whole[layer].values[:, :, :TOKENS].astype(mx.float16))
        assert np.array_equal(np.array(hit[layer].values[:, :, :TOKENS]), expected)
    assert ("WAL replayed" in "".join(server.output)) is not save
    wire.close()


@pytest.fixture(scope="module")
def hybrid() -> Any:
    """Recurrent and attention layers, as Qwen3-Next has them; random weights."""
    mx.random.seed(1)
    model = qwen3_next.Model(
        qwen3_next.ModelArgs(
            model_type="qwen3_next", hidden_size=64, num_hidden_layers=4, intermediate_size=64,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=512,
            linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=32,
            linear_value_head_dim=32, linear_conv_kernel_dim=4, num_experts=0,
            num_experts_per_tok=0, decoder_sparse_step=1, shared_expert_intermediate_size=0,
            mlp_only_layers=[0, 1, 2, 3], moe_intermediate_size=64, rms_norm_eps=1e-6,
            rope_theta=10_000.0, partial_rotary_factor=0.25, max_position_embeddings=4_096,
            full_attention_interval=2,
        )
    )  # fmt: skip
    mx.eval(model.parameters())
    return model


def test_a_hybrid_model_finds_both_halves_after_a_crash(
    hybrid: Any, start_server: Callable[..., ServerProcess]
) -> None:
    server = start_server("--resp", "127.0.0.1:0")
    kinds = {type(slot).__name__ for slot in make_prompt_cache(hybrid)}
    assert len(kinds) > 1, "this is no hybrid"
    first = prompt_cache(hybrid, server)
    first.get_or_prefill(prompt(), "hybrid")
    server.kill()
    server = start_server("--resp", "127.0.0.1:0")
    second = prompt_cache(hybrid, server)
    hit = second.get_or_prefill(prompt(), "hybrid")
    assert second.stats()["hits"] == 1
    whole = prefilled(hybrid, prompt())
    for slot, expected in zip(hit, whole, strict=True):
        if type(slot).__name__ == "KVCache":
            stored = expected.keys[:, :, :TOKENS].astype(mx.float16).astype(mx.float32)
            assert np.array_equal(
                np.array(slot.keys[:, :, :TOKENS].astype(mx.float32)), np.array(stored)
            )
        else:
            states = [dict(tree_flatten(kept.state)) for kept in (slot, expected)]
            assert states[0].keys() == states[1].keys()
            for name, kept in states[1].items():
                assert np.array_equal(np.array(states[0][name]), np.array(kept)), name
    assert len(decoded(hybrid, hit)[0]) == 50
    wire = commands(server)
    layer = next(i for i, s in enumerate(whole) if type(s).__name__ != "KVCache")
    assert wire("SSM.PREFIX.DROP", "hybrid", layer) == "OK"
    third = prompt_cache(hybrid, server)
    third.get_or_prefill(prompt(), "hybrid")
    assert third.stats()["misses"] == 1, "half a state was taken for a whole one"
    wire.close()


def test_chunks_of_retrieval_are_found_again(model: Any, server: ServerProcess) -> None:
    first = client.HybridRetrievalCache(model, backend="pion", port=port(server))
    OPENED.append(first._pion)
    first.ingest("c1", prompt())
    wire = commands(server)
    assert wire("KV.PREFIX.LOOKUP", "chunk_d0f631ca1ddba8db3bcfcb9e") == "HIT"
    wire.close()
    assert first.has("c1")
    cache = first._pion._fetch_to_cache("chunk_d0f631ca1ddba8db3bcfcb9e", TOKENS)
    same_run(model, cache, rounded(model, prefilled(model, prompt())))


# -- the store of `serve`


class Slot:
    """What the store of `serve` reads of a cache: rows, and how many."""

    def __init__(self, keys: Any, values: Any) -> None:
        self.keys, self.values = keys, values
        self.offset = keys.shape[2]


Slot.__name__ = "KVCache"
LAYERS, HEADS, DIM = 4, 2, 64
ROW_BYTES = 2 * LAYERS * HEADS * DIM * 2
KEY = ("synthetic", "model")


def rows_for(ids: list[int]) -> list[Slot]:
    """Rows that follow from tokens and positions, as those of a model do."""
    tokens, places = np.asarray(ids), np.arange(len(ids))
    out = []
    for layer in range(LAYERS):
        base = tokens[:, None] * 31 + places[:, None] * 7 + layer * 13 + np.arange(HEADS * DIM)
        halves = [
            (base % 997 / scale - 0.5).astype(np.float16).reshape(-1, HEADS, DIM)
            for scale in (997.0, 499.0)
        ]
        out.append(Slot(*(mx.array(half.transpose(1, 0, 2)[None]) for half in halves)))
    return out


def lineages(server: ServerProcess, **options: Any) -> Any:
    from pion_vllm_mlx.prefix_store import PionPrefixStore

    OPENED.append(PionPrefixStore(port=port(server), **options))
    return OPENED[-1]


def restored(store: Any, ids: list[int], count: int) -> bool:
    match = store.lookup(KEY, ids)
    rows = store.fetch_rows(KEY, match, 0, count) if match.length >= count else None
    if rows is None:
        return False
    expected = rows_for(ids[:count])
    return all(
        np.array_equal(k, np.array(slot.keys[0])) and np.array_equal(v, np.array(slot.values[0]))
        for (k, v), slot in zip(rows, expected, strict=True)
    )


def test_lineages_stay_under_their_budget_leaves_first(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--resp", "127.0.0.1:0")
    root = prompt(1, 256)
    branches = [prompt(10 + number, 256) for number in range(6)]
    store = lineages(server)
    store.store(KEY, root + branches[0], rows_for(root + branches[0]))
    wire = commands(server)
    wire("PION.STATS", "RESET")
    assert restored(lineages(server), root + branches[0], 300)
    stats = wire("PION.STATS")
    receipt = dict(zip(stats[::2], stats[1::2], strict=True))
    assert receipt[b"kvprefix_hits"] == 1
    assert receipt[b"kvprefix_tokens_served"] == 300
    assert receipt[b"prefill_seconds_avoided"] == b"0.166"

    budget = 1_100 * ROW_BYTES  # the root's segment and two branches, not three
    store = lineages(server, budget_bytes=budget)
    store.COMPACT_IDLE_S = 3_600
    for branch in branches[1:4]:
        store.store(KEY, root + branch, rows_for(root + branch))
    assert store.info()["vstore_bytes"] <= budget
    assert store.stats.evictions == 1
    fresh = lineages(server)
    assert fresh.lookup(KEY, root + branches[0]).length == 512, "the root went"
    assert fresh.lookup(KEY, root + branches[1]).length == 256, "an evicted branch is still found"
    assert restored(fresh, root + branches[3], 512)
    assert restored(fresh, root + branches[2], 512)
    mid = store.model_id(KEY)
    blocks = wire("HGETALL", store._k(mid, "blk"))
    pointed = {value.split(b":")[0] for value in blocks[1::2]}
    left = {key.rsplit(b":", 1)[1] for key in wire("KEYS", store._k(mid, "seg", "*"))}
    assert pointed <= left

    names = [store._ns(mid, number) for number in range(1, 8)]
    before = [wire("KV.PREFIX.LOOKUP", name) for name in names]
    wire.close()
    server.kill()
    server = start_server("--resp", "127.0.0.1:0")
    wire = commands(server)
    assert [wire("KV.PREFIX.LOOKUP", name) for name in names] == before
    assert restored(lineages(server), root + branches[2], 512)
    wire("KV.PREFIX.SAVE")
    assert restored(lineages(server), root + branches[3], 512)
    wire.close()


def test_a_lineage_whose_rows_are_gone_is_forgotten(server: ServerProcess) -> None:
    ids = prompt(2, 256)
    store = lineages(server)
    store.store(KEY, ids, rows_for(ids))
    store.store(KEY, ids[:128] + prompt(3, 128), rows_for(ids[:128] + prompt(3, 128)))
    wire = commands(server)
    wire("KV.PREFIX.DROP", store._ns(store.model_id(KEY), 2))
    wire.close()
    fresh = lineages(server)
    match = fresh.lookup(KEY, ids[:128] + prompt(3, 128))
    fresh.fetch_rows(KEY, match, 0, match.length)
    again = lineages(server)
    assert again.lookup(KEY, ids[:128] + prompt(3, 128)).length == 128
    assert restored(again, ids, 256)


def test_journals_and_commits_survive_a_crash(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--resp", "127.0.0.1:0")
    store = lineages(server)
    store.journal_put(KEY, "job", [1, 2, 70_000])
    store.commit()
    server.kill()
    server = start_server("--resp", "127.0.0.1:0")
    store = lineages(server)
    assert store.journal_get(KEY, "job") == [1, 2, 70_000]
    store.journal_drop(KEY, "job")
    assert store.journal_get(KEY, "job") is None


# -- redis clients


@pytest.mark.parametrize("version", ["5", "7", "8"])
@pytest.mark.parametrize("options", ["", "protocol=2"])
def test_every_redis_py_connects(server: ServerProcess, version: str, options: str) -> None:
    path = PEERS / f"redis-{version}"
    if version != "8" and not path.is_dir():
        pytest.skip(f"redis-py {version} is not in {PEERS}")
    program = f"""
        import redis
        assert redis.__version__.startswith("{version}."), redis.__version__
        r = redis.Redis(port={port(server)}, {options})
        assert r.ping() and r.set("k", b"\\x00\\xff" * 100_000) and r.get("k") == b"\\x00\\xff" * 100_000
        assert r.hset("h", mapping={{"a": "1", "b": b"\\xff"}}) == 2
        assert r.hgetall("h") == {{b"a": b"1", b"b": b"\\xff"}}
        assert r.zadd("z", {{"m": 1.5}}) == 1 and r.zrange("z", 0, -1, withscores=True)[0][1] == 1.5
        assert sorted(r.scan_iter()) == [b"h", b"k", b"z"]
        with r.pipeline() as p:
            assert p.incr("n").incr("n").execute() == [1, 2]
        assert r.execute_command("KV.PREFIX.LOOKUP", "nobody") in (b"MISS", "MISS")
        assert r.info("server")["redis_version"] == "7.0.0"
        r.flushall()
        print("fine")
    """
    environment = {**os.environ, "PYTHONPATH": str(path) if version != "8" else ""}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip
    assert done.stdout == "fine\n", done.stderr


@pytest.fixture
def redis_tools() -> None:
    if shutil.which("redis-cli") is None or shutil.which("redis-benchmark") is None:
        pytest.skip("Debian's redis-tools are not installed")


@pytest.mark.usefixtures("redis_tools")
def test_redis_cli_feels_at_home(server: ServerProcess) -> None:
    def cli(*words: str, given: str = "") -> str:
        command = ["redis-cli", "-p", str(port(server)), *words]
        return subprocess.run(command, capture_output=True, text=True, input=given).stdout

    assert cli("ping") == "PONG\n"
    assert cli("-3", "hset", "h", "f", "v") == "1\n"
    assert cli("-3", "hgetall", "h") == "f v\n"
    assert cli(given="set a 'b c'\nget a\nnosuch\n") == (
        "OK\nb c\nERR unknown command 'nosuch', with args beginning with: \n\n"
    )
    assert "tcp_port" in cli("info")
    assert cli("--scan") in ("h\na\n", "a\nh\n")
    assert "all keys" in cli("--bigkeys").lower() or "Biggest" in cli("--bigkeys")


@pytest.mark.usefixtures("redis_tools")
def test_redis_benchmark_ends(server: ServerProcess) -> None:
    command = ["redis-benchmark", "-p", str(port(server)), "-t", "set,get", "--csv"]
    for options in (["-n", "2000", "-P", "16"], ["-n", "8", "-c", "2", "-d", "8388608"]):
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert '"SET"' in done.stdout
        assert '"GET"' in done.stdout


def test_the_pattern_of_a_remote_cache_backend(server: ServerProcess) -> None:
    """EXISTS, SET, GET of whole chunks from eight threads, as LMCache's connectors do."""
    import threading

    sizes = [256 << 10, 1 << 20, 3 << 20, 8 << 20]
    problems: list[str] = []

    def worker(number: int) -> None:
        wire = commands(server)
        random = np.random.default_rng(number)
        for size in sizes:
            key = f"vllm@model@1@0@{number:x}@{size}"
            chunk = random.bytes(size)
            if wire("EXISTS", key) != 0:
                problems.append("there before it was set")
            if wire("SET", key, chunk) != "OK":
                problems.append("SET")
            if wire("EXISTS", key, f"{key}metadata") != 1 or wire("GET", key) != chunk:
                problems.append("another chunk came back")
            wire("SET", f"{key}metadata", random.bytes(28))
            wire("DEL", key, f"{key}metadata")
            if wire("GET", key) is not None:
                problems.append("still there")
            wire("SET", key, chunk)
        wire.close()

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    wire = commands(server)
    assert wire("DBSIZE") == 8 * len(sizes)
    wire.close()
