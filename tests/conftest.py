"""Fixtures: real servers in real processes, in short directories of their own."""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

# Stores that "crash" in this process keep their descriptors, as a killed process would not.
_SOFT, _HARD = resource.getrlimit(resource.RLIMIT_NOFILE)
_WANTED = 65_536 if _HARD == resource.RLIM_INFINITY else min(65_536, _HARD)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(_SOFT, _WANTED), _HARD))


# Shells have what they start in the background ignore Ctrl-C, and so would what the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """A command that ran in this process leaves its log at a stream that is closed after the test."""
    yield
    structlog.reset_defaults()


class ServerProcess:
    """A `pion-grpc serve` of its own process. Its log is kept for whoever wants to read it."""

    def __init__(self, directory: Path, *flags: str, listen: str = "", **environment: str) -> None:
        self.directory = directory
        listen = listen or f"unix:{directory}.sock"
        command = [sys.executable, "-m", "pion_grpc", "serve"]
        self.process = subprocess.Popen(
            [*command, "--data", str(directory), "--listen", listen, "--drain-ms", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
        self.log: list[dict[str, Any]] = []
        self.output: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self._ready.wait(30)
        ready = [entry for entry in self.log if entry.get("event") == "ready"]
        if not ready:
            self.kill()
            raise RuntimeError("the server did not start:\n" + "".join(self.output))
        self.ready = ready[0]
        self.address: str = ready[0]["grpc"]

    def kill(self) -> None:
        """As a crash does it."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """As an init system does it; returns the exit status."""
        return self._end(signal.SIGTERM)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Alive and answering nobody: every thread has stopped when the body begins."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @property
    def rss_bytes(self) -> int:
        """Memory of the process."""
        import psutil

        rss: int = psutil.Process(self.process.pid).memory_info().rss
        return rss

    def _end(self, number: int) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        status = self.process.wait(60)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            with contextlib.suppress(ValueError):
                self.log.append(json.loads(line))
                if self.log[-1].get("event") == "ready":
                    self._ready.set()
        self._ready.set()


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A directory whose path is short enough for Unix sockets: macOS allows 104 bytes."""
    path = Path(tempfile.mkdtemp(prefix="pion-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def start_server(short_tmp: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers; by default on the directory `data`. They end with the test."""
    servers: list[ServerProcess] = []

    def start(*flags: str, directory: Path | None = None, **options: str) -> ServerProcess:
        server = ServerProcess(directory or short_tmp / "data", *flags, **options)
        servers.append(server)
        return server

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One server for the tests of a module, which use names of their own."""
    path = Path(tempfile.mkdtemp(prefix="pion-", dir="/tmp"))
    server = ServerProcess(path / "data")
    yield server
    status = server.stop()
    shutil.rmtree(path, ignore_errors=True)
    assert status == 0, "".join(server.output)


@pytest.fixture(scope="module")
def loaded() -> Any:
    """The real model, and its tokenizer."""
    from pion_grpc.cli import smollm2

    return smollm2.load()
