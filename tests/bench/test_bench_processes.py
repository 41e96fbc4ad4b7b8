"""The peers and the rows that need no model, small: what is timed is also right."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from pion_client import Client
from pion_grpc.cli.bench import prefixes
from pion_grpc.cli.bench.processes import BareSocket, PeerMissing, Redis, Server


def test_the_bare_socket_does_not_move_other_bytes(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8)
    data.tofile(tmp_path / "data")
    with BareSocket(tmp_path / "data") as bare:
        for _ in range(2):
            assert np.array_equal(bare.receive(np.empty(data.nbytes, np.uint8)), data)
    assert bare.process.poll() is not None


def test_redis_does_not_give_other_bytes_back(tmp_path):
    pytest.importorskip("redis")
    try:
        redis = Redis(tmp_path)
    except PeerMissing as missing:
        pytest.skip(str(missing))
    data = np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8)
    with redis:
        redis.put(data.data, 1 << 20)
        assert np.array_equal(redis.get(data.nbytes), data)


def test_a_filled_directory_does_not_answer_otherwise_than_one_stored_through_the_client(tmp_path):
    hashes = prefixes.hashes(100)
    done: list[None] = []
    small = prefixes.Small(30, long_ones=3, long_tokens=1_000, table=hashes)
    prefixes.fill(tmp_path / "data", small, lambda: done.append(None))
    assert len(done) == 30
    with Server(tmp_path / "data") as server, Client(server.address) as client:
        assert client.describe().prefix_count == 30
        assert client.lookup("p29").hit
        assert np.all(client.membership(["p0"], hashes)[0])
        query = prefixes.long_ids(2, 1_000)
        query[777:] = 1
        match = client.match(model=prefixes.MODEL, token_ids=query)
        assert (match.namespace, match.matched_tokens) == ("p2", 777)
        fetched = client.fetch("p29")
        assert fetched is not None
        assert fetched.token_count == client.lookup("p29").prefix.token_count
        assert server.memory_bytes() > 1 << 20
    assert server.process.poll() is not None


def test_a_server_that_cannot_start_does_not_keep_anyone_waiting(tmp_path):
    (tmp_path / "data").write_text("a file is no directory")
    with pytest.raises(RuntimeError, match="did not start"):
        Server(tmp_path / "data")


_STARTS = """
import pathlib, sys
from pion_grpc.cli.bench.processes import Server
class Telling(Server):
    def _wait_until(self, ready):
        print(self.process.pid, flush=True)
        return super()._wait_until(ready)
with Telling(pathlib.Path(sys.argv[1])):
    sys.stdin.read()
"""


def test_who_is_interrupted_while_a_server_starts_leaves_none_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _STARTS, str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as bench:
        assert bench.stdout is not None
        server = int(bench.stdout.readline())
        bench.send_signal(signal.SIGINT)
        assert bench.wait(60) != 0
    assert not psutil.pid_exists(server)
