"""A process that is killed at any step of storing a bundle leaves all of it or nothing.

The steps are those that the file layer and the catalogue take, each by itself: also the ones between a
segment that has its name and the transaction that names it. SIGKILL is real; so is the process.
"""

import itertools
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import apsw

from pion_grpc.core.values import FetchQuery
from pion_grpc.storage.files import Files
from pion_wire.layout import PartInfo
from tests.core.support import (
    SMALL,
    Machine,
    drain,
    look,
    matched,
    opened,
    part,
    put,
    stray_files,
    tokens,
    truth,
)

IDS = tokens(130)
OLD = (b"o" * 300, b"ld")
NEW = (b"n" * 5_000, b"ew" * 40, b"")
PARTS: tuple[tuple[PartInfo, ...], tuple[PartInfo, ...]] = (
    (part("state", 130, OLD[0]), part("ring", 130, OLD[1])),
    (part("state", 130, NEW[0]), part("ring", 130, NEW[1], slot=1), part("state", 64, NEW[2])),
)


class Countdown:
    """Kills this process at the step that it counts down to, once it is armed."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.armed = False

    def step(self) -> None:
        if self.armed:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)


class CountingFiles(Files):
    """Takes a step before and after whatever is done to a file."""

    def __init__(self, countdown: Countdown) -> None:
        self._step = countdown.step

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found

        def counted(*given: Any) -> Any:
            self._step()
            result = found(*given)
            self._step()
            return result

        return counted


def store_and_die(path: Path, steps: int) -> None:
    """Stores the new bundle over the old one, and dies at a step if it takes so many."""
    countdown = Countdown(steps)

    def before_each_statement(*_: object) -> bool:
        countdown.step()
        return True

    def traced(connection: apsw.Connection) -> None:
        connection.exec_trace = before_each_statement

    apsw.connection_hooks.append(traced)
    store = Machine(path, CountingFiles(countdown)).start()
    countdown.armed = True
    put(store, "bundle", IDS, parts=PARTS[1], part_bytes=NEW, replace=True)


def die_at_every_step(root: Path) -> None:
    """Stores as often as there are steps, each time in a process and a directory of its own."""
    for steps in itertools.count():
        machine = Machine(root / str(steps))
        put(machine.start(), "bundle", IDS, parts=PARTS[0], part_bytes=OLD)
        machine.close()
        child = os.fork()  # nothing runs here but this
        if not child:
            code = 1
            try:
                store_and_die(machine.path, steps)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))


def found(machine: Machine) -> tuple[bytes, ...]:
    """What a new process finds of the bundle: rows and parts that belong together."""
    store = machine.start()
    assert look(store, "bundle", token_ids=IDS).hit
    fetch = opened(store, FetchQuery("bundle", part_kinds=("state", "ring")))
    assert fetch is not None
    rows, parts = drain(store, fetch)
    assert rows == truth(SMALL, IDS)
    assert matched(store, IDS, part_kinds=("state", "ring")).served_tokens == 130
    store.clean()
    store.tick()
    assert stray_files(store) == []
    machine.crash(store)
    return tuple(parts.values())


def test_a_bundle_that_was_being_stored_is_never_half_there(tmp_path: Path) -> None:
    killing = multiprocessing.get_context("spawn").Process(
        target=die_at_every_step, args=(tmp_path,)
    )
    killing.start()
    killing.join()
    assert killing.exitcode == 0
    outcomes = []
    for step in range(len(list(tmp_path.iterdir()))):
        machine = Machine(tmp_path / str(step))
        outcomes.append(found(machine))
        machine.close()
    assert set(outcomes) == {OLD, NEW[:2]}
    assert outcomes == sorted(outcomes, key=[OLD, NEW[:2]].index), (
        "it was there, and then it was not"
    )
