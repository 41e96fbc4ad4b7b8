"""What a prompt cache asks a server, and what it makes of the answers.

Knows the client, and what a prefix must agree with; neither models nor how to run them. The one
decision: every answer that is not exactly what was wanted is a miss with its reason in one word, and
every failure is told the breaker once, here. What goes wrong on the server never reaches who wants a
cache.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pion_client.breaker import Breaker, NotAsked
from pion_client.bundles import PART_DIFFERS, Bundle, Facts, parts_max, put_back
from pion_client.caches import Cache
from pion_client.client import Client
from pion_client.errors import (
    InvalidRequest,
    LayoutDiffers,
    NotStored,
    OtherContent,
    PionError,
)
from pion_client.quantised import codecs_of
from pion_client.sharing import Shared, rows_shared
from pion_client.tally import Tally
from pion_client.values import Lookup, Match, PrefixInfo, Stored
from pion_wire import blocks, limits

_ANSWERS = (
    *("BUDGET", "COLD", "CONFLICT", "CORRUPT", "DISK_FULL", "EVICTED", "GENERATION", "LAYOUT"),
    *("MISSING", "NOT_RESIDENT", "NOT_STORED", "NO_BACKEND", "OTHER_CONTENT", "QUOTA", "ROWS"),
    "TOO_MANY_STREAMS",
)
"""Reasons that a healthy server may give."""
_BASE_TOKENS_MIN = max(limits.CHAIN_TOKENS_MIN, blocks.BLOCK_TOKENS)
"""A child with fewer rows of its parent is stored whole. What shares not even a block may be on another
node of a mesh, and a shared <s> would make all prefixes hang on one."""
_NAME_IS_TAKEN = ("tokens_differ", "model_differs", "layout_differs")


class Unanswered(Exception):
    """The server gave no usable answer; the text is the reason in one word."""


class Request(NamedTuple):
    """What a caller wants."""

    token_ids: bytes
    """u32, little-endian."""
    namespace: str | None
    rows_max: int
    """More rows than these are not wanted."""
    checkpoints: tuple[int, ...] = ()
    """Boundaries that shall be kept beside the end."""

    @property
    def token_count(self) -> int:
        """Number of tokens."""
        return len(self.token_ids) // 4


class Found(NamedTuple):
    """What the server has for a request."""

    served: int = 0
    """Rows that were, or can be, fetched; 0 is a miss."""
    reason: str = ""
    """Why not more."""
    unstorable: str = ""
    """Why what is missing must not be stored once it has been computed; empty if it may."""
    facts: Facts | None = None
    prefix: PrefixInfo | None = None
    lease_id: bytes = b""
    fetched: int = 0
    """How many rows are fetched to serve them, where it is more: up to where the parts are."""
    longest: str = ""
    """The prefix that has the most tokens in common, perhaps without the parts to serve them."""
    longest_tokens: int = 0

    @property
    def namespace(self) -> str:
        """The name of `prefix`; empty if there is none."""
        return self.prefix.namespace if self.prefix else ""


class Pending(NamedTuple):
    """A prefix that waits to be stored, or is being stored."""

    request: Request
    prefill_ms: float

    def serves(self, request: Request) -> bool:
        """Whether the server has more for this request once it is stored."""
        if request.namespace is not None:
            return request.namespace == self.request.namespace
        common = blocks.common_tokens(request.token_ids, self.request.token_ids)
        return common >= limits.CHAIN_TOKENS_MIN


class Exchange:
    """Asks, fetches and stores for one prompt cache."""

    def __init__(self, client: Client, deadline_s: float, tally: Tally) -> None:
        self.breaker = Breaker()
        self.lane, self.lane_reason = "", ""
        """How the last hit came, and why it was streamed."""
        self._client, self._deadline_s, self._tally = client, deadline_s, tally

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Keeps the breaker informed, and turns what the server did wrong into one word.

        Raises Unanswered; InvalidRequest passes where a name is at fault: that is the caller's choice,
        and the tokens are not.
        """
        try:
            with self.breaker.guarding(_is_answer):
                yield
        except NotAsked:
            raise Unanswered("breaker_open") from None
        except InvalidRequest as error:
            if "namespace" in error.field:
                raise
            raise Unanswered("invalid") from error
        except PionError as error:
            raise Unanswered(error.reason.lower()) from error

    def ask(self, request: Request, facts: Facts) -> Found:
        """Finds what is stored of a request: the prefix of its name, or the longest beginning."""
        if request.namespace is not None:
            named = self.look_up(request.namespace, facts, request.token_ids)
            reason = str(named.reason)
            if named.hit and named.prefix:
                if kind := facts.lacks(named.prefix, request.token_count):
                    self._tally.because("shortened_by", kind)
                    return Found(reason="part_missing")
                return Found(request.token_count, prefix=named.prefix, lease_id=named.lease_id)
            return Found(reason=reason, unstorable=reason if reason in _NAME_IS_TAKEN else "")
        # Rows can be cut to what is wanted, parts must be there at a boundary within it.
        wanted = 4 * request.rows_max if facts.held.needs else None
        match = self._client.match(
            model=facts.model_id,
            token_ids=request.token_ids[:wanted],
            fidelities=(facts.layout.fidelity,),
            part_kinds=facts.held.kinds,
            timeout_s=self._deadline_s,
            tries=1,
        )
        found = self._served(match, request, facts)
        return found._replace(longest=match.longest_namespace, longest_tokens=match.longest_tokens)

    def _served(self, match: Match, request: Request, facts: Facts) -> Found:
        """Says what of a match can be served."""
        if (there := self._later(match, request, facts)) is not None:
            return there
        if match.shortened_by:
            self._tally.because("shortened_by", match.shortened_by)
        if not match.hit or match.prefix is None:
            return Found(reason=str(match.reason))
        if match.prefix.layout != facts.layout:
            return Found(reason="layout_differs", unstorable="layout_differs")
        served = min(match.token_count, request.rows_max)
        if facts.lacks(match.prefix, served):
            return Found(reason="part_missing")
        return Found(served, str(match.reason), prefix=match.prefix, lease_id=match.lease_id)

    def _later(self, match: Match, request: Request, facts: Facts) -> Found | None:
        """What can be served by going back from a boundary after the common tokens, if it is more."""
        wanted = min(match.matched_tokens, request.rows_max)
        if match.prefix is None or match.token_count >= wanted or not facts.held.needs:
            return None
        if match.prefix.layout != facts.layout:
            return None
        boundary = facts.held.later(match.prefix.parts, wanted)
        reason = "" if wanted == request.rows_max else "partial"
        found = Found(wanted, reason, prefix=match.prefix, lease_id=match.lease_id)
        return found._replace(fetched=boundary) if boundary else None

    def look_up(self, namespace: str, facts: Facts, token_ids: bytes | None) -> Lookup:
        """Says what is stored under a name; with token ids it is these or a miss, and leased."""
        return self._client.lookup(
            namespace,
            model=facts.model_id,
            layout=facts.layout,
            token_ids=token_ids,
            lease_ms=limits.LEASE_MS_DEFAULT if token_ids else 0,
            timeout_s=self._deadline_s,
            tries=1,
        )

    def fetch(self, cache: Cache, request: Request, found: Found, facts: Facts) -> Found:
        """Fills the cache with what was found, whole; else returns a miss with its reason."""
        started = time.perf_counter()
        prefix = self._client.fetch(
            None if found.lease_id else found.namespace,
            lease_id=found.lease_id,
            rows=(0, found.fetched or found.served),
            part_kinds=facts.held.kinds,
            codecs=facts.held.codecs,
            as_mlx=True,
            timeout_s=self._patience_s(found),
            tries=1,
        )
        if prefix is None:  # evicted meanwhile, or found corrupt and taken out: the name is free
            return found._replace(served=0, reason="gone")
        wanted = request.token_ids[: 4 * found.served]
        if wrong := put_back(cache, prefix, wanted, facts):
            # Parts that are of no use to this model are computed again, and replaced.
            return found._replace(
                served=0, reason=wrong, unstorable="" if wrong == PART_DIFFERS else wrong
            )
        self._tally.add("fetch_ms", (time.perf_counter() - started) * 1e3)
        self._tally.add("fetch_bytes", found.served * facts.layout.row_bytes)
        self.lane, self.lane_reason = prefix.transport, prefix.transport_reason
        return found

    def _patience_s(self, found: Found) -> float:
        """How long a transfer may take: the deadline, or the prefill it saves if that is longer."""
        return max(self._deadline_s, prefill_saved_ms(found) / 1e3)

    # Storing

    def send(
        self, pending: Pending, found: Found, bundle: Bundle, check: Callable[..., None]
    ) -> bool:
        """Stores what was prefilled, behind what was served or whole; False if it was there already.

        `check` is called now and then; if it raises, the store is abandoned.
        """
        assert found.facts is not None
        request, prefill_ms = pending
        saved_ms = prefill_saved_ms(found)
        store = functools.partial(
            self._client.store,
            request.namespace,
            token_ids=request.token_ids,
            model=found.facts.model_id,
            codecs=codecs_of(found.facts.layout),
            slots=found.facts.held.slots,
            parts=bundle.parts(),
            # Of a child's rows only some were computed now; without the others' time it is unknown.
            prefill_ms=prefill_ms + saved_ms if saved_ms or not found.served else 0,
            progress=check,
        )
        try:
            stored, whole = self._place(store, pending, found, bundle, check)
        except OtherContent as error:  # these tokens, perhaps, with other parts
            there = self._there(error.metadata.get("namespace", ""), request, found.facts)
            if there is None:
                raise
        else:
            if whole:
                self._tally.because("stored_whole", whole)
            if not stored.already_stored:
                return True
            there = self._there(stored.namespace, request, found.facts)
        if there and not _usable(there, request, found):  # it would stay in the way of everybody
            store(layers=bundle.layers(), replace=True)
            return True
        if there:
            self._tally.add("checkpoints_dropped", found.facts.unkept(there, bundle.boundaries))
        return False

    def _place(
        self,
        store: Callable[..., Stored],
        pending: Pending,
        found: Found,
        bundle: Bundle,
        check: Callable[..., None],
    ) -> tuple[Stored, str]:
        """Stores behind what is stored already, or whole; returns why rows are there twice now."""
        shared, twice = self._shared(pending, found, bundle, check)
        if shared.end > found.served:
            behind = functools.partial(store, layers=bundle.layers(shared.end), base=shared.end)
            try:
                return behind(parent=found.longest, parent_generation=shared.generation), twice
            except NotStored:  # dropped or evicted meanwhile; all rows are here
                twice = "parent_gone"
            except (InvalidRequest, LayoutDiffers):
                twice = "parent_refused"
        whole = why_whole(found)
        if found.served and found.prefix and not whole:
            behind = functools.partial(store, layers=bundle.layers(found.served), base=found.served)
            try:
                generation = found.prefix.generation
                return behind(parent=found.namespace, parent_generation=generation), twice
            except NotStored:
                whole = "parent_gone"
        return store(layers=bundle.layers()), whole or twice

    def _shared(
        self, pending: Pending, found: Found, bundle: Bundle, check: Callable[..., None]
    ) -> tuple[Shared, str]:
        """Returns how many rows the longest match has with these very bits, and why not all of its.

        Those behind what was served were computed again, for want of a part. The others are compared too
        if another prefix served them: as a child of the longest match, this one would have its rows. A
        prefix whose parts cannot be used is not extended: they would be its children's too.
        """
        known = found.prefix if found.prefix and found.prefix.namespace == found.longest else None
        begin, end = found.served if known else 0, found.longest_tokens
        least = max(found.served + limits.CHAIN_TOKENS_MIN, _BASE_TOKENS_MIN)
        assert found.facts is not None
        both = found.facts.held.needs and bundle.rows
        if end < least or not both or found.reason == PART_DIFFERS:
            return Shared(begin, 0), ""
        shared = rows_shared(
            self._client,
            found.longest,
            (begin, end),
            generation=known.generation if known else 0,
            token_ids=pending.request.token_ids,
            layers=bundle.rows,
            facts=found.facts,
            check=check,
            timeout_s=max(self._deadline_s, pending.prefill_ms / 1e3),
        )
        if shared.end == end:
            return shared, ""
        why = "rows_differ" if shared.generation else "parent_gone"
        return (shared if shared.end >= least else Shared(begin, 0)), why

    def _there(self, namespace: str, request: Request, facts: Facts) -> PrefixInfo | None:
        """Returns what a name has of a prefix that needs parts; None if it is another, or needs none."""
        if not facts.held.needs or not namespace:
            return None
        named = self.look_up(namespace, facts, request.token_ids)
        return named.prefix if named.hit else None


def _is_answer(error: PionError) -> bool:
    return isinstance(error, InvalidRequest) or error.reason in _ANSWERS


def _usable(there: PrefixInfo, request: Request, found: Found) -> bool:
    """Whether a prefix has all parts at its end, and others than could not be used."""
    assert found.facts is not None
    tried = found.prefix.generation if found.prefix and found.reason == PART_DIFFERS else 0
    return not found.facts.lacks(there, request.token_count) and there.generation != tried


def prefill_saved_ms(found: Found) -> float:
    """The measured prefill time of the rows that are served; 0 if none was reported."""
    if not found.served or found.prefix is None:
        return 0.0
    return found.prefix.prefill_ms * found.served / found.prefix.token_count


def why_whole(found: Found) -> str:
    """Why a match is not made the parent of what follows it; empty if it is."""
    if not found.served or found.prefix is None:
        return ""
    if found.served < _BASE_TOKENS_MIN:
        return "base_short"
    if found.prefix.depth + 1 >= limits.CHAIN_DEPTH_MAX:
        return "chain_deep"
    if 2 * len(found.prefix.parts) > parts_max(found.prefix.token_count):
        return "parts_many"
    return ""
