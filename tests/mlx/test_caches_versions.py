"""The suite of the cache classes with another mlx-lm: where `state` and `meta_state` are two things."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_client.mlx import PionPromptCache
from tests.mlx import families
from tests.mlx.continuing import decoded

PEERS = Path(sys.prefix) / "peers"
"""Installed by `make setup`, beside the environment."""
ROOT = Path(__file__).parents[2]
OTHER = "0.31.3"


@pytest.mark.parametrize(
    "suite",
    ["test_caches_classes.py", pytest.param("test_families.py", marks=pytest.mark.soak)],
)
def test_another_version_of_mlx_lm_is_not_kept_otherwise(suite):
    peer = PEERS / f"mlx-lm-{OTHER}"
    assert peer.is_dir(), "make setup installs it"
    command = [sys.executable, "-c", "import mlx_lm; print(mlx_lm.__version__)"]
    environment = {**os.environ, "PYTHONPATH": str(peer)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == OTHER
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-m", "not soak", "-p", "no:cacheprovider"),
            f"tests/mlx/{suite}",
        ],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]


STORE = """
    import sys
    from pion_client.mlx import PionPromptCache
    from tests.mlx import families

    for family in sys.argv[2:]:
        model = families.build(family)
        with PionPromptCache(model, address=sys.argv[1], model_id=family) as prompt_cache:
            prompt_cache.get_or_prefill(families.tokens(40))
            prompt_cache.flush()
            assert prompt_cache.stats()["stores"] == 1, prompt_cache.stats()
"""


def test_what_another_version_stored_is_not_lost(server):
    stored = ["gemma3_text", "mamba", "falcon_h1", "deepseek_v3"]
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STORE), server.address, *stored],
        env={**os.environ, "PYTHONPATH": str(PEERS / f"mlx-lm-{OTHER}")},
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    for family in stored:
        model = families.build(family)
        with PionPromptCache(model, address=server.address, model_id=family) as prompt_cache:
            cache = prompt_cache.get_or_prefill(families.tokens(40))
            assert prompt_cache.stats()["tokens_served"] == 40, prompt_cache.stats()
        own = make_prompt_cache(model)
        model(mx.array([families.tokens(40)]), cache=own)
        # Another version may form its sums in another order, so not the same bits.
        assert np.allclose(decoded(model, cache), decoded(model, own), atol=1e-3)
