"""What a query will read, as plain numbers: heads, spans, masks, and whether float32 is enough.

Shared by the fast backends; knows NumPy and no compute device. The decision to understand: values
that float32 scores could not hold are found *before* computing, from the magnitudes of K, V and q,
and go to the reference. The kernels behind this are then plain, and never make inf or NaN of finite
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pion_grpc.backends.base import Array, Dtype, Query, Resident, Sparse, SparseAuto
from pion_grpc.backends.blocks import Summaries, choose
from pion_grpc.backends.query import QueryError

F16_MAX = 65504.0
F32_SAFE = 1e38  # a third of float32's largest number: room for rounding


class Group(NamedTuple):
    """K/V heads that are computed in one call, and the query heads that read them.

    Every K/V head of a group is read by equally many of its query heads, in order.
    """

    kv: slice
    heads: slice | Array


class Span(NamedTuple):
    """Prefix positions ``start`` ≤ position < ``stop``."""

    start: int
    stop: int


def hold(a: Array, dtype: Dtype, field: str) -> Array:
    """``a`` as a contiguous, read-only array of ``dtype``, without a copy where it is one already."""
    assert a.ndim == 3
    assert a.size > 0
    check_range(a, dtype, field)
    held = np.require(a, np.float16 if dtype == "f16" else np.float32, ["C", "A"]).view()
    held.flags.writeable = False
    return held


def check_range(a: Array, dtype: Dtype, field: str) -> None:
    """Raise `QueryError` if ``dtype`` cannot hold some value of ``a``."""
    if dtype == "f16" and a.dtype != np.float16 and peak(a) > F16_MAX:
        raise QueryError(field, f"holds values above {F16_MAX:.0f}, the largest of f16")


def peak(a: Array) -> float:
    """The largest magnitude; NaN if there is one; 0 of nothing."""
    return max(float(a.max()), -float(a.min())) if a.size else 0.0


def fits_f32(query: Query, tokens: int, peak_k: float, peak_v: float) -> bool:
    """Whether no score and no weighted sum can leave float32, however the signs fall.

    By Cauchy and Schwarz a score is at most ‖q‖·‖k‖, and ‖k‖ at most √dim times its peak. Norms of
    whole arrays, one BLAS call each, stand for those of their rows and for their peaks.
    """
    if suffix := query.suffix:
        tokens += suffix.k.shape[1]
        peak_k += _norm(suffix.k)
        peak_v += _norm(suffix.v)
    scores = _norm(query.q) * max(query.softmax_scale, 1.0) * peak_k * query.q.shape[2] ** 0.5
    return scores < F32_SAFE and peak_v * tokens < F32_SAFE  # false where either is NaN


def _norm(a: Array) -> float:
    return math.sqrt(np.vdot(a, a))


@lru_cache(maxsize=256)
def kv_of_heads(head_map: bytes, heads: int, heads_kv: int) -> Array:
    """The K/V head of each query head."""
    if head_map:
        return np.frombuffer(head_map, np.uint8).astype(np.intp)
    return np.arange(heads) // (heads // heads_kv)


@lru_cache(maxsize=256)
def groups(head_map: bytes, heads: int, heads_kv: int, width: int) -> tuple[Group, ...]:
    """All query heads, in groups of at most ``width`` K/V heads.

    In grouped order a group is a pair of slices, and nothing is copied. Any other map is computed one
    K/V head at a time.
    """
    per_kv = heads // heads_kv
    kv_of = kv_of_heads(head_map, heads, heads_kv)
    if np.array_equal(kv_of, np.arange(heads) // per_kv):
        firsts = range(0, heads_kv, width)
        return tuple(
            Group(slice(first, first + width), slice(first * per_kv, (first + width) * per_kv))
            for first in firsts
        )
    return tuple(
        Group(slice(kv, kv + 1), np.flatnonzero(kv_of == kv)) for kv in sorted(set(kv_of.tolist()))
    )


class Reads(NamedTuple):
    """What all heads read of the prefix: spans, ascending, that do not touch; possibly none.

    ``visible``, bool [tokens of the one span], says which of them count; None where all do.
    """

    spans: list[Span]
    visible: Array | None = None

    def mask(self, suffix: int) -> Array | None:
        """``visible`` as a mask [1][tokens + suffix] of one row that sees the suffix whole."""
        if self.visible is None:
            return None
        mask: Array = np.pad(self.visible, (0, suffix), constant_values=True)[None]
        return mask


def reads(
    query: Query,
    resident: Resident,
    keys: Callable[[], Array],
    kept: Summaries,
    rows_per_span: int,
) -> Reads:
    """What all heads read of the prefix.

    ``keys()`` gives K [heads_kv][tokens][dim] on the host; called only if a summary is missing.
    ``rows_per_span`` is how many rows cost as much as one span more: where the spans are many and
    short, it is cheaper to read all and mask.
    """
    tokens = resident.tokens
    first = max(tokens - query.window, 0) if query.window else 0
    all_visible = Reads([Span(first, tokens)])
    if not isinstance(query, SparseAuto) or query.blocks * query.block_tokens >= tokens:
        return all_visible
    size = query.block_tokens
    kv_of = kv_of_heads(query.head_map, len(query.q), resident.heads)
    blocks = choose(query, keys, kept, kv_of, resident.heads)
    joins = np.diff(blocks) == 1  # a block with the one before it
    starts, lasts = blocks[np.r_[True, ~joins]], blocks[np.r_[~joins, True]]
    if len(starts) * rows_per_span > tokens - first:
        chosen = np.zeros(-(-tokens // size), bool)
        chosen[blocks] = True
        return all_visible._replace(visible=np.repeat(chosen, size)[first:tokens])
    begins, ends = np.maximum(starts * size, first), np.minimum((lasts + 1) * size, tokens)
    inside = begins < ends  # not wholly before the window
    pairs = zip(begins[inside].tolist(), ends[inside].tolist(), strict=True)
    return Reads([Span(*pair) for pair in pairs])


def steps(rows: int, step: int) -> list[slice]:
    """All rows, ``step`` (or at least 1) at a time."""
    step = max(step, 1)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def suffix_mask(some: slice, rows: int, suffix: int) -> Array | None:
    """What some rows see of the suffix, bool [len(some)][suffix]; None where all see all.

    ``some`` counts through the ``rows`` of one head after another.
    """
    if rows == 1 or suffix == 0:
        return None
    last_visible = max(suffix - rows, 0) + np.arange(some.start, some.stop) % rows
    mask: Array = np.arange(suffix) <= last_visible[:, None]
    return mask


class Picks(NamedTuple):
    """A `Sparse` query without the heads that see nothing, its positions padded to one width.

    ``heads`` [n] query heads, ``positions`` [n][width], ``used`` bool [n][width].
    """

    heads: Array
    positions: Array
    used: Array


def picks(query: Sparse, tokens: int) -> Picks:
    """The usable positions of each head, each once."""
    first = max(tokens - query.window, 0) if query.window else 0
    usable = []
    for named, count in zip(query.indices, query.counts.tolist(), strict=True):
        seen = np.unique(named[:count])
        usable.append(seen[(seen >= first) & (seen < tokens)])
    heads = np.array([head for head, seen in enumerate(usable) if len(seen)], np.intp)
    width = max((len(seen) for seen in usable), default=0)
    positions = np.zeros((len(heads), width), np.intp)
    used = np.zeros((len(heads), width), bool)
    for row, head in enumerate(heads):
        seen = usable[head]
        positions[row, : len(seen)] = seen
        used[row, : len(seen)] = True
    return Picks(heads, positions, used)
