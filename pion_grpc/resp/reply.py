"""Replies as values, and their encoding in RESP2 and RESP3.

A command returns a plain Python value; this module knows how each kind looks on the wire and
nothing of commands, connections or sockets.

=================  =====================  =========================  ============================
value              kind                   RESP2                      RESP3
=================  =====================  =========================  ============================
``Simple``         simple string          ``+OK``                    the same
``Error``          error                  ``-ERR text``              the same
``int``            integer                ``:7``                     the same
``bytes``, ``str``,  bulk string          ``$3`` and the bytes       the same
``memoryview``
``None``           nil                    ``$-1``                    ``_``
``NIL_ARRAY``      nil array              ``*-1``                    ``_``
``list``, ``tuple``  array                ``*2`` and the items       the same
``dict``           map                    ``*4``: key, value, …      ``%2``: key, value, …
``set``            set                    ``*2`` and the items       ``~2`` and the items
``float``          double                 a bulk string              ``,1.5``
``bool``           boolean                ``:1`` or ``:0``           ``#t`` or ``#f``
``Verbatim``       verbatim text          a bulk string              ``=8``, ``txt:`` and the text
=================  =====================  =========================  ============================

The one decision to understand: a reply is a *list of buffers* for ``writelines``, never one
string. Pieces up to 64 KiB are copied together, because a buffer of its own costs more than the
copy; a larger payload stays the object it was, so a reply of gigabytes costs its headers. A reply
that should not be in memory at all is written with `array_header` and `bulk_header` around chunks.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Version: TypeAlias = Literal[2, 3]
Buffer: TypeAlias = bytes | memoryview

CRLF = b"\r\n"
JOINED_BYTES_MAX = 64 << 10
"""A piece of a reply up to this size is copied together with its neighbours."""


class ReplyError(Exception):
    """A refusal. Its text, code word first, is the error reply that the client reads."""


@dataclass(frozen=True, slots=True)
class Simple:
    """A short status line, such as ``OK`` or ``HIT``."""

    text: str


@dataclass(frozen=True, slots=True)
class Error:
    """An error reply; the text begins with its code word, such as ``ERR``.

    Bytes of a request are quoted in it by ``decode(errors="surrogateescape")``, which gives the
    client back exactly what it sent; line ends become spaces, so that none can forge a reply.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Text that a client should show as it is (INFO, CLIENT LIST)."""

    text: str


@dataclass(frozen=True, slots=True)
class NilArray:
    """The absence of an array; `None` is the absence of a value."""


NIL_ARRAY = NilArray()
OK = Simple("OK")

Reply: TypeAlias = (
    bool
    | int
    | float
    | str
    | bytes
    | memoryview
    | Simple
    | Error
    | Verbatim
    | NilArray
    | Sequence["Reply"]
    | Mapping[str, "Reply"]
    | Mapping[bytes, "Reply"]
    | AbstractSet["Reply"]
    | None
)


def encode(reply: Reply, version: Version) -> list[Buffer]:
    """The reply as buffers to be written one after the other; large payloads are not copied."""
    pieces: list[Buffer] = []
    _write(reply, version, pieces)
    return join_small(pieces)


def join_small(pieces: Iterable[Buffer]) -> list[Buffer]:
    """The same bytes with neighbours of up to `JOINED_BYTES_MAX` copied together.

    Useful over the replies of several pipelined commands as well: one buffer, one write.
    """
    joined: list[Buffer] = []
    run: list[Buffer] = []
    for piece in pieces:
        if len(piece) <= JOINED_BYTES_MAX:
            run.append(piece)
            continue
        if run:
            joined.append(b"".join(run))
            run = []
        joined.append(piece)
    if run:
        joined.append(b"".join(run))
    return joined


def byte_view(payload: Buffer) -> Buffer:
    """The same memory with a length in bytes, which is what the wire counts.

    `len` of a view of floats is their number. Raises TypeError if the view has gaps.
    """
    if isinstance(payload, bytes):
        return payload
    return payload.cast("B") if payload.nbytes else b""  # a view of nothing cannot be cast


def value_bytes(reply: Reply) -> int:
    """The bytes of the values in a reply, which are what it has in memory."""
    if isinstance(reply, bytes | str | memoryview):
        return len(reply)
    if isinstance(reply, Mapping):
        return sum(len(key) + value_bytes(value) for key, value in reply.items())
    if isinstance(reply, Sequence | AbstractSet):
        return sum(map(value_bytes, reply))
    return 0


def array_header(count: int) -> bytes:
    """What precedes `count` replies that together are one array."""
    return b"*%d\r\n" % count


def bulk_header(payload_bytes: int) -> bytes:
    """What precedes the payload of a bulk string; `CRLF` must follow it."""
    return b"$%d\r\n" % payload_bytes


def _write(reply: Reply, version: Version, pieces: list[Buffer]) -> None:
    write = _WRITERS.get(type(reply))
    assert write is not None, f"{type(reply).__name__} has no form on this wire"
    write(reply, version, pieces)


def _write_bulk(payload: Buffer, version: Version, pieces: list[Buffer]) -> None:
    payload = byte_view(payload)
    pieces += (bulk_header(len(payload)), payload, CRLF)


def _write_text(text: str, version: Version, pieces: list[Buffer]) -> None:
    _write_bulk(_encoded(text), version, pieces)


def _write_nil(_nil: None, version: Version, pieces: list[Buffer]) -> None:
    pieces.append(b"$-1\r\n" if version == 2 else b"_\r\n")


def _write_nil_array(_nil: NilArray, version: Version, pieces: list[Buffer]) -> None:
    pieces.append(b"*-1\r\n" if version == 2 else b"_\r\n")


def _write_integer(value: int, version: Version, pieces: list[Buffer]) -> None:
    pieces.append(b":%d\r\n" % value)


def _write_boolean(value: bool, version: Version, pieces: list[Buffer]) -> None:
    if version == 2:
        _write_integer(int(value), version, pieces)
    else:
        pieces.append(b"#t\r\n" if value else b"#f\r\n")


def _write_double(value: float, version: Version, pieces: list[Buffer]) -> None:
    text = _double_text(value)
    if version == 2:
        _write_bulk(text, version, pieces)
    else:
        pieces.append(b",%b\r\n" % text)


def _write_simple(reply: Simple, version: Version, pieces: list[Buffer]) -> None:
    pieces.append(b"+%b\r\n" % _line(reply.text))


def _write_error(reply: Error, version: Version, pieces: list[Buffer]) -> None:
    pieces.append(b"-%b\r\n" % _line(reply.text))


def _write_verbatim(reply: Verbatim, version: Version, pieces: list[Buffer]) -> None:
    text = _encoded(reply.text)
    if version == 2:
        _write_bulk(text, version, pieces)
    else:
        pieces += (b"=%d\r\ntxt:" % (len(text) + len(b"txt:")), text, CRLF)


def _write_array(items: Sequence[Reply], version: Version, pieces: list[Buffer]) -> None:
    pieces.append(array_header(len(items)))
    for item in items:
        _write(item, version, pieces)


def _write_set(items: AbstractSet[Reply], version: Version, pieces: list[Buffer]) -> None:
    pieces.append(b"%b%d\r\n" % (b"*" if version == 2 else b"~", len(items)))
    for item in items:
        _write(item, version, pieces)


def _write_map(items: Mapping[Any, Reply], version: Version, pieces: list[Buffer]) -> None:
    pieces.append(array_header(2 * len(items)) if version == 2 else b"%%%d\r\n" % len(items))
    for key, value in items.items():
        _write(key, version, pieces)
        _write(value, version, pieces)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _line(text: str) -> bytes:
    return _encoded(text).replace(b"\r", b" ").replace(b"\n", b" ")


def _double_text(value: float) -> bytes:
    """The shortest decimal that reads back as the same value, whole numbers without a point."""
    if math.isnan(value):
        return b"nan"  # never "-nan", which some clients refuse
    return repr(value).removesuffix(".0").encode()


# By exact type, not by isinstance: a bool is an int, and a str is a sequence.
_WRITERS: dict[type, Callable[[Any, Version, list[Buffer]], None]] = {
    type(None): _write_nil,
    NilArray: _write_nil_array,
    bool: _write_boolean,
    int: _write_integer,
    float: _write_double,
    str: _write_text,
    bytes: _write_bulk,
    memoryview: _write_bulk,
    Simple: _write_simple,
    Error: _write_error,
    Verbatim: _write_verbatim,
    list: _write_array,
    tuple: _write_array,
    dict: _write_map,
    set: _write_set,
    frozenset: _write_set,
}
