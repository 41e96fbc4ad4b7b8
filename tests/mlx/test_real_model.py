"""On the real model: fetched or attended to, a prefix continues as prefilled; the quick start runs."""

import textwrap

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_client.mlx import (
    PionPromptCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    model_id,
    uninstall_pion_attention_patch,
)
from pion_grpc.cli.decode import greedy
from tests.mlx import programs
from tests.mlx.programs import WAIT_S
from tests.mlx.test_attention import LANES

pytestmark = pytest.mark.model

SYSTEM = (
    "You are a support agent for Acme. Answer in one sentence. Acme sells bicycles, trailers and "
    "lamps. Orders ship from Lyon within two days. Passwords are reset on the account page, under "
    "security. Returns are free for thirty days. The workshop is open from Tuesday to Saturday."
)
QUESTION = " How do I reset my password?"

SECOND_PROCESS = """
    import json, sys
    from pion_client.mlx import PionPromptCache, model_id
    from pion_grpc.cli import smollm2
    from pion_grpc.cli.decode import greedy

    address, prefix_ids, question_ids, namespace = json.loads(sys.argv[1])
    model, _ = smollm2.load()
    with PionPromptCache(model, address=address) as prompt_cache:
        cache = prompt_cache.get_or_prefill(prefix_ids, namespace=namespace)
        answer = greedy(model, question_ids, cache, 50).ids
        print(json.dumps([model_id(model), answer, prompt_cache.stats()]))
"""


@pytest.fixture(scope="module")
def spoken(loaded):
    """The model, a prefix, a question, and the 50 tokens that follow without any server."""
    model, tokenizer = loaded
    prefix, question = tokenizer.encode(SYSTEM), tokenizer.encode(QUESTION)
    cache = make_prompt_cache(model)
    model(mx.array([prefix]), cache=cache)
    return model, prefix, question, greedy(model, question, cache, 50).ids


def test_a_second_process_does_not_decode_other_tokens_than_a_run_without_the_server(
    spoken, server
):
    model, prefix_ids, question_ids, expected = spoken
    namespace = PionPromptCache.make_namespace("smollm2", SYSTEM)
    with PionPromptCache(model, address=server.address) as prompt_cache:
        cache = prompt_cache.get_or_prefill(prefix_ids, namespace=namespace)
        first = greedy(model, question_ids, cache, 50).ids
        assert prompt_cache.flush(WAIT_S)
        assert prompt_cache.stats()["stores"] == 1

    told = server.address, prefix_ids, question_ids, namespace
    their_id, second, stats = programs.asked(SECOND_PROCESS, *told)
    assert their_id == model_id(model)
    assert (stats["hits"], stats["tokens_prefilled"]) == (1, 0)
    assert stats["tokens_served"] == len(prefix_ids)
    assert first == second == expected


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


def test_the_quick_start_does_not_need_more_than_another_import(loaded, server, monkeypatch):
    model, tokenizer = loaded
    monkeypatch.setenv("PION_ADDRESS", server.address)
    printed, stats = [], []
    for _ in range(2):
        program = {"model": model, "tok": tokenizer.for_mlx_lm(), "print": printed.append}
        exec(textwrap.dedent(QUICK_START), program)
        program["pc"].flush(WAIT_S)
        stats.append(program["pc"].stats())
    assert printed[0] == printed[1]
    assert [(s["hits"], s["misses"], s["stores"]) for s in stats] == [(0, 1, 1), (1, 0, 0)]
    assert stats[1]["fetch_ms_total"] > 0
    assert stats[0]["store_ms_total"] > 0


QUICK_START = """
    from mlx_lm import generate
    from pion_client.mlx import PionPromptCache

    pc = PionPromptCache(model, vquant="fp16")

    system = "You are a support agent for Acme. Answer in one sentence."   # shared by every request
    prefix_ids = tok.encode(system)
    ns = PionPromptCache.make_namespace("llama-3.2-1b-4bit", "fp16", system)

    cache = pc.get_or_prefill(prefix_ids, namespace=ns)
    print(generate(model, tok,
                   prompt=tok.encode(" How do I reset my password?", add_special_tokens=False),
                   prompt_cache=cache, max_tokens=40))
"""
"""The product's own lines, after those that load `model` and `tok` from a hub."""
