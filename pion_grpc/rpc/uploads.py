"""Client streams: a header, then chunks, which an upload takes and publishes as a whole or not at all.

Shared by the services that take rows or bytes in. Knows the two shapes that the messages of such streams
have, and nothing of what is in them.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from pion_grpc.core.values import Durability
from pion_grpc.errors import InvalidRequest
from pion_grpc.rpc.service import AnyMessage, parsed
from pion_wire import limits
from pion_wire.framing import (
    FrameError,
    HeaderBytes,
    PartChunk,
    RowChunk,
    parse_bytes_message,
    parse_message,
)
from pion_wire.v1 import types_pb2

CHUNK_MESSAGE_BYTES_MAX = limits.CHUNK_BYTES_MAX + 4_096

_DURABILITIES = {
    Durability.PROCESS: types_pb2.DURABILITY_PROCESS,
    Durability.DISK: types_pb2.DURABILITY_DISK,
}

Answer = TypeVar("Answer", covariant=True)


class Upload(Protocol[Answer]):
    """What takes the chunks of a client stream."""

    def write(self, chunk: Any) -> None:
        """Takes the next chunk."""

    def publish(self) -> Answer:
        """Makes what came visible."""

    def abandon(self) -> None:
        """Removes what came."""


def header_of(messages: Iterator[bytes], kind: type[AnyMessage]) -> Any:
    """Returns the header that a client stream begins with.

    Raises:
        InvalidRequest: it does not begin with one.
    """
    message = next(messages, None)
    if message is None:
        raise InvalidRequest("header", "the stream is empty")
    return parsed_header(message, kind)


def parsed_header(message: bytes, kind: type[AnyMessage]) -> Any:
    """Returns the header that a message holds; raises as `header_of` does."""
    first: Any = parsed(message, kind, "header")
    if not first.HasField("header"):
        raise InvalidRequest("header", "the stream does not begin with one")
    return first.header


def row_chunks(messages: Iterator[bytes], *, parts: bool = False) -> Iterator[RowChunk | PartChunk]:
    """Yields the chunks of a stream of rows, and of parts where it has some, as views of its messages.

    Raises:
        InvalidRequest: a message holds no chunk, or more than one may have.
    """
    for chunk in _chunks(messages, parse_message):
        if isinstance(chunk, PartChunk) and not parts:
            raise InvalidRequest("message", "a part has no place in this stream")
        yield chunk


def byte_chunks(
    messages: Iterator[bytes], take_header: Callable[[bytes], None] | None = None
) -> Iterator[PartChunk]:
    """Yields the chunks of a stream of bytes; raises as `row_chunks` does.

    Args:
        messages: of the stream, its first header excepted.
        take_header: is given each further header; None: there must be none.
    """
    for chunk in _chunks(messages, parse_bytes_message, take_header):
        assert isinstance(chunk, PartChunk)
        yield chunk


def durability_of(value: int) -> Durability:
    """Returns what a request asks an acknowledgement to promise.

    Raises:
        InvalidRequest: the value is unknown.
    """
    if value == types_pb2.DURABILITY_UNSPECIFIED:
        return Durability.PROCESS
    for durability, known in _DURABILITIES.items():
        if value == known:
            return durability
    raise InvalidRequest("durability", f"{value} is unknown")


def durability_value(durability: Durability) -> types_pb2.Durability.ValueType:
    """Returns how a message says it."""
    return _DURABILITIES[durability]


def fill(upload: Upload[Answer], chunks: Iterable[RowChunk | PartChunk]) -> Answer:
    """Hands chunks to an upload, and publishes it or abandons it."""
    try:
        for chunk in chunks:
            upload.write(chunk)
        return upload.publish()
    except BaseException:
        upload.abandon()
        raise


def _chunks(
    messages: Iterator[bytes],
    parse: Callable[[bytes], HeaderBytes | RowChunk | PartChunk],
    take_header: Callable[[bytes], None] | None = None,
) -> Iterator[RowChunk | PartChunk]:
    for message in messages:
        _check_size(message)
        try:
            chunk = parse(message)
        except FrameError as error:
            raise InvalidRequest("message", str(error)) from error
        if not isinstance(chunk, HeaderBytes):
            yield chunk
        elif take_header is not None:
            take_header(message)
        else:
            raise InvalidRequest("header", "came twice")


def _check_size(message: bytes) -> None:
    if len(message) > CHUNK_MESSAGE_BYTES_MAX:
        raise InvalidRequest(
            "message",
            f"{len(message)} bytes exceed a chunk of {limits.CHUNK_BYTES_MAX} and its fields",
            limit=limits.CHUNK_BYTES_MAX,
        )
