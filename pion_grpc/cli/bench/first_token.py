"""The row about the time to first token of a second process: stream and export, cold and from a file.

The first process prefills, stores, and saves mlx-lm's own file of the same cache; then it ends. The
second one has its own model and takes every way in turn. The one decision: each length has its own
prompt, so that none is found as the beginning of another.
"""

import numpy as np

from pion_grpc.cli.bench.measuring import Context, Side
from pion_grpc.cli.bench.models import (
    QUESTION_TOKENS,
    FirstToken,
    Loaded,
    ModelProcess,
    Sizes,
    Way,
)
from pion_grpc.cli.bench.processes import Server
from pion_grpc.cli.bench.results import Bound, Result, at_most, milliseconds

REAL_TOKENS = (256, 1_024, 2_048)
RANDOM_TOKENS = (6_144, 8_192, 16_384)
RANDOM = Sizes()
BOUNDS: dict[tuple[int, str], Bound] = {
    (1_024, "export"): at_most(1.1),
    (1_024, "stream"): at_most(1.5),
}
COLD_ROUNDS = {"real": 2, "random": 1}


def real(context: Context) -> list[Result]:
    """The real model."""
    lengths = REAL_TOKENS[:2] if context.quick else REAL_TOKENS
    return measured(context, None, lengths)


def random(context: Context) -> list[Result]:
    """A small random model, with which cold prefills of long prompts take acceptable time."""
    return measured(context, RANDOM, RANDOM_TOKENS[:1] if context.quick else RANDOM_TOKENS)


def measured(context: Context, sizes: Sizes | None, lengths: tuple[int, ...]) -> list[Result]:
    """Prompts of these lengths with the real model, or with a random one of these sizes."""
    results = []
    with Server(context.scratch / "data") as server:
        files = {length: str(context.scratch / f"{length}.safetensors") for length in lengths}
        with (
            context.waiting("the first process prefills and stores", len(lengths)) as advance,
            ModelProcess(server.address, sizes) as first,
        ):
            for length in lengths:
                first.do(Loaded.keep, ids_of(length, sizes), files[length])
                advance()
        with ModelProcess(server.address, sizes) as second:
            for length in lengths:
                results += _of_length(context, second, sizes, length, files[length])
    return results


def _of_length(
    context: Context, second: ModelProcess, sizes: Sizes | None, length: int, file: str
) -> list[Result]:
    ids, question = ids_of(length, sizes), ids_of(QUESTION_TOKENS, sizes)
    tokens: dict[Way, int] = {}

    def side(way: Way) -> Side:
        def measure() -> float:
            got: FirstToken = second.do(Loaded.first_token, way, ids, question, file)
            tokens[way] = got.token
            return got.seconds

        return measure

    ways: tuple[Way, ...] = ("export", "stream", "file", "cold")
    samples = context.interleaved(
        {way: side(way) for way in ways},
        rounds=9,
        warm_ups=2,
        rarely={"cold": COLD_ROUNDS["random" if sizes else "real"]},
    )
    model = "SmolLM2-135M" if sizes is None else f"random llama of {sizes.layers} layers"
    what = f"first token after {length:,} tokens, {model}"
    sides = {way: milliseconds(way, values) for way, values in samples.items()}
    note = f"{sum(token == tokens['cold'] for token in tokens.values()) - 1} of 3 agree with cold"
    return [
        *(
            Result(f"{what}: {way}", "ms", sides[way], sides["file"], BOUNDS.get((length, way)))
            for way in ("export", "stream")
        ),
        Result(f"{what}: export, against cold", "ms", sides["export"], sides["cold"], note=note),
    ]


def ids_of(tokens: int, sizes: Sizes | None = None) -> list[int]:
    """Token ids of a prompt of this length; equal lengths give equal ids."""
    vocab = 49_152 if sizes is None else sizes.vocab
    ids: list[int] = np.random.default_rng(tokens).integers(20, vocab, tokens).tolist()
    return ids
