"""Lists: values with two ends. Nothing here waits for a value to come."""

from pion_grpc.core.key_values import NoSuchKey
from pion_grpc.resp.command import Answer, Call, Where, reader, syntax_error, writer
from pion_grpc.resp.reply import NIL_ARRAY, OK, ReplyError

POP_MAX = 1 << 30


def push(call: Call) -> Answer:
    """`RPUSH`, `LPUSH key value [value …]`: the new length."""
    values = [call.raw(index) for index in range(1, call.count)]
    name = call.command.name
    if name.endswith("X") and not call.keyspace.list_length(call.raw(0)):
        return 0
    return call.keyspace.push(call.raw(0), values, left=name.startswith("L"))


def pop(call: Call) -> Answer:
    """`LPOP`, `RPOP key [count]`."""
    if call.count > 2:
        raise ReplyError(call.command.refusal_of_words())
    many = call.count > 1
    refusal = "ERR value is out of range, must be positive"
    count = call.integer(1, 0, POP_MAX, refusal) if many else 1
    left = call.command.name.startswith("L")
    values = call.keyspace.pop(call.raw(0), count, left=left)
    if many:
        return NIL_ARRAY if values is None else list(values)
    return values[0] if values else None


def move(call: Call) -> Answer:
    """`LMOVE source target LEFT|RIGHT LEFT|RIGHT`, and `RPOPLPUSH source target`."""
    ends = "RIGHT", "LEFT"
    if call.command.name == "LMOVE":
        ends = call.word(2), call.word(3)
    if not set(ends) <= {"LEFT", "RIGHT"}:
        raise syntax_error()
    if not call.keyspace.list_length(call.raw(0)):
        return None
    call.keyspace.list_length(call.raw(1))  # refuses another kind before anything is taken
    values = call.keyspace.pop(call.raw(0), 1, left=ends[0] == "LEFT")
    if not values:
        return None
    call.keyspace.push(call.raw(1), values, left=ends[1] == "LEFT")
    return values[0]


def length(call: Call) -> Answer:
    """`LLEN key`."""
    return call.keyspace.list_length(call.raw(0))


def get_range(call: Call) -> Answer:
    """`LRANGE key start stop`."""
    return list(call.keyspace.list_range(call.raw(0), call.integer(1), call.integer(2)))


def index(call: Call) -> Answer:
    """`LINDEX key index`."""
    place = call.integer(1)
    found = call.keyspace.list_range(call.raw(0), place, place)
    return found[0] if found else None


def set_index(call: Call) -> Answer:
    """`LSET key index value`."""
    try:
        if not call.keyspace.set_index(call.raw(0), call.integer(1), call.raw(2)):
            raise ReplyError("ERR index out of range")
    except NoSuchKey as error:
        raise ReplyError("ERR no such key") from error
    return OK


def trim(call: Call) -> Answer:
    """`LTRIM key start stop`."""
    call.keyspace.trim(call.raw(0), call.integer(1), call.integer(2))
    return OK


def remove(call: Call) -> Answer:
    """`LREM key count value`: from the front, from the back if negative, all if 0."""
    count, value = call.integer(1), call.raw(2)
    values = call.keyspace.list_range(call.raw(0), 0, -1)
    places = [place for place, found in enumerate(values) if found == value]
    if count > 0:
        places = places[:count]
    elif count < 0:
        places = places[count:]
    if places:
        gone = set(places)
        kept = [found for place, found in enumerate(values) if place not in gone]
        call.keyspace.replace_list(call.raw(0), kept)
    return len(places)


COMMANDS = (
    *(writer(name, -3, push, grows=True) for name in ("RPUSH", "LPUSH", "RPUSHX", "LPUSHX")),
    writer("LPOP", -2, pop),
    writer("RPOP", -2, pop),
    writer("LMOVE", 5, move, keys=(1, 2, 1), grows=True),
    writer("RPOPLPUSH", 3, move, keys=(1, 2, 1), grows=True),
    reader("LLEN", 2, length, Where.QUICK),
    reader("LRANGE", 4, get_range),
    reader("LINDEX", 3, index, Where.QUICK),
    writer("LSET", 4, set_index, grows=True),
    writer("LTRIM", 4, trim),
    writer("LREM", 4, remove),
)
