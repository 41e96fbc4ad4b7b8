"""`pion-vllm-mlx`, unmodified, with its second stage: attention here, the same tokens as without it."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_grpc.cli import smollm2
from pion_grpc.cli.smollm2 import random_llama
from tests.conftest import ServerProcess
from tests.resp.test_attend import attention
from tests.resp.test_real_clients import TOKENS, decoded, port, prefilled, prompt
from tests.resp.wire import Wire

client = pytest.importorskip("pion_vllm_mlx", reason="pion-vllm-mlx is not installed")
patch = pytest.importorskip("pion_vllm_mlx.mlx_lm_patch")

LAYERS, HEADS, DIM = 2, 4, 16
LANES = ("binary", "RESP")
COUNT = 30
"""Tokens that are compared; each but the first takes one query per layer."""

Connect = Callable[..., Any]


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The client's own patch; K and V never stay in the client's process."""
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    patch.install_pion_attention_patch()
    yield
    patch.uninstall_pion_attention_patch()


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Makes prompt caches of the second stage, which close nothing themselves."""
    opened: list[Any] = []

    def made(model: Any, server: ServerProcess, lane: str = "binary", **options: Any) -> Any:
        monkeypatch.setenv("PION_PROMPT_CACHE_NO_BINARY", str(int(lane != "binary")))
        opened.append(client.PionPromptCache(model, port=port(server), stage2=True, **options))
        return opened[-1]

    yield made
    for one in opened:
        one.resp.sock.close()
        if one._binary is not None:
            one._binary.close()


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    return start_server("--resp", "127.0.0.1:0", "--attend", "numpy")


def attending(model: Any, prompt_cache: Any, count: int = TOKENS, **options: Any) -> Any:
    return patch.make_pion_prompt_cache(model, "ns", prompt_cache, count, **options)


def alone(model: Any, *, count: int = COUNT, rounded: bool = False) -> list[int]:
    """What the model says with a cache of its own, perhaps of rows that binary16 has rounded."""
    cache = prefilled(model, prompt())
    if rounded:
        whole, cache = cache, make_prompt_cache(model)
        for slot, was in zip(cache, whole, strict=True):
            sides = (was.keys[:, :, :TOKENS], was.values[:, :, :TOKENS])
            slot.update_and_fetch(*(s.astype(mx.float16).astype(mx.float32) for s in sides))
    return decoded(model, cache, count)[0]


def used(prompt_cache: Any, lane: str) -> bool:
    """Whether it answered its queries over this lane to the end."""
    return (prompt_cache._binary is not None) is (lane == "binary")


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_tokens_do_not_differ_from_those_without_a_server(
    server: ServerProcess, connect: Connect, lane: str, kv_heads: int
) -> None:
    model = random_llama(kv_heads=kv_heads)
    expected = alone(model)
    first = connect(model, server, lane)
    first.get_or_prefill(prompt(), "ns")
    assert decoded(model, attending(model, first), COUNT)[0] == expected
    assert first.attend_query_calls == LAYERS * COUNT
    second = connect(model, server, lane)
    assert second.lookup("ns")
    assert decoded(model, attending(model, second), COUNT)[0] == expected
    assert used(first, lane)
    assert used(second, lane)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_what_went_cold_is_warmed_and_answers_with_the_same_tokens(
    start_server: Callable[..., ServerProcess], connect: Connect, lane: str, kv_heads: int
) -> None:
    """On a grouped model as well, for which this client names its query heads."""
    model = random_llama(kv_heads=kv_heads)
    entry_bytes = 2 * 4 * TOKENS * kv_heads * DIM
    server = start_server("--resp", "127.0.0.1:0", "--resident-budget", str(LAYERS * entry_bytes))
    prompt_cache = connect(model, server, lane)
    prompt_cache.get_or_prefill(prompt(), "ns")
    wire = Wire(server.ready["resp"])
    rows = np.zeros((kv_heads, TOKENS, DIM), np.float32).tobytes()
    for layer in range(LAYERS):
        assert wire("ATTEND.PREFIX.STORE", "x", layer, kv_heads, TOKENS, DIM, rows, rows) == "OK"
    assert wire("ATTEND.PREFIX.LOOKUP", "ns_attn", 0) == "COLD"
    assert not prompt_cache.lookup("ns")
    assert decoded(model, attending(model, prompt_cache), COUNT)[0] == alone(model, rounded=True)
    assert prompt_cache.cold_rehydrates_observed == 1
    assert used(prompt_cache, lane)
    assert attention(wire) == (LAYERS, LAYERS, 2 * LAYERS, LAYERS)
    wire.close()


@pytest.mark.parametrize("selector", ["block_mean", "quest"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_sparse_decoding_over_all_blocks_does_not_differ(
    server: ServerProcess, connect: Connect, selector: str, kv_heads: int
) -> None:
    model = random_llama(kv_heads=kv_heads)
    prompt_cache = connect(model, server)
    prompt_cache.get_or_prefill(prompt(), "ns")
    blocks = {"K_block": 16, "K_blocks": 64, "selector": selector}
    cache = attending(model, prompt_cache, sparse_full_layers=blocks)
    assert decoded(model, cache, COUNT)[0] == alone(model)
    assert prompt_cache.attend_query_calls == LAYERS * COUNT


LEGACY = """
    import sys
    from pion_grpc.cli.smollm2 import random_llama
    from tests.resp.test_attend_real_client import *

    model = random_llama(kv_heads=2)
    patch.install_pion_attention_patch()
    prompt_cache = client.PionPromptCache(model, port=int(sys.argv[1]), stage2=True)
    prompt_cache.get_or_prefill(prompt(), "ns")
    print(decoded(model, attending(model, prompt_cache), COUNT)[0])
"""


def test_a_client_that_merges_halves_itself_says_the_same(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It folds query heads into rows and needs the log-sum-exp; without groups it cannot decode."""
    monkeypatch.setenv("PION_DISABLE_FUSED_ATTEND", "1")
    command = [sys.executable, "-c", textwrap.dedent(LEGACY), str(port(server))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(alone(random_llama(kv_heads=2)))


@pytest.mark.parametrize("lane", LANES)
def test_a_frame_cut_by_the_clients_kernel_costs_no_wrong_token(
    server: ServerProcess, connect: Connect, lane: str
) -> None:
    """This client sends once and ignores how much was taken: a query this large is cut on Linux."""
    rows = np.random.default_rng(1)
    k, v = (rows.standard_normal((2, 8, 64)).astype(np.float32) for _ in range(2))
    q = rows.standard_normal((2, 1 << 15, 64)).astype(np.float32)  # 16 MiB
    model = random_llama(kv_heads=2)
    prompt_cache = connect(model, server, lane)
    prompt_cache.attend_store_layer("ns", 0, k, v)
    empty = np.zeros((2, 0, 64), np.float32)
    got = prompt_cache.attend_query_fused("ns", 0, q, empty, empty, np.arange(2, dtype=np.uint8))
    scores = q[:, ::1024] @ k.swapaxes(1, 2) / 8
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    want = weights @ v / weights.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(got[:, ::1024], want, rtol=0, atol=1e-5)


@pytest.mark.model
def test_the_real_model_says_the_same_on_both_lanes(
    server: ServerProcess, connect: Connect
) -> None:
    model, tokenizer = smollm2.load()
    ids = tokenizer.encode(
        "You are a support agent for Acme. Acme sells bicycles, trailers and lamps. Orders ship from "
        "Lyon within two days. Returns are free for thirty days."
    )
    cache = prefilled(model, ids)
    expected, _ = decoded(model, cache, 20)
    connect(model, server).get_or_prefill(ids, "ns")
    for lane in LANES:
        prompt_cache = connect(model, server, lane)
        got, _ = decoded(model, attending(model, prompt_cache, len(ids)), 20)
        assert got == expected
        assert used(prompt_cache, lane)
        assert prompt_cache.attend_query_calls == len(cache) * 20
