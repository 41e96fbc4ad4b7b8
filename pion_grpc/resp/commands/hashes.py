"""Hashes: fields and values of one key."""

from pion_grpc.core.keys import Kind
from pion_grpc.core.numbers import parse_float
from pion_grpc.resp.command import (
    Answer,
    Call,
    Elsewhere,
    Where,
    reader,
    syntax_error,
    writer,
)
from pion_grpc.resp.commands.generic import scan_cursor, scan_options
from pion_grpc.resp.reply import OK, Reply, ReplyError

QUICK_FIELDS_MAX = 16
"""Fields that one command reads on the event loop."""


def set_fields(call: Call) -> Answer:
    """`HSET key field value [field value …]`: how many are new."""
    return call.keyspace.set_fields(call.raw(0), _pairs(call))


def set_fields_ok(call: Call) -> Answer:
    """`HMSET`: the same, and `OK`."""
    set_fields(call)
    return OK


def set_if_free(call: Call) -> Answer:
    """`HSETNX key field value`."""
    (known,) = call.keyspace.field_values(call.raw(0), [call.raw(1)])
    if known is not None:
        return 0
    return call.keyspace.set_fields(call.raw(0), [(call.raw(1), call.raw(2))])


def get(call: Call) -> Answer:
    """`HGET key field`."""
    (value,) = call.keyspace.field_values(call.raw(0), [call.raw(1)])
    return value


def get_many(call: Call) -> Answer:
    """`HMGET key field [field …]`."""
    if call.on_loop and call.count > QUICK_FIELDS_MAX:
        raise Elsewhere
    fields = (call.raw(index) for index in range(1, call.count))
    values: list[Reply] = []
    for value in call.keyspace.field_values(call.raw(0), fields):
        call.hold(len(value or b""))
        values.append(value)
    return values


def get_all(call: Call) -> Answer:
    """`HGETALL key`."""
    return dict(call.keyspace.fields(call.raw(0)))


def fields(call: Call) -> Answer:
    """`HKEYS key`."""
    return [field for field, _ in call.keyspace.fields(call.raw(0))]


def values(call: Call) -> Answer:
    """`HVALS key`."""
    return [value for _, value in call.keyspace.fields(call.raw(0))]


def exists(call: Call) -> Answer:
    """`HEXISTS key field`."""
    return int(get(call) is not None)


def length(call: Call) -> Answer:
    """`HLEN key`."""
    return call.keyspace.item_count(call.raw(0), Kind.HASH)


def value_length(call: Call) -> Answer:
    """`HSTRLEN key field`."""
    (value,) = call.keyspace.field_values(call.raw(0), [call.raw(1)])
    return len(value or b"")


def delete(call: Call) -> Answer:
    """`HDEL key field [field …]`."""
    return call.keyspace.remove_fields(
        call.raw(0), (call.raw(index) for index in range(1, call.count))
    )


def increment(call: Call) -> Answer:
    """`HINCRBY key field n`."""
    return call.keyspace.increment_field(call.raw(0), call.raw(1), call.integer(2))


def increment_float(call: Call) -> Answer:
    """`HINCRBYFLOAT key field n`."""
    by = parse_float(call.raw(2))
    return call.keyspace.increment_field_float(call.raw(0), call.raw(1), by)


def scan(call: Call) -> Answer:
    """`HSCAN key cursor [MATCH pattern] [COUNT n]`: all of them at once."""
    scan_cursor(call, 1)
    options = scan_options(call, 2)
    if options.kind is not None:
        raise syntax_error()
    found = call.keyspace.fields(call.raw(0))
    flat: list[Reply] = [
        part for field, value in found if options.matches(field) for part in (field, value)
    ]
    return ["0", flat]


def _pairs(call: Call) -> list[tuple[bytes, bytes]]:
    if call.count % 2 == 0:
        name = call.command.name.lower()
        raise ReplyError(f"ERR wrong number of arguments for '{name}' command")
    return [(call.raw(at), call.raw(at + 1)) for at in range(1, call.count, 2)]


COMMANDS = (
    writer("HSET", -4, set_fields, grows=True),
    writer("HMSET", -4, set_fields_ok, grows=True),
    writer("HSETNX", 4, set_if_free, grows=True),
    reader("HGET", 3, get, Where.QUICK),
    reader("HMGET", -3, get_many, Where.QUICK),
    reader("HGETALL", 2, get_all),
    reader("HKEYS", 2, fields),
    reader("HVALS", 2, values),
    reader("HEXISTS", 3, exists, Where.QUICK),
    reader("HLEN", 2, length),
    reader("HSTRLEN", 3, value_length, Where.QUICK),
    writer("HDEL", -3, delete),
    writer("HINCRBY", 4, increment, grows=True),
    writer("HINCRBYFLOAT", 4, increment_float, grows=True),
    reader("HSCAN", -3, scan),
)
