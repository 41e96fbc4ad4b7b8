"""Processes of their own with a model in them, and the ways to a first token.

This module runs in such a process; the rows decide what it is asked. The one decision: a first token is
timed inside the process that wants it, from the moment it has the prompt until the token is known, with
the model already loaded. Cold is what users of mlx-lm have: the whole prompt in one piece.

A process keeps one model for life: the module's only state.
"""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

Way = Literal["cold", "file", "export", "stream"]
QUESTION_TOKENS = 16


class ModelMissing(Exception):
    """The real language model is not installed; the message says how to get it."""


class FirstToken(NamedTuple):
    """How long it took, and what it was."""

    seconds: float
    token: int


class Sizes(NamedTuple):
    """The sizes of a small llama with random weights."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 4
    vocab: int = 512

    def build(self) -> Any:
        """The model; equal sizes give equal bits."""
        from pion_grpc.cli import smollm2

        return smollm2.random_llama(**self._asdict())


class Buildable(Protocol):
    """Sizes of a random model of any family."""

    def build(self) -> Any:
        """The model; equal sizes give equal bits."""


_Answer = TypeVar("_Answer")


class ModelProcess:
    """A process with a model; ends with the context.

    Args:
        address: of a server; empty if there is none to ask.
        sizes: of a random model; None for the real one.
    """

    def __init__(self, address: str = "", sizes: Buildable | None = None) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        try:
            self.do(_load, address, sizes)
        except BaseException:
            self._pool.shutdown()
            raise

    def do(self, function: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Runs a module's function there, with the process's `Loaded` as its first argument."""
        return self._pool.submit(_call, function, arguments).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


class Loaded:
    """What a model process holds."""

    def __init__(self, address: str, sizes: Buildable | None) -> None:
        from pion_grpc.cli import smollm2

        self.address = address
        self.tokenizer: smollm2.Tokenizer | None = None
        if sizes is None:
            try:
                self.model, self.tokenizer = smollm2.load()
            except smollm2.ModelMissingError as error:
                raise ModelMissing(str(error)) from None
        else:
            self.model = sizes.build()
        self.prompt_caches = {
            way: self.prompt_cache(way) for way in ("export", "stream") if address
        }

    def prompt_cache(self, way: str) -> Any:
        """A prompt cache that uses one of the two lanes."""
        from pion_client import Client
        from pion_client.mlx import PionPromptCache

        client = Client(self.address, export=way == "export")
        return PionPromptCache(self.model, client=client, deadline_s=60.0)

    def first_token(
        self, way: Way, ids: Sequence[int], question: Sequence[int], file: str
    ) -> FirstToken:
        """The first token after a prompt and a question, with the prompt's cache from one of the
        ways."""
        import mlx.core as mx
        from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache

        from pion_grpc.cli.decode import greedy

        mx.clear_cache()
        started = time.perf_counter()
        rest = question
        if way == "cold":
            cache, rest = make_prompt_cache(self.model), [*ids, *question]
        elif way == "file":
            cache = load_prompt_cache(file)  # type: ignore[no-untyped-call]
        else:
            cache = self.prompt_caches[way].get_or_prefill(ids)
        token = greedy(self.model, rest, cache, 1).ids[0]
        seconds = time.perf_counter() - started
        if way in ("export", "stream"):
            stats = self.prompt_caches[way].stats()
            assert stats["lane"] == way, f"{way} was asked for, {stats}"
            assert not stats["tokens_prefilled"], stats
        return FirstToken(seconds, token)

    def keep(self, ids: Sequence[int], file: str) -> None:
        """Prefills a prompt, stores it, and saves it to a file."""
        from mlx_lm.models.cache import save_prompt_cache

        prompt_cache = self.prompt_caches["export"]
        cache = prompt_cache.get_or_prefill(ids)
        prompt_cache.flush()
        assert not prompt_cache.stats()["skipped"], prompt_cache.stats()
        save_prompt_cache(file, cache)


_loaded: list[Loaded] = []


def _load(address: str, sizes: Buildable | None) -> None:
    _loaded.append(Loaded(address, sizes))


def _call(function: Callable[..., _Answer], arguments: Sequence[Any]) -> _Answer:
    if function is _load:
        return function(*arguments)
    return function(_loaded[0], *arguments)
