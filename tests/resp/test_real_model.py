"""`pion-vllm-mlx` unmodified on a real model: the second process writes what the first would have."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ServerProcess

pytest.importorskip("pion_vllm_mlx", reason="pion-vllm-mlx is not installed")
pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
    import json, os, sys
    import mlx.core as mx
    import numpy as np
    from pion_vllm_mlx import PionPromptCache
    from pion_grpc.cli import smollm2
    from pion_grpc.cli.decode import greedy

    model, tokenizer = smollm2.load()
    prefix = tokenizer.encode("You are a support agent for a bicycle workshop. " * 6)
    question = tokenizer.encode(" What is the capital of France? Answer:")
    told = {}
    for options in OPTIONS:
        for lane in LANES:
            os.environ.pop("PION_PROMPT_CACHE_NO_BATCH", None)
            if lane:
                os.environ[lane] = "1"
            cache = PionPromptCache(model, port=PORT, **options)
            name = "real " + str(options)
            found = cache.lookup(name)
            kv = cache.get_or_prefill(prefix, name)
            text = greedy(model, question, kv, 50).ids
            told[f"{options} {lane}"] = [found, cache.stats()["hits"], text]
            if not found:
                break  # once is enough to store it
    print(json.dumps(told))
"""


PLAIN = [{}]
EVERY = [{}, {"vquant": "fp8", "boundary_protect": 2}]
LANES = ["", "PION_PROMPT_CACHE_NO_EXPORT", "PION_PROMPT_CACHE_NO_BATCH"]


def in_a_process(server: ServerProcess, options: Any, lanes: Any) -> dict[str, list[Any]]:
    """What the program tells: by options and lane whether it was found, hits, and tokens."""
    port = server.ready["resp"].rpartition(":")[2]
    program = textwrap.dedent(PROGRAM)
    for name, value in (("PORT", port), ("OPTIONS", options), ("LANES", lanes)):
        program = program.replace(name, str(value))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize(
    ("options", "lanes"),
    [(PLAIN, LANES[:1]), pytest.param(EVERY, LANES, marks=pytest.mark.soak)],
    ids=["plain", "every lane"],
)
def test_a_second_process_writes_the_same_tokens_also_after_a_crash(
    start_server: Callable[..., ServerProcess], options: Any, lanes: Any
) -> None:
    server = start_server("--resp", "127.0.0.1:0")
    first = in_a_process(server, options, lanes)
    assert [told[:2] for told in first.values()] == [[False, 0]] * len(options)
    expected = [told[2] for told in first.values()]
    server.kill()
    server = start_server("--resp", "127.0.0.1:0")
    second = in_a_process(server, options, lanes)
    assert len(second) == len(options) * len(lanes)
    for how, (found, hits, tokens) in second.items():
        assert (found, hits) == (True, 1), how
        if "fp8" not in how:
            assert tokens == expected[0], how
        else:  # rows of V between the boundaries were rounded: the beginning agrees
            assert tokens[:3] == expected[-1][:3], how
