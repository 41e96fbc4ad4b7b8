"""Models of all kinds of caches: another process must not write another text than the first one."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache

from pion_client import Client
from pion_client.mlx import PionPromptCache
from tests.mlx import families
from tests.mlx.continuing import decoded, prompt

WAIT_S = 120.0
"""Longer than anything here takes; only a broken test waits so long."""
ROOT = Path(__file__).parents[2]
BEFORE_0_32 = hasattr(mlx_lm_cache.KVCache, "meta_state")
COUNTS = (7, families.WINDOW, 40)
"""Tokens: below, at and beyond every window."""
HALF = ("llama", "gemma3_text", "mamba2", "falcon_h1")
JOBS = [f"{family}:float32:{count}" for family in families.CONFIGS for count in COUNTS]
JOBS += [f"{family}:bfloat16:40" for family in HALF]
LONG = ["mamba:float32:2048", "mamba2:float32:1024", "rwkv7:float32:512", "qwen3_next:float32:700"]
LONG_STEPS = ["mamba:float32:64:2048", "mamba2:float32:64:1024", "rwkv7:float32:64:512"]


class Continued:
    """What a job leads to: in the first process, from a file of mlx-lm if it can, in another process."""

    def __init__(self, first, loaded):
        self.first, self.loaded = first, loaded
        self.fetched, self.stats = None, {}


def first_process(client, job, path):
    model, ids, steps = prompt(job)
    with PionPromptCache(model, client=client) as prompt_cache:
        cache = prompt_cache.get_or_prefill(ids)
        assert prompt_cache.flush(WAIT_S)
        assert prompt_cache.stats()["stores"] == 1, prompt_cache.stats()
    if not all(hasattr(mlx_lm_cache, type(slot).__name__) for slot in cache):
        return Continued(decoded(model, cache), None)  # mlx-lm does not load classes of its models
    mlx_lm_cache.save_prompt_cache(str(path), cache)
    loaded = mlx_lm_cache.load_prompt_cache(str(path))
    return Continued(decoded(model, cache, steps), decoded(model, loaded, steps))


def run(server, directory, jobs):
    with Client(server.address) as client:
        client.drop(*(prefix.namespace for prefix in client.list()))
        found = {job: first_process(client, job, directory / "c.safetensors") for job in jobs}
    results = directory / "logits.npz"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.mlx.continuing", server.address, str(results), *jobs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    logits = np.load(results)
    for job, line in zip(jobs, ran.stdout.splitlines(), strict=True):
        found[job].fetched, found[job].stats = logits[job], json.loads(line)
    return found


def assert_same(continued, job):
    count = int(job.split(":")[2])
    stats = continued.stats
    assert (stats["tokens_served"], stats["tokens_prefilled"]) == (count, 0), stats
    assert np.isfinite(continued.first).all()
    if continued.loaded is not None:
        assert np.array_equal(continued.fetched, continued.loaded)
    if not (BEFORE_0_32 and job.startswith("llama4")):  # mlx-lm loses rows of its own chunks there
        assert np.array_equal(continued.fetched, continued.first)


@pytest.fixture(scope="module")
def continued(server, tmp_path_factory):
    return run(server, tmp_path_factory.mktemp("families"), JOBS)


@pytest.mark.parametrize("job", JOBS)
def test_another_process_does_not_compute_other_logits(continued, job):
    assert_same(continued[job], job)


@pytest.mark.parametrize("family", families.CONFIGS)
def test_a_family_does_not_write_the_same_whatever_its_cache_holds(continued, family):
    """Else the tests above would show nothing: these caches are of other tokens."""
    logits = [continued[f"{family}:float32:{count}"].first for count in COUNTS]
    assert not np.array_equal(logits[0][:8], logits[1][:8])
    assert not np.array_equal(logits[1][:8], logits[2][:8])


def test_long_recurrences_do_not_end_elsewhere_in_another_process(server, tmp_path):
    for job, found in run(server, tmp_path, LONG).items():
        assert_same(found, job)


@pytest.mark.soak
def test_long_texts_do_not_drift_apart_from_one_state(server, tmp_path):
    for job, found in run(server, tmp_path, LONG_STEPS).items():
        assert_same(found, job)
