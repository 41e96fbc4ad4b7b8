"""The row about what a miss costs: the time to first token with nothing to fetch.

The same prefill three times over: without the client, with a server that misses and is being stored to,
with one that never answers. The one decision: the prefill without the client is split exactly as with
it (the prompt, then the question), or the difference would be that of the split.
"""

import contextlib
import itertools
import socket
import time
from collections.abc import Iterator

import numpy as np

from pion_grpc.cli.bench.measuring import Context, Side
from pion_grpc.cli.bench.models import QUESTION_TOKENS, Loaded, ModelProcess
from pion_grpc.cli.bench.processes import Server
from pion_grpc.cli.bench.results import Result, Samples, at_most, milliseconds

DEADLINE_S = 1.0
ROUNDS, FIRST_ROUNDS = 11, 3
TOLERANCE = 1.03


def miss(context: Context) -> list[Result]:
    """Time to first token on a miss, server up and storing, and server down."""
    tokens = 128 if context.quick else 512
    numbers = itertools.count()
    with (
        Server(context.scratch / "data") as server,
        _silent() as silent,
        ModelProcess(server.address) as process,
    ):

        def side(how: str) -> Side:
            return lambda: process.do(first_token, how, silent, next(numbers), tokens)

        samples = context.interleaved(
            {how: side(how) for how in ("alone", "storing", "down", "later")},
            rounds=ROUNDS,
            rarely={"down": FIRST_ROUNDS},
        )
    alone = milliseconds("without the client", samples["alone"])
    what = f"first token after a miss of {tokens} tokens"
    extra = [s * 1e3 - alone.quantile(0.5) for s in samples["down"]]
    return [
        Result(
            f"{what}, server up and storing",
            "ms",
            milliseconds("miss", samples["storing"]),
            alone,
            at_most(TOLERANCE),
        ),
        Result(
            f"{what}, server silent, first call: beyond the same without the client",
            "ms",
            Samples("down", tuple(extra)),
            bound=at_most(DEADLINE_S * 1e3 * TOLERANCE, of_ratio=False),
            note=f"deadline {DEADLINE_S:g} s",
        ),
        Result(
            f"{what}, server silent, later calls",
            "ms",
            milliseconds("breaker open", samples["later"]),
            alone,
            at_most(TOLERANCE),
        ),
    ]


def first_token(loaded: Loaded, how: str, silent: str, number: int, tokens: int) -> float:
    """Seconds to the first token after a prompt that nobody has seen, in the model's process."""
    import mlx.core as mx

    from pion_client.mlx import PionPromptCache
    from pion_grpc.cli.decode import greedy

    ids, question = _ids(number, tokens), _ids(0, QUESTION_TOKENS)
    if how == "storing":
        prompt_cache = loaded.prompt_caches["stream"]
    elif how != "alone":
        prompt_cache = PionPromptCache(loaded.model, address=silent, deadline_s=DEADLINE_S)
    if how == "later":
        prompt_cache.lookup("the call that finds out")
    mx.clear_cache()
    started = time.perf_counter()
    cache = _prefilled(loaded, ids) if how == "alone" else prompt_cache.get_or_prefill(ids)
    greedy(loaded.model, question, cache, 1)
    seconds = time.perf_counter() - started
    if how == "storing":
        prompt_cache.flush()
        stats = prompt_cache.stats()
        assert (stats["hits"], stats["skipped"]) == (0, {}), stats
    elif how != "alone":
        prompt_cache.close()
    return seconds


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
    return ids


@contextlib.contextmanager
def _silent() -> Iterator[str]:
    """An address that takes connections and never says a word: the worst way to be down."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
