"""Runs a model with a cache: prefill, and greedy decoding with its time to first token.

Knows neither which model it runs nor where the cache came from. The one decision: both go through
mlx-lm's own `generate_step`, so that what is measured and compared is what every mlx-lm user runs,
down to the bits: the last token of a prompt is always a step of its own.

Importing this module imports MLX and mlx-lm: commands import it when they run.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step


class Decoded(NamedTuple):
    """The result of `greedy`."""

    ids: list[int]
    """The new tokens, including the one that ended the answer."""
    ttft_ms: float
    """From the call to the first token."""


def prefill(model: Module, ids: Sequence[int], cache: list[Any]) -> None:
    """Appends the tokens to the cache, and returns when it has been computed."""
    for _ in generate_step(_prompt(ids), model, max_tokens=0, prompt_cache=cache):
        raise AssertionError("no token was asked for")


def greedy(
    model: Module, ids: Sequence[int], cache: list[Any], n: int, *, eos_id: int | None = None
) -> Decoded:
    """The `n` most likely tokens after those in the cache followed by `ids`; fewer if one is eos.

    The cache then holds `ids` and all new tokens too.

    Raises ValueError without `ids` (even a fully cached prompt runs its last token) or for n < 1.
    """
    if n < 1:
        raise ValueError("n must be at least 1")
    start = time.perf_counter()
    ttft_ms = 0.0
    new: list[int] = []
    for token, _ in generate_step(_prompt(ids), model, max_tokens=n, prompt_cache=cache):
        if not new:
            ttft_ms = (time.perf_counter() - start) * 1e3
        new.append(int(token))
        if new[-1] == eos_id:
            break
    return Decoded(new, ttft_ms)


def _prompt(ids: Sequence[int]) -> mx.array:
    if not ids:
        raise ValueError("ids must not be empty")
    return mx.array(list(ids), dtype=mx.uint32)
