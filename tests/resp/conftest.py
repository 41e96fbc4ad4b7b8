"""A RESP server in this process, on a Unix socket and a directory of its own."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pion_grpc.backends import Backend, create
from pion_grpc.config import parse_address
from pion_grpc.core.access import Access
from pion_grpc.core.attend import Attend
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.states import RecurrentStates
from pion_grpc.errors import CannotStart
from pion_grpc.resp.command import RespSettings
from pion_grpc.resp.server import RespServer
from pion_grpc.storage.directory import DataDirectory
from tests.resp.wire import Wire


class Resp:
    """A running server, and connections to it."""

    def __init__(
        self,
        directory: Path,
        access: Access | None = None,
        budget_bytes: int = 1 << 30,
        resident_bytes: int = 0,
        window: int = 0,
        backend: Backend | None = None,
        **settings: Any,
    ) -> None:
        self.store = PrefixStore(DataDirectory(directory), budget_bytes=budget_bytes)
        listen = parse_address(settings.pop("listen", f"unix:{directory}.sock"))
        try:
            states = RecurrentStates(self.store)
            self.attend = None
            if resident_bytes:
                backend = backend or create("numpy")
                self.attend = Attend(backend, self.store, resident_bytes, window=window)
            self.server = RespServer(
                self.store,
                states,
                access or Access({}),
                RespSettings(listen, **settings),
                self.attend,
            )
        except CannotStart:
            self.store.close()
            raise
        self.address = self.server.address
        self.server.start()
        self._wires: list[Wire] = []

    def connect(self) -> Wire:
        wire = Wire(self.address)
        self._wires.append(wire)
        return wire

    def stop(self) -> None:
        for wire in self._wires:
            wire.close()
        self.server.stop()
        self.store.close()


@pytest.fixture
def start_resp(short_tmp: Path) -> Iterator[Callable[..., Resp]]:
    """Starts servers on the directory `data`; they end with the test."""
    running: list[Resp] = []

    def start(**options: Any) -> Resp:
        running.append(Resp(short_tmp / "data", **options))
        return running[-1]

    yield start
    for resp in running:
        if resp.server.is_running:
            resp.stop()


@pytest.fixture(scope="module")
def resp() -> Iterator[Resp]:
    """One server for the tests of a module, which use names of their own."""
    path = Path(tempfile.mkdtemp(prefix="pion-", dir="/tmp"))
    resp = Resp(path / "data")
    yield resp
    resp.stop()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def wire(resp: Resp) -> Wire:
    """A connection to it."""
    return resp.connect()
