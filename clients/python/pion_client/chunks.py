"""What a retrieved chunk is known by, and caches of chunks in the memory of this process.

Knows keys, token ids, files of the manifest and mlx-lm's caches as wholes; no servers. A chunk is known
by its tokens: what the model made of them is kept only as long as there is room, and computed again
from them. So the one decision: a manifest never says that a cache exists, only which tokens an id
has, and every cache is compared with them before it is used.

A manifest on disk is one JSON file per chunk, named as the key is and replaced by renaming::

    {"format": 2, "chunk_id": …, "model": …, "tokens": [ids], "kept": whether the server has said so,
     "checksum": 32 digits of the SHA-256 of the JSON of [chunk_id, model, tokens, kept]}

What cannot be read, is of another key or format, or was changed, counts as unknown. What cannot be
written or taken away (the disk is full, something else is in its place) is remembered in this process
instead, and goes before what is on disk until it has been written: a request does not fail for it.
"""

import collections
import contextlib
import copy
import hashlib
import json
import os
import stat
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
ENTRY_BYTES_MAX = 32 << 20
"""More than a million token ids take in an entry."""


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
    how = "ingest_pack it after this stub" if key.stub else "ingest it"
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
        self._known: dict[str, Known | None] = {}
        """Without a directory, everything; with one, what could not be written. None: forgotten."""
        if directory is not None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def __len__(self) -> int:
        with self._lock:
            names = {name for name, known in self._known.items() if known is not None}
            hidden = set(self._known) - names
        return len(names | ({path.stem for path in self._entries()} - hidden))

    @property
    def unwritten(self) -> int:
        """Entries that should have been written, or taken away, and could not be."""
        return 0 if self._directory is None else len(self._known)

    def get(self, key: Key) -> Known | None:
        """Returns what is known of a key."""
        with self._lock:
            if self._directory is None or key.namespace in self._known:
                return self._known.get(key.namespace)
        try:
            entry = json.loads(_read(self._path(key.namespace)))
            if (entry["format"], entry["chunk_id"], entry["model"]) != (FORMAT, *_names(key)):
                return None
            known = Known(blocks.pack_token_ids(entry["tokens"]), entry["kept"])
            return known if entry["checksum"] == _checksum(key, known) else None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def put(self, key: Key, known: Known) -> None:
        """Puts an entry in the place of the former one."""
        with self._lock:
            self._known[key.namespace] = known
        if self._directory is None:
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
        with contextlib.suppress(OSError):
            _replace(self._path(key.namespace), json.dumps(entry))
            self._written(key.namespace, known)

    def forget(self, key: Key) -> bool:
        """Forgets a chunk and all its packs; says whether there was anything."""
        with self._lock:
            known = {name for name, entry in self._known.items() if entry and key.names(name)}
        there = {path.stem for path in self._entries() if key.names(path.stem)}
        for name in known | there:
            with self._lock:
                self._known[name] = None
            with contextlib.suppress(OSError):
                if self._directory is not None:
                    self._path(name).unlink(missing_ok=True)
                self._written(name, None)
        return bool(known | there)

    def _written(self, name: str, known: Known | None) -> None:
        """What is on disk is right again, unless something else has been noted meanwhile."""
        with self._lock:
            if self._known.get(name) == known:
                self._known.pop(name, None)

    def _entries(self) -> list[Path]:
        """Returns the files that may be entries."""
        if self._directory is None:
            return []
        return [path for path in self._directory.glob("*_*.json") if path.is_file()]

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


def _read(path: Path) -> bytes:
    """Returns the content of a file. Raises OSError if it is not one: a pipe may never have a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > ENTRY_BYTES_MAX:
            raise OSError(f"{path} is not an entry of a manifest")
        return file.read(ENTRY_BYTES_MAX)


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
