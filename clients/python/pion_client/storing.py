"""Sending a Store stream: a header, then chunks in order, made while they are sent.

gRPC takes the messages on a thread of its own. What goes wrong there (a progress callback may raise)
ends the call and is kept for the caller, because gRPC would only log it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pion_client.rows import Rows
from pion_client.values import Part
from pion_wire.framing import frame_bytes, frame_header, frame_part, frame_rows
from pion_wire.limits import CHUNK_BYTES_MAX

Progress = Callable[[int, int], None]


class Outgoing:
    """The messages of one attempt. Iterate once."""

    def __init__(
        self,
        header: bytes,
        tensors: Sequence[Rows],
        parts: Sequence[Part] = (),
        *,
        first_row: int = 0,
        progress: Progress | None = None,
        touch: Callable[[], None],
        next_headers: Sequence[bytes] | None = None,
    ) -> None:
        """Takes what is to be sent.

        With `next_headers` to a service that takes values and no rows, each behind a header of its own:
        these are of those that follow the first.
        """
        self.error: BaseException | None = None
        """What was raised while messages were made."""
        self._header = header
        self._tensors = tensors
        self._parts = parts
        self._first_row = first_row
        self._progress = progress
        self._next_headers = next_headers
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
        total = sum(rows.token_count * rows.tensor.row_bytes for rows in self._tensors)
        total += sum(part.info.size_bytes for part in self._parts)
        done = 0
        yield frame_header(self._header)
        for message, size in self._chunks():
            yield message
            done += size
            self._touch()
            if self._progress is not None:
                self._progress(done, total)

    def _chunks(self) -> Iterator[tuple[bytes, int]]:
        for index, rows in enumerate(self._tensors):
            for array, first, count, data in rows.chunks():
                yield frame_rows(index, array, self._first_row + first, count, data), len(data)
        for index, part in enumerate(self._parts):
            if self._next_headers is not None and index:
                yield frame_header(self._next_headers[index - 1]), 0
            offset = 0
            for data in _chunks_of(part.buffers):
                framed = (
                    frame_part(index, offset, data)
                    if self._next_headers is None
                    else frame_bytes(offset, data)
                )
                yield framed, len(data)
                offset += len(data)


def _chunks_of(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    for buffer in buffers:
        for begin in range(0, len(buffer), CHUNK_BYTES_MAX):
            yield buffer[begin : begin + CHUNK_BYTES_MAX]
