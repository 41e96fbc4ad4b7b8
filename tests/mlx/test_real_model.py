"""On the real model: what is fetched continues as what was prefilled, and the quick start runs."""

import json
import subprocess
import sys
import textwrap

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_client.mlx import PionPromptCache, model_id
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
def loaded():
    return smollm2.load()


def test_a_second_process_does_not_decode_other_tokens_than_a_run_without_the_server(
    loaded, server
):
    model, tokenizer = loaded
    prefix_ids, question_ids = tokenizer.encode(SYSTEM), tokenizer.encode(QUESTION)
    alone = make_prompt_cache(model)
    model(mx.array([prefix_ids]), cache=alone)
    expected = greedy(model, question_ids, alone, 50).ids

    namespace = PionPromptCache.make_namespace("smollm2", SYSTEM)
    with PionPromptCache(model, address=server.address) as prompt_cache:
        cache = prompt_cache.get_or_prefill(prefix_ids, namespace=namespace)
        first = greedy(model, question_ids, cache, 50).ids
        assert prompt_cache.flush(WAIT_S)
        assert prompt_cache.stats()["stores"] == 1

    arguments = json.dumps([server.address, prefix_ids, question_ids, namespace])
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SECOND_PROCESS), arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    their_id, second, stats = json.loads(ran.stdout)
    assert their_id == model_id(model)
    assert (stats["hits"], stats["tokens_prefilled"]) == (1, 0)
    assert stats["tokens_served"] == len(prefix_ids)
    assert first == second == expected


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
