"""mlx-lm's prompt caches, whole: taken apart into rows and parts, and filled with what was fetched.

Knows what a cache consists of (through `adapters` and `parts`); neither models' names nor servers.

The one decision: a cache is filled whole or not at all. Everything that was fetched is held against
what this model's cache is known to hold, every array of every slot, before the first slot is touched.

Slots are numbered with every `CacheList` flattened, in order. A slot whose rows all exist has two
tensors in the layout; any other has a part at each boundary that was kept; one that the model leaves
empty has neither, and stays empty.

Everything that touches MLX here must be called on the caller's thread: a lazy array can be evaluated
only where it was made, and each thread that runs MLX leaves an operating system thread behind. What
`take` and `take_parts` return is plain NumPy and may go anywhere.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from pion_client.adapters import (
    PARTS,
    CacheMismatch,
    Contents,
    PartAdapter,
    PartMismatch,
    PlainRows,
    Rows,
    UnsupportedCache,
    adapter_of,
    arrays_of,
    slots_of,
    with_arrays,
)
from pion_client.parts import Taken, bits_of, contents_of, describe, described, read_only
from pion_client.values import Encoded, Part
from pion_wire.layout import (
    DType,
    Layout,
    LayoutError,
    PartInfo,
    Side,
    TensorLayout,
    tensor_layout,
)

__all__ = [
    "Cache",
    "CacheMismatch",
    "Expected",
    "Need",
    "PartMismatch",
    "Rows",
    "UnsupportedCache",
    "expected",
    "expected_layout",
    "expected_of",
    "held",
    "install",
    "layout_of",
    "require_rows",
    "require_supported",
    "settle",
    "take",
    "take_parts",
]

Cache = list[Any]
"""What `make_prompt_cache` returns: one cache object per slot, or a `CacheList` of several."""

_DTYPES = {mx.float32: DType.F32, mx.float16: DType.F16, mx.bfloat16: DType.BF16}

Shapes = tuple[tuple[mx.Dtype, tuple[int, ...]] | None, ...]
"""Type and shape of each array; None where the model has put none."""
Array = tuple[str, tuple[int, ...]]
"""Type and shape of an array; 0 where the shape says how many rows there are."""


class Need(NamedTuple):
    """A part that a model's cache consists of, at every boundary that is kept."""

    kind: str
    slot: int
    class_name: str
    arrays: tuple[Array | None, ...]
    """None where the model has put none yet."""

    def covers(self, other: "Need") -> bool:
        """Whether this is what another cache of the model holds, to which more arrays may have come."""
        return (self[:3], len(self.arrays)) == (other[:3], len(other.arrays)) and all(
            mine in (None, theirs) for mine, theirs in zip(self.arrays, other.arrays, strict=True)
        )


class Expected(NamedTuple):
    """What a model's cache holds after any number of tokens."""

    layout: Layout
    """The rows."""
    needs: tuple[Need, ...] = ()
    """What is there beside rows, by slot."""

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots that have rows."""
        return tuple(sorted({tensor.slot for tensor in self.layout.tensors}))

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codecs that the cache itself keeps rows in: what is fetched is not decoded."""
        return tuple(sorted({tensor.codec for tensor in self.layout.tensors} - {"raw"}))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of parts that are needed."""
        return tuple(sorted({need.kind for need in self.needs}))

    def covers(self, other: "Expected") -> bool:
        """Whether this is what another cache of the model holds."""
        return (self.layout, len(self.needs)) == (other.layout, len(other.needs)) and all(
            mine.covers(theirs) for mine, theirs in zip(self.needs, other.needs, strict=True)
        )

    def missing(self, parts: Iterable[PartInfo], boundary_tokens: int) -> Need | None:
        """Returns the first part that is needed at a boundary and not there."""
        there = {(p.kind, p.slot) for p in parts if p.boundary_tokens == boundary_tokens}
        return next((need for need in self.needs if (need.kind, need.slot) not in there), None)

    def later(self, parts: Sequence[PartInfo], tokens: int) -> int:
        """Returns the first boundary after this many tokens whose parts can be brought back to them.

        A ring that has not wrapped still has every row; recurrent state never has what it was. 0 if
        there is no such boundary.
        """
        for boundary in sorted({p.boundary_tokens for p in parts if p.boundary_tokens > tokens}):
            there = [part for part in parts if part.boundary_tokens == boundary]
            if not self.missing(there, boundary) and all(_goes_back(p, tokens) for p in there):
                return boundary
        return 0


def _goes_back(part: PartInfo, tokens: int) -> bool:
    adapter = PARTS.get(part.kind)
    try:
        numbers = described(part.description).numbers
    except PartMismatch:
        return False
    if adapter is None or set(numbers) != set(adapter.numbers):
        return False
    return adapter.back(numbers, tokens) is not None


def require_supported(cache: Cache) -> None:
    """Raises UnsupportedCache for the first slot whose class has no adapter."""
    slots_of(cache)


def require_rows(cache: Cache) -> None:
    """Raises UnsupportedCache for the first slot that is not a plain cache of rows."""
    for entry in cache:
        if type(entry) is not mlx_lm_cache.KVCache:
            require_supported([entry])
            raise UnsupportedCache(f"{type(entry).__name__}: not a plain cache of rows")


def expected(
    model: Any, make_cache: Callable[[Any], Cache] = mlx_lm_cache.make_prompt_cache
) -> Expected:
    """What the model's cache will hold, found without computing anything.

    The model is called on one token; MLX knows shapes and types before it evaluates, and nothing is.

    Raises UnsupportedCache where the model's cache cannot be kept.
    """
    cache = make_cache(model)
    require_supported(cache)
    model(mx.zeros((1, 1), dtype=mx.int32), cache=cache)
    return expected_of(cache)


def expected_layout(model: Any) -> Layout:
    """The rows that the model's cache will hold; raises as `expected` does."""
    return expected(model).layout


def expected_of(cache: Cache) -> Expected:
    """What a filled cache holds, slot by slot. Raises UnsupportedCache."""
    needs = tuple(
        Need(adapter.kind, slot, adapter.class_name, _arrays(adapter, _shapes(contents)))
        for slot, adapter, contents in _contents(cache)
    )
    found = Expected(layout_of(cache), needs)
    if not found.layout.tensors and not needs:
        raise UnsupportedCache("the model left every slot empty")
    return found


def layout_of(cache: Cache) -> Layout:
    """The rows that a filled cache holds, slot by slot. Raises UnsupportedCache."""
    tensors = []
    for slot, rows in _rows(cache):
        try:
            tensors += [_tensor(slot, side, array) for side, array in zip(Side, rows, strict=True)]
        except LayoutError as error:
            raise UnsupportedCache(f"slot {slot}: {error}") from error
    return Layout(tuple(tensors))


def _tensor(slot: int, side: Side, rows: Any) -> TensorLayout:
    if isinstance(rows, Encoded):
        return rows.tensor(slot, side)
    heads, _, head_dim = rows.shape
    if rows.dtype not in _DTYPES:
        raise UnsupportedCache(f"slot {slot}: rows of {rows.dtype} are not stored")
    return tensor_layout(slot, side, heads, head_dim, _DTYPES[rows.dtype])


def held(cache: Cache) -> list[Rows]:
    """The rows of every slot that has some as evaluated MLX arrays over the cache's own memory.

    Nothing is copied, and nothing that is appended to the cache afterwards shows in them.

    Raises UnsupportedCache.
    """
    rows = [rows for _, rows in _rows(cache)]
    mx.eval([arrays_of(side) for pair in rows for side in pair])
    return rows


def take(cache: Cache) -> list[Rows]:
    """The rows of every slot that has some as read-only NumPy arrays over the cache's own memory.

    Nothing is copied, and nothing that is appended to the cache afterwards shows in them.

    Raises UnsupportedCache.
    """
    lazy = [rows for _, rows in _rows(cache)]
    bits = [[[bits_of(array) for array in arrays_of(side)] for side in rows] for rows in lazy]
    mx.eval(bits)
    return [
        Rows(*(_as_numpy(side, arrays) for side, arrays in zip(rows, pair, strict=True)))
        for rows, pair in zip(lazy, bits, strict=True)
    ]


def take_parts(cache: Cache, boundary_tokens: int) -> list[Taken]:
    """Everything in a cache except rows, as it is now, after this many tokens.

    Only what does not lie row-major in memory is copied; later updates of the cache do not show.

    Raises UnsupportedCache.
    """
    found = list(_contents(cache))
    bits = [[bits_of(a) for a in contents.arrays if a is not None] for _, _, contents in found]
    mx.eval(bits)
    return [
        Taken(
            adapter.kind,
            slot,
            boundary_tokens,
            describe(adapter.class_name, contents),
            [read_only(array) for array in arrays],
        )
        for (slot, adapter, contents), arrays in zip(found, bits, strict=True)
    ]


def install(
    cache: Cache,
    layers: Sequence[tuple[Any, Any]],
    layout: Layout,
    tokens: int,
    *,
    parts: Sequence[Part] = (),
    needs: Sequence[Need] = (),
) -> None:
    """Fills an empty cache with what was fetched, whole or not at all.

    Args:
        cache: what `make_prompt_cache` returned.
        layers: MLX arrays (kv_heads, tokens, head_dim) of keys and values, or codes, one pair per
            slot that has rows.
        layout: the rows that the model's cache holds (`expected`).
        tokens: how many rows every array must have.
        parts: at least those that are needed, all at one boundary: at `tokens`, or at a later one
            from which they can be brought back (`Expected.later`).
        needs: what the model's cache holds beside rows (`expected`).

    Raises:
        CacheMismatch: number, shape or type of something is not the model's, or a part is missing;
            if it is a part, PartMismatch. The cache is still empty.
        UnsupportedCache: a slot has no adapter. The cache is still empty.
    """
    slots = slots_of(cache)
    for slot, mine in enumerate(slots):
        if not adapter_of(mine).is_empty(mine):
            raise CacheMismatch(f"slot {slot}: the cache is not empty")
    fill = _checked_rows(slots, layers, layout, tokens) + _checked_parts(
        slots, parts, needs, tokens
    )
    for put in fill:
        put()
    # Views and copies only: evaluated here, they can be used on any thread.
    settle(cache)


def settle(cache: Sequence[Any]) -> None:
    """Evaluates everything in a cache, of classes that are kept and of others."""
    mx.eval([slot.state for slot in _singles(cache) if not slot.empty()])


def _singles(cache: Sequence[Any]) -> Iterator[Any]:
    for entry in cache:
        yield from _singles(entry.caches) if type(entry) is mlx_lm_cache.CacheList else (entry,)


def _checked_rows(
    slots: list[Any], layers: Sequence[tuple[Any, Any]], layout: Layout, tokens: int
) -> list[Callable[[], None]]:
    known = Expected(layout)
    if len(layers) != len(known.slots):
        raise CacheMismatch(f"{len(layers)} slots were fetched, the model has {len(known.slots)}")
    tensors = {(tensor.slot, tensor.side): tensor for tensor in layout.tensors}
    fill: list[Callable[[], None]] = []
    for slot, rows in zip(known.slots, layers, strict=True):
        adapter = adapter_of(slots[slot]) if slot < len(slots) else None
        if not isinstance(adapter, PlainRows):
            raise CacheMismatch(f"slot {slot} of this model has no rows")
        for side, array in zip(Side, rows, strict=True):
            _check(tensors[slot, side], array, tokens)
        fill.append(functools.partial(adapter.fill, slots[slot], Rows(*rows), tokens))
    return fill


def _checked_parts(
    slots: list[Any], parts: Sequence[Part], needs: Sequence[Need], tokens: int
) -> list[Callable[[], None]]:
    there = {(part.kind, part.slot): part for part in parts}
    if len({part.boundary_tokens for part in parts}) > 1:
        raise PartMismatch("the parts are of several boundaries")
    fill: list[Callable[[], None]] = []
    for need in needs:
        part = there.get((need.kind, need.slot))
        if part is None:
            raise PartMismatch(
                f"slot {need.slot}: its {need.kind} after {tokens} tokens is missing"
            )
        adapter = adapter_of(slots[need.slot])
        found = described(part.description)
        if isinstance(adapter, PlainRows) or (adapter.kind, found.class_name) != (
            need.kind,
            need.class_name,
        ):
            raise PartMismatch(f"slot {need.slot}: a {need.class_name} is needed there")
        if not need.covers(need._replace(arrays=_arrays(adapter, found.arrays))):
            raise PartMismatch(f"slot {need.slot}: the arrays of its {need.kind} are others")
        if set(found.numbers) != set(adapter.numbers):
            raise PartMismatch(f"slot {need.slot}: the numbers of its {need.kind} are others")
        contents = contents_of(part.data, found)
        adapter.check(slots[need.slot], contents, part.boundary_tokens)
        if part.boundary_tokens != tokens:
            numbers = (
                adapter.back(contents.numbers, tokens) if tokens < part.boundary_tokens else None
            )
            if numbers is None:
                raise PartMismatch(
                    f"slot {need.slot}: its {need.kind} is that of {part.boundary_tokens} tokens"
                )
            contents = contents._replace(numbers=numbers)
        fill.append(functools.partial(adapter.fill, slots[need.slot], contents))
    return fill


def _check(expected: TensorLayout, rows: Any, tokens: int) -> None:
    arrays = arrays_of(rows)
    if any(array.ndim != 3 or array.shape[1] != tokens for array in arrays):
        shapes = [tuple(array.shape) for array in arrays]
        raise CacheMismatch(f"{expected.name}: fetched {shapes}, needed {tokens} rows")
    try:
        found = _tensor(expected.slot, expected.side, rows)
    except (UnsupportedCache, LayoutError) as error:
        raise CacheMismatch(f"{expected.name}: {error}") from error
    if found != expected or any(array.shape[0] != expected.heads for array in arrays):
        raise CacheMismatch(f"fetched {found}, needed {expected}")


def _rows(cache: Cache) -> Iterator[tuple[int, Rows]]:
    """Yields the slots that have rows."""
    for slot, mine in enumerate(slots_of(cache)):
        adapter = adapter_of(mine)
        rows = adapter.rows(mine) if isinstance(adapter, PlainRows) else None
        if rows is not None:
            yield slot, rows


def _contents(cache: Cache) -> Iterator[tuple[int, PartAdapter, Contents]]:
    """Yields the slots that hold anything but rows."""
    for slot, mine in enumerate(slots_of(cache)):
        adapter = adapter_of(mine)
        if not isinstance(adapter, PlainRows):
            contents = adapter.contents(mine)
            if contents is not None:
                yield slot, adapter, contents


def _shapes(contents: Contents) -> Shapes:
    return tuple(None if a is None else (a.dtype, tuple(a.shape)) for a in contents.arrays)


def _arrays(adapter: PartAdapter, shapes: Shapes) -> tuple[Array | None, ...]:
    """Returns types and shapes without the number of rows, or of ids."""
    found: list[Array | None] = []
    for one in shapes:
        if one is None:
            found.append(None)
            continue
        dtype, shape = one[0], list(one[1])
        axis = adapter.token_axis if mx.issubdtype(dtype, mx.floating) else len(shape) - 1
        if axis is not None and 0 <= axis < len(shape):
            shape[axis] = 0
        found.append((str(dtype), tuple(shape)))
    return tuple(found)


def _as_numpy(side: Any, bits: Sequence[mx.array]) -> Any:
    arrays = []
    for array, seen in zip(arrays_of(side), bits, strict=True):
        numpy = read_only(seen)
        arrays.append(numpy.view(ml_dtypes.bfloat16) if array.dtype == mx.bfloat16 else numpy)
    return with_arrays(side, arrays)
