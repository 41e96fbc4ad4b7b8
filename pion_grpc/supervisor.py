"""Several server processes on one data directory, and the parent that starts and stops them.

The parent serves nothing: it binds every RESP address once, hands the sockets down, and starts a fresh
process again where one dies, which costs nobody more than a connection. On the gRPC side every worker
binds the same port (SO_REUSEPORT); where that cannot be, on macOS and with a Unix socket, worker 0
serves it alone. Workers are started anew, never forked: gRPC and MLX do not survive a fork. They end
with their parent, however that ends: the pipe that told them what they are is kept open until then.

What only one process knows is that worker's own: its receipt. Attend is off: one compute device has
one owner.
"""

import contextlib
import dataclasses
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import structlog

from pion_grpc import __version__
from pion_grpc.config import Address, Config
from pion_grpc.errors import CannotStart
from pion_grpc.resp.sockets import UNBOUND, Block, bind_blocks, bound_address, why_not_bound

RESTART_S = 1.0
"""A worker that died is started again after so long: one that cannot start does not take a core."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True)
class Worker:
    """One worker, as its own process sees it."""

    index: int
    count: int
    resp: Block | None
    """The sockets that the parent has bound; None without RESP."""
    ready: int
    """Where to write a byte once it serves."""

    @property
    def shares_grpc(self) -> bool:
        """Whether gRPC's port is every worker's."""
        return sys.platform == "linux"

    def serves_grpc(self, listen: Address) -> bool:
        """Whether this worker serves an address over gRPC."""
        return self.index == 0 or (self.shares_grpc and not listen.path)


def supervise(config: Config) -> int:
    """Runs the workers of a configuration until told to stop, and returns the exit status.

    Raises:
        CannotStart: an address cannot be bound, or a worker does not come up.
    """
    os.umask(0o077)
    resp = config.resp_address
    blocks = bind_blocks(resp, config.workers) if resp else []
    grpc_port = _reserved(config.grpc_address)
    if grpc_port is not None:
        address = bound_address(grpc_port, config.grpc_address)
        config = dataclasses.replace(config, listen=str(address))
    return _Supervisor(config, blocks).run()


class _Supervisor:
    def __init__(self, config: Config, blocks: list[Block]) -> None:
        self._config = config
        self._blocks = blocks
        self._events: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told)
        try:
            self._start_all()
        except BaseException:
            self._end()
            raise
        if not self._stopping:  # else told to while they were starting
            self._look_after_them()
        return self._end()

    def _look_after_them(self) -> None:
        _log.info("ready", **self._addresses(), pid=os.getpid(), version=__version__)
        while not self._stopping:
            event, index = self._events.get()
            if event == "exit" and not self._stopping:
                _log.error("a worker died", worker=index, status=self._processes[index].returncode)
                time.sleep(RESTART_S)
                if not self._stopping:
                    self._start(index)

    def _addresses(self) -> dict[str, Any]:
        config = self._config
        shown: dict[str, Any] = {"grpc": config.listen}
        if config.resp_address:
            shown["resp"] = str(bound_address(self._blocks[0].resp, config.resp_address))
        return shown | {"workers": config.workers, "data": str(config.data.resolve())}

    def _start_all(self) -> None:
        for index in range(self._config.workers):
            if self._stopping:
                return
            if not self._start(index) and not self._stopping:
                raise CannotStart(f"worker {index} did not come up: its own words are above")

    def _start(self, index: int) -> bool:
        """Starts one worker; returns when it serves, or False if it does not."""
        block = self._blocks[index] if self._blocks else None
        sockets = [None if s is None else s.fileno() for s in block] if block else None
        reader, writer = os.pipe()
        inherited = [fd for fd in (sockets or []) if fd is not None] + [writer]
        process = subprocess.Popen(
            [sys.executable, "-m", "pion_grpc.worker"],
            stdin=subprocess.PIPE,
            pass_fds=inherited,
            process_group=0,  # Ctrl-C is told to the parent, who tells them when they can take it
        )
        os.close(writer)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(_described(self._config, index, sockets, writer))
            process.stdin.flush()
        self._processes[index] = process
        serves = os.read(reader, 1) == b"\1"  # the end of the pipe is the end of the process
        os.close(reader)
        threading.Thread(target=self._watch, args=(index, process), daemon=True).start()
        return serves

    def _watch(self, index: int, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        self._events.put(("exit", index))

    def _told(self, number: int, frame: object) -> None:
        self._stopping = True
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        self._events.put(("told", number))

    def _end(self) -> int:
        self._stopping = True
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        status = max((process.wait() for process in self._processes.values()), default=0)
        for address in (self._config.resp_address, self._config.grpc_address):
            if address and address.path:
                Path(address.path).unlink(missing_ok=True)
        return max(status, 0)  # below: one had to go before it could take the signal


def _reserved(address: Address) -> socket.socket | None:
    """Returns a socket that keeps a port free for all workers, if any port will do.

    Raises:
        CannotStart: there is none at this address.
    """
    if address.path or address.port or sys.platform != "linux":
        return None
    kept = socket.socket(address.family)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        kept.bind((address.host, 0))
    except UNBOUND as error:
        kept.close()
        raise CannotStart(f"cannot listen on {address}: {why_not_bound(address, error)}") from error
    return kept


def _described(config: Config, index: int, sockets: list[int | None] | None, ready: int) -> bytes:
    return pickle.dumps((config, index, sockets, ready))


def told_by(stream: IO[bytes]) -> tuple[Config, Worker]:
    """Returns what the parent tells a worker that it is."""
    config, index, descriptors, ready = pickle.load(stream)  # the parent's own words
    block: Block | None = None
    if descriptors is not None:
        resp, lane, affinity = (
            None if fd is None else socket.socket(fileno=fd) for fd in descriptors
        )
        assert resp is not None, "a block begins with RESP"
        block = Block(resp, lane, affinity)
    return config, Worker(index, config.workers, block, ready)
