"""What is inside mlx-lm's caches: each class taken apart into rows and put together again, exactly.

Knows the attributes of the cache classes of the installed mlx-lm, and neither servers nor names.

The one decision: a class is looked up by exact type in one table, `ADAPTERS`. What is not in it is
refused by name, subclasses included: a cache that is only nearly understood would be stored wrongly,
and nobody would notice before the text goes wrong. A new class is one entry more.

Everything that touches MLX here must be called on the caller's thread: a lazy array can be evaluated
only where it was made, and each thread that runs MLX leaves an operating system thread behind. What
`take` returns is plain NumPy and may go anywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

from pion_wire.layout import DType, Layout, Side, TensorLayout

Cache = list[Any]
"""What `make_prompt_cache` returns: one cache object per slot."""

_DTYPES = {mx.float32: DType.F32, mx.float16: DType.F16, mx.bfloat16: DType.BF16}


class UnsupportedCache(Exception):
    """A cache that cannot be kept exactly; the text names its class and says why."""


class CacheMismatch(Exception):
    """Fetched rows are not what the model's cache holds; the text says where they differ."""


class Rows(NamedTuple):
    """Rows of one slot, each side of shape (kv_heads, tokens, head_dim)."""

    keys: Any
    values: Any


class Adapter(Protocol):
    """How one cache class is kept."""

    def rows(self, cache: Any) -> Rows:
        """Every row that the cache holds, as lazy MLX arrays that later appends do not change.

        Raises UnsupportedCache for contents that are not plain rows.
        """

    def fill(self, cache: Any, rows: Rows, token_count: int) -> None:
        """Puts rows from token 0 on into an empty cache; cannot fail on rows that were checked."""


class _PlainRows:
    """`KVCache`: a buffer (1, kv_heads, capacity, head_dim) per side, and how much of it is used."""

    def rows(self, cache: Any) -> Rows:
        if cache.keys is None:
            raise UnsupportedCache("KVCache: the model left it empty")
        if cache.keys.shape[0] != 1:
            raise UnsupportedCache(f"KVCache: {cache.keys.shape[0]} sequences in one cache")
        # The cache assigns into its array object in place; a slice is another object, whose bits
        # stay (MLX copies a buffer that is shared before it writes into it).
        return Rows(cache.keys[0, :, : cache.offset], cache.values[0, :, : cache.offset])

    def fill(self, cache: Any, rows: Rows, token_count: int) -> None:
        cache.keys, cache.values = rows.keys[None], rows.values[None]
        cache.offset = token_count


ADAPTERS: Mapping[type, Adapter] = {mlx_lm_cache.KVCache: _PlainRows()}
"""The classes that are kept, by exact type."""

_NOT_YET: Mapping[type, str] = {
    mlx_lm_cache.ArraysCache: "recurrent state, exact at one token only",
    mlx_lm_cache.CacheList: "several caches in one slot",
    mlx_lm_cache.ChunkedKVCache: "rows of the last chunk only",
    mlx_lm_cache.QuantizedKVCache: "rows as codes and scales",
    mlx_lm_cache.RotatingKVCache: "a sliding window of rows",
}
"""Known classes that are not kept yet, and what they hold instead of all rows."""


def _adapter(cache: Any) -> Adapter:
    kind = type(cache)
    if kind in ADAPTERS:
        return ADAPTERS[kind]
    why = f"not kept yet: {_NOT_YET[kind]}" if kind in _NOT_YET else "an unknown cache class"
    raise UnsupportedCache(f"{kind.__name__}: {why}")


def require_supported(cache: Cache) -> None:
    """Raises UnsupportedCache for the first slot whose class has no adapter."""
    for slot in cache:
        _adapter(slot)


def expected_layout(model: Any) -> Layout:
    """What the model's cache will hold, found without computing anything.

    The model is called on one token; MLX knows shapes and types before it evaluates, and nothing is.

    Raises UnsupportedCache where the model's cache cannot be kept.
    """
    cache = mlx_lm_cache.make_prompt_cache(model)
    require_supported(cache)
    model(mx.zeros((1, 1), dtype=mx.int32), cache=cache)
    return layout_of(cache)


def layout_of(cache: Cache) -> Layout:
    """What a filled cache holds, slot by slot. Raises UnsupportedCache."""
    tensors = []
    for slot, rows in enumerate(_all_rows(cache)):
        for side, array in zip(Side, rows, strict=True):
            heads, _, head_dim = array.shape
            if array.dtype not in _DTYPES:
                raise UnsupportedCache(f"slot {slot}: rows of {array.dtype} are not stored")
            tensors.append(TensorLayout(slot, side, heads, head_dim, _DTYPES[array.dtype]))
    return Layout(tuple(tensors))


def held(cache: Cache) -> list[Rows]:
    """The rows of every slot as evaluated MLX arrays over the cache's own memory.

    Nothing is copied, and nothing that is appended to the cache afterwards shows in them.

    Raises UnsupportedCache.
    """
    rows = _all_rows(cache)
    mx.eval(rows)
    return rows


def take(cache: Cache) -> list[Rows]:
    """The rows of every slot as read-only NumPy arrays over the cache's own memory.

    Nothing is copied, and nothing that is appended to the cache afterwards shows in them.

    Raises UnsupportedCache.
    """
    lazy = _all_rows(cache)
    # NumPy has no bfloat16: its bits travel as uint16 and get their name back on the other side.
    bits = [[_as_bits(side) for side in rows] for rows in lazy]
    mx.eval(bits)
    return [
        Rows(*(_as_numpy(array, side.dtype) for array, side in zip(pair, rows, strict=True)))
        for pair, rows in zip(bits, lazy, strict=True)
    ]


def install(cache: Cache, layers: Sequence[tuple[Any, Any]], layout: Layout, tokens: int) -> None:
    """Fills an empty cache with fetched rows, whole or not at all.

    Args:
        cache: what `make_prompt_cache` returned.
        layers: MLX arrays (kv_heads, tokens, head_dim) of keys and values, one pair per slot.
        layout: what the model's cache holds (`expected_layout`).
        tokens: how many rows every array must have.

    Raises:
        CacheMismatch: number, shape or type of the arrays is not the model's. The cache is
            still empty.
        UnsupportedCache: a slot has no adapter. The cache is still empty.
    """
    adapters = [_adapter(slot) for slot in cache]
    if len(layers) != len(cache):
        raise CacheMismatch(f"{len(layers)} slots were fetched, the model has {len(cache)}")
    expected = {(t.slot, t.side): t for t in layout.tensors}
    for slot, (mine, rows) in enumerate(zip(cache, layers, strict=True)):
        if not mine.empty():
            raise CacheMismatch(f"slot {slot}: the cache is not empty")
        for side, array in zip(Side, rows, strict=True):
            _check(expected[slot, side], array, tokens)
    for adapter, mine, rows in zip(adapters, cache, layers, strict=True):
        adapter.fill(mine, Rows(*rows), tokens)
    # Views only: evaluated here, they can be used on any thread.
    mx.eval([slot.state for slot in cache])


def _check(expected: TensorLayout, array: mx.array, tokens: int) -> None:
    shape = (expected.heads, tokens, expected.head_dim)
    if tuple(array.shape) != shape:
        raise CacheMismatch(f"{expected.name}: fetched {tuple(array.shape)}, needed {shape}")
    if _DTYPES.get(array.dtype) is not expected.dtype:
        raise CacheMismatch(
            f"{expected.name}: fetched {array.dtype}, needed {expected.dtype.value}"
        )


def _all_rows(cache: Cache) -> list[Rows]:
    return [_adapter(slot).rows(slot) for slot in cache]


def _as_bits(array: mx.array) -> mx.array:
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


def _as_numpy(bits: mx.array, dtype: mx.Dtype) -> np.ndarray:
    array = np.asarray(bits)
    if dtype == mx.bfloat16:
        array = array.view(ml_dtypes.bfloat16)
    array.flags.writeable = False
    return array
