"""Prompt caches for mlx-lm whose prefill is done once: `PionPromptCache`.

Puts a model's K/V of a prefix where other processes find it, and what they stored into this one's
cache. Knows mlx-lm's models and caches (through `caches`) and the client; neither files nor protocol.

The one decision: the server may only ever save time. A prefix is installed whole or not at all, after
model id, token ids, layout, class, position, shape and type have been compared here; whatever is not
exactly what the caller's model would have computed is a miss with its reason. A server that is down,
slow or wrong costs one deadline, then nobody asks it for a while (`breaker`). Storing goes on in
the background (`background`), from views of memory that later appends to the cache do not change.

K/V are functions of the token ids, of the model *and of how the prefill was split*: the same tokens in
other pieces differ in the last bits, because sums are formed in another order. The bits served are
those that were stored; they need not be those of a prefill in one piece. What a model keeps beside rows
(recurrent state, a window) is exact at one token only, so a prefill is split where it is to be kept, and
stored together with the rows (`bundles`). Where rows are there already and only such a part was missing,
the part is stored and the rows are not, if they have the same bits (`sharing`).
"""

import collections
import contextlib
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Self

from pion_client import arrays, caches
from pion_client.addresses import address_of
from pion_client.arrays_cache import deserialize_arrays_cache, serialize_arrays_cache
from pion_client.attention import (
    PatchError,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)
from pion_client.background import EXIT_GRACE_S, Background
from pion_client.bundles import Bundle, Checkpoints, boundaries, parts_max
from pion_client.caches import Cache, UnsupportedCache
from pion_client.client import Client
from pion_client.errors import Forked, InvalidRequest
from pion_client.exchange import Exchange, Found, Pending, Request, Unanswered, why_whole
from pion_client.identity import model_id
from pion_client.prefill import DEADLINE_S, Prefill
from pion_client.prefill import PREFILL_STEP as PREFILL_STEP
from pion_client.quantised import Quantised
from pion_client.residency import AttendByNamespace, Kept, Session
from pion_client.retrieval import HybridRetrievalCache
from pion_client.stage2 import Stage2
from pion_client.store_queue import StoreQueue
from pion_client.tally import Tally
from pion_client.vocabulary import Vocabulary
from pion_wire import blocks, limits

__all__ = [
    "HybridRetrievalCache",
    "PatchError",
    "PionPromptCache",
    "deserialize_arrays_cache",
    "install_pion_attention_patch",
    "make_pion_prompt_cache",
    "model_id",
    "serialize_arrays_cache",
    "uninstall_pion_attention_patch",
]

CHECKPOINT_EVERY = 8192
OWN_STORE_S = 1.0
ADMISSION_PREFIXES_MAX = 65_536
"""Prefixes whose misses are remembered for `admission_threshold`; the oldest are forgotten."""


class PionPromptCache(AttendByNamespace):
    """Makes prompt caches for one model, from the server where it has them, else by prefilling.

    Usable from several threads, as far as MLX is: each call runs the model on the thread it is made on.

    Args:
        model: a loaded mlx-lm model.
        address: of the server, `host:port` or `unix:/path`; by default what the environment has as
            PION_ADDRESS, else 127.0.0.1:50051.
        host, port: the same in two, instead of `address`.
        model_id: what identifies the model's K/V; by default computed from its parameters and
            arguments (`model_id`). A name of one's own must change whenever the K/V would.
        vquant: how V is stored; K is raw. "raw" keeps every bit. "fp16" rounds to binary16, which
            is what f16 rows are anyway: those are kept raw, and are the same prefix. The others
            (`pion_wire.codecs`: int8, fp8, turbo4, turbo3, turbo2, mlx4g32, …) lose more:
            what another has stored is served only if it was stored in the same way, and
            `stats()["stored_as"]` and `["fidelity"]` say how.
        boundary_protect: layers at both ends whose V a lossy `vquant` leaves raw.
        admission_threshold: how many misses of a prefix in this process it takes until it is stored.
        stage2: has what is stored under a name resident on the server as well, so that
            `make_pion_prompt_cache` attends to it there; with the attention patch installed,
            `get_or_prefill` returns such a cache itself instead of fetching. What this process has
            prefilled or fetched under a name stays at hand, up to 2 GiB.
        client: a client to use instead of one of one's own; it is not closed here.
        checkpoint_every: what a model keeps beside rows (recurrent state, a sliding window) is exact at
            one token only: it is stored at each multiple of this and at the end, so that another
            prompt with the same beginning finds a boundary to go on from; 0: at the end only. A
            prefill is split there.
        make_cache: makes an empty cache for the model, instead of mlx-lm's `make_prompt_cache`; such as
            one of `QuantizedKVCache`. What it makes is stored apart from what others make.
        deadline_s: the longest that a call waits for an answer before it prefills by itself. A
            transfer may take as long as the prefill that it saves, where that is longer.
        prefill_step_size: tokens per forward pass, as mlx-lm's. Rows are shared with a prefix that was
            prefilled in the same steps; in others they may differ in the last bits.

    Raises:
        ValueError: for values that make no sense, such as a `vquant` that cannot take rows of this
            model's width.
        Forked: in a process forked from one that uses MLX; all methods raise it there.
        TypeError: `model_id` is needed, because the model's arguments have no JSON.
    """

    make_namespace = staticmethod(blocks.make_namespace)

    def __init__(
        self,
        model: Any,
        *,
        address: str | None = None,
        host: str | None = None,
        port: int | None = None,
        model_id: str | None = None,
        vquant: str = "raw",
        boundary_protect: int = 0,
        admission_threshold: int = 1,
        stage2: bool = False,
        client: Client | None = None,
        deadline_s: float = DEADLINE_S,
        checkpoint_every: int = CHECKPOINT_EVERY,
        make_cache: Callable[[Any], Cache] | None = None,
        prefill_step_size: int = PREFILL_STEP,
    ) -> None:
        arrays.mlx_core()
        self._quantised = Quantised(vquant, boundary_protect)
        self._quantised.check()
        _check_options(admission_threshold, deadline_s, checkpoint_every, prefill_step_size)
        if sum((bool(address), bool(host or port), client is not None)) > 1:
            raise ValueError("give one of address, host and port, or client")
        where = address_of(address, host, port)
        self._vocabulary = Vocabulary(model)
        self._admission_threshold = admission_threshold
        self._deadline_s = deadline_s
        self._checkpoint_every = checkpoint_every
        self._tally = Tally()
        self._prefill = Prefill(
            model,
            make_cache=make_cache,
            model_id=model_id,
            quantised=self._quantised,
            step=prefill_step_size,
            tally=self._tally,
        )
        self._owned = contextlib.ExitStack()
        self._client = client or self._owned.enter_context(Client(where, timeout_s=deadline_s))
        self._background = Background(interrupt=self._owned.close)
        self._exchange = Exchange(self._client, deadline_s, self._tally)
        self._queue = StoreQueue(self._background, self._tally)
        self._missed: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._stage2 = Stage2(
            wanted=stage2,
            prefill=self._prefill,
            client=self._client,
            exchange=self._exchange,
            queue=self._queue,
            deadline_s=deadline_s,
        )
        self.residency = self._stage2.residency
        """Where attention runs: sessions on the server, and rows at hand."""

    # What callers use

    def get_or_prefill(
        self,
        prefix_ids: Sequence[int],
        namespace: str | None = None,
        *,
        checkpoints: Sequence[int] = (),
    ) -> Cache:
        """Returns a cache of exactly these tokens, as if the model had just prefilled them.

        With a namespace it is that prefix: if the name holds other tokens, or rows of another model
        or layout, that is a miss, and what is stored there stays. Without one it is the longest stored
        beginning of these tokens; only the rest is prefilled, and stored as its continuation.

        What the caller runs on the cache next must not be empty: it holds no logits.

        Args:
            prefix_ids: token ids, at least one: a list, a NumPy or an MLX array.
            namespace: a name, at most 200 bytes of UTF-8 without control characters.
            checkpoints: token counts at which the prefill is interrupted and what is exact at one token
                only is kept, beside those of `checkpoint_every`: such as where a system prompt ends.
                What is served is not prefilled: a boundary within it that was not kept then cannot be
                now, and is counted in `stats()["checkpoints_dropped"]`.

        Raises:
            ValueError: there are no token ids, or one is not an id of this model.
            pion_client.errors.InvalidRequest: the namespace cannot be one.
        """
        token_ids = self._vocabulary.packed(prefix_ids)
        request = Request(token_ids, namespace, len(token_ids) // 4, tuple(checkpoints))
        cache, found = self._restored(request)
        if found.served and found.facts and found.prefix:
            asked = [point for point in request.checkpoints if 0 < point < found.served]
            self._tally.add("checkpoints_dropped", found.facts.unkept(found.prefix, asked))
        if found.served < request.token_count:
            prefill_ms, taken = self._complete(cache, request, found)
            if reason := self._keep(cache, request, found, prefill_ms, taken):
                self._tally.because("skipped", reason)
        self._stage2.hold(cache, request)
        return cache

    def reuse(self, prompt_ids: Sequence[int]) -> tuple[Cache, list[int]]:
        """Returns a cache of what is stored of a whole prompt, and the tokens left to run on it.

        Nothing is prefilled and nothing stored: on a miss the cache is empty and the rest is the
        prompt. The rest always has at least one token, the one whose logits come next. To have a prompt
        stored, call `get_or_prefill(prompt_ids[:-1])`.

        Raises:
            ValueError: there are no token ids, or one is not an id of this model.
        """
        token_ids = self._vocabulary.packed(prompt_ids)
        request = Request(token_ids, None, len(token_ids) // 4 - 1)
        cache, found = self._restored(request)
        if found.unstorable:
            self._tally.because("skipped", found.unstorable)
        return cache, blocks.unpack_token_ids(token_ids[4 * found.served :])

    def lookup(self, namespace: str) -> bool:
        """Whether a prefix of this model and layout is stored under a name.

        With `stage2` it is resident afterwards, if it can be. False too where the server does not
        answer.
        """
        try:
            facts = self._prefill.facts()
            with self._exchange.answering():
                found = self._exchange.look_up(namespace, facts, None)
                if not found.hit or found.prefix is None:
                    return False
                if self._stage2.on:
                    self._stage2.reside(found.prefix)
                return not facts.lacks(found.prefix, found.prefix.token_count)
        except (UnsupportedCache, Unanswered):
            return False

    def stats(self) -> dict[str, Any]:
        """What happened so far, in this object.

        `hits` are calls that were served at least one row, `misses` all others, by reason in
        `miss_reasons`; `shortened_by` counts the kinds of parts that were missing at a later boundary,
        `checkpoints_dropped` boundaries that were asked for or passed and are not kept: there was no
        room, or the prefix is stored without them. `stores` counts
        what this object wrote, `already_stored` what others had written meanwhile. `skipped` counts
        what was not stored, by reason; `stored_whole` what was stored with rows of tokens that
        another prefix has rows of already, by reason: "rows_differ" where that has other bits,
        because its prefill was split elsewhere. Times are milliseconds: `fetch_ms_total` until the rows
        are in the cache, `store_ms_total` in the background. `lane` is how the last hit came,
        "export" (files of the same host) or "stream", and `lane_reason` why it was streamed; once
        attention has run over a prefix of `make_pion_prompt_cache`, it says where: "in-process", or on
        the server, by "stream" or "unary". `attend` counts queries, and why some were not asked.
        """
        count = self._tally.of
        layout = self._prefill.stored_layout()
        hits, misses = count("hits"), count("misses")
        return {
            "hits": hits,
            "misses": misses,
            "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
            "tokens_served": count("tokens_served"),
            "tokens_prefilled": count("tokens_prefilled"),
            "fetch_ms_total": float(count("fetch_ms")),
            "store_ms_total": float(count("store_ms")),
            "last_prefill_ms": self._tally.last_prefill_ms,
            "stores": count("stores"),
            "already_stored": count("already_stored"),
            "admission_skips": count("admission_skips"),
            "admission_threshold": self._admission_threshold,
            "skipped": self._tally.reasons("skipped"),
            "stored_whole": self._tally.reasons("stored_whole"),
            "miss_reasons": self._tally.reasons("miss_reasons"),
            "shortened_by": self._tally.reasons("shortened_by"),
            "checkpoints_dropped": count("checkpoints_dropped"),
            "lane": self.residency.lane or self._exchange.lane,
            "lane_reason": self._exchange.lane_reason,
            "breaker": "open" if self._exchange.breaker.is_open else "closed",
            "pending_bytes": self._background.pending_bytes,
            "vquant": self._quantised.vquant,
            "stored_as": self._prefill.stored_as(),
            "fidelity": layout.fidelity if layout else "",
            "attend": self.residency.stats(),
        }

    def suggest_stage(self, prefix_tokens: int) -> int:
        """Says what gives the first token sooner: 1, to fetch such a prefix, or 2, to attend to it.

        By what fetches and queries took in this object so far; before there were any, by what they
        usually take.

        Raises:
            ValueError: `prefix_tokens` is no number of tokens.
        """
        arrays.count("prefix_tokens", prefix_tokens)
        fetched, took = self._tally.of("fetch_bytes"), self._tally.of("fetch_ms")
        return 2 if self._stage2.is_sooner(prefix_tokens, fetched, took) else 1

    def at_hand(self, namespace: str, token_count: int) -> Kept | None:
        """Returns the rows of a prefix that this object has prefilled or fetched, if it still has.

        If it was never told which tokens it wants under the name, the server is asked whether it
        still holds those; a server that does not answer leaves them as they were.
        """
        return self._stage2.at_hand(namespace, token_count)

    def session_for(self, namespace: str, token_count: int) -> Session:
        """Returns the resident rows of a stored prefix, made resident if need be.

        What this object is storing under the name is waited for.

        Raises:
            NotStored: nothing of this model is stored there.
            PionError: it is, but cannot be attended to.
        """
        return self._stage2.session_for(namespace, token_count)

    def rows_for(self, namespace: str, token_count: int, session: Session | None = None) -> Kept:
        """Returns the rows of a prefix: at hand, fetched, or computed once more.

        Those of a session are no others than were resident in it, whatever the name means by now:
        their tokens prove it or, where these are not known, their generation.

        Raises:
            NotStored: they are nowhere any more, and their tokens are not known.
        """
        return self._stage2.rows_for(namespace, token_count, session)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until everything queued is stored or skipped; False if that took longer."""
        arrays.mlx_core()  # in a forked child nobody works on the queue
        return self._background.flush(timeout_s)

    def close(self, timeout_s: float = EXIT_GRACE_S) -> None:
        """Finishes storing, or abandons it after so long; then closes the client it made itself."""
        try:
            arrays.mlx_core()
        except Forked:  # the queue, and who works on it, are the parent's
            self._owned.close()
            return
        self._background.flush(timeout_s)
        self._background.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # From the server into the cache

    def _restored(self, request: Request) -> tuple[Cache, Found]:
        arrays.mlx_core()
        cache = self._prefill.empty()
        found = self._find(cache, request)
        self._tally.add("hits" if found.served else "misses")
        self._tally.add("tokens_served", found.served)
        if not found.served:
            self._tally.because("miss_reasons", found.reason)
        return cache, found

    def _find(self, cache: Cache, request: Request) -> Found:
        """Fills the cache with what the server has for a request, or leaves it empty."""
        if request.rows_max < 1:
            return Found(reason="too_short")
        try:
            facts = self._prefill.facts()
            self._await_own(request)
            with self._exchange.answering():
                found = self._exchange.ask(request, facts)._replace(facts=facts)
                if not found.served or self._stage2.fill(cache, request, found):
                    return found
                return self._exchange.fetch(cache, request, found, facts)
        except UnsupportedCache as refusal:
            return Found(reason="unsupported_cache", unstorable=str(refusal))
        except Unanswered as why:
            return Found(reason=str(why), unstorable=str(why))

    def _await_own(self, request: Request) -> None:
        """Lets a prefix be stored first that this object has just prefilled, rather than do it twice.

        Not longer than that prefill took, or `OWN_STORE_S` if that is longer.
        """
        if not self._exchange.breaker.is_open:
            least_s = min(OWN_STORE_S, self._deadline_s)
            self._queue.wait_for(lambda own: own.serves(request), least_s)

    # From the model into the cache

    def _complete(self, cache: Cache, request: Request, found: Found) -> tuple[float, Checkpoints]:
        """Appends what the server does not have.

        Returns how long that took, 0 if it was at hand, and the parts at the boundaries passed.
        """
        checkpoints = Checkpoints(self._parts_max(request, found))
        if not found.served and self._stage2.install(cache, request):
            return 0.0, checkpoints
        take = functools.partial(checkpoints.take, cache) if found.facts else None
        every = self._checkpoint_every
        stops = boundaries(found.served, request.token_count, request.checkpoints, every)
        prefill_ms = self._prefill.run(cache, request.token_ids, stops, found.served, take)
        self._tally.add("checkpoints_dropped", checkpoints.dropped)
        return prefill_ms, checkpoints

    def _parts_max(self, request: Request, found: Found) -> int:
        inherited = 0 if why_whole(found) or not found.prefix else len(found.prefix.parts)
        return parts_max(request.token_count) - inherited

    # From the cache to the server

    def _keep(
        self,
        cache: Cache,
        request: Request,
        found: Found,
        prefill_ms: float,
        checkpoints: Checkpoints,
    ) -> str:
        """Has the cache stored in the background; returns why not, or nothing."""
        if found.unstorable or found.facts is None:
            return found.unstorable
        if not self._admitted(request):
            self._tally.add("admission_skips")
            return ""
        if found.served and request.token_count - found.served < limits.CHAIN_TOKENS_MIN:
            return "tail_short"
        try:
            if not found.facts.held.covers(caches.expected_of(cache)):
                return "layout_changed"
            bundle = Bundle(caches.take(cache), checkpoints.taken)
        except UnsupportedCache as refusal:  # after one token it was another
            return str(refusal)
        pending = Pending(request, prefill_ms)
        store = functools.partial(self._store, pending, found, bundle)
        return self._queue.put(pending, store, bundle.size_bytes)

    def _admitted(self, request: Request) -> bool:
        if self._admission_threshold == 1:
            return True
        name = request.namespace or hashlib.sha256(request.token_ids).hexdigest()
        with self._tally.lock:
            count = self._missed.pop(name, 0) + 1
            self._missed[name] = count
            if len(self._missed) > ADMISSION_PREFIXES_MAX:
                self._missed.popitem(last=False)
        return count >= self._admission_threshold

    def _store(self, pending: Pending, found: Found, bundle: Bundle) -> str:
        """The job that runs in the background; returns why nothing was stored, or nothing."""
        try:
            with self._exchange.answering():
                wrote = self._exchange.send(pending, found, bundle, self._background.check)
                self._tally.add("stores" if wrote else "already_stored")
                if self._stage2.on and pending.request.namespace and found.facts:
                    named = self._exchange.look_up(pending.request.namespace, found.facts, None)
                    if named.hit and named.prefix:
                        self._stage2.reside(named.prefix)
        except InvalidRequest as error:
            return error.reason.lower()
        except Unanswered as why:
            return str(why)
        return ""


def _check_options(
    admission_threshold: int, deadline_s: float, checkpoint_every: int, prefill_step_size: int
) -> None:
    if admission_threshold < 1 or not deadline_s > 0:
        raise ValueError("admission_threshold ≥ 1 and deadline_s > 0, please")
    if prefill_step_size < 1:
        raise ValueError("prefill_step_size is at least 1 token")
    if checkpoint_every < 0:
        raise ValueError("checkpoint_every is at least 0: tokens, or at the end only")
