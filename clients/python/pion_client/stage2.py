"""Stage 2 of a prompt cache: prefixes that are attended to where their rows are.

Knows the rows that this process has at hand or could have (`residency`), and the caches that stand for
those of the server (`attention`); not what happens to a prefix that is fetched.

The one decision: rows under a name are taken for those of a cache only if their tokens prove it or,
where these are not known, their generation. What has taken the name meanwhile is never gone on with:
the rows are computed once more, or there is an error.
"""

import collections
import os

from pion_client import attention, caches
from pion_client.bundles import put_back
from pion_client.caches import Cache, UnsupportedCache
from pion_client.client import Client
from pion_client.errors import DeadlineExceeded, NotStored, PionError, Unavailable
from pion_client.exchange import Exchange, Found, Request, Unanswered
from pion_client.prefill import Prefill
from pion_client.residency import Kept, NotResident, Residency, Session
from pion_client.store_queue import StoreQueue
from pion_client.values import PrefixInfo

IDS_MAX = 64
"""Namespaces whose token ids are remembered, so that rows that are nowhere any more can be computed."""
FETCH_MS, FETCH_BYTES_PER_MS = 2.0, 1e6
"""What fetching takes before one was measured: a round trip or two, and 1 GB/s."""
CALL_MS, CALL_MS_PER_TOKEN = 0.6, 1e-4
"""What a query takes before one was measured."""
PASSES = 2
"""Forward passes before the first token: mlx-lm runs the last token of a prompt by itself."""


class Stage2:
    """Finds the rows of one prompt cache's prefixes, and has them resident.

    Args:
        wanted: whether what is stored under a name is made resident, and kept at hand.
        prefill: the model.
        client: whom rows are fetched with.
        exchange: whom the server is asked through.
        queue: what this process is storing.
        deadline_s: how long that is waited for, at least.
    """

    def __init__(
        self,
        *,
        wanted: bool,
        prefill: Prefill,
        client: Client,
        exchange: Exchange,
        queue: StoreQueue,
        deadline_s: float,
    ) -> None:
        self.on = wanted and _plain(prefill.empty())
        """Whether caches go this way by themselves."""
        self.residency = Residency(client)
        """Sessions on the server, and rows at hand."""
        self._prefill, self._client, self._exchange = prefill, client, exchange
        self._queue, self._deadline_s = queue, deadline_s
        self._ids: collections.OrderedDict[str, bytes] = collections.OrderedDict()

    # What caches ask that stand for rows elsewhere

    def at_hand(self, namespace: str, token_count: int) -> Kept | None:
        """See `PionPromptCache.at_hand`."""
        if token_ids := self._ids_of(namespace, token_count):
            return self._kept(namespace, token_ids)
        kept = self.residency.kept(namespace, token_count)
        if kept is None or self._kept(namespace, kept.token_ids) is None:
            return None
        try:
            with self._exchange.answering():
                held = self._exchange.look_up(namespace, self._prefill.facts(), kept.token_ids)
        except Unanswered:
            return kept
        return kept if held.hit else None

    def session_for(self, namespace: str, token_count: int) -> Session:
        """See `PionPromptCache.session_for`."""
        self._queue.wait_for(lambda own: own.request.namespace == namespace, self._deadline_s)
        token_ids = self._ids_of(namespace, token_count)
        try:
            with self._exchange.answering():
                found = self._exchange.look_up(namespace, self._prefill.facts(), token_ids)
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
        """See `PionPromptCache.rows_for`."""
        if session is None:
            token_ids = self._ids_of(namespace, token_count) or b""
            kept = self.at_hand(namespace, token_count)
        else:
            token_ids = session.token_ids
            kept = self._kept(namespace, token_ids) if token_ids else None
        if kept:
            return kept
        cache = self._prefill.empty()
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
            known = len(ids) == 4 * token_count
            if prefix and known and not put_back(cache, prefix, ids, self._prefill.facts()):
                return self._keep(cache, namespace, ids)
        except Unanswered:
            pass
        if not token_ids:
            raise NotStored(
                f"{namespace!r}: these rows are neither stored any more nor at hand, and which tokens "
                "they were of is not known here"
            )
        self._prefill.run(cache, token_ids, [len(token_ids) // 4])
        return self._keep(cache, namespace, token_ids)

    # What the prompt cache asks

    def fill(self, cache: Cache, request: Request, found: Found) -> bool:
        """Fills a cache without fetching: with rows at hand, or with what stands for others."""
        if not self.on or found.prefix is None or request.namespace is None:
            return False
        session = self.reside(found.prefix)
        if self.install(cache, request):
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
        if attention.why_not(self._prefill.model, prefix, len(cache)):
            self.residency.reason = "attention"
            return False
        cache[:] = [attention.PionCache(prefix, slot) for slot in range(len(cache))]
        return True

    def install(self, cache: Cache, request: Request) -> bool:
        """Fills a cache with the rows of a request, if they are at hand."""
        if (kept := self._rows_of(request)) is None:
            return False
        caches.install(cache, kept.rows, self._prefill.facts().held.layout, request.token_count)
        return True

    def hold(self, cache: Cache, request: Request) -> None:
        """Keeps what a later cache of the same name needs."""
        if not self.on or request.namespace is None or self._prefill.refusal:
            return
        self._ids.pop(request.namespace, None)
        self._ids[request.namespace] = request.token_ids
        if len(self._ids) > IDS_MAX:
            self._ids.popitem(last=False)
        elsewhere = isinstance(cache[0], attention.PionCache)
        if not elsewhere and self._rows_of(request) is None:
            self._keep(cache, request.namespace, request.token_ids)

    def reside(self, prefix: PrefixInfo) -> Session | None:
        """Has a prefix resident, if the server can; notes why not.

        Raises:
            Unavailable, DeadlineExceeded: there is no server.
        """
        try:
            return self.residency.ensure(prefix)
        except (Unavailable, DeadlineExceeded):
            raise
        except PionError as error:
            self.residency.reason = error.reason.lower()
            return None

    def is_sooner(self, token_count: int, fetched_bytes: float, fetched_ms: float) -> bool:
        """Whether attending to such a prefix gives the first token sooner than fetching it.

        Args:
            token_count: its tokens.
            fetched_bytes, fetched_ms: what fetches were, and took, so far.
        """
        if self._prefill.refusal or self._prefill.expected().needs:
            return False
        layout = self._prefill.stored_layout()
        assert layout is not None
        layers = len({tensor.slot for tensor in layout.tensors})
        size = token_count * layout.row_bytes
        fetch_ms = FETCH_MS + size / FETCH_BYTES_PER_MS
        if fetched_bytes:
            fetch_ms = size * fetched_ms / fetched_bytes
        call_ms = self.residency.call_ms_expected(token_count)
        if call_ms is None:
            call_ms = CALL_MS + CALL_MS_PER_TOKEN * token_count
        return PASSES * layers * call_ms < fetch_ms

    def _rows_of(self, request: Request) -> Kept | None:
        """Returns the rows of a request, if they are at hand and may be used."""
        off = os.environ.get("PION_PROMPT_CACHE_NO_INPROC") == "1"
        if off or request.namespace is None or self._prefill.refusal:
            return None
        return self._kept(request.namespace, request.token_ids)

    def _kept(self, namespace: str, token_ids: bytes) -> Kept | None:
        """Returns the rows of these tokens and this model that were kept under a name."""
        kept = self.residency.kept(namespace, len(token_ids) // 4)
        wanted = self._prefill.facts().model_id, token_ids
        return kept if kept and (kept.model_id, kept.token_ids) == wanted else None

    def _keep(self, cache: Cache, namespace: str, token_ids: bytes) -> Kept:
        kept = Kept(self._prefill.facts().model_id, token_ids, caches.held(cache))
        self.residency.keep(namespace, kept)
        return kept

    def _ids_of(self, namespace: str, token_count: int) -> bytes | None:
        """Returns the tokens that were last wanted under a name; None if not this many."""
        token_ids = self._ids.get(namespace)
        return token_ids if token_ids and len(token_ids) == 4 * token_count else None


def _plain(cache: Cache) -> bool:
    """Whether attention can run over it elsewhere."""
    try:
        caches.require_rows(cache)
    except UnsupportedCache:
        return False
    return True
