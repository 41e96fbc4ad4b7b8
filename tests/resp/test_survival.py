"""Killed at any moment: what was acknowledged is there, bit for bit, and what was dropped stays gone."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.conftest import ServerProcess
from tests.resp.wire import Wire

WIDTH = 64
KILLS = 8
KILLS_SOAK = 80
Change = tuple[str, Any]


@dataclass
class Known:
    """What one client has been told, and what it has asked for and not been told yet."""

    keys: dict[str, bytes | None] = field(default_factory=dict)
    states: dict[int, bytes | None] = field(default_factory=dict)
    rows: dict[str, bytes | None] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def allowed(self, kind: str, name: Any, told: Any) -> list[Any]:
        """What may be found: what was told, or what was asked for since."""
        asked = [change[2] for change in self.pending if change[:2] == (kind, name)]
        return [told, *asked]


class Load:
    """A client that changes things of its own until its server dies."""

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.known = Known()
        self._random = random.Random(seed)
        self._bytes = np.random.default_rng(seed)

    def run(self, address: str) -> None:
        try:
            wire = Wire(address)
        except OSError:
            return
        try:
            while True:
                self._step(wire)
        except (OSError, ConnectionError, AssertionError):
            pass  # the server is gone
        finally:
            wire.close()

    def _step(self, wire: Wire) -> None:
        known, pick = self.known, self._random.random()
        if pick < 0.35:
            name = f"{self.number}:{self._random.randrange(6)}"
            value = self._bytes.bytes(self._random.choice([10, 1_000, 100_000, 400_000]))
            self._change(wire, ("SET", name, value), "keys", name, value)
        elif pick < 0.42:
            name = f"{self.number}:{self._random.randrange(6)}"
            self._change(wire, ("DEL", name), "keys", name, None)
        elif pick < 0.6:
            layer = self._random.randrange(3)
            value = self._bytes.bytes(self._random.choice([100, 300_000]))
            command = ("SSM.PREFIX.STORE", f"s{self.number}", layer, value)
            self._change(wire, command, "states", layer, value)
        elif pick < 0.66:
            layer = self._random.randrange(3)
            self._change(wire, ("SSM.PREFIX.DROP", f"s{self.number}", layer), "states", layer, None)
        elif pick < 0.92:
            name = f"p{self.number}.{self._random.randrange(3)}"
            if known.rows.get(name) is None:
                self._change(wire, ("KV.PREFIX.REGISTER", name, WIDTH, "fp16"), "rows", name, b"")
            else:
                rows = self._bytes.bytes(WIDTH * 2 * self._random.choice([1, 20, 2_000]))
                stored = known.rows[name] or b""
                first, count = len(stored) // (WIDTH * 2), len(rows) // (WIDTH * 2)
                command = ("V.STOREBATCH", f"{name}_pk", 0, first, count, rows, "FMT", "F16")
                self._change(wire, command, "rows", name, stored + rows)
        elif pick < 0.96:
            name = f"p{self.number}.{self._random.randrange(3)}"
            self._change(wire, ("KV.PREFIX.DROP", name), "rows", name, None)
        else:
            wire("KV.PREFIX.SAVE")

    def _change(
        self, wire: Wire, command: tuple[Any, ...], kind: str, name: Any, value: bytes | None
    ) -> None:
        self.known.pending.append((kind, name, value))  # type: ignore[arg-type]
        answer = wire(*command)
        assert answer in ("OK", 0, 1), answer
        getattr(self.known, kind)[name] = value
        self.known.pending.clear()

    def check(self, wire: Wire) -> None:
        """Raises AssertionError if anything is not as it was told; knows afterwards what is there."""
        known = self.known
        for name, told in list(known.keys.items()):
            found = wire("GET", name)
            assert found in known.allowed("keys", name, told), f"key {name}"
            known.keys[name] = found
        for layer, told in list(known.states.items()):
            found = wire("SSM.PREFIX.FETCH", f"s{self.number}", layer)
            assert found in known.allowed("states", layer, told), f"state {layer}"
            known.states[layer] = found
        for name, told in list(known.rows.items()):
            found = self._rows(wire, name)
            assert found in known.allowed("rows", name, told), f"rows of {name}"
            known.rows[name] = found
        known.pending.clear()

    def _rows(self, wire: Wire, name: str) -> bytes | None:
        if wire("KV.PREFIX.LOOKUP", name) == "MISS":
            return None
        info = wire("V.INFO", f"{name}_pk").decode()
        count = int(info.partition("layer_0_tokens:")[2].split("\r\n")[0] or 0)
        if not count:
            return b""
        rows: bytes = wire("V.FETCH", f"{name}_pk", 0, "RANGE", 0, count, "FMT", "NATIVE")
        return rows


def kill_again_and_again(start_server: Callable[..., ServerProcess], kills: int) -> None:
    loads = [Load(number, 1_000 + number) for number in range(4)]
    moments = random.Random(7)
    server = start_server("--resp", "127.0.0.1:0")
    for _ in range(kills):
        threads = [
            threading.Thread(target=load.run, args=(server.ready["resp"],)) for load in loads
        ]
        for thread in threads:
            thread.start()
        threads[0].join(moments.uniform(0.05, 0.8))  # a moment that nobody has chosen
        server.kill()
        for thread in threads:
            thread.join()
        server = start_server("--resp", "127.0.0.1:0")
        wire = Wire(server.ready["resp"])
        for load in loads:
            load.check(wire)
        wire.close()
    assert any(load.known.rows for load in loads), "nothing was done"
    named = {path.name for path in (server.directory / "run").glob("*.lock")}
    assert len(named) == 1, "a dead process has left its lock"
    assert not list(server.directory.rglob("*.tmp"))


@pytest.mark.faults
def test_no_acknowledged_change_is_lost_to_a_kill(
    start_server: Callable[..., ServerProcess],
) -> None:
    kill_again_and_again(start_server, KILLS)


@pytest.mark.soak
def test_no_acknowledged_change_is_lost_to_many_kills(
    start_server: Callable[..., ServerProcess],
) -> None:
    kill_again_and_again(start_server, KILLS_SOAK)


def test_two_processes_see_each_others_sessions_and_keys(
    start_server: Callable[..., ServerProcess],
) -> None:
    servers = [start_server("--resp", "127.0.0.1:0", listen="127.0.0.1:0") for _ in range(2)]
    one, other = (Wire(server.ready["resp"]) for server in servers)
    assert one("KV.PREFIX.REGISTER", "ns", WIDTH, "fp16") == "OK"
    rows = np.random.default_rng(0).bytes(WIDTH * 2 * 100)
    for layer, wire in enumerate((one, other, one, other)):
        stored = wire("V.STOREBATCH", "ns_pk", layer, 0, 100, rows, "FMT", "F16")
        assert stored == "OK"
    for wire in (one, other):
        assert wire("V.FETCH", "ns_pk", "BATCH", 0, 100, "FMT", "NATIVE") == [rows] * 4
    assert other("SET", "k", rows) == "OK"
    assert one("GET", "k") == rows
    assert other("SSM.PREFIX.STORE", "ns", 0, rows) == "OK"
    assert one("SSM.PREFIX.FETCH", "ns", 0) == rows
    assert one("KV.PREFIX.SAVE") == "OK"
    assert other("V.FETCH", "ns_pk", "BATCH", 0, 100, "FMT", "NATIVE") == [rows] * 4
    assert other("KV.PREFIX.DROP", "ns") == 1
    assert one("KV.PREFIX.LOOKUP", "ns") == "MISS"
    for wire in (one, other):
        wire.close()
