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
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from pion_client import arrays, attention, bundles, caches, identity
from pion_client.arrays_cache import deserialize_arrays_cache, serialize_arrays_cache
from pion_client.attention import (
    PatchError,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)
from pion_client.background import EXIT_GRACE_S, Abandoned, Background
from pion_client.bundles import Bundle, Checkpoints, Facts, boundaries, parts_max, put_back
from pion_client.caches import Cache, Expected, UnsupportedCache
from pion_client.client import Client
from pion_client.errors import (
    DeadlineExceeded,
    Forked,
    InvalidRequest,
    NotStored,
    PionError,
    Unavailable,
)
from pion_client.exchange import Exchange, Found, Pending, Request, Unanswered, why_whole
from pion_client.identity import model_id
from pion_client.quantised import Quantised
from pion_client.residency import AttendByNamespace, Kept, NotResident, Residency, Session
from pion_client.retrieval import HybridRetrievalCache
from pion_client.tally import Tally
from pion_client.values import PrefixInfo
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

PREFILL_STEP = 2048
"""Tokens per forward pass: mlx-lm's `prefill_step_size`, so that prefills are split as its own are."""
CHECKPOINT_EVERY = 8192
DEADLINE_S = 5.0
START_DELAY_S_MAX = 1.0
"""Storing starts as long after a prefill as that took, but no later than this: the caller's first token
comes first. Nobody waits it out: who asks for the prefix meanwhile, `flush` and the end start it."""
OWN_STORE_S = 1.0
ADMISSION_PREFIXES_MAX = 65_536
"""Prefixes whose misses are remembered for `admission_threshold`; the oldest are forgotten."""

IDS_MAX = 64
"""Namespaces whose token ids are remembered, so that rows that are nowhere any more can be computed."""
FETCH_MS, FETCH_BYTES_PER_MS = 2.0, 1e6
"""What fetching takes before one was measured: a round trip or two, and 1 GB/s."""
CALL_MS, CALL_MS_PER_TOKEN = 0.6, 1e-4
"""What a query takes before one was measured."""
PASSES = 2
"""Forward passes before the first token: mlx-lm runs the last token of a prompt by itself."""


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
        admission_threshold: a prefix is stored from its so many-th miss in this process on.
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
        where = _address(address, host, port, given=client is not None)
        self._model = model
        self._vocabulary = Vocabulary(model)
        self._model_id = model_id
        self._admission_threshold = admission_threshold
        self._deadline_s = deadline_s
        self._checkpoint_every = checkpoint_every
        self._prefill_step = prefill_step_size
        self._make_cache = make_cache or make_prompt_cache
        self._suffix = "+" + bundles.cache_suffix(make_cache(model)) if make_cache else ""
        _check_model_id((model_id or "") + self._suffix)
        self._known: tuple[Future[str] | None, Expected] | None = None
        self._refusal = ""
        try:  # now, off the path of the first token
            caches.require_supported(self._make_cache(model))
            self._quantised.stored(self._learn()[1].layout)
        except UnsupportedCache as refusal:
            self._refusal = str(refusal)
        self._owned = contextlib.ExitStack()
        self._client = client or self._owned.enter_context(Client(where, timeout_s=deadline_s))
        self._background = Background(interrupt=self._owned.close)
        self._tally = Tally()
        self._exchange = Exchange(self._client, deadline_s, self._tally)
        self._pending: dict[int, Pending] = {}
        self._missed: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._stage2 = stage2 and _plain(self._make_cache(model))
        self.residency = Residency(self._client)
        """Where attention runs: sessions on the server, and rows at hand."""
        self._ids: collections.OrderedDict[str, bytes] = collections.OrderedDict()

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
        beginning of these tokens; only the rest is prefilled, and stored behind it.

        What the caller runs on the cache next must not be empty: it holds no logits.

        Args:
            prefix_ids: token ids, at least one: a list, a NumPy or an MLX array.
            namespace: a name, at most 200 bytes of UTF-8 without control characters.
            checkpoints: token counts at which the prefill is interrupted and what is exact at one token
                only is kept, beside those of `checkpoint_every`: such as where a system prompt ends.
                What is served is not prefilled: a boundary within it that was not kept then cannot be
                now, and is counted in `stats()["checkpoints_dropped"]`.

        Raises:
            ValueError: there are no token ids, they are none, or none of this model.
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
        self._hold(cache, request)
        return cache

    def reuse(self, prompt_ids: Sequence[int]) -> tuple[Cache, list[int]]:
        """Returns a cache of what is stored of a whole prompt, and the tokens left to run on it.

        Nothing is prefilled and nothing stored: on a miss the cache is empty and the rest is the
        prompt. The rest always has at least one token, the one whose logits come next. To have a prompt
        stored, call `get_or_prefill(prompt_ids[:-1])`.

        Raises:
            ValueError: there are no token ids, they are none, or none of this model.
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
            facts = self._facts()
            with self._exchange.answering():
                found = self._exchange.look_up(namespace, facts, None)
                if not found.hit or found.prefix is None:
                    return False
                if self._stage2:
                    self._reside(found.prefix)
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
            "checkpoints_dropped": self._tally.of("checkpoints_dropped"),
            "lane": self.residency.lane or self._exchange.lane,
            "lane_reason": self._exchange.lane_reason,
            "breaker": "open" if self._exchange.breaker.is_open else "closed",
            "pending_bytes": self._background.pending_bytes,
            "vquant": self._quantised.vquant,
            "stored_as": self._stored_as(),
            "fidelity": self._quantised.stored(self._known[1].layout).fidelity
            if self._known
            else "",
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
        if self._refusal or self._learn()[1].needs:
            return 1
        layout = self._quantised.stored(self._learn()[1].layout)
        layers = len({tensor.slot for tensor in layout.tensors})
        size = prefix_tokens * layout.row_bytes
        fetched, took = self._tally.of("fetch_bytes"), self._tally.of("fetch_ms")
        fetch_ms = size * took / fetched if fetched else FETCH_MS + size / FETCH_BYTES_PER_MS
        call_ms = self.residency.call_ms_expected(prefix_tokens)
        if call_ms is None:
            call_ms = CALL_MS + CALL_MS_PER_TOKEN * prefix_tokens
        return 2 if PASSES * layers * call_ms < fetch_ms else 1

    def at_hand(self, namespace: str, token_count: int) -> Kept | None:
        """Returns the rows of a prefix that this object has prefilled or fetched, if it still has.

        If it was never told which tokens it wants under the name, the server is asked whether it
        still holds those; a server that does not answer leaves them as they were.
        """
        if token_ids := self._ids_of(namespace, token_count):
            return self._kept_of(namespace, token_ids)
        kept = self.residency.kept(namespace, token_count)
        if kept is None or self._kept_of(namespace, kept.token_ids) is None:
            return None
        try:
            with self._exchange.answering():
                held = self._exchange.look_up(namespace, self._facts(), kept.token_ids)
        except Unanswered:
            return kept
        return kept if held.hit else None

    def session_for(self, namespace: str, token_count: int) -> Session:
        """Returns the resident rows of a stored prefix, made resident if need be.

        What this object is storing under the name is waited for.

        Raises:
            NotStored: nothing of this model is stored there.
            PionError: it is, but cannot be attended to.
        """
        own = [job for job in list(self._pending.values()) if job.request.namespace == namespace]
        if own:
            self._background.flush(max(self._deadline_s, *(job.prefill_ms / 1e3 for job in own)))
        token_ids = self._ids_of(namespace, token_count)
        try:
            with self._exchange.answering():
                found = self._exchange.look_up(namespace, self._facts(), token_ids)
                if not found.hit or found.prefix is None:
                    raise NotStored(f"{namespace!r}: {found.reason}; call get_or_prefill first")
                if found.prefix.token_count != token_count:
                    raise NotResident(
                        f"{namespace!r} has {found.prefix.token_count} tokens, not {token_count}"
                    )
                session = self.residency.ensure(found.prefix)
                return session._replace(token_ids=token_ids or b"")
        except Unanswered as why:
            if isinstance(why.__cause__, PionError):
                raise why.__cause__ from None
            raise Unavailable(f"the server is not asked: {why}") from None

    def rows_for(self, namespace: str, token_count: int, session: Session | None = None) -> Kept:
        """Returns the rows of a prefix: at hand, fetched, or computed once more.

        Those of a session are no others than were resident in it, whatever the name means by now:
        their tokens prove it or, where these are not known, their generation.

        Raises:
            NotStored: they are nowhere any more, and their tokens are not known.
        """
        if session is None:
            token_ids = self._ids_of(namespace, token_count) or b""
            kept = self.at_hand(namespace, token_count)
        else:
            token_ids = session.token_ids
            kept = self._kept_of(namespace, token_ids) if token_ids else None
        if kept:
            return kept
        cache = self._make_cache(self._model)
        try:
            with self._exchange.answering():
                prefix = self._client.fetch(
                    namespace,
                    rows=(0, token_count),
                    generation=session.info.generation if session and not token_ids else 0,
                    as_mlx=True,
                    tries=1,
                )
            ids = token_ids or (prefix.packed_token_ids if prefix else b"")
            if prefix and not put_back(cache, prefix, ids, self._facts()):
                return self._kept(cache, namespace, ids)
        except Unanswered:
            pass
        if not token_ids:
            raise NotStored(
                f"{namespace!r}: these rows are neither stored any more nor at hand, and which tokens "
                "they were of is not known here"
            )
        self._prefill(cache, token_ids, [len(token_ids) // 4])
        return self._kept(cache, namespace, token_ids)

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # What the model is

    def _learn(self) -> tuple[Future[str] | None, Expected]:
        """Starts to find out the model's id, and what its cache holds, unless both are known."""
        computing = None if self._model_id else identity.begin(self._model)
        if self._known is None or self._known[0] is not computing:
            self._known = computing, caches.expected(self._model, self._make_cache)
        return self._known

    def _facts(self) -> Facts:
        arrays.mlx_core()
        if self._refusal:
            raise UnsupportedCache(self._refusal)
        computing, held = self._learn()
        model_id = computing.result() if computing else str(self._model_id)
        return Facts(model_id + self._suffix, self._quantised.stored(held.layout), held)

    def _stored_as(self) -> str:
        if self._known is None:
            return "not stored"
        held = self._known[1]
        rows = list(held.codecs)
        if held.slots and not rows:
            rows = [self._quantised.says(held.layout)]
        return ", ".join([*rows, *(f"{kind} exact" for kind in held.kinds)])

    # From the server into the cache

    def _restored(self, request: Request) -> tuple[Cache, Found]:
        arrays.mlx_core()
        cache = self._make_cache(self._model)
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
            facts = self._facts()
            self._await_own(request)
            with self._exchange.answering():
                found = self._exchange.ask(request, facts)._replace(facts=facts)
                if not found.served or self._attended(cache, request, found):
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
        if self._exchange.breaker.is_open:
            return
        own = [pending for pending in list(self._pending.values()) if pending.serves(request)]
        if own:
            longest_s = max(pending.prefill_ms for pending in own) / 1e3
            self._background.flush(max(longest_s, min(OWN_STORE_S, self._deadline_s)))

    # Attention on the server

    def _attended(self, cache: Cache, request: Request, found: Found) -> bool:
        """Fills the cache without fetching: with rows at hand, or with what stands for others."""
        if not self._stage2 or found.prefix is None or request.namespace is None:
            return False
        session = self._reside(found.prefix)
        if kept := self._at_hand(request):
            caches.install(cache, kept.rows, self._facts().held.layout, request.token_count)
            self._exchange.lane, self._exchange.lane_reason = "in-process", ""
            return True
        if session is None or not attention.is_installed():
            return False
        prefix = attention.ServedPrefix(
            self,
            request.namespace,
            request.token_count,
            session=session._replace(token_ids=request.token_ids),
        )
        cache[:] = [attention.PionCache(prefix, slot) for slot in range(len(cache))]
        return True

    def _reside(self, prefix: PrefixInfo) -> Session | None:
        """Has a prefix resident, if the server can; notes why not."""
        try:
            return self.residency.ensure(prefix)
        except (Unavailable, DeadlineExceeded):
            raise
        except PionError as error:
            self.residency.reason = error.reason.lower()
            return None

    def _at_hand(self, request: Request) -> Kept | None:
        off = os.environ.get("PION_PROMPT_CACHE_NO_INPROC") == "1"
        if off or request.namespace is None or self._refusal:
            return None
        return self._kept_of(request.namespace, request.token_ids)

    def _kept_of(self, namespace: str, token_ids: bytes) -> Kept | None:
        """Returns the rows of these tokens and this model that were kept under a name."""
        kept = self.residency.kept(namespace, len(token_ids) // 4)
        wanted = self._facts().model_id, token_ids
        return kept if kept and (kept.model_id, kept.token_ids) == wanted else None

    def _ids_of(self, namespace: str, token_count: int) -> bytes | None:
        """Returns the tokens that this object last wanted under a name; None if not so many."""
        token_ids = self._ids.get(namespace)
        return token_ids if token_ids and len(token_ids) == 4 * token_count else None

    def _hold(self, cache: Cache, request: Request) -> None:
        """Keeps what a later cache of the same name needs."""
        if not self._stage2 or request.namespace is None or self._refusal:
            return
        self._ids.pop(request.namespace, None)
        self._ids[request.namespace] = request.token_ids
        if len(self._ids) > IDS_MAX:
            self._ids.popitem(last=False)
        elsewhere = isinstance(cache[0], attention.PionCache)
        if not elsewhere and self._at_hand(request) is None:
            self._kept(cache, request.namespace, request.token_ids)

    def _kept(self, cache: Cache, namespace: str, token_ids: bytes) -> Kept:
        kept = Kept(self._facts().model_id, token_ids, caches.held(cache))
        self.residency.keep(namespace, kept)
        return kept

    # From the model into the cache

    def _complete(self, cache: Cache, request: Request, found: Found) -> tuple[float, Checkpoints]:
        """Appends what the server does not have.

        Returns how long that took, 0 if it was at hand, and the parts at the boundaries passed.
        """
        checkpoints = Checkpoints(self._parts_max(request, found))
        if not found.served and (kept := self._at_hand(request)):
            caches.install(cache, kept.rows, self._facts().held.layout, request.token_count)
            return 0.0, checkpoints
        take = functools.partial(checkpoints.take, cache) if found.facts else None
        every = self._checkpoint_every
        stops = boundaries(found.served, request.token_count, request.checkpoints, every)
        prefill_ms = self._prefill(cache, request.token_ids, stops, found.served, take)
        self._tally.add("checkpoints_dropped", checkpoints.dropped)
        return prefill_ms, checkpoints

    def _parts_max(self, request: Request, found: Found) -> int:
        inherited = 0 if why_whole(found) or not found.prefix else len(found.prefix.parts)
        return parts_max(request.token_count) - inherited

    def _prefill(
        self,
        cache: Cache,
        token_ids: bytes,
        stops: Sequence[int],
        begin: int = 0,
        at: Callable[[int], None] | None = None,
    ) -> float:
        """Appends tokens from `begin` on and waits until it is computed; returns how long it took.

        Only the cache is evaluated: of the last layer no attention, and of no token the logits. At each
        of the stops, the last of which is the end, `at` is called.
        """
        started = time.perf_counter()
        ids = mx.array(np.frombuffer(token_ids, "<u4"))
        self._tally.add("tokens_prefilled", ids.size - begin)
        for stop in stops:
            while begin < stop:
                end = min(begin + self._prefill_step, stop)
                self._model(ids[None, begin:end], cache=cache)
                caches.settle(cache)
                mx.clear_cache()
                begin = end
            if at is not None:
                at(stop)
        prefill_ms = (time.perf_counter() - started) * 1e3
        self._tally.last_prefill_ms = prefill_ms
        return prefill_ms

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
            if caches.expected_of(cache) != found.facts.held:
                return "layout_changed"
            bundle = Bundle(caches.take(cache), checkpoints.taken)
        except UnsupportedCache as refusal:  # after one token it was another
            return str(refusal)
        pending = Pending(request, prefill_ms)
        self._pending[id(pending)] = pending
        queued = self._background.put(
            functools.partial(self._store, pending, found, bundle),
            size_bytes=bundle.size_bytes,
            delay_s=min(prefill_ms / 1e3, START_DELAY_S_MAX),
            abandoned=functools.partial(self._settle, pending, "abandoned"),
        )
        if queued:
            return ""
        self._settle(pending)
        return "closed" if self._background.ended else "queue_full"

    def _settle(self, pending: Pending, reason: str = "") -> None:
        """The end of a prefix that was to be stored, with the reason if it was not."""
        self._pending.pop(id(pending), None)
        if reason:
            self._tally.because("skipped", reason)

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

    def _store(self, pending: Pending, found: Found, bundle: Bundle) -> None:
        """The job that runs in the background."""
        started = time.perf_counter()
        reason = "error"
        try:
            with self._exchange.answering():
                wrote = self._exchange.send(pending, found, bundle, self._background.check)
                self._tally.add("stores" if wrote else "already_stored")
                reason = ""
                if self._stage2 and pending.request.namespace and found.facts:
                    named = self._exchange.look_up(pending.request.namespace, found.facts, None)
                    if named.hit and named.prefix:
                        self._reside(named.prefix)
        except InvalidRequest as error:
            reason = error.reason.lower()
        except Unanswered as why:
            reason = str(why)
        except Abandoned:
            reason = "abandoned"
        finally:
            self._tally.add("store_ms", (time.perf_counter() - started) * 1e3)
            self._settle(pending, reason)


def _plain(cache: Cache) -> bool:
    """Whether attention can run over it elsewhere."""
    try:
        caches.require_rows(cache)
    except UnsupportedCache:
        return False
    return True


def _check_options(
    admission_threshold: int, deadline_s: float, checkpoint_every: int, prefill_step_size: int
) -> None:
    if admission_threshold < 1 or not deadline_s > 0:
        raise ValueError("admission_threshold ≥ 1 and deadline_s > 0, please")
    if prefill_step_size < 1:
        raise ValueError("prefill_step_size is at least 1 token")
    if checkpoint_every < 0:
        raise ValueError("checkpoint_every is at least 0: tokens, or at the end only")


def _check_model_id(model_id: str | None) -> None:
    size = len(arrays.text("model_id", model_id or "").encode())
    if size > limits.MODEL_ID_BYTES_MAX:
        raise ValueError(f"model_id has {size} bytes; {limits.MODEL_ID_BYTES_MAX} are the most")


def _address(address: str | None, host: str | None, port: int | None, *, given: bool) -> str:
    if sum((bool(address), bool(host or port), given)) > 1:
        raise ValueError("give one of address, host and port, or client")
    if not (address or host or port):
        return os.environ.get("PION_ADDRESS", "127.0.0.1:50051")
    host = host or "127.0.0.1"
    return address or (f"[{host}]" if ":" in host else host) + f":{port or 50051}"
