"""Client processes that are killed, or freeze, in the middle: nobody sees half of anything."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pion_wire.messages import layout_to_message
from tests.conftest import ServerProcess
from tests.faults.dying_client import SAMPLE
from tests.server.wire import Sample, Wire, eventually

pytestmark = pytest.mark.faults

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def halfway(server: ServerProcess, what: str) -> Iterator["subprocess.Popen[str]"]:
    """A client process in the middle of something."""
    command = [sys.executable, "-m", "tests.faults.dying_client", server.address, what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "halfway\n"
            yield client
        finally:
            client.kill()


def files(server: ServerProcess) -> list[str]:
    return [name for part in ("segments", "rows") for name in os.listdir(server.directory / part)]


@pytest.fixture(params=["127.0.0.1:0", ""], ids=["TCP", "Unix socket"])
def server(request, start_server) -> ServerProcess:
    server: ServerProcess = start_server(listen=request.param)
    return server


def test_half_of_a_store_is_not_there_when_its_client_is_killed(server: ServerProcess) -> None:
    with Wire(server.address) as wire, halfway(server, "store") as client:
        eventually(lambda: files(server))
        assert wire.names() == []
        assert not wire.lookup(SAMPLE.namespace).hit
        assert not wire.fetch(SAMPLE.namespace).header.found
        assert wire.call("Describe").disk_used_bytes > SAMPLE.row_bytes, "reserved"
        client.kill()
        eventually(lambda: not files(server))
        eventually(lambda: wire.call("Describe").disk_used_bytes < 8 << 20)
        assert wire.names() == []
        wire.store(SAMPLE)
        assert wire.fetch(SAMPLE.namespace).tensors == SAMPLE.tensors


def test_what_was_to_be_replaced_stays_when_the_client_is_killed(server: ServerProcess) -> None:
    old = Sample(SAMPLE.namespace, 100)
    with Wire(server.address) as wire:
        wire.store(old)
        with halfway(server, "store") as client:
            eventually(lambda: len(files(server)) == 2)
            assert wire.fetch(old.namespace).tensors == old.tensors
            client.kill()
        eventually(lambda: len(files(server)) == 1)
        assert wire.fetch(old.namespace).tensors == old.tensors


def test_half_of_a_batch_of_rows_is_not_there_when_its_client_is_killed(
    server: ServerProcess,
) -> None:
    with Wire(server.address) as wire:
        layout = layout_to_message(SAMPLE.layout)
        wire.call("Register", namespace="dying/rows", layout=layout)
        with halfway(server, "rows") as client:
            eventually(lambda: files(server))
            assert not wire.fetch("dying/rows").header.found
            client.kill()
        eventually(lambda: not files(server))
        eventually(lambda: wire.call("Describe").disk_used_bytes < 8 << 20)
        assert not wire.fetch("dying/rows").header.found


def test_a_fetch_ends_when_its_client_is_killed(server: ServerProcess) -> None:
    process = psutil.Process(server.process.pid)
    with Wire(server.address) as wire:
        wire.store(SAMPLE)
        with halfway(server, "fetch") as client:
            wire.call("Drop", namespaces=[SAMPLE.namespace])
            client.kill()
        eventually(lambda: not [f for f in process.open_files() if "segments" in f.path])
        assert wire.receipt().tokens_served == 0


def test_a_client_that_freezes_is_cut_off(start_server) -> None:
    server = start_server("--stall-ms", "1000")
    with Wire(server.address) as wire, halfway(server, "store") as client:
        eventually(lambda: files(server))
        client.send_signal(signal.SIGSTOP)
        eventually(lambda: not files(server))
        assert wire.names() == []
        wire.store(SAMPLE)
        client.send_signal(signal.SIGCONT)
        assert wire.fetch(SAMPLE.namespace).tensors == SAMPLE.tensors


def test_clients_killed_over_and_over_leave_nothing(start_server) -> None:
    server = start_server("--streams-max", "4")
    with Wire(server.address) as wire:
        for _ in range(6):
            with halfway(server, "store") as client:
                client.kill()
        eventually(lambda: not files(server))
        wire.store(SAMPLE)
        assert wire.fetch(SAMPLE.namespace).tensors == SAMPLE.tensors
