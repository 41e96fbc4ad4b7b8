"""The rows about retrieved chunks: what keeping them saves, and what joining them changes.

Both use the real model and texts whose answers can be checked: logs of harbours that do not exist, each
with its own facts. The one decision: the comparison is with the same tokens prefilled as one prompt, as
without such a cache. A *text run* of many packs is prefilled once and continued for each question, so
that the only difference is that packs do not attend to each other, not the time of another prefill.
"""

import copy
import time
from typing import Any, NamedTuple

from pion_grpc.cli.bench.measuring import Context, Side
from pion_grpc.cli.bench.models import Loaded, ModelProcess
from pion_grpc.cli.bench.processes import Server
from pion_grpc.cli.bench.results import Result, Samples, milliseconds

HARBOURS = (
    *("Brenholm", "Castelmor", "Dunvarra", "Eskby", "Farwick", "Gallstad", "Hellevik"),
    *("Isenfjord", "Jarlsund", "Kellwater", "Lumbria", "Marnhaven", "Norvale", "Ostermund"),
    *("Pellgate", "Quistrup", "Rosmarin", "Skelmere", "Tarvik", "Ullapoint"),
)
_COLOURS = ("green", "white", "red", "yellow", "blue", "orange", "black")
_CARGO = ("timber", "salt", "herring", "wool", "granite", "coffee", "copper", "barley")
_KEEPERS = ("Ada Lind", "Tom Hale", "Mira Voss", "Jon Aske", "Eva Rand", "Karl Moe", "Ines Falk")

STUB = (
    "<|im_start|>system\nAnswer from the harbour logs, in a few words.<|im_end|>\n"
    "<|im_start|>user\n"
)
ANSWER_TOKENS = 16
PACKS = (*range(1, 9), 12, 16, 20)
PACKS_WHEN_QUICK = (1, 3)
CASES = (2, 4, 8)
"""Logs in the chunk of each case."""
QUESTIONS_MAX = 4


class Question(NamedTuple):
    """A question about a log."""

    text: str
    answer: str
    """What a right answer has."""


def log(number: int) -> str:
    """The log of a harbour, about 65 tokens."""
    name = HARBOURS[number]
    facts = "".join(f" The {what} of {name} {verb} {fact}." for what, verb, fact in _facts(number))
    return f"Log of {name}:{facts} Fog closed the harbour on {5 + number} days last year.\n"


def question(number: int) -> Question:
    """The question about the log of this number; it begins the answer, because the model is so small."""
    what, verb, fact = _facts(number)[number % 3]
    begun = f"The {what} of {HARBOURS[number]} {verb}"
    text = f"Question: what is said about the {what} of {HARBOURS[number]}?<|im_end|>\n"
    return Question(f"{text}<|im_start|>assistant\n{begun}", fact)


def _facts(number: int) -> tuple[tuple[str, str, str], ...]:
    return (
        ("lighthouse", "is painted", _COLOURS[number % len(_COLOURS)]),
        ("main cargo", "is", _CARGO[number % len(_CARGO)]),
        ("keeper", "is called", _KEEPERS[number % len(_KEEPERS)]),
    )


def asked_about(packs: int) -> list[int]:
    """Which of this many logs the questions are about: the first, the last, and some between."""
    count = min(packs, QUESTIONS_MAX)
    return sorted({round(index * (packs - 1) / max(count - 1, 1)) for index in range(count)})


# What a chunk saves


class Answered(NamedTuple):
    """An answer, obtained in one of the ways."""

    seconds: float
    """To its first token."""
    ids: list[int]


def chunks(context: Context) -> list[Result]:
    """Three cases of one chunk and one question: time to first token, and the tokens themselves."""
    results: list[Result] = []
    cases = CASES[:1] if context.quick else CASES
    with (
        Server(context.scratch / "data") as server,
        ModelProcess(server.address) as process,
    ):
        saved: dict[str, list[float]] = {"inproc": [], "pion": []}
        agreeing, wanted = dict.fromkeys(saved, 0), 0
        for logs in cases:
            tokens = process.do(ingest, logs)
            answers: dict[str, Answered] = {}

            def side(way: str, logs: int = logs, answers: dict[str, Answered] = answers) -> Side:
                def measure() -> float:
                    answers[way] = process.do(answer, way, logs)
                    return answers[way].seconds

                return measure

            samples = context.interleaved(
                {way: side(way) for way in ("inproc", "pion", "text")}, rounds=7, rarely={"text": 3}
            )
            what = f"first token after a chunk of {tokens} tokens, SmolLM2-135M"
            text = milliseconds("the same as text", samples["text"])
            for way in saved:
                result = Result(f"{what}: {way}", "ms", milliseconds(way, samples[way]), text)
                results.append(result)
                saved[way].append(100 * (1 - (result.ratio or 0)))
                agreeing[way] += _agreeing(answers[way].ids, answers["text"].ids)
            wanted += len(answers["text"].ids)
        for way, percent in saved.items():
            note = (
                f"mean {sum(percent) / len(percent):.0f} %, {min(percent):.0f} to "
                f"{max(percent):.0f}; {agreeing[way]} of {wanted} tokens as those of the text"
            )
            what = f"time to first token saved, {len(cases)} questions: {way}"
            results.append(Result(what, "%", Samples(way, tuple(percent)), note=note))
    return results


def ingest(loaded: Loaded, logs: int) -> int:
    """Ingests a chunk of this many logs in both backends; returns its length."""
    ids = _encoded(loaded, _chunk(logs))
    for way in ("inproc", "pion"):
        assert _retrieval(loaded, way).ingest(str(logs), ids).kept, way
    return len(ids)


def answer(loaded: Loaded, way: str, logs: int) -> Answered:
    """Answers the question about the last log of a chunk, in one of the ways."""
    from mlx_lm.models.cache import make_prompt_cache

    from pion_grpc.cli.decode import greedy

    ids = _encoded(loaded, _chunk(logs))
    suffix = _encoded(loaded, question(logs - 1).text)
    started = time.perf_counter()
    if way == "text":
        cache, rest = make_prompt_cache(loaded.model), [*ids, *suffix]
    else:
        cache, rest = _retrieval(loaded, way).prepare(str(logs), suffix)
    prepared_s = time.perf_counter() - started
    eos_id = _tokenizer(loaded).eos_id
    decoded = greedy(loaded.model, rest, cache, ANSWER_TOKENS, eos_id=eos_id)
    if way == "pion":
        stats = _retrieval(loaded, way).stats()["prompt_cache"]
        assert stats["misses"] == stats["stores"], stats
    return Answered(prepared_s + decoded.ttft_ms / 1e3, decoded.ids)


def _chunk(logs: int) -> str:
    return STUB + "".join(map(log, range(logs)))


# What putting packs together changes


class Composed(NamedTuple):
    """Answers to questions about this many packs, composed and as text."""

    tokens: int
    """Of the packs."""
    questions: int
    wanted: int
    """Tokens of all answers of the text run."""
    agreeing: int
    """How many of them the composed answers begin with."""
    first_agreeing: int
    right: int
    text_right: int
    seconds: float
    """To put them together."""
    text_seconds: float
    """To prefill them."""


def packs(context: Context) -> list[Result]:
    """Agreement of composed packs with the same tokens as one prompt, by the number of packs."""
    counts = PACKS_WHEN_QUICK if context.quick else PACKS
    results = []
    with (
        ModelProcess() as process,
        context.waiting("packs", len(counts)) as advance,
    ):
        for count in counts:
            results += _of_packs(count, process.do(compose, count))
            advance()
    return results


def compose(loaded: Loaded, count: int) -> Composed:
    """Asks about this many packs, composed and as text."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from pion_grpc.cli.decode import greedy, prefill

    retrieval = _retrieval(loaded, "inproc")
    stub, logs = _encoded(loaded, STUB), [_encoded(loaded, log(n)) for n in range(count)]
    retrieval.set_shared_stub(stub)
    for number, ids in enumerate(logs):
        retrieval.ingest_pack(str(number), ids)
    text = make_prompt_cache(loaded.model)
    started = time.perf_counter()
    prefill(loaded.model, [*stub, *(token for ids in logs for token in ids)], text)
    text_seconds = time.perf_counter() - started
    wanted = agreeing = first_agreeing = right = text_right = 0
    eos_id = _tokenizer(loaded).eos_id
    seconds = []
    numbers = asked_about(count)
    for number in numbers:
        asked = question(number)
        started = time.perf_counter()
        cache, rest = retrieval.prepare_multi(
            [str(n) for n in range(count)], _encoded(loaded, asked.text), max_packs=count
        )
        seconds.append(time.perf_counter() - started)
        assert cache[0].offset == text[0].offset
        ours, theirs = (
            greedy(loaded.model, rest, one, ANSWER_TOKENS, eos_id=eos_id).ids
            for one in (cache, copy.deepcopy(text))
        )
        wanted += len(theirs)
        agreeing += _agreeing(ours, theirs)
        first_agreeing += ours[0] == theirs[0]
        right += _says(loaded, ours, asked.answer)
        text_right += _says(loaded, theirs, asked.answer)
        mx.clear_cache()
    return Composed(
        sum(map(len, logs)),
        len(numbers),
        wanted,
        agreeing,
        first_agreeing,
        right,
        text_right,
        min(seconds),
        text_seconds,
    )


def _of_packs(count: int, got: Composed) -> list[Result]:
    what = f"{count} packs of {got.tokens:,} tokens, {got.questions} questions, SmolLM2-135M"
    if count == 1:
        what = what.replace("packs", "pack").replace("1 questions", "1 question")
    note = (
        f"first tokens {got.first_agreeing} of {got.questions}; right answers {got.right}, of the "
        f"text {got.text_right}"
    )
    return [
        Result(
            f"{what}: tokens as those of one prompt",
            f"of {got.wanted}",
            Samples("composed", (float(got.agreeing),)),
            note=note,
        ),
        Result(
            f"{what}: put together",
            "ms",
            milliseconds("composed", (got.seconds,)),
            milliseconds("prefilled as one prompt", (got.text_seconds,)),
        ),
    ]


# Of both

_opened: dict[str, Any] = {}


def _retrieval(loaded: Loaded, backend: str) -> Any:
    """The process's cache with this backend."""
    from pion_client.retrieval import HybridRetrievalCache

    if backend not in _opened:
        options: Any = {"backend": backend}
        if backend == "pion":
            options |= {"address": loaded.address, "deadline_s": 60.0}
        _opened[backend] = HybridRetrievalCache(loaded.model, **options)
    return _opened[backend]


def _encoded(loaded: Loaded, text: str) -> list[int]:
    ids: list[int] = _tokenizer(loaded).encode(text)
    return ids


def _says(loaded: Loaded, ids: list[int], word: str) -> bool:
    return word in _tokenizer(loaded).decode(ids)


def _tokenizer(loaded: Loaded) -> Any:
    assert loaded.tokenizer is not None
    return loaded.tokenizer


def _agreeing(ours: list[int], theirs: list[int]) -> int:
    """How many tokens agree before the first that does not."""
    pairs = list(zip(ours, theirs, strict=False))  # one may have ended sooner
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
