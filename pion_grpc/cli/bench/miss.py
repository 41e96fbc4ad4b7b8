"""The row about what a miss costs: the time to first token with nothing to fetch.

The same prefill in three ways: without the client, with a server that misses and then stores, and with
one that never answers. The one decision: the prefill without the client is split exactly as with it
(the prompt, then the question); otherwise the difference would be that of the split.
"""

import collections
import contextlib
import itertools
import socket
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pion_grpc.cli.bench.measuring import Context, Side
from pion_grpc.cli.bench.models import QUESTION_TOKENS, Loaded, ModelProcess
from pion_grpc.cli.bench.processes import Server
from pion_grpc.cli.bench.results import Result, at_most, milliseconds

DEADLINE_S = 1.0
ROUNDS, FIRST_ROUNDS = 11, 3
TOLERANCE = 1.03


class Taken(NamedTuple):
    """One first token."""

    seconds: float
    beyond_s: float
    """Of that, what `get_or_prefill` took beyond the prefill; 0 without the client."""


def miss(context: Context) -> list[Result]:
    """Time to first token on a miss, server up and storing, and server down."""
    tokens = 128 if context.quick else 256
    numbers = itertools.count()
    beyond: dict[str, list[float]] = collections.defaultdict(list)
    with (
        Server(context.scratch / "data") as server,
        _silent() as silent,
        ModelProcess(server.address) as process,
    ):

        def side(how: str) -> Side:
            def measure() -> float:
                taken = process.do(first_token, how, silent, next(numbers), tokens)
                beyond[how].append(taken.beyond_s)
                return taken.seconds

            return measure

        samples = context.interleaved(
            {how: side(how) for how in ("alone", "storing", "first", "later")},
            rounds=ROUNDS,
            rarely={"first": FIRST_ROUNDS},
        )
    alone = milliseconds("without the client", samples["alone"])
    what, close = f"first token after a miss of {tokens} tokens", at_most(TOLERANCE)
    once = at_most(DEADLINE_S * 1e3 * TOLERANCE, of_ratio=False)
    own = "what the client adds to the prefill"
    return [
        Result(
            f"{what}, server up and storing",
            "ms",
            milliseconds("miss", samples["storing"]),
            alone,
            close,
        ),
        Result(f"{what}, {own}", "ms", milliseconds("miss", beyond["storing"])),
        Result(
            f"{what}, server silent, first call: {own}",
            "ms",
            milliseconds("first call", beyond["first"]),
            bound=once,
            note=f"deadline {DEADLINE_S:g} s",
        ),
        Result(
            f"{what}, server silent, later calls",
            "ms",
            milliseconds("breaker open", samples["later"]),
            alone,
            close,
            note=f"the client adds {statistics.median(beyond['later']) * 1e3:.1f} ms",
        ),
    ]


def first_token(loaded: Loaded, how: str, silent: str, number: int, tokens: int) -> Taken:
    """The first token after a new prompt, in the model's process."""
    import mlx.core as mx

    from pion_client.mlx import PionPromptCache
    from pion_grpc.cli.decode import greedy

    ids, question = _ids(number, tokens), _ids(0, QUESTION_TOKENS)
    prompt_cache = loaded.prompt_caches["stream"]
    if how in ("first", "later"):
        prompt_cache = PionPromptCache(loaded.model, address=silent, deadline_s=DEADLINE_S)
    if how == "later":
        prompt_cache.lookup("the call that finds out")
    mx.clear_cache()
    started = time.perf_counter()
    cache = _prefilled(loaded, ids) if how == "alone" else prompt_cache.get_or_prefill(ids)
    cached = time.perf_counter()
    greedy(loaded.model, question, cache, 1)
    seconds = time.perf_counter() - started
    if how == "alone":
        return Taken(seconds, 0.0)
    beyond_s = cached - started - prompt_cache.stats()["last_prefill_ms"] / 1e3
    if how == "storing":
        prompt_cache.flush()
        stats = prompt_cache.stats()
        assert (stats["hits"], stats["skipped"]) == (0, {}), stats
    else:
        prompt_cache.close()
    return Taken(seconds, beyond_s)


def _prefilled(loaded: Loaded, ids: list[int]) -> list[object]:
    """What the client does on a miss, without it."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(loaded.model)
    loaded.model(mx.array(ids)[None], cache=cache)
    mx.eval([slot.state for slot in cache])
    mx.clear_cache()
    return cache


def _ids(number: int, tokens: int) -> list[int]:
    random = np.random.default_rng(1_000 + number)
    ids: list[int] = random.integers(20, 49_152, tokens).tolist()
    return [20 + number, *ids[1:]]  # not even the first token is stored already


@contextlib.contextmanager
def _silent() -> Iterator[str]:
    """An address that accepts connections and never answers: the worst way to be down."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
