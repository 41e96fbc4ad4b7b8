"""What the client's tests share: prefixes with arbitrary bits, and links that break.

A link is a TCP proxy before a real server. It cuts, freezes or damages what passes, at an exact byte.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

Pairs = list[tuple[Any, Any]]
BF16 = np.dtype(ml_dtypes.bfloat16)


def random_bits(seed: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of arbitrary bits, infinities and NaNs among them."""
    dtype = np.dtype(dtype)
    unsigned = np.uint16 if dtype.itemsize == 2 else np.uint32
    most = np.iinfo(unsigned).max
    bits: Any = np.random.default_rng(seed).integers(0, most, shape, unsigned, True)
    array: np.ndarray = bits.view(dtype)
    return array


def random_layers(
    seed: int, tokens: int, *, slots: int = 2, heads: int = 2, dim: int = 16, dtype: Any = BF16
) -> Pairs:
    """(K, V) per slot."""
    shape = (heads, tokens, dim)
    return [
        (random_bits(seed + 2 * slot, shape, dtype), random_bits(seed + 2 * slot + 1, shape, dtype))
        for slot in range(slots)
    ]


def bits(array: Any) -> np.ndarray:
    """The bits of a NumPy or an MLX array."""
    if not isinstance(array, np.ndarray):
        import mlx.core as mx

        array = np.asarray(array.view(mx.uint16 if array.itemsize == 2 else mx.uint32))
    return array.view(np.uint16 if array.itemsize == 2 else np.uint32)


def assert_same(got: Pairs, expected: Pairs) -> None:
    """Types, shapes and every bit."""
    assert len(got) == len(expected)
    for got_pair, expected_pair in zip(got, expected, strict=True):
        for mine, theirs in zip(got_pair, expected_pair, strict=True):
            assert str(mine.dtype).removeprefix("mlx.core.") == str(theirs.dtype)
            assert tuple(mine.shape) == theirs.shape
            np.testing.assert_array_equal(bits(mine), bits(theirs))


def cut_rows(layers: Pairs, begin: int, end: int) -> Pairs:
    """Rows `begin` to `end` of every tensor."""
    return [(k[:, begin:end], v[:, begin:end]) for k, v in layers]


class Link:
    """A way to a server on which faults happen, counted over what comes down from the server.

    Args:
        upstream: `host:port` or `unix:/path` of a real server.
        cut_down: cut each connection after so many bytes from the server …
        cut_up: … or to it.
        cuts: how many connections; later ones work.
        freeze_down: after so many bytes from the server nothing passes any more, nothing closes.
        flip_down: damage the byte after so many bytes from the server, once.
        on_cut: called between a cut and the next connection.
    """

    def __init__(
        self,
        upstream: str,
        *,
        cut_down: int | None = None,
        cut_up: int | None = None,
        cuts: int = 1,
        freeze_down: int | None = None,
        flip_down: int | None = None,
        on_cut: Callable[[], None] = lambda: None,
    ) -> None:
        self.down_bytes: list[int] = []
        """What came down, per connection."""
        self.up_data = bytearray()
        self._upstream = upstream
        self._cut_down, self._cut_up, self._cuts = cut_down, cut_up, cuts
        self._freeze_down, self._flip_down = freeze_down, flip_down
        self._on_cut = on_cut
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def connections(self) -> int:
        """How many there have been."""
        return len(self.down_bytes)

    def cut(self) -> None:
        """Cuts every connection; new ones work."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for end in sockets:
            _reset(end)

    def close(self) -> None:
        """Cuts everything."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = _connect(self._upstream)
            with self._lock:
                number = len(self.down_bytes)
                self.down_bytes.append(0)
                self._sockets += [client, server]
            for source, target, down in ((server, client, True), (client, server, False)):
                arguments = (source, target, down, number)
                threading.Thread(target=self._pump, args=arguments, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, down: bool, number: int) -> None:
        limit = self._cut_down if down else self._cut_up
        if number >= self._cuts:
            limit = None
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if down and self._freeze_down is not None:
                    data = data[: self._freeze_down - passed]
                if limit is not None:
                    data = data[: limit - passed]
                target.sendall(self._counted(data, down, number))
                passed += len(data)
                if limit is not None and passed == limit:
                    self._on_cut()
                    break
                if down and passed == self._freeze_down:
                    return
        _reset(source)
        _reset(target)

    def _counted(self, data: bytes, down: bool, number: int) -> bytes:
        with self._lock:
            if not down:
                self.up_data += data
                return data
            at = -1 if self._flip_down is None else self._flip_down - sum(self.down_bytes)
            self.down_bytes[number] += len(data)
            if 0 <= at < len(data):
                return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
            return data


@contextlib.contextmanager
def linked(upstream: str, **faults: Any) -> Iterator[Link]:
    """A link for the time of a test."""
    link = Link(upstream, **faults)
    try:
        yield link
    finally:
        link.close()


def _connect(address: str) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.removeprefix("unix:"))
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        if end.family == socket.AF_INET:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
    end.close()
