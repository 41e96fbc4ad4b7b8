"""On the real model: what it writes over a prefix on the server is what it writes alone."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_client.mlx import (
    PionPromptCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)
from pion_grpc.cli import smollm2
from pion_grpc.cli.decode import greedy

pytestmark = pytest.mark.model

WAIT_S = 300.0
"""Longer than anything here takes, also without a fast BLAS."""
SYSTEM = (
    "You are a support agent for Acme. Answer in one sentence. Acme sells bicycles, trailers and "
    "lamps. Orders ship from Lyon within two days. Passwords are reset on the account page, under "
    "security. Returns are free for thirty days. The workshop is open from Tuesday to Saturday."
)
QUESTION = " How do I reset my password?"
NO_INPROC = {"PION_PROMPT_CACHE_NO_INPROC": "1"}
LANES = {
    "in-process": {},
    "stream": NO_INPROC,
    "unary": {**NO_INPROC, "PION_PROMPT_CACHE_NO_STREAM": "1"},
    "stream, joined here": {**NO_INPROC, "PION_DISABLE_FUSED_ATTEND": "1"},
}


@pytest.fixture(scope="module")
def spoken():
    """The model, a prefix, a question, and the 50 tokens that follow without any server."""
    model, tokenizer = smollm2.load()
    prefix, question = tokenizer.encode(SYSTEM), tokenizer.encode(QUESTION)
    cache = make_prompt_cache(model)
    model(mx.array([prefix]), cache=cache)
    return model, prefix, question, greedy(model, question, cache, 50).ids


@pytest.mark.parametrize("lane", LANES)
def test_fifty_tokens_do_not_differ_on_any_lane(spoken, server, monkeypatch, lane):
    model, prefix, question, expected = spoken
    for name, value in LANES[lane].items():
        monkeypatch.setenv(name, value)
    install_pion_attention_patch()
    try:
        with PionPromptCache(model, address=server.address, stage2=True) as prompt_cache:
            prompt_cache.get_or_prefill(prefix, "support")
            cache = make_pion_prompt_cache(model, "support", prompt_cache, len(prefix))
            assert prompt_cache.flush(WAIT_S)
            assert greedy(model, question, cache, 50).ids == expected
            stats = prompt_cache.stats()
    finally:
        uninstall_pion_attention_patch()
    assert stats["lane"] == lane.partition(",")[0]
    assert stats["attend"]["reason"] == ""
    assert stats["attend"]["calls"] == (0 if lane == "in-process" else 30 * 52)
