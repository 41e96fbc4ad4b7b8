"""Caches of retrieved chunks on a server: the backend `pion`.

Knows the client and `PionPromptCache`, which moves the rows, and the names that chunks have; not what is
put together from them. The one decision: once the server has a chunk, it is the server that says which
tokens the chunk has: another process may have replaced it. What this process ingested while the server
was out of reach is newer than what the server has, and replaces it as soon as it can be asked again.
A server that is silent costs one deadline, then nobody asks it for a while.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from pion_client.addresses import default_address
from pion_client.breaker import Breaker
from pion_client.chunks import Cache, Compute, Kept, Key, Known, compact, unknown
from pion_client.client import Client
from pion_client.connection import of_now
from pion_client.errors import DeadlineExceeded, InvalidRequest, PionError, Unavailable
from pion_client.mlx import PionPromptCache
from pion_client.values import Lookup, MissReason, PrefixInfo
from pion_client.vocabulary import Vocabulary
from pion_wire import blocks

STORES_MAX = 3
"""How often a chunk is stored where another process is quicker to put its own under the name."""

_NOTHING_THERE = (MissReason.NOT_STORED, MissReason.NO_ROWS)
_OTHER_MODEL = b"?"
"""Stands for tokens that belong to nobody here; no packed ids have one byte."""


class _Silent(Exception):
    """The server gave no usable answer."""

    def __init__(self, why: PionError) -> None:
        super().__init__(why)
        self.why = why


class Served:
    """Caches of chunks on a server.

    Args:
        model: a loaded mlx-lm model.
        address, client: where; see `HybridRetrievalCache`.
        vquant, model_id, make_cache, deadline_s: as for `PionPromptCache`.
    """

    def __init__(
        self,
        model: Any,
        *,
        address: str | None,
        client: Client | None,
        vquant: str,
        model_id: str | None,
        make_cache: Callable[[Any], Cache] | None,
        deadline_s: float,
    ) -> None:
        if address and client:
            raise ValueError("give one of address and client")
        self._vocabulary = Vocabulary(model)
        self._deadline_s = deadline_s
        self._breaker = Breaker()
        self._alone = 0
        with contextlib.ExitStack() as owned:
            if client is None:
                where = address or default_address()
                client = owned.enter_context(Client(where, timeout_s=deadline_s))
            self._client = client
            self._prompt_cache = owned.enter_context(
                PionPromptCache(
                    model,
                    client=client,
                    vquant=vquant,
                    model_id=model_id,
                    make_cache=make_cache,
                    deadline_s=deadline_s,
                )
            )
            self._owned = owned.pop_all()

    def keep(self, key: Key, token_ids: bytes, compute: Compute) -> Kept:
        """Stores a chunk, in the place of what the name holds, and waits until it is stored."""
        wanted = key.stub + token_ids
        replaced = computed = False
        try:
            there = self._tokens(key, wanted)
            for _ in range(STORES_MAX):
                if there == wanted or (computed and not there):
                    break
                if there:
                    replaced = self._drop(key) or replaced
                computed = True
                self._prompt_cache.get_or_prefill(blocks.unpack_token_ids(wanted), key.namespace)
                self._prompt_cache.flush()
                there = self._tokens(key, wanted)
            return Kept(computed, replaced, kept=there == wanted)
        except _Silent:
            return Kept(computed, replaced, kept=False)

    def cache(self, key: Key, known: Known | None, compute: Compute) -> tuple[Cache, Known]:
        """Fetches it; or computes it, and has it stored in the background.

        Raises:
            KeyError: nobody knows its tokens.
            PionError: only the server could.
        """
        wanted = key.stub + known.token_ids if known else b""
        try:
            there = self._tokens(key, wanted)
            if known is None or (known.kept and self._belongs(there, key)):
                wanted = there
            elif there not in (b"", wanted):
                self._drop(key)
        except _Silent as silent:
            if known is None:
                raise silent.why from None
            self._alone += 1
            return compute(known.token_ids), known
        if not self._belongs(wanted, key):
            raise unknown(key)
        cache = self._prompt_cache.get_or_prefill(blocks.unpack_token_ids(wanted), key.namespace)
        # What the server evicted is stored again, and still what the server says from then on.
        kept = there == wanted or (known is not None and known.kept)
        now = Known(wanted[len(key.stub) :], kept)
        return (compact(cache, len(key.stub) // 4) if key.stub else cache), now

    def has(self, key: Key) -> bool:
        """Whether the server has it; False if it is silent."""
        try:
            return self._belongs(self._tokens(key, b""), key)
        except _Silent:
            return False

    def evict(self, key: Key) -> bool:
        """Drops it on the server.

        Raises:
            PionError: the server could not be told.
        """
        self._prompt_cache.flush()
        packs = [prefix.namespace for prefix in self._client.list(key.packs)]
        return any(self._client.drop(key.namespace, *packs))

    def stats(self) -> dict[str, Any]:
        """See `HybridRetrievalCache.stats`."""
        return {"alone": self._alone, "prompt_cache": self._prompt_cache.stats()}

    def close(self) -> None:
        """Finishes storing, and closes the client if it is of its own."""
        self._owned.close()

    def _tokens(self, key: Key, expected: bytes) -> bytes:
        """Returns the tokens that the server has under a key's name; empty if there is nothing.

        Args:
            key: the key.
            expected: if these are they, nothing has to be fetched.
        """
        look = functools.partial(
            self._client.lookup,
            key.namespace,
            model=key.model_id,
            token_ids=expected or None,
            timeout_s=self._deadline_s,
            tries=1,
        )

        def tokens(found: Lookup) -> bytes:
            if found.hit and expected:
                return expected
            if found.reason in _NOTHING_THERE or found.prefix is None:
                return b""
            if not found.hit and found.reason is not MissReason.TOKENS_DIFFER:
                return _OTHER_MODEL
            return self._fetched_tokens(found.prefix)

        with self._answering():
            return of_now(look, tokens)

    def _fetched_tokens(self, prefix: PrefixInfo) -> bytes:
        """Fetches one row of one slot: all token ids come with the last one.

        Raises:
            GenerationDiffers: another prefix has taken the name, of which it may be any row.
        """
        last = (prefix.token_count - 1, prefix.token_count)
        slots = sorted({tensor.slot for tensor in prefix.layout.tensors})[:1]
        fetched = self._client.fetch(
            prefix.namespace,
            rows=last,
            slots=slots,
            generation=prefix.generation,
            timeout_s=self._deadline_s,
            tries=1,
        )
        return fetched.packed_token_ids if fetched else b""

    def _belongs(self, token_ids: bytes, key: Key) -> bool:
        """Whether these can be the tokens of a key: its stub and more, and all of the model's."""
        return (
            len(token_ids) % 4 == 0
            and len(token_ids) > len(key.stub)
            and token_ids.startswith(key.stub)
            and self._vocabulary.has(token_ids)
        )

    def _drop(self, key: Key) -> bool:
        with self._answering():
            return self._client.drop(key.namespace, timeout_s=self._deadline_s)[0]

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            with self._breaker.guarding(_is_answer):
                yield
        except InvalidRequest:
            raise
        except PionError as error:
            raise _Silent(error) from error


def _is_answer(error: PionError) -> bool:
    return not isinstance(error, Unavailable | DeadlineExceeded)
