"""The headline row: a few prompts with many queries each, through the public prompt cache.

Every request has one of the prompts, in turn, and its own question; its cache comes from
`get_or_prefill`, and it ends with its first token. Some requests are also answered without the store,
the whole prompt in one piece as mlx-lm does it: cold. The one decision: after a miss, the next request
begins when the prompt has been stored, so that the number of hits is arithmetic and not luck; the wait
counts in the throughput.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pion_grpc.cli.bench import texts
from pion_grpc.cli.bench.measuring import Context, Workload
from pion_grpc.cli.bench.models import Loaded, ModelProcess
from pion_grpc.cli.bench.processes import Server
from pion_grpc.cli.bench.results import Result, Samples, at_least, milliseconds


class Request(NamedTuple):
    """One query of the workload."""

    prompt: int
    question: int
    first: bool
    """Nothing of its prompt is stored yet."""
    cold_too: bool
    """It is answered without the store as well."""


class Answered(NamedTuple):
    """One request."""

    hit: bool
    seconds: float
    """To the first token."""
    with_store_s: float
    """And until its prompt was stored, if it was not."""
    token: int
    cold: "tuple[float, int] | None"
    """Seconds and first token of the same request without the store."""


def requests(workload: Workload) -> Iterator[Request]:
    """Yields every request, the prompts in turn."""
    cold = range(1, 1 + workload.cold_queries)
    for query in range(workload.queries):
        for prompt in range(workload.prompts):
            yield Request(prompt, query * workload.prompts + prompt, query == 0, query in cold)


def workload(context: Context) -> list[Result]:
    """Hit rate, time to first token, throughput and agreement of a workload."""
    size = context.workload
    if context.quick:
        size = size._replace(prompt_repeats=min(size.prompt_repeats, 2), cold_queries=1)
    with (
        Server(context.scratch / "data") as server,
        ModelProcess(server.address) as process,
        context.waiting("requests", size.request_count) as advance,
    ):
        answers, tokens = _run(process, size, advance)
    return _results(size, answers, tokens)


def _run(
    process: ModelProcess, size: Workload, advance: Callable[[], None]
) -> tuple[list[Answered], float]:
    answers = []
    for request in requests(size):
        answers.append(process.do(answer, request, size.prompt_repeats))
        advance()
    return answers, process.do(prompt_tokens, size)


def answer(loaded: Loaded, request: Request, repeats: int) -> Answered:
    """Answers one request in the model's process."""
    from pion_grpc.cli.decode import greedy

    prompt = texts.prompt(request.prompt, repeats)
    ids, question = _ids(loaded, prompt, texts.question(request.question))
    prompt_cache = loaded.prompt_caches["export"]
    namespace = prompt_cache.make_namespace("SmolLM2-135M", prompt)
    hits = prompt_cache.stats()["hits"]
    started = time.perf_counter()
    cache = prompt_cache.get_or_prefill(ids, namespace=namespace)
    token = greedy(loaded.model, question, cache, 1).ids[0]
    seconds = time.perf_counter() - started
    hit = prompt_cache.stats()["hits"] > hits
    if not hit:
        prompt_cache.flush()
    with_store_s = time.perf_counter() - started
    cold = loaded.first_token("cold", ids, question, "") if request.cold_too else None
    return Answered(hit, seconds, with_store_s, token, cold)


def prompt_tokens(loaded: Loaded, size: Workload) -> float:
    """The mean length of the prompts."""
    lengths = [
        len(_ids(loaded, texts.prompt(n, size.prompt_repeats), "")[0]) for n in range(size.prompts)
    ]
    return sum(lengths) / len(lengths)


def _ids(loaded: Loaded, prompt: str, question: str) -> tuple[list[int], list[int]]:
    assert loaded.tokenizer is not None
    return loaded.tokenizer.encode(prompt), loaded.tokenizer.encode(question)


def _results(size: Workload, answers: list[Answered], tokens: float) -> list[Result]:
    what = f"{size.prompts} prompts of {tokens:,.0f} tokens × {size.queries} queries"
    hits = sum(answered.hit for answered in answers)
    warm = [answered.seconds for answered in answers if answered.hit]
    cold = [answered.cold for answered in answers if answered.cold]
    agreeing = [float(a.token == a.cold[1]) for a in answers if a.cold]
    cold_s = [seconds for seconds, _ in cold]
    throughput = len(answers) / sum(answered.with_store_s for answered in answers)
    results = [
        Result(
            f"{what}: hits",
            f"of {size.request_count}",
            Samples("store", (float(hits),)),
            bound=at_least(size.hit_count, of_ratio=False),
            note=f"{hits / size.request_count:.1%}",
        )
    ]
    if not warm or not cold:
        return results
    return [
        *results,
        Result(
            f"{what}: time to first token",
            "ms",
            milliseconds("warm", warm),
            milliseconds("cold", cold_s),
        ),
        Result(
            f"{what}: throughput, misses included",
            "requests/s",
            Samples("store", (throughput,)),
            Samples("cold", (len(cold_s) / sum(cold_s),)),
        ),
        Result(
            f"{what}: first token as cold's",
            f"of {len(agreeing)}",
            Samples("store", (sum(agreeing),)),
            note=f"{sum(agreeing) / len(agreeing):.0%}",
        ),
    ]
