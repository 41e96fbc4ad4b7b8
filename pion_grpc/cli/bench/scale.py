"""The rows about many prefixes: small calls with few and with very many stored, and start-up.

The one decision: both stores are served at the same time, each by its own process, and asked in turn,
call by call, so that p99 means the same on both sides. Small calls are timed as the caller sees them,
including the client.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pion_client import Client
from pion_grpc.cli.bench.measuring import Context, Side, timed
from pion_grpc.cli.bench.prefixes import BLOCK, MODEL, Small, fill, hashes, long_ids
from pion_grpc.cli.bench.processes import Server
from pion_grpc.cli.bench.results import Result, Samples, at_most, milliseconds

FEW = 10
HASHES = 1_562
"""Blocks of 64 of a prefix of 100,000 tokens."""
QUERY_TOKENS = 131_072
COMMON_TOKENS = QUERY_TOKENS // 2 + BLOCK // 3
"""Tokens that the query has in common with a stored prefix: it differs inside a block."""


def calls(context: Context) -> list[Result]:
    """`Lookup`, `Membership` and `Match` with 10 and with 100,000 prefixes stored."""
    many = 10_000 if context.quick else 100_000
    for count in (FEW, many):
        _filled(context, context.scratch / str(count), count)
    query = long_ids(3, QUERY_TOKENS)
    query[COMMON_TOKENS:] = 1  # no stored token is
    asks: dict[str, Callable[[Client], Any]] = {
        "Lookup": lambda client: client.lookup("p7"),
        f"Membership, {HASHES:,} in {HASHES:,}": lambda client: client.membership(
            ["p0"], hashes(HASHES)
        ),
        f"Match of {QUERY_TOKENS:,} tokens": lambda client: client.match(
            model=MODEL, token_ids=query, lease_ms=0
        ),
    }
    results = []
    with (
        Server(context.scratch / str(FEW)) as few_server,
        Server(context.scratch / str(many)) as many_server,
        Client(few_server.address) as few_client,
        Client(many_server.address) as many_client,
    ):
        for client in (few_client, many_client):
            _check(asks, client)
        for what, ask in asks.items():
            samples = context.interleaved(
                {str(FEW): _asking(ask, few_client), str(many): _asking(ask, many_client)},
                rounds=1_000,
                warm_ups=50,
                rounds_when_quick=200,
            )
            few = milliseconds(f"{FEW} stored", samples[str(FEW)])
            lots = milliseconds(f"{many:,} stored", samples[str(many)])
            results.append(Result(f"{what}, p50", "ms", lots, few, at_most(2)))
            results.append(Result(f"{what}, p99", "ms", lots, few, at_most(2), fraction=0.99))
    return results


def start_up(context: Context) -> list[Result]:
    """From the start of the server's process until it serves, with 10,000 prefixes stored."""
    count = 1_000 if context.quick else 10_000
    directory, empty = context.scratch / str(count), context.scratch / "empty"
    _filled(context, directory, count)

    def started(path: Path, *, crash: bool) -> float:
        server = Server(path)
        server.kill() if crash else server.stop()
        return server.start_s

    started(directory, crash=False)
    clean = context.interleaved(
        {
            "stored": lambda: started(directory, crash=False),
            "empty": lambda: started(empty, crash=False),
        },
        rounds=5,
    )
    killed = context.interleaved(
        {
            "stored": lambda: started(directory, crash=True),
            "empty": lambda: started(empty, crash=True),
        },
        rounds=5,
    )
    return [
        Result(
            f"start-up with {count:,} prefixes {after}",
            "s",
            Samples(f"{count:,} stored", samples["stored"]),
            Samples("nothing stored", samples["empty"]),
            at_most(2, of_ratio=False),
        )
        for after, samples in (("after a clean stop", clean), ("after SIGKILL", killed))
    ]


def _asking(ask: Callable[[Client], Any], client: Client) -> Side:
    return lambda: timed(lambda: ask(client))


def _filled(context: Context, directory: Path, count: int) -> None:
    small = Small(count, FEW, QUERY_TOKENS, hashes(HASHES))
    with context.waiting(f"storing {count:,} prefixes", min(count, 1_000)) as advance:
        fill(directory, small, advance)


def _check(asks: dict[str, Callable[[Client], Any]], client: Client) -> None:
    """Fails unless the timed call gives the right answer."""
    lookup, membership, match = (ask(client) for ask in asks.values())
    assert lookup.hit
    assert np.all(membership[0])
    assert match.matched_tokens == COMMON_TOKENS, match
