"""The store's contract, held on real files and on those whose power can be cut."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.contract import StoreContract
from tests.core.support import Machine, power_cut_machine


class TestOnRealFiles(StoreContract):
    """On the machine that most tests have."""


class TestOnFilesThatForget(StoreContract):
    @pytest.fixture
    def machine(self, tmp_path: Path) -> Iterator[Machine]:
        machine = power_cut_machine(tmp_path / "data")
        yield machine
        machine.close()
