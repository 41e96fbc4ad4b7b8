"""The rows about what is not rows: recurrent state, and hybrid models' time to first token.

The one decision: state is measured beside K/V rows of as many bytes, in the same round and through the
same calls, because rows are what the rest of the benchmarks say everything about. A hybrid model is a
small one of random weights, three recurrent layers to one of attention; what it answers says nothing,
so that its caches are right is told by 18 tokens that must be those of a prefill split alike.
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from pion_client import Client, Part
from pion_grpc.cli.bench.measuring import Context, Side, timed
from pion_grpc.cli.bench.models import QUESTION_TOKENS, Loaded, ModelProcess
from pion_grpc.cli.bench.prefixes import MODEL
from pion_grpc.cli.bench.processes import Server
from pion_grpc.cli.bench.results import Result, Samples, at_least, at_most, milliseconds, rates

Way = Literal["export", "stream", "file", "cold"]
WAYS: tuple[Way, ...] = ("export", "stream", "file", "cold")
STATES = ((33, 8), (512, 1))
"""MB of state per layer, and layers."""
QUICK_STATES = ((33, 2),)
HEADS, HEAD_DIM = 8, 128
TOKENS = (174, 2_048, 4_096, 8_192, 32_768)
AGREED = 18
PATTERN = ("M", "M", "M", "*")
BLOCKS = 2
"""How often the pattern is repeated."""


class HybridSizes(NamedTuple):
    """Of a small hybrid of random weights: state of 256 KiB per recurrent layer."""

    layers: int = BLOCKS * len(PATTERN)
    hidden: int = 256
    vocab: int = 512

    def build(self) -> Any:
        """The model; equal sizes give equal bits."""
        import mlx.core as mx
        from mlx.utils import tree_map
        from mlx_lm.models import nemotron_h

        mx.random.seed(3)
        arguments: Any = nemotron_h.ModelArgs
        model: Any = nemotron_h.Model(
            arguments(
                model_type="nemotron_h",
                vocab_size=self.vocab,
                hidden_size=self.hidden,
                intermediate_size=2 * self.hidden,
                max_position_embeddings=1 << 17,
                num_attention_heads=4,
                num_key_value_heads=4,
                attention_bias=False,
                mamba_num_heads=8,
                mamba_head_dim=64,
                mamba_proj_bias=False,
                ssm_state_size=128,
                conv_kernel=4,
                n_groups=2,
                mlp_bias=False,
                layer_norm_epsilon=1e-5,
                use_bias=False,
                use_conv_bias=True,
                hybrid_override_pattern=[*PATTERN * BLOCKS],
            )
        )
        # What the family starts with makes the state forget at once.
        noise = functools.partial(mx.random.normal, scale=0.05)
        model.update(tree_map(lambda p: p + noise(p.shape), model.parameters()))
        mx.eval(model.parameters())
        return model


# State


def state(context: Context) -> list[Result]:
    """State stored and fetched, over loopback TCP and on one host, against K/V rows of as many bytes.

    As parts of a prefix, and as the values of a session. What is compared takes turns among itself: what
    freed memory or files last, and so how dear the next are, is the same for all sides.
    """
    results = []
    for megabytes, layers in QUICK_STATES if context.quick else STATES:
        with (
            Server(context.scratch / f"data{megabytes}") as server,
            Client(server.address, export=False) as client,
            Client(server.address) as local,
        ):
            results += _state(context, client, local, megabytes, layers)
    return results


class _Contents(NamedTuple):
    """The same bytes as state and as rows."""

    parts: list[Part]
    layers: list[tuple[np.ndarray, np.ndarray]]
    size_bytes: int

    @property
    def token_count(self) -> int:
        return int(self.layers[0][0].shape[1])


def _contents(megabytes: int, layers: int) -> _Contents:
    row_bytes = HEADS * HEAD_DIM * 2
    tokens = megabytes * 1_000_000 // (2 * row_bytes)
    words = layers * 2 * tokens * row_bytes // 8
    data = np.random.default_rng(5).integers(0, 1 << 64, words, dtype=np.uint64)
    tensors = data.view(np.float16).reshape(layers, 2, tokens, HEADS, HEAD_DIM)
    parts = [
        Part("state", slot, tokens, values.view(np.uint8).data.cast("B"))
        for slot, values in enumerate(data.reshape(layers, -1))
    ]
    pairs = [(k.transpose(1, 0, 2), v.transpose(1, 0, 2)) for k, v in tensors]
    return _Contents(parts, pairs, data.nbytes)


def _state(
    context: Context, client: Client, local: Client, megabytes: int, layers: int
) -> list[Result]:
    contents = _contents(megabytes, layers)
    ids = np.arange(contents.token_count, dtype=np.uint32)
    store = functools.partial(client.store, token_ids=ids, model=MODEL)
    as_parts = functools.partial(store, layers=None, parts=contents.parts)
    as_rows = functools.partial(store, layers=contents.layers)

    def as_values(session: str) -> None:
        client.states.store_all(session, {part.slot: part.data for part in contents.parts})

    as_parts("parts")
    as_rows("rows")
    as_values("values")
    fetched = client.fetch("parts", part_kinds=["state"])
    assert fetched is not None
    assert [bytes(part.data) for part in fetched.parts] == [bytes(p.data) for p in contents.parts]
    del fetched

    def stored(how: Any) -> float:
        elapsed = timed(lambda: how("new"))
        client.drop("new")
        client.states.drop("new")
        return elapsed

    slots = range(layers)
    kinds: dict[str, list[str]] = {"parts": ["state"], "rows": []}

    def fetch(name: str) -> object:
        found: object = (
            client.states.fetch_all(name, slots)
            if name == "values"
            else client.fetch(name, part_kinds=kinds[name])
        )
        assert found
        return found

    def load(name: str) -> object:
        if name == "values":
            found = local.states.fetch_all(name, slots, as_mlx=True)
            assert {state.transport for state in found.values()} == {"export"}, found
            return found
        prefix = local.fetch(name, part_kinds=kinds[name], as_mlx=True)
        assert prefix is not None
        assert prefix.transport == "export", prefix.transport_reason
        return prefix

    for states in (
        client.states.fetch_all("values", slots),
        local.states.fetch_all("values", slots, as_mlx=True),
    ):
        assert [bytes(state.data) for state in states.values()] == [
            bytes(part.data) for part in contents.parts
        ], "other bits came back"
    del states

    storing = {"parts": as_parts, "values": as_values, "rows": as_rows}
    actions: dict[str, Callable[[str], float]] = {
        "store": lambda name: stored(storing[name]),
        "fetch": lambda name: timed(lambda: fetch(name)),
        "load": lambda name: timed(lambda: load(name)),
    }
    samples: dict[str, tuple[float, ...]] = {}
    for action, measure in actions.items():
        sides = {f"{action} {name}": functools.partial(measure, name) for name in storing}
        samples |= context.interleaved(sides, rounds=9, warm_ups=2)
    return [
        Result(
            f"{what} of state as {form}, {layers} × {megabytes} MB, {how}",
            "GB/s",
            rates(form, contents.size_bytes, samples[f"{side} {form}"]),
            rates("K/V rows", contents.size_bytes, samples[f"{side} rows"]),
            at_least(0.9),
        )
        for form in ("parts", "values")
        for what, side, how in (
            ("Store", "store", "over loopback TCP"),
            ("Fetch", "fetch", "over loopback TCP"),
            ("Fetch", "load", "on the same host into MLX"),
        )
    ]


# First tokens


class Answer(NamedTuple):
    """How long the first token took, and the first tokens."""

    seconds: float
    tokens: list[int]


def answer(
    loaded: Loaded, way: Way, ids: Sequence[int], question: Sequence[int], file: str
) -> Answer:
    """Runs in a model process: the prompt's cache got in one of the ways, then the question."""
    import mlx.core as mx
    from mlx_lm.models.cache import load_prompt_cache

    from pion_grpc.cli.decode import greedy

    mx.clear_cache()
    started = time.perf_counter()
    if way == "cold":
        cache = _prefilled(loaded.model, ids)
    elif way == "file":
        cache = load_prompt_cache(file)  # type: ignore[no-untyped-call]
    else:
        cache = loaded.prompt_caches[way].get_or_prefill(ids)
    ready = time.perf_counter()
    decoded = greedy(loaded.model, question, cache, AGREED)
    if way in ("export", "stream"):
        stats = loaded.prompt_caches[way].stats()
        assert (stats["lane"], stats["tokens_prefilled"]) == (way, 0), stats
    return Answer(ready - started + decoded.ttft_ms / 1e3, decoded.ids)


def _prefilled(model: Any, ids: Sequence[int]) -> list[Any]:
    """A prefill split as that of a prompt cache is."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from pion_client.caches import settle
    from pion_client.mlx import PREFILL_STEP

    cache: list[Any] = make_prompt_cache(model)
    tokens = mx.array(list(ids), dtype=mx.uint32)
    for begin in range(0, len(ids), PREFILL_STEP):
        model(tokens[None, begin : begin + PREFILL_STEP], cache=cache)
        settle(cache)
    return cache


def first_token(context: Context) -> list[Result]:
    """A second process with a hybrid model: export and stream, cold and from a file."""
    lengths = TOKENS[:2] if context.quick else TOKENS
    sizes = HybridSizes()
    results: list[Result] = []
    warm: dict[int, float] = {}
    size_bytes: dict[int, int] = {}
    with Server(context.scratch / "data") as server:
        files = {length: str(context.scratch / f"{length}.safetensors") for length in lengths}
        with (
            context.waiting("the first process prefills and stores", len(lengths)) as advance,
            ModelProcess(server.address, sizes) as first,
        ):
            for length in lengths:
                first.do(Loaded.keep, _ids(length), files[length])
                size_bytes[length] = Path(files[length]).stat().st_size
                advance()
        with ModelProcess(server.address, sizes) as second:
            for length in lengths:
                results += _of_length(context, second, length, files[length])
                figure = results[-4].figure
                assert figure is not None
                warm[length] = figure
    return [*results, *_growth(lengths, warm, size_bytes)]


def _of_length(context: Context, second: ModelProcess, length: int, file: str) -> list[Result]:
    ids, question = _ids(length), _ids(QUESTION_TOKENS)
    tokens: dict[Way, list[int]] = {}

    def side(way: Way) -> Side:
        def measure() -> float:
            got: Answer = second.do(answer, way, ids, question, file)
            tokens[way] = got.tokens
            return got.seconds

        return measure

    samples = context.interleaved(
        {way: side(way) for way in WAYS}, rounds=9, warm_ups=2, rarely={"cold": 1}
    )
    what = f"first token after {length:,} tokens, random hybrid of {HybridSizes().layers} layers"
    sides = {way: milliseconds(way, samples[way]) for way in WAYS}
    agreed = tuple(float(_agreed(tokens[way], tokens["cold"])) for way in WAYS[:3])
    return [
        Result(f"{what}: export", "ms", sides["export"], sides["file"]),
        Result(f"{what}: stream", "ms", sides["stream"], sides["file"]),
        Result(f"{what}: export, against cold", "ms", sides["export"], sides["cold"]),
        Result(
            f"{what}: tokens that agree with cold, of {AGREED}, fewest of the ways",
            "tokens",
            Samples("warm", agreed),
            bound=at_least(AGREED, of_ratio=False),
            fraction=0.0,
        ),
    ]


def _agreed(tokens: list[int], others: list[int]) -> int:
    """How many of the first tokens are the same."""
    differing = (i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b)
    return next(differing, len(tokens))


def _growth(
    lengths: Sequence[int], warm: dict[int, float], size_bytes: dict[int, int]
) -> list[Result]:
    """The longest prompt beside the second shortest: with the shortest nothing but calls is timed."""
    begin, end = lengths[1], lengths[-1]
    if begin == end:
        return []
    return [
        Result(
            f"growth of the warm first token, {begin:,} to {end:,} tokens, beside that of the bytes",
            "×",
            Samples("time", (warm[end] / warm[begin],)),
            Samples("bytes", (size_bytes[end] / size_bytes[begin],)),
            at_most(1.0),
        )
    ]


def _ids(tokens: int) -> list[int]:
    ids: list[int] = np.random.default_rng(tokens).integers(20, 512, tokens).tolist()
    return ids
