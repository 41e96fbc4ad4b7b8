"""The suite of the cache classes with another mlx-lm: where `state` and `meta_state` are two things."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
