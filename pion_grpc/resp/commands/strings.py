"""Strings. A value above 64 KiB comes as a file that has it already, and goes as a streamed reply."""

from pion_grpc.core.key_values import LargeValue, Value
from pion_grpc.core.keys import STRING_BYTES_MAX
from pion_grpc.core.numbers import parse_float
from pion_grpc.core.workshop import OutOfDate
from pion_grpc.resp.command import (
    Answer,
    Call,
    Elsewhere,
    StreamedValue,
    Where,
    reader,
    syntax_error,
    writer,
)
from pion_grpc.resp.commands.generic import expiry
from pion_grpc.resp.reply import OK, Reply, ReplyError

QUICK_KEYS_MAX = 16
"""Keys that one command reads on the event loop."""


def get(call: Call) -> Answer:
    """`GET key`."""
    return _reply(call, call.keyspace.get(call.raw(0)))


def set_(call: Call) -> Answer:
    """`SET key value [NX|XX] [GET] [EX s|PX ms|EXAT s|PXAT ms|KEEPTTL]`."""
    name, space = call.raw(0), call.keyspace
    condition, wants_old, keeps_time = "", False, False
    expires: int | None = None
    at = 2
    while at < call.count:
        option = call.word(at)
        if option in ("NX", "XX") and not condition:
            condition = option
        elif option == "GET":
            wants_old = True
        elif option == "KEEPTTL" and expires is None:
            keeps_time = True
        elif option in _UNITS and at + 1 < call.count and expires is None and not keeps_time:
            expires = _expiry(call, at + 1, option)
            at += 1
        else:
            raise syntax_error()
        at += 1
    old: Reply = _small(call, space.get(name)) if wants_old else None
    known = space.kind(name) is not None
    if (condition == "NX" and known) or (condition == "XX" and not known):
        space.discard(call.value(1))
        return old
    if keeps_time and known:
        expires = space.expires_unix_ms(name)
    space.set(name, call.value(1), expires)
    return old if wants_old else OK


def set_if_free(call: Call) -> Answer:
    """`SETNX key value`."""
    if call.keyspace.kind(call.raw(0)) is not None:
        call.keyspace.discard(call.value(1))
        return 0
    call.keyspace.set(call.raw(0), call.value(1))
    return 1


def set_with_time(call: Call) -> Answer:
    """`SETEX key seconds value` and `PSETEX key milliseconds value`."""
    unit = "PX" if call.command.name == "PSETEX" else "EX"
    expires = _expiry(call, 1, unit)
    call.keyspace.set(call.raw(0), call.value(2), expires)
    return OK


def get_set(call: Call) -> Answer:
    """`GETSET key value`."""
    old = _small(call, call.keyspace.get(call.raw(0)))
    call.keyspace.set(call.raw(0), call.value(1))
    return old


def get_delete(call: Call) -> Answer:
    """`GETDEL key`."""
    old = _small(call, call.keyspace.get(call.raw(0)))
    call.keyspace.remove([call.raw(0)])
    return old


def get_with_time(call: Call) -> Answer:
    """`GETEX key [EX s|PX ms|EXAT s|PXAT ms|PERSIST]`."""
    name = call.raw(0)
    option = call.word(1)
    if option == "PERSIST" and call.count == 2:
        expires: int | None = None
    elif option in _UNITS and call.count == 3:
        expires = _expiry(call, 2, option)
    elif call.count > 1:
        raise syntax_error()
    old = _small(call, call.keyspace.get(name))
    if call.count > 1:
        call.keyspace.set_expiry(name, expires)
    return old


def get_many(call: Call) -> Answer:
    """`MGET key [key …]`: nil for what is not a string."""
    if call.on_loop and call.count > QUICK_KEYS_MAX:
        raise Elsewhere
    space = call.keyspace
    values: list[Value | None] = []
    for name in map(bytes, call.arguments):
        values.append(space.get(name) if space.is_string(name) else None)
        call.hold(_size(values[-1]))
    return [_read(call, value) for value in values]


def set_many(call: Call) -> Answer:
    """`MSET key value [key value …]`."""
    _pairs(call)
    for at in range(0, call.count, 2):
        call.keyspace.set(call.raw(at), call.value(at + 1))
    return OK


def set_many_if_free(call: Call) -> Answer:
    """`MSETNX key value [key value …]`: all or none."""
    _pairs(call)
    if any(call.keyspace.kind(call.raw(at)) is not None for at in range(0, call.count, 2)):
        for at in range(0, call.count, 2):
            call.keyspace.discard(call.value(at + 1))
        return 0
    set_many(call)
    return 1


def append(call: Call) -> Answer:
    """`APPEND key value`."""
    return call.keyspace.append(call.raw(0), call.raw(1))


def length(call: Call) -> Answer:
    """`STRLEN key`."""
    return call.keyspace.length(call.raw(0))


def get_range(call: Call) -> Answer:
    """`GETRANGE key start end`, both included."""
    start, end = call.integer(1), call.integer(2)
    whole = call.keyspace.whole(call.raw(0))
    if end < start < 0:
        return b""
    first = max(start + len(whole) if start < 0 else start, 0)
    last = max(end + len(whole) if end < 0 else end, 0)  # before the beginning is the first byte
    return whole[first : last + 1]


def set_range(call: Call) -> Answer:
    """`SETRANGE key offset value`."""
    offset = call.integer(1, 0, refusal="ERR offset is out of range")
    if offset > STRING_BYTES_MAX:
        raise ReplyError("ERR string exceeds maximum allowed size (512MB)")
    return call.keyspace.set_range(call.raw(0), offset, call.raw(2))


def increment(call: Call) -> Answer:
    """`INCR key`, `DECR key`, `INCRBY key n`, `DECRBY key n`."""
    by = call.integer(1) if call.count > 1 else 1
    if call.command.name.startswith("DECR"):
        by = -by
    return call.keyspace.increment(call.raw(0), by)


def increment_float(call: Call) -> Answer:
    """`INCRBYFLOAT key n`."""
    return call.keyspace.increment_float(call.raw(0), parse_float(call.raw(1)))


def _reply(call: Call, value: Value | None) -> Answer:
    """The value; a large one as a stream, read by a worker."""
    if not isinstance(value, LargeValue):
        return value
    if call.on_loop:
        raise Elsewhere
    if call.inside:
        return _small(call, value)
    try:
        reading = call.services.keyspace.open(value)
    except OutOfDate:
        # Replaced between the look-up and now: the reply to a GET just after that.
        current = call.services.keyspace.reading(call.tenant, lambda keys: keys.get(call.raw(0)))
        return _reply(call, current)
    return StreamedValue(reading.size, reading.pieces, reading.close)


def _small(call: Call, value: Value | None) -> Reply:
    """The value as a part of another reply, in memory."""
    call.hold(_size(value))
    return _read(call, value)


def _read(call: Call, value: Value | None) -> Reply:
    if not isinstance(value, LargeValue):
        return value
    if call.on_loop:
        raise Elsewhere
    return call.keyspace.read(value)


def _size(value: Value | None) -> int:
    return value.size if isinstance(value, LargeValue) else len(value or b"")


def _reads_back(call: Call) -> bool:
    """Whether a command answers with what was there before: of `SET`, its option says so."""
    return call.command.name != "SET" or any(call.word(at) == "GET" for at in range(2, call.count))


def _pairs(call: Call) -> None:
    if call.count % 2:
        name = call.command.name.lower()
        raise ReplyError(f"ERR wrong number of arguments for '{name}' command")


_UNITS = {"EX": 1_000, "PX": 1, "EXAT": 1_000, "PXAT": 1}


def _expiry(call: Call, at: int, unit: str) -> int:
    return expiry(call, at, _UNITS[unit], absolute=unit.endswith("AT"))


_ALL, _PAIRS = (1, -1, 1), (1, -1, 2)
_SECOND, _THIRD = (1, 0), (2, 0)  # which argument may be large

COMMANDS = (
    reader("GET", 2, get, Where.QUICK),
    writer("SET", -3, set_, large_values=_SECOND, reads_back=_reads_back, grows=True),
    writer("SETNX", 3, set_if_free, large_values=_SECOND, grows=True),
    writer("SETEX", 4, set_with_time, large_values=_THIRD, grows=True),
    writer("PSETEX", 4, set_with_time, large_values=_THIRD, grows=True),
    writer("GETSET", 3, get_set, large_values=_SECOND, reads_back=_reads_back, grows=True),
    *(
        writer(name, arity, run, reads_back=_reads_back)
        for name, arity, run in (("GETDEL", 2, get_delete), ("GETEX", -2, get_with_time))
    ),
    reader("MGET", -2, get_many, Where.QUICK, keys=_ALL),
    writer("MSET", -3, set_many, keys=_PAIRS, large_values=(1, 2), grows=True),
    writer("MSETNX", -3, set_many_if_free, keys=_PAIRS, large_values=(1, 2), grows=True),
    writer("APPEND", 3, append, grows=True),
    reader("STRLEN", 2, length, Where.QUICK),
    reader("GETRANGE", 4, get_range),
    reader("SUBSTR", 4, get_range),
    writer("SETRANGE", 4, set_range, grows=True),
    *(
        writer(name, arity, increment, grows=True)
        for name, arity in (("INCR", 2), ("DECR", 2), ("INCRBY", 3), ("DECRBY", 3))
    ),
    writer("INCRBYFLOAT", 3, increment_float, grows=True),
)
