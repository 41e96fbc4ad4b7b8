"""A client that believes nothing: it reads every reply by its first byte, and to its last."""

import socket
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

Word = bytes | str | int


class Refused(NamedTuple):
    """An error reply."""

    text: str


def encoded(*words: Word | memoryview) -> bytes:
    """A command as an array of bulk strings."""
    parts = [bytes(w) if isinstance(w, bytes | memoryview) else str(w).encode() for w in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)


class Wire:
    """One connection. `wire("GET", "a")` sends a command and returns its reply.

    Simple strings come as text, bulk strings as bytes, errors as `Refused`, maps as dict.
    """

    def __init__(self, address: str, timeout_s: float = 30.0) -> None:
        if address.startswith("unix:"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(timeout_s)
            self.socket.connect(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            self.socket = socket.create_connection((host, int(port)), timeout_s)
        self.file: BinaryIO = self.socket.makefile("rb", 1 << 16)

    def __call__(self, *words: Word | memoryview) -> Any:
        self.send(*words)
        return self.read()

    def send(self, *words: Word | memoryview) -> None:
        self.socket.sendall(encoded(*words))

    def pipeline(self, *commands: tuple[Word, ...]) -> list[Any]:
        self.socket.sendall(b"".join(encoded(*command) for command in commands))
        return [self.read() for _ in commands]

    def read(self) -> Any:
        line = self.file.readline()
        if not line:
            raise ConnectionError("the server closed the connection")
        assert line.endswith(b"\r\n"), line
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            return Refused(rest.decode("utf-8", "surrogateescape"))
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._payload(int(rest))
        if kind == b"*":
            return None if rest == b"-1" else [self.read() for _ in range(int(rest))]
        if kind == b"%":
            return {_key(self.read()): self.read() for _ in range(int(rest))}
        if kind == b"~":
            return {self.read() for _ in range(int(rest))}
        if kind == b"_":
            return None
        if kind == b",":
            return float(rest)
        if kind == b"#":
            return rest == b"t"
        if kind == b"=":
            text = self._payload(int(rest))
            assert text.startswith(b"txt:")
            return text[4:]
        raise AssertionError(f"no reply begins so: {line!r}")

    def is_closed(self) -> bool:
        """Whether the server has closed the connection, and sent nothing more."""
        return self.file.read(1) == b""

    def break_off(self) -> None:
        """Ends the connection as a client does that dies with replies it has not read."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self.file.close()
        self.socket.close()

    def _payload(self, size: int) -> bytes:
        payload = self.file.read(size + 2)
        assert len(payload) == size + 2, "the reply broke off"
        assert payload.endswith(b"\r\n")
        return payload[:-2]


def _key(reply: Any) -> Any:
    return reply.decode() if isinstance(reply, bytes) else reply


def fields(text: bytes) -> dict[str, str]:
    """`name:value` lines, as INFO has them."""
    lines = (line for line in text.decode().split("\r\n") if ":" in line)
    return dict(line.split(":", 1) for line in lines)


def pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    """A flat array as pairs."""
    return zip(flat[::2], flat[1::2], strict=True)
