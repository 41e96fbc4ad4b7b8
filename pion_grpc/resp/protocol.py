r"""Requests off the wire: an incremental parser that owns no socket and knows no command.

::

    *<count>\r\n                     an array of `count` bulk strings, each
    $<bytes>\r\n<payload>\r\n        a length and that many bytes, any bytes
    SET key "a \"quoted\" word"\n    or, if the first byte is not *, an inline command

Lengths are strict decimals: no sign, no leading zero, no space. Arrays without items and empty
lines are skipped, and complaints worded, as Redis does it; only that a payload which does not end
in CRLF is refused, where Redis drops two bytes unseen. After a `ProtocolError` the parser stays
broken: the byte stream has no meaning any more, and the connection must close.

The parser takes its bytes through the two calls of `asyncio.BufferedProtocol`. **The one decision
to understand: memory follows what has arrived, never what was declared.** Small bytes go through
one staging buffer of anonymous memory, whose pages cost nothing until written. A payload above
64 KiB has a destination of its own and the socket writes straight into it: at first 1 MiB of it,
and once those have come, all of it, from memory that is not touched before bytes reach it. So a
declared 512 MiB of which nothing follows costs nothing, and no payload is copied but its first
MiB. A request of very many tiny arguments is the worst case: a Python object takes some 40 bytes
where the wire takes 8.

Measured over a Unix socket on two cores: 64 MB values arrive at 4-6 GB/s (a bare socket into one
buffer reused for ever, whose pages are all in place: 8-9), 1 MiB values at 7-8 (10-13). Of the other
ways to get memory, plain `mmap` ran at 1.9 GB/s, since the kernel hands it out in pages of 4 KiB
where NumPy asks for huge ones; a `bytearray` at 1.4-1.8, and it is resident before a byte has come;
doubling from 1 MiB was as fast, but while it copies it holds half as much again.
"""

import mmap
import re
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pion_grpc.core.numbers import INT64_MAX, INT64_MIN, INTEGER
from pion_grpc.resp.reply import CRLF, ReplyError

Argument: TypeAlias = bytes | memoryview
"""One word of a request: `bytes` up to 64 KiB, a read-only view of its own buffer above."""

Request: TypeAlias = list[Argument]
"""The command's name and its arguments: never empty."""

SMALL_BYTES_MAX = 64 << 10
STAGING_BYTES = 2 * SMALL_BYTES_MAX  # a small payload with its CRLF fits, and room to read ahead
FIRST_STEP_BYTES = 1 << 20

NOT_AN_INTEGER = "ERR value is not an integer or out of range"

_OF_HTTP = frozenset({b"POST", b"HOST:"})
"""One of them begins a line before the body of every HTTP request: a page in somebody's browser, which
may send a body anywhere, gets no command executed by a server that listens on that host alone."""

_STAR = ord("*")
_DOLLAR = ord("$")
_NO_BULK = -1


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How much one request may ask for. Checked before anything is allocated."""

    bulk_bytes_max: int = 512 << 20
    """Bytes of one argument; Redis's own default."""

    array_count_max: int = 1 << 20
    """Arguments of one request."""

    inline_bytes_max: int = 64 << 10
    """Bytes of one line: an inline command, or a header. At most 64 KiB: it has to fit staging."""

    request_bytes_max: int = 1 << 30
    """Bytes of one array request on the wire, headers and all."""

    def __post_init__(self) -> None:
        assert self.inline_bytes_max <= SMALL_BYTES_MAX


UNAUTHENTICATED_LIMITS = RequestLimits(bulk_bytes_max=16 << 10, array_count_max=10)
"""What a peer needs to log in, and no more: the figures of Redis."""


class ProtocolError(ReplyError):
    """The bytes are not a request. The text is the last reply; then the connection closes."""

    def __init__(self, complaint: str) -> None:
        super().__init__(f"ERR Protocol error: {complaint}")
        self.complaint = complaint


class Destination:
    """The memory one large payload is received into, never much larger than what has arrived.

    At most the first `FIRST_STEP_BYTES` are allocated until they are full. NumPy's memory is not
    touched before it is written, at huge-page grain (2 MiB) from 4 MiB on; so what is held is at
    most three times what was received.
    """

    __slots__ = ("_memory", "filled_bytes", "total_bytes")

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.filled_bytes = 0
        self._memory = _untouched(min(total_bytes, FIRST_STEP_BYTES))

    def room(self) -> memoryview:
        """Where the next bytes go; empty when complete. Raises MemoryError."""
        if self.filled_bytes == len(self._memory) < self.total_bytes:
            first, self._memory = self._memory, _untouched(self.total_bytes)
            self._memory[: len(first)] = first
        return self._memory[self.filled_bytes :]

    def received(self, byte_count: int) -> None:
        """So many bytes of `room` have been written."""
        self.filled_bytes += byte_count

    def take_from(self, source: memoryview) -> int:
        """Copy what fits from the front of `source`; returns how many bytes that was."""
        room = self.room()
        taken = min(len(room), len(source))
        room[:taken] = source[:taken]
        self.filled_bytes += taken
        return taken

    @property
    def is_complete(self) -> bool:
        """Whether every byte has arrived."""
        return self.filled_bytes == self.total_bytes

    @property
    def payload(self) -> memoryview:
        """The bytes received so far, read-only."""
        return self._memory[: self.filled_bytes].toreadonly()


class RequestParser:
    """Bytes in by `get_buffer` and `buffer_updated`, requests out by `next_request`.

    After each `buffer_updated` call `next_request` until it returns None, or stop reading until
    you have: there is room for more bytes only once all complete requests have been taken.
    """

    def __init__(self, limits: RequestLimits | None = None) -> None:
        self.limits = limits or RequestLimits()
        """May be replaced between two requests: a peer that has logged in is trusted with more."""
        self._staging = mmap.mmap(-1, STAGING_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._staging_view = memoryview(self._staging)
        self._begin = 0  # of the staged bytes that are not parsed yet
        self._end = 0
        self._searched = 0  # no line ends before here
        self._arguments: Request = []
        self._missing_count = 0  # arguments still to come
        self._request_bytes = 0  # of this request on the wire, as far as its headers are read
        self._bulk_bytes = _NO_BULK  # of the argument being received
        self._destination: Destination | None = None  # of a large one
        self._complaint: str | None = None

    @property
    def unfinished_bytes(self) -> int:
        """How much has been received of a request that is not complete; 0 between requests."""
        announced = 0 if self._bulk_bytes == _NO_BULK else self._bulk_bytes + len(CRLF)
        received = 0 if self._destination is None else self._destination.filled_bytes
        return self._request_bytes - announced + received + self._end - self._begin

    def get_buffer(self, _size_hint: int) -> memoryview:
        """Where the next received bytes must be written; never empty."""
        if self._destination is not None:
            room = self._destination.room()
        else:
            if self._begin == self._end:
                self._begin = self._end = self._searched = 0
            elif self._end > STAGING_BYTES // 2:
                self._move_to_front()
            room = self._staging_view[self._end :]
        assert len(room) > 0, "take the complete requests before reading more"
        return room

    def buffer_updated(self, byte_count: int) -> None:
        """So many bytes have been written to the buffer that `get_buffer` gave last."""
        if self._complaint is not None:
            return  # nobody will look at them
        if self._destination is not None:
            self._destination.received(byte_count)
        else:
            self._end += byte_count

    def next_request(self) -> Request | None:
        """The next complete request, or None until more bytes have come.

        Raises ProtocolError, now and at every later call, when the bytes are not a request.
        """
        if self._complaint is not None:
            raise ProtocolError(self._complaint)
        try:
            return self._next_request()
        except ProtocolError as error:
            self._give_up(error.complaint)
            raise
        except MemoryError:
            self._give_up("not enough memory for this request")
            raise ProtocolError("not enough memory for this request") from None

    def _next_request(self) -> Request | None:
        while self._missing_count == 0:
            if self._begin == self._end:
                return None
            if self._staging[self._begin] != _STAR:
                line = self._take_line(b"\n", "too big inline request")
                if line is None:
                    return None
                if words := split_inline(line):
                    if bytes(words[0]).upper() in _OF_HTTP:
                        raise ProtocolError("HTTP is not spoken here")
                    return words
            elif not self._begin_array():
                return None
        if not self._take_arguments():
            return None
        request, self._arguments = self._arguments, []
        self._request_bytes = 0
        return request

    def _begin_array(self) -> bool:
        line = self._take_line(CRLF, "too big mbulk count string")
        if line is None:
            return False
        count = int(line[1:]) if INTEGER.fullmatch(line, 1) else INT64_MAX
        if count > self.limits.array_count_max:
            raise ProtocolError("invalid multibulk length")
        if count > 0:
            self._missing_count = count
            self._request_bytes = len(line) + len(CRLF)
        return True

    def _take_arguments(self) -> bool:
        """Move what has come to the request; whether it is all there."""
        while self._missing_count:
            if self._bulk_bytes == _NO_BULK:
                self._take_short_bulks()
                if self._missing_count == 0:
                    break
                if not self._begin_bulk():
                    return False
            argument = self._take_bulk()
            if argument is None:
                return False
            self._arguments.append(argument)
            self._bulk_bytes = _NO_BULK
            self._missing_count -= 1
        return True

    def _take_short_bulks(self) -> None:
        """Take the bulks of under 1 KiB that are staged whole: most requests have no others.

        One loop without calls, because it halves the time of a small request. It takes only what
        is plainly right and leaves every other case, and every complaint, to `_begin_bulk`.
        """
        staging, begin, end = self._staging, self._begin, self._end
        begin_max = begin + self.limits.request_bytes_max - self._request_bytes
        bulk_bytes_max = self.limits.bulk_bytes_max
        missing_count = self._missing_count
        while missing_count:
            line_end = staging.find(CRLF, begin, begin + _SHORT_HEADER_BYTES)
            if line_end < 0:
                break
            bulk_bytes = _SHORT_HEADERS.get(staging[begin:line_end], INT64_MAX)
            stop = line_end + 2 + bulk_bytes
            # The first test also catches a line end left over after the staged bytes.
            if stop + 2 > min(end, begin_max) or bulk_bytes > bulk_bytes_max:
                break
            if staging[stop : stop + 2] != CRLF:
                break
            self._arguments.append(staging[line_end + 2 : stop])
            begin = stop + 2
            missing_count -= 1
        self._request_bytes += begin - self._begin
        self._begin = begin
        self._missing_count = missing_count

    def _begin_bulk(self) -> bool:
        if self._begin == self._end:
            return False
        if (first := self._staging[self._begin]) != _DOLLAR:
            raise ProtocolError(f"expected '$', got {_printable(first)}")
        line = self._take_line(CRLF, "too big bulk count string")
        if line is None:
            return False
        bulk_bytes = int(line[1:]) if _LENGTH.fullmatch(line, 1) else INT64_MAX
        if bulk_bytes > self.limits.bulk_bytes_max:
            raise ProtocolError("invalid bulk length")
        self._request_bytes += len(line) + bulk_bytes + 2 * len(CRLF)
        if self._request_bytes > self.limits.request_bytes_max:
            raise ProtocolError("too big request")
        self._bulk_bytes = bulk_bytes
        return True

    def _take_bulk(self) -> Argument | None:
        if self._bulk_bytes > SMALL_BYTES_MAX:
            return self._take_large_bulk()
        stop = self._begin + self._bulk_bytes
        if self._end < stop + 2:
            return None
        _check_bulk_end(self._staging[stop : stop + 2])
        argument = self._staging[self._begin : stop]
        self._begin = stop + 2
        return argument

    def _take_large_bulk(self) -> memoryview | None:
        if self._destination is None:
            # The CRLF is received with the payload: no read of its own for two bytes.
            self._destination = Destination(self._bulk_bytes + 2)
            self._begin += self._destination.take_from(self._staging_view[self._begin : self._end])
        if not self._destination.is_complete:
            self._destination.room()  # grown here, where running out of memory can be answered
            return None
        payload = self._destination.payload
        _check_bulk_end(bytes(payload[-2:]))
        self._destination = None
        return payload[:-2]

    def _take_line(self, line_end: bytes, too_long: str) -> bytes | None:
        stop = self._staging.find(line_end, max(self._begin, self._searched), self._end)
        # Not there: all staged bytes are of the line, but the last may be the first of its end.
        self._searched = self._end - len(line_end) + 1 if stop < 0 else stop
        if self._searched - self._begin > self.limits.inline_bytes_max:
            raise ProtocolError(too_long)
        if stop < 0:
            return None
        line = self._staging[self._begin : stop]
        self._begin = stop + len(line_end)
        return line

    def _move_to_front(self) -> None:
        self._staging.move(0, self._begin, self._end - self._begin)
        self._searched = max(self._searched - self._begin, 0)
        self._end -= self._begin
        self._begin = 0

    def _give_up(self, complaint: str) -> None:
        """Forget everything but the complaint; bytes that still come are thrown away."""
        self._complaint = complaint
        self._destination = None
        self._arguments = []
        self._begin = self._end = self._request_bytes = 0
        self._bulk_bytes = _NO_BULK


def parse_int(
    argument: Argument,
    minimum: int = INT64_MIN,
    maximum: int = INT64_MAX,
    refusal: str = NOT_AN_INTEGER,
) -> int:
    """An argument as an integer of `minimum`..`maximum`, as strictly as Redis reads one.

    Digits with at most a minus before them: no plus, space, leading zero or ``-0``. Anything else
    raises ReplyError with the text `refusal`.
    """
    if INTEGER.fullmatch(argument) is not None:
        value = int(bytes(argument))
        if minimum <= value <= maximum:
            return value
    raise ReplyError(refusal)


def split_inline(line: bytes) -> list[Argument]:
    r"""The words of an inline command, by the quoting rules of redis-cli.

    Words are separated by white space. A part in double quotes may hold any byte, ``\n \r \t \b
    \a`` and ``\xHH``, and ``\`` before any other byte is that byte; in single quotes only ``\'`` is
    special. A closing quote ends the word, so white space must follow. Raises ProtocolError if it
    does not, or if a quote stays open.
    """
    words: list[Argument] = []
    at = _SPACE.match(line).end()  # type: ignore[union-attr]  # it matches nothing, too
    while at < len(line):
        word = _WORD.match(line, at)
        if word is None:
            raise ProtocolError("unbalanced quotes in request")
        plain, double, single = word.groups(default=b"")
        words.append(plain + _ESCAPE.sub(_unescape, double) + single.replace(b"\\'", b"'"))
        at = word.end()
    return words


def _check_bulk_end(last_two: bytes) -> None:
    if last_two != CRLF:
        raise ProtocolError("bulk does not end in CRLF")


def _unescape(escape: re.Match[bytes]) -> bytes:
    hexadecimal, other = escape.groups()
    if hexadecimal is not None:
        return bytes((int(hexadecimal, 16),))
    return _CONTROLS.get(other, bytes(other))


def _printable(byte: int) -> str:
    return f"'{chr(byte)}'" if 0x20 <= byte < 0x7F else f"'\\x{byte:02x}'"


def _untouched(byte_count: int) -> memoryview:
    """Writable memory of which nothing is resident yet."""
    return np.empty(byte_count, np.uint8).data


_SHORT_HEADERS = {b"$%d" % byte_count: byte_count for byte_count in range(1 << 10)}
_SHORT_HEADER_BYTES = len(b"$1023\r\n")
_LENGTH = re.compile(rb"0|[1-9][0-9]{0,18}")
_SPACE = re.compile(rb"[ \t\n\v\f\r]*")
_WORD = re.compile(
    rb"""([^ \t\n\r"']*+)                      # a plain part, then perhaps a quoted one
         (?: "((?:[^"\\]|\\.)*+)"
           | '((?:[^'\\]|\\'?)*+)' )?
         (?: [ \t\n\v\f\r]+ | \Z )""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_CONTROLS = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"a": b"\a"}
