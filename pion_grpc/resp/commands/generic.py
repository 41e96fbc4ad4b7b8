"""Keys of any kind: whether they are there, when they go, and what they are called."""

from typing import NamedTuple

from pion_grpc.core.key_values import NoSuchKey
from pion_grpc.core.keys import Kind
from pion_grpc.core.patterns import matches
from pion_grpc.resp.command import (
    Answer,
    Call,
    Command,
    Uses,
    Where,
    for_all,
    reader,
    syntax_error,
    writer,
)
from pion_grpc.resp.reply import OK, Reply, ReplyError, Simple

SCAN_COUNT_MAX = 100_000
KIND_NAMES = {
    Kind.STRING: "string",
    Kind.LIST: "list",
    Kind.SET: "set",
    Kind.SORTED_SET: "zset",
    Kind.HASH: "hash",
}
_TIME_MAX_MS = (1 << 62) - 1


class ScanOptions(NamedTuple):
    """What of a collection a SCAN wants."""

    pattern: bytes = b"*"
    page: int = 10
    kind: Kind | None = None

    def matches(self, name: bytes) -> bool:
        """Says whether a name is wanted."""
        return matches(self.pattern, name)


def delete(call: Call) -> Answer:
    """`DEL key [key …]`."""
    return call.keyspace.remove(map(bytes, call.arguments))


def exists(call: Call) -> Answer:
    """`EXISTS key [key …]`: how many, one named twice counts twice."""
    return sum(call.keyspace.kind(bytes(name)) is not None for name in call.arguments)


def kind(call: Call) -> Answer:
    """`TYPE key`."""
    found = call.keyspace.kind(call.raw(0))
    return Simple("none" if found is None else KIND_NAMES[found])


def keys(call: Call) -> Answer:
    """`KEYS pattern`."""
    return list(call.keyspace.names(call.raw(0)))


def random_key(call: Call) -> Answer:
    """`RANDOMKEY`."""
    return call.keyspace.random_name()


def db_size(call: Call) -> Answer:
    """`DBSIZE`."""
    return call.keyspace.count()[0]


def flush(call: Call) -> Answer:
    """`FLUSHALL` and `FLUSHDB [ASYNC|SYNC]`: the keys of whoever asks; sessions and states stay."""
    if call.count > 1 or (call.count and call.word(0) not in ("ASYNC", "SYNC")):
        raise syntax_error()
    call.keyspace.clear()
    return OK


def rename(call: Call) -> Answer:
    """`RENAME key new`."""
    try:
        call.keyspace.rename(call.raw(0), call.raw(1))
    except NoSuchKey as error:
        raise ReplyError("ERR no such key") from error
    return OK


def rename_if_free(call: Call) -> Answer:
    """`RENAMENX key new`."""
    if call.keyspace.kind(call.raw(0)) is None:
        raise ReplyError("ERR no such key")
    if call.keyspace.kind(call.raw(1)) is not None:
        return 0
    call.keyspace.rename(call.raw(0), call.raw(1))
    return 1


def expire(call: Call) -> Answer:
    """`EXPIRE`, `PEXPIRE`, `EXPIREAT`, `PEXPIREAT key time [NX|XX|GT|LT]`."""
    name = call.command.name
    unit = 1 if name.startswith("P") else 1_000
    when = expiry(call, 1, unit, absolute=name.endswith("AT"), least_ms=-_TIME_MAX_MS)
    if call.count > 3:
        raise syntax_error()
    option = call.word(2)
    if option not in ("", "NX", "XX", "GT", "LT"):
        raise ReplyError(f"ERR Unsupported option {call.text(2)}")
    try:
        now = call.keyspace.expires_unix_ms(call.raw(0))
    except NoSuchKey:
        return 0
    blocked = (
        (option == "NX" and now is not None)
        or (option == "XX" and now is None)
        or (option == "GT" and (now is None or when <= now))
        or (option == "LT" and now is not None and when >= now)
    )
    if blocked:
        return 0
    return int(call.keyspace.set_expiry(call.raw(0), when))


def persist(call: Call) -> Answer:
    """`PERSIST key`."""
    try:
        if call.keyspace.expires_unix_ms(call.raw(0)) is None:
            return 0
    except NoSuchKey:
        return 0
    return int(call.keyspace.set_expiry(call.raw(0), None))


def time_to_live(call: Call) -> Answer:
    """`TTL`, `PTTL`, `EXPIRETIME`, `PEXPIRETIME key`: -1 never, -2 no such key."""
    try:
        when = call.keyspace.expires_unix_ms(call.raw(0))
    except NoSuchKey:
        return -2
    if when is None:
        return -1
    name = call.command.name
    time_ms = when if name.endswith("TIME") else when - call.keyspace.now_unix_ms
    return time_ms if name.startswith("P") else (time_ms + 500) // 1_000


def scan(call: Call) -> Answer:
    """`SCAN cursor [MATCH pattern] [COUNT n] [TYPE kind]`."""
    cursor = scan_cursor(call, 0)
    options = scan_options(call, 1)
    following, names = call.keyspace.scan(cursor, options.page, options.pattern, options.kind)
    reply: list[Reply] = [str(following), list(names)]
    return reply


def copy(call: Call) -> Answer:
    """`COPY key new [REPLACE]`."""
    options = [call.word(at) for at in range(2, call.count)]
    if options not in ([], ["REPLACE"]):
        raise syntax_error()
    source, target = call.raw(0), call.raw(1)
    if source == target:
        raise ReplyError("ERR source and destination objects are the same")
    space = call.keyspace
    found = space.kind(source)
    if found is None or (space.kind(target) is not None and not options):
        return 0
    expires = space.expires_unix_ms(source)
    space.make_room(space.inline_bytes(source))
    if found is Kind.STRING:
        space.set(target, space.whole(source))
    else:
        space.remove([target])
        if found is Kind.HASH:
            space.set_fields(target, space.fields(source))
        elif found is Kind.LIST:
            space.push(target, space.list_range(source, 0, -1), left=False)
        elif found is Kind.SET:
            space.add_members(target, space.members(source))
        else:
            space.copy_scores(source, target)
    space.set_expiry(target, expires)
    return 1


def expiry(call: Call, at: int, unit_ms: int, *, absolute: bool, least_ms: int = 1) -> int:
    """Returns an argument as the unix milliseconds when a key expires.

    Args:
        call: the command.
        at: which argument.
        unit_ms: milliseconds in what it counts.
        absolute: whether it counts from 1970, and not from now.
        least_ms: the least that it may say.
    """
    time_ms = call.integer(at) * unit_ms
    if not least_ms <= time_ms <= _TIME_MAX_MS:
        raise ReplyError(f"ERR invalid expire time in '{call.command.name.lower()}' command")
    return time_ms if absolute else call.keyspace.now_unix_ms + time_ms


def scan_cursor(call: Call, at: int) -> int:
    """Returns an argument as a cursor."""
    return call.integer(at, 0, refusal="ERR invalid cursor")


def scan_options(call: Call, at: int) -> ScanOptions:
    """Returns the options of a SCAN from an argument on."""
    options = ScanOptions()
    while at < call.count:
        option = call.word(at)
        if at + 1 >= call.count or option not in ("MATCH", "COUNT", "TYPE"):
            raise syntax_error()
        if option == "MATCH":
            options = options._replace(pattern=call.raw(at + 1))
        elif option == "COUNT":
            page = min(call.integer(at + 1, 1, refusal="ERR syntax error"), SCAN_COUNT_MAX)
            options = options._replace(page=page)
        else:
            name = call.text(at + 1).lower()
            kind = next((kind for kind, known in KIND_NAMES.items() if known == name), None)
            if kind is None:
                raise ReplyError(f"ERR unknown type name '{name}'")
            options = options._replace(kind=kind)
        at += 2
    return options


_ALL, _TWO = (1, -1, 1), (1, 2, 1)

COMMANDS = (
    writer("DEL", -2, delete, keys=_ALL),
    writer("UNLINK", -2, delete, keys=_ALL),
    reader("EXISTS", -2, exists, Where.QUICK, keys=_ALL),
    reader("TOUCH", -2, exists, Where.QUICK, keys=_ALL),
    reader("TYPE", 2, kind, Where.QUICK),
    for_all("KEYS", 2, keys, uses=Uses.READS),
    for_all("SCAN", -2, scan, uses=Uses.READS),
    Command("RANDOMKEY", 1, random_key, uses=Uses.READS),
    Command("DBSIZE", 1, db_size, uses=Uses.READS),
    Command("FLUSHALL", -1, flush, uses=Uses.WRITES),
    Command("FLUSHDB", -1, flush, uses=Uses.WRITES),
    writer("RENAME", 3, rename, keys=_TWO, grows=True),
    writer("RENAMENX", 3, rename_if_free, keys=_TWO, grows=True),
    writer("COPY", -3, copy, keys=_TWO, grows=True),
    *(writer(name, -3, expire) for name in ("EXPIRE", "PEXPIRE", "EXPIREAT", "PEXPIREAT")),
    writer("PERSIST", 2, persist),
    *(
        reader(name, 2, time_to_live, Where.QUICK)
        for name in ("TTL", "PTTL", "EXPIRETIME", "PEXPIRETIME")
    ),
)
