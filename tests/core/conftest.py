"""A machine with one data directory, and a store on it, for the tests that need no special ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pion_grpc.core.prefix_store import PrefixStore
from tests.core.support import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "data")
    yield machine
    machine.close()


@pytest.fixture
def store(machine: Machine) -> PrefixStore:
    return machine.start()
