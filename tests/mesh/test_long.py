"""The long ones: slow calls, upgrades of everything, machines that freeze, prefixes of gigabytes."""

import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest

from pion_client import errors
from tests.client.links import assert_same, random_layers
from tests.mesh.prompts import MODEL, prompts
from tests.mesh.shelf import Shelf
from tests.mesh.test_mesh import of_node, working
from tests.server.wire import eventually

pytestmark = pytest.mark.soak

TOKENS, SLOTS, HEADS, DIM = 131_072, 16, 4, 128
"""4.3 GB of f16."""
SLACK_BYTES = 400 << 20
SLOW_S = 61.0
"""More than a minute: proxies ping six times, and the server has long forgotten its patience."""


def test_pings_of_proxies_do_not_end_a_slow_call(fragile: Shelf) -> None:
    layers = random_layers(5, 10_000, slots=8, heads=4, dim=64)
    proxy = fragile.proxies["a"]
    pause = threading.Event()

    def slowly(done: int, total: int) -> None:
        if time.monotonic() - began < SLOW_S:
            pause.wait(SLOW_S / 40)

    with fragile.client() as client:
        client.store("slow", layers=layers, token_ids=range(10_000), model=MODEL)
        client.lookup("slow", model=MODEL, token_ids=range(10_000))
        before = [
            proxy.stat(f"cluster.pion.{name}")
            for name in ("upstream_cx_total", "upstream_rq_total")
        ]
        began = time.monotonic()
        prefix = client.fetch("slow", progress=slowly)
        assert time.monotonic() - began > SLOW_S
        assert prefix is not None
        assert_same(prefix.layers, layers)
        after = [
            proxy.stat(f"cluster.pion.{name}")
            for name in ("upstream_cx_total", "upstream_rq_total")
        ]
    assert after == [before[0], before[1] + 1], "one call, on the connection that was there"
    assert proxy.stat("cluster.pion.http2.keepalive_timeout") == 0


def test_an_upgrade_of_every_node_fails_no_call_and_loses_nothing(fragile: Shelf) -> None:
    some, others = prompts(60), prompts(60, first=60)
    with fragile.hashing() as direct, fragile.client() as through:
        for prompt in some + others:
            prompt.store(through)
        acknowledged = {name: fragile.holds(name) for name in "abc"}
        with working(through, some) as failures, working(direct, others) as more_failures:
            for name in "abc":
                assert fragile.servers[name].stop() == 0
                fragile.start(name)
                eventually(fragile.all_healthy)
                assert fragile.holds(name) >= acknowledged[name]
        assert not failures
        assert not more_failures
        assert all(prompt.fetched(through) for prompt in some + others)


def test_a_machine_that_freezes_holds_no_call_for_longer_than_it_has_time(fragile: Shelf) -> None:
    mine = of_node(fragile, "c", 8)
    with fragile.client(timeout_s=3.0) as client:
        for prompt in mine:
            prompt.store(client)
        with fragile.servers["c"].frozen():
            began = time.monotonic()
            with pytest.raises(errors.DeadlineExceeded):
                client.lookup(mine[0].name, model=MODEL, token_ids=mine[0].token_ids)
            assert time.monotonic() - began < 5
            eventually(lambda: not fragile.all_healthy(), 10)
            for prompt in mine:
                assert not prompt.fetched(client), "another node has not got it"
                prompt.store(client)
                assert prompt.fetched(client)
        eventually(fragile.all_healthy)
        assert all(prompt.fetched(client) for prompt in mine)


def overlapping(base: np.ndarray) -> list[tuple[Any, Any]]:
    """(K, V) per slot: no two alike, all of them windows of one array."""
    windows = [base[first : first + TOKENS].transpose(1, 0, 2) for first in range(2 * SLOTS)]
    return list(zip(windows[::2], windows[1::2], strict=True))


def test_gigabytes_take_the_memory_of_their_arrays_and_no_more(fragile: Shelf) -> None:
    random = np.random.default_rng(11)
    shape = (TOKENS + 2 * SLOTS, HEADS, DIM)
    base = random.integers(0, 1 << 16, shape, np.uint16).view(np.float16)
    layers = overlapping(base)
    total = TOKENS * SLOTS * 2 * HEADS * DIM * 2
    servers = [psutil.Process(server.process.pid) for server in fragile.servers.values()]
    proxies = [psutil.Process(proxy.process.pid) for proxy in fragile.proxies.values()]
    peaks = _Peaks([psutil.Process(), *servers, *proxies])
    with peaks, fragile.client() as client:
        client.store("huge", layers=layers, token_ids=range(TOKENS), model=MODEL)
        assert peaks.growth()[0] < SLACK_BYTES
        prefix = client.fetch("huge")
        assert prefix is not None
        assert prefix.transport == "stream"
        for pair, expected in zip(prefix.layers, layers, strict=True):
            for side, other in zip(pair, expected, strict=True):
                assert np.array_equal(side.view(np.uint16), other.view(np.uint16))
    own, *others = peaks.growth()
    assert own < total + SLACK_BYTES
    assert all(growth < SLACK_BYTES for growth in others), others


class _Peaks:
    """The largest memory of some processes."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self._processes = processes
        self._before = self._now()
        self._peaks = self._before
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "_Peaks":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def growth(self) -> list[int]:
        """What each has taken at most."""
        return [peak - before for peak, before in zip(self._peaks, self._before, strict=True)]

    def _now(self) -> list[int]:
        return [process.memory_info().rss for process in self._processes]

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self._peaks = list(map(max, self._peaks, self._now()))
