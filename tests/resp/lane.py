"""A client of the binary lane that frames by hand and believes nothing."""

import socket
import struct
from typing import NamedTuple

PING, FUSED, AUTH = 0xFF, 0x24, 0x37
OK, MISS, ERROR, COLDMISS = range(4)


class Response(NamedTuple):
    """What a frame was answered with."""

    status: int
    body: bytes


class Lane:
    """One connection to the lane beside a RESP address."""

    def __init__(self, address: str, timeout_s: float = 30.0) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port) + 1), timeout_s)

    def __call__(self, code: int, body: bytes = b"") -> Response:
        self.socket.sendall(framed(code, body))
        return self.read()

    def read(self) -> Response:
        magic, status, size = struct.unpack("<HBI", self._exactly(7))
        assert magic == 0xCA5E
        return Response(status, self._exactly(size))

    def is_closed(self) -> bool:
        """Whether the server has closed the connection, and sent nothing more."""
        return self.socket.recv(1) == b""

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, size: int) -> bytes:
        taken = b""
        while len(taken) < size:
            more = self.socket.recv(size - len(taken))
            if not more:
                raise ConnectionError("the server closed the connection")
            taken += more
        return taken


def framed(code: int, body: bytes = b"") -> bytes:
    return struct.pack("<HBI", 0xCA5E, code, len(body)) + body


def fused_body(
    sid: bytes,
    layer: int,
    shape: tuple[int, int, int],
    kv: tuple[int, int],
    tensors: bytes,
    window: int | None = None,
) -> bytes:
    """The body of 0x24: `shape` is query heads, queries and values per head, `kv` heads and suffix."""
    (heads, queries, dim), (kv_heads, suffix) = shape, kv
    body = struct.pack("<H", len(sid)) + sid
    body += struct.pack("<HHHHII", layer, heads, dim, kv_heads, queries, suffix) + tensors
    return body if window is None else body + struct.pack("<I", window)
