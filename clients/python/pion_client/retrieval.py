"""Retrieved chunks whose prefill is done once: `HybridRetrievalCache`.

Knows chunks by their ids, and mlx-lm's models and caches; not how anything is retrieved, nor any text.
Everything is token ids: tokens are joined, never strings, because the tokens of two texts are not those
of both together.

A *chunk* begins a prompt: its cache is continued with the tokens that follow it. A *pack* is computed
after a stub that all packs share; several of them can follow one stub, in any order, each with its keys
moved to its position (`positions`). Packs do not attend to each other: where two say nearly the same,
the model mixes them up more easily than in one long prompt, so a few large packs answer better than
many small ones.

Two backends keep them. `inproc` holds caches of any class in this process, bit for bit; it needs no
server and does not load gRPC. `pion` keeps them on a server, through `PionPromptCache`, where other
processes find them, and so does this one after a restart.

The one decision: a chunk is its tokens; what the model made of them is only kept to save time. A cache
found under a key is compared with the tokens, and computed again if it is missing, has other tokens or
is out of reach. So memory is bounded without losing a chunk, a missing server costs only time, and a
chunk is always replaced as a whole. The key is the chunk's id and the model's id (and the stub's
tokens): another model, or this one with other weights, has its own chunks.
"""

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from pion_client import identity, positions
from pion_client.arrays import mlx_core
from pion_client.bundles import cache_suffix
from pion_client.chunks import Backend, Cache, Compute, Held, Key, Known, Manifest, compact
from pion_client.positions import PositionsFixed, Reach, Rotation
from pion_client.prefill import DEADLINE_S, PREFILL_STEP, prefill
from pion_client.tally import Tally
from pion_client.vocabulary import Vocabulary
from pion_wire import blocks

if TYPE_CHECKING:
    from pion_client.client import Client

__all__ = ["HybridRetrievalCache", "Ingested", "PositionsFixed"]

PACKS_MAX = 8
"""Packs after one stub, unless the caller says otherwise."""
MEMORY_BYTES_MAX = 4 << 30


class Ingested(NamedTuple):
    """What `ingest` and `ingest_pack` did."""

    chunk_id: str
    token_count: int
    """Of the chunk; of a pack without its stub."""
    namespace: str
    """Under which a server keeps it."""
    computed: bool
    """Whether it had to be computed."""
    replaced: bool
    """Whether the id had other tokens before."""
    kept: bool
    """False where it found no room or no server: it is computed when it is asked for."""


class Stub(NamedTuple):
    """The tokens in front of all packs, and what the model made of them."""

    token_ids: bytes
    model_id: str
    cache: Cache
    rotations: list[Rotation]
    reach: Reach


class HybridRetrievalCache:
    """Keeps the caches of retrieved chunks, for one model, and puts prompts together from them.

        retrieval = HybridRetrievalCache(model)
        retrieval.ingest("eiffel", tok.encode("The Eiffel Tower is 330 metres high."))
        cache, rest = retrieval.prepare("eiffel", tok.encode(" How high?", add_special_tokens=False))
        generate(model, tok, prompt=rest, prompt_cache=cache)  # mlx-lm's

    Usable from several threads, as far as MLX is: each call runs the model on the thread it is made on.

    Args:
        model: a loaded mlx-lm model.
        backend: "inproc" or "pion".
        vquant: how a server keeps rows, as for `PionPromptCache`; "raw" keeps every bit.
        model_id: what identifies the model's caches; by default computed (`identity`). A name of
            one's own must change whenever the caches would.
        directory: where the manifest is written, one small file per chunk, so that a restart does not
            forget it; processes may share it. Without one it is in memory, but a server knows the
            tokens of what it keeps anyway.
        make_cache: makes an empty cache for the model, instead of mlx-lm's `make_prompt_cache`; such as
            one of `QuantizedKVCache`. Chunks in it are others than those in plain rows.
        memory_bytes_max: what `inproc` holds at most; the least recently used goes first and is
            computed again when it is asked for.
        address: of the server, `host:port` or `unix:/path`; by default PION_ADDRESS of the
            environment, else 127.0.0.1:50051.
        client: a client to use instead of one of one's own; it is not closed here.
        deadline_s: the longest that a call waits for an answer before it prefills by itself.

    Raises:
        ValueError: for values that make no sense, such as a `vquant` that cannot take this model's rows.
        Forked: in a process forked from one that uses MLX; all methods raise it there.
        TypeError: `model_id` is needed, because the model's arguments have no JSON.
    """

    def __init__(
        self,
        model: Any,
        *,
        backend: Literal["inproc", "pion"] = "inproc",
        vquant: str = "raw",
        model_id: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        make_cache: Callable[[Any], Cache] | None = None,
        memory_bytes_max: int = MEMORY_BYTES_MAX,
        address: str | None = None,
        client: "Client | None" = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        mlx_core()
        self._model = model
        self._vocabulary = Vocabulary(model)
        self._model_id = model_id
        self._vquant = vquant
        self._make_cache = make_cache or make_prompt_cache
        self._suffix = "+" + cache_suffix(make_cache(model)) if make_cache else ""
        if model_id is None:
            identity.begin(model)  # off the path of the first chunk
        self._backend: Backend
        if backend == "pion":
            from pion_client.served_chunks import Served  # loads gRPC

            self._backend = Served(
                model,
                address=address,
                client=client,
                vquant=vquant,
                model_id=model_id,
                make_cache=make_cache,
                deadline_s=deadline_s,
            )
        elif backend == "inproc":
            if vquant != "raw" or address or client:
                raise ValueError("inproc keeps every bit, and here: server and vquant are for pion")
            self._backend = Held(memory_bytes_max)
        else:
            raise ValueError(f"backend={backend!r} is neither 'inproc' nor 'pion'")
        self._name = backend
        self._manifest = Manifest(Path(directory) if directory is not None else None)
        self._tally = Tally()
        self._movable: tuple[str, list[Rotation], Reach] | None = None
        self._stub: Stub | None = None

    # Chunks

    def ingest(self, chunk_id: str, ids: Sequence[int]) -> Ingested:
        """Computes and keeps the cache of a chunk; does nothing if it is there already.

        Other tokens under the same id replace the former ones as a whole.

        Args:
            chunk_id: any text.
            ids: its token ids, at least one. They begin the prompt, so include the token that
                begins one, if the model wants it.

        Raises:
            ValueError: there are no token ids, or the model does not have one of them.
        """
        return self._ingested(self._key(chunk_id), self._vocabulary.packed(ids), self._computed)

    def has(self, chunk_id: str) -> bool:
        """Whether `prepare` knows this chunk for this model; False if only a silent server knows it."""
        return self._has(self._key(chunk_id))

    def prepare(self, chunk_id: str, suffix_ids: Sequence[int]) -> tuple[Cache, list[int]]:
        """Returns a cache of a chunk, and the tokens to run on it: those that follow the chunk.

        The cache is the caller's: appending to it changes nothing that is kept. Running the tokens on it
        gives exactly the bits of a prefill in these two pieces.

        Args:
            chunk_id: which chunk.
            suffix_ids: what follows, at least one token, encoded without the one that begins a prompt.

        Raises:
            KeyError: the chunk was never ingested for this model, or has been evicted.
            ValueError: there are no suffix ids, or the model does not have one of them.
            PionError: only the server can know the chunk, and it is out of reach.
        """
        rest = blocks.unpack_token_ids(self._vocabulary.packed(suffix_ids))
        cache = self._cache(self._key(chunk_id), self._computed)
        self._tally.add("prepared")
        return cache, rest

    def evict(self, chunk_id: str) -> bool:
        """Forgets a chunk and its packs, here and on the server; says whether there was anything.

        A process that has the chunk in its own manifest still knows it, and computes it again.

        Raises:
            PionError: the server is out of reach; nothing is forgotten here either.
        """
        key = self._key(chunk_id)
        kept = self._backend.evict(key)
        known = self._manifest.forget(key)
        self._tally.add("evicted", kept or known)
        return kept or known

    # Packs

    def set_shared_stub(self, stub_ids: Sequence[int]) -> None:
        """Sets the tokens that every composition begins with, such as the instructions.

        Packs ingested after another stub are kept, but not used after this one.

        Raises:
            PositionsFixed: keys of this model cannot be moved (interleaved or scaled RoPE, a sliding
                window, recurrent state, …).
            ValueError: there are no token ids, or the model does not have one of them.
        """
        self._stub = self._made_stub(self._vocabulary.packed(stub_ids))

    def ingest_pack(self, chunk_id: str, ids: Sequence[int]) -> Ingested:
        """Computes a chunk after the stub, for `prepare_multi`; otherwise like `ingest`.

        Args:
            chunk_id: any text; the pack is independent of the chunk with the same id.
            ids: its token ids, encoded without the one that begins a prompt.

        Raises:
            RuntimeError: there is no stub yet.
            ValueError: there are no token ids, or the model does not have one of them.
        """
        stub = self._current_stub()
        key = self._pack_key(chunk_id, stub)
        return self._ingested(key, self._vocabulary.packed(ids), self._computed_after(stub))

    def has_pack(self, chunk_id: str) -> bool:
        """Whether `prepare_multi` knows this chunk after the present stub; otherwise like `has`."""
        return self._has(self._pack_key(chunk_id, self._current_stub()))

    def prepare_multi(
        self, chunk_ids: Sequence[str], suffix_ids: Sequence[int], *, max_packs: int = PACKS_MAX
    ) -> tuple[Cache, list[int]]:
        """Returns a cache of the stub followed by these packs, in this order, and the rest to run.

        The first pack's rows are used as they are; the keys of each other pack are moved to follow the
        pack before it. Packs do not attend to each other.

        Args:
            chunk_ids: which packs, at least one.
            suffix_ids: what follows them, at least one token.
            max_packs: more are refused, because answers get worse with many small packs.

        Raises:
            RuntimeError: there is no stub yet.
            KeyError: a pack was never ingested after this stub, or has been evicted.
            ValueError: there are no packs, or too many, or no suffix ids.
            PositionsFixed: keys of this model cannot be moved so far.
            PionError: only the server can know a pack, and it is out of reach.
        """
        if isinstance(chunk_ids, str) or not 1 <= len(chunk_ids) <= max_packs:
            raise ValueError(f"a list of 1 to {max_packs} packs is needed, not {chunk_ids!r}")
        rest = blocks.unpack_token_ids(self._vocabulary.packed(suffix_ids))
        stub = self._current_stub()
        compute = self._computed_after(stub)
        packs = [self._cache(self._pack_key(name, stub), compute) for name in chunk_ids]
        count = len(stub.token_ids) // 4 + sum(pack[0].offset for pack in packs)
        stub.reach.extend(count + len(rest))
        cache = _composed(self._make_cache(self._model), stub, packs)
        self._tally.add("composed")
        return cache, rest

    # What happened

    def stats(self) -> dict[str, Any]:
        """What happened so far, in this object.

        `ingested` counts chunks and packs that were not kept before, `unchanged` those that were, and
        `replaced` those that had other tokens. `prepared` and `composed` are calls of `prepare` and
        `prepare_multi`. `known` are entries of the manifest, `unwritten` what could not be written
        there (or taken away) and is remembered in this object only. `inproc` adds `computed` (how
        often the model ran), `held` and `held_bytes`, and how many were `forgotten` for want of room;
        `pion` adds `alone`, what was computed because the server was out of reach, and as
        `prompt_cache` what `PionPromptCache.stats` says.
        """
        names = ("ingested", "unchanged", "replaced", "prepared", "composed", "evicted")
        counts = {name: self._tally.of(name) for name in names}
        entries = {"known": len(self._manifest), "unwritten": self._manifest.unwritten}
        return {"backend": self._name, **counts, **entries, **self._backend.stats()}

    def close(self) -> None:
        """Finishes storing, and closes the connection if it is of its own."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _key(self, chunk_id: str) -> Key:
        return Key(_text(chunk_id), self._identity(), b"", self._vquant)

    def _pack_key(self, chunk_id: str, stub: Stub) -> Key:
        return Key(_text(chunk_id), stub.model_id, stub.token_ids, self._vquant)

    def _identity(self) -> str:
        mlx_core()
        return (self._model_id or identity.model_id(self._model)) + self._suffix

    def _has(self, key: Key) -> bool:
        return self._known(key) is not None or self._backend.has(key)

    def _known(self, key: Key) -> Known | None:
        known = self._manifest.get(key)
        return known if known and self._vocabulary.has(known.token_ids) else None

    def _ingested(self, key: Key, token_ids: bytes, compute: Compute) -> Ingested:
        known = self._known(key)
        done = self._backend.keep(key, token_ids, compute)
        replaced = done.replaced or (known is not None and known.token_ids != token_ids)
        self._learned(key, known, Known(token_ids, done.kept))
        self._tally.add("unchanged" if done.kept and not done.computed else "ingested")
        self._tally.add("replaced", replaced)
        count = len(token_ids) // 4
        return Ingested(key.chunk_id, count, key.namespace, done.computed, replaced, done.kept)

    def _cache(self, key: Key, compute: Compute) -> Cache:
        known = self._known(key)
        cache, now = self._backend.cache(key, known, compute)
        self._learned(key, known, now)
        return cache

    def _learned(self, key: Key, before: Known | None, now: Known) -> None:
        if now != before:
            self._manifest.put(key, now)

    def _current_stub(self) -> Stub:
        if self._stub is None:
            raise RuntimeError("packs follow a stub: call set_shared_stub first")
        if self._stub.model_id != self._identity():  # it has other weights now
            self._stub = self._made_stub(self._stub.token_ids)
        return self._stub

    def _made_stub(self, token_ids: bytes) -> Stub:
        model_id = self._identity()
        if self._movable is None or self._movable[0] != model_id:
            found = positions.rotations(self._model, self._make_cache(self._model))
            self._movable = model_id, found, Reach(self._model, found)
        return Stub(token_ids, model_id, self._computed(token_ids), *self._movable[1:])

    def _computed(self, token_ids: bytes) -> Cache:
        return compact(self._prefilled(self._make_cache(self._model), token_ids))

    def _computed_after(self, stub: Stub) -> Compute:
        def compute(token_ids: bytes) -> Cache:
            cache = self._prefilled(copy.deepcopy(stub.cache), token_ids)
            return compact(cache, len(stub.token_ids) // 4)

        return compute

    def _prefilled(self, cache: Cache, token_ids: bytes) -> Cache:
        prefill(self._model, cache, mx.array(np.frombuffer(token_ids, "<u4")), PREFILL_STEP)
        return cache


def _composed(cache: Cache, stub: Stub, packs: Sequence[Cache]) -> Cache:
    """Fills an empty cache with the rows of the stub and then those of the packs; all compact."""
    for slot, (mine, rotation) in enumerate(zip(cache, stub.rotations, strict=True)):
        keys, values = [stub.cache[slot].keys], [stub.cache[slot].values]
        delta = 0
        for rows in (pack[slot] for pack in packs):
            keys.append(positions.moved(rows.keys, rotation, delta))
            values.append(rows.values)
            delta += rows.offset
        mine.update_and_fetch(mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2))
    mx.eval([slot.state for slot in cache])
    return cache


def _text(chunk_id: str) -> str:
    if not isinstance(chunk_id, str):
        raise TypeError(f"a chunk's id is a text, not {chunk_id!r}")
    return chunk_id
