"""Frames of the binary lane: attention queries without RESP around them.

Takes and returns bytes; knows neither sockets nor what an answer to a query is. All little-endian::

    frame     u16 magic 0xCA5E | u8 code | u32 body_bytes | body
              code: a `Command` in a request, a `Status` in a response

    0x24      u16 sid_bytes | sid | u16 layer | u16 H_q | u16 D | u16 H_kv | u32 M | u32 S
    body      | Q f32[H_q][M][D] | K_suffix f32[H_kv][S][D] | V_suffix f32[H_kv][S][D]
              | head_map u8[H_q] | u32 window, or nothing

The one decision to understand: a body is received straight into its own memory and `FusedQuery` is
views into it, so a query of megabytes is never copied. The views start wherever the sid's length
puts them: not aligned to 4 bytes in general, which NumPy reads but other code may not.

A frame with the wrong magic, or with a body over the limit, is a `ProtocolError`: the connection
closes without an answer. A well-framed body that makes no sense is a `MalformedBodyError`, to be
answered with ``MISS``; whether its shape fits what is stored is not decided here.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from pion_grpc.resp.protocol import Destination, ProtocolError
from pion_grpc.resp.reply import Buffer, byte_view, join_small

MAGIC = 0xCA5E
BODY_BYTES_MAX = 64 << 20
"""What a body may take; as much as the largest attention message over gRPC."""

FLOAT_BYTES = 4

_HEADER = struct.Struct("<HBI")
_SID = struct.Struct("<H")
_SHAPE = struct.Struct("<HHHHII")
_WINDOW = struct.Struct("<I")


class Command(IntEnum):
    """Request codes that have a meaning here; any other is answered with ``MISS``."""

    ATTEND_PREFIX_QUERY_FUSED = 0x24
    AUTH = 0x37
    PING = 0xFF


class Status(IntEnum):
    """Response codes."""

    OK = 0
    MISS = 1
    ERROR = 2
    COLDMISS = 3


class MalformedBodyError(Exception):
    """The frame is whole, but its body is not what its command takes."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame, of either direction: the code is whatever number came, known or not."""

    code: int
    body: memoryview


class FusedQuery(NamedTuple):
    """A 0x24 body: attention of `query_count` rows over a stored prefix and the suffix that came.

    Tensors are views of float32, shapes as in the module's table.
    """

    sid: bytes
    layer: int
    query_heads: int
    head_dim: int
    kv_heads: int
    query_count: int
    suffix_rows: int
    q: memoryview
    k_suffix: memoryview
    v_suffix: memoryview
    head_map: memoryview
    window: int | None
    """Prefix rows visible from its end, 0 for all; None leaves it to the server."""


class FrameParser:
    """Bytes in by `get_buffer` and `buffer_updated`, frames out by `next_frame`.

    Call `next_frame` until it returns None after each `buffer_updated`.
    """

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self.body_bytes_max = body_bytes_max
        """May be changed between two frames: a peer that has logged in is trusted with more."""
        self._header = bytearray(_HEADER.size)
        self._header_filled = 0
        self._code = 0
        self._body: Destination | None = None
        self._complaint: str | None = None

    @property
    def unfinished_bytes(self) -> int:
        """How much has been received of a frame that is not complete; 0 between frames."""
        return self._header_filled + (self._body.filled_bytes if self._body else 0)

    def get_buffer(self, _size_hint: int) -> memoryview:
        """Where the next received bytes must be written; never empty."""
        if self._body is not None:
            room = self._body.room()
        else:
            room = memoryview(self._header)[self._header_filled :]
        assert len(room) > 0, "take the complete frame before reading more"
        return room

    def buffer_updated(self, byte_count: int) -> None:
        """So many bytes have been written to the buffer that `get_buffer` gave last."""
        if self._complaint is not None:
            return  # nobody will look at them
        if self._body is not None:
            self._body.received(byte_count)
        else:
            self._header_filled += byte_count

    def next_frame(self) -> Frame | None:
        """The next complete frame, or None until more bytes have come.

        Raises ProtocolError, now and at every later call, when the bytes are not a frame.
        """
        if self._complaint is not None:
            raise ProtocolError(self._complaint)
        try:
            return self._next_frame()
        except ProtocolError as error:
            self._give_up(error.complaint)
            raise
        except MemoryError:
            self._give_up("not enough memory for this frame")
            raise ProtocolError("not enough memory for this frame") from None

    def _next_frame(self) -> Frame | None:
        if self._body is None:
            if self._header_filled < _HEADER.size:
                return None
            self._begin_body()
        assert self._body is not None
        if not self._body.is_complete:
            self._body.room()  # grown here, where running out of memory can be answered
            return None
        frame = Frame(self._code, self._body.payload)
        self._body = None
        self._header_filled = 0
        return frame

    def _begin_body(self) -> None:
        magic, self._code, body_bytes = _HEADER.unpack(self._header)
        if magic != MAGIC:
            raise ProtocolError(f"frame begins with 0x{magic:04x}, not 0x{MAGIC:04x}")
        if body_bytes > self.body_bytes_max:
            raise ProtocolError(f"frame body of {body_bytes} bytes, over {self.body_bytes_max}")
        self._body = Destination(body_bytes)

    def _give_up(self, complaint: str) -> None:
        """Forget everything but the complaint; bytes that still come are thrown away."""
        self._complaint = complaint
        self._body = None
        self._header_filled = 0


def encode_frame(code: int, body: Sequence[Buffer] = ()) -> list[Buffer]:
    """A frame as buffers to be written one after the other; large parts are not copied."""
    parts = [byte_view(part) for part in body]
    body_bytes = sum(len(part) for part in parts)
    return join_small([_HEADER.pack(MAGIC, code, body_bytes), *parts])


def parse_fused_query(body: memoryview) -> FusedQuery:
    """The fields of a 0x24 body, whose length must be exactly what they say.

    Raises MalformedBodyError. Zero heads, rows or dimensions pass here: they are a shape.
    """
    try:
        sid_end = _SID.size + _SID.unpack_from(body)[0]
        layer, query_heads, head_dim, kv_heads, query_count, suffix_rows = _SHAPE.unpack_from(
            body, sid_end
        )
    except struct.error:
        raise MalformedBodyError(f"{len(body)} bytes are too few for a shape") from None
    q_at = sid_end + _SHAPE.size
    k_at = q_at + query_heads * query_count * head_dim * FLOAT_BYTES
    v_at = k_at + kv_heads * suffix_rows * head_dim * FLOAT_BYTES
    map_at = v_at + v_at - k_at
    end = map_at + query_heads
    left_bytes = len(body) - end
    if left_bytes not in (0, _WINDOW.size):
        raise MalformedBodyError(
            f"{abs(left_bytes)} bytes too {'few' if left_bytes < 0 else 'many'}"
        )
    return FusedQuery(
        sid=bytes(body[_SID.size : sid_end]),
        layer=layer,
        query_heads=query_heads,
        head_dim=head_dim,
        kv_heads=kv_heads,
        query_count=query_count,
        suffix_rows=suffix_rows,
        q=body[q_at:k_at],
        k_suffix=body[k_at:v_at],
        v_suffix=body[v_at:map_at],
        head_map=body[map_at:end],
        window=_WINDOW.unpack_from(body, end)[0] if left_bytes else None,
    )


def encode_fused_query(query: FusedQuery) -> list[Buffer]:
    """The body of a 0x24 request, as `parse_fused_query` reads it."""
    shape = _SHAPE.pack(
        query.layer,
        query.query_heads,
        query.head_dim,
        query.kv_heads,
        query.query_count,
        query.suffix_rows,
    )
    return [
        _SID.pack(len(query.sid)) + query.sid + shape,
        query.q,
        query.k_suffix,
        query.v_suffix,
        query.head_map,
        b"" if query.window is None else _WINDOW.pack(query.window),
    ]
