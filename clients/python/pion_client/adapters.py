"""One adapter per cache class of mlx-lm: taken apart exactly, and put together again.

Knows the attributes of mlx-lm's cache classes, of the installed version and of earlier ones (in 0.32
`meta_state` became a part of `state`; the attributes stayed); neither models, servers nor bytes.

The one decision: a class is looked up by exact type in one table, `ADAPTERS`. What is not in it is
refused by name, subclasses included: a cache that is only nearly understood would be stored wrongly,
and nobody would notice before the text goes wrong. A new class is one entry more.

There are two kinds of caches. Where every row from token 0 on still exists (`PlainRows`), any
beginning of a prefix can be served from them. All others (`PartAdapter`) are kept as what they are at
one token, and serve that boundary only: recurrent state, a window that has moved, a chunk.

Nothing here evaluates or copies: what is returned are lazy MLX arrays of their own, over the cache's
memory. A cache assigns into its array *objects* in place, so each array is sliced or made contiguous
first: that is another object, whose bits stay, because MLX copies a buffer that is shared before it
writes into it.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from pion_client.values import Encoded


class UnsupportedCache(Exception):
    """A cache that cannot be kept exactly; the text names its class and says why."""


class CacheMismatch(Exception):
    """What was fetched is not what the model's cache holds; the text says where they differ."""


class PartMismatch(CacheMismatch):
    """It is a part that is broken, or not what the model's cache holds there."""


class Rows(NamedTuple):
    """Rows of one slot: each side an array (kv_heads, tokens, head_dim), or codes (`Encoded`)."""

    keys: Any
    values: Any

    @property
    def nbytes(self) -> int:
        """What they keep in memory."""
        return sum(array.nbytes for side in self for array in arrays_of(side))

    def after(self, base: int) -> "Rows":
        """Returns the rows from `base` on."""
        return Rows(*(with_arrays(side, [a[:, base:] for a in arrays_of(side)]) for side in self))

    def up_to(self, end: int) -> "Rows":
        """Returns the rows before `end`."""
        return Rows(*(with_arrays(side, [a[:, :end] for a in arrays_of(side)]) for side in self))


def arrays_of(side: Any) -> tuple[Any, ...]:
    """Returns the arrays that a side of rows consists of, each (kv_heads, tokens, …)."""
    return side.arrays if isinstance(side, Encoded) else (side,)


def with_arrays(side: Any, arrays: Sequence[Any]) -> Any:
    """Returns a side like another one, of other arrays."""
    if isinstance(side, Encoded):
        return dataclasses.replace(side, arrays=tuple(arrays))
    (array,) = arrays
    return array


class Contents(NamedTuple):
    """Everything in a cache that is exact at one token only."""

    numbers: Mapping[str, int]
    """Its attributes that are integers, such as an offset."""
    arrays: tuple[mx.array | None, ...]
    """Its arrays in a fixed order; None where the model has put none."""


class PartAdapter(Protocol):
    """How a cache class is kept that is exact at one token only."""

    kind: str
    """The kind of its parts, as `Match` and `Fetch` name them."""
    class_name: str
    """What its class is called in parts, whatever it is called in this version of mlx-lm."""
    token_axis: int | None
    """Which axis of its arrays grows with the tokens; of arrays of ids it is always the last."""
    numbers: tuple[str, ...]
    """The names of its numbers."""

    def is_empty(self, cache: Any) -> bool:
        """Whether it holds nothing."""

    def contents(self, cache: Any) -> Contents | None:
        """Everything it holds; None if it is empty. Raises UnsupportedCache."""

    def check(self, cache: Any, contents: Contents, token_count: int) -> None:
        """Raises PartMismatch unless `fill` makes of this empty cache what the contents came from.

        Contents have the numbers and arrays of this class, with the right types and, but for how
        many rows there are, shapes.
        """

    def back(self, numbers: Mapping[str, int], token_count: int) -> Mapping[str, int] | None:
        """Returns the numbers of the same contents after fewer tokens, as `trim` would leave them.

        None where that cannot be told: what came before is not there any more.
        """

    def fill(self, cache: Any, contents: Contents) -> None:
        """Puts contents that were checked into an empty cache; cannot fail."""


class _Buffers:
    """Caches with an attribute each for keys and values, None until the first update."""

    def is_empty(self, cache: Any) -> bool:
        return cache.keys is None and not cache.offset


class PlainRows(_Buffers):
    """`KVCache`: a buffer (1, kv_heads, capacity, head_dim) per side, and how much of it is used."""

    def rows(self, cache: Any) -> Rows | None:
        """Every row that the cache holds; None if it is empty.

        Raises UnsupportedCache for contents that are not plain rows.
        """
        if cache.keys is None:
            return None
        _one_sequence(cache, cache.keys)
        return Rows(cache.keys[0, :, : cache.offset], cache.values[0, :, : cache.offset])

    def fill(self, cache: Any, rows: Rows, token_count: int) -> None:
        """Puts rows from token 0 on into an empty cache; cannot fail on rows that were checked."""
        cache.keys, cache.values = rows.keys[None], rows.values[None]
        cache.offset = token_count


class _ConcatenatedRows(PlainRows):
    """`ConcatenateKVCache`: all rows, always; its `trim` moves the offset and keeps the rows."""

    def rows(self, cache: Any) -> Rows | None:
        if cache.keys is not None and cache.offset != cache.keys.shape[2]:
            raise UnsupportedCache(
                f"{type(cache).__name__}: trimmed to {cache.offset} tokens, it still has "
                f"{cache.keys.shape[2]} rows"
            )
        return super().rows(cache)


class _Codes(PlainRows):
    """`QuantizedKVCache`: codes, scales and biases of each side; each row is quantised by itself."""

    def rows(self, cache: Any) -> Rows | None:
        if cache.keys is None:
            return None
        _one_sequence(cache, cache.keys[0])
        return Rows(*(self._side(cache, side) for side in (cache.keys, cache.values)))

    def _side(self, cache: Any, side: Sequence[mx.array]) -> Encoded:
        used = (array[0, :, : cache.offset] for array in side)
        try:
            return Encoded.quantized(*used, group=cache.group_size, bits=cache.bits)
        except ValueError as error:
            raise UnsupportedCache(f"{type(cache).__name__}: {error}") from error

    def fill(self, cache: Any, rows: Rows, token_count: int) -> None:
        cache.keys = tuple(array[None] for array in rows.keys.arrays)
        cache.values = tuple(array[None] for array in rows.values.arrays)
        cache.offset = token_count


class _Ring(_Buffers):
    """`RotatingKVCache`: the first `keep` rows and the last of a window, in the order of writing.

    Before it wraps, what is not used of its buffer is left out. After a prefill it has more rows than
    its window, which its next update cuts off before anything else: they are left out as well.
    """

    kind, class_name, token_axis = "ring", "RotatingKVCache", 2
    numbers = ("offset", "keep", "max_size", "index")

    def contents(self, cache: Any) -> Contents | None:
        if cache.keys is None:
            return None
        _one_sequence(cache, cache.keys)
        numbers = {name: int(getattr(cache, name)) for name in self.numbers[:3]}
        sides: tuple[mx.array, ...] = (cache.keys, cache.values)
        index, capacity = int(cache._idx), cache.keys.shape[2]
        if index == cache.offset:  # it has not wrapped
            sides = tuple(side[..., :index, :] for side in sides)
        if index == capacity > cache.max_size:
            dropped, keep = capacity - cache.max_size, cache.keep
            sides = tuple(_without(side, keep, keep + dropped) for side in sides)
            index = int(cache.max_size)
        found = Contents({**numbers, "index": index}, tuple(mx.contiguous(side) for side in sides))
        if not self._is_possible(found):
            raise UnsupportedCache(f"{type(cache).__name__}: {_said(found)}")
        return found

    def check(self, cache: Any, contents: Contents, token_count: int) -> None:
        numbers = contents.numbers
        _same_numbers(cache, numbers, "keep", "max_size")
        _same_offset(numbers, token_count)
        if not self._is_possible(contents):
            raise PartMismatch(_said(contents))

    def _is_possible(self, contents: Contents) -> bool:
        """Whether updates lead to it: rows in order as far as the window, then round and round."""
        offset, keep, size, index = (contents.numbers[name] for name in self.numbers)
        rows = _row_count(contents)
        if offset <= size:
            return rows == index == offset
        return rows == size and keep < index <= size

    def back(self, numbers: Mapping[str, int], token_count: int) -> Mapping[str, int] | None:
        wrapped = numbers["index"] != numbers["offset"] or numbers["offset"] > numbers["max_size"]
        return None if wrapped else {**numbers, "offset": token_count, "index": token_count}

    def fill(self, cache: Any, contents: Contents) -> None:
        cache.keys, cache.values = contents.arrays
        cache.offset, cache._idx = contents.numbers["offset"], contents.numbers["index"]


class _Chunk(_Buffers):
    """`ChunkedKVCache`: the rows from `start_position` on; the model cuts off those before.

    What is not used of its buffer is left out, as mlx-lm does when it saves one. Before 0.32 it cuts by
    the size of the buffer, and may cut off rows that the chunk needs: such a cache is refused, as is
    one trimmed into its chunk.
    """

    kind, class_name, token_axis = "chunk", "ChunkedKVCache", 2
    numbers = ("offset", "chunk_size", "start_position")

    def contents(self, cache: Any) -> Contents | None:
        if cache.keys is None:
            return None
        _one_sequence(cache, cache.keys)
        numbers = {name: int(getattr(cache, name)) for name in self.numbers}
        used = numbers["offset"] - numbers["start_position"]
        sides = (side[..., :used, :] for side in (cache.keys, cache.values))
        found = Contents(numbers, tuple(mx.contiguous(side) for side in sides))
        if not self._is_possible(found):
            raise UnsupportedCache(f"{type(cache).__name__}: {_said(found)}")
        return found

    def check(self, cache: Any, contents: Contents, token_count: int) -> None:
        numbers = contents.numbers
        _same_numbers(cache, numbers, "chunk_size")
        _same_offset(numbers, token_count)
        if not self._is_possible(contents):
            raise PartMismatch(_said(contents))

    def _is_possible(self, contents: Contents) -> bool:
        """Whether updates lead to it: nothing of the last chunk was cut off."""
        offset, size, start = (contents.numbers[name] for name in self.numbers)
        return start >= 0 and _row_count(contents) == offset - start >= min(offset, size)

    def back(self, numbers: Mapping[str, int], token_count: int) -> Mapping[str, int] | None:
        return None if numbers["start_position"] else {**numbers, "offset": token_count}

    def fill(self, cache: Any, contents: Contents) -> None:
        cache.keys, cache.values = contents.arrays
        cache.offset = contents.numbers["offset"]
        cache.start_position = contents.numbers["start_position"]


class _State:
    """`ArraysCache` (`MambaCache` before 0.31): recurrent state, whatever the model puts there.

    Integers are the ids of the last tokens, which are fewer as long as there are not as many.
    """

    kind, class_name, token_axis = "state", "ArraysCache", None
    numbers = ()

    def is_empty(self, cache: Any) -> bool:
        return all(array is None for array in cache.cache)

    def contents(self, cache: Any) -> Contents | None:
        if any(getattr(cache, name, None) is not None for name in ("left_padding", "lengths")):
            raise UnsupportedCache(f"{type(cache).__name__}: padded, as for several sequences")
        arrays = tuple(cache.cache)
        for array in arrays:
            if array is not None:
                _one_sequence(cache, array)
        if self.is_empty(cache):
            return None
        return Contents({}, tuple(a if a is None else mx.contiguous(a) for a in arrays))

    def check(self, cache: Any, contents: Contents, token_count: int) -> None:
        pass

    def back(self, numbers: Mapping[str, int], token_count: int) -> Mapping[str, int] | None:
        return None

    def fill(self, cache: Any, contents: Contents) -> None:
        cache.cache = list(contents.arrays)


class _Layer:
    """`deepseek_v41.LayerCache`: the last rows of a window, and what the model made of all of them.

    Groups of tokens are compressed into one row each; the rows of a group that is not full wait for the
    others. Its arrays are (1, rows, …), and there is none before its first row.
    """

    kind, class_name, token_axis = "layer", "LayerCache", 1
    numbers = ("offset", "window_size")
    _names = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")

    def is_empty(self, cache: Any) -> bool:
        return not cache.offset

    def contents(self, cache: Any) -> Contents | None:
        if self.is_empty(cache):
            return None
        arrays = tuple(getattr(cache, name) for name in self._names)
        _one_sequence(cache, cache.window)
        numbers = {name: int(getattr(cache, name)) for name in self.numbers}
        return Contents(numbers, tuple(a if a is None else mx.contiguous(a) for a in arrays))

    def check(self, cache: Any, contents: Contents, token_count: int) -> None:
        _same_numbers(cache, contents.numbers, "window_size")
        _same_offset(contents.numbers, token_count)
        window = contents.arrays[0]
        rows = 0 if window is None else window.shape[1]
        if rows != min(token_count, contents.numbers["window_size"]):
            raise PartMismatch(f"a window of {rows} rows after {token_count} tokens")

    def back(self, numbers: Mapping[str, int], token_count: int) -> Mapping[str, int] | None:
        return None

    def fill(self, cache: Any, contents: Contents) -> None:
        for name, array in zip(self._names, contents.arrays, strict=True):
            setattr(cache, name, array)
        cache.offset = contents.numbers["offset"]


def _known(adapters: Mapping[str, Any]) -> dict[type, Any]:
    """Returns the classes of these names that the installed mlx-lm has."""
    found = {}
    for name, adapter in adapters.items():
        module, _, class_name = name.rpartition(".")
        with contextlib.suppress(ModuleNotFoundError):
            home = importlib.import_module(f"mlx_lm.models.{module}") if module else mlx_lm_cache
            if hasattr(home, class_name):
                found[getattr(home, class_name)] = adapter
    return found


ADAPTERS: Mapping[type, PlainRows | PartAdapter] = _known(
    {
        "KVCache": PlainRows(),
        "ConcatenateKVCache": _ConcatenatedRows(),
        "RotatingKVCache": _Ring(),
        "ChunkedKVCache": _Chunk(),
        "QuantizedKVCache": _Codes(),
        "ArraysCache": _State(),
        "MambaCache": _State(),
        "deepseek_v41.LayerCache": _Layer(),
    }
)
"""The classes that are kept, by exact type. A `CacheList` is taken for the caches in it."""

PARTS: Mapping[str, PartAdapter] = {
    adapter.kind: adapter for adapter in ADAPTERS.values() if not isinstance(adapter, PlainRows)
}
"""The classes that are kept as parts, by kind."""

_REFUSED: Mapping[type, str] = _known(
    {
        "BatchKVCache": "several sequences in one cache; take each with `extract`",
        "BatchRotatingKVCache": "several sequences in one cache; take each with `extract`",
    }
)


def adapter_of(cache: Any) -> PlainRows | PartAdapter:
    """Returns how a cache is kept.

    Raises:
        UnsupportedCache: it is not.
    """
    kind = type(cache)
    if kind in ADAPTERS:
        return ADAPTERS[kind]
    raise UnsupportedCache(f"{kind.__name__}: {_REFUSED.get(kind, 'an unknown cache class')}")


def slots_of(cache: list[Any]) -> list[Any]:
    """Returns the caches of all slots, every `CacheList` flattened, in order.

    Raises:
        UnsupportedCache: one has a class that is not kept.
    """
    slots = []
    for entry in cache:
        if type(entry) is mlx_lm_cache.CacheList:
            slots += slots_of(list(entry.caches))
        else:
            adapter_of(entry)
            slots.append(entry)
    return slots


def _one_sequence(cache: Any, array: mx.array) -> None:
    if array.ndim and array.shape[0] != 1:
        raise UnsupportedCache(f"{type(cache).__name__}: {array.shape[0]} sequences in one cache")


def _without(side: mx.array, begin: int, end: int) -> mx.array:
    """Returns a side of a ring without these rows."""
    if not begin:
        return side[..., end:, :]
    return mx.concatenate([side[..., :begin, :], side[..., end:, :]], axis=2)


def _same_numbers(cache: Any, numbers: Mapping[str, int], *names: str) -> None:
    for name in names:
        if numbers[name] != getattr(cache, name):
            raise PartMismatch(
                f"{name} {numbers[name]} was fetched, the model's is {getattr(cache, name)}"
            )


def _same_offset(numbers: Mapping[str, int], token_count: int) -> None:
    if numbers["offset"] != token_count:
        raise PartMismatch(f"it is that of {numbers['offset']} tokens, not {token_count}")


def _said(contents: Contents) -> str:
    numbers = ", ".join(f"{name} {number}" for name, number in contents.numbers.items())
    return f"{_row_count(contents)} rows cannot have {numbers}"


def _row_count(contents: Contents) -> int:
    """How many rows all arrays of contents have, -1 if not all have as many."""
    counts = {a.shape[2] if a is not None and a.ndim == 4 else -1 for a in contents.arrays}
    return counts.pop() if len(counts) == 1 else -1
