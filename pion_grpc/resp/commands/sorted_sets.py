"""Sorted sets: members in order of their scores, equal scores in order of bytes."""

from collections.abc import Sequence
from typing import NamedTuple

from pion_grpc.core.key_values import NotANumber, ScoreRules, ScoreSpan
from pion_grpc.core.keys import Kind
from pion_grpc.core.numbers import parse_float
from pion_grpc.resp.command import Answer, Call, Where, reader, syntax_error, writer
from pion_grpc.resp.commands.generic import scan_cursor, scan_options
from pion_grpc.resp.reply import Reply, ReplyError

_NOT_A_FLOAT = "ERR value is not a valid float"


class _Limit(NamedTuple):
    begin: int = 0
    most: int = -1


def add(call: Call) -> Answer:
    """`ZADD key [NX|XX] [GT|LT] [CH] [INCR] score member [score member …]`."""
    options: set[str] = set()
    at = 1
    while call.word(at) in ("NX", "XX", "GT", "LT", "CH", "INCR"):
        options.add(call.word(at))
        at += 1
    if at == call.count or (call.count - at) % 2:
        raise syntax_error()
    if {"NX", "XX"} <= options:
        raise ReplyError("ERR XX and NX options at the same time are not compatible")
    if len(options & {"GT", "LT", "NX"}) > 1:
        raise ReplyError("ERR GT, LT, and/or NX options at the same time are not compatible")
    if "INCR" in options and call.count - at != 2:
        raise ReplyError("ERR INCR option supports a single increment-element pair")
    scores = [(call.raw(i + 1), _number(call.raw(i))) for i in range(at, call.count, 2)]
    rules = ScoreRules(
        only_new="NX" in options,
        only_known="XX" in options,
        only_greater="GT" in options,
        only_less="LT" in options,
        add="INCR" in options,
    )
    outcome = call.keyspace.add_scores(call.raw(0), scores, rules)
    if "INCR" in options:
        return outcome.last
    return outcome.added + (outcome.changed if "CH" in options else 0)


def increment(call: Call) -> Answer:
    """`ZINCRBY key n member`."""
    scores = [(call.raw(2), _number(call.raw(1)))]
    return call.keyspace.add_scores(call.raw(0), scores, ScoreRules(add=True)).last


def remove(call: Call) -> Answer:
    """`ZREM key member [member …]`."""
    return call.keyspace.remove_scored(
        call.raw(0), (call.raw(index) for index in range(1, call.count))
    )


def score(call: Call) -> Answer:
    """`ZSCORE key member`."""
    return call.keyspace.score(call.raw(0), call.raw(1))


def scores(call: Call) -> Answer:
    """`ZMSCORE key member [member …]`."""
    return [call.keyspace.score(call.raw(0), call.raw(at)) for at in range(1, call.count)]


def count(call: Call) -> Answer:
    """`ZCARD key`."""
    return call.keyspace.item_count(call.raw(0), Kind.SORTED_SET)


def count_in(call: Call) -> Answer:
    """`ZCOUNT key min max`."""
    span = _span(call.raw(1), call.raw(2))
    return len(call.keyspace.by_score(call.raw(0), span, reverse=False, begin=0, count=-1))


def rank(call: Call) -> Answer:
    """`ZRANK`, `ZREVRANK key member`."""
    reverse = call.command.name == "ZREVRANK"
    return call.keyspace.rank(call.raw(0), call.raw(1), reverse=reverse)


def get_range(call: Call) -> Answer:
    """`ZRANGE key start stop [BYSCORE] [REV] [LIMIT offset count] [WITHSCORES]`."""
    options: set[str] = set()
    limit = _Limit()
    at = 3
    while at < call.count:
        option = call.word(at)
        if option == "LIMIT" and at + 2 < call.count:
            limit = _Limit(call.integer(at + 1), call.integer(at + 2))
            at += 2
        elif option not in ("BYSCORE", "REV", "WITHSCORES"):
            raise syntax_error()
        options.add(option)
        at += 1
    reverse = "REV" in options
    if "BYSCORE" in options:
        low, high = (2, 1) if reverse else (1, 2)
        span = _span(call.raw(low), call.raw(high))
        found = call.keyspace.by_score(
            call.raw(0), span, reverse=reverse, begin=limit.begin, count=limit.most
        )
    elif "LIMIT" in options:
        raise ReplyError(
            "ERR syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX"
        )
    else:
        start, stop = call.integer(1), call.integer(2)
        found = call.keyspace.by_rank(call.raw(0), start, stop, reverse=reverse)
    return _listed(call, found, with_scores="WITHSCORES" in options)


def get_reverse_range(call: Call) -> Answer:
    """`ZREVRANGE key start stop [WITHSCORES]`."""
    with_scores = _only_option(call, 3)
    found = call.keyspace.by_rank(call.raw(0), call.integer(1), call.integer(2), reverse=True)
    return _listed(call, found, with_scores=with_scores)


def get_by_score(call: Call) -> Answer:
    """`ZRANGEBYSCORE key min max`, `ZREVRANGEBYSCORE key max min [WITHSCORES] [LIMIT o n]`."""
    reverse = call.command.name == "ZREVRANGEBYSCORE"
    low, high = (2, 1) if reverse else (1, 2)
    span = _span(call.raw(low), call.raw(high))
    with_scores, limit = False, _Limit()
    at = 3
    while at < call.count:
        if call.word(at) == "WITHSCORES":
            with_scores = True
            at += 1
        elif call.word(at) == "LIMIT" and at + 2 < call.count:
            limit = _Limit(call.integer(at + 1), call.integer(at + 2))
            at += 3
        else:
            raise syntax_error()
    found = call.keyspace.by_score(
        call.raw(0), span, reverse=reverse, begin=limit.begin, count=limit.most
    )
    return _listed(call, found, with_scores=with_scores)


def remove_by_rank(call: Call) -> Answer:
    """`ZREMRANGEBYRANK key start stop`."""
    found = call.keyspace.by_rank(call.raw(0), call.integer(1), call.integer(2))
    return call.keyspace.remove_scored(call.raw(0), [member for member, _ in found])


def remove_by_score(call: Call) -> Answer:
    """`ZREMRANGEBYSCORE key min max`."""
    span = _span(call.raw(1), call.raw(2))
    found = call.keyspace.by_score(call.raw(0), span, reverse=False, begin=0, count=-1)
    return call.keyspace.remove_scored(call.raw(0), [member for member, _ in found])


def pop(call: Call) -> Answer:
    """`ZPOPMIN`, `ZPOPMAX key [count]`."""
    if call.count > 2:
        raise syntax_error()
    refusal = "ERR value is out of range, must be positive"
    wanted = call.integer(1, 0, refusal=refusal) if call.count > 1 else 1
    reverse = call.command.name == "ZPOPMAX"
    found = call.keyspace.by_rank(call.raw(0), 0, wanted - 1, reverse=reverse) if wanted else []
    call.keyspace.remove_scored(call.raw(0), [member for member, _ in found])
    if call.client.version == 3 and call.count > 1:
        return [[member, value] for member, value in found]
    return _flat(found)


def scan(call: Call) -> Answer:
    """`ZSCAN key cursor [MATCH pattern] [COUNT n]`: all of them at once."""
    scan_cursor(call, 1)
    options = scan_options(call, 2)
    if options.kind is not None:
        raise syntax_error()
    found = call.keyspace.by_rank(call.raw(0), 0, -1)
    return ["0", _flat([pair for pair in found if options.matches(pair[0])], as_text=True)]


def _listed(call: Call, found: Sequence[tuple[bytes, float]], *, with_scores: bool) -> Reply:
    if not with_scores:
        return [member for member, _ in found]
    if call.client.version == 3:
        return [[member, value] for member, value in found]
    return _flat(found)


def _flat(found: Sequence[tuple[bytes, float]], *, as_text: bool = False) -> list[Reply]:
    return [
        part for member, value in found for part in (member, f"{value:.17g}" if as_text else value)
    ]


def _only_option(call: Call, at: int) -> bool:
    if call.count == at:
        return False
    if call.count > at + 1 or call.word(at) != "WITHSCORES":
        raise syntax_error()
    return True


def _number(text: bytes) -> float:
    try:
        return parse_float(text)
    except NotANumber as error:
        raise ReplyError(_NOT_A_FLOAT) from error


def _span(low: bytes, high: bytes) -> ScoreSpan:
    try:
        least, most = (parse_float(end.removeprefix(b"(")) for end in (low, high))
    except NotANumber as error:
        raise ReplyError("ERR min or max is not a float") from error
    return ScoreSpan(least, most, low.startswith(b"("), high.startswith(b"("))


COMMANDS = (
    writer("ZADD", -4, add, grows=True),
    writer("ZINCRBY", 4, increment, grows=True),
    writer("ZREM", -3, remove),
    reader("ZSCORE", 3, score, Where.QUICK),
    reader("ZMSCORE", -3, scores),
    reader("ZCARD", 2, count),
    reader("ZCOUNT", 4, count_in),
    reader("ZRANK", 3, rank),
    reader("ZREVRANK", 3, rank),
    reader("ZRANGE", -4, get_range),
    reader("ZREVRANGE", -4, get_reverse_range),
    reader("ZRANGEBYSCORE", -4, get_by_score),
    reader("ZREVRANGEBYSCORE", -4, get_by_score),
    writer("ZREMRANGEBYRANK", 4, remove_by_rank),
    writer("ZREMRANGEBYSCORE", 4, remove_by_score),
    writer("ZPOPMIN", -2, pop),
    writer("ZPOPMAX", -2, pop),
    reader("ZSCAN", -3, scan),
)
