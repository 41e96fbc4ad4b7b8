"""The processes that a row measures: our server, a bare socket, redis-server.

Knows how to start and stop them and how much memory they hold; not what is asked of them.
"""

import contextlib
import importlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

START_S_MAX = 120.0
"""A process that is not ready after this long is ended."""


class PeerMissing(Exception):
    """A peer of a row is not installed; the message says how to get it."""


class _Process:
    """A child process that says when it is ready; ends with the context."""

    def __init__(self, command: Sequence[str], *, ready: str) -> None:
        self._command = " ".join(command)
        started = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._said: list[str] = []
        try:
            self.ready_line = self._wait_until(ready)
        except BaseException:  # Ctrl-C too: the context that would end it has not begun
            self.process.kill()
            self.process.wait()
            raise
        self.start_s = time.perf_counter() - started
        """From its creation until it was ready."""
        self._drainer = threading.Thread(target=self._drain, daemon=True)
        self._drainer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops it as an init system does."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it as a crash does."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        self.process.wait()
        self._drainer.join()

    def _wait_until(self, ready: str) -> str:
        assert self.process.stdout is not None
        impatience = threading.Timer(START_S_MAX, self.process.kill)
        try:
            impatience.start()
            for line in self.process.stdout:
                self._said.append(line)
                if ready in line:
                    return line
        finally:
            impatience.cancel()
        self.process.stdout.close()
        raise RuntimeError(f"{self._command} did not start:\n{''.join(self._said)}")

    def _drain(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for _ in self.process.stdout:
                pass


class Server(_Process):
    """`pion-grpc serve` on loopback TCP."""

    def __init__(self, directory: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "pion_grpc", "serve", "--data", str(directory)]
        command += ["--listen", "127.0.0.1:0", "--drain-ms", "0", *flags]
        super().__init__(command, ready='"ready"')
        self.address: str = json.loads(self.ready_line)["grpc"]

    def memory_bytes(self) -> int:
        """How much memory it holds now.

        Raises:
            PeerMissing: psutil is not installed.
        """
        try:
            psutil: Any = importlib.import_module("psutil")
        except ImportError:
            raise PeerMissing("psutil is not installed: pip install psutil") from None
        rss: int = psutil.Process(self.process.pid).memory_info().rss
        return rss


class BareSocket(_Process):
    """Bytes over loopback TCP with nothing around them."""

    def __init__(self, path: Path) -> None:
        super().__init__([sys.executable, "-m", f"{__package__}.peer", str(path)], ready="\n")
        self._connection = socket.create_connection(("127.0.0.1", int(self.ready_line)))

    def stop(self) -> None:
        """Closes its connection, with which it ends."""
        self._connection.close()
        super().stop()

    def receive(self, buffer: np.ndarray) -> np.ndarray:
        """Asks for the file and fills the buffer, which has its size."""
        view = buffer.data
        self._connection.sendall(b"!")
        while view:
            count = self._connection.recv_into(view)
            if not count:
                raise RuntimeError("the bare socket was closed")
            view = view[count:]
        return buffer


class Redis(_Process):
    """redis-server on loopback TCP; spoken to with redis-py and hiredis."""

    def __init__(self, directory: Path, *, appendonly: bool = False) -> None:
        """Starts it; with `appendonly` every write is appended to a file, else nothing is written.

        Raises:
            PeerMissing: server, client or parser is not installed.
        """
        program = shutil.which("redis-server")
        if program is None:
            raise PeerMissing("redis-server is not installed: apt-get install redis-server")
        try:
            client = importlib.import_module("redis")
            importlib.import_module("hiredis")
        except ImportError:
            raise PeerMissing("redis-py is not installed: pip install 'redis[hiredis]'") from None
        self.port = port = _free_port()
        command = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)]
        command += ["--save", "", "--appendonly", "yes" if appendonly else "no"]
        command += ["--daemonize", "no"]
        super().__init__(command, ready="Ready to accept connections")
        # Reads of 256 KiB to 4 MiB instead of its 64 KiB, and a pipeline, were no quicker.
        self._redis: Any = client.Redis(port=port)

    def stop(self) -> None:
        """Closes the connection first."""
        self._redis.close()
        super().stop()

    def put(self, data: memoryview, value_bytes: int) -> None:
        """Stores the bytes as values of this size, by number."""
        self._value_bytes = value_bytes
        for number, begin in enumerate(range(0, len(data), value_bytes)):
            self._redis.set(str(number), bytes(data[begin : begin + value_bytes]))

    def set(self, key: str, value: bytes) -> None:
        """Stores one value."""
        self._redis.set(key, value)

    def value(self, number: int) -> bytes:
        """Fetches the value of a number."""
        value: bytes = self._redis.get(str(number))
        return value

    def clear(self) -> None:
        """Removes everything."""
        self._redis.flushall()

    def get(self, size: int) -> np.ndarray:
        """Fetches all of them into one new array."""
        buffer = np.empty(size, np.uint8)
        view = buffer.data
        for number, begin in enumerate(range(0, size, self._value_bytes)):
            value = self._redis.get(str(number))
            view[begin : begin + len(value)] = value
        return buffer


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
