"""`MULTI`, `EXEC` and what belongs to them: many changes of keys in one transaction.

Only commands on keys, and quick ones on the connection, go between MULTI and EXEC. What EXEC runs is
one transaction of the database: others see all of it or nothing, and so does a restart.
"""

from pion_grpc.resp.command import Answer, Call, Uses, Where, for_all, reader
from pion_grpc.resp.reply import OK, ReplyError

WATCHED_MAX = 10_000


def multi(call: Call) -> Answer:
    """`MULTI`."""
    if call.client.queued is not None:
        raise ReplyError("ERR MULTI calls can not be nested")
    call.client.queued = []
    return OK


def discard(call: Call) -> Answer:
    """`DISCARD`."""
    if call.client.queued is None:
        raise ReplyError("ERR DISCARD without MULTI")
    call.client.leave_transaction()
    return OK


def execute(call: Call) -> Answer:
    """`EXEC`."""
    return call.services.run_queued(call)


def watch(call: Call) -> Answer:
    """`WATCH key [key …]`: EXEC does nothing if one of them has changed by then."""
    if call.client.queued is not None:
        raise ReplyError("ERR WATCH inside MULTI is not allowed")
    if len(call.client.watched) + call.count > WATCHED_MAX:
        raise ReplyError(f"ERR more than {WATCHED_MAX} keys watched")
    for name in map(bytes, call.arguments):
        call.client.watched.setdefault(name, call.keyspace.revision(name))
    return OK


def unwatch(call: Call) -> Answer:
    """`UNWATCH`."""
    call.client.watched.clear()
    return OK


COMMANDS = (
    for_all("MULTI", 1, multi, Where.LOOP),
    for_all("DISCARD", 1, discard, Where.LOOP),
    for_all("EXEC", 1, execute, uses=Uses.WRITES),
    reader("WATCH", -2, watch, Where.LOOP, keys=(1, -1, 1)),
    for_all("UNWATCH", 1, unwatch, Where.LOOP),
)
