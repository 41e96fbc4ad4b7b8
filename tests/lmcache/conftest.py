"""LMCache's own package against a server of ours, which runs in the project's environment."""

import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore = [] if importlib.util.find_spec("lmcache") else ["test_connectors.py"]
"""Where LMCache is not installed there is nothing to test; `make test-lmcache` installs it."""

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

PYTHON = os.environ.get("PION_PYTHON", str(Path(__file__).parents[2] / ".venv/bin/python"))


@pytest.fixture(scope="session")
def port() -> Iterator[int]:
    """The RESP port of a server."""
    with tempfile.TemporaryDirectory(prefix="pion-", dir="/tmp") as directory:
        command = [PYTHON, "-m", "pion_grpc", "serve", "--data", f"{directory}/data"]
        command += ["--listen", f"unix:{directory}/grpc", "--resp", "127.0.0.1:0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            ready = next(
                entry for line in server.stdout if (entry := json.loads(line))["event"] == "ready"
            )
            yield int(ready["resp"].rpartition(":")[2])
            server.terminate()
            try:
                assert server.wait(30) == 0
            finally:
                server.kill()
