"""What a retrieved chunk is known by, and caches of chunks in the memory of this process.

Knows keys, token ids, files of the manifest and mlx-lm's caches as wholes; no servers. A chunk is known
by its tokens: what the model made of them is kept only as long as there is room, and computed again
from them. So the one decision: a manifest never says that a cache exists, only which tokens an id
has, and every cache is compared with them before it is used.

A manifest on disk is one JSON file per chunk, named as the key is and replaced by renaming::

    {"format": 2, "chunk_id": …, "model": …, "tokens": [ids], "kept": whether the server has said so,
     "checksum": 32 digits of the SHA-256 of the JSON of [chunk_id, model, tokens, kept]}

What cannot be read, is of another key or format, or was changed, counts as unknown.
"""

import collections
import contextlib
import copy
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from pion_wire import blocks

Cache = list[Any]
"""What `make_prompt_cache` returns: one cache object per slot."""
Compute = Callable[[bytes], Cache]
"""Makes the cache of packed token ids with the model; nobody else has it."""

FORMAT = 2


class Key(NamedTuple):
    """What a cache depends on besides its tokens."""

    chunk_id: str
    model_id: str
    stub: bytes = b""
    """The tokens in front of a pack, packed; empty for a chunk that begins a prompt."""
    vquant: str = "raw"
    """How its rows are kept."""

    @property
    def model(self) -> str:
        """The model, and how rows are kept if that loses anything."""
        return self.model_id if self.vquant == "raw" else f"{self.model_id}|{self.vquant}"

    @property
    def namespace(self) -> str:
        """A name for it: `chunk_` or `pack_`, and digests of the id, the model and the stub."""
        if self.stub:
            return self.packs + _digest(self.stub, 16)
        return f"chunk_{self._digests}"

    @property
    def packs(self) -> str:
        """What the names of all packs of this chunk begin with, whatever their stub."""
        return f"pack_{self._digests}_"

    def names(self, namespace: str) -> bool:
        """Whether a name is that of this chunk or of one of its packs."""
        return namespace == f"chunk_{self._digests}" or namespace.startswith(self.packs)

    @property
    def _digests(self) -> str:
        chunk = self.chunk_id.encode("utf-8", "surrogatepass")
        return f"{_digest(chunk, 24)}_{_digest(self.model.encode(), 16)}"


class Known(NamedTuple):
    """An entry of the manifest."""

    token_ids: bytes
    """Packed: u32, little-endian; of a pack without its stub."""
    kept: bool
    """Whether the server has them: from then on, what the server says counts."""


class Kept(NamedTuple):
    """What keeping a chunk took."""

    computed: bool
    """Whether the model ran."""
    replaced: bool
    """Whether other tokens had to go."""
    kept: bool
    """Whether it is kept now."""


class Backend(Protocol):
    """Where caches are kept. The cache of a pack has the pack's rows only, without the stub's."""

    def keep(self, key: Key, token_ids: bytes, compute: Compute) -> Kept:
        """Puts a chunk in the place of what the key holds."""

    def cache(self, key: Key, known: Known | None, compute: Compute) -> tuple[Cache, Known]:
        """Returns a cache that is the caller's own, and what is known of the chunk now.

        Raises KeyError if neither the caller nor the backend knows its tokens.
        """

    def has(self, key: Key) -> bool:
        """Whether it knows the tokens of a key that the caller does not know."""

    def evict(self, key: Key) -> bool:
        """Forgets a chunk and all its packs; says whether there was anything."""

    def stats(self) -> dict[str, Any]:
        """What it has to add to the statistics."""

    def close(self) -> None:
        """Ends what it has begun."""


def unknown(key: Key) -> KeyError:
    """Returns the error of a chunk that nobody knows."""
    how = "ingest_pack it behind this stub" if key.stub else "ingest it"
    return KeyError(f"{key.chunk_id!r} is not known for this model: {how} first")


class Held:
    """The backend `inproc`: caches in memory, the least recently used first to go.

    A cache of any class is copied as a whole. That copies no array: MLX copies a buffer that is
    shared before it writes into it.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._held: collections.OrderedDict[str, tuple[bytes, Cache, int]] = (
            collections.OrderedDict()
        )
        self._bytes = self._computed = self._forgotten = 0

    def keep(self, key: Key, token_ids: bytes, compute: Compute) -> Kept:
        """Computes a chunk unless it is held."""
        before = self._tokens(key)
        if before == token_ids:
            return Kept(computed=False, replaced=False, kept=True)
        self._hold(key, token_ids, compute(token_ids))
        return Kept(computed=True, replaced=before is not None, kept=self._tokens(key) is not None)

    def cache(self, key: Key, known: Known | None, compute: Compute) -> tuple[Cache, Known]:
        """Copies what is held, or computes it once more."""
        if known is None:
            raise unknown(key)
        with self._lock:
            token_ids, cache, _ = self._held.get(key.namespace, (b"", [], 0))
            if token_ids == known.token_ids:
                self._held.move_to_end(key.namespace)
        if token_ids != known.token_ids:
            cache = compute(known.token_ids)
            self._hold(key, known.token_ids, cache)
        return copy.deepcopy(cache), known

    def has(self, key: Key) -> bool:
        """Knows no tokens that the manifest does not know."""
        return False

    def evict(self, key: Key) -> bool:
        """Frees it."""
        with self._lock:
            names = [name for name in self._held if key.names(name)]
            for name in names:
                self._bytes -= self._held.pop(name)[2]
        return bool(names)

    def stats(self) -> dict[str, Any]:
        """See `HybridRetrievalCache.stats`."""
        with self._lock:
            return {
                "held": len(self._held),
                "held_bytes": self._bytes,
                "forgotten": self._forgotten,
                "computed": self._computed,
            }

    def close(self) -> None:
        """Frees everything."""
        with self._lock:
            self._held.clear()
            self._bytes = 0

    def _tokens(self, key: Key) -> bytes | None:
        with self._lock:
            held = self._held.get(key.namespace)
        return held[0] if held else None

    def _hold(self, key: Key, token_ids: bytes, cache: Cache) -> None:
        size = size_bytes(cache)
        with self._lock:
            self._computed += 1
            self._bytes -= self._held.pop(key.namespace, (b"", [], 0))[2]
            if size > self._bytes_max:
                self._forgotten += 1
                return
            self._held[key.namespace] = token_ids, cache, size
            self._bytes += size
            while self._bytes > self._bytes_max:
                self._bytes -= self._held.popitem(last=False)[1][2]
                self._forgotten += 1


class Manifest:
    """Which tokens a key has: in memory, or in a directory that processes may share."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._known: dict[str, Known] = {}
        if directory is not None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def __len__(self) -> int:
        if self._directory is None:
            return len(self._known)
        return sum(1 for _ in self._directory.glob("*_*.json"))

    def get(self, key: Key) -> Known | None:
        """Returns what is known of a key."""
        if self._directory is None:
            return self._known.get(key.namespace)
        try:
            entry = json.loads(self._path(key.namespace).read_text("utf-8"))
            if (entry["format"], entry["chunk_id"], entry["model"]) != (FORMAT, *_names(key)):
                return None
            known = Known(blocks.pack_token_ids(entry["tokens"]), entry["kept"])
            return known if entry["checksum"] == _checksum(key, known) else None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def put(self, key: Key, known: Known) -> None:
        """Puts an entry in the place of the former one. Raises OSError."""
        if self._directory is None:
            with self._lock:
                self._known[key.namespace] = known
            return
        chunk_id, model = _names(key)
        entry = {
            "format": FORMAT,
            "chunk_id": chunk_id,
            "model": model,
            "tokens": blocks.unpack_token_ids(known.token_ids),
            "kept": known.kept,
            "checksum": _checksum(key, known),
        }
        _replace(self._path(key.namespace), json.dumps(entry))

    def forget(self, key: Key) -> bool:
        """Forgets a chunk and all its packs; says whether there was anything."""
        if self._directory is None:
            with self._lock:
                names = [name for name in self._known if key.names(name)]
                for name in names:
                    del self._known[name]
            return bool(names)
        found = [path for path in self._directory.glob("*_*.json") if key.names(path.stem)]
        for path in found:
            path.unlink(missing_ok=True)
        return bool(found)

    def _path(self, namespace: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{namespace}.json"


def compact(cache: Cache, first: int = 0) -> Cache:
    """Returns a cache without the rows before `first`, and without room for rows to come.

    Only plain rows are cut; a cache of another class stays as it is.
    """
    compacted = [_compact(slot, first) if type(slot) is KVCache else slot for slot in cache]
    mx.eval([slot.state for slot in compacted])
    return compacted


def _compact(slot: Any, first: int) -> Any:
    if slot.keys is None:
        return slot
    rows: Any = KVCache()  # type: ignore[no-untyped-call]
    rows.keys, rows.values = (
        mx.contiguous(side[..., first : slot.offset, :]) for side in (slot.keys, slot.values)
    )
    rows.offset = slot.offset - first
    return rows


def size_bytes(cache: Cache) -> int:
    """Returns the memory of a cache's arrays."""
    leaves: Any = tree_flatten([slot.state for slot in cache])
    return sum(int(leaf.nbytes) for _, leaf in leaves if isinstance(leaf, mx.array))


def _names(key: Key) -> tuple[str, str]:
    return key.chunk_id, key.model


def _checksum(key: Key, known: Known) -> str:
    entry = [*_names(key), blocks.unpack_token_ids(known.token_ids), known.kept]
    return _digest(json.dumps(entry).encode(), 32)


def _digest(data: bytes, digits: int) -> str:
    return hashlib.sha256(data).hexdigest()[:digits]


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
