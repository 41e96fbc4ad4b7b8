"""Sets, and what can be made of several."""

from collections.abc import Callable

from pion_grpc.core.keys import Kind
from pion_grpc.resp.command import Answer, Call, Where, reader, syntax_error, writer
from pion_grpc.resp.commands.generic import scan_cursor, scan_options
from pion_grpc.resp.reply import Reply


def add(call: Call) -> Answer:
    """`SADD key member [member …]`."""
    return call.keyspace.add_members(call.raw(0), _rest(call))


def remove(call: Call) -> Answer:
    """`SREM key member [member …]`."""
    return call.keyspace.remove_members(call.raw(0), _rest(call))


def members(call: Call) -> Answer:
    """`SMEMBERS key`."""
    return set(call.keyspace.members(call.raw(0)))


def has(call: Call) -> Answer:
    """`SISMEMBER key member`."""
    return int(call.keyspace.has_members(call.raw(0), [call.raw(1)])[0])


def has_many(call: Call) -> Answer:
    """`SMISMEMBER key member [member …]`."""
    return [int(found) for found in call.keyspace.has_members(call.raw(0), _rest(call))]


def count(call: Call) -> Answer:
    """`SCARD key`."""
    return call.keyspace.item_count(call.raw(0), Kind.SET)


def move(call: Call) -> Answer:
    """`SMOVE source target member`."""
    member = call.raw(2)
    if not call.keyspace.item_count(call.raw(0), Kind.SET):
        return 0
    call.keyspace.has_members(
        call.raw(1), [member]
    )  # refuses another kind before anything is taken
    if not call.keyspace.remove_members(call.raw(0), [member]):
        return 0
    call.keyspace.add_members(call.raw(1), [member])
    return 1


def pop(call: Call) -> Answer:
    """`SPOP key [count]`."""
    if call.count > 2:
        raise syntax_error()
    refusal = "ERR value is out of range, must be positive"
    wanted = call.integer(1, 0, refusal=refusal) if call.count > 1 else 1
    taken = call.keyspace.members(call.raw(0), wanted)
    call.keyspace.remove_members(call.raw(0), taken)
    if call.count > 1:
        return set(taken)
    return taken[0] if taken else None


def combine(call: Call) -> Answer:
    """`SUNION`, `SINTER`, `SDIFF key [key …]`."""
    return _combined(call, 0, call.command.name)


def combine_into(call: Call) -> Answer:
    """`SUNIONSTORE`, `SINTERSTORE`, `SDIFFSTORE target key [key …]`: the size of the result."""
    result = _combined(call, 1, call.command.name.removesuffix("STORE"))
    call.keyspace.make_room(sum(map(len, result)))
    return call.keyspace.replace_set(call.raw(0), result)


def scan(call: Call) -> Answer:
    """`SSCAN key cursor [MATCH pattern] [COUNT n]`: all of them at once."""
    scan_cursor(call, 1)
    options = scan_options(call, 2)
    if options.kind is not None:
        raise syntax_error()
    found: list[Reply] = [
        member for member in call.keyspace.members(call.raw(0)) if options.matches(member)
    ]
    return ["0", found]


def _combined(call: Call, first: int, how: str) -> set[bytes]:
    sets = [set(call.keyspace.members(call.raw(at))) for at in range(first, call.count)]
    return _COMBINATIONS[how](*sets)


def _rest(call: Call) -> list[bytes]:
    return [call.raw(index) for index in range(1, call.count)]


_COMBINATIONS: dict[str, Callable[..., set[bytes]]] = {
    "SUNION": set.union,
    "SINTER": set.intersection,
    "SDIFF": set.difference,
}

COMMANDS = (
    writer("SADD", -3, add, grows=True),
    writer("SREM", -3, remove),
    reader("SMEMBERS", 2, members),
    reader("SISMEMBER", 3, has, Where.QUICK),
    reader("SMISMEMBER", -3, has_many),
    reader("SCARD", 2, count),
    writer("SMOVE", 4, move, keys=(1, 2, 1), grows=True),
    writer("SPOP", -2, pop),
    *(reader(name, -2, combine, keys=(1, -1, 1)) for name in ("SUNION", "SINTER", "SDIFF")),
    *(
        writer(name, -3, combine_into, keys=(1, -1, 1), grows=True)
        for name in ("SUNIONSTORE", "SINTERSTORE", "SDIFFSTORE")
    ),
    reader("SSCAN", -3, scan),
)
