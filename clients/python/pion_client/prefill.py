"""Prefilling by oneself: a model that runs over tokens, and what the prefixes it makes agree in.

Knows mlx-lm's models and caches (through `caches`), and how a model is identified; no server.

The one decision: tokens run in steps, and the steps are mlx-lm's own unless the caller says otherwise.
Where a prefill is split decides the last bits of its K/V, so whoever wants the same bits splits alike.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from pion_client import arrays, bundles, caches, identity
from pion_client.bundles import Facts
from pion_client.caches import Cache, Expected, UnsupportedCache
from pion_client.quantised import Quantised
from pion_client.tally import Tally
from pion_wire import limits
from pion_wire.layout import Layout

PREFILL_STEP = 2048
"""Tokens per forward pass: mlx-lm's `prefill_step_size`, so that prefills are split as its own are."""
DEADLINE_S = 5.0
"""The longest that a server is waited for before somebody prefills by himself."""


def prefill(model: Any, cache: Cache, ids: mx.array, step: int = PREFILL_STEP) -> None:
    """Appends tokens to a cache, a step at a time, and waits until it is computed.

    Only the cache is evaluated: of the last layer no attention, and of no token the logits.
    """
    for begin in range(0, ids.size, step):
        model(ids[None, begin : begin + step], cache=cache)
        caches.settle(cache)
        mx.clear_cache()


class Prefill:
    """One model: its caches, what fills them, and what a stored prefix must agree with.

    Args:
        model: a loaded mlx-lm model.
        make_cache: makes an empty cache for it, instead of mlx-lm's `make_prompt_cache`.
        model_id: what identifies the model's K/V; by default computed.
        quantised: how rows are stored.
        step: tokens per forward pass.
        tally: where tokens and times are counted.

    Raises:
        ValueError: the id, or how rows are stored, cannot be.
        TypeError: `model_id` is needed, because the model's arguments have no JSON.
    """

    def __init__(
        self,
        model: Any,
        *,
        make_cache: Callable[[Any], Cache] | None,
        model_id: str | None,
        quantised: Quantised,
        step: int,
        tally: Tally,
    ) -> None:
        self.model, self._model_id = model, model_id
        self._make_cache = make_cache or make_prompt_cache
        self._suffix = "+" + bundles.cache_suffix(make_cache(model)) if make_cache else ""
        _check_model_id((model_id or "") + self._suffix)
        self._quantised, self._step, self._tally = quantised, step, tally
        self._known: tuple[Future[str] | None, Expected] | None = None
        self.refusal = ""
        """Why prefixes of this model cannot be kept; empty if they can."""
        try:  # now, off the path of the first token
            caches.require_supported(self.empty())
            self._quantised.stored(self.expected().layout)
        except UnsupportedCache as refusal:
            self.refusal = str(refusal)

    def empty(self) -> Cache:
        """Returns an empty cache."""
        return self._make_cache(self.model)

    def expected(self) -> Expected:
        """Returns what a cache will hold, as the model is now."""
        return self._learn()[1]

    def facts(self) -> Facts:
        """Returns what a stored prefix must agree with; waits until the model's id is computed.

        Raises UnsupportedCache.
        """
        arrays.mlx_core()
        if self.refusal:
            raise UnsupportedCache(self.refusal)
        computing, held = self._learn()
        model_id = computing.result() if computing else str(self._model_id)
        return Facts(model_id + self._suffix, self._quantised.stored(held.layout), held)

    def stored_layout(self) -> Layout | None:
        """Returns the rows as they are stored, as far as that was found out."""
        return self._quantised.stored(self._known[1].layout) if self._known else None

    def stored_as(self) -> str:
        """Says how rows and parts are stored, as far as that was found out."""
        if self._known is None:
            return "not stored"
        held = self._known[1]
        rows = list(held.codecs)
        if held.slots and not rows:
            rows = [self._quantised.says(held.layout)]
        return ", ".join([*rows, *(f"{kind} exact" for kind in held.kinds)])

    def run(
        self,
        cache: Cache,
        token_ids: bytes,
        stops: Sequence[int],
        begin: int = 0,
        at: Callable[[int], None] | None = None,
    ) -> float:
        """Appends tokens from `begin` on and waits until it is computed; returns the milliseconds.

        At each of the stops, the last of which is the end, `at` is called.
        """
        started = time.perf_counter()
        ids = mx.array(np.frombuffer(token_ids, "<u4"))
        self._tally.add("tokens_prefilled", ids.size - begin)
        for stop in stops:
            prefill(self.model, cache, ids[begin:stop], self._step)
            begin = stop
            if at is not None:
                at(stop)
        prefill_ms = (time.perf_counter() - started) * 1e3
        self._tally.last_prefill_ms = prefill_ms
        return prefill_ms

    def _learn(self) -> tuple[Future[str] | None, Expected]:
        """Starts to find out the model's id, and what its cache holds, unless both are known."""
        computing = None if self._model_id else identity.begin(self.model)
        if self._known is None or self._known[0] is not computing:
            self._known = computing, caches.expected(self.model, self._make_cache)
        return self._known


def _check_model_id(model_id: str) -> None:
    size = len(arrays.text("model_id", model_id).encode())
    if size > limits.MODEL_ID_BYTES_MAX:
        raise ValueError(f"model_id has {size} bytes; {limits.MODEL_ID_BYTES_MAX} are the most")
