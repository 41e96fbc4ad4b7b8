"""Streams out: what a call brings, as messages that are made while they are sent.

Knows how each service frames its chunks; neither calls nor what is tried again. The one decision: gRPC
takes the messages on a thread of its own. What goes wrong there (a progress callback may raise) ends the
call and is kept for the caller, because gRPC would only log it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pion_client.rows import Rows
from pion_client.values import Part, Progress
from pion_wire.framing import frame_bytes, frame_header, frame_part, frame_rows
from pion_wire.limits import CHUNK_BYTES_MAX


class Framed(NamedTuple):
    """A message, and how many bytes of data it brings: none in a header."""

    message: bytes
    data_bytes: int = 0


class Content(NamedTuple):
    """What a stream brings."""

    total_bytes: int
    """Of data."""
    messages: Callable[[], Iterator[Framed]]
    """Makes them; called anew for each attempt."""


def prefix_content(
    header: bytes, tensors: Sequence[Rows], parts: Sequence[Part] = (), *, first_row: int = 0
) -> Content:
    """Returns what PrefixStore takes: a header, then rows, counted from `first_row`, then parts."""

    def messages() -> Iterator[Framed]:
        yield Framed(frame_header(header))
        for index, rows in enumerate(tensors):
            for array, first, count, data in rows.chunks():
                framed = frame_rows(index, array, first_row + first, count, data)
                yield Framed(framed, len(data))
        for index, part in enumerate(parts):
            for offset, data in _chunks_of(part.buffers):
                yield Framed(frame_part(index, offset, data), len(data))

    rows_bytes = sum(rows.token_count * rows.tensor.row_bytes for rows in tensors)
    return Content(rows_bytes + sum(part.info.size_bytes for part in parts), messages)


def states_content(headers: Sequence[bytes], values: Sequence[Part]) -> Content:
    """Returns what SSMState takes: values, each behind a header of its own."""

    def messages() -> Iterator[Framed]:
        for header, value in zip(headers, values, strict=True):
            yield Framed(frame_header(header))
            for offset, data in _chunks_of(value.buffers):
                yield Framed(frame_bytes(0, offset, data), len(data))

    return Content(sum(value.info.size_bytes for value in values), messages)


def attend_content(header: bytes, sides: Sequence[memoryview] = ()) -> Content:
    """Returns what Attend takes: a header, then the bytes of K and of V, if they are not stored."""

    def messages() -> Iterator[Framed]:
        yield Framed(frame_header(header))
        for index, side in enumerate(sides):
            for offset, data in _chunks_of([side]):
                yield Framed(frame_bytes(index, offset, data), len(data))

    return Content(sum(side.nbytes for side in sides), messages)


class Outgoing:
    """The messages of one attempt. Iterate once."""

    def __init__(
        self, content: Content, progress: Progress | None, touch: Callable[[], None]
    ) -> None:
        self.error: BaseException | None = None
        """What was raised while messages were made."""
        self._content = content
        self._progress = progress
        self._touch = touch
        self._call: Any = None
        self._bound = threading.Event()

    def bind(self, call: Any) -> None:
        """Says which call takes the messages."""
        self._call = call
        self._bound.set()

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._messages()
        except GeneratorExit:
            raise  # the server has answered already
        except BaseException as error:
            self.error = error
            self._bound.wait()
            self._call.cancel()

    def _messages(self) -> Iterator[bytes]:
        done = 0
        for message, data_bytes in self._content.messages():
            yield message
            self._touch()
            done += data_bytes
            if self._progress is not None and data_bytes:
                self._progress(done, self._content.total_bytes)


def _chunks_of(buffers: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Yields bytes that lie in several places, at most 1 MiB at a time, and where each begins."""
    offset = 0
    for buffer in buffers:
        for begin in range(0, len(buffer), CHUNK_BYTES_MAX):
            data = buffer[begin : begin + CHUNK_BYTES_MAX]
            yield offset, data
            offset += len(data)
